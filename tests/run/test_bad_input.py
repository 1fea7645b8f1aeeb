"""What a user gets who asks for the impossible or whose data is damaged: one line, an exit code, never a traceback."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, PYTHONPATH, ROOT, called, data_overrides, micro_run, rank_exit_code, script, the_line
from run_files import column, lines

from flux_ref import config_file, data, rng
from flux_ref.formats import checkpoint_files, shard_writer, shards
from flux_ref.formats.shards import BLOCK, END_BYTES, NPY_HEADER
from flux_ref.run import cli

CFG = config_file.load(MICRO)
LAYOUT = shards.layout(CFG.model)
MIDDLE = 20  # a sample that is neither the first nor the last of its shard, so opening does not meet it
NAN = b"\xc0\x7f"  # as bf16 bits


# Damage; a data set is a folder of train/, val/ and empty_encodings/ with one shard each


def shard(folder: Path, split: str = "train") -> Path:
    return folder / split / "shard_000000.tar"


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def put_nan(folder: Path, split: str, sample: int = MIDDLE) -> None:
    """Make the first value of a sample's T5 encoding NaN."""
    overwrite(shard(folder, split), sample * LAYOUT.stride + 3 * BLOCK + NPY_HEADER, NAN)


def put_dtype(folder: Path, split: str, sample: int, dtype: bytes = b"<f2") -> None:
    """Make a sample's T5 encoding claim another dtype of the same size."""
    header = sample * LAYOUT.stride + 3 * BLOCK
    place = shard(folder, split).read_bytes().index(b"<u2", header)
    overwrite(shard(folder, split), place, dtype)


def put_timestep(folder: Path, timestep: bytes, sample: int = MIDDLE) -> None:
    """Replace the digit of a validation sample's timestep by something as long."""
    begin = sample * LAYOUT.stride + BLOCK
    text = shard(folder, "val").read_bytes()[begin : begin + BLOCK]
    old = re.search(rb'"timestep": \d', text)[0]
    assert len(timestep) <= len(old)
    overwrite(shard(folder, "val"), begin, text.replace(old, timestep.ljust(len(old))))


def truncate(path: Path, size: int) -> None:
    assert path.stat().st_size > size
    os.truncate(path, size)


def put_other_shapes(folder: Path) -> None:
    """Replace the training samples by some with a wider T5, which padding hides from the size."""
    layout = shards.layout(config_file.replace(CFG, model__t5_dim=30).model)
    zeros = shard_writer.Sample({name: np.zeros(shape, np.uint16) for name, shape in layout.shapes.items()})
    shutil.rmtree(folder / "train")
    shard_writer.write(folder / "train", [zeros] * 50, "train")


def replace_by_dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone.tar"))


@pytest.fixture
def dataset(shapes_dir, tmp_path) -> Path:
    """A data set of one's own, to damage."""
    return Path(shutil.copytree(shapes_dir, tmp_path / "set"))


def has_words(line: str, *words: object) -> bool:
    return all(str(word) in line for word in words)


# Requests that cannot be honoured


REQUESTS = {
    "--train.global_bacth=8": ["unknown key train.global_bacth", "train.global_batch"],
    "--train=8": ["train is a section", "train.seed"],
    "--train.seed=1.5": ["train.seed=1.5", "an integer"],
    "--train.seed": ["--train.seed", "--section.key=value"],
    "--optim.lr=nan": ["optim.lr=nan", "finite"],
    "--parallel.dtype=fp16": ["parallel.dtype='fp16'", "bf16, fp32"],
    "--train.micro_batch=5": ["train.global_batch=12", "train.micro_batch=5", "use 10 or 15"],
    "--parallel.replicate=2": ["parallel.replicate=2", "1 rank"],
    "--data.val=/no/such/folder": ["/no/such/folder", "does not exist", "data.val"],
    "--data.train=/no/such/train": ["/no/such/train", "does not exist", "data.train"],
    "--data.val=/no/such\nfolder": ["/no/such", "folder", "does not exist"],
    "--data.empty=/no/such/folder": ["/no/such/folder/t5_empty.npy"],
    "--model.t5_dim=30": ["shard_000000.tar", "t5 is uint16 (9, 28), want uint16 (9, 30)"],
    "--model.text_tokens=40": ["shard_000000.tar", "truncated or foreign"],
}


