"""Paired comparisons: the statistics against closed forms and simulation, and real runs of the micro model."""

import json
import os
import signal
from pathlib import Path

import killing
import pytest
from conftest import MICRO, data_overrides, refusal
from in_process import InProcess
from run_files import count, lines

from flux_ref import config_file
from flux_ref.errors import Refusal
from tools.compare import commands

SHORT = ("--train.max_samples=48", "--eval.every_samples=24", "--eval.at_start=true", "--run.hang_s=0")
SHORT += ("--checkpoint.save=false", "--train.synthetic_steps=0")
FIGURES = [  # a, b and what is found by hand
    # Differences 0.5, 0.5 and 1.5: mean 5/6, variance 1/3. The variances of a and b are 7/3 and 13/3.
    # Seeds: 3 * (2.8 / 2.5) ** 2 + 1.92 = 5.68.
    (
        [1.0, 2.0, 4.0],
        [1.5, 2.5, 5.5],
        {
            "a": 7 / 3,
            "b": 19 / 6,
            "stderr": 1 / 3,
            "unpaired stderr": 20**0.5 / 3,
            "p": 1 - 2.5 / 8.25**0.5,
            "seeds": 6,
        },
    ),
    ([1.0], [1.25], {"b - a": 0.25, "stderr": None, "unpaired stderr": None, "p": None, "seeds": None}),
    ([1.0, 3.0], [1.0, 3.0], {"b - a": 0.0, "stderr": 0.0, "unpaired stderr": 2**0.5, "p": 1.0, "seeds": None}),
    ([1.0, 3.0, 9.0], [1.5, 3.5, 9.5], {"each": [0.5, 0.5, 0.5], "stderr": 0.0, "p": 0.0, "seeds": 2}),
]


def test_figures_are_those_by_hand():
    """Of three pairs, one pair, equal pairs and a constant difference."""
    for a, b, want in FIGURES:
        found = commands.paired(a, b)
        for name, value in want.items():
            assert found[name] == (value if value is None else pytest.approx(value, rel=1e-5, abs=1e-9)), name


# Real runs


def changed(folder: Path, *overrides: str) -> str:
    """The path of the micro config with some overrides."""
    path = folder / "b.toml"
    path.write_text(config_file.dump(config_file.load(MICRO, overrides)))
    return str(path)


@pytest.fixture
def compared(monkeypatch, shapes_dir, tmp_path):
    """compared(rate of B, *options) compares the micro model with one of another rate; returns compare.json."""
    monkeypatch.setattr(commands, "Popen", InProcess)
    InProcess.started = ()
    out = tmp_path / "out"

    def run(rate: str, *options: str) -> dict:
        paths = [str(MICRO), changed(tmp_path, f"--optim.lr={rate}")]
        assert commands.main([*paths, *SHORT, *data_overrides(shapes_dir), f"--out={out}", *options]) == 0
        return json.loads((out / "compare.json").read_text())

    return run


def test_a_lower_rate_is_worse_and_finished_runs_are_taken_as_they_are(compared, tmp_path, capsys):
    """The figures are those of the runs' own records: of the last step pair for training at 48 samples."""
    found = compared("1e-5", "--seeds=2")
    out = tmp_path / "out"
    assert InProcess.started == ("a_0", "b_0", "a_1", "b_1")
    assert found["differ"] == {"optim.lr": "0.002 in A, 1e-05 in B"}
    validation = []
    training = []
    for i in (0, 1):
        a, b = out / f"a_{i}", out / f"b_{i}"
        cfg = config_file.of_run(b)
        assert (cfg.train.seed, cfg.optim.lr) == (i, 1e-5)
        validation.append(lines(b, "eval.jsonl")[-1]["val_loss"] - lines(a, "eval.jsonl")[-1]["val_loss"])
        training.append(sum(lines(b)[k]["loss"] - lines(a)[k]["loss"] for k in (2, 3)) / 2)
    assert found["validation"]["48"]["each"] == pytest.approx(validation, rel=1e-9) and min(validation) > 0
    assert found["training"]["48"]["each"] == pytest.approx(training, rel=1e-9)
    mean = sum(figure["b - a"] for figure in found["time"].values()) / 8
    assert mean == pytest.approx(found["validation"]["48"]["b - a"], rel=1e-6)
    said = capsys.readouterr().out
    assert "optim.lr is 0.002 in A, 1e-05 in B\n" in said and f"\n{found['verdict']}\n" in said
    assert (out / "compare.png").read_bytes()[1:4] == b"PNG"
    before = {path: path.stat().st_mtime_ns for path in out.glob("[ab]_?/*")}
    assert compared("1e-5", "--seeds=2") == found
    assert {path: path.stat().st_mtime_ns for path in out.glob("[ab]_?/*")} == before


