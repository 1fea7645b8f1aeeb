"""The sweep: what becomes of a variant, one report of all, and nothing that outlives it."""

import contextlib
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
from conftest import MICRO, ROOT, refusal

from bench import ceiling, common, device_tests, race, step, sweep, sweep_table, whole
from bench.sources import sources
from bench.static.predicted import Counts
from flux_ref import config, config_file

SMALL = config_file.load(MICRO)
MODULES = {f"bench.{module.__name__.split('.')[1]}": module for module in (ceiling, device_tests, race, step, whole)}


def test_every_variant_is_a_command_and_what_decides_most_comes_first():
    """Each config loads; but the micro model is too small for FP8."""
    for small in (True, False):
        found = sweep.variants(small)
        assert len({variant.name for variant in found}) == len(found)
        for variant in found:
            own = ("--outcomes=x",) if variant.module == sweep.DEVICE_TESTS else ()
            args, overrides = MODULES[variant.module].parse([*own, *variant.args])
            assert variant.module in sweep_table.ROWS
            if variant.module == sweep.DEVICE_TESTS:
                assert all((ROOT / test).exists() for test in args.tests)
                assert variant.limit_s > device_tests.LIMIT_S + 30, (
                    "else a test that hangs has no outcome, call by call"
                )
                continue
            known = [text for text in overrides if not (small and text.startswith("--precision."))]
            cfg = config_file.load(ROOT / args.config, known)
            assert cfg.model.hidden == (SMALL.model.hidden if small else 3072)
        first = ["tests graphs", "ceiling", "part eager", "part compiled", "part compiled graph"]
        assert [variant.name for variant in found][:7] == [*first, "part compiled graph fp8", "whole compiled"]


def test_all_files_with_tests_of_a_device_are_in_the_sweep():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    found = sorted(path.stem for path in marked if path.parent.name != "bench")  # the tests of bench/ only say the word
    assert found == sorted(sum(sweep.TESTS_OF.values(), ()))


HEAD = """
import json, os, subprocess, sys, time
where = lambda: open(sys.argv[-1].removeprefix("--json="), "w")
"""
REPORT = {"device": "abacus", "arch": "abacus", "ranks": 1, "parameters": 1, "left_out": "", "samples_per_s": 1.0}
REPORT |= {"step_ms": {"median": 2.0}, "tflop": {"per_s_per_rank": 1.0, "share_of_ceiling": 0.5}}
REPORT |= {"peak_memory_gb": 1.0, "config": json.loads(json.dumps(config.flat(SMALL)))}
RAN = "open('ran', 'a').write({!r}); "
GOOD = f"where().write(json.dumps({REPORT}))"


