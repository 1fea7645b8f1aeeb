"""What a user gets who asks for the impossible or whose data is damaged: one line, an exit code, never a traceback."""

import errno
import importlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MICRO, ROOT, micro_run, rank_exit_code, script, the_line
from run_files import contents, lines, require_equal_runs, saved_steps
from shard_damage import put_nan

import train
from flux_ref import cli, config, config_file, dataloader, rng
from flux_ref.cli import Refusal
from flux_ref.trainer import Trainer

CFG = config_file.load(MICRO)
MIDDLE = 20  # a sample that is neither the first nor the last of its shard, so opening does not meet it


@pytest.fixture
def dataset(shapes_dir, tmp_path):
    """A data set of one's own, to damage."""
    return Path(shutil.copytree(shapes_dir, tmp_path / "set"))


def has_words(line, *words):
    return all(str(word) in line for word in words)


# Requests that cannot be honoured


REQUESTS = {
    "--train.global_bacth=8": ["unknown key train.global_bacth", "train.global_batch"],
    "--optim.lr 1e-4": ["'--optim.lr'", "--section.key=value"],
    "--eval.batch=8 1e-4": ["'1e-4'", "a path comes first"],
    "--data.train=": ["data folder"],
    "--train.micro_batch=5": ["train.global_batch=12 is no multiple of 5", "train.micro_batch"],
    "--parallel.replicate=2": ["parallel.replicate=2", "1 rank"],
    "--data.val=/no/such/folder": ["/no/such/folder", "does not exist", "data.val"],
    "--data.val=/no/such\nfolder": ["/no/such", "folder", "does not exist"],
    "--model.t5_dim=30": ["t5_empty.npy", "float32 (9, 30)"],
    "--model.text_tokens=40": ["shard_000000.tar", "made for another model", "'t5': (40, 28)"],
}


def test_a_request_that_cannot_be_honoured_is_refused(attempt, shapes_dir, tmp_path):
    for number, (override, words) in enumerate(REQUESTS.items()):
        code, _, line = attempt(*micro_run(shapes_dir, tmp_path / str(number), *override.split(" ")))
        assert code == 2 and has_words(line, *words), line


def test_what_looks_impossible_but_is_not(attempt, tmp_path):
    odd = ["--model.t5_dim=27", "--model.clip_dim=13", "--model.rope_axes=[0, 4, 4]", "--eval.batch=1000"]
    short = ["--train.max_samples=12", "--data.workers=50", "--data.prefetch=1"]
    assert attempt(*micro_run(tmp_path / "new", tmp_path / "run"), *odd, *short)[::2] == (0, "")


def test_a_command_knows_its_default_in_any_folder_and_its_help_has_every_key(attempt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "DEFAULT", "")  # it comes back after the test
    importlib.reload(train)
    assert attempt("--train.bad=1")[2].startswith("unknown key train.bad")
    monkeypatch.setattr(train, "__doc__", None)  # as python -OO leaves it
    _, out, _ = attempt("--help")
    assert re.findall(r"^[* ] --(\w+\.\w+)=", out, re.M) == list(config.KEYS)


# Damaged data; test_shards.py and test_checkpoint.py have every kind of damage

SHARD = "train/shard_000000.tar"
DAMAGE = {  # words of the complaint: the exit code, how
    f"{SHARD} (19973 bytes) is truncated": (2, lambda d: os.truncate(d / SHARD, 19_973)),
    "empty_encodings/clip_empty.npy": (2, lambda d: (d / "empty_encodings/clip_empty.npy").unlink()),
    f"{SHARD}, sample 20: t5 holds NaN": (3, lambda d: put_nan(d, "train", MIDDLE)),
    "val/shard_000000.tar, sample 20: t5 holds NaN": (3, lambda d: put_nan(d, "val", MIDDLE)),
}


def test_damage_that_opening_finds_is_refused_and_damage_on_the_way_stops_the_run(attempt, shapes_dir, tmp_path):
    for number, (words, (want, damage)) in enumerate(DAMAGE.items()):
        dataset = Path(shutil.copytree(shapes_dir, tmp_path / str(number)))
        damage(dataset)
        code, _, line = attempt(*micro_run(dataset, dataset / "run"))
        assert code == want and words in line, line
        if code == 3:
            log = (dataset / "run" / "result_0.txt").read_text()
            assert '"run_stop"' in log and '"aborted"' in log and '"success"' not in log
            assert not (dataset / "run" / "outcome.json").exists()


