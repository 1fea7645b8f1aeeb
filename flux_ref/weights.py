"""A model's weights from the forms in which people keep them, read a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flux_ref import checkpoint, config_file, diffusers_names, ranks, tensors
from flux_ref.checkpoint import Checkpoint
from flux_ref.config import Config, ModelConfig
from flux_ref.diffusers_names import Part
from flux_ref.errors import Refusal
from flux_ref.model import parameter_table
from flux_ref.optim import EMA
from flux_ref.sharding import local_rows, named_parameters

TRAINER = "flux_ref"  # under "trained_by" in the metadata of exported files
REMEDY = "give a run, a checkpoint, a .safetensors file in BFL's layout or diffusers' transformer folder"
COUNTS = ("step", "samples", EMA)  # of what metadata say of the training
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Source:
    """The weights of a model in any form, by BFL's names. Nothing is read before it is asked for.

    kind:   "checkpoint", "BFL" or "diffusers".
    stored: rows of a tensor of the files: its name, the first row, how many.
    parts:  for each parameter, the rows of tensors of the files that make it up, one below the other.
    info:   what flux_ref wrote of the training: step, samples, name, config, ... If the parameters are an average of
            weights, also ema: its half-life in samples.
    """

    kind: str
    where: Path
    stored: Callable[[str, int, int], Tensor]
    parts: dict[str, list[Part]]
    info: dict

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows of a parameter, on the host, in the dtype of the files.

        Raises: Refusal for damage and for values that are NaN or infinite.
        """
        pieces = []
        row = 0  # of the parameter, with which the part begins
        for part in self.parts[name]:
            low = max(first, row)
            high = min(first + count, row + part.rows)
            if low < high:
                pieces.append(self.stored(part.name, part.first + low - row, high - low))
            row += part.rows
        if not pieces:
            return self.stored(self.parts[name][0].name, 0, 0)
        return tensors.finite(torch.cat(pieces) if len(pieces) > 1 else pieces[0], name, self.where)


