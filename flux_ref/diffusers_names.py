"""Between Black Forest Labs' names of FLUX.1's parameters, which are ours, and diffusers'.

diffusers splits the fused projections by rows and exchanges the halves of the head's modulation; the rest is renaming.
Source: diffusers, FluxTransformer2DModel.
"""

from dataclasses import dataclass
from pathlib import Path

from flux_ref.config import ModelConfig
from flux_ref.errors import Refusal, shown
from flux_ref.files import read_json
from flux_ref.model import parameter_table


@dataclass(frozen=True)
class Part:
    """Rows first .. first + rows of a tensor of another naming."""

    name: str
    first: int
    rows: int


OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
SINGLE = {
    "modulation.lin": "norm.linear",
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": "proj_out",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}


def diffusers_parts(model: ModelConfig) -> dict[str, list[Part]]:
    """BFL name -> the rows of diffusers' tensors that, one below the other, are that parameter."""
    return {name: _parts(name, shape[0], model.hidden) for name, shape in parameter_table(model).items()}


def _parts(name: str, rows: int, hidden: int) -> list[Part]:
    module, _, kind = name.rpartition(".")
    kind = "weight" if kind == "scale" else kind  # of an RMS norm
    stem = ""
    names = OUTSIDE
    if module.startswith(("double_blocks.", "single_blocks.")):
        block, number, module = module.split(".", 2)
        stem = ("transformer_blocks." if block == "double_blocks" else "single_transformer_blocks.") + number + "."
        names = DOUBLE if block == "double_blocks" else SINGLE
    to = names[module]
    if module == "final_layer.adaLN_modulation.1":  # port: BFL shift, scale; diffusers scale, shift
        return [Part(f"{to}.{kind}", hidden, hidden), Part(f"{to}.{kind}", 0, hidden)]
    if isinstance(to, str):
        return [Part(f"{stem}{to}.{kind}", 0, rows)]
    sizes = (*(hidden for _ in range(3)), rows - 3 * hidden)  # the last is there for linear1 only
    return [Part(f"{stem}{name}.{kind}", 0, size) for name, size in zip(to, sizes)]


def bfl_parts(model: ModelConfig) -> dict[str, list[Part]]:
    """diffusers' name -> the rows of BFL's tensors that, one below the other, are that parameter."""
    pieces: dict[str, list[tuple[int, Part]]] = {}
    for name, parts in diffusers_parts(model).items():
        row = 0
        for part in parts:
            pieces.setdefault(part.name, []).append((part.first, Part(name, row, part.rows)))
            row += part.rows
    return {name: [part for _, part in sorted(rows, key=lambda piece: piece[0])] for name, rows in pieces.items()}


def diffusers_table(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """diffusers' name -> shape of every parameter."""
    shapes = parameter_table(model)
    return {
        name: (sum(part.rows for part in parts), *shapes[parts[0].name][1:]) for name, parts in bfl_parts(model).items()
    }


def require_diffusers(model: ModelConfig) -> None:
    """Raises: Refusal for a model that diffusers cannot compute: it has no place for these numbers."""
    for key, only in (("mlp_ratio", 4), ("rope_theta", 10_000)):
        if getattr(model, key) != only:
            raise Refusal(f"diffusers' FLUX has model.{key}={only} only, these weights have {getattr(model, key)}")


def diffusers_config(model: ModelConfig) -> dict[str, object]:
    """The architecture as diffusers' config.json states it."""
    return {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": model.head_dim,
        "axes_dims_rope": list(model.rope_axes),
        "guidance_embeds": False,
        "in_channels": model.packed_channels,
        "joint_attention_dim": model.t5_dim,
        "num_attention_heads": model.heads,
        "num_layers": model.double_blocks,
        "num_single_layers": model.single_blocks,
        "patch_size": 1,
        "pooled_projection_dim": model.clip_dim,
    }


def require_config(path: Path, want: dict[str, object], remedy: str) -> None:
    """Refuse a config.json of diffusers that states another value. A key that it lacks counts as right.

    Raises: Refusal.
    """
    content = read_json(path, "diffusers' config")
    bad = [key for key in want if content.get(key, want[key]) != want[key]]
    if bad:
        wrong = "; ".join(f"{key}={shown(content[key])}, want {want[key]!r}" for key in bad)
        raise Refusal(f"{path} is another model's: {wrong}; {remedy}")
