"""Plans against public rates: the table of systems is whole, the shares are the fit, the errors are small."""

import math

import pytest

from bench import plan_check
from tools.plan import public

OUTLIERS = ("Oracle/512xMI300X_Xeon_8480", "Nebius/2x8xH100")
MEAN, WORST, HELD = 0.13, 0.30, 0.9  # of the errors, and the share of systems in the plan's range


@pytest.mark.nightly
def test_plans_are_near_the_public_steps():
    """The outliers are named."""
    usual, unfitted, held = [], [], 0
    for system in public.known():
        assert bool(system.outlier) == (system.system in OUTLIERS) and not (system.outlier and system.fitted)
        if system.outlier:
            continue
        error = plan_check.error(system)
        usual.append(abs(error))
        unfitted += [] if system.fitted else [abs(error)]
        held += abs(math.log(error + 1)) <= math.log(1 + system.rates[1].range)
    for errors in (usual, unfitted):
        assert sum(errors) / len(errors) <= MEAN and max(errors) <= WORST
    assert held >= HELD * len(usual)


@pytest.mark.nightly
def test_shares_are_those_that_fit_and_the_table_shows_all(monkeypatch, capsys, tmp_path):
    fitted = {plan_check.kind_of(one): one.rates[1].gemm_share for one in public.known() if one.fitted}
    found = plan_check.fit()
    assert found == pytest.approx(fitted, abs=0.011)
    monkeypatch.setattr(plan_check, "fit", lambda: found)  # it takes most of the time
    monkeypatch.setattr(plan_check, "RESULT", tmp_path / "plan_check.md")
    assert plan_check.main(["--write"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and shown in plan_check.RESULT.read_text() + "\n"
    assert "  OmniFlow/4x8xMI355X in mxfp4" in shown
