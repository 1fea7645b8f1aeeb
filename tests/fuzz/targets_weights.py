"""Targets: checkpoints, weights as people keep them, the autoencoder.

Files of weights without a manifest have no checksum. Damage to their payload changes the value that it hits. The oracle
reads each hurt file by the library of safetensors, and each tensor must have the bytes found there. A checkpoint has
checksums: none of its bytes may change unseen. Whoever renews the checksums of its manifest has made another
checkpoint.
"""

import json
import shutil
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import torch
from fuzz.damage import JSON, Edit, at, number, tree, word
from fuzz.damage_files import PLACES, SAFETENSORS, renamed
from fuzz.engine import Target
from fuzz.targets_data import crc
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flux_ref import config_file
from flux_ref.formats import checkpoint_files, diffusers_names
from flux_ref.formats.checkpoint_files import TensorSlice
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.model import parameter_table
from flux_ref.run import weight_files
from flux_ref.sampling import vae

CFG = config_file.load(Path(__file__).parents[1] / "micro.toml")
MODEL = replace(CFG.model, double_blocks=1, single_blocks=1)
VAE = vae.Sizes(base=32, multipliers=(1, 1), blocks=1, latent_channels=2)


def drawn(table: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in table.items()}


def crc_of(tensor: torch.Tensor) -> int:
    return crc(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


# Checkpoints

TABLE = {"model.w": (6, 5), "model.b": (7,), "optimizer.state.w.exp_avg": (6, 5), "fp8.history": (2, 3)}
INFO = {"name": "micro", "config": {"train.global_batch": 12}, "skipped": {"3": "bad"}, "train_samples": 50}


def make_checkpoints(folder: Path) -> None:
    """Two checkpoints of two ranks: the second of a later step. other/ has the same."""
    for seed, step in enumerate((7, 9)):
        partial = folder / "run" / f"partial{step}"
        partial.mkdir(parents=True)
        parts = []
        for rank in range(2):
            rows = {}
            for key, tensor in drawn(TABLE, seed).items():
                local = tensor[3 * rank : (3, 9)[rank]]
                if len(local):
                    rows[key] = TensorSlice(local, 3 * rank, tensor.shape)
            parts.append(checkpoint_files.write_rank(partial, rank, rows))
        final = checkpoint_files.folder_of(folder / "run") / f"step_{step:09d}"
        final.parent.mkdir(exist_ok=True)
        info = {"step": step, "samples": 12 * step, **INFO}
        checkpoint_files.publish(partial, final, checkpoint_files.manifest(info, parts))
    shutil.copytree(folder / "run", folder / "other")


def run_checkpoints(folder: Path, run: str = "run") -> list[tuple]:
    """All that the two hold."""
    found = []
    for path in checkpoint_files.list_checkpoints(Path(run)):
        saved = Checkpoint(path)
        tensors = {key: (entry.dtype, entry.shape, crc_of(saved.read(key))) for key, entry in saved.tensors.items()}
        found.append((checkpoint_files.step_of(path), saved.info, tensors))
    return found


def judge_checkpoints(folder: Path, found: list[tuple]) -> str:
    """Each is as it was written, unless somebody has made the checksum of its manifest right again."""
    for path, one in zip(checkpoint_files.list_checkpoints(Path("run")), found, strict=True):
        manifest = json.loads((path / "manifest.json").read_bytes())
        checksum = manifest.pop("crc32")
        if one not in run_checkpoints(folder, "other") and not (folder / RENEWED).exists():
            return f"another checkpoint {path.name}"
        if zlib.crc32(json.dumps(manifest).encode()) != checksum:
            return f"checksum of {path.name}"
    return ""


RENEWED = "renewed"  # a file that says that the checksum of a manifest fits a change


def with_right_sum(change: Edit, path: Path, random: Random) -> str:
    """Change a manifest and make its checksum right again."""
    text, said = change(path.read_bytes(), random)
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        table = json.loads(text)
        del table["crc32"]
        text = json.dumps(table | {"crc32": zlib.crc32(json.dumps(table).encode())}).encode()
        Path(RENEWED).touch()
    path.write_bytes(text)
    return said


# Weights


def make_bfl(folder: Path) -> None:
    metadata = {"trained_by": weight_files.TRAINER, "step": "3", "samples": "36"}
    for seed, name in enumerate(("set", "other")):
        (folder / name).mkdir()
        save_file(drawn(parameter_table(MODEL), seed), folder / name / "w.safetensors", metadata)


def make_diffusers(folder: Path) -> None:
    """The tensors lie in two files."""
    for seed, name in enumerate(("set", "other")):
        place = folder / name / "transformer"
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(diffusers_names.diffusers_config(MODEL)))
        tensors = drawn(diffusers_names.diffusers_table(MODEL), seed)
        for half in range(2):
            part = dict(list(tensors.items())[half::2])
            save_file(part, place / f"diffusion_pytorch_model-{half + 1:05d}-of-00002.safetensors")


