"""AdamW on this rank's shards, with clipping by the norm over all ranks, and the average of the weights (EMA).

The optimizer holds the local shards and not FSDP2's DTensors: torch's fused kernel then sees plain tensors, and the
norm takes one collective for all parameters instead of one for each.
"""

import math
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flux_ref.config import Config, OptimConfig
from flux_ref.ranks import World
from flux_ref.sharding import ShardedFlux, named_parameters

EMA = "ema"  # the average of the weights
CLIP_EPS = 1e-6  # numerics: added to the norm, as torch's clip_grad_norm_ does


def state_kinds(cfg: OptimConfig) -> tuple[str, ...]:
    """The fp32 tensors that are kept for each parameter, in its shape: AdamW's moments and, if asked for, EMA."""
    return ("exp_avg", "exp_avg_sq", EMA) if cfg.ema_half_life else ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """torch's AdamW over the local shards of a sharded net, which share storage with the net's parameters.

    port: as optax.adamw: w -= lr * (m / (sqrt(v) + eps) + weight_decay * w), with m and v divided by 1 - beta ** step.
    The first step counts as 1. Clipping has an epsilon (CLIP_EPS) that optax lacks.
    A graph may hold `step`: it works on the device alone, in place, without a host sync. So all moments are made here.
    spec: weight decay holds for every parameter, biases and scales too.

    lr:     a scalar on the device, filled in place before each step.
    names:  of the parameters, in the order of the shards.
    """

    def __init__(self, net: ShardedFlux, cfg: Config, world: World):
        optim = cfg.optim
        self.clip_norm = optim.clip_norm
        self.kinds = state_kinds(optim)
        # 1 - 0.5 ** (samples of a step / half-life). numerics: expm1 keeps its digits where the half-life is long.
        half_life = optim.ema_half_life
        self.ema_rate = -math.expm1(-math.log(2) * cfg.train.global_batch / half_life) if half_life else 0.0
        self.replicas = world.replicas
        self.after_backward = net.recipe.after_backward
        self.names = net.names
        self.parameters = list(named_parameters(net).values())
        self.shards: list[Tensor] = [nn.Parameter(parameter.to_local().detach()) for parameter in self.parameters]
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
        for shard in self.shards:
            made = {kind: torch.empty_like(shard, requires_grad=False) for kind in self.kinds}
            self.adamw.state[shard] = made | {"step": torch.empty((), device=shard.device)}
        self.reset()

    @torch.no_grad()
    def step(self) -> Tensor:
        """Clip the gradients, update the weights and the average, and clear the gradients.

        At learning rate 0 no bit of a weight changes, as AdamW's decay factor is 1 and its update 0. The warm-up runs
        real steps at rate 0 and relies on it.
        Returns the norm over all parameters of all ranks before clipping, fp32, with the same bits on all ranks. If it
        is not finite, weights and moments are lost.
        """
        grads = [cast(DTensor, parameter.grad).to_local() for parameter in self.parameters]
        squares = torch.nn.utils.get_total_norm(grads).square()
        dist.all_reduce(squares)
        # Each shard exists once per replica, so the sum over all ranks counts it so often.
        norm = (squares / self.replicas).sqrt() * self.after_backward()
        torch._foreach_div_(grads, ((norm + CLIP_EPS) / self.clip_norm).clamp(min=1.0))
        for shard, grad in zip(self.shards, grads):
            shard.grad = grad
        self.adamw.step()
        if self.ema_rate:
            torch._foreach_lerp_(self.states()[EMA], self.shards, self.ema_rate)
        for shard, parameter in zip(self.shards, self.parameters):
            shard.grad = parameter.grad = None
        return norm

    def states(self) -> dict[str, list[Tensor]]:
        """What is kept for each parameter, by kind, in the order and shapes of the shards. A checkpoint holds it."""
        return {kind: [self.adamw.state[shard][kind] for shard in self.shards] for kind in self.kinds}

    def set_steps(self, steps: int) -> None:
        """Set AdamW's step counts, after moments were loaded."""
        for state in self.adamw.state.values():
            state["step"].fill_(steps)

    @torch.no_grad()
    def reset(self) -> None:
        """As before the first step: moments and step counts are 0, and the average is the weights. In place."""
        for shard, state in self.adamw.state.items():
            for tensor in state.values():
                tensor.zero_()
            if EMA in state:
                state[EMA].copy_(shard)
