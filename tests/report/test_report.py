"""Scores of benchmark logs: against mlperf-logging's own code and closed forms; what is wrong must be explained."""

import json
import logging
import math
import os
import re
import shutil
import sys
from pathlib import Path

import made_logs
import pytest
from conftest import MICRO
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer.result_summarizer import _compute_strong_score_standalone

from flux_ref import cli, config_file
from flux_ref.config import MllogConfig
from flux_ref.mlperf_log import RESUMED
from tools.report import __main__ as report
from tools.report import official, result_log, score


@pytest.fixture
def results(tmp_path):
    """A folder with ten runs that are a valid result."""
    return made_logs.system(tmp_path / "results")


def judged(folder, ruleset=MllogConfig.ruleset, points=None):
    ((name, files),) = result_log.find([folder])
    return score.judge(name, files, ruleset, points)


def change(path, old, new):
    text = path.read_text()
    assert re.search(old, text), old
    path.write_text(re.sub(old, new, text, count=1))


def test_a_valid_system_scores_as_mlperf_logging_says(results, tmp_path, monkeypatch):
    """Minutes and samples of each run, their olympic means, the verdict; the checkers leave no trace."""
    ruleset = "5.1.0"  # the other tests take the default
    root = logging.getLogger()
    monkeypatch.chdir(tmp_path)
    before = [*root.handlers], root.level, sorted(tmp_path.rglob("*"))
    system = judged(results, ruleset)
    assert ([*root.handlers], root.level, sorted(tmp_path.rglob("*"))) == before
    assert (system.verdict, system.reasons, [run.faults for run in system.runs]) == (score.VALID, [], [[]] * 10)
    track, _, minutes, _, _ = _compute_strong_score_standalone(
        "flux1", "any", False, str(results), "training", ruleset, return_full_scores=True
    )
    assert {run.file: run.minutes for run in system.runs} == track
    _, samples, _ = rcp_checker.get_submission_epochs([run.file for run in system.runs], ruleset, False)
    assert [run.samples for run in system.runs] == samples
    means = system.olympic_mean_minutes, system.samples_to_converge
    assert means == pytest.approx((minutes, sum(sorted(samples)[1:-1]) / 8))


def test_rates_come_from_the_timed_part(tmp_path):
    """300 s of initialisation; a warm-up before the run and a second rank change nothing."""
    lines = made_logs.lines(evaluations=20, rate=2000)
    start = next(i for i, line in enumerate(lines) if "run_start" in line)
    warm = [line.replace('"value": 0.', '"value": 0.0') for line in lines[start + 3 : start + 6]]
    early = [line.replace('"time_ms": 1', '"time_ms": 0.1') for line in warm]
    for i, made in enumerate(([*lines[:start], *early, *lines[start:]], [*lines, lines[-1].replace(" 0:", " 1:")])):
        (run,) = judged(made_logs.write(tmp_path / str(i) / "result_0.txt", made).parent).runs
        assert run.faults == [] and len(run.val_curve) == 20
        assert run.samples == 20 * made_logs.INTERVAL
        assert run.samples / run.samples_per_s == pytest.approx(run.samples / 2000 + 20 * 6.4, rel=0.01)


def test_a_resumed_run_shows_all_its_losses_and_no_time(tmp_path):
    """Its parts have no common clock. It was killed, or stopped by Ctrl-C."""
    first, then = made_logs.lines(3, evaluations=5), made_logs.lines(4, evaluations=9)
    said = first[1].replace("init_start", "disqualified").replace("null", f'"{RESUMED} 7"')
    for end in (-1, None):
        path = made_logs.write(tmp_path / "result_0.txt", [*first[:end], said, *then])
        (run,) = judged(path.parent).runs
        assert len(run.val_curve) == 9 and math.isnan(run.minutes) and math.isnan(run.samples_per_s)
        assert any("resumed" in fault for fault in run.faults)


