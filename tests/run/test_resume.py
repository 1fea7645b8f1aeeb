"""A run that is stopped goes on as if nothing had happened, or says why it does not.

Stopping by signals, another number of ranks, every place at which a run may have broken off, whose a folder is,
the benchmark's log of a run that was resumed, damaged records, and jobs that hang or lose their launcher.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import killing
import numpy as np
import pytest
import torch
from compliance import check
from conftest import MICRO, ROOT, data_overrides, require_identical, trained
from killing import Job, lines, require_equal_runs, trained_on
from mlperf_logging.rcp_checker.rcp_checker import read_submission_file

from flux_ref import config, config_file, config_rules, data, rng
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, shards
from flux_ref.run import cli
from flux_ref.run import folder as run_folder
from flux_ref.run.hang_watch import HangWatch, judge

BATCH = 12
LONG = (  # 24 steps, evaluations after 8, 16 and 24, a checkpoint after every sixth
    *("--train.max_samples=288", "--eval.every_samples=96", "--checkpoint.every_samples=72"),
    *("--train.log_every_samples=12", "--run.hang_s=20"),
)
SHORT = (  # 12 steps, evaluations after 4, 8 and 12, a checkpoint after every second
    *("--train.max_samples=144", "--eval.every_samples=48", "--checkpoint.every_samples=24", "--checkpoint.keep=99"),
    *("--train.log_every_samples=12", "--run.hang_s=0"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums of several threads may be rounded otherwise than those of one, which runs started by torchrun have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def called(folder: Path, data: Path, *overrides: object) -> int:
    """The exit code of train.py, run inside this process to save the start of torch."""
    argv = [MICRO, f"--run.dir={folder}", *data_overrides(data), *SHORT, *overrides]
    return cli.run("train.py", "", killing.train.main, [str(arg) for arg in argv])


@pytest.fixture(scope="module")
def whole(shapes_dir, tmp_path_factory) -> Path:
    """A run of 12 steps by this process that nothing has interrupted; tests must not change it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert called(folder, shapes_dir) == 0
    return folder


@pytest.fixture
def broken_off(whole, tmp_path) -> Callable:
    """broken_off(step) gives a copy of the whole run as it would be, had it broken off after a checkpoint."""

    def make(step: int, name: str = "run") -> Path:
        folder = Path(shutil.copytree(whole, tmp_path / name))
        (folder / "outcome.json").unlink()
        for path in checkpoint_files.found(folder):
            if checkpoint_files.step_of(path) > step:
                shutil.rmtree(path)
        return folder

    return make


def events(folder: Path) -> list[dict]:
    """The benchmark's lines of a run."""
    text = (folder / "result_0.txt").read_text()
    return [json.loads(line.partition(":::MLLOG ")[2]) for line in text.splitlines() if ":::MLLOG " in line]


# Stopped by a signal, continued by the same command


@pytest.fixture(scope="module")
def launch(shapes_dir) -> Callable:
    """launch(folder, ranks, plan) trains in a folder, is struck as planned and returns the exit code and the log."""

    def run(folder: Path, ranks: int = 2, plan: str = "") -> tuple[int, str]:
        records = folder / "records"
        records.mkdir(parents=True, exist_ok=True)
        log = folder / f"log_{len(list(folder.glob('log_*')))}"
        argv = [MICRO, f"--run.dir={folder / 'run'}", *data_overrides(shapes_dir), *LONG]
        with Job(log, "tests/helpers/killing.py", records, *argv, ranks=ranks, SIGNAL=plan) as job:
            return job.wait(), job.said

    return run


@pytest.fixture(scope="module")
def uninterrupted(launch, tmp_path_factory) -> Path:
    """The folder of a run of 24 steps by 2 ranks: its records, its logs and the run itself."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, said = launch(folder)
    assert code == 0, said
    return folder


@pytest.fixture(scope="module")
def stops(launch, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The same run, stopped twice and finished: its folder and what was found after each attempt."""
    folder = tmp_path_factory.mktemp("stops")
    found = []
    for number, plan in enumerate(("step 4 SIGTERM launcher", "evaluation 192 SIGUSR1 self", "")):
        code, said = launch(folder, plan=plan)
        found.append(
            {
                "code": code,
                "said": said,
                "steps": len(lines(folder / "records", "rank_0.jsonl")),
                "saved": checkpoint_files.Checkpoint(checkpoint_files.found(folder / "run")[-1]).info,
                "copy": shutil.copytree(folder, folder.with_name(f"{folder.name}_{number}")),
            }
        )
    return folder, found