def test_an_evaluation_that_fails_loses_no_step(attempt, shapes_dir, dataset, tmp_path):
    """checkpoint.every_samples is 0 there."""
    again = micro_run(dataset, tmp_path / "run")
    put_nan(dataset, "val", int(rng.order(0, 0, CFG.data.expected_val_samples)[-1]))  # opening meets others
    assert attempt(*again)[0] == 3 and saved_steps(tmp_path / "run") == [3]
    shutil.copy(shapes_dir / "val" / "shard_000000.tar", dataset / "val")
    assert attempt(*again)[0] == 0 and saved_steps(tmp_path / "run") == [3, 5]
    assert attempt(*micro_run(shapes_dir, tmp_path / "calm"))[0] == 0
    require_equal_runs(tmp_path / "run", tmp_path / "calm")


def test_a_loss_that_is_not_finite_stops_the_run(attempt, shapes_dir, tmp_path):
    code, _, line = attempt(*micro_run(shapes_dir, tmp_path / "run"), "--optim.lr=1e18", "--optim.warmup_steps=0")
    assert code == 3 and has_words(line, "not finite in step", "optim.lr"), line


# The run's folder, and eval.py


def test_a_finished_run_is_kept_and_what_does_not_fit_is_refused(attempt, shapes_dir, tmp_path):
    run = tmp_path / "run"
    again = micro_run(shapes_dir, run)
    assert attempt(*again)[0] == 0
    before = contents(run)
    for name, argv, words in (
        ("train.py", again, [run, "run.dir", "run.start_fresh=true"]),
        ("eval.py", [run, "--model.double_blocks=3"], ["missing", "double_blocks.1."]),
        ("eval.py", [tmp_path], [tmp_path, "give a run, a checkpoint"]),
    ):
        code, out, line = attempt(*argv, name=name)
        assert (code, out) == (2, "") and has_words(line, *words), line
    assert contents(run) == before
    assert attempt(*again, "--run.start_fresh=true", "--train.max_samples=12")[0] == 0
    assert contents(tmp_path / "run.1") == before and len(lines(run, "eval.jsonl")) == 1


def test_a_place_that_cannot_be_is_refused_in_words(attempt, shapes_dir, tmp_path):
    """Names that are too long and places below a file: the line has no number of an error."""
    (tmp_path / "file").touch()
    for place in (tmp_path / ("n" * 300), tmp_path / "file" / "below"):
        for argv in (micro_run(shapes_dir, place), micro_run(place, tmp_path / "run")):
            code, _, line = attempt(*argv)
            assert code == 2 and has_words(line, tmp_path) and "Errno" not in line, line


