"""Plans against public rates: the table of systems is whole, the shares are the fit, the errors are small."""

import json
import math
from types import SimpleNamespace

import pytest

from bench import plan_check
from flux_ref.benchmark.facts import EVAL_EVERY_SAMPLES, TARGET
from tools.shared import hardware, public_systems

OUTLIERS = ("Oracle/512xMI300X_Xeon_8480", "Nebius/2x8xH100")
MEAN, WORST, HELD = 0.12, 0.30, 0.9  # of the errors, and the share of systems in the plan's range


def test_public_systems_are_whole():
    """Also the run of each v6.0 system, which ends at the target after the samples of the table."""
    systems = public_systems.systems()
    assert [sum(system.source == number for system in systems) for number in ("v5.1", "v6.0")] == [16, 15]
    ends = {}
    for system in systems:
        assert hardware.load(system.gpu) and system.global_batch % (system.gpus * system.micro_batch) == 0
        if system.source not in ("v5.1", "v6.0"):
            continue
        steps = system.samples / system.global_batch
        evaluations = steps / math.ceil(EVAL_EVERY_SAMPLES / system.global_batch)
        minutes = (steps * system.step_s + evaluations * system.evaluation_s) / 60
        assert minutes == pytest.approx(system.minutes, rel=0.06), system.system
        if system.source == "v6.0":
            ends.setdefault(system.global_batch, []).append(system.samples)
    for batch, samples in ends.items():
        curves = public_systems.curves(batch)
        assert sorted(curve[-1][0] for curve in curves) == sorted(samples)
        assert all(curve[-1][1] <= TARGET < min(loss for _, loss in curve[:-1]) for curve in curves)


def test_stored_plans_are_near_the_public_steps():
    """Must hold for what tools.plan shows beside its predictions; the outliers are named."""
    usual, unfitted, held = [], [], 0
    for system in public_systems.systems():
        assert bool(system.outlier) == (system.system in OUTLIERS) and not (system.outlier and system.fitted)
        assert bool(system.planned_s) == plan_check.known(system)
        if system.outlier or not system.planned_s:
            continue
        error = system.planned_s / system.step_s - 1
        usual.append(abs(error))
        unfitted += [] if system.fitted else [abs(error)]
        _, assumed = hardware.load(system.gpu, precision=system.precision)
        held += abs(math.log(error + 1)) <= math.log(1 + assumed.range)
    for errors in (usual, unfitted):
        assert sum(errors) / len(errors) <= MEAN and max(errors) <= WORST
    assert held >= HELD * len(usual)


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """A copy of the table to write into. Steps are made up, since tracing all cases takes half a minute."""
    path = tmp_path / "systems.csv"
    header, *rows = [line for line in public_systems.TABLE.read_text().splitlines() if not line.startswith("#")]
    rows.sort(key=lambda row: "mxfp4" not in row)  # a system without a plan may stand anywhere
    path.write_text("\n".join([header, *rows]))
    found = [SimpleNamespace(**vars(one)) for one in public_systems.systems(path) if plan_check.known(one)]
    cases = [
        SimpleNamespace(
            public=one,
            kind=(one.gpu, one.precision),
            assumed=hardware.load(one.gpu)[1],
            step_s=lambda assumed, one=one: one.step_s * 2,
            error=lambda assumed=None: 1.0,
        )
        for one in found
    ]
    monkeypatch.setattr(plan_check, "cases", lambda: cases)
    monkeypatch.setattr(plan_check, "RESULT", tmp_path / "plan_check.md")
    monkeypatch.setattr(public_systems, "TABLE", path)
    return path


def test_the_report_fits_a_terminal_and_is_written(stored, capsys):
    known = public_systems.systems(stored)
    assert plan_check.main(["--write"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "  OmniFlow/4x8xMI355X in mxfp4" in shown
    assert shown in plan_check.RESULT.read_text() + "\n"
    for before, after in zip(known, public_systems.systems(stored), strict=True):
        planned = 2 * before.step_s if plan_check.known(before) else 0
        assert after.planned_s == pytest.approx(planned, abs=1e-4)
        assert vars(after) | {"planned_s": 0} == vars(before) | {"planned_s": 0}


@pytest.mark.nightly
def test_shares_and_stored_plans_are_those_of_the_method():
    cases = plan_check.cases()
    assert plan_check.fit(cases) == {case.kind: case.assumed.gemm_share for case in cases if case.public.fitted}
    off = {case.public.system: case.step_s(case.assumed) / case.public.planned_s - 1 for case in cases}
    assert {system: error for system, error in off.items() if abs(error) > 0.02} == {}
    assert plan_check.table(cases).count("OUT") >= 2, json.dumps(off)
