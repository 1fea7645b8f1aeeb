"""Plans against public results: the table of systems is whole, the report fits a terminal, the shares are the fit."""

import math
from types import SimpleNamespace

import pytest

from bench import plan_check
from flux_ref.benchmark import hardware
from flux_ref.benchmark.facts import EVAL_EVERY_SAMPLES
from flux_ref.errors import Refusal

_, ASSUMED = hardware.load("h200")


def test_public_systems_are_whole():
    systems = plan_check.systems()
    assert [sum(system.round == number for system in systems) for number in ("5.1", "6.0")] == [16, 2]
    for system in systems:
        assert hardware.load(system.gpu) and system.global_batch % system.gpus == 0
        if system.round == "PR 832":
            continue
        steps = system.samples / system.global_batch
        evaluations = steps / math.ceil(EVAL_EVERY_SAMPLES / system.global_batch)
        minutes = (steps * system.step_s + evaluations * system.evaluation_s) / 60
        assert minutes == pytest.approx(system.minutes, rel=0.06), system.system


def test_the_report_fits_a_terminal(monkeypatch, capsys):
    """With steps made up in place of traced ones, which take half a minute."""

    class Case(SimpleNamespace):
        def step_s(self, assumed):
            return self.public.step_s * (1 + assumed.gemm_share)

        def evaluation_s(self, assumed):
            return self.public.evaluation_s * (2 - assumed.memory_share)

    monkeypatch.setattr(plan_check, "cases", lambda: [Case(public=public) for public in plan_check.systems()])
    assert plan_check.main([]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" ms") == 21 and max(map(len, shown.splitlines())) <= 80
    with pytest.raises(Refusal, match="unrecognized arguments: x; see --help"):
        plan_check.main(["x"])


@pytest.mark.slow
def test_shares_are_the_fitted_ones():
    cases = plan_check.cases()
    fitted = plan_check.fit(cases, ASSUMED)
    errors = [abs(math.log(case.step_s(ASSUMED) / case.step_s(fitted))) for case in cases]
    assert max(errors) < 0.03, f"fit gives {fitted}"
    shown = plan_check.table(cases)
    assert shown.count(" ms") == len(cases) == 21 and "2 parameters" in shown
