"""Writing a model's weights in the forms in which people keep them, a few rows at a time."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

from torch import Tensor

from flux_ref import config
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, diffusers_names, safetensors_io
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.formats.diffusers_names import Part
from flux_ref.formats.files import whole, write_whole
from flux_ref.formats.outside import printable
from flux_ref.model import parameter_table
from flux_ref.optim import EMA
from flux_ref.run.progress import progress
from flux_ref.run.weight_files import COUNTS, TRAINER, Source, whole_parts

DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"
SAFETENSORS_NAMES = {"fp32": "F32", "bf16": "BF16"}
PIECE_BYTES = 64 << 20  # read and written at a time, in fp32


def export(source: Source, model: ModelConfig, out: Path, layout: str, dtype: str) -> None:
    """Write weights as one file in BFL's layout or as a folder for diffusers. `out` appears once it is whole.

    layout: "bfl" or "diffusers". dtype: "fp32" or "bf16", rounded to nearest even.
    Memory holds a few pieces of PIECE_BYTES, never a whole model. Raises: Refusal.
    """
    _require_place(out)
    if layout == "diffusers":
        diffusers_names.require_diffusers(model)
    trained = {key: str(source.info[key]) for key in (*COUNTS, "name", "run") if key in source.info}
    metadata = {"format": "pt", "trained_by": TRAINER, **trained} if trained else {"format": "pt"}
    with whole(out, is_new=True) as partial:
        if layout == "bfl":
            table = parameter_table(model)
            _write(partial, table, whole_parts(table), source, dtype, metadata)
            return
        partial.mkdir()
        table = diffusers_names.diffusers_table(model)
        parts = diffusers_names.bfl_parts(model)
        _write(partial / DIFFUSERS_FILE, table, parts, source, dtype, metadata)
        write_whole(partial / "config.json", json.dumps(diffusers_names.diffusers_config(model), indent=2))


def _require_place(out: Path) -> None:
    """Raises: Refusal if `out` has no folder to lie in."""
    if not out.parent.is_dir():
        raise Refusal(f"{out.parent}, where {out.name} is to appear, is no folder; make it or choose another place")


def _write(
    path: Path, table: dict[str, tuple], parts: dict[str, list[Part]], source: Source, dtype: str, metadata: dict
) -> tuple[safetensors_io.FileEntry, dict[str, int]]:
    """Write the tensors of a table to one safetensors file. parts: the source's rows of which each tensor is made.

    Returns: as `safetensors_io.write`.
    """
    kind = SAFETENSORS_NAMES[dtype]
    entries = {name: (kind, shape) for name, shape in table.items()}

    def rounded() -> Iterator[Tensor]:
        for name in progress(table, desc=path.name.strip("."), unit=" tensors", leave=False):
            for rows in _pieces(source, parts[name], table[name]):
                yield rows.to(safetensors_io.DTYPES[kind])

    return safetensors_io.write(path, entries, metadata, rounded())


def _pieces(source: Source, parts: list[Part], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The rows of a tensor of this shape, in order, at most PIECE_BYTES at a time."""
    rows_at_once = max(1, PIECE_BYTES // (4 * prod(shape[1:])))
    for part in parts:
        end = part.first + part.rows
        for row in range(part.first, end, rows_at_once):
            yield source.read(part.name, row, min(rows_at_once, end - row))


def import_(source: Source, cfg: Config, out: Path) -> None:
    """Write weights as a checkpoint in fp32 without moments, to evaluate or to start from. Raises: Refusal."""
    _require_place(out)
    parameters = parameter_table(cfg.model)
    table = {f"model.{name}": shape for name, shape in parameters.items()}
    parts = {f"model.{name}": rows for name, rows in whole_parts(parameters).items()}
    info = {"step": 0, "samples": 0, "name": cfg.name, "config": config.flat(cfg), "from": str(source.where)}
    if EMA in source.info:
        info[EMA] = int(source.info[EMA])
    with whole(out, is_new=True) as partial:
        partial.mkdir()
        name = "rank_00000.safetensors"
        entry, begins = _write(partial / name, table, parts, source, "fp32", {"format": "pt"})
        tensors = {
            key: checkpoint_files.TensorEntry("F32", list(shape), [(name, begins[key], 0, shape[0])])
            for key, shape in table.items()
        }
        manifest = checkpoint_files.Manifest(info, {name: entry}, tensors)
        write_whole(partial / checkpoint_files.MANIFEST, manifest.dump())


def inspect(source: Source, model: ModelConfig, verify: bool) -> str:
    """What a source holds, in a few lines. verify: read every byte.

    Raises: Refusal for damage and for values that are NaN or infinite.
    """
    table = parameter_table(model)
    lines = [
        f"{source.where}: {source.kind}",
        f"  fits      {len(table)} tensors, {sum(prod(shape) for shape in table.values()):,} parameters",
    ]
    for key in (*COUNTS, "name", "run", "world_size", "torch", "from"):
        if key in source.info:
            lines.append(f"  {key:<9} {source.info[key]}")
    if verify:
        if isinstance(source.tensors, Checkpoint):
            source.tensors.verify()
        for name, shape in progress(table.items(), desc="reading", unit=" tensors", leave=False):
            for _ in _pieces(source, [Part(name, 0, shape[0])], shape):
                pass
        lines.append("  verified  every value is finite, every checksum right")
    return "\n".join(map(printable, lines))
