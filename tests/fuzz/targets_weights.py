"""Targets: checkpoints, weights as people keep them, the autoencoder, the compiler's cache.

Files of weights without a manifest have no checksum. Damage to their payload changes the value that it hits. The oracle
reads each hurt file by the library of safetensors, and each tensor must have the bytes found there. A checkpoint has
checksums: none of its bytes may change unseen. Whoever renews the checksums of its manifest has made another
checkpoint, which the oracle reads.
"""

import hashlib
import json
import math
import shutil
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import torch
from fuzz.damage import BYTES, JSON, OfContent, at
from fuzz.damage_files import PLACES, SAFETENSORS
from fuzz.engine import Target
from fuzz.targets_data import crc
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flux_ref import config_file
from flux_ref.formats import checkpoint_files, diffusers_names
from flux_ref.formats.checkpoint_files import TensorSlice
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.model import parameter_table
from flux_ref.run import compile_cache, weight_files
from flux_ref.sampling import vae

CFG = config_file.load(Path(__file__).parents[1] / "micro.toml")
MODEL = replace(CFG.model, double_blocks=1, single_blocks=1)
BYTES_OF = {"F32": 4, "BF16": 2, "F16": 2}
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
    """Two checkpoints of two ranks: the second of a later step."""
    for number, step in enumerate((7, 9)):
        partial, parts = folder / "run" / f"partial{step}", []
        partial.mkdir(parents=True)
        for rank, (low, high) in enumerate(((0, 3), (3, 9))):
            tensors = drawn(TABLE, number)
            rows = {
                key: TensorSlice(tensor[low:high], min(low, len(tensor)), tensor.shape)
                for key, tensor in tensors.items()
            }
            kept = {key: part for key, part in rows.items() if len(part.local)}
            parts.append(checkpoint_files.write_rank(partial, rank, kept))
        info = {"step": step, "samples": 12 * step, **INFO}
        final = checkpoint_files.folder_of(folder / "run") / f"step_{step:09d}"
        final.parent.mkdir(exist_ok=True)
        checkpoint_files.publish(partial, final, checkpoint_files.manifest(info, parts))
    shutil.copytree(final, folder / "other")


def run_checkpoints(folder: Path) -> list[tuple]:
    """All that the two hold."""
    found = []
    for path in checkpoint_files.list_checkpoints(Path("run")):
        saved = Checkpoint(path)
        tensors = {key: (entry.dtype, entry.shape, crc_of(saved.read(key))) for key, entry in saved.tensors.items()}
        found.append((checkpoint_files.step_of(path), saved.info, tensors))
    return found


def read_checkpoints(folder: Path) -> list[tuple]:
    """By json and the bytes of the files. A folder of another name is none."""
    found = []
    for path in sorted(Path("run", "checkpoints").glob("step_" + 9 * "[0-9]")):
        if not path.name.isascii():
            continue
        content = json.loads((path / "manifest.json").read_bytes())
        checksum, step = content.pop("crc32"), int(path.name[5:])
        info, tensors = content["info"], {}
        if zlib.crc32(json.dumps(content).encode()) != checksum or (info["step"], info["samples"]) != (step, 12 * step):
            raise ValueError(f"manifest of {path.name}")
        for key, entry in content["tensors"].items():
            width, rows = BYTES_OF[entry["dtype"]] * math.prod(entry["shape"][1:]), {}
            for file, offset, first, count in entry["chunks"]:
                payload = (path / file).read_bytes()
                sums = [zlib.crc32(payload[at : at + 2**20]) for at in range(0, len(payload), 2**20)]
                if content["files"][file] != {"bytes": len(payload), "crc32": sums}:
                    raise ValueError(f"checksum of {file}")
                for row in range(count):
                    rows[first + row] = payload[offset + row * width :][:width]
            if sorted(rows) != list(range(entry["shape"][0])):
                raise ValueError(f"rows of {key}")
            tensors[key] = (entry["dtype"], entry["shape"], crc(b"".join(rows[row] for row in sorted(rows))))
        found.append((step, info, tensors))
    return found


def with_right_sum(name: str, change: OfContent) -> tuple[str, OfContent]:
    """The change of a manifest, with its checksum made right again."""

    def renewed(content: bytes, random: Random) -> tuple[bytes, str]:
        text, said = change.change(content, random)
        try:
            table = json.loads(text)
            del table["crc32"]
            table["crc32"] = zlib.crc32(json.dumps(table).encode())
            return json.dumps(table).encode(), f"{said}, sum renewed"
        except (ValueError, TypeError, KeyError, RecursionError):
            return text, said

    return f"renewed_{name}", OfContent(renewed)


# Weights


def make_bfl(folder: Path) -> None:
    for name, seed in (("set", 0), ("other", 1)):
        (folder / name).mkdir()
        metadata = {"trained_by": weight_files.TRAINER, "step": "3", "samples": "36"}
        save_file(drawn(parameter_table(MODEL), seed), folder / name / "w.safetensors", metadata)


