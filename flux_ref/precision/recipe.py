"""The precision recipe of a run: how the linears of the blocks compute, and when the core asks.

It follows precision.preset, precision.rules and precision.switch. A plain config casts nothing: it has one stage, one
phase and no converted linear.

Delayed scaling: a side's scale comes from the largest magnitude of earlier steps, so a cast need not wait for a
reduction. Weights are always scaled by their own magnitude. Every rank holds the same gathered weight, so the scale is
exact and needs neither state nor communication.

Source: delayed scaling as NVIDIA's Transformer Engine documents it.
"""

import math
from collections import Counter

import torch
from torch import Tensor, nn

from flux_ref.config import Config, rank_batch
from flux_ref.model import Flux
from flux_ref.precision import fp8, linear, policy
from flux_ref.precision.blocks import RoundingKey, kernel
from flux_ref.precision.casts import scale_of_magnitude
from flux_ref.precision.formats import is_delayed, matmul_path, pair_text
from flux_ref.precision.fp8 import NOTHING, DelayedScaling, agreed_magnitudes, keep_scales
from flux_ref.precision.linear import PolicyLinear
from flux_ref.ranks import World

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # as keys name them
Options = dict[str, object]  # of Inductor


class PrecisionRecipe:
    """The policy of a config, its stages, and the history of delayed scaling, the same on all ranks.

    phases: the first training step of each phase, 0 first. Each phase has compiled code and graphs of its own.
    switches: the presets that begin after the first one, by their first step.
    compiler: options beside those of sharding.py.

    A stage with delayed scales has two phases: its first steps take dynamic scales and fill the history. (Gradients
    grow by orders of magnitude in the first steps of a run, while every gate is nearly zero.)
    delayed_layers: the names of the linears that have delayed sides in any stage, in the order of the model.
    history: (2 * layers, precision.history) fp32, the largest magnitudes of past steps with delayed sides, newest
    first, 0 where there is none. Each linear has one row for its input, then one for the output's gradient.
    A checkpoint needs nothing else: scales follow from the history.
    """

    def __init__(self, cfg: Config):
        """Raises: Refusal for a policy that cannot be."""
        self.cfg = cfg
        self.stages = policy.stages(cfg)
        self.switches: dict[int, str] = {stage.first: stage.preset for stage in self.stages[1:]}
        # By the first step of each phase: its stage, and whether delayed sides take remembered scales.
        self.modes: dict[int, tuple[policy.Stage, bool]] = {}
        for stage, end in zip(self.stages, [*self.switches, math.inf]):
            self.modes[stage.first] = (stage, False)
            filled = stage.first + cfg.precision.dynamic_steps
            if filled < end and any(map(is_delayed, stage.pairs.values())):
                self.modes[filled] = (stage, True)
        self.phases = tuple(self.modes)
        self.delayed_layers = policy.layers_with_delayed_scales(cfg)
        # With casts, transposed codes are written where they belong.
        self.compiler: Options = {} if cfg.precision.is_plain else {"max_pointwise_cat_inputs": 0}

    def convert(self, net: Flux, device: torch.device) -> None:
        """Change modules of a net on the meta device, before it is sharded. Names and shapes of parameters stay."""
        linear.convert(net, self.cfg, fp8.architecture(device))

    def attach(self, net: nn.Module, world: World) -> None:
        """The net is sharded and has memory."""
        self.find(net, world.device)
        linear.install(net, self.cfg)
        self.first_sample = world.rank * rank_batch(self.cfg, world.size)
        if self.linears:
            net.register_forward_pre_hook(self._before_forward)

    def find(self, net: nn.Module, device: torch.device) -> None:
        """Take the converted linears of a net and give them what training needs."""
        self.linears = [module for module in net.modules() if isinstance(module, PolicyLinear)]
        self.owners = [one for one in self.linears if one.layer in self.delayed_layers]
        # What the chances of each linear depend on. `begin` and forward write the step and the sample in place.
        self.step, self.sample = torch.zeros(2, dtype=torch.int64, device=device).unbind()
        seed = torch.tensor(self.cfg.train.seed, device=device)
        names = list(policy.layers(self.cfg.model))
        for one in self.linears:
            number = torch.tensor(names.index(one.layer), device=device)
            one.draws = RoundingKey(seed, self.step, self.sample, number)
        kinds = [kind for one in self.owners for kind in (one.support.forward, one.support.gradient)]
        self.amaxes = [torch.zeros((), device=device) for _ in kinds]
        self.scales = [(torch.ones((), device=device), torch.ones((), device=device)) for _ in kinds]
        self.largest = torch.tensor([torch.finfo(kind).max for kind in kinds], device=device)
        self.history = torch.zeros(len(kinds), self.cfg.precision.history, device=device)
        self.reset()

    def phase(self, step: int) -> int:
        """The phase that a training step belongs to, by its first step."""
        return max(first for first in self.phases if first <= step)

    def begin(self, step: int) -> None:
        """Choose how the next step and the next validation compute. step: steps trained so far.

        Works on the host, but for one number that it writes to the device.
        """
        self.step.fill_(step)
        stage, is_filled = self.modes[self.phase(step)]
        for one in self.linears:
            one.take(stage.pairs[one.layer])
        memories = [
            DelayedScaling(amax, scales if is_filled else None) for amax, scales in zip(self.amaxes, self.scales)
        ]
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
        which hides it from the loss. The norm is multiplied by it.

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
        self.after_load()
        return torch.where(amax.isfinite().all(), 1.0, torch.nan)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside weights and moments, by its keys: the history of layers with delayed sides.

        All ranks have equal tensors.
        """
        return {f"fp8.history.{layer}": rows for layer, rows in zip(self.delayed_layers, self.history.split(2))}

    def after_load(self) -> None:
        """The tensors of `state` were filled from a checkpoint. Scales follow from the history."""
        if self.amaxes:
            amax = self.history.amax(1)
            scale = torch.where(amax > 0, scale_of_magnitude(amax, self.largest), 1.0)  # 1 without history
            keep_scales(scale, self.scales)

    def reset(self) -> None:
        """Forget all steps."""
        for tensor in (self.history, *self.amaxes):
            tensor.zero_()
        self.after_load()
        self.rows = 0  # of this step, so far
        self.begin(0)

    def describe(self, rows: int, device: torch.device) -> list[str]:
        """What a run computes with, in words: one line, and more for a policy. rows: samples of a micro-batch."""
        own = self.cfg.precision
        if own.is_plain:
            return [f"{self.cfg.compute.dtype} in training and validation"]
        validation = "as in training, with dynamic scales" if own.eval else self.cfg.compute.dtype
        lines = [f"{own.preset}; validation {validation}"]
        arch = fp8.architecture(device) if own.native else ""
        for stage in self.stages:
            lines.append(f"  from {stage.first * self.cfg.train.global_batch:,} samples on: {stage.preset}")
            counts = Counter[str]()
            for name, layer in policy.layers(self.cfg.model).items():
                products = stage.pairs[name]
                for product, pair in products.items():
                    text = f"{product}: {pair_text(pair)}"
                    if matmul_path(products) == "blocks" and any(pair):
                        text += f" ({kernel(arch, pair, layer.sizes(rows)[product]) or 'emulated'})"
                    counts[text] += 1
            lines += [f"    {count:>4} {text}" for text, count in counts.items()]
        return lines
