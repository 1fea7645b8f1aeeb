"""Scores of benchmark logs: against mlperf-logging's own code and closed forms; damaged logs must be explained."""

import glob
import html.parser
import json
import logging
import re
import shutil
import sys

import made_logs
import pytest
import yaml
from conftest import MICRO
from made_logs import MadeLog
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer.result_summarizer import _compute_strong_score_standalone

from flux_ref import config_file
from flux_ref.benchmark import convergence
from flux_ref.benchmark.mllog import RESUMED
from flux_ref.config import MllogConfig
from tools.report import charts, official, result_files, result_log, score, text
from tools.report import commands as report


@pytest.fixture(autouse=True)
def quick_rules(monkeypatch):
    """mlperf-logging reads its rules anew for every log. libyaml takes a tenth of the time."""
    monkeypatch.setattr(yaml, "BaseLoader", getattr(yaml, "CBaseLoader", yaml.BaseLoader))


@pytest.fixture
def results(tmp_path):
    """A folder with ten runs that are a valid result."""
    made_logs.system(tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def undrawn(monkeypatch):
    """Charts are empty, which takes less time."""
    monkeypatch.setattr(charts, "svg", lambda chart: "")


def run_report(capsys, *args, out):
    """Exit code, the terminal's text, the figures, and the page."""
    code = report.main([*map(str, args), f"--out={out}", f"--json={out}.json"])
    text = capsys.readouterr()
    page = (out / "report.html").read_text(encoding="utf-8")
    return code, text.out + text.err, json.loads(out.with_suffix(".json").read_text()), page


def judged(folder, ruleset=MllogConfig.ruleset, points=None):
    name, files = result_files.find([str(folder)])[0]
    return score.judge(name, [result_log.read(path) for path in files], ruleset, points)


def by_hand(folder):
    """Minutes of each run and their olympic mean, in as few lines as it takes."""
    minutes = []
    for path in sorted(folder.glob("result_*.txt")):
        found = dict(re.findall(r'"key": "(run_\w+)".*"time_ms": (\d+)', path.read_text()))
        minutes.append((int(found["run_stop"]) - int(found["run_start"])) / 60_000)
    return minutes, sum(sorted(minutes)[1:-1]) / 8


def test_valid_system(results):
    """Score, samples and verdict: by hand, and by mlperf-logging's own score and convergence check."""
    minutes, mean = by_hand(results)
    ruleset = "5.1.0"  # the other tests take the default
    system = judged(results, ruleset)
    assert system.reasons == [] and [run.faults for run in system.runs] == [[]] * 10
    assert sorted(run.minutes for run in system.runs) == pytest.approx(sorted(minutes), abs=1e-9)
    assert system.olympic_mean_minutes == pytest.approx(mean, abs=1e-9)
    track, _, official_score, _, _ = _compute_strong_score_standalone(
        "flux1", "any", False, str(results), "training", ruleset, return_full_scores=True
    )
    assert {str(run.log.path): run.minutes for run in system.runs} == track
    assert system.olympic_mean_minutes == pytest.approx(official_score, abs=1e-12)
    files = glob.glob(f"{results}/result_*.txt")
    _, samples, _ = rcp_checker.get_submission_epochs(files, ruleset, False)
    assert sorted(run.samples_to_converge for run in system.runs) == sorted(samples)
    verdict = rcp_checker.check_directory(
        str(results), "training", ruleset, False, False, rcp_pass="pruned_rcps", set_scaling=True
    )
    check = system.verdicts.convergence
    assert (check.passed, check.message, check.factor) == verdict
    assert system.samples_to_converge == sum(sorted(samples)[1:-1]) / 8


def test_throughput_by_closed_form(tmp_path):
    """300 s of initialisation; blocks at the given rate; 6.4 s per evaluation."""
    run = score.measure(result_log.read(MadeLog(3, evaluations=20, rate=2000).write(tmp_path / "result_0.txt")))
    samples = 20 * made_logs.INTERVAL
    assert (run.samples, run.evaluation_s) == (samples, pytest.approx(20 * 6.4))
    assert run.samples_per_s == pytest.approx(samples / run.run_ms * 1000)
    assert run.samples_per_s_without_evaluation == pytest.approx(samples / (run.run_ms / 1000 - 128), rel=1e-12)
    assert run.samples_per_s_without_evaluation == pytest.approx(2000, rel=0.01)


def test_only_evaluations_of_the_run_count_and_each_once(tmp_path):
    """One before run_start is a warm-up; a second value for the same samples is another rank's."""
    plain = score.measure(result_log.read(MadeLog(3, evaluations=5).write(tmp_path / "plain.txt")))
    log = MadeLog(3, evaluations=5)
    keys = [entry[0] for entry in log.entries]
    first = keys.index("eval_start")
    again = [[key, 0.1, metadata, kind, 0] for key, _, metadata, kind, _ in log.entries[first : first + 3]]
    log.entries.insert(len(keys) - 1, again[1])
    start = keys.index("run_start")
    log.entries[start:start] = again
    found = score.measure(result_log.read(log.write(tmp_path / "log.txt")))
    assert found.val_curve == plain.val_curve and found.evaluation_s == plain.evaluation_s


def test_a_resumed_run_shows_all_its_losses_and_no_rate(tmp_path):
    """Its parts have no common clock: the time of the last part would not fit the samples of all."""
    for ended in (False, True):  # killed, or stopped by Ctrl-C
        first, log = MadeLog(3, evaluations=5), MadeLog(4, evaluations=9)
        log.entries.insert(1, ["disqualified", f"{RESUMED} 7", *log.entries[0][2:]])
        log.entries[:0] = first.entries if ended else first.entries[:-1]
        parts = result_log.read(log.write(tmp_path / "log.txt"))
        run = score.measure(parts)
        assert "a resumed run logs its seed at each start" in official.check([parts], "6.1.0").seeds[0]
        assert len(run.val_curve) == 9 and run.samples == run.val_curve[-1][0]
        assert run.minutes is run.samples_per_s is None and any("resumed" in fault for fault in run.faults)


def test_names_in_a_table_stay_different():
    """Whole folders are left out at the front, as long as no two become equal."""
    ends = ["gb200_ngpu72_ngc25.09_nemo", "gb300_ngpu72_ngc25.09_nemo"]
    assert text.shortened([f"x/NVIDIA/{end}" for end in ends]) == ends
    assert text.shortened(["x/A/run", "x/B/run", "x/B/run"]) == ["A/run", "B/run", "B/run"]


def test_checks_leave_no_trace(results, tmp_path, monkeypatch):
    """mlperf-logging writes logs and scaling.json where it can, and talks through the root logger."""
    root = logging.getLogger()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(root, "level", logging.ERROR)
    monkeypatch.setattr(mlp_compliance, "enqueued_configs", ["left behind by another check"])
    before, files = [*root.handlers], sorted(tmp_path.rglob("*"))
    assert [run.faults for run in judged(results).runs] == [[]] * 10
    assert sorted(tmp_path.rglob("*")) == files
    assert (root.handlers, root.level) == (before, logging.ERROR)


def rewrite(change):
    def apply(path):
        path.write_bytes(change(path.read_bytes()))

    return apply


AROUND = {
    "crlf": rewrite(lambda raw: raw.replace(b"\n", b"\r\n")),
    "latin-1": rewrite(lambda raw: b"\x00\xff\xfe junk \x1b[31m\n" + raw + b"\xe9\xa0\x85 end"),
    "prefixes": rewrite(lambda raw: raw.replace(b" 0: :::", b"\x1b[32m 12%|#\r 0: :::MLLOGnot \xe9 :::")),
    "long line": rewrite(lambda raw: b"x" * 5_000_000 + b"\n" + raw),
    "two ranks": rewrite(lambda raw: b"".join(line + line.replace(b" 0:", b" 1:") for line in raw.splitlines(True))),
}


def test_what_lies_around_entries_changes_nothing(tmp_path):
    (plain,) = judged(MadeLog().write(tmp_path / "plain" / "result_0.txt").parent).runs
    wrong = []
    for name, damage in AROUND.items():
        path = MadeLog().write(tmp_path / name / "result_0.txt")
        damage(path)
        (run,) = judged(path.parent).runs
        figures = ("faults", "minutes", "val_curve", "evaluation_s", "samples")
        wrong += [(name, figure) for figure in figures if getattr(run, figure) != getattr(plain, figure)]
    assert plain.faults == [] and not wrong
    path = MadeLog(submission_org="Universität").write(tmp_path / "result_0.txt")
    for encoding in ("utf-8", "latin-1"):
        path.write_text(path.read_text(encoding="utf-8").replace("\\u00e4", "ä"), encoding=encoding)
        assert result_log.read(path).value("submission_org") == "Universität"


def test_a_log_that_cannot_be_read_is_a_problem_of_its_own(tmp_path):
    assert result_log.read(tmp_path / "absent.txt").problems[0].startswith("cannot be read: ")


def test_a_huge_line_is_not_parsed(tmp_path):
    entry = b':::MLLOG {"key": "seed", "value": 1, "time_ms": 1}\n'
    path = tmp_path / "result_0.txt"
    for before in (1, result_log.LINE_LIMIT - 4, 3 * result_log.LINE_LIMIT):
        path.write_bytes(b"x" * 100_000 + b"\n" + b"x" * before + entry[:-1] + b"x" * 100_000 + b"\n" + entry)
        log = result_log.read(path)
        assert [event.line for event in log.events] == [3] and [*log.lines] == [2, 3], before
        assert len(log.problems) == 1 and "line 2 has an entry that is empty or longer" in log.problems[0], before


def without(key):
    return rewrite(lambda raw: re.sub(rb'.*"key": "%s".*\n' % key.encode(), b"", raw))


def replaced(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


def twice(path):
    path.write_text(path.read_text() + "\n".join(MadeLog(555, evaluations=3).lines()) + "\n")


def samples_lost(path):
    head, _, tail = path.read_text().rpartition("eval_accuracy")
    path.write_text(head + "eval_accuracy" + re.sub(r', "samples_count": \d+', "", tail, count=1))


def appended(content):
    return rewrite(lambda raw: raw + content)


# What is done to one of the ten, and what the report must say.
BROKEN = {
    "missing key": (without("opt_name"), "Required EXACTLY_ONE occurrence of 'opt_name' but found 0"),
    "a huge entry": (appended(b':::MLLOG {"key": "' + b"y" * 20_000_000 + b'"}\n'), "longer than 16,384 characters"),
    "wrong value": (replaced('"opt_name", "value": "adamw"', '"opt_name", "value": "lion"'), "opt_name=lion in line"),
    "missed the target": (replaced("0.5855", "0.5865"), "no evaluation reached the target"),
    "aborted": (replaced('"status": "success"', '"status": "aborted"'), "run_stop has status 'aborted'"),
    "truncated": (rewrite(lambda raw: raw[: len(raw) // 2]), "run_stop is missing"),
    "half a line": (rewrite(lambda raw: raw[: raw.rindex(b"}, ") - 40]), "an entry that is cut off or damaged"),
    "empty": (rewrite(lambda raw: b""), "is empty"),
    "junk": (rewrite(lambda raw: bytes(range(256)) * 1000), "holds no :::MLLOG entry"),
    "no run_start": (without("run_start"), "run_start is missing"),
    "two runs": (twice, "two runs in one file"),
    "no samples_count": (samples_lost, "has no samples_count"),
    "NaN": (replaced('"value": 0.5855', '"value": NaN'), "has the value nan"),
    "no time": (replaced('"time_ms": 17', '"time_ms": "soon", "x": 17'), "which is no time"),
    "time runs back": (replaced('"INTERVAL_END", "time_ms": 176', '"INTERVAL_END", "time_ms": 1'), "not later"),
    "a list": (appended(b':::MLLOG [1, {"key": 2}]\n'), "cut off or damaged"),
    "deep": (appended(b":::MLLOG " + b"[" * 10_000 + b"\n"), "cut off or damaged"),
    "colour after it": (rewrite(lambda raw: raw.replace(b"}\n", b"}\x1b[0m\n")), "goes on after its entry"),
    "another benchmark": (replaced('"value": "flux1"', '"value": "bert"'), "submission_benchmark is 'bert'"),
    "no metadata": (appended(b':::MLLOG {"key": "seed", "value": 1, "time_ms": 1}\n'), "KeyError"),
}


def test_broken_logs_are_explained(capsys, tmp_path, undrawn):
    """Each is a system of its own: a fault of one line for each, no traceback, and a page all the same."""
    for i, (damage, _) in enumerate(BROKEN.values()):
        damage(MadeLog().write(tmp_path / "tree" / f"s{i:02}" / "result_0.txt"))
    code, text, figures, _ = run_report(capsys, tmp_path / "tree", out=tmp_path / "out")
    assert code == report.INVALID and "Traceback" not in text
    assert "platform None" not in text and "batch None" not in text
    assert len(figures["systems"]) == len(BROKEN)
    joined, wrong = " ".join(text.split()), []
    for (name, (_, says)), system in zip(BROKEN.items(), figures["systems"]):
        faults = system["runs"][0]["faults"]
        if not any(says in fault for fault in faults) or any("\n" in f or len(f) > 300 for f in faults):
            wrong.append((name, faults))
        if " ".join(says.split()) not in joined:
            wrong.append((name, "not in the text"))
    assert not wrong


def test_one_run_may_fail_and_counts_as_the_worst(results):
    """The other nine keep their figures. A second one is too many."""
    minutes, _ = by_hand(results)
    for i, name in ((3, "missing key"), (6, "aborted")):
        BROKEN[name][0](results / f"result_{i}.txt")
        system = judged(results)
        if i == 3:
            kept = minutes[:3] + minutes[4:]
            assert system.reasons == [] and "result_3.txt counts as the worst" in system.notes[0]
            assert [run.minutes for run in system.counted] == pytest.approx(kept)
            assert system.olympic_mean_minutes == pytest.approx(sum(sorted(kept)[1:]) / 8)
    assert system.olympic_mean_minutes is None and system.score_minutes is None
    assert any("failed runs, at most 1 may: result_3.txt, result_6.txt; " in reason for reason in system.reasons)


DOES_NOT_BELONG = [
    (lambda log: log.change("seed", 101), "already logs the same seed"),
    (lambda log: log.change("seed", 5, file=[]), "the official seed checker stopped: TypeError"),
    (lambda log: log.change("submission_division", ["open"]), "mixed submission_division"),
    (lambda log: log.change("global_batch_size", 2048), "mixed global_batch_size: 1024 in result_0.txt, 2048"),
]


def test_runs_that_do_not_belong_together(tmp_path):
    made_logs.system(tmp_path, 3)
    assert judged(tmp_path).reasons == ["3 runs; the rules ask for 10"]
    wrong = []
    for change, says in DOES_NOT_BELONG:
        change(MadeLog(777)).write(tmp_path / "result_3.txt")
        system = judged(tmp_path)
        if not any(says in reason for reason in system.reasons) or system.score_minutes is not None:
            wrong.append((says, system.reasons))
    assert not wrong


def test_mixed_systems_are_named_not_averaged(capsys, results, tmp_path, undrawn):
    """Five of the ten of another submitter: no figure of them together anywhere, each run's own stay."""
    minutes, mean = by_hand(results)
    mixed_folder, valid_folder = (shutil.copytree(results, tmp_path / name) for name in ("mixed", "valid"))
    for path in sorted(mixed_folder.iterdir())[:5]:
        replaced("SUBMISSION_ORG_PLACEHOLDER", "Another")(path)
    code, text, figures, page = run_report(capsys, mixed_folder, valid_folder, out=tmp_path / "out")
    mixed, valid = figures["systems"]
    means = ("olympic_mean_minutes", "normalisation_factor", "score_minutes", "samples_to_converge")
    means += ("samples_per_s", "samples_per_s_without_evaluation")
    assert [mixed[key] for key in means] == [None] * 6 and None not in [valid[key] for key in means]
    assert mixed["convergence_pass"]  # so that nothing else keeps the figures back
    assert code == report.INVALID and "mixed submission_org" in " ".join(mixed["reasons"])
    assert [words.count("olympic mean: ") for words in (text, page)] == [1, 1]
    assert re.search("^mixed +- +1024 +10/10( +-){4}$", text, re.M)
    assert valid["olympic_mean_minutes"] == pytest.approx(mean)
    for system in (mixed, valid):
        assert [run["minutes"] for run in system["runs"]] == pytest.approx(minutes)
    assert valid["valid"] and valid["seeds_pass"] and valid["convergence_pass"] and valid["compliant_logs"] == 10
    assert max(map(len, text.split("\nsystem ")[0].splitlines())) <= 80


def test_reference_points_decide(tmp_path):
    """Within what is accepted, the score is the time the reference's convergence would have taken."""
    folder = tmp_path / "fast"
    for i in range(10):
        MadeLog(i, evaluations=31, rate=1600).write(folder / f"result_{i}.txt")
    system, mean = judged(folder), 31 * made_logs.INTERVAL
    check = system.verdicts.convergence
    assert check.least_mean < mean < check.reference_mean and check.passed
    factor = check.reference_mean / mean
    assert system.score_minutes == pytest.approx(system.olympic_mean_minutes * factor) and factor > 1.01
    knobs = {"opt_base_learning_rate": 1e-4, "opt_learning_rate_warmup_steps": 0}
    point = {"Benchmark": "flux1", "BS": 1024, "Hyperparams": knobs, "samples to converge": [20_000_000] * 20}
    points = tmp_path / "points.json"
    points.write_text(json.dumps({"mine": point}))
    check = judged(folder, points=points).verdicts.convergence
    assert not check.passed and check.reference_mean == 20_000_000
    made_logs.system(tmp_path / "open", 3, submission_division="open")
    verdicts = judged(tmp_path / "open").verdicts
    assert verdicts.convergence is None and verdicts.seeds == []


def test_no_rule_file_named_by_a_log_is_run(tmp_path):
    """The official checker would run the code of a rule file that the division leads to."""
    trap = tmp_path / "x_common.yaml"
    trap.write_text(f"- BEGIN:\n    CODE: open({str(tmp_path / 'sprung')!r}, 'w')\n")
    path = MadeLog(submission_division=f"{'../' * 20}{tmp_path}/x").write(tmp_path / "results" / "result_0.txt")
    assert "submission_division is" in judged(path.parent).runs[0].faults[0]
    assert not (tmp_path / "sprung").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(official, "SAFE", {})
        official.check([result_log.read(path)], MllogConfig.ruleset)
    assert (tmp_path / "sprung").exists()  # the trap is one


def own_run(folder, seed, **changes):
    """A run folder as train.py leaves it."""
    folder.mkdir(parents=True)
    cfg = config_file.replace(config_file.load(MICRO, [f"--run.dir={folder}", f"--train.seed={seed}"]), **changes)
    (folder / "config.toml").write_text(config_file.dump(cfg))
    text = "flux_ref micro: FLUX.1\n  ranks   2 x cpu (2 shard), torch 2.15"
    made_logs.ours(folder / "result_0.txt", cfg, (0.5,), (100, 10), text=text)


def test_a_tree_holds_systems(tmp_path):
    for name in ("A/results/one/flux1", "A/results/two/flux1", "B/results/one/flux1"):
        for file in ("result_10.txt", "result_9.txt", "result_2.txt"):
            MadeLog(3).write(tmp_path / name / file)
    groups = result_files.find([str(tmp_path)])
    assert [name for name, _ in groups] == ["A/results/one/flux1", "A/results/two/flux1", "B/results/one/flux1"]
    assert [path.name for path in groups[0][1]] == ["result_2.txt", "result_9.txt", "result_10.txt"]
    again = result_files.find([str(tmp_path), str(tmp_path / "A"), str(groups[0][1][0])])
    assert [len(files) for _, files in again] == [3, 3, 3]  # a file given twice is one run
    MadeLog(3).write(tmp_path / "A/result_0.txt")
    assert {name for name, _ in result_files.find([str(tmp_path / "A")])} == {
        "A",
        "A/results/one/flux1",
        "A/results/two/flux1",
    }


def test_our_runs_side_by_side(tmp_path):
    """Equal but for the seed: one system. Another batch: another system. What launch/ gathers counts once."""
    for i in range(3):
        own_run(tmp_path / f"run_{i}", i)
        shutil.copy(tmp_path / f"run_{i}" / "result_0.txt", tmp_path / f"result_{i}.txt")
    own_run(tmp_path / "other", 0, train__global_batch=24)
    with (tmp_path / "result_2.txt").open("a") as file:
        file.write("another run's\n")
    groups = {(name, len(files)): files for name, files in result_files.find([str(tmp_path)])}
    ours, copy = f"{tmp_path.name}/run_0", f"{tmp_path.name}/{tmp_path.name}"  # two systems have one parent
    assert groups.keys() == {(f"{tmp_path.name}/other", 1), (copy, 1), (ours, 3)}
    files = groups[ours, 3]
    logs = [result_log.read(path) for path in files]
    names = [run.name for run in score.judge("mine", logs, MllogConfig.ruleset).runs]
    assert names == [f"run_{i}/result_0.txt" for i in range(3)]
    assert result_files.accelerators(result_files.machine(files[0], logs[0].system)) == 2


def test_report_of_our_runs(capsys, tmp_path, undrawn):
    own_run(tmp_path / "runs" / "mine", 0)
    code, text, figures, page = run_report(capsys, tmp_path / "runs", out=tmp_path / "out")
    assert code == report.INVALID and "1 run; the rules ask for 10" in text
    assert figures["systems"][0]["runs"][0]["samples"] == 262_656
    for words in ("<td>not a valid result</td>", "Validation loss at", "opt_base_learning_rate", "2 x cpu"):
        assert words in page, words


def test_system_description_of_the_benchmarks_tree(tmp_path):
    path = MadeLog().write(tmp_path / "A" / "results" / "sys" / "flux1" / "result_0.txt")
    (tmp_path / "A" / "systems").mkdir()
    described = {
        "number_of_nodes": "18",
        "accelerators_per_node": 4,
        "other_software_stack": {"nccl": "2.28"},
        "x": [1],
    }
    (tmp_path / "A" / "systems" / "sys.json").write_text(json.dumps(described))
    found = result_files.machine(path, {})
    assert result_files.accelerators(found) == 72 and found["nccl"] == "2.28"


def test_refusals(capsys, tmp_path, results, monkeypatch):
    """One line each, and nothing is written."""
    (tmp_path / "empty").mkdir()
    contents = {"result_0.txt": "\0" * 100, "file": "mine", "text": "{", "bare": "{}", "list": "[1]"}
    for name, content in (contents | {"other": '{"a": {"Benchmark": "bert"}}'}).items():
        (tmp_path / name).write_text(content)
    cases = [
        ([results, "--points=bare"], "bare is no file of ref"),
        ([results, "--points=other"], "other is no file of ref"),
        ([results, "--points=list"], "reference points list "),
        (["empty", "--points=text"], "text is no JSON"),  # before the first log is read
        ([results, ""], "an empty path is no result file"),
        (["nothing"], "nothing holds no result_*.txt"),
        (["empty"], "empty holds no result_*.txt"),
        (["result_0.txt"], "no log could be read"),
        ([results, "--points=x"], "reference points x: No such file"),
        ([results, "--out=file/sub"], "file/sub: Not a directory; make it"),
        ([results, "--out=none"], "pip install matplotlib"),
    ]
    monkeypatch.chdir(tmp_path)
    for args, says in cases:
        if "matplotlib" in says:
            monkeypatch.setitem(sys.modules, "matplotlib", None)
        code = report.main(["--out=out", *map(str, args)])
        error = capsys.readouterr().err
        assert code == 2 and says in error and error.count("\n") == 1, (says, error)
        assert not [*tmp_path.glob("*/report.html")] and (tmp_path / "file").read_text() == "mine", says


class Page(html.parser.HTMLParser):
    """The tags and the names of attributes that there are."""

    def __init__(self, text):
        super().__init__()
        self.tags = set()
        self.attributes = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= dict(attributes).keys()


def test_page_is_safe(capsys, tmp_path):
    """Whatever a log says, nothing is loaded or run."""
    evil = "<script>alert(1)</script>\"'><img src=x onerror=y>\x1b[2J\ud800 &amp; $x_2$"
    folder = tmp_path / "<b>'\"&\x1b\udcff_$A_$B"  # a byte that is no UTF-8; what matplotlib takes for mathematics
    made_logs.system(folder, 2, submission_org=evil, submission_platform=evil, opt_name=evil)
    (folder / "result_1.txt").write_text(f":::SYSJSON {json.dumps({'framework': evil})}\n{evil!a}")
    code, text, _, content = run_report(capsys, folder, out=tmp_path / "out")
    assert code == report.INVALID and "\x1b" not in text and "$x_2$" in content
    parsed = Page(content)
    assert "svg" in parsed.tags and not parsed.tags & {"script", "img", "link", "iframe", "object", "b"}
    assert not [name for name in parsed.attributes if name in ("src", "href") or name.startswith("on")]


def lines_of(chart):
    """The points of each line of a chart."""
    return [list(zip(*line.get_data())) for line in chart.figure.axes[0].lines]


def test_losses_per_timestep_are_those_of_the_first_run(tmp_path):
    made_logs.system(tmp_path, 1)
    every = ([n + k / 8 for k in range(8)] for n in (100, 200))
    losses = [*every, "x", [1.0], [None] * 8]  # the last three are no losses of eight timesteps
    records = [{"samples": n, "val_loss_per_timestep": found} for n, found in zip((100, 200, 300, 400, 500), losses)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (chart,) = charts.timesteps([judged(tmp_path)])
    assert lines_of(chart) == [[(100, 100 + k / 8), (200, 200 + k / 8)] for k in range(8)]


def test_a_damaged_eval_jsonl_costs_its_chart_only(capsys, tmp_path, undrawn):
    made_logs.system(tmp_path / "one", 1)
    (tmp_path / "one" / "eval.jsonl").write_text("foreign\n")
    _, _, figures, page = run_report(capsys, tmp_path / "one", out=tmp_path / "out")
    (note,) = figures["systems"][0]["notes"]
    assert "no chart of its timesteps: " in note and "eval.jsonl line 1 is damaged" in note
    assert "no chart of its timesteps:" in page


def test_charts_show_the_figures(results):
    """What is drawn, read back from matplotlib's axes: curves, band, target, runs, means."""
    system = judged(results)
    system.name = "_a"  # matplotlib leaves out labels that begin so
    loss, minutes, samples = charts.of_systems([system])
    band = convergence.public_band(1024)
    curves = [
        *(run.val_curve for run in system.runs),
        [(0, 0.586), (1, 0.586)],
        [(point.samples, point.median) for point in band],
    ]
    assert lines_of(loss) == curves
    assert loss.figure.axes[0].get_legend_handles_labels()[1][:2] == [" _a", "target 0.586"]
    for chart, figure, mean in (
        (minutes, "minutes", system.olympic_mean_minutes),
        (samples, "samples_to_converge", system.samples_to_converge),
    ):
        assert lines_of(chart) == [[(getattr(run, figure), 0)] for run in system.runs] + [[(mean, 0)]]
