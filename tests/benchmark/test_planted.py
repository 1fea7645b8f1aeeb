"""Early warnings on runs of the tiny model, some with a planted defect, against a band of sound runs.

planted_curves.csv holds the validation losses of eight runs of 4,500 samples: sound runs of seeds 1 to 4 for the band,
and a sound run and three with a defect, all of seed 21. The defects: latents.SCALE = 1.0, four times optim.lr, and
optim.warmup_steps=0. These runs have the recipe that tiny.toml had when they were recorded: 2 + 4 blocks,
optim.lr=2e-3, optim.warmup_steps=50.
"""

import csv
from collections import defaultdict

from conftest import ROOT

from flux_ref.benchmark import alarms, convergence
from flux_ref.benchmark.convergence import Band
from tools.report import band

FOR_BAND = (1, 2, 3, 4)


def recorded() -> tuple[Band, dict[str, list[tuple[int, float]]]]:
    """The band, and the curve of each defect."""
    curves = defaultdict(list)
    with (ROOT / "tests/benchmark/planted_curves.csv").open() as file:
        for row in csv.DictReader(file):
            curves[row["defect"], int(row["seed"])].append((int(row["samples"]), float(row["val_loss"])))
    recipe = (60, 0.0, 0)  # batch; learning rate and warm-up do not matter to a band
    rows = band.quartile_rows(recipe, [curves.pop(("none", seed)) for seed in FOR_BAND])
    return convergence.pooled(rows, "sound runs"), {defect: curve for (defect, _), curve in curves.items()}


def kinds_of(curve: list[tuple[int, float]], sound: Band) -> set[str]:
    return {alarm.kind for alarm in alarms.of_losses(curve, sound)}


def test_planted_defects_leave_the_band():
    """A sound run does not. The last two learn faster here, which leaves the band, too."""
    sound, curves = recorded()
    kinds = {defect: kinds_of(curve, sound) for defect, curve in curves.items()}
    assert kinds == {"none": set(), "latent_scale": {"high"}, "lr_times_4": {"low"}, "no_warmup": {"low"}}