@pytest.mark.parametrize("attempt, name", [(0, "SIGTERM"), (1, "SIGUSR1")])
def test_a_signal_saves_the_step_in_flight(stops, attempt, name):
    found = stops[1][attempt]
    assert found["steps"] < 24, "the signal came too late"
    assert (found["saved"]["step"], found["saved"]["samples"]) == (found["steps"], found["steps"] * BATCH)
    assert f"stopped by {name} after step {found['steps']}; the same command goes on from there" in found["said"]
    assert not (found["copy"] / "run" / "outcome.json").exists()


def test_sigterm_to_torchrun_ends_every_rank_with_143(stops):
    assert stops[1][0]["code"] != 0
    codes = lines(stops[1][0]["copy"] / "records", "exit_codes.jsonl")
    assert sorted((record["rank"], record["code"]) for record in codes) == [(0, 143), (1, 143)]


def test_sigusr1_to_one_rank_ends_the_job_with_138(stops):
    """Here during an evaluation, which is given up."""
    found = stops[1][1]
    summary = found["said"].rpartition("Root Cause")[2]
    assert found["code"] != 0 and int(re.search(r"exitcode\s*:\s*(-?\d+)", summary)[1]) == 138
    assert found["steps"] == 16 and len(lines(found["copy"] / "run", "eval.jsonl")) == 1


def test_the_same_command_goes_on_and_says_so(stops):
    _, (first, second, third) = stops
    assert "resume" not in first["said"]
    for before, after in ((first, second), (second, third)):
        step = before["steps"]
        assert f"resume  the run in this folder, from step {step} ({step * BATCH} samples)" in after["said"]
    assert third["code"] == 0


def test_a_run_that_was_stopped_twice_equals_one_that_was_not_bit_for_bit(stops, uninterrupted):
    require_equal_runs(stops[0] / "run", uninterrupted / "run")
    assert [line["step"] for line in lines(stops[0] / "run")] == list(range(1, 25))
    assert [line["samples"] for line in lines(stops[0] / "run", "eval.jsonl")] == [96, 192, 288]


def test_each_sample_is_trained_on_once_in_the_order_of_an_uninterrupted_run(stops, uninterrupted):
    want = trained_on(uninterrupted / "records")
    assert trained_on(stops[0] / "records") == want
    assert [step for step, _ in want] == list(range(24))
    assert len({row for _, rows in want for row in rows}) == 288, "the draws of two rows agree"


def test_plain_python_stops_with_143_and_goes_on(whole, shapes_dir, tmp_path):
    folder = tmp_path / "run"
    argv = [MICRO, f"--run.dir={folder}", *data_overrides(shapes_dir), *SHORT]
    plan = {"SIGNAL": "step 5 SIGTERM self"}
    with Job(tmp_path / "log", "tests/helpers/killing.py", tmp_path, *argv, ranks=0, **plan) as job:
        assert job.wait() == 143
        assert "stopped by SIGTERM after step" in job.said
    assert checkpoint_files.step_of(checkpoint_files.found(folder)[-1]) == len(lines(folder)) < 12
    assert called(folder, shapes_dir) == 0
    require_equal_runs(folder, whole)


def test_the_counter_is_of_samples_trained_on_though_more_were_read(shapes_dir, tmp_path, monkeypatch):
    read, fill = [], data.TrainSet._fill
    monkeypatch.setattr(data.TrainSet, "_fill", lambda *args: read.append(args[-1]) or fill(*args))
    for (module, name), stand_in in killing.recorder(tmp_path, "step 5 SIGTERM self").items():
        monkeypatch.setattr(module, name, stand_in)
    assert called(tmp_path / "run", shapes_dir) == 143
    rows = [row for _, rows in trained_on(tmp_path) for row in rows]
    saved = checkpoint_files.Checkpoint(checkpoint_files.found(tmp_path / "run")[-1]).info
    assert saved["samples"] == saved["step"] * BATCH == len(rows) < len(read)


# Another number of ranks


