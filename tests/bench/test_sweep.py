"""The sweep: what becomes of a variant, one report of all, and nothing that outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from conftest import MICRO, ROOT

from bench import ceiling, device_tests, kernels, race, step, sweep, sweep_table, whole
from bench.sources import sources
from bench.static.predicted import Counts
from flux_ref import config, config_file

SMALL = config_file.load(MICRO)
MODULES = {"bench.step": step, "bench.race": race, "bench.whole": whole, "bench.ceiling": ceiling}
MODULES |= {"bench.kernels": kernels, "bench.device_tests": device_tests}
COUNTS = Counts(json.loads(sweep.COUNTS.read_text()))


def test_every_variant_is_a_command_of_a_benchmark_that_exists():
    """Each config loads; but the micro model is too small for FP8."""
    for small in (True, False):
        found = sweep.variants(small, ROOT)
        assert len({variant.name for variant in found}) == len(found)
        for variant in found:
            args, overrides = MODULES[variant.module].parse(list(variant.args))
            assert variant.module in sweep_table.ROWS
            if variant.module == "bench.device_tests":
                assert all((ROOT / test).exists() for test in args.tests)
                continue
            known = [text for text in overrides if not (small and text.startswith("--precision."))]
            cfg = config_file.load(ROOT / args.config, known)
            assert cfg.model.hidden == (SMALL.model.hidden if small else 3072)


def test_all_files_with_tests_of_a_device_are_in_the_sweep():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    found = sorted(path.stem for path in marked if path.parent.name != "bench")  # the tests of bench/ only say the word
    assert found == sorted(sum(sweep.TESTS_OF.values(), ()))


def test_what_decides_most_comes_first():
    names = [variant.name for variant in sweep.variants(False, ROOT)]
    first = ["tests graphs", "ceiling", "part eager", "part compiled", "part compiled graph"]
    assert names[:8] == [*first, "part compiled graph fp8", "whole compiled", "part kernels"]


HEAD = """
import json, sys, time
where = lambda: open(sys.argv[-1].removeprefix("--json="), "w")
"""


def scripted(monkeypatch, tmp_path, sources: dict[str, str]) -> list[sweep.Variant]:
    """Variants that run a few lines of Python; where() is where a report is expected."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(sweep.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sweep, "LEAST_S", 15.0)
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(HEAD + source)
    return [sweep.Variant(name, name, (), limit_s=1.0 if name == "slow" else 20.0) for name in sources]


REPORT = {"classes": {"gemm": {"ms": 1.0, "share": 0.5}}, "idle": {"share": 0.1}, "step_ms": 2.0, "device": "abacus"}
REPORT |= {"arch": "abacus", "ranks": 1, "parameters": 1, "config": json.loads(json.dumps(config.flat(SMALL)))}


def test_what_becomes_of_a_variant_is_in_its_record(tmp_path, monkeypatch):
    sources = {
        "good": f"where().write(json.dumps({REPORT}))",
        "refused": "print('refused: unknown key graph.enabled', file=sys.stderr); print('noise'); sys.exit(2)",
        "broken": "raise ValueError('as it happens')",
        "silent": "",
        "slow": "print('begun', flush=True); time.sleep(60)",
        "late": "",
    }
    wanted, records = scripted(monkeypatch, tmp_path, sources), []
    monkeypatch.setattr(sweep, "ABORT_S", 0.5)
    begin = time.monotonic()
    with sweep.workplace() as folder:
        sweep.sweep(wanted[:-1], 1, folder, records.append)
    assert time.monotonic() - begin < 15
    sweep.sweep(wanted[-1:], sweep.LEAST_S / 60 - 0.01, tmp_path, records.append)
    found = {record["name"]: record for record in records}
    want = ["done", "refused", "failed", "failed", "out of time", "not run"]
    assert [found[name]["status"] for name in sources] == want
    assert found["good"]["report"] == REPORT and found["good"]["command"] == "python -m good"
    assert found["refused"]["line"] == "refused: unknown key graph.enabled"
    assert found["broken"]["line"] == "ValueError: as it happens" and "Traceback" in found["broken"]["output"][0]
    assert found["slow"]["output"][0] == "begun" and any('slow.py", line' in line for line in found["slow"]["output"])
    assert found["silent"]["line"] == "exit code 0" and found["late"]["line"] == "the time was up"


