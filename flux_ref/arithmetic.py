"""How the blocks compute, and the moments at which the core asks. The plain way: as model.py is written.

precision/ has a class with the same methods for all other values of precision.preset, precision.rules and
precision.switch. Functions import it only if a config asks for it, so the folder may be taken away.
"""

import torch
from torch import Tensor, nn

from flux_ref.config import Config
from flux_ref.model import Flux
from flux_ref.ranks import World

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # as keys name them
Options = dict[str, object]  # of Inductor


class Arithmetic:
    """Plain arithmetic in parallel.dtype: nothing is to do at any moment.

    phases: the training steps at which the way of computing changes, 0 first. Each has compiled code and graphs of its
    own.
    switches: the presets that begin after the first one, by their first step.
    compiler: options beside those of sharding.py.
    history: what a checkpoint holds beside weights and moments; the same on all ranks.
    remembering: whose history it is.
    """

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.phases: tuple[int, ...] = (0,)
        self.switches: dict[int, str] = {}
        self.compiler: Options = {}
        self.history = torch.zeros(0)
        self.remembering: list[str] = []

    def require(self, rows: int) -> None:
        """rows: samples of a micro-batch. Raises: Refusal if the sizes forbid what a config asks for."""

    def convert(self, net: Flux, device: torch.device) -> None:
        """Change modules of a net on the meta device, before it is sharded. Names and shapes of parameters stay."""

    def attach(self, net: nn.Module, world: World) -> None:
        """The net is sharded and has memory."""

    def begin(self, step: int) -> None:
        """Choose how the next step and the next validation compute. step: steps trained so far."""

    def after_backward(self) -> Tensor | float:
        """Called once per step, after the last backward. May update the history, on the device alone.

        Returns 1, or NaN if the gradients are not to be believed; the same on all ranks. The norm is multiplied by it.
        """
        return 1.0

    def phase(self, step: int) -> int:
        """The phase that a training step belongs to, by its first step."""
        return max(first for first in self.phases if first <= step)

    def reset(self) -> None:
        """Forget all steps."""

    def set_scales(self) -> None:
        """The history was loaded."""

    def describe(self, rows: int, device: torch.device) -> list[str]:
        """What a run computes with, in words: one line, and more for a policy. rows: samples of a micro-batch."""
        return [f"{self.cfg.parallel.dtype} in training and validation"]


def arithmetic_of(cfg: Config) -> Arithmetic:
    """What a config asks for. Raises: Refusal for a policy that cannot be."""
    if cfg.precision.is_plain:
        return Arithmetic(cfg)
    from flux_ref.precision.stages import Precision

    return Precision(cfg)