def whole_parts(table: dict[str, tuple[int, ...]], prefix: str = "", suffix: str = "") -> dict[str, list[Part]]:
    """For each name of a table of shapes, all rows of the tensor prefix + name + suffix."""
    return {name: [Part(prefix + name + suffix, 0, shape[0])] for name, shape in table.items()}


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or has the name of one."""
    return (path / checkpoint.MANIFEST).is_file() or (path.is_dir() and bool(checkpoint.NAME.fullmatch(path.name)))


def find(path: Path, step: int | None = None) -> Path:
    """The checkpoint, file or folder that a user means by a path. Raises: Refusal.

    step: the checkpoint of this step of a run. None: the run's newest.
    """
    if (path / "config.toml").is_file() or checkpoint.folder_of(path).is_dir():  # a run
        checkpoints = {checkpoint.step_of(folder): folder for folder in checkpoint.list_checkpoints(path)}
        wanted = max(checkpoints, default=None) if step is None else step
        if wanted in checkpoints:
            return checkpoints[wanted]
        which = "" if step is None else f" of step {step}"
        steps = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise Refusal(f"{path} holds no checkpoint{which}; it has {steps}")
    if step is not None:
        raise Refusal(f"{path} is not a run, so it has no checkpoint {step}; {REMEDY}")
    if path.is_file() or is_checkpoint(path):
        return path
    if not path.exists():
        raise Refusal(f"{path} does not exist; {REMEDY}")
    if (path / "transformer").is_dir():  # of a pipeline, as in FLUX.1-schnell's repository
        path = path / "transformer"
    names = sorted(file.name for file in path.iterdir())
    if "ae.safetensors" in names:
        raise Refusal(f"{path} has no transformer/; docs/own_pictures.md has what fetches FLUX.1-schnell's")
    if any(name.endswith(".safetensors") for name in names):
        return path
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        how = "convert it to .safetensors, as diffusers' save_pretrained does"
        raise Refusal(f"{path / pickles[0]} is a pickle, which could run any code, so it is not opened; {how}")
    raise Refusal(f"{path} holds no .safetensors file, only {', '.join(names[:3]) or 'nothing'}; {REMEDY}")


def config_of(path: Path, given: str | None) -> Config:
    """The config of weights at a path that `find` returned. Raises: Refusal.

    given: a config file. None: a checkpoint's own config, and FLUX.1-schnell's for other weights.
    """
    if given is None and is_checkpoint(path):
        info = Checkpoint(path).info
        return config_file.from_flat(info["name"], info["config"])
    return config_file.load(given) if given else Config(name="schnell")


def open_source(path: Path, model: ModelConfig, averaged: bool = False) -> Source:
    """The weights at a path that `find` returned. averaged: in their place, the average of optim.ema.

    Raises: Refusal that lists what is missing, unexpected or misshaped, or says why there is no average.
    """
    if is_checkpoint(path):
        return _of_checkpoint(Checkpoint(path), model, averaged)
    if averaged:
        rule = "--ema needs a checkpoint of a run with optim.ema above 0"
        raise Refusal(f"weights {path} hold no average of the weights beside them; {rule}, or leave it out")
    files, shapes, metadata = headers([path] if path.is_file() else sorted(path.glob("*.safetensors")))
    if dev := next((name for name in shapes if "guidance_" in name), None):
        raise Refusal(f"weights {path} hold {dev} of FLUX.1-dev, which is not supported; use FLUX.1-schnell's")
    info = metadata if metadata.get("trained_by") == TRAINER else {}  # others write anything there
    for key in COUNTS:
        count = info.get(key, "0")
        if not (count.isascii() and count.isdecimal() and len(count) <= 15):  # 2**53 samples have 16 digits
            raise Refusal(f"weights {path}: its metadata say {key}={count!r}, which is no count; export them again")
    kind, table = "BFL", parameter_table(model)
    parts = whole_parts(table)
    if any("transformer_blocks." in name for name in shapes):  # each of diffusers' files has some
        kind, table = "diffusers", diffusers_names.diffusers_table(model)
        parts = diffusers_names.diffusers_parts(model)
        diffusers_names.require_diffusers(model)
        said = (path if path.is_dir() else path.parent) / "config.json"
        if path.is_dir() or said.exists():  # a file may be moved without its config
            diffusers_names.require_config(said, diffusers_names.diffusers_config(model), "give the right --config")
    tensors.require_fit(shapes, table, f"weights {path}")

    def stored(name: str, first: int, count: int) -> Tensor:
        return tensors.read_rows(files[name], name, first, count, "weights")

    return Source(kind, path, stored, parts, info)


def headers(paths: list[Path]) -> tuple[dict[str, Path], dict[str, tuple[int, ...]], dict[str, str]]:
    """The file and the shape of each tensor of safetensors files, and all their metadata.

    Raises: Refusal for a file that is not a whole one or has tensors of another dtype, and for a tensor in two files.
    """
    files: dict[str, Path] = {}
    shapes = {}
    metadata = {}
    for path in paths:
        with tensors.opened(path, "weights") as file:
            metadata |= file.metadata() or {}
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if name in files:
                    raise Refusal(f"weights {path}: {name} is in {files[name].name}, too; keep one of them")
                if (dtype := part.get_dtype()) not in tensors.DTYPES:
                    raise Refusal(f"weights {path}: {name} is {dtype}, want {', '.join(tensors.DTYPES)}")
                files[name] = path
                shapes[name] = tuple(part.get_shape())
    return files, shapes, metadata


def _of_checkpoint(saved: Checkpoint, model: ModelConfig, averaged: bool) -> Source:
    """See open_source."""
    prefix, suffix = ("optimizer.state.", f".{EMA}") if averaged else ("model.", "")
    info = saved.info
    if averaged:
        half_life = config_file.from_flat(info["name"], info["config"]).optim.ema
        if not half_life:
            rule = "--ema needs a run with optim.ema above 0, or leave it out"
            raise Refusal(f"checkpoint {saved.folder} has optim.ema=0, so it holds no average; {rule}")
        info = info | {EMA: half_life}
    parts = whole_parts(parameter_table(model), prefix, suffix)
    want = {parts[name][0].name: shape for name, shape in parameter_table(model).items()}
    keys = [key for key in saved.tensors if key.startswith(prefix) and key.endswith(suffix)]
    tensors.require_fit({key: tuple(saved.tensors[key].shape) for key in keys}, want, f"checkpoint {saved.folder}")
    return Source("checkpoint", saved.folder, saved.read, parts, info)


def load(net: nn.Module, source: Source) -> None:
    """Fill a sharded net. Every rank reads only its own rows. Raises: Refusal."""
    with torch.no_grad():
        for name, parameter in named_parameters(net).items():
            first, local = local_rows(parameter)
            local.copy_(source.read(name, first, len(local)))


def load_everywhere(net: nn.Module, given: Path, model: ModelConfig) -> None:
    """Fill a sharded net on all ranks from a path that a user gave. Collective. Raises: Refusal."""
    path = None
    with ranks.agreed():
        path = find(given)
    # A run may still be saving, so ranks may find different checkpoints.
    path = Path(ranks.gather_objects(str(path))[0])
    with ranks.agreed():
        load(net, open_source(path, model))
