"""The validation loss: every sample once at any world size, the same number on every rank.

Rows that only fill a batch have weight 0 (data.ValSet) and timestep sums count weights (step.validation_step), so they
are in no mean. Sums are reduced to rank 0's bits (parallel.all_reduce): all ranks see the target reached, or none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flux_ref import data, ranks, schedule, sharding
from flux_ref.config import Config
from flux_ref.data import Batch, ValSet
from flux_ref.errors import Fault
from flux_ref.step import validation_step


@dataclass(frozen=True)
class Validation:
    """What one evaluation found; losses are means over samples."""

    loss: float  # mean of the eight per-timestep means
    stderr: float  # of that mean, over samples and noise
    losses: list[float]
    stderrs: list[float]
    count: int


def validation_loss(
    net: nn.Module,
    val: ValSet,
    static: Batch,
    cfg: Config,
    samples: int,
    permute_captions: bool = False,
    between: Callable[[int], None] = lambda batch: None,
    validate: Callable[[Tensor], None] | None = None,
) -> Validation:
    """Evaluate the net on the whole validation set. Collective: every rank runs the same number of batches.

    samples:          the clock; it names the noise when cfg.eval.noise is fresh.
    permute_captions: exchange the captions among the samples, which a net that reads them must notice.
    between:          called with the number of each batch after it; may raise, on all ranks alike.
    validate:         adds the batch in `static` to sums, which it is given; None: validation_step does.
    Raises:           Fault if a timestep has no sample or the loss is not finite.
    """
    validate = validate or (lambda sums: validation_step(net, static, sums, cfg))
    sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64, device=static["t"].device)
    feed = val.feed(samples if cfg.eval.noise == "fresh" else 0, permute_captions)
    try:
        for batch in range(val.batches):
            data.to_device(feed, static)
            validate(sums)
            between(batch)
    finally:
        feed.close()
        sharding.reshard(net)  # also when told to stop: a checkpoint is taken of shards
    # sync: once per evaluation.
    return summarise(ranks.all_reduce(sums).tolist(), samples)


def summarise(sums: list[list[float]], samples: int) -> Validation:
    """From per-timestep counts, sums and sums of squares over all ranks to means and standard errors.

    sums: (3, 8); samples: of training so far.
    Raises: Fault for a timestep without samples or a loss that is not finite.
    """
    losses, variances = [], []
    for timestep, (count, total, squares) in enumerate(zip(*sums)):
        if count == 0:
            raise Fault(f"the validation set has no sample with timestep {timestep}; every one of 0 to 7 is needed")
        mean = total / count
        losses.append(mean)
        variances.append(max(0.0, squares / count - mean**2) / max(1, count - 1))
    # spec: the mean over timesteps, each counted once however many samples it has.
    loss = sum(losses) / len(losses)
    if loss != loss or loss in (float("inf"), float("-inf")):
        raise Fault(f"validation loss is not finite after {samples} training samples")
    return Validation(
        loss=loss,
        stderr=sum(variances) ** 0.5 / len(variances),
        losses=losses,
        stderrs=[variance**0.5 for variance in variances],
        count=round(sum(sums[0])),
    )
