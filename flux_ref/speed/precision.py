"""What a run's precision does between steps: the policy of the present stage, delayed scales, and rounding's draws.

Delayed scaling: a side's scale comes from the largest magnitudes of earlier steps, so a cast need not wait for a
reduction. Weights are always scaled by their own magnitude. Every rank holds the same gathered weight, so the scale is
exact and needs neither state nor communication.

Source: delayed scaling as NVIDIA's Transformer Engine documents it.
"""

import torch
from torch import Tensor, nn

from flux_ref.config import Config
from flux_ref.speed import policy
from flux_ref.speed.block_product import Draws
from flux_ref.speed.fp8_product import agreed_magnitudes, keep_scales, scale_of_magnitude
from flux_ref.speed.layers import layers
from flux_ref.speed.linear import PolicyLinear
from flux_ref.speed.sides import is_delayed


class Precision:
    """The stages of a converted net, and what delayed scaling remembers, the same on all ranks.

    phases: the steps at which the way of computing changes. Each phase has compiled code and graphs of its own. A stage
    with delayed scales has two: its first steps take dynamic scales and fill the history. (Gradients grow by orders of
    magnitude in the first steps of a run, while every gate is nearly zero.)
    remembering: the names of the linears that have delayed sides in any stage, in the order of the model.
    history: (2 * remembering, precision.history) fp32, the largest magnitudes of past steps with delayed sides, newest
    first, 0 where there is none. Each linear has one row for its input, then one for the output's gradient.
    A checkpoint needs nothing else: scales follow from the history.
    """

    def __init__(self, net: nn.Module, cfg: Config, device: torch.device, first_sample: int = 0):
        """first_sample: of this rank, in the global batch."""
        self.precision = cfg.precision
        self.stages = policy.stages(cfg)
        phases = set()
        for stage in self.stages:
            phases.add(stage.first)
            filled = stage.first + self.precision.dynamic_steps
            if self.stage(filled) is stage and any(map(is_delayed, stage.pairs.values())):
                phases.add(filled)
        self.phases = tuple(sorted(phases))
        self.linears = [module for module in net.modules() if isinstance(module, PolicyLinear)]
        owners = [linear for linear in self.linears if linear.of_input is not None]
        self.remembering = [linear.layer for linear in owners]
        memories = [memory for linear in owners for memory in (linear.of_input, linear.of_grad)]
        largest = [torch.finfo(dtype).max for linear in owners for dtype in linear.arith[:2]]
        self.amaxes = [memory.amax for memory in memories]
        self.scales = [memory.scale for memory in memories]
        self.inverses = [memory.inverse for memory in memories]
        self.largest = torch.tensor(largest, device=device) / 2**self.precision.margin
        self.history = torch.zeros(len(largest), self.precision.history, device=device)
        self.step, self.sample = torch.zeros(2, dtype=torch.int64, device=device).unbind()
        self.first_sample = first_sample
        names = [layer.name for layer in layers(cfg.model).values()]
        seed = torch.tensor(cfg.train.seed, device=device)
        for linear in self.linears:
            number = torch.tensor(names.index(linear.layer), device=device)
            linear.draws = Draws(seed, self.step, self.sample, number)
        self.reset()

    def phase(self, step: int) -> int:
        """The phase that a training step belongs to."""
        return max(first for first in self.phases if first <= step)

    def stage(self, step: int) -> policy.Stage:
        """The stage that a training step belongs to."""
        return [stage for stage in self.stages if stage.first <= step][-1]

    def begin(self, step: int) -> None:
        """Choose how the next step computes, and what is done before it. step: its number, from 0.

        Works on the host, but for one number that it writes to the device.
        """
        self.step.fill_(step)
        if (phase := self.phase(step)) == self.chosen:
            return
        stage = self.stage(step)
        self.chosen = phase
        remembers = step >= stage.first + self.precision.dynamic_steps
        for linear in self.linears:
            linear.take(stage.pairs[linear.layer])
            linear.is_delayed = remembers and is_delayed(linear.pairs)

    def micro_batch(self, start: int) -> None:
        """start: the first row of the next micro-batch, among this rank's rows."""
        self.sample.fill_(self.first_sample + start)

    def remember_magnitudes(self) -> Tensor | None:
        """Add a step's magnitudes to the history and set the next step's scales; after the step's last backward.

        Returns norm_factor: 1.0, or NaN if any rank saw a non-finite magnitude; None if nothing is remembered.
        NaN is needed because a cast with a remembered scale clamps infinity, which hides it from the loss.

        Collective. Works on the device alone and in place, so a captured graph may hold it. A tensor keeps its history
        and scale if its magnitude was 0 on all ranks, or not finite on any rank.
        """
        if not self.amaxes:
            return None
        amax = agreed_magnitudes(self.amaxes)
        usable = ((amax > 0) & amax.isfinite())[:, None]
        rolled = torch.cat((amax[:, None], self.history[:, :-1]), dim=1)
        self.history.copy_(torch.where(usable, rolled, self.history))
        torch._foreach_zero_(self.amaxes)
        self.set_scales()
        return torch.where(amax.isfinite().all(), 1.0, torch.nan)

    def set_scales(self) -> None:
        """Set the delayed scales from the history; 1 for a tensor without history."""
        if not self.amaxes:
            return
        amax = self.history.amax(1) if self.precision.algorithm == "max" else self.history[:, 0]
        scale = torch.where(amax > 0, scale_of_magnitude(amax, self.largest), 1.0)
        keep_scales(scale, self.scales, self.inverses)

    def reset(self) -> None:
        """Forget all steps."""
        for tensor in (self.history, *self.amaxes):
            tensor.zero_()
        self.set_scales()
        self.chosen = None  # phase
        self.begin(0)
