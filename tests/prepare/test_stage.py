"""Staging a data set, as `python -m tools.prepare stage SRC DST` does.

Nodes are forked processes here, each with a DST of its own; they write down what they read, sync and rename. The
last test launches the command itself.
"""

import argparse
import errno
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import torch.distributed as dist

from flux_ref.run import cli
from tools.prepare import stage

ROOT = Path(__file__).parents[2]
CHUNK = 4 << 10
ALONE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
FORKS = multiprocessing.get_context("forkserver")  # which has imported torch once
FORKS.set_forkserver_preload(["tools.prepare.stage", "pytest"])


# The data set


def make_set(folder: Path, seed: int = 1) -> Path:
    draw = random.Random(seed)
    sizes = {f"train/shard_{i:06d}.tar": draw.randrange(4 * CHUNK, 24 * CHUNK) for i in range(9)}
    sizes |= {"train/shard_000009.tar": 16 * CHUNK, "val/shard_000000.tar": 3 * CHUNK + 1, "val/empty.tar": 0}
    sizes |= {"train/.nv-meta/index.sqlite": 700, "empty_encodings/t5_empty.npy": CHUNK, "a name.txt": 5}
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(draw.randbytes(size))
    return folder


@pytest.fixture
def src(tmp_path) -> Path:
    return make_set(tmp_path / "shared" / "set")


