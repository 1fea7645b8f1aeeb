"""What training asks of an optimizer, and AdamW with gradient clipping on this rank's shards.

AdamW takes one collective, no pass over memory for clipping, and no host sync.
"""

import math
import warnings
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flux_ref.config import Config, OptimConfig
from flux_ref.ranks import World
from flux_ref.sharding import named_parameters

EMA = "ema"  # the kind of moment that averages the weights
CLIP_EPS = 1e-6  # numerics: added to the norm, as in torch.nn.utils.clip_grad_norm_


def moment_kinds(cfg: OptimConfig) -> tuple[str, ...]:
    """The kinds of moments that each parameter has."""
    return ("exp_avg", "exp_avg_sq", EMA) if cfg.ema else ("exp_avg", "exp_avg_sq")


def bytes_per_parameter(cfg: OptimConfig) -> int:
    """Bytes in a checkpoint of a weight and its moments, all fp32."""
    return 4 * (1 + len(moment_kinds(cfg)))


def share_of_newest(samples: int, half_life: int) -> float:
    """What the newest so many samples count in the average of the weights: 1 - 2 ** (-samples / half_life).

    numerics: written so that it keeps its digits where the half-life is far longer than the samples.
    """
    return -math.expm1(-math.log(2) * samples / half_life)


class Optimizer(Protocol):
    """What the training loop, checkpoints and graphs use of an optimizer. State.of makes it.

    Beside this, moment_kinds must name its moments. The benchmark's log (benchmark/header.py) and `tools.plan` know
    AdamW, too. `eval.py --ema` and `tools.export --ema` read the moment EMA.

    lr:    a scalar on the device, filled in place before each step: a captured graph reads it from device memory.
    names: the names of the parameters, in the order of the shards.
    """

    lr: Tensor
    names: tuple[str, ...]

    def step(self, norm_factor: Tensor | None = None) -> Tensor:
        """Clip by the norm over all parameters of all ranks, update the weights, clear the gradients.

        At learning rate 0 no bit of a weight changes: the steps on synthetic data before a run rely on it. If the norm
        is not finite, neither a weight nor a moment changes. A graph may hold the step, so it works on the device
        alone, without a host sync.

        norm_factor: a device scalar, the same on all ranks, multiplied into the norm. NaN marks the step as bad; None
                     is 1.
        Returns:     the norm before clipping, an fp32 device scalar with the same bits on all ranks.
        """

    def moments(self) -> dict[str, list[Tensor]]:
        """The moments by kind, {kind: one tensor per parameter's shard}: every kind for every parameter.

        A moment has the shape of its shard and is zero before the first step. A checkpoint holds the moments beside
        the weights.
        """

    def set_steps(self, steps: int) -> None:
        """Set the step count, after moments were loaded."""

    def reset(self) -> None:
        """Zero moments and step counts in place, as if no step had been taken."""


class ShardedAdamW:
    """An Optimizer over the local shards of a sharded net: torch's AdamW and clip_grad_norm_ over its DTensors.

    The shards share storage with the net's parameters. With optim.ema each step ends with
    ema += share * (weight - ema). The share is that of a step's samples, so the batch does not change what a half-life
    means. Like AdamW's moments, ema begins at 0: divided by share_of_newest(all samples) it is the mean of the weights
    after each step, and a weight counts half as much for each optim.ema samples that have passed since.
    """

    def __init__(self, net: nn.Module, cfg: Config, world: World):
        optim = cfg.optim
        self.clip_norm = optim.clip_norm
        self.kinds = moment_kinds(optim)
        self.share = share_of_newest(cfg.train.global_batch, optim.ema) if optim.ema else 0.0
        self.replicas = world.replicas
        self.names, self.parameters = zip(*named_parameters(net).items())
        self.shards = [nn.Parameter(parameter.detach().to_local()) for parameter in self.parameters]
        self.lr = torch.zeros((), device=world.device)
        self.adamw = torch.optim.AdamW(
            self.shards,
            lr=self.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
            capturable=world.device.type != "cpu",
        )
        # AdamW would make its moments in the first step, among activations that are freed later, and no ema.
        for shard in self.shards:
            zeros = {kind: torch.zeros_like(shard, requires_grad=False) for kind in self.kinds}
            self.adamw.state[shard] = zeros | {"step": torch.zeros((), device=shard.device)}
        # Without this filter every rank would warn of eager steps, which are no mistake.
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")

    def step(self, norm_factor: Tensor | None = None) -> Tensor:
        """See Optimizer. spec: at learning rate 0 AdamW's decay factor is 1 and its update is 0."""
        for shard, parameter in zip(self.shards, self.parameters):
            shard.grad = parameter.grad.to_local()
        # numerics: replicas hold equal gradients. A sum over all ranks gives all ranks the same bits of the norm.
        squares = torch.nn.utils.get_total_norm([shard.grad for shard in self.shards]).square()
        dist.all_reduce(squares)
        norm = (squares / self.replicas).sqrt()
        if norm_factor is not None:
            norm = norm * norm_factor
        # torch's fused kernel divides gradients by grad_scale and does nothing if found_inf is 1 (as for GradScaler).
        # So clipping needs no pass over memory, and the check for infinity needs no host sync.
        self.adamw.grad_scale = ((norm + CLIP_EPS) / self.clip_norm).clamp(min=1.0)
        self.adamw.found_inf = norm.isfinite().logical_not().float()
        self.adamw.step()
        if self.share:
            self._average(self.moments()[EMA])
        for shard, parameter in zip(self.shards, self.parameters):
            shard.grad = parameter.grad = None
        return norm

    @torch.no_grad()
    def _average(self, averages: list[Tensor]) -> None:
        """Move the averages towards the weights, on the device alone. A step that AdamW left out moves nothing."""
        share = self.share * (1 - self.adamw.found_inf)
        for average, shard in zip(averages, self.shards):
            average.lerp_(shard, share)

    def moments(self) -> dict[str, list[Tensor]]:
        return {kind: [self.adamw.state[shard][kind] for shard in self.shards] for kind in self.kinds}

    def set_steps(self, steps: int) -> None:
        for state in self.adamw.state.values():
            state["step"].fill_(steps)

    def reset(self) -> None:
        for state in self.adamw.state.values():
            for tensor in state.values():
                tensor.zero_()
