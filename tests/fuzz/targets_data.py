"""Targets: shards, Energon's lists, encodings of the empty caption, whole data sets with a manifest, staging.

Payloads of shards and encodings have no checksum. Damage to them changes the value that it hits. The oracle reads the
hurt files by Python's tarfile and numpy.load, and every value of every sample must be the one found there.
"""

import hashlib
import io
import json
import re
import shutil
import tarfile
import zlib
from pathlib import Path
from random import Random

import numpy as np
import shard_damage
import yaml
from braceexpand import braceexpand
from fuzz.damage import BYTES, TEXT, at, edits, moved, replaced
from fuzz.damage_files import ARCHIVE, NPY, PLACES, npy_head
from fuzz.engine import Said, Target, command

from flux_ref.errors import Refusal
from flux_ref.formats import energon, shard_writer, shards
from tools.prepare import commands as prepare
from tools.prepare import manifest, stage

LAYOUT, COUNT, PER_SHARD = shard_damage.LAYOUT, 5, 3
MICRO = Path(__file__).parents[1] / "micro.toml"


def crc(content: object) -> int:
    return zlib.crc32(bytes(content))


# Shards


def make_shards(folder: Path) -> None:
    for name, seed in (("set", 0), ("other", 1)):
        shard_writer.write(folder / name, shard_damage.samples(COUNT, seed), "some", PER_SHARD)


def run_shards(folder: Path) -> list[tuple]:
    """Key, timestep and checksums of each sample."""
    stored, found = shards.ShardSet(Path("set"), LAYOUT), []
    try:
        stored.open()
        for index in range(len(stored)):
            rows = LAYOUT.rows()
            try:
                meta = stored.read(index, rows)
            except shards.BadSample as error:
                raise Refusal(str(error)) from None
            found.append((meta.key, meta.timestep, [crc(rows[name]) for name in shards.MEMBERS]))
    finally:
        for shard in stored.shards:
            if shard.descriptor >= 0:
                shard.close()
    return found


def read_shards(folder: Path) -> list[tuple]:
    found = []
    for path in sorted(Path("set").glob("[!.]*.tar")):  # a hidden file is no shard
        try:
            with tarfile.open(path, "r:") as archive:
                content = [(entry.name, archive.extractfile(entry).read()) for entry in archive]
        except (tarfile.TarError, AttributeError) as error:
            raise ValueError(str(error)) from None
        for first in range(0, len(content), 5):
            (name, text), *blobs = content[first : first + 5]
            key = name.removesuffix(".json")
            if [name for name, _ in blobs] != [f"{key}.{member}.bytes" for member in shards.MEMBERS]:
                raise ValueError(f"members of {key}")
            arrays = [np.load(io.BytesIO(blob)) for _, blob in blobs]
            sums = [crc(np.ascontiguousarray(array)) for array in arrays]
            found.append((key, json.loads(text).get("timestep"), sums))
    return found


def samples(content: bytes) -> list[int]:
    """Where each sample begins."""
    return list(range(0, len(content) - shards.END_BYTES, LAYOUT.stride))


OWN_TEXTS = (
    *(b"[" * 400, b'{"timestep": 1e999}', b'{"timestep": true}', b'{"timestep": -1}', b"{}", b"null"),
    b'{"timestep": 3}',
)


def own_text(content: bytes, random: Random) -> tuple[bytes, str]:
    """The json of a sample holds another text of the same length."""
    at = content.index(b'{"key"', random.randrange(len(content) // 2))
    end = content.index(b"\0", at)
    text = random.choice(OWN_TEXTS)[: end - at]
    return content[:at] + text.ljust(end - at) + content[end:], f"json at byte {at} is {text[:20]!a}"


SHARDS = BYTES | ARCHIVE | edits(npy_head=npy_head, samples=moved(samples), own_text=own_text)


# Energon's lists


def make_energon(folder: Path) -> None:
    for split, count in (("train", 5), ("val", 2)):
        shard_writer.write(folder / "set" / split, shard_damage.samples(count), split, 2)
    meta = folder / "set" / energon.META
    meta.mkdir()
    parts = {"train": ["train/shard_{000000..000001}.tar", "train/shard_000002.tar"], "val": ["val/shard_000000.tar"]}
    (meta / "split.yaml").write_text(yaml.safe_dump({"split_parts": parts, "exclude": ["train/shard_000001.tar"]}))


def run_energon(folder: Path) -> dict[str, list[str]]:
    return {split: [str(path) for path in energon.shards_of(Path("set"), split)] for split in ("train", "val")}


def read_energon(folder: Path) -> dict[str, list[str]]:
    content = yaml.safe_load(Path("set", energon.META, "split.yaml").read_text("utf-8"))
    excluded = _names(content.get("exclude") or [])
    found = {split: _names(content["split_parts"][split]) for split in ("train", "val")}
    kept = {split: [f"set/{Path(name)}" for name in names if name not in excluded] for split, names in found.items()}
    if set(kept["train"]) & set(kept["val"]) or any(len(set(names)) < len(names) for names in found.values()):
        raise ValueError("a shard is listed twice")
    return kept


def _names(patterns: list[str]) -> list[str]:
    return [name for pattern in patterns for name in braceexpand(pattern)]


BOMB = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))])
PATTERNS = (
    *("{0..99999999999}", "{a..z}" * 9, "{,}" * 40, "{" * 50 + "}" * 50, "{" * 5000, "{1..{2..3}}", "../x.tar"),
    *("train/shard_{\u0660..\u0662}.tar", "/etc/passwd", "train", "train/shard_{000002..000000}.tar", "2026-01-01"),
    *("train/shard_{000000..000002..9999999999999999999}.tar", "train/shard_{000000..000003}.tar", '"\\0"'),
    *("!!python/object/apply:os.getcwd []", "val/*.tar"),
)