def tree(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder, but for what staging itself keeps there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    sums = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {name: digest for name, digest in sums.items() if not name.startswith(".stage/")}


def require_copy(want: dict[str, str], dst: Path) -> None:
    """Identical files, and a manifest with all of them."""
    found = tree(dst)
    lines = (dst / "manifest.sha256").read_text().splitlines()
    if "manifest.sha256" not in want:
        del found["manifest.sha256"]
    assert found == want
    want = {name: digest for name, digest in want.items() if name != "manifest.sha256"}
    assert {line[66:]: line[:64] for line in lines} == want
    assert os.listdir(dst / ".stage") == []


def total(src: Path) -> int:
    return sum(path.stat().st_size for path in src.rglob("*") if path.is_file())


def write_manifest(src: Path) -> None:
    text = "".join(f"{digest}  {name}\n" for name, digest in tree(src).items())
    (src / "manifest.sha256").write_text(text)


def lasting(text: str) -> list[str]:
    """The lines of an output without those of progress bars."""
    lines = (line.rpartition("\r")[2] for line in text.split("\n"))
    return [line for line in lines if line.strip() and not re.search(r"\[\d\d:\d\d", line)]


# Nodes


def small(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Small chunks and few streams, for good or for one of them."""
    for name, value in {"CHUNK": CHUNK, "STREAMS": 4, "POLL_S": 0.02}.items():
        monkeypatch.setattr(stage, name, value) if monkeypatch else setattr(stage, name, value)


def node(src: Path, dst: Path, log: Path, env: dict[str, str], hook: Callable | None) -> None:
    """One node, in a process of its own."""
    for name in ALONE:
        os.environ.pop(name, None)
    os.environ |= env
    events, output = log.open("a"), log.with_suffix(".out").open("a")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)

    def note(*event: object) -> None:
        print(json.dumps(event, default=str), file=events, flush=True)

    def audit(event: str, args: tuple) -> None:
        if event == "os.rename":
            note(event, *args[:2])

    def recorded_fill(chunk, source, file):
        begin = source.tell()
        if hook:
            hook(source.name, begin)
        fill(chunk, source, file)
        note("read", source.name, begin, source.tell())

    def recorded_fsync(descriptor):  # a killed process loses nothing that it has written: no need to wait for the disk
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if hook:
            hook(path, None)
        note("fsync", path)

    small()
    fill, stage.fill, os.fsync, cli.LINGER_S = stage.fill, recorded_fill, recorded_fsync, 0.5
    sys.addaudithook(audit)
    cli.leave(stage.run(argparse.Namespace(src=src, dst=dst)))


@dataclass
class Outcome:
    """How nodes ended that staged at the same time."""

    codes: list[int]
    said: list[str]  # the lines that all of them printed
    events: list[list[list]]  # of each node: ["read", path, begin, end], ["fsync", path], ["os.rename", from, to]

    def reads(self) -> list[tuple[str, int, int]]:
        """The parts of SRC that were read: path, begin, end."""
        return sorted((path, *span) for events in self.events for kind, path, *span in events if kind == "read")


def launched(src: Path, *dsts: Path, hook: Callable | None = None, last_src: Path | None = None) -> Outcome:
    """A node for each DST. last_src: what the last node takes for SRC.

    hook: is called with path and offset before each chunk that is read, with path and None before each fsync.
    """
    # As under torchrun, the store outlives the nodes.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"WORLD_SIZE": len(dsts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    logs = [src.parent.parent / f"log_{time.monotonic_ns()}_{rank}" for rank in range(len(dsts))]
    sources = [src] * (len(dsts) - 1) + [last_src or src]
    processes = []
    for rank, (source, dst, log) in enumerate(zip(sources, dsts, logs)):
        own = {name: str(value) for name, value in (env | {"RANK": rank}).items()} if len(dsts) > 1 else {}
        processes.append(FORKS.Process(target=node, args=(source, dst, log, own, hook)))
        processes[-1].start()
    for process in processes:
        process.join(60)
    outputs = [log.with_suffix(".out") for log in logs]
    said = lasting("".join(path.read_bytes().decode() for path in outputs if path.exists()))
    assert None not in [process.exitcode for process in processes], said
    events = [
        [json.loads(line) for line in log.read_bytes().splitlines() if line.endswith(b"]")]  # a kill may cut one short
        for log in logs
    ]
    return Outcome([process.exitcode for process in processes], said, events)


class Strike:
    """A hook by which a node kills itself when it has read so many chunks. dst: and has a whole shard in it."""

    def __init__(self, chunks: int, rank: int = 0, dst: Path | None = None):
        self.left, self.rank, self.dst = chunks, str(rank), dst

    def __call__(self, path: str, offset: int | None) -> None:
        self.left -= offset is not None and os.environ.get("RANK", "0") == self.rank
        if self.left < 0 and (self.dst is None or any(self.dst.glob("train/*.tar"))):
            os.kill(os.getpid(), signal.SIGKILL)


def staged(src: Path, *dsts: Path) -> Outcome:
    """Nodes that have staged and found nothing wrong, to DSTs that are now whole."""
    outcome = launched(src, *dsts)
    assert outcome.codes == [0] * len(dsts), outcome.said
    want = tree(src)
    for dst in dsts:
        require_copy(want, dst)
    return outcome


@pytest.fixture
def here(monkeypatch, capsys) -> Callable:
    """Staging in this process: returns exit code and the lines that stay on a terminal."""
    small(monkeypatch)
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)

    def run(src: Path, dst: Path) -> tuple[int, list[str]]:
        code = stage.run(argparse.Namespace(src=src, dst=dst))
        captured = capsys.readouterr()
        return code, lasting(captured.out + captured.err)

    return run


# Copying


def test_one_node_gets_an_identical_copy_with_a_manifest(src, tmp_path, here):
    """Also of a user's file that has a name for unfinished files, as of earlier versions."""
    os.utime(src / "a name.txt", ns=(1, 10**18 + 7))
    (src / ".manifest.sha256.partial").write_text("of the user")
    code, lines = here(src, tmp_path / "dst")
    require_copy(tree(src), tmp_path / "dst")
    line = rf"\S+: 16 files, {total(src):,} bytes; read {total(src):,} bytes of \S+ in [\d.]+ s, [\d.]+ GB/s"
    assert code == 0 and len(lines) == 1 and re.fullmatch(line, lines[0])
    assert (tmp_path / "dst" / "a name.txt").stat().st_mtime_ns == 10**18 + 7
    command = ["sha256sum", "--check", "--strict", "--quiet", "manifest.sha256"]
    subprocess.run(command, cwd=tmp_path / "dst", check=True)
    assert here(tmp_path / "dst", tmp_path / "of the copy")[0] == 0
    require_copy(tree(tmp_path / "dst"), tmp_path / "of the copy")


def test_nodes_together_read_each_byte_of_the_source_once(src, tmp_path):
    before = tree(src)
    nodes = staged(src, *(tmp_path / f"dst{rank}" for rank in range(3)))
    assert tree(src) == before
    reads = nodes.reads()
    assert len(reads) == len(set(reads)) and sum(end - begin for _, begin, end in reads) == total(src)
    for events in nodes.events:
        assert len({path for kind, path, *_ in events if kind == "read"}) > 2, "all nodes read"
    assert len(nodes.said) == 1 and f"read {total(src):,} bytes" in nodes.said[0]


def test_a_file_is_on_the_disk_before_it_gets_its_name(src, tmp_path):
    (found,) = staged(src, tmp_path / "dst").events
    for path in (src / "train").glob("*.tar"):
        partial, final = (tmp_path / "dst" / folder / path.name for folder in (".stage/files/train", "train"))
        renamed = found.index(["os.rename", str(partial), str(final)])
        assert ["fsync", str(partial)] in found[:renamed]
        assert ["fsync", str(final.parent)] in found[renamed:]


# Stopping and going on


def test_a_killed_copy_goes_on_and_keeps_its_whole_files(src, tmp_path):
    dst = tmp_path / "dst"
    for chunks in (80, 40):
        nodes = launched(src, dst, hook=Strike(chunks, dst=dst))
        assert nodes.codes == [-signal.SIGKILL]
        whole = tree(dst)
        assert whole and whole.items() <= tree(src).items(), "what has its name is whole"
    reads = staged(src, dst).reads()
    assert reads and not {str(src / name) for name in whole} & {path for path, *_ in reads}


def test_when_a_node_is_killed_the_others_end_and_all_go_on_later(src, tmp_path):
    for victim in (0, 2):
        dsts = [tmp_path / f"{victim}_{rank}" for rank in range(3)]
        nodes = launched(src, *dsts, hook=Strike(40, victim))
        codes = nodes.codes
        assert codes.pop(victim) == -signal.SIGKILL and codes == [3, 3]
        assert ["lost another rank" in line for line in nodes.said] == [True, True], nodes.said
        whole = [tree(dst).items() for dst in dsts]
        assert all(found <= tree(src).items() for found in whole), "what has its name is whole"
        on_all = {str(src / name) for name, _ in whole[0] & whole[1] & whole[2]}
        reads = staged(src, *dsts).reads()
        assert reads and len(reads) == len(set(reads)) and not on_all & {path for path, *_ in reads}


def die_last(path: str, offset: int | None) -> None:
    """When the other node has done all that it has to do."""
    if os.environ["RANK"] == "1" and path.endswith(".stage/files/val/empty.tar"):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_node_that_is_killed_with_the_last_file_is_missed(src, tmp_path):
    nodes = launched(src, tmp_path / "0", tmp_path / "1", hook=die_last)
    assert nodes.codes == [3, -signal.SIGKILL]
    assert len(nodes.said) == 1 and "lost another rank" in nodes.said[0]
    assert not (tmp_path / "0" / "manifest.sha256").exists()
    assert not staged(src, tmp_path / "0", tmp_path / "1").reads()


# What is noticed


def test_what_is_not_as_it_was_staged_is_refused_by_name_and_left_alone(src, tmp_path, here):
    dst, name, wrong = tmp_path / "dst", "val/shard_000000.tar", []
    here(src, dst)
    changed = "or its source has changed since it was staged; remove it to stage it again"
    for root, file, problem in (
        (dst, name, changed),
        (src, name, changed),
        (dst, "train/own.tar", "is not in the source; remove it"),
    ):
        here(src, dst)
        (root / file).write_bytes(bytes(3 * CHUNK + 1))
        before = tree(dst)
        code, lines = here(src, dst)
        wrong += [lines] * (code != 2 or lines != [f"stage: {dst / file} {problem}"] or tree(dst) != before)
        (dst / file).unlink()
    assert wrong == [] and here(src, dst)[0] == 0
    require_copy(tree(src), dst)


def rewrite(path: str, offset: int | None) -> None:
    if path.endswith("shard_000009.tar") and offset == 8 * CHUNK:
        Path(path).write_bytes(bytes(16 * CHUNK))


def fill_up(path: str, offset: int | None) -> None:
    if path.endswith(".stage/files/val/shard_000000.tar") and os.environ["RANK"] == "1":
        raise OSError(errno.ENOSPC, "No space left on device")


def exhaust(path: str, offset: int | None) -> None:
    if offset and os.environ["RANK"] == "1":
        raise MemoryError


def test_what_breaks_on_one_node_ends_all_with_one_line_and_goes_on_later(src, tmp_path):
    wrong = []
    for hook, line in (
        (rewrite, rf"node [01] \(\S+\): {src}/train/shard_000009.tar changed while it was copied; start again .*"),
        (exhaust, r"node 1 \(\S+\): copying \S+ to \S+/1: out of memory"),
        (fill_up, r"node 1 \(\S+\): copying val/shard_000000.tar to \S+/1: .*No space left on device.*"),
    ):
        dsts = [tmp_path / hook.__name__ / str(rank) for rank in range(2)]
        nodes = launched(src, *dsts, hook=hook)
        codes, said = nodes.codes, nodes.said
        wrong += [said] * (codes != [3, 3] or len(said) != 1 or not re.fullmatch(f"stage: {line}", said[0]))
        staged(src, *dsts)
        assert wrong == []


def test_no_stream_outlives_the_failure_of_another(src, tmp_path, here, monkeypatch):
    """The end of the process group under a stream aborts the process."""
    real, name = stage.fill, "train/shard_000009.tar"

    def slow(chunk: memoryview, source: IO, file: stage.File) -> None:
        if file.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", source.name)
        time.sleep(0.1)
        real(chunk, source, file)

    monkeypatch.setattr(stage, "fill", slow)
    code, (line,) = here(src, tmp_path / "dst")
    assert code == 3 and f"copying {name} to {tmp_path}/dst: {src}/{name}: Permission denied; make it readable" in line
    assert not [thread for thread in threading.enumerate() if isinstance(thread, stage.Stream)]


def test_a_manifest_is_copied_and_a_byte_that_it_does_not_allow_is_noticed_on_all_nodes(src, tmp_path):
    write_manifest(src)
    staged(src, tmp_path / "good")
    name, dsts = "train/shard_000004.tar", [tmp_path / "0", tmp_path / "1"]
    content = bytearray((src / name).read_bytes())
    content[2 * CHUNK + 5] ^= 1
    (src / name).write_bytes(content)
    nodes = launched(src, *dsts)
    assert nodes.codes == [3, 3]
    (line,) = nodes.said
    assert re.fullmatch(rf"stage: node [01] \(\S+\): {name} is damaged: its sha256 is \w+, want \w+", line)
    assert not any((dst / name).exists() for dst in dsts)


def test_copies_that_differ_between_nodes_are_refused(src, tmp_path):
    """Size and time are right, so that only checksums can tell."""
    staged(src, tmp_path / "0", tmp_path / "1")
    copy = tmp_path / "1" / "a name.txt"
    before = copy.stat().st_mtime_ns
    copy.write_bytes(b"other")
    os.utime(copy, ns=(before, before))
    nodes = launched(src, tmp_path / "0", tmp_path / "1")
    assert nodes.codes == [2, 2]
    assert len(nodes.said) == 1 and "manifest.sha256 differs between ranks" in nodes.said[0]


# What is refused


def make(name: str | bytes, how: Callable[[Path], object] = Path.touch) -> Callable[[Path], object]:
    return lambda src: how(src / os.fsdecode(name))


def manifest(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Write a manifest that does not fit."""

    def spoil(src: Path) -> None:
        write_manifest(src)
        (src / "manifest.sha256").write_text(change((src / "manifest.sha256").read_text()))

    return spoil


ODD = "train/odd is a link or special file"
REFUSED = [  # what is done to shared/set, SRC and DST below shared/, words of the line
    (None, "set", "set", "lie inside each other"),
    (None, "set", "set/train/copy", "lie inside each other"),
    (None, "set/train", "set", "lie inside each other"),
    (make("../link", lambda path: path.symlink_to("set")), "set", "link/copy", "lie inside each other"),
    (None, "missing", "dst", "does not exist"),
    (None, "set/a name.txt", "dst", "or is no folder"),
    (make("../nothing/folder", lambda path: path.mkdir(parents=True)), "nothing", "dst", "holds no file"),
    (make("../file"), "set", "file", "Not a directory"),
    (make("train/odd", os.mkfifo), "set", "dst", ODD),
    (make("train/odd", lambda path: path.symlink_to("shard_000000.tar")), "set", "dst", ODD),
    (make("train/odd", lambda path: path.symlink_to("../val")), "set", "dst", ODD),
    *((make(name), "set", "dst", "rename it") for name in (b"new\nline.tar", b"back\\slash.tar", b"\xff.tar")),
    (manifest(lambda text: f"{text}{'0' * 63}  a\n"), "set", "dst", "line 16: not a line of sha256sum"),
    (manifest(lambda text: text + text.splitlines()[0]), "set", "dst", "line 16: not a line of sha256sum"),
    (manifest(lambda text: f"{text}{'0' * 64}  gone.tar\n"), "set", "dst", "only one of them has gone.tar"),
    (manifest(lambda text: text.partition("\n")[2]), "set", "dst", "only one of them has a name.txt"),
]


def test_what_makes_no_sense_is_refused_in_one_line_and_changes_nothing(src, here):
    wrong = []
    for change, source, destination, words in REFUSED:
        shutil.rmtree(src.parent)
        make_set(src)
        if change:
            change(src)
        before = sorted(src.parent.rglob("*"))
        code, lines = here(src.parent / source, src.parent / destination)
        is_refused = code == 2 and len(lines) == 1 and words in lines[0]
        wrong += [lines] * (not is_refused or sorted(src.parent.rglob("*")) != before)
    assert wrong == []


def test_too_little_space_is_refused_with_figures_but_what_is_there_needs_none(src, tmp_path, here, monkeypatch):
    here(src, tmp_path / "whole")
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda _: argparse.Namespace(free=200_000))
    code, (line,) = here(src, tmp_path / "dst")
    assert code == 2 and re.search(r"/dst on \S+ has 0.000 GB free, but 0.001 GB are missing", line)
    assert here(src, tmp_path / "whole")[0] == 0


def test_nodes_with_other_sources_or_a_shared_destination_are_refused_in_one_line(src, tmp_path):
    missing, other, wrong = tmp_path / "missing", make_set(tmp_path / "other", seed=2), []
    for folder, last_src, line in (
        ("1", missing, rf"rank 1: source {missing} on \S+ does not exist or is no folder"),
        ("1", other, "node 1 sees other files .*"),
        ("0", src, r"(rank 1: )?\S+ is being staged by another job \((an unknown )?process.*\); every node .*"),
    ):
        nodes = launched(src, tmp_path / "0", tmp_path / folder, last_src=last_src)
        codes, said = nodes.codes, nodes.said
        wrong += [said] * (codes != [2, 2] or len(said) != 1 or not re.fullmatch(f"stage: {line}", said[0]))
    assert wrong == []


def test_more_than_one_process_per_node_is_refused_with_the_remedy(src, tmp_path, here, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    code, lines = here(src, tmp_path / "dst")
    assert code == 2 and len(lines) == 1 and "torchrun --nproc-per-node 1" in lines[0]


@pytest.mark.slow
def test_two_launchers_stage_as_one_job(src, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name not in ALONE}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    jobs = []
    for rank in range(2):
        launch = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}", "--master-addr=127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, f"--master-port={port}"]
        command += ["-m", "tools.prepare", "stage", str(src), str(tmp_path / str(rank))]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    (said, errors), (silent, _) = (job.communicate(timeout=90) for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0], errors
    assert f"read {total(src):,} bytes" in said and not silent
    for dst in (tmp_path / "0", tmp_path / "1"):
        require_copy(tree(src), dst)