def run_weights(path: str, folder: Path) -> dict[str, tuple]:
    """Each tensor of the files, after the whole model was read."""
    source = weight_files.open_source(weight_files.find(Path(path)), MODEL)
    for name, shape in parameter_table(MODEL).items():
        source.read(name, 0, shape[0])
    tensors = source.tensors
    found = {name: (shape, crc_of(tensors.read(name, 0, shape[0]))) for name, shape in sorted(tensors.shapes.items())}
    return found | {"info": {key: source.info.get(key) for key in ("step", "samples")}}


def parsed(path: Path) -> tuple[dict[str, tuple], dict]:
    """Shape and checksum of each tensor of a safetensors file, and the metadata, by its own library.

    Raises: ValueError.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(tensor.shape), crc_of(tensor)) for name, tensor in tensors.items()}, file.metadata()
    except (SafetensorError, OSError) as error:
        raise ValueError(str(error)) from None


def read_weights(path: str, folder: Path) -> dict[str, tuple]:
    given = next(place for place in (Path(path) / "transformer", Path(path)) if place.exists())
    files = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    tensors = []
    info = {}
    for file in files:
        found, metadata = parsed(file)
        tensors += found.items()
        info |= metadata or {}
    own = dict(sorted(tensors))
    if len(own) < len(tensors):
        raise ValueError("a tensor is in two files")
    info = info if info.get("trained_by") == weight_files.TRAINER else {}
    return own | {"info": {key: info.get(key) for key in ("step", "samples")}}


# The autoencoder


def make_vae(folder: Path) -> None:
    net = vae.Autoencoder(VAE)
    table = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    for seed, name in enumerate(("set", "other")):
        (folder / name / "vae").mkdir(parents=True)
        save_file(drawn(table, seed), folder / name / "ae.safetensors")
        save_file(drawn(vae.diffusers_table(net), seed), folder / name / "vae" / vae.DIFFUSERS_FILE)
    (folder / "set" / "vae" / "config.json").write_text(json.dumps(vae.DIFFUSERS_CONFIG))


def run_vae(path: str, folder: Path) -> list:
    return [crc_of(parameter) for parameter in vae.load(Path(path), sizes=VAE).parameters()]


def read_vae(folder: Path) -> list:
    found = parsed(Path("set/ae.safetensors"))[0]
    return [found.pop(name)[1] for name, _ in vae.Autoencoder(VAE).named_parameters()] + list(found)


def read_diffusers_vae(folder: Path) -> list:
    found = parsed(Path("set/vae") / vae.DIFFUSERS_FILE)[0]
    config = json.loads(Path("set/vae/config.json").read_bytes())
    if wrong := {key for key, value in vae.DIFFUSERS_CONFIG.items() if config.get(key, value) != value}:
        raise ValueError(f"another {wrong}")
    return [found.pop(name)[1] for name in vae.diffusers_table(vae.Autoencoder(VAE))] + list(found)


SUMS = {"tree": tree, "number": number, "word": word}
CHECKPOINTS = (
    at("run/**/*.safetensors", SAFETENSORS, "file_")
    | at("run/**/manifest.json", JSON, "manifest_")
    | at("run/**/manifest.json", {name: partial(with_right_sum, edit) for name, edit in SUMS.items()}, "renewed_")
    | at("run/**/rank_*", PLACES)
    | at("run/**/step_*", {"renamed": renamed}, "folder_")
)
CONFIG = at("set/**/config.json", JSON, "config_")
DIFFUSERS = at("set/**/*.safetensors", SAFETENSORS | PLACES, "file_") | CONFIG
ONE = at("set/w.safetensors", SAFETENSORS)
FOLDER = partial(run_weights, "set")
IN_FOLDER = partial(read_weights, "set")
OF_ONE = partial(read_weights, "set/w.safetensors")
AE = at("set/ae.safetensors", SAFETENSORS)
VAE_OF_DIFFUSERS = at("set/vae/*.safetensors", SAFETENSORS, "file_") | CONFIG
TARGETS = [
    Target("checkpoints", make_checkpoints, CHECKPOINTS, run_checkpoints, judge=judge_checkpoints),
    Target("bfl", make_bfl, ONE, partial(run_weights, "set/w.safetensors"), reading=OF_ONE),
    Target("diffusers", make_diffusers, DIFFUSERS, FOLDER, reading=IN_FOLDER),
    Target("vae", make_vae, AE, partial(run_vae, "set/ae.safetensors"), reading=read_vae),
    Target("vae_of_diffusers", make_vae, VAE_OF_DIFFUSERS, partial(run_vae, "set/vae"), reading=read_diffusers_vae),
]
