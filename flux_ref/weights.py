"""A model's weights from the forms in which people keep them, read a few rows at a time.

Parameters have the names of Black Forest Labs. diffusers splits the fused projections by rows and exchanges the halves
of the head's modulation; the rest is renaming. Source: diffusers, FluxTransformer2DModel.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flux_ref import checkpoint, config_file, ranks, safetensors_io
from flux_ref.checkpoint import Checkpoint
from flux_ref.cli import Refusal
from flux_ref.config import Config, ModelConfig, Shapes
from flux_ref.files import matching
from flux_ref.model import parameter_table
from flux_ref.optim import EMA
from flux_ref.sharding import ShardedFlux, local_rows, named_parameters

TRAINER = "flux_ref"  # under "trained_by" in the metadata of exported files
REMEDY = "give a run, a checkpoint, a .safetensors file in BFL's layout or diffusers' transformer folder"

# Names

DIFFUSERS = {  # each * is the number of the block; of several tensors the first have model.hidden rows
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear norm_out.linear",
    "double_blocks.*.img_mod.lin": "transformer_blocks.*.norm1.linear",
    "double_blocks.*.txt_mod.lin": "transformer_blocks.*.norm1_context.linear",
    "double_blocks.*.img_attn.qkv": "transformer_blocks.*.attn.to_q transformer_blocks.*.attn.to_k"
    " transformer_blocks.*.attn.to_v",
    "double_blocks.*.txt_attn.qkv": "transformer_blocks.*.attn.add_q_proj transformer_blocks.*.attn.add_k_proj"
    " transformer_blocks.*.attn.add_v_proj",
    "double_blocks.*.img_attn.norm.query_norm": "transformer_blocks.*.attn.norm_q",
    "double_blocks.*.img_attn.norm.key_norm": "transformer_blocks.*.attn.norm_k",
    "double_blocks.*.txt_attn.norm.query_norm": "transformer_blocks.*.attn.norm_added_q",
    "double_blocks.*.txt_attn.norm.key_norm": "transformer_blocks.*.attn.norm_added_k",
    "double_blocks.*.img_attn.proj": "transformer_blocks.*.attn.to_out.0",
    "double_blocks.*.txt_attn.proj": "transformer_blocks.*.attn.to_add_out",
    "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.net.0.proj",
    "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.net.2",
    "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.net.0.proj",
    "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.net.2",
    "single_blocks.*.modulation.lin": "single_transformer_blocks.*.norm.linear",
    "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_q single_transformer_blocks.*.attn.to_k"
    " single_transformer_blocks.*.attn.to_v single_transformer_blocks.*.proj_mlp",
    "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
    "single_blocks.*.norm.query_norm": "single_transformer_blocks.*.attn.norm_q",
    "single_blocks.*.norm.key_norm": "single_transformer_blocks.*.attn.norm_k",
}


@dataclass(frozen=True)
class Part:
    """Rows first .. first + rows of a tensor."""

    name: str
    first: int
    rows: int


Parts = dict[str, list[Part]]  # for each tensor, the rows of others that make it up, one below the other


def whole_parts(table: Shapes, form: str = "{}") -> Parts:
    """Each tensor of a table of shapes is all of one other. form: the name of that, with {} for this one's."""
    return {name: [Part(form.format(name), 0, shape[0])] for name, shape in table.items()}


def parts_from_diffusers(model: ModelConfig) -> Parts:
    """The parameters, made of diffusers' tensors."""
    parts: Parts = {}
    for name, shape in parameter_table(model).items():
        module, _, kind = name.rpartition(".")
        block = "".join(re.findall(r"(?<=blocks\.)\d+", module))
        others = DIFFUSERS[re.sub(r"(?<=blocks\.)\d+", "*", module)].replace("*", block).split()
        leaf = kind.replace("scale", "weight")  # of an RMS norm
        parts[name] = []
        row = 0
        for number, other in enumerate(others, 1):
            rows = model.hidden if number < len(others) else shape[0] - row
            # port: of the head's modulation BFL has shift, scale; diffusers scale, shift
            first = model.hidden - row if other == "norm_out.linear" else 0
            parts[name].append(Part(f"{other}.{leaf}", first, rows))
            row += rows
    return parts


# Values