def test_a_port_in_use_is_refused(attempt, shapes_dir, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        group = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for name, value in (group | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        code, out, line = attempt(*micro_run(shapes_dir, tmp_path / "run"))
    assert (code, out) == (2, "") and has_words(line, port, "MASTER_PORT in use?"), line


def test_ctrl_c_before_the_first_step_ends_at_once_with_one_line_and_leaves_nothing(
    attempt, shapes_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(Trainer, "warm_up", lambda *_: signal.raise_signal(signal.SIGINT))
    code, _, line = attempt(*micro_run(shapes_dir, tmp_path / "run"))
    assert (code, line) == (130, "stopped by SIGINT") and not (tmp_path / "run").exists()


def test_each_kind_of_error_is_one_line_and_a_code_and_a_defect_is_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr(cli, "LINGER_S", 0.0)
    cases = (
        (KeyboardInterrupt(), 130, "x: stopped by SIGINT"),
        (Refusal("two\nlines\x1b"), 2, "x: two lines\\x1b"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b"), 2, "x: a/b: No such file; make it readable"),
        (OSError(errno.ENOSPC, "No space left", "a/b"), 3, "x: a/b: No space left; free or mend its disk"),
        (OSError(errno.ESTALE, "Stale file handle", "a/b"), 3, "x: a/b: Stale file handle; free or mend its disk"),
        (RuntimeError("CUDA out of memory. Tried\n..."), 3, "x: out of memory: CUDA out of memory. Tried; free"),
        (
            RuntimeError("No working C++ compiler found\n..."),
            2,
            "x: No working C++ compiler found; install gcc and g++",
        ),
        (RuntimeError("Connection closed by peer"), 3, "x: lost another rank: Connection closed by peer"),
        (RuntimeError("a defect"), 3, "Traceback"),
    )
    for error, code, line in cases:

        def work(_, error=error):
            raise error

        assert cli.run("x", work, []) == code
        said = capsys.readouterr().err
        assert said.startswith(line) and (said.count("\n") == 1 or line == "Traceback"), said


def test_one_rank_of_a_node_prints_the_line_and_a_rank_that_is_alone_with_its_error_says_so(capsys, monkeypatch):
    monkeypatch.setattr(cli, "LINGER_S", 0.0)
    for rank, alone, want in (
        ("1", False, ""),
        ("0", False, "train.py: bad key"),
        ("1", True, "train.py: rank 1: bad key"),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        cli.complain("train.py", Refusal("bad key", alone))
        assert capsys.readouterr().err.strip() == want


def test_a_terminal_that_goes_away_ends_nothing_and_a_full_disk_is_told(capfd, monkeypatch):
    """As in `train.py 2>&1 | tee log`, where Ctrl-C ends tee first, and in `report RUN > /dev/full`."""
    for opened in (os.pipe, os.openpty):
        reader, writer = opened()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            terminal = cli.BrokenPipeSafeStream(stream)
            print("lost", file=terminal, flush=True)
            print("lost, too", file=terminal, flush=True)
            assert terminal.fileno() == writer
    monkeypatch.setattr(sys, "stdout", None)  # as by `>&-`
    assert cli.run("x", lambda _: print("lost") or 7, []) == 7
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full, pytest.raises(OSError, match=r"No space left.*: '/dev/full'"):
            print("lost", file=cli.BrokenPipeSafeStream(full), flush=True)


def test_a_command_ends_with_its_code_whatever_becomes_of_what_it_says(tmp_path):
    """Streams that are full, closed at the start, or of an encoding that lacks a letter."""
    code = "import sys\nfrom flux_ref import cli\nfrom flux_ref.cli import Refusal\ndef task(argv):\n"
    code += "    print('café')\n    if argv: raise Refusal('no é')\n    return 0\n"
    code += "cli.exit_now(cli.run('x', task, sys.argv[1:]))"
    for more, streams, want, said in (
        ("", ">/dev/full", 3, "x: <stdout>: No space left on device; free or mend its disk, or give another path"),
        ("", ">/dev/full 2>&1", 3, ""),
        ("no", ">&-", 2, "x: no \\xe9"),
        ("", ">&- 2>&-", 0, ""),
        ("no", "2>&-", 2, "caf\\xe9"),
    ):
        shell = f"PYTHONIOENCODING=ascii {sys.executable} -c {shlex.quote(code)} {more} {streams}"
        done = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, (done.stdout + done.stderr).strip()) == (want, said), streams


# Two ranks


def met_by(rank):
    """A training sample that a rank of two meets first in step 1, and that opening does not meet."""
    order = rng.order(CFG.train.seed, 0, CFG.data.expected_train_samples)
    return next(int(order[p]) for p in dataloader.rank_slice(CFG, 1, rank, 2) if 0 < order[p] < 49)


@pytest.mark.slow
def test_two_ranks_speak_once(dataset):
    put_nan(dataset, "train", met_by(1))
    for code, override, words in (
        (2, "--train.global_batch=13", ["train.global_batch=13 is no multiple of 2, the number of ranks"]),
        (3, "--run.watchdog_s=60", ["rank 1", f"sample {met_by(1)}: t5 holds NaN"]),
    ):
        arguments = micro_run(dataset, dataset / "run", "--data.kind=embeddings", override)
        process = script("train.py", *arguments, ranks=2, timeout=60)
        assert has_words(the_line(process.stderr.partition("Traceback")[0]), *words), process.stderr
        assert process.returncode == 1 and rank_exit_code(process) == code
        assert process.stderr.count("Traceback") <= 1  # torchrun's own