def test_a_request_that_cannot_be_honoured_is_refused(attempt, shapes_dir, tmp_path):
    for number, (override, words) in enumerate(REQUESTS.items()):
        code, _, line = attempt(*micro_run(shapes_dir, tmp_path / str(number), override))
        assert code == 2 and has_words(line, *words), line


def test_what_looks_impossible_but_is_not(attempt, tmp_path):
    odd = ["--model.t5_dim=27", "--model.clip_dim=13", "--model.rope_axes=[0, 4, 4]", "--eval.batch=1000"]
    short = ["--train.max_samples=12", "--data.workers=50", "--data.prefetch=1"]
    assert attempt(*micro_run(tmp_path / "new", tmp_path / "run"), *odd, *short)[::2] == (0, "")


def test_a_config_that_cannot_be_read_is_refused(attempt, tmp_path):
    (tmp_path / "some.toml").write_text("train.seed 3")
    for name, words in (("none.toml", ["No such file"]), ("some.toml", ["not valid TOML", "line 1"])):
        code, _, line = attempt(tmp_path / name)
        assert code == 2 and has_words(line, *words), line


def test_help_is_the_usage(capsys):
    import train

    for argument in ("-h", "--help"):
        assert cli.run("train.py", train.__doc__, train.main, [argument]) == 0
        assert "Exit codes" in capsys.readouterr().out


# Damaged data

FOUND_ON_OPENING = {
    "missing folder": (lambda d: shutil.rmtree(d / "val"), ["/set/val", "does not exist"]),
    "empty folder": (lambda d: shard(d).unlink(), ["/set/train", "no *.tar"]),
    "truncated": (lambda d: truncate(shard(d), 3 * LAYOUT.stride + 5), ["train/shard_000000.tar", "truncated"]),
    "fewer samples": (lambda d: truncate(shard(d), 3 * LAYOUT.stride + END_BYTES), ["train", "3 samples"]),
    "empty file": (lambda d: truncate(shard(d, "val"), 0), ["val/shard_000000.tar", "0 bytes"]),
    "other shapes": (put_other_shapes, ["train/shard_000000.tar", "t5 is uint16 (9, 30), want uint16 (9, 28)"]),
    "other dtype": (lambda d: put_dtype(d, "train", 0), ["sample 0", "t5 is float16", "want uint16"]),
    "broken dtype": (lambda d: put_dtype(d, "val", 0, b"<u'"), ["val", "sample 0", "t5 is not a .npy blob"]),
    "dead link": (lambda d: replace_by_dead_link(shard(d)), ["train/shard_000000.tar"]),
    "NaN at the end": (lambda d: put_nan(d, "train", 49), ["sample 49", "train_00000049", "NaN"]),
    "no encoding": (lambda d: (d / "empty_encodings/clip_empty.npy").unlink(), ["clip_empty.npy"]),
    "no bytes": (lambda d: truncate(d / "empty_encodings/t5_empty.npy", 0), ["t5_empty.npy"]),
    "few bytes": (lambda d: truncate(d / "empty_encodings/t5_empty.npy", 300), ["t5_empty.npy"]),
    "NaN encoding": (lambda d: overwrite(d / "empty_encodings/t5_empty.npy", 128, b"\0\x7e"), ["t5_empty.npy", "NaN"]),
}
FOUND_ON_THE_WAY = {
    "NaN": (lambda d: put_nan(d, "train"), ["train/shard_000000.tar, sample 20, key train_00000020", "t5", "NaN"]),
    "dtype": (lambda d: put_dtype(d, "train", MIDDLE), ["sample 20, key train_00000020", "t5 is float16"]),
    "NaN in val": (lambda d: put_nan(d, "val"), ["val/shard_000000.tar, sample 20, key val_00000020", "t5", "NaN"]),
    "no timestep": (lambda d: put_timestep(d, b'"time": 4'), ["val_00000020", "timestep None", "0 to 7"]),
    "timestep 8": (lambda d: put_timestep(d, b'"timestep": 8'), ["val_00000020", "timestep 8", "0 to 7"]),
    "timestep as text": (lambda d: put_timestep(d, b'"timestep":""'), ["sample 20", "timestep ''", "integer"]),
}