@pytest.fixture
def scripted(monkeypatch, tmp_path) -> Callable:
    """scripted({name: lines of Python}): variants that run them in tmp_path; where() is where a report is expected."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(sweep.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sweep, "LEAST_S", 15.0)
    monkeypatch.setattr(sweep, "ABORT_S", 0.5)
    before = signal.getsignal(signal.SIGTERM)

    def make(programs: dict[str, str]) -> list[sweep.Variant]:
        for name, program in programs.items():
            (tmp_path / f"{name}.py").write_text(HEAD + program)
            monkeypatch.setitem(sweep_table.ROWS, name, sweep_table.step_rows)
        wanted = [sweep.Variant(name, name, (), limit_s=4.0 if name == "slow" else 20.0) for name in programs]
        monkeypatch.setattr(sweep, "variants", lambda small: wanted)
        return wanted

    yield make
    signal.signal(signal.SIGTERM, before)


def test_what_becomes_of_a_variant_is_in_its_record(tmp_path, scripted):
    programs = {
        "good": GOOD,
        "refused": "print('refused: unknown key graph.enabled', file=sys.stderr); print('noise'); sys.exit(2)",
        "broken": "raise ValueError('as it happens')",
        "silent": "",
        "slow": "print('begun', flush=True); time.sleep(60)",
        "late": "",
    }
    wanted, records = scripted(programs), []
    begin = time.monotonic()
    with sweep.workplace() as folder:
        sweep.sweep(wanted[:-1], 1, folder, tmp_path, records.append)
        assert time.monotonic() - begin < 15
        sweep.sweep(wanted[-1:], sweep.LEAST_S / 60 - 0.01, folder, tmp_path, records.append)
        cut = sweep.run(replace(wanted[4], limit_s=30.0), 0.5, folder, tmp_path)
    found = {record["name"]: record for record in records}
    want = ["done", "refused", "failed", "failed", "out of time", "not run"]
    assert [found[name]["status"] for name in programs] == want
    assert found["good"]["report"] == REPORT and found["good"]["command"] == "python -m good"
    assert found["refused"]["line"] == "refused: unknown key graph.enabled"
    assert found["broken"]["line"] == "ValueError: as it happens" and "Traceback" in found["broken"]["output"][0]
    assert found["slow"]["output"][0] == "begun" and any('slow.py", line' in line for line in found["slow"]["output"])
    assert found["silent"]["line"] == "exit code 0" and found["late"]["line"] == "the time was up"
    assert cut["status"] == "not run" and "as the call's time was up" in cut["line"], "it is not too slow"


def test_a_sweep_writes_one_report_and_goes_on_where_it_stopped(tmp_path, monkeypatch, scripted, capsys):
    scripted({"good": RAN.format("x") + GOOD, "refused": RAN.format("y") + "print('refused: no'); sys.exit(2)"})
    path = tmp_path / "new" / "sweep.json"

    def call(*more: str) -> tuple[dict, str]:
        """The report, and which variants have run so far."""
        assert sweep.main(["--small", "--minutes", "1", "--json", str(path), *more]) == 0
        return json.loads(path.read_text()), (tmp_path / "ran").read_text()

    call()
    report, ran = call()
    assert ran == "xyy", "what is done does not run again; what was refused may find its package now"
    assert {"command", "commit", "sources", "versions"} <= report.keys() and report["device"] == "abacus"
    assert [record["status"] for record in report["runs"]] == ["done", "refused"]
    assert report["versions"]["torch"] == torch.__version__.split("+")[0]
    shown = capsys.readouterr().out
    assert "50.0%" in shown and "refused: refused: no" in shown
    again, ran = call("--only", "good")
    assert again["runs"] == report["runs"] and ran == "xyy", "a call for some variants keeps the others"
    for what, number in (("sources", 2), ("machine", 4)):
        owner = sweep if what == "sources" else sweep.common
        monkeypatch.setattr(owner, what, lambda *_: "another")
        changed, ran = call()
        assert len(changed["outdated"]) == number and {record[what] for record in changed["runs"]} == {"another"}
    assert ran == "xyyxyxy", "figures of other sources or of another machine do not count"
    assert changed["outdated"][0] == report["runs"][0], "but they are not lost"
    assert "output" not in changed["outdated"][1]
    wanted = sweep.variants(True)
    monkeypatch.setattr(sweep, "variants", lambda small: [replace(one, args=("--more",)) for one in wanted])
    changed, ran = call()
    assert len(changed["outdated"]) == 6 and ran == "xyyxyxyxy", "nor do those of other arguments"


def test_full_width_asks_for_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    said = refusal(sweep.main, ["--json", str(tmp_path / "sweep.json")])
    assert "torch finds no accelerator here; --small runs the micro model" in said


def test_sources_are_names_and_contents_of_what_figures_come_from(tmp_path):
    """Wherever the tree lies. A table may change, and what was measured stays."""
    files = {"bench/step.py": "a = 1", "bench/sweep_table.py": "", "flux_ref/step.py": "", "bench/results/x.json": ""}

    def changed(**contents: str) -> str:
        tree = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, content in (files | contents).items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(content)
        return sources(root=tree)

    first = changed()
    for name in ("bench/sweep_table.py", "bench/results/x.json", "README.md"):
        assert changed(**{name: "another"}) == first, name
    for name in ("bench/step.py", "flux_ref/step.py", "bench/new.py", "configs/new.toml", "tools/shared/flops.py"):
        assert changed(**{name: "another"}) != first, name
    moved = files.pop("bench/step.py")
    assert changed(**{"bench/steps.py": moved}) != first


def test_figures_of_another_card_or_torch_come_from_another_machine(tmp_path, monkeypatch):
    """Two cards can stand in machines with equal CPUs."""
    monkeypatch.setattr(common, "CARDS", tmp_path)
    card = tmp_path / "0000:19:00.0" / "information"
    card.parent.mkdir()
    found = [common.machine()]
    for model in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        card.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 151\n")
        assert model in common.machine()
        found.append(common.machine())
    monkeypatch.setattr(torch, "__version__", "2.0")
    assert len({*found, common.machine()}) == 4


def test_two_sweeps_at_once_are_refused_and_only_compiled_code_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.tempfile, "tempdir", str(tmp_path))
    with sweep.workplace() as folder:
        with pytest.raises(sweep.Refusal, match="another sweep is at work"), sweep.workplace():
            pass
        for name in ("compiled", "temporary"):
            (folder / name).mkdir()
    assert {path.name for path in folder.iterdir()} == {"compiled", "lock"}


SLOW = """
if "again" not in sys.argv:
    compiler = subprocess.Popen(["sleep", "60"])
    open("here", "w").write(f"{os.getpid()} {compiler.pid}")
    time.sleep(60)
