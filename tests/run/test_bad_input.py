"""What a user gets who asks for the impossible or whose data is damaged: one line, an exit code, never a traceback."""

import errno
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from conftest import MICRO, called, micro_run, rank_exit_code, script, the_line
from run_files import lines
from shard_damage import put_nan
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import train
from flux_ref import config, config_file, data, errors, rng, shards
from flux_ref.errors import Refusal
from flux_ref.step_runner import StepRunner

CFG = config_file.load(MICRO)
LAYOUT = shards.layout(CFG.model)
MIDDLE = 20  # a sample that is neither the first nor the last of its shard, so opening does not meet it


# Damage; a data set is a folder of train/, val/ and empty_encodings/ with one shard each


def shard(folder: Path, split: str = "train") -> Path:
    return folder / split / "shard_000000.tar"


def truncate(path: Path, size: int) -> None:
    assert path.stat().st_size > size
    os.truncate(path, size)


@pytest.fixture
def dataset(shapes_dir, tmp_path) -> Path:
    """A data set of one's own, to damage."""
    return Path(shutil.copytree(shapes_dir, tmp_path / "set"))


def has_words(line: str, *words: object) -> bool:
    return all(str(word) in line for word in words)


# Requests that cannot be honoured


REQUESTS = {
    "--train.global_bacth=8": ["unknown key train.global_bacth", "train.global_batch"],
    "--train.seed": ["--train.seed", "--section.key=value", "as in --optim.lr=1e-4"],
    "--optim.lr 1e-4": ["'--optim.lr'", "--section.key=value"],
    "--eval.batch=8 1e-4": ["'1e-4'", "a file or a folder comes first"],
    "--data.train=": ["data folder"],
    "--train.micro_batch=5": ["train.global_batch=12", "train.micro_batch=5", "use a multiple of 5"],
    "--parallel.replicate=2": ["parallel.replicate=2", "1 rank"],
    "--data.val=/no/such/folder": ["/no/such/folder", "does not exist", "data.val"],
    "--data.val=/no/such\nfolder": ["/no/such", "folder", "does not exist"],
    "--data.empty=/no/such/folder": ["/no/such/folder/t5_empty.npy"],
    "--model.t5_dim=30": ["shard_000000.tar", "want uint16 (9, 30)"],
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


def test_help_is_the_usage_and_every_key_with_its_default_and_comment(capsys):
    for argument in ("-h", "--help"):
        assert errors.run("train.py", train.main, [argument]) == 0
        out = capsys.readouterr().out
        assert "Exit codes" in out and not [line for line in out.splitlines() if len(line) > 120]
    assert re.findall(r"^[* ] --(\w+\.\w+)=", out, re.M) == list(config.KEYS)
    assert "\n* --eval.target=0.586\n      stop once the validation loss is at most this; 0: never; from 0 to" in out
    assert "\n  --train.seed=0\n      seed of every random number in training and validation;" in out


# Damaged data; test_shards.py and test_checkpoint.py have every kind of damage

DAMAGE = {  # how, exit code, words of the complaint
    "truncated": (lambda d: truncate(shard(d), 3 * LAYOUT.stride + 5), 2, ["train/shard_000000.tar", "truncated"]),
    "no encoding": (lambda d: (d / "empty_encodings/clip_empty.npy").unlink(), 2, ["clip_empty.npy"]),
    "NaN on the way": (
        lambda d: put_nan(d, "train", MIDDLE),
        3,
        ["train/shard_000000.tar, sample 20: t5 holds NaN"],
    ),
    "NaN in validation": (
        lambda d: put_nan(d, "val", MIDDLE),
        3,
        ["val/shard_000000.tar, sample 20: t5 holds NaN"],
    ),
}


def test_damage_that_opening_finds_is_refused_and_damage_on_the_way_stops_the_run(attempt, shapes_dir, tmp_path):
    wrong = {}
    for name, (damage, want, words) in DAMAGE.items():
        dataset = Path(shutil.copytree(shapes_dir, tmp_path / name))
        damage(dataset)
        code, _, line = attempt(*micro_run(dataset, dataset / "run"))
        if code != want or not has_words(line, *words):
            wrong[name] = code, line
        if code == 3:
            log = (dataset / "run" / "result_0.txt").read_text()
            assert '"run_stop"' in log and '"aborted"' in log and '"success"' not in log
            assert not (dataset / "run" / "outcome.json").exists()
    assert not wrong


def test_a_loss_that_is_not_finite_stops_the_run(attempt, shapes_dir, tmp_path):
    code, _, line = attempt(*micro_run(shapes_dir, tmp_path / "run"), "--optim.lr=1e18", "--optim.warmup_steps=0")
    assert code == 3 and has_words(line, "not finite in step", "optim.lr"), line


# The run's folder, and eval.py


@pytest.fixture(scope="module")
def finished(shapes_dir, tmp_path_factory) -> Path:
    """The folder of a finished run; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert called("train.py", *micro_run(shapes_dir, folder)) == 0
    return folder


def test_a_run_is_not_overwritten_unless_asked(attempt, shapes_dir, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, _, line = attempt(*micro_run(shapes_dir, folder))
    assert code == 2 and has_words(line, folder, "run.dir", "run.overwrite=true"), line
    assert {path: path.read_bytes() for path in before} == before

    assert attempt(*micro_run(shapes_dir, folder), "--run.overwrite=true", "--train.max_samples=12")[0] == 0
    assert all(
        (tmp_path / "run.1" / path.relative_to(folder)).read_bytes() == content for path, content in before.items()
    )
    assert len(lines(folder, "eval.jsonl")) == 1
    assert config_file.load(folder / "config.toml").run.overwrite is False


def test_eval_of_a_damaged_run_or_with_an_override_that_does_not_fit_is_refused(attempt, finished, tmp_path):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    saved = copy / "checkpoints" / "step_000000005"
    truncate(saved / "rank_00000_000.safetensors", 9)
    cases = [((copy,), [f"{saved}/rank_00000_000.safetensors", "is missing or damaged"])]
    cases.append(((finished, "--model.double_blocks=3"), ["missing", "double_blocks.2."]))
    cases.append(((finished, "--eval.bacth=3"), ["eval.batch"]))
    for argv, words in cases:
        code, out, line = attempt(*argv, name="eval.py")
        assert (code, out) == (2, "") and has_words(line, *words), line
    for folder in (tmp_path, tmp_path / "none"):
        code, _, line = attempt(folder, name="eval.py")
        assert code == 2 and has_words(line, folder, "give a run, a checkpoint"), line


def test_a_place_that_cannot_be_is_refused_in_words(attempt, shapes_dir, tmp_path):
    """Names that are too long and places below a file: the line has no number of an error."""
    (tmp_path / "file").touch()
    told = []
    for place in (tmp_path / ("n" * 300), tmp_path / "file" / "below"):
        for argv in (micro_run(shapes_dir, place), micro_run(place, tmp_path / "run")):
            told.append(attempt(*argv)[::2])
        told.append(attempt(place, name="eval.py")[::2])
    assert [pair for pair in told if pair[0] != 2 or "Errno" in pair[1] or str(tmp_path) not in pair[1]] == []
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused(attempt, shapes_dir, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        group = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for name, value in (group | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        code, out, line = attempt(*micro_run(shapes_dir, tmp_path / "run"))
    assert (code, out) == (2, "") and has_words(line, f"127.0.0.1:{port}", "port in use"), line


def test_ctrl_c_before_the_first_step_ends_at_once_with_one_line_and_leaves_nothing(
    attempt, shapes_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(StepRunner, "warm_up", lambda _: signal.raise_signal(signal.SIGINT))
    code, _, line = attempt(*micro_run(shapes_dir, tmp_path / "run"))
    assert (code, line) == (130, "stopped by SIGINT") and not (tmp_path / "run").exists()


def test_each_kind_of_error_is_one_line_and_a_code_and_a_defect_is_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr(errors, "LINGER_S", 0.0)
    cases = (
        (KeyboardInterrupt(), 130, "x: stopped by SIGINT"),
        (Refusal("two\nlines\x1b"), 2, "x: two lines\\x1b"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b"), 2, "x: a/b: No such file; make it readable"),
        (OSError(errno.ENOSPC, "No space left", "a/b"), 3, "x: a/b: No space left; free its disk"),
        (RuntimeError("CUDA out of memory. Tried\n..."), 3, "x: out of memory: CUDA out of memory. Tried; free"),
        (RuntimeError("Connection closed by peer"), 3, "x: lost another rank: Connection closed by peer"),
        (RuntimeError("a defect"), 3, "Traceback"),
    )
    for error, code, line in cases:

        def work(_: list[str], error: BaseException = error) -> int:
            raise error

        assert errors.run("x", work, []) == code
        said = capsys.readouterr().err
        assert said.startswith(line) and (said.count("\n") == 1 or line == "Traceback"), said


def test_torchrun_is_told_the_line_by_the_rank_that_prints_it(monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "LINGER_S", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for rank, alone, want in ((0, False, "train.py: bad key"), (1, True, "train.py: rank 1: bad key"), (1, False, "")):
        path = tmp_path / f"{rank} {alone}"
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        errors.complain("train.py", Refusal("bad key", alone))
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=str(path))
        report = ChildFailedError("train.py", {rank: failure}).format_msg()
        assert (f"\n  traceback : {want}\n====" in report) == bool(want) and path.exists() == bool(want)


def test_a_terminal_that_goes_away_ends_nothing_and_a_full_disk_is_named(capfd):
    """As in `train.py 2>&1 | tee log`, where Ctrl-C ends tee first, and in `report RUN > /dev/full`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        terminal = errors.Terminal(stream)
        print("lost", file=terminal, flush=True)
        print("lost, too", file=terminal, flush=True)
        assert terminal.fileno() == writer
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full, pytest.raises(OSError, match="'/dev/full'"):
            print("lost", file=errors.Terminal(full), flush=True)


# Two ranks


def met_by(rank: int, step: int = 1) -> int:
    """A training sample that a rank of two meets first in a step, and that opening does not meet."""
    order = rng.order(CFG.train.seed, 0, CFG.data.train_count)
    return next(int(order[p]) for p in data.rank_slice(CFG, step, rank, 2) if 0 < order[p] < 49)


ON_TWO_RANKS = {
    "batch": (
        2,
        "--train.global_batch=13",
        lambda d: None,
        ["train.global_batch=13", "2 ranks", "use a multiple of 2"],
    ),
    "no folder": (2, "--data.train=/no/such/folder/train", lambda d: None, ["/no/such/folder"]),
    "NaN": (3, "--run.hang_s=60", lambda d: put_nan(d, "train", met_by(1)), ["rank 1", f"sample {met_by(1)}:", "NaN"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("code, override, damage, words", ON_TWO_RANKS.values(), ids=ON_TWO_RANKS)
def test_two_ranks_speak_once(code, override, damage, words, dataset):
    damage(dataset)
    arguments = micro_run(dataset, dataset / "run", "--data.kind=embeddings", override)
    process = script("train.py", *arguments, ranks=2, timeout=60)
    said, _, report = process.stderr.partition("Root Cause")
    assert has_words(the_line(said.partition("Traceback")[0]), *words), process.stderr
    assert has_words(report.splitlines()[-2], "traceback : train.py: ", *words), "torchrun ends with the same line"
    assert process.returncode == 1 and rank_exit_code(process) == code
    assert process.stderr.count("Traceback") <= 1  # torchrun's own
