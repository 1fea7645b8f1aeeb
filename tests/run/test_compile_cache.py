"""parallel.compile_cache: what is refused; the file is whole or missing; a second start compiles no graph."""

import os
import re
import signal
import stat
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import MICRO, micro_run, refusal, script
from torch._inductor.utils import clear_caches
from torch.compiler._cache import CacheArtifactManager

from flux_ref import config, config_file, ranks
from flux_ref.formats import claim, files
from flux_ref.run import compile_cache

CONTENT = b"what torch saved" * 100


def test_a_file_that_is_not_ours_and_whole_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "cache"

    def made(change: Callable[[], object]) -> str:
        files.remove(path)
        compile_cache.write(path, CONTENT)
        change()
        return refusal(compile_cache.read, path)

    cases = {
        "mode 620; it is code": lambda: path.chmod(0o620),
        "mode 602; it is code": lambda: path.chmod(0o602),
        f"belongs to user {os.geteuid()} with": lambda: monkeypatch.setattr(os, "geteuid", lambda: 12345),
        "Is a directory": lambda: (path.unlink(), path.mkdir()),
        "is not a regular file": lambda: (path.unlink(), os.mkfifo(path)),
        "is damaged": lambda: path.write_bytes(path.read_bytes()[:-1]),
        "is damaged or": lambda: path.write_bytes(path.read_bytes() + b"x"),
        "is damaged or no": lambda: path.write_bytes(b"\x80\x04garbage"),
        "is damaged or no compile cache": lambda: path.write_bytes(b""),
    }
    wrong = {}
    for words, change in cases.items():
        complaint = made(change)
        wrong |= {} if words in complaint and "parallel.compile_cache" in complaint else {words: complaint}
        monkeypatch.undo()
    assert not wrong
    assert "is no folder that you may write" in refusal(compile_cache.read, tmp_path / "no" / "cache")


def test_a_file_appears_whole_or_not_at_all_and_only_its_owner_may_read_it(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    assert compile_cache.read(path) == b"", "a missing file holds nothing"
    for before in (None, "whole"):  # without and with an older file
        child = os.fork()
        if not child:
            monkeypatch.setattr(files, "sync", lambda path: os.kill(os.getpid(), signal.SIGKILL))
            compile_cache.write(path, b"other")
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert (tmp_path / ".cache.partial").exists() and path.exists() == bool(before)
        compile_cache.write(path, CONTENT)
        assert compile_cache.read(path) == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
    with claim.take(tmp_path / ".cache.claim"):  # another node writes it
        compile_cache.write(path, b"other")
    assert compile_cache.read(path) == CONTENT and not (tmp_path / ".cache.partial").exists()


def test_a_start_has_a_folder_of_its_own_which_ends_with_it(tmp_path, monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    cfg, world = config.Config(), ranks.start(config.ParallelConfig())
    with_file = config_file.replace(cfg, parallel__compile=True, parallel__compile_cache="file")
    cases = ((cfg, "", True), (cfg, "mine", False), (with_file, "mine", True))  # what the user set; whether it is ours
    for given_cfg, given, is_ours in cases:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        before = {name: os.environ.get(name) for name in names}
        with ExitStack() as stack:
            compile_cache.own_folder(given_cfg, world, stack)
            (own,) = tmp_path.iterdir()
            assert (stat.S_IMODE(own.stat().st_mode), own.stat().st_uid) == (0o700, os.geteuid())
            assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(own)
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (f"{own}/code" if is_ours else given)
            assert os.environ["TRITON_CACHE_DIR"] == "mine"
        assert list(tmp_path.iterdir()) == [] and tempfile.gettempdir() == str(tmp_path)
        assert {name: os.environ.get(name) for name in names} == before
    ranks.stop()


def test_a_config_whose_file_would_stay_empty_is_refused():
    for overrides, words in (
        (["--parallel.compile_cache=f"], "parallel.compile_cache=f needs parallel.compile=true"),
        (["--parallel.compile=true", "--parallel.compile_cache=f", "--train.synthetic_steps=0"], "synthetic_steps"),
    ):
        assert words in refusal(config_file.load, MICRO, overrides)


def scaled(factor: float) -> type[torch.autograd.Function]:
    """A function with a backward of its own, as FP8's products are."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * factor

    return Scaled


@pytest.mark.slow
def test_a_second_start_compiles_no_graph_and_another_function_is_not_mistaken(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # given back at the end
    cfg = config_file.load(MICRO, ["--parallel.compile=true", f"--parallel.compile_cache={tmp_path}/cache"])
    world = ranks.start(cfg.parallel)
    path = compile_cache.file_of(cfg, world)

    def warm_up(task: Callable[[], object]) -> str:
        with ExitStack() as stack:
            compile_cache.own_folder(cfg, world, stack)
            line = compile_cache.warm_up(SimpleNamespace(warm_up=task), cfg, world)
            compiled = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert not compiled.exists() and str(compiled) not in os.environ.values()
        return line

    def start(factor: float) -> tuple[str, float]:
        torch._dynamo.reset()
        clear_caches()
        CacheArtifactManager.clear()  # as in a new process
        x = torch.ones(32, requires_grad=True)
        run = torch.compile(lambda x: scaled(factor).apply(x.sin()).cos())
        return warm_up(lambda: run(x).sum().backward()), float(x.grad[0])

    try:
        first, gradient = start(3.0)
        assert first == f"compiler: 0 graphs taken from {path}, 2 compiled and added"
        inode = path.stat().st_ino
        assert start(3.0) == (f"compiler: 2 graphs taken from {path}, 0 compiled and added", gradient)
        assert path.stat().st_ino == inode, "nothing to add"
        line, other = start(5.0)
        assert other == pytest.approx(gradient * 5 / 3) and "0 compiled" not in line
        CacheArtifactManager.clear()
        assert "torch's cache is off" in refusal(warm_up, lambda: None)
    finally:
        ranks.stop()
        torch._dynamo.reset()


@pytest.mark.nightly
def test_a_run_compiles_nothing_that_prepare_cache_has_compiled(shapes_dir, tmp_path):
    """prepare cache has one region of each kind; the run's net is deeper, on another number of ranks.

    eval.py compiles anew. Nothing is left in the temporary folder.
    """
    (tmp_path / "tmp").mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": ""}
    switches = ("--parallel.compile=true", f"--parallel.compile_cache={tmp_path}/cache", "--eval.batch=6")
    made = script("tools/prepare/__main__.py", "cache", "--ranks=2", MICRO, *switches, ranks=0, timeout=600, **own)
    assert made.returncode == 0, made.stderr[-2000:]
    ran = script("train.py", *micro_run(shapes_dir, tmp_path / "run", *switches), ranks=2, timeout=600, **own)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert re.search(rf"[1-9]\d* graphs taken from {tmp_path}/cache\.chosen_by_torch\.0, 0 compiled", ran.stdout)
    assert not list(tmp_path.glob(".cache*"))
    evaluated = script("eval.py", str(tmp_path / "run"), "--json", ranks=0, timeout=600, **own)
    assert evaluated.returncode == 0, evaluated.stderr[-2000:]
    assert [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchelastic_")] == []
    assert sorted(path.name for path in tmp_path.glob("cache.*")) == [f"cache.chosen_by_torch.{i}" for i in range(2)]
