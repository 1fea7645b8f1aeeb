"""The closed forms of the net's arithmetic, traffic and kept activations against what torch counts."""

import contextlib
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flux_ref import config_file, model
from flux_ref.config import Config, ModelConfig
from flux_ref.model import Flux
from tools.plan import footprint
from tools.shared import flops

ODD = ModelConfig(hidden=48, heads=3, double_blocks=2, single_blocks=3, mlp_ratio=3, rope_axes=(4, 6, 6),
                  text_tokens=5, t5_dim=7, clip_dim=11, latent_channels=2, latent_height=6, latent_width=4)  # fmt: skip
SAMPLES = 3


def output(cfg, samples=1, dtype=torch.float32):
    """What a net on the meta device predicts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            net = Flux(cfg)
            net.rope = net.make_rope()
            return net(
                torch.empty(samples, cfg.image_tokens, cfg.packed_channels),
                torch.empty(samples, cfg.text_tokens, cfg.t5_dim),
                torch.empty(samples, cfg.clip_dim),
                torch.empty(samples),
            )
    finally:
        torch.set_default_dtype(before)


def total(cfg, *fields, only=lambda op: True):
    """The sum of some fields over the net."""
    return sum(op.times * getattr(op, field) for op in flops.operations(cfg) for field in fields if only(op))


def test_operations_are_what_torch_counts():
    for cfg in (ODD, config_file.load(ROOT / "configs/tiny.toml").model):
        with FlopCounterMode(display=False) as forward:
            result = output(cfg)
        with FlopCounterMode(display=False) as backward:
            result.sum().backward()
        assert total(cfg, "forward") == forward.get_total_flops()
        assert total(cfg, "backward") == backward.get_total_flops()
        assert flops.per_sample(cfg) == forward.get_total_flops() + backward.get_total_flops()
    assert flops.per_sample(ModelConfig()) == pytest.approx(20.41e12, rel=1e-3)


class Linears(TorchDispatchMode):
    """Counts the elements of matrices that linears read and write."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.moved += sum(x.numel() for x in (*args, result) if isinstance(x, torch.Tensor) and x.ndim == 2)
        return result


def test_linears_move_what_torch_moves():
    with Linears() as forward:
        result = output(ODD, SAMPLES, torch.bfloat16)
    with Linears() as backward:
        result.sum().backward()
    for found, way in ((forward, "forward"), (backward, "backward")):
        tokens = total(ODD, f"{way}_moved", only=lambda op: op.forward and op.name != "attention")
        assert found.moved == SAMPLES * tokens + total(ODD, f"{way}_weights"), way


def test_other_operations_stand_where_the_model_has_them():
    """As often, and on tensors as large."""
    seen = Counter()

    def noted(name, function, size):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            seen[name] += size(*args) + result.numel()
            return result

        return call

    first, qkv = (lambda *args: args[0].numel()), (lambda *args: sum(x.numel() for x in args[:3]))
    with contextlib.ExitStack() as patches:
        for name, owner, size in (("modulate", model, first), ("gelu", torch.nn.functional, first),
                                  ("attention", model, qkv), ("apply_rope", model, first)):  # fmt: skip
            patches.enter_context(patch.object(owner, name, noted(name, getattr(owner, name), size)))
        # nn.GELU has bound F.gelu's module, so that both kinds of blocks are seen.
        output(ODD)
    for name, words in {
        "modulate": "norm, scale",
        "gelu": "GELU",
        "attention": "attention",
        "apply_rope": "RoPE",
    }.items():
        kind = [op for op in flops.operations(ODD) if words in op.name and not op.forward_weights]
        assert seen[name] == sum(op.times * op.forward_moved for op in kind), name


@pytest.mark.slow
def test_kept_activations_are_what_the_compiler_keeps():
    """But for three things that the closed form omits.

    The compiler keeps numbers per token and RoPE's sines per feature, and in single blocks attention's output twice.
    """
    cfg = config_file.replace(Config(), parallel__compile=True, model__hidden=1024, model__heads=8)
    traced = footprint.trace(cfg, "sm90", rows=1)
    tokens = cfg.model.image_tokens + cfg.model.text_tokens
    again = {"double": 0, "single": 2 * tokens * cfg.model.hidden}
    for kind, size in again.items():
        once = sum(op.kept for op in flops.operations(cfg.model) if op.part == f"{kind}_blocks")
        want = 2 * once + size + 4 * tokens * cfg.model.head_dim
        assert traced[f"{kind} 1"].saved == pytest.approx(want, rel=0.01), kind
