"""The letters at the end of a tensor's name are its axes: checked at every return of a forward."""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from conftest import MICRO
from torch import Tensor

from flux_ref import config_file, flow, latents, model

AXES = re.compile(r"_([A-Z][A-Z0-9]*)$")
# latent_height and latent_width differ from the micro config's so that Y, X, N and S have sizes of their own.
CFG = config_file.replace(config_file.load(MICRO), model__latent_height=12, model__latent_width=10).model
SIZES = {
    "B": 5,
    "N": CFG.image_tokens,
    "T": CFG.text_tokens,
    "S": CFG.text_tokens + CFG.image_tokens,
    "D": CFG.hidden,
    "H": CFG.heads,
    "K": CFG.head_dim,
    "R": CFG.head_dim // 2,
    "M": CFG.mlp_ratio * CFG.hidden,
    "P": CFG.packed_channels,
    "E": CFG.t5_dim,
    "V": CFG.clip_dim,
    "W": model.TIME_WAVES,
    "C": CFG.latent_channels,
    "Y": CFG.latent_height,
    "X": CFG.latent_width,
}


def expected_shape(axes: str, sequence: int) -> tuple[int | None, ...]:
    """One size per letter, none for an unknown one; digits are sizes themselves."""
    return tuple(int(axis) if axis.isdigit() else {**SIZES, "S": sequence}.get(axis) for axis in axes)


def complaints(function: str, variables: dict[str, object]) -> list[str]:
    """What is wrong with the named tensors of one call.

    S is T + N; a function that serves one stream at a time and so names neither N nor T may see that
    stream's length, the same for all its tensors.
    """
    named = {name: AXES.search(name) for name, value in variables.items() if isinstance(value, Tensor)}
    axes = {name: match.group(1) for name, match in named.items() if match}
    sequences = {SIZES["S"]}
    if not any(letter in "".join(axes.values()) for letter in "NT"):
        sequences |= {SIZES["N"], SIZES["T"]}
    wrong = {}
    for sequence in sequences:
        wrong[sequence] = [
            f"{function}: {name} has shape {tuple(variables[name].shape)}"
            for name, letters in axes.items()
            if tuple(variables[name].shape) != expected_shape(letters, sequence)
        ]
    return min(wrong.values(), key=len)


@contextmanager
def traced(*modules) -> Iterator[dict[str, list[str]]]:
    """Check every call of the modules' functions; yields {qualified function name: complaints}."""
    files, found, before = {inspect.getfile(module) for module in modules}, {}, sys.gettrace()

    def on_call(frame: FrameType, event: str, arg: object):
        return on_return if frame.f_code.co_filename in files else None

    def on_return(frame: FrameType, event: str, arg: object):
        if event == "return":
            name = frame.f_code.co_qualname
            found.setdefault(name, []).extend(complaints(name, frame.f_locals))
        return on_return

    sys.settrace(on_call)
    try:
        yield found
    finally:
        sys.settrace(before)


def run_once() -> None:
    """Build a micro net and take the losses of one batch."""
    image = (SIZES["B"], *CFG.latent_shape)
    batch = {name: torch.randn(image) for name in ("mean", "logvar", "latent_eps", "noise")}
    batch |= {
        "t5": torch.randn(SIZES["B"], CFG.text_tokens, CFG.t5_dim),
        "clip": torch.randn(SIZES["B"], CFG.clip_dim),
        "t": torch.rand(SIZES["B"]),
    }
    flow.losses(model.Flux(CFG), batch, torch.float32)
    latents.unpack(latents.pack(latents.unscale(batch["noise"])), CFG.latent_height, CFG.latent_width)


def test_suffixes_are_the_axes_of_their_tensors():
    assert len(set(SIZES.values())) == len(SIZES), "every letter has a size of its own"
    with traced(model, flow, latents) as found:
        run_once()
    wrong = sorted({text for texts in found.values() for text in texts})
    assert not wrong, "\n".join(wrong)
    for function in ("rope_table", "apply_rope", "attention", "modulate", "interpolate", "losses", "pack", "unpack"):
        assert function in found, "the trace must have seen it"
    assert {"Flux.forward", "DoubleBlock.forward", "SingleBlock.forward", "LastLayer.forward"} <= found.keys()
