"""A model's weights in the forms in which people keep them, read and written a few rows at a time."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flux_ref import config, config_file, ranks
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, safetensors_io
from flux_ref.model import parameter_table
from flux_ref.run.progress import progress
from flux_ref.sharding import local_rows, named_parameters
from flux_ref.weights import diffusers_names
from flux_ref.weights.diffusers_names import Part

PREFIX = "model.diffusion_model."  # some tools put it before BFL's names
DIFFUSERS = "diffusion_pytorch_model"  # how its files begin
DIFFUSERS_FILE_BYTES = 10e9  # it splits what is larger
SAFETENSORS_NAMES = {"fp32": "F32", "bf16": "BF16"}
PIECE_BYTES = 64 << 20  # read and written at a time
CLOCK = re.compile("[0-9]{1,18}")
KINDS = "give a run, a checkpoint, a .safetensors file in BFL's layout or diffusers' transformer folder"


class Tensors:
    """The tensors of some safetensors files by name; nothing is read before it is asked for, nothing kept."""

    def __init__(self, where: Path, files: list[Path]):
        """Raises: Refusal for a file that is not safetensors, or is cut short."""
        self.where, self.files, self.shapes, self.metadata = where, {}, {}, {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    self.metadata |= file.metadata() or {}
                    for name in file.keys():  # noqa: SIM118
                        part = file.get_slice(name)
                        self._require_dtype(name, part.get_dtype(), path)
                        self.files[name], self.shapes[name] = path, tuple(part.get_shape())
            except (OSError, SafetensorError) as error:
                raise Refusal(f"weights {path}: {' '.join(str(error).split())}") from None

    @property
    def info(self) -> dict[str, str]:
        """The metadata, without clocks that are no numbers: anyone may write anything there."""
        return {
            key: text for key, text in self.metadata.items() if key not in ("step", "samples") or CLOCK.fullmatch(text)
        }

    @staticmethod
    def _require_dtype(name: str, dtype: str, path: Path) -> None:
        if dtype not in safetensors_io.DTYPES:
            raise Refusal(f"weights {path}: {name} is {dtype}, want {', '.join(safetensors_io.DTYPES)}")

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows of a tensor, in the file's dtype. Raises: Refusal."""
        try:
            with safe_open(self.files[name], framework="pt") as file:  # opened anew: a mapping kept would fill memory
                rows = file.get_slice(name)[first : first + count]
        except (OSError, SafetensorError) as error:
            raise Refusal(f"weights {self.files[name]}: {' '.join(str(error).split())}") from None
        safetensors_io.Moved.total += rows.nbytes
        return rows


