"""What precision does at the moments at which the core calls it (arithmetic.py): policy, delayed scales, draws.

Delayed scaling: a side's scale comes from the largest magnitude of earlier steps, so a cast need not wait for a
reduction. Weights are always scaled by their own magnitude. Every rank holds the same gathered weight, so the scale is
exact and needs neither state nor communication.

Source: delayed scaling as NVIDIA's Transformer Engine documents it.
"""

import math
from collections import Counter

import torch
from torch import Tensor, nn

from flux_ref.arithmetic import Arithmetic
from flux_ref.config import Config, rank_batch
from flux_ref.model import Flux
from flux_ref.precision import fp8, gather, linear, policy
from flux_ref.precision.blocks import Draws, kernel
from flux_ref.precision.casts import scale_of_magnitude
from flux_ref.precision.formats import format_pair, is_delayed, way
from flux_ref.precision.fp8 import NOTHING, Remembered, agreed_magnitudes, keep_scales
from flux_ref.precision.linear import PolicyLinear
from flux_ref.ranks import World


class Precision(Arithmetic):
    """The policy of a config, its stages, and what delayed scaling remembers, the same on all ranks.

    A stage with delayed scales has two phases: its first steps take dynamic scales and fill the history. (Gradients
    grow by orders of magnitude in the first steps of a run, while every gate is nearly zero.)
    remembering: the names of the linears that have delayed sides in any stage, in the order of the model.
    history: (2 * remembering, precision.history) fp32, the largest magnitudes of past steps with delayed sides, newest
    first, 0 where there is none. Each linear has one row for its input, then one for the output's gradient.
    A checkpoint needs nothing else: scales follow from the history.
    """

    def __init__(self, cfg: Config):
        """Raises: Refusal for a policy that cannot be."""
        super().__init__(cfg)
        self.stages = policy.stages(cfg)
        self.switches = {stage.first: stage.preset for stage in self.stages[1:]}
        # By the first step of each phase: its stage, and whether delayed sides take remembered scales.
        self.ways: dict[int, tuple[policy.Stage, bool]] = {}
        for stage, end in zip(self.stages, [*self.switches, math.inf]):
            self.ways[stage.first] = (stage, False)
            filled = stage.first + cfg.precision.dynamic_steps
            if filled < end and any(map(is_delayed, stage.pairs.values())):
                self.ways[filled] = (stage, True)
        self.phases = tuple(self.ways)
        self.remembering = policy.layers_with_delayed_scales(cfg)
        self.compiler = {"max_pointwise_cat_inputs": 0}  # transposed codes are written where they belong

    def require(self, rows: int) -> None:
        policy.require_rows(self.cfg, rows)

    def convert(self, net: Flux, device: torch.device) -> None:
        linear.convert(net, self.cfg, fp8.architecture(device))

    def attach(self, net: nn.Module, world: World) -> None:
        self.find(net, world.device)
        gather.install(net, self.cfg)
        self.first_sample = world.rank * rank_batch(self.cfg, world.size)
        net.register_forward_pre_hook(self._before_forward)

    def find(self, net: nn.Module, device: torch.device) -> None:
        """Take the converted linears of a net and give them what training needs."""
        self.linears = [module for module in net.modules() if isinstance(module, PolicyLinear)]
        self.owners = [one for one in self.linears if one.layer in self.remembering]
        # What the chances of each linear depend on. `begin` and forward write the step and the sample in place.
        self.step, self.sample = torch.zeros(2, dtype=torch.int64, device=device).unbind()
        seed = torch.tensor(self.cfg.train.seed, device=device)
        names = list(policy.layers(self.cfg.model))
        for one in self.linears:
            number = torch.tensor(names.index(one.layer), device=device)
            one.draws = Draws(seed, self.step, self.sample, number)
        kinds = [kind for one in self.owners for kind in (one.support.forward, one.support.gradient)]
        self.amaxes = [torch.zeros((), device=device) for _ in kinds]
        self.scales = [(torch.ones((), device=device), torch.ones((), device=device)) for _ in kinds]
        self.largest = torch.tensor([torch.finfo(kind).max for kind in kinds], device=device)
        self.history = torch.zeros(len(kinds), self.cfg.precision.history, device=device)
        self.reset()

    def begin(self, step: int) -> None:
        """Works on the host, but for one number that it writes to the device."""
        self.step.fill_(step)
        stage, is_filled = self.ways[self.phase(step)]
        for one in self.linears:
            one.take(stage.pairs[one.layer])
        memories = [Remembered(amax, scales if is_filled else None) for amax, scales in zip(self.amaxes, self.scales)]
        for one, of_input, of_grad in zip(self.owners, memories[0::2], memories[1::2]):
            # A stage without delayed sides notes nothing, so stages that come later do not change what it computes.
            notes = is_delayed(one.pairs)
            one.of_input = of_input if notes else NOTHING
            one.of_grad = of_grad if notes else NOTHING

    def _before_forward(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Note which samples of the global batch a micro-batch holds. The rows of a step are counted on the host."""
        if torch.is_grad_enabled():
            self.sample.fill_(self.first_sample + self.rows)
            self.rows += len(inputs[0])

    def after_backward(self) -> Tensor | float:
        """Add a step's magnitudes to the history and set the next step's scales; after the step's last backward.

        Returns 1.0, or NaN if any rank saw a non-finite magnitude: a cast with a remembered scale clamps infinity,
        which hides it from the loss.

        Collective. Works on the device alone and in place, so a captured graph may hold it. A tensor keeps its history
        and scale if its magnitude was 0 on all ranks, or not finite on any rank.
        """
        self.rows = 0
        if not self.amaxes:
            return 1.0
        amax = agreed_magnitudes(self.amaxes)
        usable = ((amax > 0) & amax.isfinite())[:, None]
        rolled = torch.cat((amax[:, None], self.history[:, :-1]), dim=1)
        self.history.copy_(torch.where(usable, rolled, self.history))
        torch._foreach_zero_(self.amaxes)
        self.set_scales()
        return torch.where(amax.isfinite().all(), 1.0, torch.nan)

    def set_scales(self) -> None:
        if self.amaxes:
            amax = self.history.amax(1)
            scale = torch.where(amax > 0, scale_of_magnitude(amax, self.largest), 1.0)  # 1 without history
            keep_scales(scale, self.scales)

    def reset(self) -> None:
        for tensor in (self.history, *self.amaxes):
            tensor.zero_()
        self.set_scales()
        self.rows = 0  # of this step, so far
        self.begin(0)

    def describe(self, rows: int, device: torch.device) -> list[str]:
        own = self.cfg.precision
        validation = "as in training, with dynamic scales" if own.eval else self.cfg.parallel.dtype
        lines = [f"{own.preset}; validation {validation}"]
        arch = fp8.architecture(device) if own.native else ""
        for stage in self.stages:
            lines.append(f"  from {stage.first * self.cfg.train.global_batch:,} samples on: {stage.preset}")
            counts = Counter[str]()
            for name, layer in policy.layers(self.cfg.model).items():
                products = stage.pairs[name]
                for product, pair in products.items():
                    text = f"{product}: {format_pair(pair)}"
                    if way(products) == "blocks" and any(pair):
                        text += f" ({kernel(arch, pair, layer.sizes(rows)[product]) or 'emulated'})"
                    counts[text] += 1
            lines += [f"    {count:>4} {text}" for text, count in counts.items()]
        return lines
