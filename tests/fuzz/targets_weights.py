"""Targets: checkpoints, weights as people keep them, the autoencoder, the compiler's cache.

Files of weights without a manifest have no checksum. Damage to their payload changes the value that it hits. The oracle
parses the hurt files by itself, and each tensor must have the bytes found there. A checkpoint has checksums: none of
its bytes may change unseen. Whoever renews the checksums of its manifest has made another checkpoint, which the
oracle reads.
"""

import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from fuzz import damage, damage_files
from fuzz.damage import Change
from fuzz.engine import Target
from fuzz.targets_data import PLACES, crc, on, refuses_os_errors
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


@refuses_os_errors
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


def with_right_sum(change: Change) -> Change:
    """The change of a manifest, with its checksum made right again."""

    def renewed(content: bytes, random: Random) -> tuple[bytes, str]:
        text, said = change(content, random)
        try:
            table = json.loads(text)
            del table["crc32"]
            table["crc32"] = zlib.crc32(json.dumps(table).encode())
            return json.dumps(table).encode(), f"{said}, sum renewed"
        except (ValueError, TypeError, KeyError, RecursionError):
            return text, said

    return renewed


def field(content: bytes, random: Random) -> tuple[bytes, str]:
    """One field of a checkpoint's manifest becomes absurd or that of another entry."""
    table = json.loads(content)
    entry, other = (random.choice(list(table["tensors"].values())) for _ in range(2))
    spots = [(entry["chunks"][0], i) for i in range(4)] + [(entry["shape"], 0), (entry["shape"], -1)]
    spots += [
        (table["info"], "step"),
        (table["info"], "samples"),
        (entry, "chunks"),
        (entry, "shape"),
        (entry, "dtype"),
    ]
    spots += [(file, key) for file in table["files"].values() for key in ("bytes", "crc32")]
    holder, key = random.choice(spots)
    value = random.choice((0, -1, 2**31, 2**62, 2**64, 10**400, 1.5, True, None, "7", [], [0] * 9, *damage.VALUES[:9]))
    if random.random() < 0.4 and isinstance(holder, dict) and key in other:
        value = other[key]
    holder[key] = value
    return json.dumps(table).encode(), f"{key} becomes {str(value)[:20] if type(value) is not int else hex(value)[:20]}"


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


def reading_weights(path: str) -> Callable[[Path], object]:
    @refuses_os_errors
    def run(folder: Path) -> dict[str, tuple]:
        """Each tensor of the files, after the whole model was read."""
        source = weight_files.open_source(weight_files.find(Path(path)), MODEL)
        for name, shape in parameter_table(MODEL).items():
            source.read(name, 0, shape[0])
        tensors = source.tensors
        found = {
            name: (shape, crc_of(tensors.read(name, 0, shape[0]))) for name, shape in sorted(tensors.shapes.items())
        }
        return found | {"info": {key: source.info.get(key) for key in ("step", "samples")}}

    return run


