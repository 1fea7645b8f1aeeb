"""Early warnings on runs of the tiny model, some with a planted defect, against a band of sound runs.

planted_curves.csv holds the validation losses of eight runs that `train` made: sound runs of seeds 1 to 4 for the band,
and a sound run and three with a defect, all of seed 21.
"""

import csv
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import ROOT

from flux_ref import config_file
from flux_ref.benchmark import alarms, convergence
from flux_ref.benchmark.convergence import Band
from flux_ref.formats.jsonl import records
from flux_ref.report import band
from flux_ref.toy import make

TINY = ROOT / "configs" / "tiny.toml"
SHORT = ("--train.max_samples=4500", "--eval.every_samples=1500", "--sample.count=0", "--eval.permuted_captions=false")
FOR_BAND = (1, 2, 3, 4)


def recorded() -> tuple[Band, dict[str, list[tuple[float, float]]]]:
    """The band, and the curve of each defect."""
    curves = defaultdict(list)
    with (ROOT / "tests/benchmark/planted_curves.csv").open() as file:
        for row in csv.DictReader(file):
            curves[row["defect"], int(row["seed"])].append((int(row["samples"]), float(row["val_loss"])))
    recipe = (60, 0.0, 0)  # batch; learning rate and warm-up do not matter to a band
    rows = band.quartile_rows(recipe, [curves.pop(("none", seed)) for seed in FOR_BAND])
    return convergence.pooled(rows, "sound runs"), {defect: curve for (defect, _), curve in curves.items()}


def test_planted_defects_leave_the_band():
    """A sound run does not. The last two learn faster here, which leaves the band, too."""
    band, curves = recorded()
    kinds = {defect: {alarm.kind for alarm in alarms.of_losses(curve, band)} for defect, curve in curves.items()}
    assert kinds == {"none": set(), "latent_scale": {"high"}, "lr_times_4": {"low"}, "no_warmup": {"low"}}


def train(folder: Path, defect: str, seed: int) -> Path:
    """Train with a defect; returns the folder of the run. Runs of one seed share their samples."""
    cfg, run = config_file.load(TINY), folder / f"{defect}_{seed}"
    make.make_shapes(folder / "data", cfg.model, cfg.data.train_count, cfg.data.val_count)
    overrides = (f"--run.dir={run}", f"--train.seed={seed}", "--checkpoint.save=false", *SHORT)
    data = (f"--data.train={folder}/data/train", f"--data.val={folder}/data/val")
    command = [sys.executable, str(ROOT / "tests/helpers/planted.py"), defect, str(TINY), *overrides, *data]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_defect_planted_in_a_live_run_leaves_the_band(tmp_path):
    """And its losses are those recorded, up to the arithmetic of another machine."""
    band, curves = recorded()
    evaluations = records(train(tmp_path, "latent_scale", 21) / "eval.jsonl", figures=("val_loss",))
    curve = [(record["samples"], record["val_loss"]) for record in evaluations]
    assert {alarm.kind for alarm in alarms.of_losses(curve, band)} == {"high"}
    assert curve == [(samples, pytest.approx(loss, rel=0.02)) for samples, loss in curves["latent_scale"]]
