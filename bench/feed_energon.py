"""Energon's side of bench.feed; a module of its own, because its processes look up these classes by name."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron import energon

from bench.feed_peers import AHEAD, decode
from flux_ref.errors import Fault

PREPARE = "from megatron.energon.cli.main import main; main()"


@energon.edataclass
class Embedded(energon.Sample):
    """One sample, or a batch of them."""

    t5: torch.Tensor
    clip: torch.Tensor
    mean: torch.Tensor
    logvar: torch.Tensor


@energon.stateless
def cook(sample: dict) -> Embedded:
    return Embedded(**energon.basic_sample_keys(sample), **decode(sample))


class Task(energon.DefaultTaskEncoder):
    """Members to tensors, tensors to batches."""

    decoder = None
    cookers = (energon.Cooker(cook),)


def prepare(folder: Path) -> None:
    """What Energon wants beside the shards. Raises: Fault."""
    options = ("--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", str(folder))
    done = subprocess.run([sys.executable, "-c", PREPARE, "prepare", *options], capture_output=True, text=True)
    if done.returncode:
        raise Fault(f"energon prepare {folder} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


@contextlib.contextmanager
def batches(folder: Path, batch: int, workers: int) -> Iterator[Iterator]:
    """Batches without end by Energon's loader in so many processes."""
    if not (folder / ".nv-meta").exists():
        prepare(folder)
    own = energon.WorkerConfig(rank=0, world_size=1, num_workers=workers)
    options = {"batch_size": batch, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
    dataset = energon.get_train_dataset(folder, worker_config=own, task_encoder=Task(), **options)
    loader = energon.get_loader(dataset, prefetch_factor=AHEAD)
    yield iter(loader)