# What is done to one log, and what the report must say.
BROKEN = [
    (r'.*"key": "opt_name".*\n', "", "Required EXACTLY_ONE occurrence of 'opt_name' but found 0"),
    ("0.5855", "0.5865", "Failed checks for eval_accuracy"),
    ('"status": "success"', '"status": "aborted", "reason": "sad\\\\n"', r"run_stop has status 'aborted': sad\n"),
    (r'.*"key": "run_stop".*\n', "", "run_stop is missing"),
    (r'.*"key": "run_start".*\n', "", "run_start is missing"),
    (r'(?s)(.*"run_stop".*)"time_ms": 1', r'\1"time_ms": 0.1', "no loss between run_start and run_stop"),
    ('"value": "flux1"', '"value": "bert"', "submission_benchmark is 'bert'"),
    (r"\}\n done", "", "Log lines had parsing errors"),
    ('"metadata": {', f'"metadata": {"[" * 4000}', "the official compliance checker stopped: RecursionError"),
    ('"metadata"', '"meta"', "the official compliance checker stopped: KeyError"),
]


def test_broken_logs_are_explained(tmp_path):
    """One line each, and other runs of the system keep their figures."""
    for old, new, says in BROKEN:
        path = made_logs.system(tmp_path, 2) / "result_1.txt"
        path.write_text(path.read_text().replace("\ndone", "\n done"))
        change(path, old, new)
        sound, run = judged(tmp_path).runs
        assert sound.faults == [] and sound.minutes, says
        assert any(says in fault for fault in run.faults), (says, run.faults)
        assert not any("\n" in fault or len(fault) > 350 for fault in run.faults), run.faults


def test_one_run_may_fail_and_counts_as_the_worst(results):
    """The other nine keep their figures. A second one is too many."""
    for i in (3, 6):
        change(results / f"result_{i}.txt", '"status": "success"', '"status": "aborted"')
        system = judged(results)
        if i == 3:
            kept = sorted(run.minutes for run in system.runs if not run.faults)
            assert system.reasons == [] and len(kept) == 9
            assert system.olympic_mean_minutes == pytest.approx(sum(kept[1:]) / 8)
    assert math.isnan(system.olympic_mean_minutes) and math.isnan(system.score_minutes)
    assert "2 failed runs, at most 1 may; result_3.txt: run_stop has status" in system.reasons[0]


def test_runs_that_do_not_belong_together(tmp_path):
    """No mean is made of them."""
    made_logs.system(tmp_path, 3)
    assert judged(tmp_path).reasons == ["3 of the 10 runs that the rules ask for"]
    for values, says in (
        ({"seed": 101}, "seeds: Result file result_3.txt logs seed 101 on"),
        ({"submission_division": "open"}, "mixed submission_division: closed, open"),
    ):
        made_logs.write(tmp_path / "result_3.txt", made_logs.lines(**({"seed": 7, "evaluations": 30} | values)))
        system = judged(tmp_path)
        assert any(says in reason for reason in system.reasons), (says, system.reasons)
        assert math.isnan(system.samples_to_converge) == math.isnan(system.samples_per_s) == ("mixed" in says)


def test_reference_points_decide(tmp_path):
    """Within what is accepted, the score is the time that the reference's convergence would have taken."""
    folder = tmp_path / "fast"
    for i in range(10):
        made_logs.write(folder / f"result_{i}.txt", made_logs.lines(i, evaluations=31))
    system, mean = judged(folder), 31 * made_logs.INTERVAL
    check = system.convergence
    assert check.least_mean < mean < check.reference_mean and check.passed
    factor = check.reference_mean / mean
    assert system.score_minutes == pytest.approx(system.olympic_mean_minutes * factor) and factor > 1.01
    knobs = {"opt_base_learning_rate": 1e-4, "opt_learning_rate_warmup_steps": 0}
    point = {"Benchmark": "flux1", "BS": 1024, "Hyperparams": knobs, "samples to converge": [20_000_000] * 20}
    points = tmp_path / "points.json"
    points.write_text(json.dumps({"mine": point}))
    system = judged(folder, points=points)
    assert system.reasons == ["convergence: RCP found; 8,126,464 samples to the target, accepted from 20,000,000"]
    assert judged(made_logs.system(tmp_path / "open", 3, submission_division="open")).convergence is None


def test_no_rule_file_named_by_a_log_is_run(tmp_path, monkeypatch):
    """The official checker would run the code of a rule file that the division leads to."""
    trap = tmp_path / "x_common.yaml"
    trap.write_text(f"- BEGIN:\n    CODE: open({str(tmp_path / 'sprung')!r}, 'w')\n")
    lines = made_logs.lines(submission_division=f"{'../' * 20}{tmp_path}/x")
    folder = made_logs.write(tmp_path / "results" / "result_0.txt", lines).parent
    assert any("submission_division is" in fault for fault in judged(folder).runs[0].faults)
    assert not (tmp_path / "sprung").exists()
    monkeypatch.setattr(official, "SAFE", {})
    judged(folder)
    assert (tmp_path / "sprung").exists()  # the trap is one