def bomb(content: bytes, random: Random) -> tuple[bytes, str]:
    """A list of patterns is one of 9 ** 29 of them, by aliases."""
    return f"{BOMB}\n".encode() + content.replace(b"train/shard_000002.tar", b"*a29"), "aliases of aliases"


# Encodings of the empty caption


def make_empty(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, dtype in (("set", np.float16), ("other", np.float32)):
        drawn = {k: rng.standard_normal(LAYOUT.shapes[k]).astype(dtype) for k in ("t5", "clip")}
        shard_writer.write_empty(folder / name, drawn)


def run_empty(folder: Path) -> dict[str, int]:
    return {name: crc(bits) for name, bits in shards.read_empty(Path("set"), LAYOUT).items()}


def read_empty(folder: Path) -> dict[str, int]:
    found = {}
    for name in ("t5", "clip"):
        array = np.load(f"set/{name}_empty.npy")
        if array.shape not in (LAYOUT.shapes[name], (1, *LAYOUT.shapes[name])):
            raise ValueError(f"shape {array.shape}")
        bits = array if array.dtype == np.uint16 else shards.to_bf16_bits(array.astype(np.float32))
        found[name] = crc(np.ascontiguousarray(bits))
    return found


# Whole sets with a manifest


def make_set(folder: Path) -> None:
    shard_damage.write_set(folder / "set", 5, 8)
    text = re.sub("train_count = 50", "train_count = 5", MICRO.read_text())
    (folder / "sizes.toml").write_text(re.sub("val_count = 45", "val_count = 8", text))
    assert _verify().code == 0


def _verify() -> Said:
    return command(prepare.main, ["verify", "set", "--config=sizes.toml", "--workers=1"])


def run_verify(folder: Path) -> Said:
    said = _verify()
    files = sorted(path for path in Path("set").rglob("*") if path.suffix in (".tar", ".npy") and path.is_file())
    contents = [(str(path), crc(path.read_bytes())) for path in files] if said.code == 0 else said.code
    text = re.sub(r" in [0-9.]+ s, .*", "", said.out) if said.code else ""
    return Said(said.code, f"{text}\nseen {contents}", said.err.rpartition("\r")[2])


def judge_verify(folder: Path, said: Said) -> str:
    return "a changed set passed" if said.code == 0 else ""


# Staging


def make_stage(folder: Path) -> None:
    train = folder / "src" / "train"
    train.mkdir(parents=True)
    names = [f"shard_{number:06d}.tar" for number in range(4)]
    for name in names:
        (train / name).write_bytes(700 * name[11:12].encode())
    sums = {f"train/{name}": hashlib.sha256((train / name).read_bytes()).hexdigest() for name in names}
    shutil.copytree(folder / "src", folder / "dst")
    (folder / "dst" / "train" / names[3]).unlink()
    (folder / "dst" / stage.HIDDEN).mkdir()
    (folder / "src" / "manifest.sha256").write_text(manifest.written(sums))


def run_stage(folder: Path) -> list:
    """What would be copied to where, and which files are trusted."""
    files, sums = stage.survey(Path("src").resolve(), Path("dst").resolve())
    with stage.claimed(Path("dst").resolve()):
        whole = stage.take_stock(Path("dst").resolve(), files)
    streams = stage.plan(files, sums, [whole])
    moves = sorted((transfer.file.name, transfer.sha256) for stream in streams for transfer in stream)
    return [sorted(files), sums, whole, moves]


def judge_stage(folder: Path, outcome: list) -> str:
    """Each trusted copy is its source's, and each file is trusted or copied."""
    names, sums, whole, moves = outcome
    for name in whole:
        if Path("dst", name).read_bytes() != Path("src", name).read_bytes():
            return f"{name} is trusted and is another"
    there = {path.relative_to("src").as_posix() for path in Path("src").rglob("*") if path.is_file()}
    if set(names) != there or {name for name, _ in moves} | set(whole) != there:
        return "files are left out"
    return "" if all(sums.get(name) == digest for name, digest in moves) else "another checksum"


WHOLE = at("*.tar", SHARDS, "tar_") | at("manifest.sha256", TEXT, "sums_") | at("*.npy", BYTES, "empty_")
WRITES = ("set/manifest.sha256",)
ENERGON = at("split.yaml", TEXT | edits(pattern=replaced(rb"(?:train|val)/shard_\S+\.tar", PATTERNS), bomb=bomb))
STAGE = at("manifest.sha256", TEXT, "sums_") | at("*.tar", PLACES)
TARGETS = [
    Target("shards", make_shards, at("set/*.tar", SHARDS | PLACES), run_shards, reading=read_shards),
    Target("energon", make_energon, ENERGON | at("*.tar", PLACES), run_energon, reading=read_energon),
    Target("empty", make_empty, at("set/*.npy", NPY | PLACES), run_empty, reading=read_empty),
    Target("verify", make_set, WHOLE | at("*.*", PLACES), run_verify, judge=judge_verify, writes=WRITES),
    Target("stage", make_stage, STAGE, run_stage, judge=judge_stage, writes=("dst/.stage*",)),
]
