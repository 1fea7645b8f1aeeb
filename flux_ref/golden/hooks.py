"""Recording a forward pass from outside: hooks on modules and wrappers around functions note the values."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

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


class Recorder:
    """Copies values into a dict, under Black Forest Labs' names of modules."""

    def __init__(self, values: dict[str, Tensor]):
        self.values = values
        self.block = ""  # the block that computes at present
        self.rope_names = iter(())  # names of the next results of apply_rope

    def note(self, name: str, value: Tensor) -> None:
        self.values[name] = value.detach().clone()

    def note_inside(self, name: str, value: Tensor) -> None:
        """Note a value of the present block if the block is the first of its kind."""
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

    # Wrappers of functions

    def before_attention(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> None:
        self.rope_names = iter(("attention.q", "attention.k"))
        self.note_inside("attention.v", v)

    def after_attention(self, result: Tensor, *_: Tensor) -> None:
        self.note_inside("attention", result)

    def after_rope(self, result: Tensor, *_: Tensor) -> None:
        self.note_inside(next(self.rope_names), result)

    def after_pack(self, result: Tensor, image: Tensor) -> None:
        self.note("img" if torch.equal(image, self.values["x_t"]) else "target", result)

    def after(self, name: str) -> Callable:
        return lambda result, *_: self.note(name, result)


@contextmanager
def recording(values: dict[str, Tensor], net: nn.Module) -> Iterator[None]:
    """In this block, one forward pass of a net and its loss fill `values`, in order of computation."""
    recorder = Recorder(values)
    recorder.note("rope", net.rope)
    with ExitStack() as stack:
        for path, module in net.named_modules():
            name = path.replace(".blocks.0", "")  # a region of one block holds the block under this name
            if BLOCK.fullmatch(name) and name != path:
                stack.callback(module.register_forward_pre_hook(partial(recorder.before_block, name)).remove)
                stack.callback(module.register_forward_hook(partial(recorder.after_block, name)).remove)
            if MODULES.fullmatch(name):
                stack.callback(module.register_forward_hook(partial(recorder.after_module, name)).remove)
        stack.enter_context(wrapped(latents, "sample", after=recorder.after("latent")))
        stack.enter_context(wrapped(flow, "interpolate", after=recorder.after("x_t")))
        stack.enter_context(wrapped(latents, "pack", after=recorder.after_pack))
        stack.enter_context(wrapped(model, "time_waves", after=recorder.after("time_waves")))
        stack.enter_context(wrapped(model, "attention", recorder.before_attention, recorder.after_attention))
        stack.enter_context(wrapped(model, "apply_rope", after=recorder.after_rope))
        stack.enter_context(wrapped(flow, "losses", after=recorder.after("losses")))
        yield


@contextmanager
def wrapped(owner: object, name: str, before: Callable | None = None, after: Callable | None = None) -> Iterator[None]:
    """In this block, each call of owner.name also calls before(*arguments) and after(result, *arguments)."""
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
