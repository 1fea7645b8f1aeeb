"""Energon and this project read each other's folders. Needs megatron-energon: pip install megatron-energon."""

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from shard_damage import every_sample, samples, write

from flux_ref.dataset import MEMBERS

energon = pytest.importorskip("megatron.energon")

pytestmark = pytest.mark.interop
COUNTS = {"train": 11, "val": 5}
PREPARE = "from megatron.energon.cli.main import main; main()"


@energon.edataclass
class Embedded(energon.Sample):
    """One sample, or a batch of them."""

    t5: torch.Tensor
    clip: torch.Tensor
    mean: torch.Tensor
    logvar: torch.Tensor


@energon.stateless
def cook(sample):
    """The members as they are stored: bf16 bits in uint16."""
    members = {name: torch.from_numpy(np.load(io.BytesIO(sample[f"{name}.bytes"]))) for name in MEMBERS}
    return Embedded(**energon.basic_sample_keys(sample), **members)


class Task(energon.DefaultTaskEncoder):
    """Members to tensors, tensors to batches."""

    decoder = None
    cookers = (energon.Cooker(cook),)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """What our writer makes, prepared by Energon's own command."""
    root = tmp_path_factory.mktemp("energon") / "data"
    for seed, (split, count) in enumerate(COUNTS.items()):
        write(root / split, samples(count, seed, split == "val", prefix=split), 4)
    parts = [f"{split}:{split}/shard_{{000000..{(n - 1) // 4:06d}}}.tar" for split, n in COUNTS.items()]
    options = [text for part in parts for text in ("--split-parts", part)]
    prepare(root, *options)
    return root


def prepare(root, *options):
    command = [sys.executable, "-c", PREPARE, "prepare", "--non-interactive", *options]
    done = subprocess.run([*command, "--sample-type", "CrudeWebdataset", str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("split", COUNTS)
def test_energons_loader_gives_the_tensors_that_our_reader_gives(root, split):
    """In a folder that Energon has prepared."""
    get = {"train": energon.get_train_dataset, "val": energon.get_val_dataset}[split]
    options = {"shuffle_buffer_size": None, "max_samples_per_sequence": None} if split == "train" else {}
    own = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get(root, worker_config=own, batch_size=1, task_encoder=Task(), **options)
    ours = {meta.key: arrays for meta, arrays in every_sample(root / split)}
    found = {}
    for _, batch in zip(range(COUNTS[split]), energon.get_loader(dataset)):
        found[batch.__key__[0].rpartition("/")[2]] = batch
    assert found.keys() == ours.keys() and len(ours) == COUNTS[split]
    for key, batch in found.items():
        for name in MEMBERS:
            assert torch.equal(getattr(batch, name)[0], torch.from_numpy(ours[key][name]))