@pytest.mark.slow  # runs of a second each
def test_a_run_that_fails_ends_the_comparison_with_its_name_and_log(compared, tmp_path):
    with pytest.raises(SystemExit) as caught:  # a text: the exit code is 1
        compared("1e6", "--seeds=1")
    log = tmp_path / "out" / "b_0.log"
    assert f"{tmp_path}/out/b_0 failed: train.py: " in caught.value.code and "not finite" in caught.value.code
    assert caught.value.code.endswith(f"; see {log}") and "train.py: " in log.read_text()


@pytest.mark.slow  # runs of a second each
def test_a_folder_of_other_runs_is_refused(compared, tmp_path):
    """train.py itself refuses to go on with another config."""
    compared("1e-5", "--seeds=1")
    line = refusal(lambda: compared("1e-4", "--seeds=1"))
    assert "b_0 failed" in line and "optim.lr=0.0001, there 1e-05" in line


def test_several_ranks_run_under_torchrun_whose_words_tell_a_refusal_from_a_failure(monkeypatch, tmp_path):
    """torchrun itself ends with 1 in both cases. One rank that a signal has killed left no words."""
    seen = []
    for ranks, code, of_rank, kind in (
        (2, 1, 2, Refusal),
        (2, 1, 3, SystemExit),
        (1, 2, 0, Refusal),
        (1, -9, 0, SystemExit),
    ):

        class Fake(InProcess):
            def __init__(self, command: list, stdout, code=code, of_rank=of_rank, **_):
                seen.append([str(word) for word in command[1:-2]])
                self.code = code
                if code > 0:
                    stdout.write(f"train.py: as it happens\n  exitcode  : {of_rank} (pid: 22)\n" + "=" * 60)

        monkeypatch.setattr(commands, "Popen", Fake)
        with pytest.raises(kind) as caught:
            commands.train({"a": config_file.load(MICRO)}, 1, tmp_path, ranks)
        said = "train.py: as it happens" if code > 0 else "exit code -9"
        assert str(caught.value) == f"run {tmp_path}/a_0 failed: {said}; see {tmp_path}/a_0.log"
    assert (tmp_path / "a_0.log").read_text().count("as it happens") == 3, "a log keeps what was written before"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert seen == [launcher, launcher, [], []]


REFUSED = {  # an override of B, and words of the line
    "train.global_batch=24": "train.global_batch is 12 in A, 24 in B; pairs share data.*, ",
    "train.max_samples=120": "train.max_samples is 60 in A, 120 in B",
    "train.seed=1": "train.seed is 0 in A, 1 in B",
    "train.log_every_samples=24": "train.log_every_samples is 12 in A, 24 in B",
    "eval.every_samples=12": "eval.every_samples is 36 in A, 12 in B",
    "eval.noise=fixed": "eval.noise is 'fresh' in A, 'fixed' in B",
    "data.train_count=60": "data.train_count is 50 in A, 60 in B",
    "model.text_tokens=10": "model.text_tokens is 9 in A, 10 in B",
    "model.latent_width=8": "model.latent_width is 6 in A, 8 in B; ",
    "model.t5_dim=32": "give --model.t5_dim=VALUE for both",
}
OPTIONS = {  # and of options
    "--eval.target=0.5": "eval.target=0.5: compared runs evaluate to the end; set eval.target to 0",
    "--data.val=": "data.val='': compared runs evaluate to the end; set data.val to a folder",
    "--optim.lr=fast": "optim.lr='fast' is not a number",
    "--optim.rate=1": "optim.rate",
    "--seeds=0": "--seeds",
    "--ranks=7": "7 ranks",
    "--x=1": "unknown key x",
    str(MICRO): "",
}


def test_configs_that_make_no_pairs_are_refused_before_anything_is_written(tmp_path):
    out = f"--out={tmp_path / 'out'}"
    lines = {of_b: refusal(commands.main, [str(MICRO), changed(tmp_path, f"--{of_b}"), out]) for of_b in REFUSED}
    lines |= {option: refusal(commands.main, [str(MICRO), str(MICRO), out, option]) for option in OPTIONS}
    wants = REFUSED | OPTIONS
    assert {case: line for case, line in lines.items() if wants[case] not in line} == {}
    refusal(commands.main, [str(MICRO), out])
    (tmp_path / "mistyped.toml").write_text("train.globalbatch = 12")
    assert "mistyped.toml: unknown key" in refusal(commands.main, [str(MICRO), str(tmp_path / "mistyped.toml"), out])
    assert not (tmp_path / "out").exists()