def test_which_files_are_a_system(tmp_path, monkeypatch):
    """Foreign ones share a folder. Our runs lie side by side and are equal but for the seed. A copy counts once."""
    monkeypatch.chdir(tmp_path)
    for i in (10, 9, 2):
        made_logs.write(Path(f"A/result_{i}.txt"), made_logs.lines(i, evaluations=1))
    for name, seed, batch in (("run_0", 0, 12), ("run_1", 1, 12), ("other", 0, 24)):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        cfg = config_file.load(
            MICRO, [f"--run.dir={name}\u2028{name}", f"--train.seed={seed}", f"--train.global_batch={batch}"]
        )
        made_logs.ours(folder / "result_0.txt", cfg, (0.5,), {"train_samples": 100, "val_samples": 10})
        (folder / "config.toml").write_text(config_file.dump(cfg))
        if name != "other":
            shutil.copy(folder / "result_0.txt", f"runs/result_{seed}.txt")
    systems = dict(result_log.find([Path("."), Path("A"), Path("A/result_9.txt")]))
    found = {name: [str(path.relative_to(tmp_path)) for path in paths] for name, paths in systems.items()}
    assert found == {
        "A": [f"A/result_{i}.txt" for i in (2, 9, 10)],
        "runs": ["runs/run_0/result_0.txt", "runs/run_1/result_0.txt"],
        "runs/other": ["runs/other/result_0.txt"],
    }
    system = score.judge("runs", systems["runs"], MllogConfig.ruleset)
    assert [run.name for run in system.runs] == ["run_0/result_0.txt", "run_1/result_0.txt"]


def test_refusals(capsys, tmp_path, results, monkeypatch):
    """One line each, and nothing is written. What cannot be read could be a failed run."""
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "piped", "folders/result_0.txt"):
        Path(folder).mkdir(parents=True)
    os.mkfifo("piped/result_0.txt")
    Path("deep").mkdir()
    Path("deep/result_0.txt").write_text(":::MLLOG " + "[" * 100_000)  # would take mlperf-logging minutes
    cases = [
        ([results, "--points=x"], "x: No such file"),
        (["nothing"], "nothing: No such file"),
        (["empty"], "empty holds no result_*.txt"),
        (["piped"], "/piped/result_0.txt is no file"),
        (["deep"], "log deep/result_0.txt has an entry of more than 10,000 bytes; mend it"),
        (["folders"], "/folders/result_0.txt is no file"),
        ([results, "--out=none"], "matplotlib is not here; install it"),
    ]
    for args, says in cases:
        if "matplotlib" in says:
            monkeypatch.setitem(sys.modules, "matplotlib", None)
        code = cli.run("report", report.main, ["--out=out", *map(str, args)])
        error = capsys.readouterr().err
        assert code == 2 and says in error and error.count("\n") == 1, (says, error)
        assert not [*tmp_path.glob("*/report.html")], says


def test_the_page_and_the_figures(capsys, tmp_path):
    """Whatever a log says, nothing is loaded or run. --json has every number."""
    evil = "<script>alert(1)</script>\"'><img src=x onerror=y>\x1b[2J &amp; $x_2$"
    folder = tmp_path / "<b>'\"&\x1b\udcff_$A_$B"  # a byte that is no UTF-8; what matplotlib takes for mathematics
    made_logs.system(folder / "a", 2, submission_org=evil, submission_platform=evil)
    made_logs.system(folder / "b", 2)
    out = tmp_path / "out"
    assert report.main([str(folder), f"--out={out}", f"--json={out}/figures.json"]) == 1
    text, content = capsys.readouterr().out, (out / "report.html").read_text(encoding="utf-8")
    assert "\x1b" not in text and "$x_2$" in content and "2 of the 10 runs" in content
    assert "<svg" in content and not re.search("<(script|img|link|iframe|object|b)\\b", content)
    first, _ = json.loads((out / "figures.json").read_text())["systems"]
    assert first["runs"][0]["minutes"] > 90 and first["convergence"]["passed"] is None
