"""Mistakes that ports make, planted in this code by editing the source of a function while a test runs."""

import inspect
import pkgutil
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch

# First line: the golden value that must be named first | words of the known cause | the function with the mistake.
# Lines below it: what the source says => what the mistaken source says.
TABLE = Path(__file__).with_name("planted.txt")


class Mistake(NamedTuple):
    """place: the first value that differs then. cause: words of the known cause. function: its path in flux_ref."""

    place: str
    cause: str
    function: str
    changes: list[tuple[str, str]]

    def plant(self, monkeypatch) -> None:
        """Change what the function's source says."""
        path = f"flux_ref.{self.function}"
        function = pkgutil.resolve_name(path)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.changes:
            assert old in source, f"{self.function} does not say {old!r} any more"
            source = source.replace(old, new)
        scope = {}
        exec(source, function.__globals__, scope)
        monkeypatch.setattr(path, scope[function.__name__])


def mistakes() -> list[Mistake]:
    """The rows of the table."""
    planted = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            old, _, new = line.partition(" =>")
            planted[-1].changes.append((old.strip(), new.strip()))
        else:
            planted.append(Mistake(*line.split(" | "), []))
    return planted


def move_eps_inside(optimizer) -> None:
    """Redo the update of the first step with epsilon inside the root."""
    for shard in optimizer.shards:
        state = optimizer.adamw.state[shard]
        m = state["exp_avg"] / (1 - 0.9)
        v = state["exp_avg_sq"] / (1 - 0.95)
        shard.data += optimizer.lr * (m / (v.sqrt() + 1e-8) - m / (v + 1e-8).sqrt())


def decay_after(optimizer) -> None:
    """A step of AdamW that shrinks the weights after the update."""
    (group,) = optimizer.adamw.param_groups
    decay = group["weight_decay"]
    group["weight_decay"] = 0.0
    optimizer.adamw.step()
    group["weight_decay"] = decay
    for shard in optimizer.shards:
        shard.data *= 1 - optimizer.lr * decay


class QuickGelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def flushed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where x is subnormal in an FP8 format."""
    return torch.where(x.abs() < torch.finfo(dtype).smallest_normal, x * 0, x)


def towards_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cast that cuts bits off."""
    bits = x.to(dtype).view(torch.uint8)
    is_above = bits.view(dtype).float().abs() > x.abs()
    return (bits - is_above.byte()).view(dtype)


def narrow_norm(x):
    """Layer norm in the dtype of x."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def narrow_attention(q, k, v):
    """Attention whose scores are rounded to the dtype of the operands."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