@pytest.fixture(scope="module")
def regrouped(stops, launch, shapes_dir, tmp_path_factory) -> Path:
    """The run that was stopped at 2 ranks, taken up by 1, stopped again and finished by 3."""
    folder = Path(shutil.copytree(stops[1][0]["copy"], tmp_path_factory.mktemp("regrouped") / "folder"))
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), stand_in in killing.recorder(folder / "records", "step 14 SIGTERM self").items():
            patch.setattr(module, name, stand_in)
        assert called(folder / "run", shapes_dir, *LONG, "--run.hang_s=0") == 143
    code, said = launch(folder, ranks=3)
    assert code == 0, said
    return folder


@pytest.mark.slow
def test_2_then_1_then_3_ranks_train_on_the_same_samples_in_the_same_order(regrouped, uninterrupted):
    assert trained_on(regrouped / "records") == trained_on(uninterrupted / "records")
    steps = [{line["step"] for line in lines(path.parent, path.name)} for path in (regrouped / "records").glob("r*")]
    assert len(steps) == 3 and min(map(len, steps)) > 4, "one of the worlds trained on next to nothing"


@pytest.mark.slow
def test_2_then_1_then_3_ranks_end_with_the_same_losses_and_weights_up_to_rounding(regrouped, uninterrupted):
    found, want = (killing.what_counts(folder / "run") for folder in (regrouped, uninterrupted))
    for name, keys in (("metrics.jsonl", ("loss", "grad_norm")), ("eval.jsonl", ("val_loss",))):
        assert [record["samples"] for record in found[name]] == [record["samples"] for record in want[name]]
        for key in keys:
            pair = ([record[key] for record in records[name]] for records in (found, want))
            np.testing.assert_allclose(*pair, rtol=1e-3)
    found, want = trained(regrouped / "run"), trained(uninterrupted / "run")
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


# Broken off anywhere, at one rank


def drop_last(path: Path, keep: int) -> None:
    """Keep the first lines of a file."""
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:keep]))


