"""A run that is stopped goes on as if nothing had happened, or says why it does not."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import conftest
import killing
import numpy as np
import pytest
import torch
from compliance import check
from conftest import micro_run, trained
from killing import trained_on
from run_files import column, contents, event, events, flip, lines, newest, require_equal_runs, saved_steps, what_counts

from flux_ref import checkpoint, mlperf_closed
from flux_ref.config import MllogConfig

SHORT = (  # 12 steps, evaluations after 4, 8 and 12, a checkpoint after every second
    *("--train.max_samples=144", "--eval.every_samples=48", "--checkpoint.every_samples=24", "--checkpoint.keep=99"),
    *("--train.log_every_samples=12", "--run.watchdog_s=0"),
)


def called(folder, data, *overrides):
    """The exit code of a short run by train.py inside this process."""
    return conftest.called("train.py", *micro_run(data, folder, *SHORT, *overrides))


@pytest.fixture(scope="module")
def whole(shapes_dir, tmp_path_factory):
    """A run of 12 steps by this process that nothing has interrupted; tests must not change it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert called(folder, shapes_dir) == 0
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder of a LONG run by 2 ranks that made its data: data, run and records. Tests must not change it."""
    folder = tmp_path_factory.mktemp("two_ranks")
    (folder / "records").mkdir()
    argv = micro_run(folder / "data", folder / "run", *killing.LONG)
    done = conftest.script("tests/helpers/killing.py", folder / "records", *argv, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


# Any number of ranks


def require_alike(run, other):
    """The same records up to the rounding of sums, and the same weights."""
    found, want = what_counts(run), what_counts(other)
    for name, keys in (("metrics.jsonl", ("loss", "grad_norm")), ("eval.jsonl", ("val_loss", "val_loss_per_timestep"))):
        assert [record["samples"] for record in found[name]] == [record["samples"] for record in want[name]]
        for key in keys:
            np.testing.assert_allclose(*([r[key] for r in records[name]] for records in (found, want)), rtol=1e-3)
    weights = trained(run)
    for name, tensor in trained(other).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def test_two_ranks_make_the_data_and_give_the_run_of_one_up_to_rounding(two_ranks, shapes_dir, tmp_path):
    """test_sharding.py compares other numbers of ranks."""
    made, want = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*.*")} for d in (two_ranks / "data", shapes_dir))
    assert made == want and len(want) == 4
    assert called(tmp_path / "run", shapes_dir, *killing.LONG, "--run.watchdog_s=0") == 0
    require_alike(two_ranks / "run", tmp_path / "run")
    assert column(two_ranks / "run", "samples") == list(range(12, 289, 12))
    assert event(two_ranks / "run", "eval_samples")["value"] == 45
    assert event(two_ranks / "run", "train_samples")["value"] == 50


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_and_any_number_of_ranks_goes_on(shapes_dir, two_ranks, tmp_path, monkeypatch):
    """The evaluation is given up. 2 ranks end bit for bit like a run that was not stopped; 3, then 1, to rounding.

    Those 3 are stopped by Ctrl-C to torchrun.
    """
    folder, other = tmp_path / "2", tmp_path / "3, 1"
    code, said = killing.launch(folder, shapes_dir, plan="evaluation 96 SIGUSR1")
    assert code != 0 and re.search(r"exitcode\s*:\s*138", said.rpartition("Root Cause")[2])
    assert "stopped by SIGUSR1 after step 8; the same command goes on from there" in said and "resume" not in said
    assert newest(folder / "run").info["samples"] == 96 and not (folder / "run" / "eval.jsonl").exists()
    shutil.copytree(folder, other)

    code, said = killing.launch(folder, shapes_dir)
    assert code == 0 and "resume  the run in this folder, from step 8 (96 samples)" in said
    require_equal_runs(folder / "run", two_ranks / "run")
    want = trained_on(two_ranks / "records")
    assert trained_on(folder / "records") == want and [step for step, _ in want] == list(range(24))
    assert len({row for _, rows in want for row in rows}) == 288, "the draws of two rows agree"

    code, said = killing.launch(other, shapes_dir, ranks=3, plan="step 14 SIGINT")
    assert code == 1 and re.search(r"stopped by SIGINT after step 1[5-9];", said), said
    with monkeypatch.context() as patched:
        killing.install(other / "records", "", patched.setattr)
        assert called(other / "run", shapes_dir, *killing.LONG, "--run.watchdog_s=0") == 0
    assert trained_on(other / "records") == want
    require_alike(other / "run", two_ranks / "run")


# Broken off anywhere, at one rank


@pytest.fixture
def broken_off(whole, tmp_path):
    """broken_off(step) gives a copy of the whole run as it would be, had it broken off after a checkpoint."""

    def make(step, name="run"):
        folder = Path(shutil.copytree(whole, tmp_path / name))
        (folder / "outcome.json").unlink()
        for path in checkpoint.list_checkpoints(folder):
            if checkpoint.step_of(path) > step:
                shutil.rmtree(path)
        return folder

    return make


def keep_lines(path, count):
    """Keep the first lines of a file; 7.5: and half of the eighth."""
    kept = path.read_text().splitlines(keepends=True)[: int(np.ceil(count))]
    kept[-1] = kept[-1] if count == int(count) else kept[-1][: len(kept[-1]) // 2]
    path.write_text("".join(kept))


BROKEN_OFF = {  # where: newest checkpoint, lines of metrics.jsonl and eval.jsonl
    "in between evaluations": (6, 12, 3),
    "a line and half a line after the checkpoint": (6, 7.5, 1),
    "within the line of an evaluation": (8, 8, 1.5),
    "in a save that an evaluation had overtaken": (6, 8, 2),
    "before the first checkpoint": (0, 12, 3),
    "in the last evaluation": (12, 12, 2),
}


def test_a_run_that_broke_off_ends_like_one_that_did_not(broken_off, whole, shapes_dir, capsys):
    for where, (step, trained_lines, evaluated_lines) in BROKEN_OFF.items():
        folder = broken_off(step, where)
        keep_lines(folder / "metrics.jsonl", trained_lines)
        keep_lines(folder / "eval.jsonl", evaluated_lines)
        assert called(folder, shapes_dir) == 0, where
        said = f"resume  the run in this folder, from step {step} " if step else f"lies in {folder}.1"
        assert said in capsys.readouterr().out
        require_equal_runs(folder, whole)
        assert saved_steps(folder) == saved_steps(whole)
        assert json.loads((folder / "outcome.json").read_text())["step"] == 12


def test_a_damaged_newest_checkpoint_is_refused_with_the_line_that_takes_the_one_before(
    broken_off, whole, shapes_dir, capsys
):
    """Never another one unasked. The line in the message is typed, and the run ends as if nothing had happened."""
    folder = broken_off(6)
    newest, middle = (folder / "checkpoints" / f"step_00000000{step}" for step in (6, 4))

    def refused(damaged):
        before = contents(folder)
        assert called(folder, shapes_dir) == 2
        complaint = conftest.the_line(capsys.readouterr().err)
        assert contents(folder) == before and str(damaged) in complaint
        return re.search("`(.*)`", complaint)[1]

    flip(newest / "rank_00000_000.safetensors", -5000)
    subprocess.run(refused(newest), shell=True, check=True)
    (middle / "manifest.json").unlink()
    subprocess.run(refused(middle), shell=True, check=True)
    assert called(folder, shapes_dir) == 0
    assert "resume  the run in this folder, from step 2 " in capsys.readouterr().out
    require_equal_runs(folder, whole)


def test_a_run_that_is_extended_ends_like_a_longer_one(whole, shapes_dir, tmp_path, capsys, monkeypatch):
    """Its one trace is the evaluation at its first end, which the longer run does not make. Its log is no result."""
    folder = tmp_path / "run"
    assert called(folder, shapes_dir, "--train.max_samples=60") == 0 and (folder / "outcome.json").exists()
    with monkeypatch.context() as patched:
        killing.install(tmp_path, "step 7 SIGINT", patched.setattr)
        assert called(folder, shapes_dir) == 130
    assert "resume  the run in this folder, from step 5 (60 samples)" in capsys.readouterr().out
    stopped = newest(folder).info["step"]
    assert 7 < stopped < 12, "Ctrl-C saves"
    assert not (folder / "outcome.json").exists() and called(folder, shapes_dir) == 0
    assert column(folder, "samples", "eval.jsonl") == [48, 60, 96, 144]
    records = lines(folder, "eval.jsonl")
    (folder / "eval.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in records if line["samples"] != 60))
    require_equal_runs(folder, whole)
    assert json.loads((folder / "outcome.json").read_text())["not_a_timed_result"] == f"resumed from step {stopped}"
    assert events(folder)[-1]["metadata"]["status"] == "aborted"


# The benchmark's log


def test_a_resumed_run_says_so_and_is_never_valid_though_it_reaches_the_target(shapes_dir, tmp_path, monkeypatch):
    """Also when the log of its first part is gone."""
    folder, real = tmp_path / "run", killing.train.validation_loss
    better = lambda *args: dataclasses.replace(real(*args), val_loss=0.58)  # noqa: E731  than so small a model reaches
    monkeypatch.setattr(killing.train, "validation_loss", better)
    spec = (
        "--eval.every_samples=262144",
        "--eval.target=0.586",
        "--data.drop_page_cache=true",
        "--train.max_samples=48",
    )
    spec += ("--mllog.submission_division=closed", "--mllog.rehearsal=true")
    assert called(folder, shapes_dir, *spec) == 0
    assert event(folder, "run_stop")["metadata"]["status"] == "success"
    assert "disqualified" not in [event["key"] for event in events(folder)]
    assert json.loads((folder / "outcome.json").read_text())["not_a_timed_result"] == mlperf_closed.REHEARSAL
    accepted, output = check(folder / "result_0.txt", MllogConfig.ruleset)
    assert accepted, output

    for name in ("outcome.json", "result_0.txt"):
        (folder / name).unlink()
    shutil.rmtree(newest(folder).folder)
    assert called(folder, shapes_dir, *spec) == 0
    flaw = "resumed from step 2"
    assert event(folder, "disqualified")["value"] == flaw
    stop = event(folder, "run_stop")["metadata"]
    assert stop["status"] == "aborted" and stop["reason"] == f"target reached; {flaw}"
    assert json.loads((folder / "outcome.json").read_text())["not_a_timed_result"] == flaw
