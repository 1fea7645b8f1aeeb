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

from bench import ceiling, kernels, race, step, sweep, whole
from flux_ref import config_file

SMALL = config_file.load(MICRO)


def test_every_variant_is_a_command_of_a_benchmark_that_exists():
    """Each config either loads or is refused for a key that is not known yet."""
    for small in (True, False):
        found = sweep.variants(small)
        assert len({variant.name for variant in found}) == len(found)
        for variant in found:
            module = {"bench.step": step, "bench.race": race, "bench.whole": whole}.get(variant.module)
            module = module or {"bench.ceiling": ceiling, "bench.kernels": kernels}[variant.module]
            args, overrides = module.parse(list(variant.args))
            known = [text for text in overrides if not text.startswith(("--graph.", "--precision."))]
            cfg = config_file.load(ROOT / args.config, known)
            assert cfg.model.hidden == (SMALL.model.hidden if small else 3072)
            assert variant.module in sweep.ROWS


def scripted(monkeypatch, tmp_path, sources: dict[str, str]) -> list[sweep.Variant]:
    """Variants that run a few lines of Python; argv[-1] is where a report is expected."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text("import json, sys, time\n" + source)
    return [sweep.Variant(name, name, (), limit_s=1.0 if name == "slow" else 20.0) for name in sources]


REPORT = {"classes": {"gemm": {"ms": 1.0, "share": 0.5}}, "idle": {"share": 0.1}, "step_ms": 2.0, "device": "abacus"}


def test_what_becomes_of_a_variant_is_in_its_record(tmp_path, monkeypatch):
    sources = {
        "good": f"open(sys.argv[-1], 'w').write(json.dumps({REPORT}))",
        "refused": "print('refused: unknown key graph.enabled', file=sys.stderr); print('noise'); sys.exit(2)",
        "broken": "raise ValueError('as it happens')",
        "silent": "",
        "slow": "print('begun', flush=True); time.sleep(60)",
        "late": "",
    }
    wanted, records = scripted(monkeypatch, tmp_path, sources), []
    monkeypatch.setattr(sweep, "ABORT_S", 0.5)
    begin = time.monotonic()
    sweep.sweep(wanted[:-1], 1, records.append)
    assert time.monotonic() - begin < 15
    sweep.sweep(wanted[-1:], sweep.LEAST_S / 60 - 0.01, records.append)
    found = {record["name"]: record for record in records}
    want = ["done", "refused", "failed", "failed", "out of time", "not run"]
    assert [found[name]["status"] for name in sources] == want
    assert found["good"]["report"] == REPORT and found["good"]["command"] == "python -m good"
    assert found["refused"]["line"] == "refused: unknown key graph.enabled"
    assert found["broken"]["line"] == "ValueError: as it happens" and "Traceback" in found["broken"]["output"][0]
    assert found["slow"]["output"][0] == "begun" and any('slow.py", line' in line for line in found["slow"]["output"])
    assert found["silent"]["line"] == "exit code 0" and found["late"]["line"] == "the time was up"


def test_a_sweep_writes_one_report_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    source = f"open('ran', 'a').write('x'); open(sys.argv[-1], 'w').write(json.dumps({REPORT}))"
    refused = "open('ran', 'a').write('y'); print('refused: no'); sys.exit(2)"
    wanted = scripted(monkeypatch, tmp_path, {"good": source, "refused": refused})
    monkeypatch.setattr(sweep, "variants", lambda small: [replace(one, name=f"{one.name} one") for one in wanted])
    monkeypatch.setitem(sweep.ROWS, "good", sweep.kernel_rows)
    monkeypatch.setattr(sweep.common, "commit", lambda: "abc+")
    path, earlier = tmp_path / "new" / "sweep.json", signal.getsignal(signal.SIGTERM)
    try:
        for _ in range(2):
            assert sweep.main(["--minutes", "1", "--json", str(path), "--continue"]) == 0
    finally:
        signal.signal(signal.SIGTERM, earlier)
    report = json.loads(path.read_text())
    assert (tmp_path / "ran").read_text() == "xy", "what is known did not run again"
    assert {"command", "commit", "versions"} <= report.keys() and report["device"] == "abacus"
    assert [record["status"] for record in report["runs"]] == ["done", "refused"]
    assert report["versions"]["torch"] == torch.__version__.split("+")[0]
    shown = capsys.readouterr().out
    assert "gemm 50.0%, idle 10.0%" in shown and "refused: refused: no" in shown
    monkeypatch.setattr(sweep.common, "commit", lambda: "def")
    with pytest.raises(sweep.Refusal, match="is of commit abc\\+, this is def; delete it"):
        sweep.main(["--json", str(path), "--continue"])


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
        with pytest.raises(SystemExit):
            sweep.run(variant[0], 30.0)
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
    good = f"open('ran', 'a').write('x'); open(sys.argv[-1], 'w').write(json.dumps({REPORT}))"
    slow = (
        "open('here', 'w').write(str(__import__('os').getpid())); time.sleep(0 if 'again' in sys.argv else 60);" + good
    )
    wanted = scripted(monkeypatch, tmp_path, {"good": good, "slow": slow})
    wanted[1] = replace(wanted[1], limit_s=60.0)
    monkeypatch.setattr(sweep, "variants", lambda small: wanted)
    monkeypatch.setattr(sweep, "ROWS", dict.fromkeys(("good", "slow"), sweep.kernel_rows))
    monkeypatch.setattr(sweep.common, "commit", lambda: "abc")
    path, here = tmp_path / "sweep.json", tmp_path / "here"
    argv, earlier = ["--json", str(path), "--continue"], signal.getsignal(signal.SIGTERM)
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


def test_a_call_of_the_script_stays_below_ten_minutes_and_the_next_goes_on(tmp_path):
    """With a `timeout` that only says what it was asked. The tests of another commit do not count."""
    (tmp_path / "timeout").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "timeout").chmod(0o755)
    out = tmp_path / "elsewhere"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    for calls in (("pytest", "bench.sweep"), ("bench.sweep",), ("pytest", "bench.sweep")):
        done = subprocess.run(
            [ROOT / "bench" / "gpu.sh", "--small"], env=env, capture_output=True, text=True, timeout=20
        )
        words = [line.split() for line in done.stdout.splitlines()]
        assert done.returncode == 0 and [line[line.index("-m") + 1] for line in words] == list(calls), done.stdout
        limits = [int(line[line.index("--kill-after") + n]) for line in words for n in (1, 2)]
        assert sum(limits) < 600
        minutes = float(words[-1][words[-1].index("--minutes") + 1])
        assert 60 * minutes < limits[-1] and {f"{out}/sweep.json", "--continue", "--small"} <= set(words[-1])
        if len(calls) == 1:
            (out / "gpu_tests.log").write_text("commit of another day\n")


@pytest.mark.slow
def test_the_small_sweep_runs(tmp_path):
    """The variants that need no compiler, end to end; keys that are unknown are in the table."""
    path = tmp_path / "sweep.json"
    only = "ceiling,part eager,part compiled graph,whole eager,peers eager"
    command = [sys.executable, "-m", "bench.sweep", "--small", "--only", only, "--minutes", "3", "--json", str(path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {record["name"]: record for record in json.loads(path.read_text())["runs"]}
    assert records.keys() == set(only.split(","))
    assert all(records[name]["status"] == "done" for name in ("ceiling", "part eager", "whole eager"))
