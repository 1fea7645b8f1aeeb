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
    block = ""  # the one that computes at present

    def note(name: str, value: Tensor) -> None:
        values[name] = value.detach().clone()

    def note_inside(name: str, value: Tensor) -> None:
        if block.endswith(".0"):  # only the first block of each kind is recorded
            note(f"{block}.{name}", value)

    def before_block(name: str, module: nn.Module, args: tuple) -> None:
        nonlocal block
        block = name
        if name == "double_blocks.0":
            note("vec", args[1])

    def after_block(name: str, module: nn.Module, args: tuple, result: Tensor | tuple[Tensor, Tensor]) -> None:
        for stream, value in zip((".img", ".txt"), result) if isinstance(result, tuple) else [("", result)]:
            note(name + stream, value)

    def after_module(name: str, module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        if INPUT_TOO.fullmatch(name):
            note(f"{name}.input", torch.cat(args, dim=-1))
        result = torch.cat(result, dim=-1) if isinstance(result, tuple) else result
        result = result.transpose(1, 2) if name.endswith("_norm") else result  # as attention has it: (B, H, S, K)
        note("prediction" if name == "final_layer.linear" else name, result)

    def before_attention(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> None:
        for name, value_BSHK in {"v": v_BSHK, "q": q_BSHK, "k": k_BSHK}.items():
            note_inside(f"attention.{name}", value_BSHK.transpose(1, 2))

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
        for owner, function, before, after in (
            (latents, "sample", None, lambda result, *_: note("latent", result)),
            (flow, "interpolate", None, lambda result, *_: note("x_t", result)),
            (latents, "pack", None, after_pack),
            (model, "time_waves", None, lambda result, *_: note("time_waves", result)),
            (model, "attention", before_attention, lambda result, *_: note_inside("attention", result)),
            (flow, "losses", None, lambda result, *_: note("losses", result)),
        ):
            stack.enter_context(wrapped(owner, function, before, after))
        yield


def wrapped(owner: object, name: str, before: Callable | None = None, after: Callable | None = None):
    """A context in which each call of owner.name also calls before(*arguments) and after(result, *arguments)."""
    original = getattr(owner, name)

    def call(*args: object) -> object:
        if before:
            before(*args)
        result = original(*args)
        if after:
            after(result, *args)
        return result

    return patch.object(owner, name, call)