def parsed(path: Path) -> tuple[dict[str, tuple], dict]:
    """Shape and checksum of each tensor of a safetensors file, and the metadata. Raises: ValueError."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    head, payload, end = json.loads(content[8 : 8 + size]), content[8 + size :], 0
    metadata = head.pop("__metadata__", {}) or {}
    for name, entry in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
        low, high = entry["data_offsets"]
        if low != end or high - low != BYTES_OF[entry["dtype"]] * math.prod(entry["shape"]) or high > len(payload):
            raise ValueError(f"place of {name}")
        end = high
    if end != len(payload):
        raise ValueError("bytes at the end")
    return {n: (tuple(e["shape"]), crc(payload[slice(*e["data_offsets"])])) for n, e in head.items()}, metadata


def parsed_all(path: str) -> Callable[[Path], object]:
    def read(folder: Path) -> dict[str, tuple]:
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
            tensors, places, metadata = tensors | found, places | dict.fromkeys(found, file.name), metadata | own
        if weight_map not in (None, places):
            raise ValueError("the index does not fit")
        info = metadata if metadata.get("trained_by") == weight_files.TRAINER else {}
        return dict(sorted(tensors.items())) | {"info": {key: info.get(key) for key in ("step", "samples")}}

    return read


# The autoencoder


def make_vae(folder: Path) -> None:
    net = vae.Autoencoder(VAE)
    table = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    for name, seed in (("set", 0), ("other", 1)):
        (folder / name).mkdir()
        save_file(drawn(table, seed), folder / name / "ae.safetensors")


@refuses_os_errors
def run_vae(folder: Path) -> dict[str, tuple]:
    net = vae.load(Path("set/ae.safetensors"), sizes=VAE)
    return {name: (tuple(p.shape), crc_of(p)) for name, p in sorted(net.named_parameters())}


def make_diffusers_vae(folder: Path) -> None:
    table = vae.diffusers_table(vae.Autoencoder(VAE))
    (folder / "set" / "vae").mkdir(parents=True)
    save_file(drawn(table, 0), folder / "set" / "vae" / vae.DIFFUSERS_FILE)
    (folder / "set" / "vae" / "config.json").write_text(json.dumps(vae.DIFFUSERS_CONFIG))


@refuses_os_errors
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


@refuses_os_errors
def run_cache(folder: Path) -> int:
    return crc(compile_cache.read(Path("cache")))


def judge_cache(folder: Path, outcome: int) -> str:
    """A missing file is none."""
    content = Path("cache").read_bytes() if Path("cache").is_file() else b""
    is_right = content[:32] == hashlib.sha256(content[32:]).digest() if content else outcome == crc(b"")
    return "" if is_right else "code of a damaged file"


def _of(pattern: str, prefix: str = "", changes: dict = damage_files.SAFETENSORS) -> dict:
    return {f"{prefix}{name}": hurt for name, hurt in (damage.of_bytes(pattern) | on(pattern, changes)).items()}


def _places(pattern: str) -> dict:
    return {name: damage.on_file(pattern, change) for name, change in PLACES.items()}


SUMS = {"tree": damage.tree, "number": damage.number, "field": field, "word": damage.word}

TARGETS = [
    Target(
        "checkpoints",
        make_checkpoints,
        _of("run/**/*.safetensors", "file_")
        | {f"manifest_{name}": hurt for name, hurt in damage.of_json("run/**/manifest.json").items()}
        | on("run/**/manifest.json", {f"renewed_{name}": with_right_sum(change) for name, change in SUMS.items()})
        | _places("run/**/rank_*")
        | {f"folder_{name}": damage.on_file("step_*", PLACES[name]) for name in ("renamed",)},
        run_checkpoints,
        reading=read_checkpoints,
        weight=3,
    ),
    Target(
        "bfl",
        make_bfl,
        _of("set/*.safetensors"),
        reading_weights("set/w.safetensors"),
        reading=parsed_all("set/w.safetensors"),
    ),
    Target(
        "diffusers",
        make_diffusers,
        _of("set/**/*.safetensors", "file_")
        | {f"index_{name}": hurt for name, hurt in damage.of_json("set/**/*.index.json").items()}
        | {f"config_{name}": hurt for name, hurt in damage.of_json("set/**/config.json").items()}
        | _places("set/**/*.safetensors"),
        reading_weights("set"),
        reading=parsed_all("set"),
        weight=2,
    ),
    Target(
        "unlisted",
        make_unlisted,
        _of("set/**/*.safetensors") | _places("set/**/*.safetensors"),
        reading_weights("set"),
        reading=parsed_all("set"),
    ),
    Target("vae", make_vae, _of("set/*.safetensors"), run_vae, reading=read_vae),
    Target(
        "vae_of_diffusers",
        make_diffusers_vae,
        _of("set/**/*.safetensors", "file_")
        | {f"config_{name}": hurt for name, hurt in damage.of_json("set/**/config.json").items()},
        run_diffusers_vae,
        reading=read_diffusers_vae,
    ),
    Target(
        "compile_cache",
        make_cache,
        damage.of_bytes("cache"),
        run_cache,
        judge=judge_cache,
    ),
]
