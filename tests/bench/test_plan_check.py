"""Plans against public rates: the table of systems is whole, the shares are the fit, the errors are small."""

import json
import math
from types import SimpleNamespace

import pytest

from bench import plan_check
from flux_ref.benchmark import hardware, public_systems
from flux_ref.benchmark.facts import EVAL_EVERY_SAMPLES, TARGET
from flux_ref.errors import Refusal

OUTLIER = "Oracle/512xMI300X_Xeon_8480"
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
    """Must hold for what flux_ref.plan shows beside its predictions; the outlier is named."""
    usual, unfitted, held = [], [], 0
    for system in public_systems.systems():
        assert bool(system.outlier) == (system.system == OUTLIER)
        if system.outlier:
            continue
        error = system.planned_s / system.step_s - 1
        usual.append(abs(error))
        unfitted += [] if system.fitted else [abs(error)]
        _, assumed = hardware.load(system.gpu, precision=system.precision)
        held += abs(math.log(error + 1)) <= math.log(1 + assumed.range)
    for errors in (usual, unfitted):
        assert sum(errors) / len(errors) <= MEAN and max(errors) <= WORST
    assert held >= HELD * len(usual)


def made_up() -> list:
    """Cases with made-up steps in place of traced ones, which take half a minute."""

    class Case(SimpleNamespace):
        def step_s(self, assumed):
            return self.public.step_s * 2

        def error(self, assumed=None):
            return self.public.step_s * (1 + (assumed or self.assumed).gemm_share) - 1

        def evaluation_s(self):
            return self.public.evaluation_s * 1.5

    systems = public_systems.systems()
    return [Case(public=one, assumed=hardware.load(one.gpu)[1], kind=(one.gpu, one.precision)) for one in systems]


def test_the_report_fits_a_terminal_and_is_written(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plan_check, "cases", made_up)
    monkeypatch.setattr(plan_check, "RESULT", tmp_path / "plan_check.md")
    stored = tmp_path / "systems.csv"
    stored.write_text(public_systems.TABLE.read_text())
    known = public_systems.systems()
    monkeypatch.setattr(public_systems, "TABLE", stored)
    assert plan_check.main(["--write"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and shown in (tmp_path / "plan_check.md").read_text() + "\n"
    written = public_systems.systems(stored)
    assert [one.planned_s for one in written] == pytest.approx([2 * one.step_s for one in known], abs=1e-4)
    assert [vars(one) | {"planned_s": 0} for one in written] == [vars(one) | {"planned_s": 0} for one in known]
    with pytest.raises(Refusal, match="unrecognized arguments: x; see --help"):
        plan_check.main(["x"])


@pytest.mark.slow
def test_shares_and_stored_plans_are_those_of_the_method():
    cases = plan_check.cases()
    assert plan_check.fit(cases) == {case.kind: case.assumed.gemm_share for case in cases}
    off = {case.public.system: case.step_s(case.assumed) / case.public.planned_s - 1 for case in cases}
    assert {system: error for system, error in off.items() if abs(error) > 0.02} == {}
    assert plan_check.table(cases).count("OUT") >= 2, json.dumps(off)
