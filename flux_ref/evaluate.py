"""The validation loss: the mean over eight timesteps of the mean loss of their samples, each read once.

Every rank gets the same number, at any world size up to rounding.

The last batches may have rows that only fill them. Such rows have no timestep (dataloader.ValSet), so they are in no
mean (trainer.validation_step). All ranks get the same bits of the sums, so either all see the target reached, or none.
"""

import math
from contextlib import closing
from dataclasses import dataclass

import torch.distributed as dist

from flux_ref.cli import Fault, Say
from flux_ref.dataloader import ValSet, copy_next
from flux_ref.trainer import Validator


@dataclass(frozen=True)
class Validation:
    """The result of one evaluation, as a record has it."""

    val_loss: float  # mean of the means per timestep
    val_loss_per_timestep: list[float]
    count: int  # samples


def validation_loss(
    steps: Validator,
    val: ValSet,
    samples: int,
    stop_point: Say = lambda place: None,
) -> Validation:
    """Evaluate a net on the whole validation set. Collective: every rank runs the same number of batches.

    samples: training samples so far; they name the noise if cfg.eval.noise is "fresh".
    stop_point: called after each batch with its name. It may raise, on all ranks alike.
    Raises:  Fault if the loss is not finite.
    """
    steps.sums.zero_()
    try:
        with closing(val.feed(samples if steps.cfg.eval.noise == "fresh" else 0)) as feed:
            for batch in range(val.batches):
                copy_next(feed, steps.val_batch)
                steps.validate()
                stop_point(f"validation batch {batch} after {samples} samples")
    finally:
        steps.reshard()  # also after an interruption: a checkpoint saves shards
    dist.all_reduce(steps.sums)
    counts, totals = steps.sums.tolist()  # sync: once per evaluation
    losses = [total / count for count, total in zip(counts, totals)]  # dataloader.ValSet.open has seen a sample of each
    # spec: the mean over timesteps, each counted once however many samples it has.
    loss = sum(losses) / len(losses)
    if not math.isfinite(loss):
        raise Fault(f"validation loss is not finite after {samples} training samples")
    return Validation(loss, losses, round(sum(counts)))