@dataclass(frozen=True)
class Source:
    """Weights of a model, by BFL's names, wherever they lie.

    parts: for each parameter, the rows of `tensors` that, one below the other, are it.
    """

    kind: str
    tensors: Tensors | checkpoint_files.Checkpoint
    parts: dict[str, list[Part]]
    info: dict = field(default_factory=dict)  # what trained them

    @property
    def where(self) -> Path:
        return self.tensors.folder if isinstance(self.tensors, checkpoint_files.Checkpoint) else self.tensors.where

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows of a parameter, on the host, in the dtype they are kept in. Raises: Refusal, also for NaN."""
        found, row = [], 0
        for part in self.parts[name]:
            low, high = max(first, row), min(first + count, row + part.rows)
            if low < high:
                found.append(self.tensors.read(part.name, part.first + low - row, high - low))
            row += part.rows
        if not found:
            return self.tensors.read(self.parts[name][0].name, 0, 0)
        return safetensors_io.finite(torch.cat(found) if len(found) > 1 else found[0], name, self.where)


def find(path: Path, step: int | None = None) -> Path:
    """The checkpoint, file or folder that a user means by a path. Raises: Refusal.

    step: of a run, the checkpoint of that step instead of the newest.
    """
    is_run = (path / "config.toml").is_file() or checkpoint_files.folder_of(path).is_dir()
    if step is not None and not is_run:
        raise Refusal(f"{path} is not a run, so it has no checkpoint {step}; {KINDS}")
    if is_run:
        saved = checkpoint_files.found(path)
        wanted = [one for one in saved if step in (None, checkpoint_files.step_of(one))]
        if not wanted:
            steps = ", ".join(str(checkpoint_files.step_of(one)) for one in saved) or "none"
            raise Refusal(f"{path} holds no checkpoint{f' of step {step}' if step is not None else ''}; it has {steps}")
        return wanted[-1]
    if checkpoint_files.is_checkpoint(path) or path.is_file():
        return path
    if (path / "transformer").is_dir():
        return path / "transformer"
    if path.is_dir() and list(path.glob("*.safetensors")):
        return path
    raise Refusal(f"{path} {'holds no weights' if path.exists() else 'does not exist'}; {KINDS}")


def open_source(path: Path, model: ModelConfig) -> Source:
    """The weights at a path that `find` gave. Raises: Refusal that lists what is missing, unexpected or misshaped."""
    table = parameter_table(model)
    if checkpoint_files.is_checkpoint(path):
        saved = checkpoint_files.Checkpoint(path)
        own = {key: tuple(entry.shape) for key, entry in saved.tensors.items() if key.startswith("model.")}
        safetensors_io.require_fit(own, {f"model.{name}": shape for name, shape in table.items()}, f"checkpoint {path}")
        parts = {name: [Part(f"model.{name}", 0, shape[0])] for name, shape in table.items()}
        return Source("checkpoint", saved, parts, saved.info)
    if path.is_dir():
        diffusers_names.require_diffusers(model)
        _require_config(path / "config.json", model)
    tensors = Tensors(path, _files(path))
    if "x_embedder.weight" in tensors.shapes:
        safetensors_io.require_fit(tensors.shapes, diffusers_names.diffusers_table(model), f"weights {path}")
        return Source("diffusers", tensors, diffusers_names.diffusers_parts(model), tensors.info)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in tensors.shapes) else ""
    safetensors_io.require_fit(
        tensors.shapes, {prefix + name: shape for name, shape in table.items()}, f"weights {path}"
    )
    parts = {name: [Part(prefix + name, 0, shape[0])] for name, shape in table.items()}
    return Source("BFL", tensors, parts, tensors.info)


def _files(path: Path) -> list[Path]:
    """The safetensors files of a path; of a folder with an index, those that it names."""
    if path.is_file():
        return [path]
    index = path / f"{DIFFUSERS}.safetensors.index.json"
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        listed = sorted({os.fspath(name) for name in weight_map.values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Refusal(f"{index} is not an index of weights: {error}") from None
    for name in listed:
        if Path(name).name != name or not (path / name).is_file():  # an index names no path outside
            raise Refusal(f"{index} lists {name!r}, which is not a file beside it; fetch it again")
    return [path / name for name in listed]


def _require_config(path: Path, model: ModelConfig) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        want = diffusers_names.diffusers_config(model)
        wrong = [
            f"{key}={content[key]!r}, want {value!r}" for key, value in want.items() if content.get(key, value) != value
        ]
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}; it belongs beside diffusers' weights") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise Refusal(f"{path} is not diffusers' config: {error}") from None
    if wrong:
        raise Refusal(f"{path} is another model's: {'; '.join(wrong)}; give the right --config")


def load(net: nn.Module, source: Source) -> None:
    """Fill a sharded net; every rank reads only its own rows. Raises: Refusal."""
    with torch.no_grad():
        for name, parameter in named_parameters(net).items():
            first, local = local_rows(parameter)
            local.copy_(source.read(name, first, len(local)))


def load_everywhere(net: nn.Module, given: Path, model: ModelConfig) -> None:
    """Fill a sharded net on all ranks from a path that a user gave. Collective. Raises: Refusal."""
    path = None
    with ranks.agreed():
        path = find(given)
    path = ranks.gather_objects(path)[0]  # a run may still be saving, so ranks may find different checkpoints
    with ranks.agreed():
        load(net, open_source(path, model))


def config_of(path: Path, given: str | None) -> Config:
    """The config of the run behind a path that `find` gave, else the given one. Raises: Refusal."""
    if given is None and checkpoint_files.is_checkpoint(path):
        info = checkpoint_files.Checkpoint(path).info
        return config_file.from_flat(info["name"], info["config"])
    return config_file.load(given) if given else Config(name="schnell")


def export(source: Source, model: ModelConfig, out: Path, layout: str, dtype: str) -> None:
    """Write weights as one file in BFL's layout or as a folder for diffusers; it appears once it is whole.

    dtype: "fp32" or "bf16", rounded to nearest even. Holds a few pieces of PIECE_BYTES in memory, never a whole model.
    Raises: Refusal.
    """
    trained = {key: str(source.info[key]) for key in ("step", "samples", "name") if key in source.info}
    metadata = {"format": "pt", "trained_by": "flux_ref", **trained} if trained else {"format": "pt"}
    if layout == "diffusers":
        diffusers_names.require_diffusers(model)
    with _appearing(out) as partial:
        if layout == "bfl":
            parts = {name: [Part(name, 0, shape[0])] for name, shape in parameter_table(model).items()}
            _write(partial, parameter_table(model), parts, source, dtype, metadata)
        else:
            partial.mkdir(parents=True)
            _write_diffusers(partial, model, source, dtype, metadata)
        partial.rename(out)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A path on which to write what is to become `out`; whatever is left there in the end is removed."""
    if out.exists():
        raise Refusal(f"{out} exists; remove it or choose another name")
    if not out.parent.is_dir():
        raise Refusal(f"{out.parent}, where {out.name} is to appear, is no folder; make it or choose another place")
    partial = out.with_name(f".{out.name}.partial")
    _remove(partial)  # of one that was killed
    try:
        yield partial
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_diffusers(folder: Path, model: ModelConfig, source: Source, dtype: str, metadata: dict[str, str]) -> None:
    table, parts = diffusers_names.diffusers_table(model), diffusers_names.bfl_parts(model)
    itemsize = safetensors_io.DTYPES[SAFETENSORS_NAMES[dtype]].itemsize
    files, size = [{}], 0
    for name, shape in table.items():
        size += prod(shape) * itemsize
        if files[-1] and size > DIFFUSERS_FILE_BYTES:
            files.append({})
            size = prod(shape) * itemsize
        files[-1][name] = shape
    ends = [f"-{i:05d}-of-{len(files):05d}" for i in range(1, len(files) + 1)] if len(files) > 1 else [""]
    weight_map = {}
    for end, shapes in zip(ends, files):
        _write(folder / f"{DIFFUSERS}{end}.safetensors", shapes, parts, source, dtype, metadata)
        weight_map |= dict.fromkeys(shapes, f"{DIFFUSERS}{end}.safetensors")
    if len(files) > 1:
        total = {"total_size": sum(prod(shape) for shape in table.values()) * itemsize}
        index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
        (folder / f"{DIFFUSERS}.safetensors.index.json").write_text(index, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(diffusers_names.diffusers_config(model), indent=2), encoding="utf-8")