def make_diffusers(folder: Path) -> None:
    for name, seed in (("set", 0), ("other", 1)):
        place = folder / name / "transformer"
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(diffusers_names.diffusers_config(MODEL)))
        tensors, weight_map = drawn(diffusers_names.diffusers_table(MODEL), seed), {}
        for number in range(2):
            file = f"{weight_files.DIFFUSERS_STEM}-{number + 1:05d}-of-00002.safetensors"
            part = dict(list(tensors.items())[number::2])
            save_file(part, place / file)
            weight_map |= dict.fromkeys(part, file)
        (place / f"{weight_files.DIFFUSERS_STEM}.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )


def make_unlisted(folder: Path) -> None:
    """Two files without an index."""
    make_diffusers(folder)
    for index in folder.rglob("*.index.json"):
        index.unlink()


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
    index = given / f"{weight_files.DIFFUSERS_STEM}.safetensors.index.json"
    files = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    weight_map = json.loads(index.read_bytes())["weight_map"] if index.is_file() else None
    if weight_map is not None:
        files = [given / name for name in sorted(set(weight_map.values()))]
    tensors, places, metadata = {}, {}, {}
    for file in files:
        found, own = parsed(file)
        if found.keys() & tensors.keys():
            raise ValueError("a tensor in two files")
        tensors, places, metadata = tensors | found, places | dict.fromkeys(found, file.name), metadata | (own or {})
    if weight_map not in (None, places):
        raise ValueError("the index does not fit")
    info = metadata if metadata.get("trained_by") == weight_files.TRAINER else {}
    return dict(sorted(tensors.items())) | {"info": {key: info.get(key) for key in ("step", "samples")}}


# The autoencoder


def make_vae(folder: Path) -> None:
    net = vae.Autoencoder(VAE)
    table = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    for name, seed in (("set", 0), ("other", 1)):
        (folder / name).mkdir()
        save_file(drawn(table, seed), folder / name / "ae.safetensors")


def run_vae(folder: Path) -> dict[str, tuple]:
    net = vae.load(Path("set/ae.safetensors"), sizes=VAE)
    return {name: (tuple(p.shape), crc_of(p)) for name, p in sorted(net.named_parameters())}


def make_diffusers_vae(folder: Path) -> None:
    table = vae.diffusers_table(vae.Autoencoder(VAE))
    (folder / "set" / "vae").mkdir(parents=True)
    save_file(drawn(table, 0), folder / "set" / "vae" / vae.DIFFUSERS_FILE)
    (folder / "set" / "vae" / "config.json").write_text(json.dumps(vae.DIFFUSERS_CONFIG))


def run_diffusers_vae(folder: Path) -> list:
    return [crc_of(parameter) for parameter in vae.load(Path("set"), sizes=VAE).parameters()]


def read_diffusers_vae(folder: Path) -> list:
    found = parsed(Path("set/vae") / vae.DIFFUSERS_FILE)[0]
    config = json.loads(Path("set/vae/config.json").read_bytes())
    if wrong := {key for key, value in vae.DIFFUSERS_CONFIG.items() if config.get(key, value) != value}:
        raise ValueError(f"another {wrong}")
    return [found.pop(name)[1] for name in vae.diffusers_table(vae.Autoencoder(VAE))] + list(found)


def read_vae(folder: Path) -> dict[str, tuple]:
    return dict(sorted(parsed(Path("set/ae.safetensors"))[0].items()))


# The compiler's cache


def make_cache(folder: Path) -> None:
    compile_cache.write(folder / "cache", b"what torch saved" * 60)


def run_cache(folder: Path) -> int:
    return crc(compile_cache.read(Path("cache")))


def judge_cache(folder: Path, outcome: int) -> str:
    """A missing file is none."""
    content = Path("cache").read_bytes() if Path("cache").is_file() else b""
    is_right = content[:32] == hashlib.sha256(content[32:]).digest() if content else outcome == crc(b"")
    return "" if is_right else "code of a damaged file"


SUMS = {name: JSON[name] for name in ("tree", "number", "word")}

TARGETS = [
    Target(
        "checkpoints",
        make_checkpoints,
        at("run/**/*.safetensors", SAFETENSORS, "file_")
        | at("run/**/manifest.json", JSON, "manifest_")
        | at("run/**/manifest.json", dict(with_right_sum(*item) for item in SUMS.items()))
        | at("run/**/rank_*", PLACES)
        | at("step_*", {"renamed": PLACES["renamed"]}, "folder_"),
        run_checkpoints,
        reading=read_checkpoints,
        weight=3,
    ),
    Target(
        "bfl",
        make_bfl,
        at("set/*.safetensors", SAFETENSORS),
        partial(run_weights, "set/w.safetensors"),
        reading=partial(read_weights, "set/w.safetensors"),
    ),
    Target(
        "diffusers",
        make_diffusers,
        at("set/**/*.safetensors", SAFETENSORS, "file_")
        | at("set/**/*.index.json", JSON, "index_")
        | at("set/**/config.json", JSON, "config_")
        | at("set/**/*.safetensors", PLACES),
        partial(run_weights, "set"),
        reading=partial(read_weights, "set"),
        weight=2,
    ),
    Target(
        "unlisted",
        make_unlisted,
        at("set/**/*.safetensors", SAFETENSORS | PLACES),
        partial(run_weights, "set"),
        reading=partial(read_weights, "set"),
    ),
    Target("vae", make_vae, at("set/*.safetensors", SAFETENSORS), run_vae, reading=read_vae),
    Target(
        "vae_of_diffusers",
        make_diffusers_vae,
        at("set/**/*.safetensors", SAFETENSORS, "file_") | at("set/**/config.json", JSON, "config_"),
        run_diffusers_vae,
        reading=read_diffusers_vae,
    ),
    Target("compile_cache", make_cache, at("cache", BYTES), run_cache, judge=judge_cache),
]