def written(folder: Path, losses: dict[int, float]) -> Path:
    """The records of a run with these validation losses by samples; each timestep has the loss of all."""
    folder.mkdir()
    tests = [{"samples": at, "val_loss": loss, "val_loss_per_timestep": [loss] * 8} for at, loss in losses.items()]
    steps = [{"samples": at, "loss": at / 10, "samples_per_s": 1 + (at > 12)} for at in (12, 24, 36)]
    for name, records in (("eval.jsonl", tests), ("metrics.jsonl", steps)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


AFTER = "in validation loss after 36 samples"
UNSURE = "B and A are not distinguishable: "
VERDICTS = [  # the last losses of A, of B, and the sentence
    ((1.0, 2.0, 3.0), (1.1, 2.1, 3.11), f"B is worse than A by 0.1033 +- 0.0033 {AFTER} (p = 0.001)"),
    ((1.1, 2.1, 3.11), (1.0, 2.0, 3.0), f"B is better than A by 0.1033 +- 0.0033 {AFTER} (p = 0.001)"),
    (
        (1.0, 2.0, 3.0),
        (1.1, 1.9, 3.11),
        f"{UNSURE}0.03667 +- 0.068 {AFTER}; it would take about 84 seeds to see a difference of this size",
    ),
    ((1.0, 2.0), (1.0, 2.0), f"{UNSURE}0 +- 0 {AFTER}; their means are equal"),
    ((1.0,), (2.0,), "no verdict: one seed has no standard error; give --seeds=2 or more"),
]


def test_the_sentence_follows_from_the_last_losses_that_all_runs_have(tmp_path):
    """One run of A has gone further. The rate is the median of the steps."""
    wrong = []
    for number, (*sides, sentence) in enumerate(VERDICTS):
        runs = {"a": [], "b": []}
        for side, losses in zip(runs, sides):
            for i, loss in enumerate(losses):
                runs[side].append(written(tmp_path / f"{number}{side}{i}", {24: 5.0, 36: loss}))
        with (runs["a"][0] / "eval.jsonl").open("a") as file:
            file.write(json.dumps({"samples": 48, "val_loss": 9.0}) + "\n")
        found, verdict = commands.compare(*runs.values())
        assert list(found["validation"]) == [24, 36] and found["samples/s"]["median"]["b"] == 2.0
        assert found["training"][24]["a"] == pytest.approx(1.8)
        assert list(found["time"]) == [f"{k}/8" for k in range(8)]
        wrong += [verdict] if verdict != sentence else []
    assert not wrong


def test_runs_without_a_common_evaluation_are_refused(tmp_path):
    runs = [[written(tmp_path / side, {at: 1.0})] for side, at in (("a", 24), ("b", 36))]
    assert "share no evaluation" in refusal(commands.compare, *runs)


@pytest.mark.slow  # three starts of torch
def test_a_comparison_that_is_stopped_goes_on_where_it_stopped(shapes_dir, tmp_path):
    """Ctrl-C reaches it and its first run, which saves and ends. With equal configs all differences are zero."""
    out = tmp_path / "out"
    records = out / "a_0" / "metrics.jsonl"
    argv = ["tools/compare/__main__.py", MICRO, MICRO, "--seeds=1", f"--out={out}", *data_overrides(shapes_dir)]
    argv = [str(word) for word in (*argv, *killing.LONG)]
    with killing.Job(tmp_path / "first", *argv, ranks=0) as job:
        assert job.until(lambda: count(records) >= 3)
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.gone(30)
    assert 3 <= count(records) < 24 and not (out / "a_0" / "outcome.json").exists()
    with killing.Job(tmp_path / "second", *argv, ranks=0) as job:
        assert job.wait() == 0, job.said
    assert "resume  the run in this folder" in (out / "a_0.log").read_text()
    assert "resume" not in (out / "b_0.log").read_text() and count(records) == 24
    found = json.loads((out / "compare.json").read_text())
    figures = [figure for kind in ("training", "validation", "time") for figure in found[kind].values()]
    assert len(figures) == 3 + 3 + 8 and all(figure["each"] == [0.0] for figure in figures)
