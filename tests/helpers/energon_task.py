"""Energon's classes for our samples. Energon's processes look these classes up by name, so they have a module."""

import io

import numpy as np
import torch
from megatron import energon

from flux_ref.formats.shards import MEMBERS

PREPARE = "from megatron.energon.cli.main import main; main()"


@energon.edataclass
class Embedded(energon.Sample):
    """One sample, or a batch of them."""

    t5: torch.Tensor
    clip: torch.Tensor
    mean: torch.Tensor
    logvar: torch.Tensor


def decode(sample: dict) -> dict[str, torch.Tensor]:
    """The members of a sample as they are stored: bf16 bits in uint16."""
    return {name: torch.from_numpy(np.load(io.BytesIO(sample[f"{name}.bytes"]))) for name in MEMBERS}


@energon.stateless
def cook(sample: dict) -> Embedded:
    return Embedded(**energon.basic_sample_keys(sample), **decode(sample))


class Task(energon.DefaultTaskEncoder):
    """Members to tensors, tensors to batches."""

    decoder = None
    cookers = (energon.Cooker(cook),)