"""


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_sweep_that_is_ended_or_killed_goes_on_with_the_variant_that_it_was_at(tmp_path, scripted):
    """What was done is in the report. The variant under way does not outlive it, nor its compilers a sweep's end."""
    good = RAN.format("x") + GOOD
    wanted = scripted({"good": good, "slow": SLOW + good})
    wanted[1] = replace(wanted[1], limit_s=60.0)
    path, here = tmp_path / "sweep.json", tmp_path / "here"
    argv = ["--small", "--json", str(path)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        here.write_text("")
        ended = get_context("fork").Process(target=sweep.main, args=(argv,))
        ended.start()
        wait(here.read_text)
        variant, compiler = map(int, here.read_text().split())
        os.kill(ended.pid, number)
        ended.join()
        left = [variant] if number == signal.SIGKILL else [variant, compiler]
        wait(lambda left=left: not any(map(alive, left)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(compiler, signal.SIGKILL)
        assert [record["status"] for record in json.loads(path.read_text())["runs"]] == ["done"]
    wanted[1] = replace(wanted[1], args=("again",))
    assert sweep.main(argv) == 0
    assert [record["status"] for record in json.loads(path.read_text())["runs"]] == ["done", "done"]
    assert (tmp_path / "ran").read_text() == "xx", "one time each"


def wait(until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_call_of_the_script_stays_below_ten_minutes(tmp_path):
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
    assert {f"{out}/sweep.json", "--small"} <= set(words)


def micro_counts() -> dict:
    """Made-up counts of the micro model on a CPU: a block takes 1 ms and 0.5 ms per row, the ends 2 ms."""
    runs = []
    for rows in (2, 4):
        block = {"forward": {"ms_of": {"products": 0.5 * rows, "attention": 0.0, "kernels": 1.0}}}
        ends = {"forward": {"ms_of": {"products": 0.0, "attention": 0.0, "kernels": 2.0}}}
        parts = {"double": block, "single": block, "ends": ends}
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
            classes = {"gemm": 6 * blocks, "attention": 0, "elementwise": 12 / rows * (blocks + 2)}
            assert counts.classes(report) == pytest.approx(classes)
    assert counts.step(report | {"ranks": 2}) is None and counts.step(report | {"arch": "sm90"}) is None
    assert counts.classes(report | {"arch": "sm90"}) == {}
    sm90 = keys | {"parallel.dtype": "bf16", "parallel.compile": True, "model.double_blocks": 19}
    committed = Counts(json.loads(sweep.COUNTS.read_text()))
    assert committed.blocks("sm90", sm90 | {"model.single_blocks": 38}, 32) == pytest.approx(952.4, rel=1e-3)


@pytest.mark.slow
def test_the_small_sweep_runs(tmp_path):
    """The variants that need no compiler, end to end; what the micro model is too small for is in the table."""
    only = "ceiling,part eager,part compiled graph,whole eager"
    command = [sys.executable, "-m", "bench.sweep", "--small", "--only", only, "--minutes", "8"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    path = tmp_path / "sweep.json"
    done = subprocess.run([*command, f"--json={path}"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {record["name"]: record for record in json.loads(path.read_text())["runs"]}
    assert records.keys() == set(only.split(","))
    assert records.pop("part compiled graph")["status"] == "refused"
    assert {record["status"] for record in records.values()} == {"done"}
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("part eager ")]
    assert [float(row[3]) for row in rows] == [
        pytest.approx(records["part eager"]["report"]["step_ms"]["median"], abs=0.01)
    ] * 2
    assert not list(tmp_path.glob("bench_sweep_*/temporary")), "temporary folders stay"