def test_a_sweep_writes_one_report_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    source = f"open('ran', 'a').write('x'); where().write(json.dumps({REPORT}))"
    refused = "open('ran', 'a').write('y'); print('refused: no'); sys.exit(2)"
    wanted = scripted(monkeypatch, tmp_path, {"good": source, "refused": refused})
    monkeypatch.setattr(
        sweep, "variants", lambda small, outcomes: [replace(one, name=f"{one.name} one") for one in wanted]
    )
    monkeypatch.setitem(sweep_table.ROWS, "good", sweep_table.kernel_rows)
    path = tmp_path / "new" / "sweep.json"

    def call(*more: str) -> tuple[dict, str]:
        """The report, and which variants have run so far."""
        before = signal.getsignal(signal.SIGTERM)
        try:
            assert sweep.main(["--small", "--minutes", "1", "--json", str(path), "--continue", *more]) == 0
        finally:
            signal.signal(signal.SIGTERM, before)
        return json.loads(path.read_text()), (tmp_path / "ran").read_text()

    call()
    report, ran = call()
    assert ran == "xyy", "what is done does not run again; what was refused may find its package now"
    assert {"command", "commit", "sources", "versions"} <= report.keys() and report["device"] == "abacus"
    assert [record["status"] for record in report["runs"]] == ["done", "refused"]
    assert report["versions"]["torch"] == torch.__version__.split("+")[0]
    shown = capsys.readouterr().out
    assert "gemm 50.0%, idle 10.0%" in shown and "refused: refused: no" in shown
    again, ran = call("--only", "good one")
    assert again["runs"] == report["runs"] and ran == "xyy", "a call for some variants keeps the others"
    for what, number in (("sources", 2), ("machine", 4)):
        owner = sweep if what == "sources" else sweep.common
        monkeypatch.setattr(owner, what, lambda *_: "another")
        changed, ran = call()
        assert len(changed["outdated"]) == number and {record[what] for record in changed["runs"]} == {"another"}
    assert ran == "xyyxyxy", "figures of other sources or of another machine do not count"
    assert changed["outdated"][0] == report["runs"][0], "but they are not lost"
    changed, ran = call("--model.double_blocks=1")
    assert len(changed["outdated"]) == 6 and ran == "xyyxyxyxy", "nor do those of other arguments"


def test_full_width_asks_for_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(sweep.Refusal, match="torch finds no accelerator here; --small runs the micro model"):
        sweep.main(["--json", str(tmp_path / "sweep.json")])


def test_a_variant_that_the_end_of_the_call_cuts_off_is_not_too_slow(tmp_path, monkeypatch):
    """So it does not run last in the next call."""
    wanted = scripted(monkeypatch, tmp_path, {"slow": "time.sleep(60)"})
    monkeypatch.setattr(sweep, "ABORT_S", 0.2)
    with sweep.workplace() as folder:
        cut = sweep.run(replace(wanted[0], limit_s=30.0), 0.5, folder)
        slow = sweep.run(wanted[0], 1.0, folder)
    assert cut["status"] == "not run" and "the call's time was up" in cut["line"]
    assert slow["status"] == "out of time" and "its limit" in slow["line"]


def test_sources_are_names_and_contents_wherever_the_tree_lies(tmp_path):
    for tree in ("one", "two"):
        (tmp_path / tree / "bench" / "results").mkdir(parents=True)
        (tmp_path / tree / "bench" / "step.py").write_text("a = 1")
        (tmp_path / tree / "train.py").write_text("")
    (tmp_path / "two" / "bench" / "results" / "sweep.json").write_text("{}")
    one, two = (sources(root=tmp_path / tree) for tree in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "bench" / "step.py").rename(tmp_path / "two" / "bench" / "steps.py")
    assert sources(root=tmp_path / "two") != one
    (tmp_path / "one" / "bench" / "step.py").write_text("a = 2")
    assert sources(root=tmp_path / "one") != one


def test_two_sweeps_at_once_are_refused_and_a_killed_one_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.tempfile, "tempdir", str(tmp_path))
    with sweep.workplace() as folder:
        with pytest.raises(sweep.Refusal, match="another sweep is at work"), sweep.workplace():
            pass
        (folder / "temporary").mkdir()  # as a variant leaves it that is killed with its sweep
    with sweep.workplace() as folder:
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_sweep_that_is_ended_takes_its_variant_along(tmp_path, monkeypatch):
    """As a time limit around it would end it."""
    source = "open('here', 'w').write(str(__import__('os').getpid()))\ntime.sleep(60)"
    variant = scripted(monkeypatch, tmp_path, {"slow": source})
    monkeypatch.setattr(sweep, "LEAST_S", 0.0)

    def interrupt(number, frame):
        raise SystemExit(143)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    try:
        with pytest.raises(SystemExit), sweep.workplace() as folder:
            sweep.run(variant[0], 30.0, folder)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not (tmp_path / "here").exists() or not alive(int((tmp_path / "here").read_text()))


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_sweep_that_is_killed_goes_on_with_the_variant_that_it_was_at(tmp_path, monkeypatch):
    """What was done is in the report, and the variant under way does not outlive the sweep."""
    good = f"open('ran', 'a').write('x'); where().write(json.dumps({REPORT}))"
    slow = (
        "open('here', 'w').write(str(__import__('os').getpid())); time.sleep(0 if 'again' in sys.argv else 60);" + good
    )
    wanted = scripted(monkeypatch, tmp_path, {"good": good, "slow": slow})
    wanted[1] = replace(wanted[1], limit_s=60.0)
    monkeypatch.setattr(sweep, "variants", lambda small, outcomes: wanted)
    monkeypatch.setattr(sweep_table, "ROWS", dict.fromkeys(("good", "slow"), sweep_table.kernel_rows))
    path, here = tmp_path / "sweep.json", tmp_path / "here"
    argv, earlier = ["--small", "--json", str(path), "--continue"], signal.getsignal(signal.SIGTERM)
    killed = get_context("fork").Process(target=sweep.main, args=(argv,))
    killed.start()
    wait(lambda: here.exists() and here.read_text())
    killed.kill()
    killed.join()
    wait(lambda: not alive(int(here.read_text())))
    assert [record["status"] for record in json.loads(path.read_text())["runs"]] == ["done"]
    wanted[1] = replace(wanted[1], args=("again",))
    try:
        assert sweep.main(argv) == 0
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert [record["status"] for record in json.loads(path.read_text())["runs"]] == ["done", "done"]
    assert (tmp_path / "ran").read_text() == "xx", "one time each"