def _write(
    path: Path, table: dict[str, tuple], parts: dict[str, list[Part]], source: Source, dtype: str, metadata: dict
) -> tuple[safetensors_io.FileEntry, dict[str, int]]:
    """One safetensors file of the table's tensors, each put together from its parts of the source."""
    kind = SAFETENSORS_NAMES[dtype]
    head, begins = safetensors_io.header({name: (kind, shape) for name, shape in table.items()}, metadata)
    file = safetensors_io.CheckedFile(path)
    file.write(head)
    total = sum(prod(shape) for shape in table.values()) * safetensors_io.DTYPES[kind].itemsize
    with progress(total=total, unit="B", unit_scale=True, desc=path.name.strip("."), leave=False) as bar:
        for name, shape in table.items():
            for rows in _pieces(source, parts[name], 4 * prod(shape[1:])):
                rows = rows.to(safetensors_io.DTYPES[kind])
                file.write_tensor(rows)
                bar.update(rows.nbytes)
    return file.close(), begins


def _pieces(source: Source, parts: list[Part], row_bytes: int) -> Iterator[Tensor]:
    many = max(1, PIECE_BYTES // row_bytes)
    for part in parts:
        for row in range(part.first, part.first + part.rows, many):
            yield source.read(part.name, row, min(many, part.first + part.rows - row))


def import_(source: Source, cfg: Config, out: Path) -> None:
    """Write weights as a checkpoint, fp32, without moments: to evaluate, or to start from. Raises: Refusal."""
    with _appearing(out) as partial:
        partial.mkdir(parents=True)
        table = {f"model.{name}": shape for name, shape in parameter_table(cfg.model).items()}
        parts = {f"model.{name}": [Part(name, 0, shape[0])] for name, shape in parameter_table(cfg.model).items()}
        name = "rank_00000.safetensors"
        entry, begins = _write(partial / name, table, parts, source, "fp32", {"format": "pt"})
        tensors = {
            key: checkpoint_files.TensorEntry("F32", list(shape), [(name, begins[key], 0, shape[0])])
            for key, shape in table.items()
        }
        info = {"step": 0, "samples": 0, "name": cfg.name, "config": config.flat(cfg), "from": str(source.where)}
        checkpoint_files.publish(partial, out, checkpoint_files.Manifest(info, {name: entry}, tensors))


def inspect(source: Source, model: ModelConfig, verify: bool) -> str:
    """What is there, in a few lines. verify: read every byte. Raises: Refusal for damage, NaN and infinite values."""
    table = parameter_table(model)
    lines = [
        f"{source.where}: {source.kind}",
        f"  fits      {len(table)} tensors, {sum(prod(shape) for shape in table.values()):,} parameters",
    ]
    for key in ("step", "samples", "name", "world_size", "torch", "from"):
        if key in source.info:
            lines.append(f"  {key:<9} {source.info[key]}")
    if verify:
        if isinstance(source.tensors, checkpoint_files.Checkpoint):
            source.tensors.verify()
        for name, shape in progress(table.items(), desc="reading", unit=" tensors", leave=False):
            for _ in _pieces(source, [Part(name, 0, shape[0])], 4 * prod(shape[1:])):
                pass
        lines.append("  verified  every value is finite, every checksum right")
    return "\n".join(lines)
