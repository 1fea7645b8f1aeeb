"""A run that is stopped goes on as if nothing had happened, or says why it does not.

Stopping by signals, another number of ranks, every place at which a run may have broken off, damaged records, and
the benchmark's log of a run that was resumed.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import conftest
import killing
import numpy as np
import pytest
import torch
from compliance import check
from conftest import MICRO, micro_run, require_identical, trained
from killing import Job, trained_on
from mlperf_logging.rcp_checker.rcp_checker import read_submission_file
from run_files import column, events, lines, newest, require_equal_runs, saved_steps, what_counts

from flux_ref import config_file, data, rng
from flux_ref.formats import checkpoint_files, shards

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH = 12
SHORT = (  # 12 steps, evaluations after 4, 8 and 12, a checkpoint after every second
    *("--train.max_samples=144", "--eval.every_samples=48", "--checkpoint.every_samples=24", "--checkpoint.keep=99"),
    *("--train.log_every_samples=12", "--run.hang_s=0"),
)


def called(folder: Path, data: Path, *overrides: object) -> int:
    """The exit code of a short run by train.py inside this process."""
    return conftest.called("train.py", *micro_run(data, folder, *SHORT, *overrides))


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


# Stopped by a signal, continued by the same command


@pytest.fixture(scope="module")
def stops(shapes_dir, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The same run, stopped twice and finished: its folder and what was found after each attempt."""
    folder = tmp_path_factory.mktemp("stops")
    found = []
    for number, plan in enumerate(("step 4 SIGTERM launcher", "evaluation 192 SIGUSR1 self", "")):
        code, said = killing.launch(folder, shapes_dir, plan=plan)
        found.append(
            {
                "code": code,
                "said": said,
                "steps": len(lines(folder / "records", "rank_0.jsonl")),
                "saved": newest(folder / "run").info,
                "copy": shutil.copytree(folder, folder.with_name(f"{folder.name}_{number}")),
            }
        )
    return folder, found


def test_a_signal_saves_the_step_in_flight(stops):
    for found, name in zip(stops[1], ("SIGTERM", "SIGUSR1")):
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


def test_a_run_that_was_stopped_twice_equals_one_that_was_not_bit_for_bit(stops, two_ranks):
    require_equal_runs(stops[0] / "run", two_ranks / "run")
    assert column(stops[0] / "run", "step") == list(range(1, 25))
    assert column(stops[0] / "run", "samples", "eval.jsonl") == [96, 192, 288]


def test_each_sample_is_trained_on_once_in_the_order_of_an_uninterrupted_run(stops, two_ranks):
    want = trained_on(two_ranks / "records")
    assert trained_on(stops[0] / "records") == want
    assert [step for step, _ in want] == list(range(24))
    assert len({row for _, rows in want for row in rows}) == 288, "the draws of two rows agree"


def test_plain_python_stops_with_143_and_goes_on(whole, shapes_dir, tmp_path):
    folder = tmp_path / "run"
    argv = micro_run(shapes_dir, folder, *SHORT)
    plan = {"SIGNAL": "step 5 SIGTERM self"}
    with Job(tmp_path / "log", "tests/helpers/killing.py", tmp_path, *argv, ranks=0, **plan) as job:
        assert job.wait() == 143
        assert "stopped by SIGTERM after step" in job.said
    assert saved_steps(folder)[-1] == len(lines(folder)) < 12
    assert called(folder, shapes_dir) == 0
    require_equal_runs(folder, whole)


def test_the_counter_is_of_samples_trained_on_though_more_were_read(shapes_dir, tmp_path, monkeypatch):
    read, fill = [], data.TrainSet._fill
    monkeypatch.setattr(data.TrainSet, "_fill", lambda *args: read.append(args[-1]) or fill(*args))
    for (module, name), stand_in in killing.recorder(tmp_path, "step 5 SIGTERM self").items():
        monkeypatch.setattr(module, name, stand_in)
    assert called(tmp_path / "run", shapes_dir) == 143
    rows = [row for _, rows in trained_on(tmp_path) for row in rows]
    saved = newest(tmp_path / "run").info
    assert saved["samples"] == saved["step"] * BATCH == len(rows) < len(read)


# Another number of ranks


@pytest.fixture(scope="module")
def regrouped(stops, shapes_dir, tmp_path_factory) -> Path:
    """The run that was stopped at 2 ranks, taken up by 1, stopped again and finished by 3."""
    folder = Path(shutil.copytree(stops[1][0]["copy"], tmp_path_factory.mktemp("regrouped") / "folder"))
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), stand_in in killing.recorder(folder / "records", "step 14 SIGTERM self").items():
            patch.setattr(module, name, stand_in)
        assert called(folder / "run", shapes_dir, *killing.LONG, "--run.hang_s=0") == 143
    code, said = killing.launch(folder, shapes_dir, ranks=3)
    assert code == 0, said
    return folder