def wait(until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_call_of_the_script_stays_below_ten_minutes_and_goes_on_with_what_is_there(tmp_path):
    """With a `timeout` that only says what it was asked."""
    (tmp_path / "timeout").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "timeout").chmod(0o755)
    out = tmp_path / "elsewhere"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    done = subprocess.run([ROOT / "bench" / "gpu.sh", "--small"], env=env, capture_output=True, text=True, timeout=20)
    words = done.stdout.split()
    assert done.returncode == 0 and words[words.index("-m") + 1] == "bench.sweep"
    limits = [int(words[words.index("--kill-after") + n]) for n in (1, 2)]
    assert sum(limits) < 600 and 60 * float(words[words.index("--minutes") + 1]) < limits[1]
    assert {f"{out}/sweep.json", "--continue", "--small"} <= set(words)


def micro_counts() -> dict:
    """Made-up counts of the micro model on a CPU: a block takes 1 ms and 0.5 ms per row, the ends 2 ms."""
    runs = []
    for rows in (2, 4):
        block = {"forward": {"ms_of": {"products": 0.5 * rows, "kernels": 1.0}}}
        parts = {"double": block, "single": block, "ends": {"forward": {"ms_of": {"products": 0.0, "kernels": 2.0}}}}
        for compiles, budget in ((False, 1.0), (True, 1.0), (True, 0.5)):
            run = {"arch": "cpu", "precision": SMALL.parallel.dtype, "micro_batch": rows, "parts": parts}
            runs.append(run | {"compile": compiles, "budget": budget})
    return {"runs": runs, "rates": {"cpu": {"memory_tb_s": 0.001}}}


def test_times_are_predicted_from_counts():
    """Blocks by a line through two counted micro-batches; casts and AdamW by the bytes that they move."""
    counts = Counts(micro_counts())
    blocks = SMALL.model.double_blocks + SMALL.model.single_blocks
    report = REPORT | {"arch": "cpu", "parameters": 10**6, "optimizer": {"parameters": 10**5}}
    keys = report["config"] | {"parallel.activation_budget": 1.0, "train.global_batch": 12}
    for compiles in (False, True):
        for rows in (2, 3, 4, 12):
            report["config"] = keys | {"parallel.compile": compiles, "train.micro_batch": rows}
            want = blocks * (1 + 0.5 * rows) + 2
            copies = 10 * (1 + SMALL.parallel.reshard_after_forward) + 14  # bytes per weight; 1 GB/s moves 1 MB in 1 ms
            assert counts.step(report) == pytest.approx(12 / rows * (want + copies) + 32)
            assert counts.whole(report, rows) == pytest.approx(want + 3.2)
            assert counts.products(report, rows, in_fp8=False) == pytest.approx(0.5 * rows * blocks)
            assert counts.products(report, rows, in_fp8=True) is None
    assert counts.step(report | {"ranks": 2}) is None and counts.step(report | {"arch": "sm90"}) is None
    sm90 = keys | {"parallel.dtype": "bf16", "parallel.compile": True, "model.double_blocks": 19}
    assert COUNTS.blocks("sm90", sm90 | {"model.single_blocks": 38}, 32) == pytest.approx(952.4, rel=1e-3)


@pytest.mark.slow
def test_the_small_sweep_runs(tmp_path):
    """The variants that need no compiler, end to end; what the micro model is too small for is in the table."""
    path = tmp_path / "sweep.json"
    (tmp_path / "counts.json").write_text(json.dumps(micro_counts()))
    only = "ceiling,part eager,part compiled graph,whole eager,peers eager"
    command = [sys.executable, "-m", "bench.sweep", "--small", "--only", only, "--minutes", "8"]
    command += ["--json", str(path), "--counts", str(tmp_path / "counts.json")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {record["name"]: record for record in json.loads(path.read_text())["runs"]}
    assert records.keys() == set(only.split(","))
    assert all(records[name]["status"] == "done" for name in ("ceiling", "part eager", "whole eager"))
    assert records["part compiled graph"]["status"] == "refused"
    (line, _) = (line for line in done.stdout.splitlines() if line.startswith("part eager "))
    measured, predicted = map(float, line.split()[3:5])
    assert measured == pytest.approx(records["part eager"]["report"]["step_ms"]["median"], abs=0.01)
    assert predicted == pytest.approx(Counts(micro_counts()).step(records["part eager"]["report"]), abs=0.01)
    assert not list(tmp_path.glob("bench_sweep_*/[ct]*")), "temporary folders stay"