@pytest.mark.parametrize("damage, words", FOUND_ON_OPENING.values(), ids=FOUND_ON_OPENING)
def test_damage_that_opening_finds_is_refused(damage, words, attempt, dataset, tmp_path):
    damage(dataset)
    code, _, line = attempt(*micro_run(dataset, tmp_path / "run"))
    assert code == 2 and has_words(line, *words), line


@pytest.mark.parametrize("damage, words", FOUND_ON_THE_WAY.values(), ids=FOUND_ON_THE_WAY)
def test_damage_that_the_run_meets_stops_it(damage, words, attempt, dataset, tmp_path):
    damage(dataset)
    code, _, line = attempt(*micro_run(dataset, tmp_path / "run"))
    assert code == 3 and has_words(line, *words), line
    log = (tmp_path / "run" / "result_0.txt").read_text()
    assert '"run_stop"' in log and '"aborted"' in log and '"success"' not in log
    assert not (tmp_path / "run" / "outcome.json").exists()


def test_a_damaged_sample_may_be_skipped(attempt, dataset, tmp_path):
    put_nan(dataset, "train")
    assert attempt(*micro_run(dataset, tmp_path / "run"), "--data.skip_bad=2")[::2] == (0, "")
    assert column(tmp_path / "run", "skipped")[-1] == 1


def test_a_loss_that_is_not_finite_stops_the_run(attempt, shapes_dir, tmp_path):
    code, _, line = attempt(*micro_run(shapes_dir, tmp_path / "run"), "--optim.lr=1e18", "--optim.warmup_steps=0")
    assert code == 3 and has_words(line, "not finite at step", "optim.lr"), line


# The run's folder