@pytest.mark.slow
def test_2_then_1_then_3_ranks_train_on_the_same_samples_in_the_same_order(regrouped, two_ranks):
    assert trained_on(regrouped / "records") == trained_on(two_ranks / "records")
    steps = [{line["step"] for line in lines(path.parent, path.name)} for path in (regrouped / "records").glob("r*")]
    assert len(steps) == 3 and min(map(len, steps)) > 4, "one of the worlds trained on next to nothing"


@pytest.mark.slow
def test_2_then_1_then_3_ranks_end_with_the_same_losses_and_weights_up_to_rounding(regrouped, two_ranks):
    found, want = (what_counts(folder / "run") for folder in (regrouped, two_ranks))
    for name, keys in (("metrics.jsonl", ("loss", "grad_norm")), ("eval.jsonl", ("val_loss",))):
        assert [record["samples"] for record in found[name]] == [record["samples"] for record in want[name]]
        for key in keys:
            pair = ([record[key] for record in records[name]] for records in (found, want))
            np.testing.assert_allclose(*pair, rtol=1e-3)
    found, want = trained(regrouped / "run"), trained(two_ranks / "run")
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


# Broken off anywhere, at one rank


CHANGED = (".lock", "config.toml", "result_0.txt")  # also by an attempt that is refused


def contents(folder: Path) -> dict[Path, bytes]:
    """Every other file of a run."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in CHANGED)
    return {path.relative_to(folder): path.read_bytes() for path in files}


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
        pair = [checkpoint_files.Checkpoint(run / path.relative_to(whole)) for run in (folder, whole)]
        require_identical(*({key: saved.read(key) for key in saved.tensors} for saved in pair))
    assert json.loads((folder / "outcome.json").read_text())["step"] == 12


@pytest.mark.parametrize("name, keep", [("metrics.jsonl", 7), ("eval.jsonl", 1)])
def test_half_a_line_at_the_end_is_written_again(broken_off, whole, shapes_dir, name, keep):
    folder = broken_off(6)
    halve_last(folder / name, keep)
    assert called(folder, shapes_dir) == 0
    require_equal_runs(folder, whole)


DAMAGED = [*(("metrics.jsonl", 5, text) for text in ('{"samples": 60', "[]", '{"samples": 60}', ""))]
DAMAGED.append(("eval.jsonl", 1, "\0" * 40))


def test_a_damaged_line_in_the_middle_is_refused_by_name(broken_off, shapes_dir, capsys):
    for case, (name, number, damage) in enumerate(DAMAGED):
        folder = broken_off(6, f"run {case}")
        text = (folder / name).read_text().splitlines()
        text[number - 1] = damage
        (folder / name).write_text("\n".join([*text, ""]))
        before = contents(folder)
        assert called(folder, shapes_dir) == 2
        assert f"train.py: {folder / name} line {number} is damaged" in capsys.readouterr().err
        assert contents(folder) == before


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
    assert list(newest(folder).info["skipped"]) == [str(bad)]
    assert called(folder, dataset, *short) == 0
    assert column(folder, "skipped") == [1, 1, 1]
    capsys.readouterr()
    put_nan(dataset, first[30])
    assert called(copy, dataset, *short) == 3
    complaint = capsys.readouterr().err
    assert "data.skip_bad=1 allows no more" in complaint and f"train_{first[30]:08d}" in complaint


def test_a_moved_folder_goes_on_in_its_new_place(broken_off, whole, shapes_dir):
    folder = broken_off(6)
    moved = folder.rename(folder.with_name("elsewhere"))
    assert called(moved, shapes_dir) == 0
    require_equal_runs(moved, whole)


def test_another_config_does_not_go_on(broken_off, shapes_dir, capsys):
    folder = broken_off(6)
    before = contents(folder)
    assert called(folder, shapes_dir, "--train.seed=1") == 2
    assert "train.seed=1, there 0" in capsys.readouterr().err
    assert contents(folder) == before


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
    samples = column(folder, "samples")
    for name in ("outcome.json", "result_0.txt"):
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000000004")
    timed()
    assert "resumed_from_step" in [event["key"] for event in events(folder)]
    assert events(folder)[-1]["metadata"]["status"] == "aborted"
    assert column(folder, "samples") == samples