@dataclass(frozen=True)
class Source:
    """The weights of a model in any form. Nothing is read before it is asked for.

    stored: rows of a tensor of the files: its name, the first row, how many.
    parts:  the parameters, made of tensors of the files.
    info:   what flux_ref wrote of the training: step, samples, name, ... If the parameters are an average of weights,
            also ema: its half-life in samples.
    """

    where: Path
    stored: Callable[[str, int, int], Tensor]
    parts: Parts
    info: dict

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows of a parameter in fp32, on the host.

        Raises: Refusal for damage and for values that are NaN or infinite.
        """
        pieces = []
        row = 0  # of the parameter, with which the part begins
        for part in self.parts[name]:
            low, high = (min(max(end - row, 0), part.rows) for end in (first, first + count))
            pieces.append(self.stored(part.name, part.first + low, high - low).float())
            row += part.rows
        values = torch.cat(pieces)
        if not values.isfinite().all():
            raise Refusal(f"{self.where}: {name} holds NaN or infinite values; use another file")
        return values


def is_checkpoint(path: Path) -> bool:
    return (path / checkpoint.MANIFEST).is_file()


def find(path: Path) -> Path:
    """The checkpoint, file or folder of files that a user means by a path: of a run the newest. Raises: Refusal."""
    newest = checkpoint.list_checkpoints(path)[-1:]
    for place in (*newest, path / "transformer", path):  # the second: of FLUX.1-schnell's repository
        if place.is_file() or is_checkpoint(place) or matching(place, "*.safetensors"):
            return place
    raise Refusal(f"{path} does not exist, or holds no checkpoint and no safetensors; {REMEDY}")


def config_of(path: Path, given: str | None) -> Config:
    """The config of weights at a path that `find` returned. Raises: Refusal.

    given: a config file. None: a checkpoint's own config, and FLUX.1-schnell's for other weights.
    """
    if given is None and is_checkpoint(path):
        info = Checkpoint(path).info
        return config_file.from_flat(info["name"], info["config"])
    return config_file.load(given) if given else Config(name="schnell")


def open_source(path: Path, model: ModelConfig, averaged: bool = False) -> Source:
    """The weights at a path that `find` returned. averaged: in their place, the average of optim.ema_half_life.

    Raises: Refusal with an example of what is missing, unexpected or misshaped, or if there is no average.
    """
    own = config_of(path, None)
    if averaged and not own.optim.ema_half_life:
        rule = "--ema needs a checkpoint of a run with optim.ema_half_life above 0, or leave it out"
        raise Refusal(f"weights {path} hold no average of weights; {rule}")
    if not is_checkpoint(path):
        return _of_files(path, model)
    table = parameter_table(model)
    safetensors_io.require_fit(parameter_table(own.model), table, f"checkpoint {path}")
    saved = Checkpoint(path)
    form = "model.{}"
    info = saved.info
    if averaged:
        form = f"optimizer.state.{{}}.{EMA}"
        info = info | {EMA: own.optim.ema_half_life}
    return Source(path, saved.read, whole_parts(table, form), info)


def _of_files(path: Path, model: ModelConfig) -> Source:
    """Raises: Refusal for a file that is not whole, for a tensor that two files hold, and for what does not fit."""
    files: dict[str, Path] = {}
    shapes: Shapes = {}
    metadata: dict[str, str] = {}
    for place in [path] if path.is_file() else matching(path, "*.safetensors"):
        with safetensors_io.opened(place) as file:
            metadata |= file.metadata() or {}
            for name in file.keys():  # noqa: SIM118
                if name in files:  # such as variants of diffusers, in fp16 and fp32
                    raise Refusal(f"{place} and {files[name].name} both hold {name}; give one file, or move the other")
                files[name] = place
                shapes[name] = tuple(file.get_slice(name).get_shape())
    table = parameter_table(model)
    parts = whole_parts(table)
    if any("transformer_blocks." in name for name in shapes):  # each of diffusers' files has some
        parts = parts_from_diffusers(model)
        table = {  # the head's modulation has two parts of one tensor
            part.name: (sum(other.rows for other in of if other.name == part.name), *table[name][1:])
            for name, of in parts.items()
            for part in of
        }
    safetensors_io.require_fit(shapes, table, f"weights {path}")

    def stored(name: str, first: int, count: int) -> Tensor:
        rows = safetensors_io.read_rows(files[name], name, first, count)
        if not rows.is_floating_point():
            raise Refusal(f"{files[name]}: {name} is {rows.dtype}, want floating point; give unquantised weights")
        return rows

    # Others write anything into metadata.
    return Source(path, stored, parts, metadata if metadata.get("trained_by") == TRAINER else {})


def load(net: ShardedFlux, source: Source) -> None:
    """Fill a sharded net. Every rank reads only its own rows. Raises: Refusal."""
    with torch.no_grad():
        for name, parameter in named_parameters(net).items():
            first, local = local_rows(parameter)
            local.copy_(source.read(name, first, len(local)))


def load_pretrained(net: ShardedFlux, given: Path, model: ModelConfig) -> None:
    """Fill a sharded net on all ranks from a path that a user gave. Collective. Raises: Refusal."""
    with ranks.agreed():
        found = str(find(given))
    # A run may still be saving, so ranks may find different checkpoints.
    first = ranks.gather_objects(found)[0]
    with ranks.agreed():
        load(net, open_source(Path(first), model))
