"""AdamW and gradient clipping on this rank's shards: one collective, no pass for clipping, no host sync.

Another optimizer has the same interface; the benchmark's log (mllog.py) and `tools.plan` know AdamW, too:
    lr                  device scalar, filled in place before each step
    step(norm_factor)   clips, updates, clears gradients, returns the gradient norm
    names, moments()    what a checkpoint holds beside the weights
    set_steps, reset    after a resume, after the warm-up
"""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flux_ref.config import OptimConfig
from flux_ref.ranks import World
from flux_ref.sharding import named_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 12  # in a checkpoint: a weight and its moments, all fp32
CLIP_EPS = 1e-6  # numerics: added to the norm, as in torch.nn.utils.clip_grad_norm_


class Optimizer:
    """AdamW over the local shards of a sharded net. It equals torch's AdamW and clip_grad_norm_ over its DTensors.

    The shards share storage with the net's parameters. `lr` is a device scalar, because a captured graph reads the
    learning rate from device memory.
    """

    def __init__(self, net: nn.Module, cfg: OptimConfig, world: World):
        self.clip_norm = cfg.clip_norm
        self.replicas = world.replicas
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
        # Without this filter every rank would warn of eager steps, which are no mistake.
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")

    def step(self, norm_factor: Tensor | None = None) -> Tensor:
        """Clip, update and clear the gradients. Returns the gradient norm before clipping, an fp32 device scalar.

        A norm that is not finite changes neither weights nor moments. `step.Health` remembers the norm.
        norm_factor: multiplied into the norm, the same on all ranks. NaN marks the step as bad; None is 1.
        """
        for shard, parameter in zip(self.shards, self.parameters):
            shard.grad = parameter.grad.to_local()
        # numerics: replicas hold equal gradients. A sum over all ranks gives all ranks the same bits of the norm.
        squares = torch.nn.utils.get_total_norm([shard.grad for shard in self.shards]).square()
        dist.all_reduce(squares)
        norm = (squares / self.replicas).sqrt()
        norm = norm if norm_factor is None else norm * norm_factor
        # torch's fused kernel divides gradients by grad_scale and does nothing if found_inf is 1 (as for GradScaler).
        # So clipping needs no pass over memory, and the check for infinity needs no host sync.
        self.adamw.grad_scale = ((norm + CLIP_EPS) / self.clip_norm).clamp(min=1.0)
        self.adamw.found_inf = norm.isfinite().logical_not().float()
        self.adamw.step()
        for shard, parameter in zip(self.shards, self.parameters):
            shard.grad = parameter.grad = None
        return norm

    def moments(self) -> dict[str, list[Tensor]]:
        """The moments by name, {"exp_avg", "exp_avg_sq"}, one tensor per shard. They are zero before the first step."""
        for shard in self.shards:
            if not self.adamw.state[shard]:
                zeros = {name: torch.zeros_like(shard, requires_grad=False) for name in MOMENTS}
                self.adamw.state[shard] = zeros | {"step": torch.zeros((), device=shard.device)}
        return {name: [self.adamw.state[shard][name] for shard in self.shards] for name in MOMENTS}

    def set_steps(self, steps: int) -> None:
        """Set the step count of moments that were loaded."""
        self.moments()
        for state in self.adamw.state.values():
            state["step"].fill_(steps)

    def reset(self) -> None:
        """Zero the moments and step counts in place, as if no step had been taken."""
        for state in self.adamw.state.values():
            for tensor in state.values():
                tensor.zero_()
