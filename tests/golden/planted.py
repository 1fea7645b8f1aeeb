"""Mistakes that ports make, planted in this code by editing the source of a function while a test runs."""

import importlib
import inspect
import textwrap
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

# First line: the golden value that must be named first | words of the known cause | the function with the mistake.
# Lines below it: what the source says => what the mistaken source says.
TABLE = Path(__file__).with_name("planted.txt")


class Mistake(NamedTuple):
    """place: the first value that differs then. cause: words of the known cause. function: module.name in flux_ref."""

    place: str
    cause: str
    function: str
    changes: list[tuple[str, str]]

    def plant(self, monkeypatch) -> None:
        """Change what the function's source says."""
        module, _, path = self.function.removeprefix("speed.").partition(".")
        folder = "flux_ref.speed" if self.function.startswith("speed.") else "flux_ref"
        owner_path, _, name = path.rpartition(".")
        owner = importlib.import_module(f"{folder}.{module}")
        owner = attrgetter(owner_path)(owner) if owner_path else owner
        function = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.changes:
            assert old in source, f"{self.function} does not say {old!r} any more"
            source = source.replace(old, new)
        scope = {}
        exec(source, function.__globals__, scope)
        monkeypatch.setattr(owner, name, scope[name])


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
    """Redo the update of a step with epsilon inside the root."""
    optimizer.number = getattr(optimizer, "number", 0) + 1
    for shard in optimizer.shards:
        state, c1, c2 = optimizer.adamw.state[shard], 1 - 0.9**optimizer.number, 1 - 0.95**optimizer.number
        m, v = state["exp_avg"] / c1, state["exp_avg_sq"] / c2
        shard.data += optimizer.lr * (m / (v.sqrt() + 1e-8) - m / (v + 1e-8).sqrt())


def drop(rows: dict, i: int, sample: int) -> None:
    """Drop captions of some validation samples."""
    if sample % 3 == 1:
        rows["t5"][i] = rows["clip"][i] = 0


class QuickGelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def bf16_layer_norm(x: torch.Tensor) -> torch.Tensor:
    """Mean and variance summed in bf16, one feature after another."""
    total = squares = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column
    centred = x - (total / x.shape[-1])[..., None]
    for column in centred.unbind(-1):
        squares = squares + column * column
    return centred / (squares / x.shape[-1] + 1e-6).sqrt()[..., None]


def flushed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where x is subnormal in an FP8 format."""
    return torch.where(x.abs() < torch.finfo(dtype).smallest_normal, x * 0, x)


def towards_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cast that cuts bits off."""
    nearest = x.to(dtype)
    below = (nearest.view(torch.uint8) - 1).view(dtype)
    return torch.where(nearest.float().abs() > x.abs(), below.view(torch.uint8), nearest.view(torch.uint8)).view(dtype)


def decay_after(optimizer) -> None:
    """A step of AdamW that shrinks the weights after the update."""
    (group,) = optimizer.adamw.param_groups
    decay, group["weight_decay"] = group["weight_decay"], 0.0
    optimizer.adamw.step()
    group["weight_decay"] = decay
    for shard in optimizer.shards:
        shard.data *= 1 - optimizer.lr * decay


def narrow_norm(x):
    """Layer norm in the dtype of x."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def narrow_attention(q, k, v):
    """Attention whose scores are rounded to the dtype of the operands."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
