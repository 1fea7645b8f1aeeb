"""Watching a forward pass from outside: which values pass at which place."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from flux_ref import flow, latents, model

# What is kept of the modules' values: everything outside the blocks and in the first block of each kind.
MODULES = re.compile(
    r"img_in|txt_in|(time|vector)_in(\.in_layer)?|final_layer\.(adaLN_modulation\.1|linear)"
    r"|double_blocks\.0\.(img|txt)_(mod\.lin|attn\.(qkv|proj|norm\.(query|key)_norm)|mlp\.[012])"
    r"|single_blocks\.0\.(modulation\.lin|norm\.(query|key)_norm|linear[12])"
)
INPUT_TOO = re.compile(r".*(attn\.qkv|mlp\.0|\.linear[12]|final_layer\.linear)")
BLOCK = re.compile(r"(double|single)_blocks\.\d+")


class Watch:
    """Notes values under Black Forest Labs' names of modules; a copy of each, as it is."""

    def __init__(self, values: dict[str, Tensor]):
        self.values = values
        self.block = ""  # that computes at present
        self.turned = iter(())  # what rope turns next

    def note(self, name: str, value: Tensor) -> None:
        self.values[name] = value.detach().clone()

    def note_inside(self, name: str, value: Tensor) -> None:
        """Of a block, if it is the first of its kind."""
        if self.block.endswith(".0"):
            self.note(f"{self.block}.{name}", value)

    # Hooks of modules

    def before_block(self, name: str, block: nn.Module, args: tuple) -> None:
        self.block = name
        if name == "double_blocks.0":
            self.note("vec", args[1])

    def after_block(self, name: str, block: nn.Module, args: tuple, result: Tensor | tuple[Tensor, Tensor]) -> None:
        streams = {".img": result[0], ".txt": result[1]} if isinstance(result, tuple) else {"": result}
        for stream, value in streams.items():
            self.note(name + stream, value)

    def after_module(self, name: str, module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        if INPUT_TOO.fullmatch(name):
            self.note(f"{name}.input", args[0])
        self.note("prediction" if name == "final_layer.linear" else name, result)

    # Around functions

    def before_attention(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> None:
        self.turned = iter(("attention.q", "attention.k"))
        self.note_inside("attention.v", v)

    def after_attention(self, result: Tensor, *_: Tensor) -> None:
        self.note_inside("attention", result)

    def after_rope(self, result: Tensor, *_: Tensor) -> None:
        self.note_inside(next(self.turned), result)

    def after_pack(self, result: Tensor, image: Tensor) -> None:
        self.note("img" if torch.equal(image, self.values["x_t"]) else "target", result)

    def after(self, name: str) -> Callable:
        return lambda result, *_: self.note(name, result)


@contextmanager
def watched(values: dict[str, Tensor], net: nn.Module) -> Iterator[None]:
    """Within this, one forward pass of a net and its loss fill `values`, in order of computation."""
    watch = Watch(values)
    watch.note("rope", net.rope)
    with ExitStack() as stack:
        for path, module in net.named_modules():
            name = path.replace(".blocks.0", "")  # of a region, which holds one block
            if BLOCK.fullmatch(name) and name != path:
                stack.callback(module.register_forward_pre_hook(partial(watch.before_block, name)).remove)
                stack.callback(module.register_forward_hook(partial(watch.after_block, name)).remove)
            if MODULES.fullmatch(name):
                stack.callback(module.register_forward_hook(partial(watch.after_module, name)).remove)
        stack.enter_context(wrapped(latents, "sample", after=watch.after("latent")))
        stack.enter_context(wrapped(flow, "interpolate", after=watch.after("x_t")))
        stack.enter_context(wrapped(latents, "pack", after=watch.after_pack))
        stack.enter_context(wrapped(model, "time_waves", after=watch.after("time_waves")))
        stack.enter_context(wrapped(model, "attention", watch.before_attention, watch.after_attention))
        stack.enter_context(wrapped(model, "apply_rope", after=watch.after_rope))
        stack.enter_context(wrapped(flow, "losses", after=watch.after("losses")))
        yield


@contextmanager
def wrapped(owner: object, name: str, before: Callable | None = None, after: Callable | None = None) -> Iterator[None]:
    """Within this, before(*arguments) and after(result, *arguments) see each call of owner.name."""
    original = getattr(owner, name)

    def call(*args: object) -> object:
        if before:
            before(*args)
        result = original(*args)
        if after:
            after(result, *args)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
