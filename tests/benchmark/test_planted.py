"""Early warnings on real runs: of the tiny model, some with a defect planted, against a band of sound ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from flux_ref import config_file
from flux_ref.benchmark import alarms, convergence
from flux_ref.formats.jsonl import records
from flux_ref.toy import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TINY = ROOT / "configs" / "tiny.toml"
SHORT = ("--train.max_samples=4500", "--eval.every_samples=1500", "--sample.count=0", "--eval.permuted_captions=false")
SOUND = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(defect, seed) is the folder of a run; those of a seed share their samples."""
    cfg, folder = config_file.load(TINY), tmp_path_factory.mktemp("planted")
    make.make_shapes(folder / "data", cfg.model, cfg.data.train_count, cfg.data.val_count)

    def train(defect: str, seed: int) -> Path:
        run = folder / f"{defect}_{seed}"
        overrides = (f"--run.dir={run}", f"--train.seed={seed}", "--checkpoint.save=false", *SHORT)
        data = (f"--data.train={folder}/data/train", f"--data.val={folder}/data/val")
        command = [sys.executable, str(ROOT / "tests/helpers/planted.py"), defect, str(TINY), *overrides, *data]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        return run

    return train


@pytest.fixture(scope="module")
def band(trained, tmp_path_factory) -> convergence.Band:
    runs = [str(trained("none", seed)) for seed in SOUND]
    done = subprocess.run(
        [sys.executable, "-m", "flux_ref.benchmark.convergence", *runs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    path = tmp_path_factory.mktemp("band") / "own.csv"
    path.write_text(done.stdout)
    return convergence.band(path, config_file.load(TINY).train.global_batch, "own runs")


@pytest.mark.parametrize(
    "defect, seen",
    [("none", []), ("latent_scale", ["high"]), ("lr_times_4", ["low"]), ("no_warmup", ["low"])],
)  # both of the last two learn faster here: outside the band all the same
def test_a_planted_defect_leaves_the_band(defect, seen, band, trained):
    curve = [(record["samples"], record["val_loss"]) for record in records(trained(defect, 21) / "eval.jsonl")]
    assert sorted({alarm.kind for alarm in alarms.of_losses(curve, band)}) == seen
