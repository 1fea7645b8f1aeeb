"""A model's weights for other programs.

    python -m tools.export runs/tiny tiny.safetensors               one file with Black Forest Labs' names, fp32
    python -m tools.export RUN OUT --format=diffusers --dtype=bf16  a folder for diffusers
    python -m tools.export RUN OUT --ema                            the average of the weights (optim.ema_half_life)

The source is a run (its newest checkpoint), a checkpoint, a safetensors file in BFL's layout or diffusers' transformer
folder. --config=FILE gives the sizes of the model. Without it, a run and a checkpoint know the sizes; other weights
have FLUX.1-schnell's. Host memory holds all that is written: 48 GB for FLUX.1-schnell in fp32.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from flux_ref import cli, files, weights
from flux_ref.cli import Options, Refusal, progress
from flux_ref.config import ModelConfig
from flux_ref.model import parameter_table
from flux_ref.optim import EMA
from flux_ref.precision.recipe import DTYPES
from flux_ref.weights import TRAINER, Part, Parts, Source

DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"


def diffusers_config(model: ModelConfig) -> dict:
    """The architecture as diffusers' config.json states it. Raises: Refusal for numbers that it has no place for."""
    if model.mlp_ratio != 4 or model.rope_theta != 10_000:
        raise Refusal("diffusers' FLUX has model.mlp_ratio=4 and model.rope_theta=10000; use --format=bfl")
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


def parts_to_diffusers(model: ModelConfig) -> Parts:
    """diffusers' tensors, made of the parameters."""
    parts: Parts = {}
    for name, others in weights.parts_from_diffusers(model).items():
        row = 0
        for other in others:
            # Only the head's modulation has two parts, and they are exchanged.
            parts.setdefault(other.name, []).insert(0, Part(name, row, other.rows))
            row += other.rows
    return parts


def export(source: Source, model: ModelConfig, out: Path, layout: str, dtype: torch.dtype) -> None:
    """Write weights as one file ("bfl") or as a folder for diffusers. `out` is new and appears once it is whole.

    dtype: of the values, rounded to nearest even. Raises: Refusal.
    """
    metadata = {"format": "pt"}
    if source.info:
        metadata["trained_by"] = TRAINER
        metadata |= {key: str(source.info[key]) for key in ("name", "step", "samples", EMA) if key in source.info}
    parts = weights.whole_parts(parameter_table(model))
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(out, is_new=True) as partial:
        file = partial
        if layout == "diffusers":
            parts = parts_to_diffusers(model)
            partial.mkdir()
            (partial / "config.json").write_text(json.dumps(diffusers_config(model), indent=2))
            file = partial / DIFFUSERS_FILE
        tensors = {}
        for name in progress(parts, desc=out.name, leave=False):
            rows = [source.read(part.name, part.first, part.rows).to(dtype) for part in parts[name]]
            tensors[name] = torch.cat(rows)
        save_file(tensors, file, metadata)
        files.sync(file)


def main(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.export", __doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=("bfl", "diffusers"), default="bfl")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--ema", action="store_true", help="the average of the weights")
    parser.add_argument("--config", help="a config with the sizes of the model")
    args = parser.parse_args(argv)
    path = weights.find(args.source)
    model = weights.config_of(path, args.config).model
    export(weights.open_source(path, model, args.ema), model, args.out, args.format, DTYPES[args.dtype])
    print(f"{args.out}: written from {path}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("export", main, sys.argv[1:]))
