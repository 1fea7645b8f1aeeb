"""What precision does at the moments at which the core calls it (arithmetic.py): policy, delayed scales, draws.

Delayed scaling: a side's scale comes from the largest magnitude of earlier steps, so a cast need not wait for a
reduction. Weights are always scaled by their own magnitude. Every rank holds the same gathered weight, so the scale is
exact and needs neither state nor communication.

Source: delayed scaling as NVIDIA's Transformer Engine documents it.
"""

import torch
from torch import Tensor, nn

from flux_ref.arithmetic import Arithmetic
from flux_ref.config import Config, rank_batch
from flux_ref.errors import Refusal
from flux_ref.model import Flux
from flux_ref.precision import fp8, gather, linear, policy
from flux_ref.precision.blocks import Draws, kernel
from flux_ref.precision.casts import scale_of_magnitude
from flux_ref.precision.fp8 import agreed_magnitudes, keep_scales
from flux_ref.precision.layers import is_delayed, layers, way
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
        if policy.layers_gathered_in_fp8(cfg) and not cfg.precision.eval:
            rule = "validates in bf16, but precision.gather=true gathers in FP8"
            raise Refusal(f"precision.eval=false {rule}; set precision.gather=false")
        self.phases = self._phases()
        self.remembering = policy.layers_with_delayed_scales(cfg)
        if any(map(policy.is_low, self.stages)):
            self.compiler = {"max_pointwise_cat_inputs": 0}  # transposed codes are written where they belong
        self.checks = (self.remember_magnitudes,)

    def _phases(self) -> tuple[int, ...]:
        found = set()
        for stage in self.stages:
            found.add(stage.first)
            filled = stage.first + self.cfg.precision.dynamic_steps
            if self.stage(filled) is stage and any(map(is_delayed, stage.pairs.values())):
                found.add(filled)
        return tuple(sorted(found))

    def stage(self, step: int) -> policy.Stage:
        """The stage that a training step belongs to."""
        return [stage for stage in self.stages if stage.first <= step][-1]

    def require(self, rows: int, device: torch.device) -> None:
        policy.require_rows(self.cfg, rows)
        self.native(rows, fp8.architecture(device))

    def native(self, rows: int, arch: str) -> tuple[int, int]:
        """How many products of blocks torch's kernels take, and how many are emulated, in all stages.

        rows: samples of a micro-batch. Raises: Refusal for sizes that a kernel does not take.
        """
        taken = 0
        emulated = 0
        for stage in self.stages:
            for layer in layers(self.cfg.model).values():
                products = stage.pairs[layer.name]
                if way(products) != "blocks":
                    continue
                for name, sizes in layer.sizes(rows).items():
                    found = kernel(arch, *products[name]) if self.cfg.precision.native else None
                    if found:
                        found.require(sizes)
                        taken += 1
                    elif any(products[name]):
                        emulated += 1
        return taken, emulated

    def convert(self, net: Flux, device: torch.device) -> None:
        linear.convert(net, self.cfg, fp8.architecture(device))

    def attach(self, net: nn.Module, world: World) -> None:
        self.find(net, world.device)
        gather.install(net, self.cfg)
        self.first_sample = world.rank * rank_batch(self.cfg, world.size)
        net.register_forward_pre_hook(self._before_forward)

    def find(self, net: nn.Module, device: torch.device) -> None:
        """Take the converted linears of a net."""
        self.linears = [module for module in net.modules() if isinstance(module, PolicyLinear)]
        self._find_memories(device)
        self._give_draws(device)
        self.reset()

    def _find_memories(self, device: torch.device) -> None:
        """Where linears with delayed sides note magnitudes and read scales: for each its input, then its gradient."""
        owners = [one for one in self.linears if one.of_input is not None]
        memories = [memory for one in owners for memory in (one.of_input, one.of_grad)]
        self.amaxes = [memory.amax for memory in memories]
        self.scales = [memory.scale for memory in memories]
        self.inverses = [memory.inverse for memory in memories]
        largest = [torch.finfo(dtype).max for one in owners for dtype in one.arith[:2]]
        self.largest = torch.tensor(largest, device=device)
        self.history = torch.zeros(len(memories), self.cfg.precision.history, device=device)

    def _give_draws(self, device: torch.device) -> None:
        """Tell each linear what its chances depend on. `begin` and forward write the step and the sample in place."""
        self.step, self.sample = torch.zeros(2, dtype=torch.int64, device=device).unbind()
        seed = torch.tensor(self.cfg.train.seed, device=device)
        names = [layer.name for layer in layers(self.cfg.model).values()]
        for one in self.linears:
            one.draws = Draws(seed, self.step, self.sample, torch.tensor(names.index(one.layer), device=device))

    def begin(self, step: int) -> None:
        """Works on the host, but for one number that it writes to the device."""
        self.step.fill_(step)
        if (phase := self.phase(step)) == self.chosen:
            return
        stage = self.stage(step)
        self.chosen = phase
        remembers = step >= stage.first + self.cfg.precision.dynamic_steps
        for one in self.linears:
            one.take(stage.pairs[one.layer])
            one.is_delayed = remembers and is_delayed(one.pairs)

    def _before_forward(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Note which samples of the global batch a micro-batch holds. The rows of a step are counted on the host."""
        if torch.is_grad_enabled():
            self.sample.fill_(self.first_sample + self.rows)
            self.rows += len(inputs[0])

    def remember_magnitudes(self) -> Tensor:
        """Add a step's magnitudes to the history and set the next step's scales; after the step's last backward.

        Returns 1.0, or NaN if any rank saw a non-finite magnitude: a cast with a remembered scale clamps infinity,
        which hides it from the loss.

        Collective. Works on the device alone and in place, so a captured graph may hold it. A tensor keeps its history
        and scale if its magnitude was 0 on all ranks, or not finite on any rank.
        """
        self.rows = 0
        if not self.amaxes:
            return torch.ones_like(self.step, dtype=torch.float32)
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
            keep_scales(scale, self.scales, self.inverses)

    def reset(self) -> None:
        for tensor in (self.history, *self.amaxes):
            tensor.zero_()
        self.set_scales()
        self.rows = 0  # of this step, so far
        self.chosen = -1  # phase
        self.begin(0)

    def describe(self, rows: int, device: torch.device) -> list[str]:
        lines = policy.describe(self.cfg)
        arch = fp8.architecture(device)
        taken, emulated = self.native(rows, arch)
        if taken + emulated:
            counts = f"{taken} native{' (unproven)' if taken else ''}, {emulated} emulated"
            lines.append(f"  products of blocks on {arch}, all stages: {counts}")
        return lines

    def switched(self, step: int) -> str:
        stage = self.stage(step)
        return stage.preset if step and stage.first == step else ""
