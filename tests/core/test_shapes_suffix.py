"""The letters at the end of a tensor's name are its axes: checked at every return of a forward."""

import inspect
import re
import sys
from contextlib import contextmanager

import torch
from conftest import MICRO
from torch import Tensor

from flux_ref import config_file, flow, model

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


def complaints(function, variables):
    """What is wrong with the named tensors of one call. Digits are sizes themselves.

    S is T + N; a function that serves one stream at a time and so names neither N nor T may see that stream's length,
    the same for all its tensors.
    """
    axes = {name: found[1] for name in variables if (found := AXES.search(name))}
    shapes = {name: tuple(variables[name].shape) for name in axes if isinstance(variables[name], Tensor)}
    is_of_both = any(set("NT") & set(axes[name]) for name in shapes)
    wrong = []
    for sequence in "S" if is_of_both else "SNT":
        sizes = SIZES | {"S": SIZES[sequence]}
        want = {name: tuple(int(axis) if axis.isdigit() else sizes.get(axis) for axis in axes[name]) for name in shapes}
        wrong.append([f"{function}: {name} has shape {shapes[name]}" for name in shapes if shapes[name] != want[name]])
    return min(wrong, key=len)


@contextmanager
def traced(*modules):
    """Check every return of the modules' functions; yields {qualified function name: complaints}."""
    files = {inspect.getfile(module) for module in modules}
    found = {}

    def note(frame, event, _):
        if event == "return" and frame.f_code.co_filename in files:
            name = frame.f_code.co_qualname
            found.setdefault(name, []).extend(complaints(name, frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def run_once():
    """Build a micro net and take the losses of one batch."""
    shapes = {name: CFG.latent_shape for name in ("mean", "logvar", "latent_eps", "noise")}
    shapes |= {"t5": (CFG.text_tokens, CFG.t5_dim), "clip": (CFG.clip_dim,), "t": ()}
    batch = {name: torch.rand(SIZES["B"], *shape) for name, shape in shapes.items()}
    flow.losses(model.Flux(CFG), batch, torch.float32)
    flow.unpack(flow.pack(flow.unscale(batch["noise"])), CFG.latent_height, CFG.latent_width)


def test_suffixes_are_the_axes_of_their_tensors():
    assert len(set(SIZES.values())) == len(SIZES), "every letter has a size of its own"
    with traced(model, flow) as found:
        run_once()
    assert [text for texts in found.values() for text in texts] == []
    seen = "rope_table apply_rope attention modulated_norm interpolate losses pack unpack"
    modules = (model.Flux, model.DoubleStreamBlock, model.SingleStreamBlock, model.LastLayer)
    assert found.keys() >= {*seen.split(), *(f"{module.__name__}.forward" for module in modules)}
