"""Reading a model's weights from the forms in which people keep them, a few rows at a time."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flux_ref import checkpoint, config_file, ranks, tensors
from flux_ref.checkpoint import Checkpoint
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.formats import diffusers_names, fit, outside
from flux_ref.formats.diffusers_names import Part
from flux_ref.model import parameter_table
from flux_ref.optim import EMA
from flux_ref.sharding import local_rows, named_parameters

TRAINER = "flux_ref"  # under "trained_by" in the metadata of exported files
REMEDY = "give a run, a checkpoint, a .safetensors file in BFL's layout or diffusers' transformer folder"
COUNTS = ("step", "samples", EMA)  # of what metadata say of the training


class Tensors:
    """The tensors of some safetensors files by name. Rows are read when they are asked for; none are kept."""

    def __init__(self, files: list[Path]):
        """Raises: Refusal for a file that is not a whole safetensors file or has tensors of another dtype.

        No two files may hold the same tensor.
        """
        self.files = {}
        self.shapes = {}
        self.metadata = {}
        for path in files:
            with tensors.opened(path, "weights") as file:
                self.metadata |= file.metadata() or {}
                for name in file.keys():  # noqa: SIM118
                    self._add(name, path, file.get_slice(name))

    def _add(self, name: str, path: Path, part: object) -> None:
        """Note where a tensor is. part: its PySafeSlice."""
        if name in self.files:
            raise Refusal(f"weights {path}: {name} is in {self.files[name].name}, too; keep one of them")
        dtype = part.get_dtype()
        if dtype not in tensors.DTYPES:
            raise Refusal(f"weights {path}: {name} is {dtype}, want {', '.join(tensors.DTYPES)}")
        self.files[name] = path
        self.shapes[name] = tuple(part.get_shape())

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows of a tensor, in the file's dtype. Raises: Refusal."""
        return tensors.read_rows(self.files[name], name, first, count, "weights")


@dataclass(frozen=True)
class Source:
    """The weights of a model in any form, by BFL's names.

    kind:    "checkpoint", "BFL" or "diffusers".
    parts:   for each parameter, the rows of `tensors` that make it up, one below the other.
    info:    what flux_ref wrote of the training: step, samples, name, config, ... If the parameters are an average of
             weights, also ema: its half-life in samples.
    """

    kind: str
    where: Path
    tensors: Tensors | Checkpoint
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
                pieces.append(self.tensors.read(part.name, part.first + low - row, high - low))
            row += part.rows
        if not pieces:
            return self.tensors.read(self.parts[name][0].name, 0, 0)
        return fit.finite(torch.cat(pieces) if len(pieces) > 1 else pieces[0], name, self.where)


def whole_parts(table: dict[str, tuple[int, ...]], prefix: str = "", suffix: str = "") -> dict[str, list[Part]]:
    """For each name of a table of shapes, all rows of the tensor prefix + name + suffix."""
    return {name: [Part(prefix + name + suffix, 0, shape[0])] for name, shape in table.items()}


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or has the name of one."""
    return (path / checkpoint.MANIFEST).is_file() or (path.is_dir() and bool(checkpoint.NAME.fullmatch(path.name)))


@outside.refusing()
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
    for name in ("transformer", "flux1-schnell.safetensors"):  # of FLUX.1-schnell's repository
        if (path / name).exists():
            return path / name
    if (path / "ae.safetensors").exists():
        raise Refusal(
            f"{path} is FLUX.1-schnell's folder without transformer/; docs/own_pictures.md has what fetches it"
        )
    if path.suffix == ".toml":
        raise Refusal(f"{path} is a config, which holds no weights; {REMEDY}")
    if is_checkpoint(path) or path.is_file() or any(path.glob("*.safetensors")):
        return path
    raise Refusal(f"{path} {'holds no weights' if path.exists() else 'does not exist'}; {REMEDY}")


@outside.refusing()
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
    table = parameter_table(model)
    if is_checkpoint(path):
        return _of_checkpoint(Checkpoint(path), table, averaged)
    if averaged:
        rule = "--ema needs a checkpoint of a run with optim.ema above 0"
        raise Refusal(f"weights {path} hold no average of the weights beside them; {rule}, or leave it out")
    found = Tensors([path] if path.is_file() else sorted(path.glob("*.safetensors")))
    if dev := next((name for name in found.shapes if "guidance_" in name), None):
        raise Refusal(f"weights {path} hold {dev} of FLUX.1-dev, which is not supported; use FLUX.1-schnell's")
    info = found.metadata if found.metadata.get("trained_by") == TRAINER else {}  # others write anything there
    for key in COUNTS:
        if outside.whole_number(info.get(key, "0"), 0, 2**53) is None:
            raise Refusal(f"weights {path}: its metadata say {key}={info[key]!r}, which is no count; export them again")
    if any("transformer_blocks." in name for name in found.shapes):  # each of diffusers' files has some
        diffusers_names.require_diffusers(model)
        want = diffusers_names.diffusers_config(model)
        folder = path if path.is_dir() else path.parent
        if path.is_dir() or (folder / "config.json").exists():  # a file may be moved without its config
            diffusers_names.require_config(folder / "config.json", want, "give the right --config")
        fit.require_fit(found.shapes, diffusers_names.diffusers_table(model), f"weights {path}")
        return Source("diffusers", path, found, diffusers_names.diffusers_parts(model), info)
    fit.require_fit(found.shapes, table, f"weights {path}")
    return Source("BFL", path, found, whole_parts(table), info)


def _of_checkpoint(saved: Checkpoint, table: dict[str, tuple[int, ...]], averaged: bool) -> Source:
    """See open_source. table: the shape of each parameter."""
    prefix, suffix = ("optimizer.state.", f".{EMA}") if averaged else ("model.", "")
    info = saved.info
    if averaged:
        half_life = config_file.from_flat(info["name"], info["config"]).optim.ema
        if not half_life:
            rule = "--ema needs a run with optim.ema above 0, or leave it out"
            raise Refusal(f"checkpoint {saved.folder} has optim.ema=0, so it holds no average; {rule}")
        info = info | {EMA: half_life}
    shapes = {}
    for key, entry in saved.tensors.items():
        if key.startswith(prefix) and key.endswith(suffix):
            shapes[key] = tuple(entry.shape)
    want = {f"{prefix}{name}{suffix}": shape for name, shape in table.items()}
    fit.require_fit(shapes, want, f"checkpoint {saved.folder}")
    return Source("checkpoint", saved.folder, saved, whole_parts(table, prefix, suffix), info)


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