def halve_last(path: Path, keep: int) -> None:
    """Keep the first lines of a file and half of the next."""
    kept = path.read_text().splitlines()[: keep + 1]
    path.write_text("\n".join([*kept[:-1], kept[-1][: len(kept[-1]) // 2]]))


@pytest.mark.parametrize(
    "step, keep",
    [
        pytest.param(6, {}, id="half way, in between evaluations"),
        pytest.param(6, {"metrics.jsonl": 7, "eval.jsonl": 1}, id="a line after the checkpoint"),
        pytest.param(8, {"metrics.jsonl": 8, "eval.jsonl": 1}, id="in an evaluation"),
        pytest.param(8, {"metrics.jsonl": 8, "eval.jsonl": 2}, id="just after an evaluation"),
        pytest.param(6, {"metrics.jsonl": 8, "eval.jsonl": 2}, id="in a save that an evaluation had overtaken"),
        pytest.param(0, {}, id="before the first checkpoint"),
        pytest.param(12, {"metrics.jsonl": 12, "eval.jsonl": 2}, id="in the last evaluation"),
        pytest.param(12, {}, id="after everything but its end"),
    ],
)
def test_a_run_that_broke_off_ends_like_one_that_did_not(broken_off, whole, shapes_dir, capsys, step, keep):
    folder = broken_off(step)
    for name, count in keep.items():
        drop_last(folder / name, count)
    assert called(folder, shapes_dir) == 0
    assert f"resume  the run in this folder, from step {step} " in capsys.readouterr().out
    require_equal_runs(folder, whole)
    for path in checkpoint_files.found(whole):
        require_identical(*({key: saved.read(key) for key in saved.tensors} for saved in both(path, folder, whole)))
    assert json.loads((folder / "outcome.json").read_text())["step"] == 12


def both(path: Path, folder: Path, whole: Path) -> list[checkpoint_files.Checkpoint]:
    return [checkpoint_files.Checkpoint(run / path.relative_to(whole)) for run in (folder, whole)]


@pytest.mark.parametrize("name, keep", [("metrics.jsonl", 7), ("metrics.jsonl", 6), ("eval.jsonl", 1)])
def test_half_a_line_at_the_end_is_written_again(broken_off, whole, shapes_dir, name, keep):
    folder = broken_off(6)
    halve_last(folder / name, keep)
    assert called(folder, shapes_dir) == 0
    require_equal_runs(folder, whole)


FILES = ("metrics.jsonl", "eval.jsonl")


@pytest.mark.parametrize(
    "name, number, damage",
    [
        *(("metrics.jsonl", 5, damage) for damage in ('{"samples": 60', "[]", '{"samples": 60}', "")),
        pytest.param("eval.jsonl", 1, "\0" * 40, id="eval.jsonl-1-zeros"),
    ],
)
def test_a_damaged_line_in_the_middle_is_refused_by_name(broken_off, shapes_dir, capsys, name, number, damage):
    folder = broken_off(6)
    text = (folder / name).read_text().splitlines()
    text[number - 1] = damage
    (folder / name).write_text("\n".join([*text, ""]))
    before = [(folder / other).read_bytes() for other in FILES]
    assert called(folder, shapes_dir) == 2
    assert f"train.py: {folder / name} line {number} is damaged" in capsys.readouterr().err
    assert [(folder / other).read_bytes() for other in FILES] == before
    assert [checkpoint_files.step_of(path) for path in checkpoint_files.found(folder)] == [2, 4, 6]


# Damaged samples that were passed over


def put_nan(data: Path, sample: int) -> None:
    """Make the first value of a training sample's T5 encoding NaN."""
    with (data / "train" / "shard_000000.tar").open("r+b") as file:
        file.seek(sample * shards.layout(config_file.load(MICRO).model).stride + 3 * shards.BLOCK + shards.NPY_HEADER)
        file.write(b"\xc0\x7f")


def test_samples_passed_over_before_a_stop_still_count_after_it(shapes_dir, tmp_path, capsys):
    dataset = Path(shutil.copytree(shapes_dir, tmp_path / "data"))
    first, second = (rng.order(0, epoch, 50).tolist() for epoch in (0, 1))
    bad = next(sample for sample in first[:BATCH] if sample not in second[:30])  # not met again in 3 steps
    put_nan(dataset, bad)
    short = ("--train.max_samples=36", "--data.skip_bad=1")
    folder, copy = tmp_path / "run", tmp_path / "copy"
    assert called(folder, dataset, *short) == 0
    for run in (folder, shutil.copytree(folder, copy)):
        (run / "outcome.json").unlink()
        shutil.rmtree(run / "checkpoints" / "step_000000003")
    assert list(checkpoint_files.Checkpoint(checkpoint_files.found(folder)[-1]).info["skipped"]) == [str(bad)]
    assert called(folder, dataset, *short) == 0
    assert [line["skipped"] for line in lines(folder)] == [1, 1, 1]
    capsys.readouterr()
    put_nan(dataset, first[30])
    assert called(copy, dataset, *short) == 3
    complaint = capsys.readouterr().err
    assert "data.skip_bad=1 allows no more" in complaint and f"train_{first[30]:08d}" in complaint


# Whose a folder is


def contents(folder: Path) -> dict[str, bytes] | None:
    """Every visible file below a folder but the benchmark's log; None if there is no folder."""
    if not folder.exists():
        return None
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "result_0.txt"}


@pytest.fixture
def cfg(tmp_path) -> Config:
    """A config whose run has a folder of its own."""
    return config_file.load(MICRO, [f"--run.dir={tmp_path / 'run'}", "--checkpoint.every_samples=24"])


STATES = ("absent", "empty", "begun", "saved", "finished", "foreign")


def put(cfg: Config, state: str) -> Path:
    """Bring the folder of a config into a state."""
    folder = config.run_dir(cfg)
    if state != "absent":
        folder.mkdir()
    if state == "foreign":
        (folder / "notes.txt").write_text("of somebody else")
    if state in ("begun", "saved", "finished"):
        (folder / "config.toml").write_text(config_file.dump(cfg))
        (folder / "metrics.jsonl").write_text('{"samples": 12}\n')
        (folder / "result_0.txt").write_text("a log\n")
    if state in ("saved", "finished"):
        for name in ("step_000000002", "step_000000004", ".step_000000006.0a1b2c3d"):
            (folder / "checkpoints" / name).mkdir(parents=True)
    if state == "finished":
        (folder / "outcome.json").write_text("{}\n")
    return folder


def outcome(cfg: Config, restarted: bool = False) -> str:
    """What becomes of a claim: anew, from nothing, from a checkpoint, or the reason of its refusal."""
    try:
        claim = run_folder.claim(cfg, restarted)
    except Refusal as refusal:
        assert "\n" not in str(refusal) and str(config.run_dir(cfg)) in str(refusal)
        return str(refusal)
    claim.lock.close()
    if claim.start.checkpoint:
        return f"from {claim.start.checkpoint.name}"
    return "anew" if claim.start.is_new else "from nothing"


NO_RUN, A_RUN, FINISHED = "holds no run to continue", "already holds a run", "already holds a finished run"
FOREIGN, UNSAVED = "holds notes.txt but no run", "holds no checkpoint to continue from"
OUTCOMES = {  # of run.resume = auto, must and never
    "absent": ("anew", NO_RUN, "anew"),
    "empty": ("anew", NO_RUN, "anew"),
    "begun": ("from nothing", UNSAVED, A_RUN),
    "saved": ("from step_000000004", "from step_000000004", A_RUN),
    "finished": (FINISHED, FINISHED, A_RUN),
    "foreign": (FOREIGN, FOREIGN, FOREIGN),
}
RESUMES = ("auto", "must", "never")


@pytest.mark.parametrize("state, resume", list(itertools.product(STATES, RESUMES)))
def test_what_becomes_of_a_folder(cfg, state, resume):
    folder = put(cfg, state)
    before = contents(folder)
    want = OUTCOMES[state][RESUMES.index(resume)]
    found = outcome(config_file.replace(cfg, run__resume=resume))
    assert want in found
    if found not in ("anew", "from nothing", "from step_000000004"):
        assert contents(folder) == before, "a refusal changes nothing"
    else:
        assert not list(folder.glob("checkpoints/.*")), "what a broken save has left is cleaned up"
        stored = config_file.load(folder / "config.toml")
        assert (stored.run.resume, stored.run.overwrite) == ("auto", False)


@pytest.mark.parametrize("state, resume", list(itertools.product(STATES, RESUMES)))
def test_overwriting_begins_anew_whatever_the_folder_holds_and_spares_what_is_not_a_runs(cfg, state, resume):
    folder = put(cfg, state)
    if state != "absent":
        (folder / "notes.txt").write_text("of somebody else")
    assert outcome(config_file.replace(cfg, run__overwrite=True, run__resume=resume)) == "anew"
    assert set(contents(folder)) == {"config.toml"} | ({"notes.txt"} if state != "absent" else set())


@pytest.mark.parametrize("overrides", [{}, {"run__overwrite": True}, *({"run__resume": name} for name in RESUMES)])
def test_what_torchrun_restarts_goes_on_whatever_the_command_asked_for(cfg, overrides):
    put(cfg, "saved")
    assert outcome(config_file.replace(cfg, **overrides), restarted=True) == "from step_000000004"


def changed(key: str, value: object) -> object:
    """Another value for a key."""
    if key in config_rules.CHOICES:
        return next(choice for choice in reversed(config_rules.CHOICES[key]) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (2, 4, 2) if config.TYPES[key] == tuple[int, ...] else ("a red square",)
    return f"{value}_other" if isinstance(value, str) else value * 2 + 1 if isinstance(value, int) else value / 2 + 0.1


def with_changed(cfg: Config, *keys: str) -> Config:
    """A copy with other values, unchecked: some make no sense together."""
    for key in (*keys, *(["parallel.compile"] if "parallel.activation_budget" in keys else [])):  # which it needs
        section, name = key.split(".")
        own = getattr(cfg, section)
        own = dataclasses.replace(own, **{name: changed(key, getattr(own, name))})
        cfg = dataclasses.replace(cfg, **{section: own})
    return cfg


@pytest.mark.parametrize("key", [key for key in config.TYPES if key not in config.MAY_DIFFER])
def test_what_decides_samples_weights_or_losses_may_not_change_in_the_course_of_a_run(cfg, key):
    folder = put(cfg, "saved")
    before = contents(folder)
    other = with_changed(cfg, key)
    values = f"{key}={config.flat(other)[key]!r}, there {config.flat(cfg)[key]!r}"
    assert f"holds an unfinished run of another config: {values};" in outcome(other)
    assert contents(folder) == before


def test_what_may_not_change_is_all_that_decides_samples_weights_or_losses():
    fixed = {key for key in config.TYPES if key not in config.MAY_DIFFER}
    assert fixed == {
        *(key for key in config.TYPES if key.split(".")[0] in ("model", "optim", "init", "fp8")),
        *("train.seed", "train.max_samples", "train.global_batch", "train.caption_drop"),
        *("eval.every_samples", "eval.at_start", "eval.target", "eval.noise"),
        *("data.kind", "data.train_count", "data.val_count", "parallel.dtype", "parallel.reduce_dtype"),
    }


FOLDER_KEYS = ("run.dir", "run.overwrite", "run.resume")  # tested above


@pytest.mark.parametrize("key", [key for key in config.MAY_DIFFER if key not in FOLDER_KEYS])
def test_what_decides_nothing_may_change_and_is_written_down(cfg, key):
    if key == "sample.vae":  # of no use for shapes
        cfg = config_file.replace(cfg, data__kind="embeddings")
    folder = put(cfg, "saved")
    other = with_changed(cfg, key)
    assert outcome(other) == "from step_000000004"
    assert config.flat(config_file.load(folder / "config.toml"))[key] == config.flat(other)[key]


def test_all_keys_that_differ_are_named(cfg):
    put(cfg, "saved")
    found = outcome(with_changed(cfg, "train.seed", "optim.lr", "model.hidden", "eval.batch"))
    assert all(f"{key}=" in found for key in ("train.seed", "optim.lr", "model.hidden")) and "eval.batch" not in found


def test_a_moved_folder_goes_on_in_its_new_place(broken_off, whole, shapes_dir):
    folder = broken_off(6)
    moved = folder.rename(folder.with_name("elsewhere"))
    assert called(moved, shapes_dir) == 0
    require_equal_runs(moved, whole)


def test_a_finished_run_is_not_repeated_and_another_config_does_not_go_on(whole, broken_off, shapes_dir, capsys):
    before = contents(whole)
    assert called(whole, shapes_dir) == 2
    assert f"train.py: {whole} already holds a finished run" in capsys.readouterr().err
    assert contents(whole) == before
    folder = broken_off(6)
    before = contents(folder)
    assert called(folder, shapes_dir, "--train.seed=1") == 2
    assert "train.seed=1, there 0" in capsys.readouterr().err
    assert contents(folder) == before


# Two jobs in one folder


@contextlib.contextmanager
def occupied(folder: Path):
    """Another job holds the folder meanwhile."""
    with (folder / run_folder.LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write("process 123 on elsewhere\n")
        lock.flush()
        yield


def test_a_second_job_in_a_folder_is_refused_and_told_who_has_it(broken_off, whole, shapes_dir, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.3)
    folder = broken_off(6)
    before = contents(folder)
    with occupied(folder):
        assert called(folder, shapes_dir) == 2
        assert called(folder, shapes_dir, "--run.overwrite=true") == 2
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 2
    assert all(f"{folder} is in use by another job (process 123 on elsewhere)" in line for line in complaints)
    assert contents(folder) == before
    assert called(folder, shapes_dir) == 0
    require_equal_runs(folder, whole)


def test_a_job_waits_a_little_for_one_that_is_just_ending(cfg):
    folder = put(cfg, "saved")
    with contextlib.ExitStack() as stack:
        stack.enter_context(occupied(folder))
        timer = threading.Timer(0.4, stack.close)
        timer.start()
        assert outcome(cfg) == "from step_000000004"
        timer.join()


def test_a_job_that_was_refused_or_has_ended_frees_the_folder(cfg, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.0)
    put(cfg, "saved")
    assert A_RUN in outcome(config_file.replace(cfg, run__resume="never"))
    assert outcome(cfg) == outcome(cfg) == "from step_000000004"


# The benchmark's log


@pytest.fixture
def timed(shapes_dir, tmp_path, monkeypatch) -> Callable:
    """timed(*overrides) makes a run whose last evaluation reaches the benchmark's target, and returns its folder."""
    real = killing.train.validation_loss
    monkeypatch.setattr(
        killing.train, "validation_loss", lambda *args: dataclasses.replace(real(*args), loss=0.58)
    )  # which so small a model does not reach
    spec = ("--eval.every_samples=262144", "--eval.target=0.586", "--data.evict=true", "--train.max_samples=48")

    def run(*overrides: str) -> Path:
        assert called(tmp_path / "run", shapes_dir, *spec, *overrides) == 0
        return tmp_path / "run"

    return run


def test_a_run_that_was_not_interrupted_is_valid(timed):
    folder = timed()
    stop = events(folder)[-1]
    assert (stop["key"], stop["metadata"]["status"]) == ("run_stop", "success")
    assert "resumed_from_step" not in [event["key"] for event in events(folder)]
    assert not json.loads((folder / "outcome.json").read_text())["not_a_timed_result"]
    accepted, output = check(folder / "result_0.txt", "6.0.0")
    assert accepted, output


def test_a_resumed_run_says_so_and_is_never_valid_though_it_reaches_the_target(timed):
    folder = timed()
    (folder / "outcome.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000000004")
    timed()
    (resumed,) = [event for event in events(folder) if event["key"] == "resumed_from_step"]
    assert resumed["value"] == 2
    stop = events(folder)[-1]
    assert (stop["key"], stop["metadata"]["status"]) == ("run_stop", "aborted")
    assert stop["metadata"]["reason"] == "target reached; resumed, so not a valid timed result"
    found = json.loads((folder / "outcome.json").read_text())
    assert (found["outcome"], found["not_a_timed_result"]) == ("target reached", "resumed")
    assert not check(folder / "result_0.txt", "6.0.0")[0]
    not_converged, *_ = read_submission_file(folder / "result_0.txt", "6.0.0", False)
    assert not_converged, "the benchmark's summary would count it as a result"


def test_a_resumed_run_says_so_though_its_first_log_is_gone(timed, whole):
    folder = timed()
    samples = [line["samples"] for line in lines(folder)]
    for name in ("outcome.json", "result_0.txt"):
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000000004")
    timed()
    assert "resumed_from_step" in [event["key"] for event in events(folder)]
    assert events(folder)[-1]["metadata"]["status"] == "aborted"
    assert [line["samples"] for line in lines(folder)] == samples


# Hanging jobs and lost launchers


def told(beat: int, still: float, collectives: int, place: str = "the end of step 9", last: str = "") -> dict:
    """What a rank tells the others of itself."""
    return {"beat": beat, "still": still, "collectives": collectives, "place": place, "last": last}


def test_a_frozen_rank_is_blamed():
    before = [told(5, 7.0, 90), told(3, 1.0, 80)]
    after = [told(9, 9.0, 90, last="all_reduce of [[1]]"), told(3, 1.0, 80, "the end of step 7", "all_gather of [[6]]")]
    blamed, message = judge(before, after, 6.0)
    assert blamed == [1]
    assert message == (
        "rank 1 hangs: frozen or gone, last seen at the end of step 7 after collective 80 (all_gather of [[6]]);"
        " the others wait in collective 90 (all_reduce of [[1]]) at the end of step 9"
    )


def test_a_rank_that_lives_but_is_behind_is_blamed():
    before = [told(5, 7.0, 90), told(5, 7.0, 90), told(5, 7.0, 88)]
    after = [told(9, 9.0, 90), told(9, 9.0, 90), told(9, 9.0, 88, "validation batch 3 after step 8")]
    blamed, message = judge(before, after, 6.0)
    assert blamed == [2]
    assert message.startswith(
        "rank 2 hangs: nothing has moved for 6 s, last seen at validation batch 3 after step 8 after collective 88;"
    )
    assert message.endswith("the others wait in collective 90 (not recorded) at the end of step 9")


def test_a_frozen_rank_is_blamed_before_those_that_wait_for_it():
    before = [told(5, 7.0, 88), told(3, 1.0, 89), told(5, 7.0, 90)]
    after = [told(9, 9.0, 88), told(3, 1.0, 89), told(9, 9.0, 90)]
    assert judge(before, after, 6.0)[0] == [1]


def test_several_ranks_are_named_together():
    before = [told(5, 7.0, 90), told(3, 1.0, 80), told(3, 1.0, 80), told(3, 1.0, 90)]
    after = [told(9, 9.0, 90), told(3, 1.0, 80), told(3, 1.0, 80), told(3, 1.0, 90)]
    blamed, message = judge(before, after, 6.0)
    assert blamed == [1, 2, 3] and message.startswith("ranks 1, 2, 3 hang: frozen or gone")


def test_nobody_is_blamed_when_all_wait_in_the_same_place():
    before = [told(5, 7.0, 90), told(5, 7.0, 90)]
    after = [told(9, 9.0, 90), told(9, 9.0, 90, last="all_reduce of [[1]]")]
    blamed, message = judge(before, after, 6.0)
    assert blamed == [] and message.startswith("all ranks have waited 6 s in collective 90")
    assert "the network or a device hangs" in message


def test_a_rank_that_never_spoke_is_named_and_not_waited_for():
    watch = object.__new__(HangWatch)
    watch.store, watch.world = torch.distributed.HashStore(), SimpleNamespace(rank=0, size=2)
    watch.store.set("0", json.dumps(told(1, 9.0, 90)))
    before = watch._heard()
    watch.store.set("0", json.dumps(told(5, 9.0, 90)))
    assert judge(before, watch._heard(), 6.0)[0] == [1]


@pytest.mark.parametrize("mover", [0, 1])
def test_nothing_hangs_while_a_living_rank_moves(mover):
    before = [told(5, 7.0, 90), told(5, 7.0, 80)]
    after = [told(9, 9.0, 90), told(9, 9.0, 80)]
    after[mover]["still"] = 0.2
    assert judge(before, after, 6.0) is None


@pytest.fixture
def endless(shapes_dir, tmp_path) -> Callable:
    """endless(*overrides) starts a run by 2 ranks and returns it when it has done so many steps."""
    with contextlib.ExitStack() as stack:

        def start(*overrides: str, steps: int = 4) -> Job:
            argv = [MICRO, f"--run.dir={tmp_path / 'run'}", *data_overrides(shapes_dir), "--train.max_samples=1200000"]
            job = stack.enter_context(Job(tmp_path / "log", "train.py", *argv, *LONG[1:], *overrides))
            assert job.until(lambda: killing.count(tmp_path / "run" / "metrics.jsonl") >= steps), job.said
            assert job.until(lambda: len(job.ranks()) == 2), job.said
            return job

        yield start


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_ranks_whose_launcher_was_killed_end_by_themselves(endless, steps):
    """Also before they have found each other."""
    job = endless("--run.hang_s=20", steps=steps)
    job.process.kill()
    assert job.gone(timeout=20), "they would hold memory, devices and the run's folder"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_freezes_is_named_and_the_job_ends(endless, rank):
    """torchrun gives a rank 30 s to end before it kills it, and a frozen one uses them."""
    job = endless("--run.hang_s=6")
    begin = time.monotonic()
    killing.send(job.ranks()[rank], signal.SIGSTOP)
    assert job.wait(timeout=60) != 0
    print(f"ended after {time.monotonic() - begin:.1f} s")
    assert job.gone(timeout=5)
    (line,) = re.findall(r"train\.py: (rank \d+ hangs[^\r\n]*)", job.said)
    place = r"(start-up|the end of step \d+|validation batch \d+ after \d+ samples)"
    last = rf"rank {rank} hangs: frozen or gone, last seen at {place} after collective \d+.*;"
    assert re.fullmatch(rf"{last} the others wait in collective \d+ \([^()]+ of \[.*\]\) at {place}", line), line


LOCKED = """
import ctypes, sys, time
from flux_ref import config, ranks
from flux_ref.run import cli, hang_watch
world = ranks.start(config.ParallelConfig())
watch = hang_watch.HangWatch("train.py", world, ranks.groups(world), 1.0)
if sys.argv[1] == "closed":
    watch.close()
time.sleep(0.5)
ctypes.PyDLL(None).sleep(6)  # holds Python's lock
cli.leave(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state, code", [("watched", 1), ("closed", 0)])
def test_a_process_whose_interpreter_is_locked_ends_and_shows_where(state, code):
    done = subprocess.run([sys.executable, "-c", LOCKED, state], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert ('File "<string>", line 9' in done.stderr) == (code == 1), done.stderr


@pytest.mark.slow
def test_a_rank_that_freezes_in_an_evaluation_is_named(whole, tmp_path):
    endless = ("--run.hang_s=6", "--sample.captions=['a small red circle']", "--sample.steps=1000000")
    with Job(tmp_path / "log", "eval.py", whole, *endless) as job:
        assert job.until(lambda: "mean" in job.said), job.said
        time.sleep(2)  # several periods of the watch
        killing.send(job.ranks()[1], signal.SIGSTOP)
        assert job.wait(timeout=60) != 0
    assert re.search(r"eval\.py: rank 1 hangs: frozen or gone, last seen at sampling step \d+ after", job.said), (
        job.said
    )
