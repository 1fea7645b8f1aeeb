"""AdamW and gradient clipping on this rank's shards: one collective, no pass for clipping, no host sync."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flux_ref.config import OptimConfig
from flux_ref.ranks import World
from flux_ref.sharding import named_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPS = 1e-6  # numerics: added to the norm, as in torch.nn.utils.clip_grad_norm_


class ShardedAdamW:
    """AdamW over the local shards of a sharded net; equal to AdamW and clip_grad_norm_ over its DTensors.

    The shards share storage with the net's parameters. `lr` is a device scalar, so that a captured graph
    can be told a new rate.
    """

    def __init__(self, net: nn.Module, cfg: OptimConfig, world: World):
        self.clip_norm, self.replicas = cfg.clip_norm, world.replicas
        self.names, self.parameters = zip(*named_parameters(net).items())
        self.shards = [nn.Parameter(parameter.detach().to_local()) for parameter in self.parameters]
        self.lr = torch.zeros((), device=world.device)
        self.adamw = torch.optim.AdamW(
            self.shards,
            lr=self.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            fused=True,
            capturable=world.device.type != "cpu",
        )
        # Eager steps are no mistake; every rank would warn of them.
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")

    def step(self, sound: Tensor | None = None) -> Tensor:
        """Clip, update, clear the gradients; returns the gradient norm before clipping, a device scalar.

        A norm that is not finite changes neither weights nor moments; `step.Health` remembers it.
        sound: 1, or NaN to have the norm NaN; the same on all ranks.
        """
        for shard, parameter in zip(self.shards, self.parameters):
            shard.grad = parameter.grad.to_local()
        # numerics: replicas hold equal gradients; summing over all ranks gives them the same bits of the norm.
        squares = torch.nn.utils.get_total_norm([shard.grad for shard in self.shards]).square()
        dist.all_reduce(squares)
        norm = (squares / self.replicas).sqrt()
        norm = norm if sound is None else norm * sound
        # The fused kernel divides gradients by the one and does nothing where the other is 1: clipping takes no pass
        # over memory, and the check no host sync. torch.amp.GradScaler speaks to it in the same way.
        self.adamw.grad_scale = ((norm + CLIP_EPS) / self.clip_norm).clamp(min=1.0)
        self.adamw.found_inf = norm.isfinite().logical_not().float()
        self.adamw.step()
        for shard, parameter in zip(self.shards, self.parameters):
            shard.grad = parameter.grad = None
        return norm

    def moments(self) -> dict[str, list[Tensor]]:
        """The first and second moments, {"exp_avg", "exp_avg_sq"}, one tensor per shard; zero before the first step."""
        for shard in self.shards:
            if not self.adamw.state[shard]:
                zeros = (torch.zeros_like(shard, requires_grad=False) for _ in MOMENTS)
                self.adamw.state[shard] = {"step": torch.zeros((), device=shard.device), **dict(zip(MOMENTS, zeros))}
        return {name: [self.adamw.state[shard][name] for shard in self.shards] for name in MOMENTS}

    def set_steps(self, steps: int) -> None:
        """Tell AdamW, whose moments have been filled, how many steps they stand for."""
        self.moments()
        for state in self.adamw.state.values():
            state["step"].fill_(steps)

    def reset(self) -> None:
        """Zero the moments and step counts in place, as if no step had been taken."""
        for state in self.adamw.state.values():
            for tensor in state.values():
                tensor.zero_()