@pytest.fixture(scope="module")
def finished(shapes_dir, tmp_path_factory) -> Path:
    """The folder of a finished run; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert called("train.py", *micro_run(shapes_dir, folder)) == 0
    return folder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A finished run of one's own, to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_is_not_overwritten_unless_asked(attempt, shapes_dir, run_folder):
    (run_folder / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file() and path.name != ".lock"}
    code, _, line = attempt(*micro_run(shapes_dir, run_folder))
    assert code == 2 and has_words(line, run_folder, "run.dir", "run.overwrite=true"), line
    assert {path: path.read_bytes() for path in before} == before

    assert attempt(*micro_run(shapes_dir, run_folder), "--run.overwrite=true", "--train.max_samples=12")[0] == 0
    assert (run_folder / "notes.txt").read_text() == "mine"  # only what a run writes is deleted
    assert len(lines(run_folder, "eval.jsonl")) == 1
    assert config_file.load(run_folder / "config.toml").run.overwrite is False


def test_a_folder_that_cannot_be_made_is_refused(attempt, shapes_dir, tmp_path):
    (tmp_path / "file").write_text("")
    for below in ("", "/run", "/a/b/run"):
        code, _, line = attempt(*micro_run(shapes_dir, f"{tmp_path}/file{below}"))
        assert code == 2 and has_words(line, f"{tmp_path}/file{below}", "run.dir"), line


# eval.py


def last(run: Path, name: str) -> Path:
    """A file of the newest checkpoint."""
    return checkpoint_files.found(run)[-1] / name


SHARD = "rank_00000.safetensors"
WEIGHTS = {
    "gone": (lambda run: shutil.rmtree(run / "checkpoints"), ["holds no checkpoint"]),
    "no manifest": (lambda run: last(run, "manifest.json").unlink(), ["step_000000005", "manifest.json"]),
    "broken manifest": (lambda run: last(run, "manifest.json").write_text("{"), ["manifest.json", "damaged"]),
    "no shard": (lambda run: last(run, SHARD).unlink(), ["step_000000005", "lacks", SHARD]),
    "truncated": (lambda run: truncate(last(run, SHARD), 100_000), [SHARD, "has 100000 bytes"]),
    "empty": (lambda run: truncate(last(run, SHARD), 0), [SHARD, "has 0 bytes"]),
}


def test_eval_of_a_damaged_run_is_refused(attempt, run_folder, finished):
    for damage, words in WEIGHTS.values():
        shutil.rmtree(run_folder)
        shutil.copytree(finished, run_folder)
        damage(run_folder)
        code, out, line = attempt(run_folder, name="eval.py")
        assert (code, out) == (2, "") and has_words(line, run_folder, *words), line


MISFITS = {
    "--model.double_blocks=3": ["missing", "double_blocks.2."],
    "--model.single_blocks=2": ["unexpected", "single_blocks.2."],
    "--model.mlp_ratio=3": ["misshaped", "double_blocks.0.img_mlp.0.bias"],
    "--data.val=/no/such/folder": ["/no/such/folder"],
    "--eval.bacth=3": ["eval.batch"],
    "--parallel.replicate=2": ["parallel.replicate=2"],
}


def test_eval_with_an_override_that_does_not_fit_is_refused(attempt, finished):
    for override, words in MISFITS.items():
        code, _, line = attempt(finished, override, name="eval.py")
        assert code == 2 and has_words(line, *words), line


def test_eval_of_a_folder_that_is_no_run_is_refused(attempt, shapes_dir):
    for folder in (shapes_dir, shapes_dir / "none"):
        code, _, line = attempt(folder, name="eval.py")
        assert code == 2 and has_words(line, folder, "give a run, a checkpoint"), line


def test_eval_meets_a_damaged_sample(attempt, run_folder, dataset):
    put_nan(dataset, "val")
    code, _, line = attempt(run_folder, *data_overrides(dataset), name="eval.py")
    assert code == 3 and has_words(line, "val_00000020", "NaN"), line


# Whole processes: what only they show


def test_the_exit_code_and_the_line_of_a_process(dataset, tmp_path):
    put_nan(dataset, "train")
    process = script("train.py", *micro_run(dataset, tmp_path / "run"), ranks=0)
    assert process.returncode == 3 and "Traceback" not in process.stderr
    assert has_words(the_line(process.stderr), "train_00000020", "NaN")


def test_a_port_in_use_is_refused(shapes_dir, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        group = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = script("train.py", *micro_run(shapes_dir, tmp_path / "run"), ranks=0, timeout=60, **group)
    assert process.returncode == 2 and process.stdout == "" and "Traceback" not in process.stderr
    assert has_words(the_line(process.stderr), f"127.0.0.1:{port}", "port in use")


def test_ctrl_c_ends_a_run_at_once_and_without_a_word(shapes_dir, tmp_path):
    endless = [*micro_run(shapes_dir, tmp_path / "run"), "--train.max_samples=1000000000"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *endless],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has them ignore SIGINT, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "eval.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr and "Error" not in stderr


# Two ranks


def met_by(rank: int, step: int = 1) -> int:
    """A training sample that a rank of two meets first in a step, and that opening does not meet."""
    order = rng.order(CFG.train.seed, 0, CFG.data.train_count)
    return next(int(order[p]) for p in data.rank_slice(step, rank, 2, CFG.train.global_batch) if 0 < order[p] < 49)


def put_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").touch()


ON_TWO_RANKS = {
    "unknown key": (2, "--train.global_bacth=8", None, ["train.global_bacth", "train.global_batch"]),
    "batch": (2, "--train.global_batch=13", None, ["train.global_batch=13", "2 ranks", "use 12 or 14"]),
    "no folder": (2, "--data.train=/no/such/folder/train", None, ["/no/such/folder"]),
    "NaN on rank 0": (3, "", lambda d: put_nan(d, "train", met_by(0)), ["rank 0", f"{met_by(0):08d}", "NaN"]),
    "NaN on rank 1": (3, "", lambda d: put_nan(d, "train", met_by(1)), ["rank 1", f"{met_by(1):08d}", "NaN"]),
    "run exists": (2, "", put_run, ["unfinished run of another config", "run.dir", "run.overwrite"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("code, override, damage, words", ON_TWO_RANKS.values(), ids=ON_TWO_RANKS)
def test_two_ranks_speak_once(code, override, damage, words, dataset):
    if damage:
        damage(dataset)
    arguments = [*micro_run(dataset, dataset / "run"), "--data.kind=embeddings", *filter(None, [override])]
    process = script("train.py", *arguments, ranks=2, timeout=60)
    assert has_words(the_line(process.stderr), *words), process.stderr
    assert process.returncode == 1 and rank_exit_code(process) == code
    assert process.stderr.count("Traceback") <= 1  # torchrun's own
