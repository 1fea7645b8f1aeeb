"""Recording a forward pass from outside: hooks on modules and wrappers around functions note the values."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from flux_ref import flow, latents, model

# Modules whose values are kept: all outside the blocks, and those in the first block of each kind.
MODULES = re.compile(
    r"img_in|txt_in|(time|vector)_in(\.in_layer)?|final_layer\.(adaLN_modulation\.1|linear)"
    r"|double_blocks\.0\.(img|txt)_(mod\.lin|attn\.(qkv|proj|norm\.(query|key)_norm)|mlp\.[012])"
    r"|single_blocks\.0\.(modulation\.lin|norm\.(query|key)_norm|linear[12])"
)
INPUT_TOO = re.compile(r".*(attn\.qkv|mlp\.0|\.linear[12]|final_layer\.linear)")  # the input is kept, too
BLOCK = re.compile(r"(double|single)_blocks\.\d+")


@contextmanager
def recording(values: dict[str, Tensor], net: nn.Module) -> Iterator[None]:
    """In this block, one forward pass of a net and its loss fill `values`, in order of computation.

    The names of modules are Black Forest Labs'.
    """
    begun = []  # the blocks that have begun to compute

    def note(name: str, value: Tensor) -> None:
        values[name] = value.detach().clone()

    def before_block(name: str, module: nn.Module, args: tuple) -> None:
        if not begun:
            note("vec", args[-2])
        begun.append(name)

    def after_block(name: str, module: nn.Module, args: tuple, result: Tensor | tuple[Tensor, Tensor]) -> None:
        results = {".img": result[0], ".txt": result[1]} if isinstance(result, tuple) else {"": result}
        for stream, value in results.items():
            note(name + stream, value)

    def after_module(name: str, module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        if INPUT_TOO.fullmatch(name):
            note(f"{name}.input", args[0])
        if name.endswith("_norm"):
            result = result.transpose(1, 2)  # as attention has it: (B, H, S, K)
        note("prediction" if name == "final_layer.linear" else name, result)

    def after_attention(result: Tensor, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> None:
        if begun[-1].endswith(".0"):  # only the first block of each kind is recorded
            place = f"{begun[-1]}.attention"
            note(f"{place}.v", v_BSHK.transpose(1, 2))
            note(f"{place}.q", q_BSHK.transpose(1, 2))
            note(f"{place}.k", k_BSHK.transpose(1, 2))
            note(place, result)

    def after_pack(result: Tensor, image: Tensor) -> None:
        note("img" if torch.equal(image, values["x_t"]) else "target", result)

    note("rope", net.rope)
    with ExitStack() as stack:
        for path, module in net.named_modules():
            name = path.replace(".blocks.0", "")  # a region of one block holds the block under this name
            if BLOCK.fullmatch(name) and name != path:
                stack.callback(module.register_forward_pre_hook(partial(before_block, name)).remove)
                stack.callback(module.register_forward_hook(partial(after_block, name)).remove)
            if MODULES.fullmatch(name):
                stack.callback(module.register_forward_hook(partial(after_module, name)).remove)
        stack.enter_context(wrapped(latents, "pack", after_pack))
        stack.enter_context(wrapped(model, "attention", after_attention))
        for owner, function, name in (
            (latents, "sample", "latent"),
            (flow, "interpolate", "x_t"),
            (model, "time_waves", "time_waves"),
            (flow, "losses", "losses"),
        ):
            stack.enter_context(wrapped(owner, function, lambda result, *_, name=name: note(name, result)))
        yield


def wrapped(owner: object, name: str, after: Callable):
    """A context in which each call of owner.name also calls after(result, *arguments)."""
    original = getattr(owner, name)

    def call(*args: object) -> object:
        result = original(*args)
        after(result, *args)
        return result

    return patch.object(owner, name, call)
