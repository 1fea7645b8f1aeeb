"""Checking a data set: what is wrong is found, named and counted, and nothing is written but the manifest."""

import argparse
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, ROOT
from flux_ref.prepare.shard_check import Job

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.formats import shard_writer, shards
from flux_ref.formats.shard_writer import Sample
from flux_ref.formats.shards import BLOCK, END_BYTES, MEMBERS, NPY_HEADER, RECORD, Layout, ShardSet
from flux_ref.prepare import shard_check, verify

LAYOUT = shards.layout(config_file.load(MICRO).model)
STRIDE = LAYOUT.stride
WIDE = {"text_tokens": 20, "t5_dim": 300}  # a sample is longer than a tar record, as real ones are
TRAIN, VAL, PER_SHARD = 8, 16, 3
KINDS = ("json", *MEMBERS)
NAN, INF, MINUS_INF = 0x7FC0, 0x7F80, 0xFF80  # as bf16 bits


def samples(count: int, seed: int, timesteps: bool, layout: Layout = LAYOUT) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            {name: shards.to_bf16_bits(rng.standard_normal(shape)) for name, shape in layout.shapes.items()},
            i % 8 if timesteps else None,
            f"words {i}",
        )
        for i in range(count)
    ]


def write_set(root: Path, layout: Layout = LAYOUT, train: int = TRAIN, val: int = VAL) -> None:
    """train/ of three shards, val/ of six and empty_encodings/."""
    shard_writer.write(root / "train", samples(train, 0, False, layout), "train", PER_SHARD)
    shard_writer.write(root / "val", samples(val, 1, True, layout), "val", PER_SHARD)
    (root / "empty_encodings").mkdir()
    for name in ("t5", "clip"):
        np.save(root / "empty_encodings" / f"{name}_empty.npy", np.ones((1, *layout.shapes[name]), np.float16))


@pytest.fixture(scope="module")
def micro(tmp_path_factory) -> Path:
    """A config with the micro model and shards that exist."""
    path = tmp_path_factory.mktemp("config") / "micro.toml"
    kept = [line for line in MICRO.read_text().splitlines() if not line.startswith("data.")]
    path.write_text("\n".join(kept))
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "set"
    write_set(folder)
    return folder


@pytest.fixture
def root(clean, tmp_path) -> Path:
    """A copy, in a folder that holds something else, too."""
    (tmp_path / "beside.txt").write_text("not to be touched")
    return Path(shutil.copytree(clean, tmp_path / "set"))


@dataclass
class Result:
    """What a check printed."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """Those about problems and warnings."""
        return self.text[: re.search(r"^ +shards ", self.text, re.M).start()].splitlines()

    def counts(self, title: str) -> dict[str, int]:
        told = re.search(rf"^{title}: (.*)$", self.text, re.M)[1]
        pairs = [part.rpartition(" ") for part in told.split(", ")] if told != "none" else []
        return {kind: int(count.replace(",", "")) for kind, _, count in pairs}

    @property
    def kinds(self) -> set[str]:
        return set(self.counts("problems"))


@pytest.fixture
def run(micro, capsys) -> Callable[..., Result]:
    """Check a folder in this process."""

    def call(folder: Path, *args: str, workers: int = 1) -> Result:
        parser = argparse.ArgumentParser()
        verify.add_arguments(parser)
        known = {"--config": str(micro), "--workers": str(workers)}
        options = [text for name, value in known.items() if name not in args for text in (name, value)]
        capsys.readouterr()
        code = verify.run(parser.parse_args([str(folder), *options, *map(str, args)]))
        return Result(code, capsys.readouterr().out)

    return call


def snapshot(folder: Path) -> dict[str, tuple]:
    """Everything below a folder: kind and time of change, and the content of plain files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


# Planting damage


def position(kind: str, part: str = "tar", sample: int = 0) -> int:
    """Where a part (tar, npy or payload; of the json: tar or payload) of a member begins within its shard."""
    offset = sample * STRIDE
    for name in KINDS[: KINDS.index(kind)]:
        size = BLOCK if name == "json" else NPY_HEADER + LAYOUT.payload_bytes[name]
        offset += BLOCK + -(-size // BLOCK) * BLOCK
    return offset + {"tar": 0, "npy": BLOCK, "payload": BLOCK + (kind != "json") * NPY_HEADER}[part]


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def sign(path: Path, offset: int) -> None:
    """Make the checksum of a changed tar header right."""
    block = path.read_bytes()[offset : offset + BLOCK]
    overwrite(path, offset + 148, b"%06o\0 " % tarfile.calc_chksums(block)[0])


def tar_field(kind: str, at: int, content: bytes, signed: bool = True) -> Callable[[Path], None]:
    """Change a tar header of sample 1."""

    def plant(shard: Path) -> None:
        overwrite(shard, position(kind, "tar", 1) + at, content)
        if signed:
            sign(shard, position(kind, "tar", 1))

    return plant


def at(kind: str, part: str, content: bytes, extra: int = 0, sample: int = 1) -> Callable[[Path], None]:
    return lambda shard: overwrite(shard, position(kind, part, sample) + extra, content)


def say(sample: int = 1, **content: object) -> Callable[[Path], None]:
    """Change fields of a sample's json; ... removes one."""

    def plant(shard: Path) -> None:
        start = position("json", "payload", sample)
        old = json.loads(shard.read_bytes()[start : start + BLOCK].rstrip(b"\0"))
        text(json.dumps({k: v for k, v in (old | content).items() if v is not ...}), sample)(shard)

    return plant


def text(content: str, sample: int = 1) -> Callable[[Path], None]:
    """Replace a sample's json."""

    def plant(shard: Path) -> None:
        encoded = content.encode("utf-8", "surrogateescape")
        overwrite(shard, position("json", "tar", sample) + 124, b"%011o\0" % len(encoded))
        sign(shard, position("json", "tar", sample))
        overwrite(shard, position("json", "payload", sample), encoded.ljust(BLOCK, b"\0"))

    return plant


def npy(name: str, **header: object) -> Callable[[Path], None]:
    """Give an array of sample 1 another .npy header of the same length."""
    stream = io.BytesIO()
    whole = {"descr": "<u2", "fortran_order": False, "shape": LAYOUT.shapes[name]} | header
    np.lib.format.write_array_header_1_0(stream, whole)
    return at(name, "npy", stream.getvalue())


def values(name: str, bits: int | np.ndarray, first: int = 0, count: int = 1) -> Callable[[Path], None]:
    """Set values of sample 1 to bf16 bits."""
    array = np.full(count, bits, "<u2") if isinstance(bits, int) else bits.astype("<u2")
    return at(name, "payload", array.tobytes(), 2 * first)


def full(name: str, bits: int) -> Callable[[Path], None]:
    return values(name, bits, count=LAYOUT.payload_bytes[name] // 2)


Member = tuple[tarfile.TarInfo, bytes]


def rebuild(change: Callable[[list[Member]], list[Member]], form: int = tarfile.USTAR_FORMAT) -> Callable[[Path], None]:
    """Write a shard again with other members; those of sample 1 are 5 to 9."""

    def plant(shard: Path) -> None:
        with tarfile.open(shard) as archive:
            members = [(entry, archive.extractfile(entry).read()) for entry in archive]
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
            for entry, content in change(members):
                archive.addfile(entry, io.BytesIO(content))
            end = archive.offset + END_BYTES
        shard.write_bytes(stream.getvalue()[:end])

    return plant


def entry(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def insert(*members: Member, before: int = 7) -> Callable[[Path], None]:
    return rebuild(lambda all_: [*all_[:before], *members, *all_[before:]])


def order(*new: int) -> Callable[[Path], None]:
    """Rearrange the members of sample 1."""
    return rebuild(lambda all_: all_[:5] + [all_[5 + i] for i in new] + all_[10:])


def rename(index: int, name: str, form: int = tarfile.USTAR_FORMAT, **fields: object) -> Callable[[Path], None]:
    def change(members: list[Member]) -> list[Member]:
        content = members[index][1]
        return [*members[:index], entry(name, content, **fields), *members[index + 1 :]]

    return rebuild(change, form)


def gnu_sparse(shard: Path) -> None:
    """Make an array a GNU sparse member of two stretches: old format, map in the header."""

    def change(members: list[Member]) -> list[Member]:
        info, content = members[6]
        return [*members[:6], entry(info.name, content, tarfile.GNUTYPE_SPARSE), *members[7:]]

    rebuild(change, tarfile.GNU_FORMAT)(shard)
    start = position("t5", "tar", 1)
    numbers = (0, 256, 512, NPY_HEADER + LAYOUT.payload_bytes["t5"] - 256)
    overwrite(shard, start + 386, b"".join(b"%011o\0" % number for number in numbers))
    overwrite(shard, start + 483, b"%011o\0" % 4096)
    sign(shard, start)


def swap_samples(root: Path) -> None:
    """Exchange sample 0 of one shard with sample 1 of another."""
    first, second = (root / "train" / f"shard_00000{i}.tar" for i in (0, 1))
    a, b = first.read_bytes(), second.read_bytes()
    overwrite(first, 0, b[STRIDE : 2 * STRIDE])
    overwrite(second, STRIDE, a[:STRIDE])


def copy_sample(source: str, target: str, key: str = "", timestep: object = "as it is") -> Callable[[Path], None]:
    """Put the first sample of a shard over the second of another, under another key."""

    def plant(root: Path) -> None:
        with tarfile.open(root / source) as archive:
            infos = list(archive)[:5]
            whole = [archive.extractfile(info).read() for info in infos]
        new = key or infos[0].name.removesuffix(".json")
        step = json.loads(whole[0]).get("timestep") if timestep == "as it is" else timestep
        description = shard_writer.description(new, step, "")
        names = [f"{new}.json", *(f"{new}.{name}.bytes" for name in MEMBERS)]
        replaced = [entry(name, content) for name, content in zip(names, [description, *whole[1:]])]
        rebuild(lambda all_: all_[:5] + replaced + all_[10:])(root / target)

    return plant


def move(old: str, new: str) -> Callable[[Path], None]:
    return lambda root: (root / old).rename(root / new)


def save_empty(name: str, array: np.ndarray) -> Callable[[Path], None]:
    return lambda root: np.save(root / "empty_encodings" / f"{name}_empty.npy", array)


def other_tar(shard: Path) -> None:
    with tarfile.open(shard, "w") as archive:
        archive.add(MICRO, "micro.toml")


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def plant(shard: Path) -> None:
        shard.unlink()
        make(shard)

    return plant


@dataclass
class Damage:
    """Something wrong with a set, and how it must be called."""

    name: str
    plant: Callable[[Path], None]  # of the shard, or of the root
    kind: str
    words: str  # in one line of it, together with where
    where: str = ""
    shard: str = "train/shard_000000.tar"  # "": plant takes the root
    alone: bool = True  # no other kind is told
    fast: bool = False  # --fast finds it as well
    args: tuple[str, ...] = ()


TRAIN_0, TRAIN_1, TRAIN_2 = (f"train/shard_00000{i}.tar" for i in range(3))
VAL_0, VAL_1 = "val/shard_000000.tar", "val/shard_000001.tar"
KEY = "train_00000001"
ONE = f"{TRAIN_0}, sample 1, key {KEY}: "
GARBAGE = np.random.default_rng(5).integers(0, 0x7F80, LAYOUT.payload_bytes["t5"] // 2)  # finite, of any exponent


def in_file(name: str, plant: Callable[[Path], None], kind: str, words: str, **more: object) -> Damage:
    """Damage to a shard as a whole, which is told without a sample; names and sizes show it."""
    return Damage(name, plant, kind, words, **{"where": f"{TRAIN_0}: ", "fast": True} | more)


def in_sample(name: str, plant: Callable[[Path], None], kind: str, words: str, **more: object) -> Damage:
    """Damage to the middle one of three samples."""
    return Damage(name, plant, kind, words, **{"where": ONE} | more)


def in_set(name: str, plant: Callable[[Path], None], kind: str, words: str, where: str, **more: object) -> Damage:
    return Damage(name, plant, kind, words, where, **{"shard": ""} | more)


FILES = [
    in_file("empty file", lambda s: s.write_bytes(b""), "no sample", "holds no sample"),
    in_file("zeros", lambda s: s.write_bytes(bytes(3 * STRIDE)), "no sample", "holds no sample"),
    in_file("tar of nothing", lambda s: tarfile.open(s, "w").close(), "no sample", "holds no sample"),
    in_file("gzip", lambda s: s.write_bytes(gzip.compress(s.read_bytes())), "no sample", "compressed with gzip"),
    in_file("other tar", other_tar, "members", "'micro.toml' does not belong", alone=False),
    in_file("text", lambda s: s.write_text("text " * 9999), "file size", "truncated or foreign", alone=False),
    in_file("directory", replaced_by(Path.mkdir), "unreadable", "is no file"),
    in_file("FIFO", replaced_by(os.mkfifo), "unreadable", "is no file"),
    in_file("dead link", replaced_by(lambda s: s.symlink_to("none")), "unreadable", "is no file"),
    in_file("no end marker", lambda s: os.truncate(s, 3 * STRIDE), "file size", "truncated"),
    in_file("half an end marker", lambda s: os.truncate(s, 3 * STRIDE + BLOCK), "file size", "truncated"),
    in_file("one byte short", lambda s: os.truncate(s, 3 * STRIDE + END_BYTES - 1), "file size", "truncated"),
    in_file("cut between samples", lambda s: os.truncate(s, STRIDE), "file size", "truncated"),
    in_file("cut between members", lambda s: os.truncate(s, position("mean")), "file size", "truncated", alone=False),
    in_file("cut in a header", lambda s: os.truncate(s, position("mean") + 99), "file size", "truncated", alone=False),
    in_file(
        "cut in an array",
        lambda s: os.truncate(s, position("clip", "payload", 2) + 9),
        "members",
        "key train_00000002 lacks mean, logvar",
        alone=False,
    ),
    in_file(
        "bytes behind",
        lambda s: s.write_bytes(s.read_bytes() + b"junk"),
        "bytes after the end",
        f"ends at byte {3 * STRIDE + END_BYTES}, yet goes on until byte {3 * STRIDE + END_BYTES + 4}",
    ),
    in_file(
        "text behind",
        lambda s: s.write_bytes(s.read_bytes() + b"text " * 999),
        "bytes after the end",
        "yet goes on",
    ),
    in_file("zeros behind", lambda s: s.write_bytes(s.read_bytes() + bytes(BLOCK)), "file size", "foreign"),
    in_file("archive behind", lambda s: s.write_bytes(2 * s.read_bytes()), "file size", "foreign", alone=False),
]

NAMES = [
    in_set(
        "no shard 1", lambda r: (r / TRAIN_1).unlink(), "missing", "shard_000001.tar, although", "train: ", fast=True
    ),
    in_set(
        "no shard 0", lambda r: (r / TRAIN_0).unlink(), "missing", "shard_000000.tar, although", "train: ", fast=True
    ),
    in_set(
        "renumbered",
        move(TRAIN_2, "train/shard_000009.tar"),
        "missing",
        "shard_000002.tar to shard_000008.tar, although there is shard_000009.tar",
        "train: ",
        fast=True,
    ),
    in_set("renamed", move(TRAIN_2, "train/last.tar"), "file name", "is not named as", "last.tar", fast=True),
    in_set("other width", move(TRAIN_2, "train/shard_2.tar"), "file name", "is not named", "shard_2.tar", fast=True),
    in_set("other prefix", move(TRAIN_2, "train/part_2.tar"), "file name", "is not named", "part_2.tar", fast=True),
    in_set("(1)", move(TRAIN_2, "train/shard_000002 (1).tar"), "file name", "is not named", "2 (1).tar", fast=True),
    in_set("line break", move(TRAIN_2, "train/shard_\n2.tar"), "file name", "is not named", r"\n2.tar", fast=True),
    in_set(
        "hidden twin",
        lambda r: (r / "train/._shard_000000.tar").write_bytes(b"Mac OS X"),
        "file name",
        "is not named as shard_000000.tar",
        "._shard_000000.tar",
        alone=False,
        fast=True,
    ),
    in_set(
        "extra shard",
        lambda r: shutil.copy(r / TRAIN_0, r / "train/shard_000003.tar"),
        "repeated key",
        f"so is the key of {{root}}/{ONE[:-2]}",
        f"shard_000003.tar, sample 1, key {KEY}",
        alone=False,
    ),
    in_set("no shards", lambda r: [p.unlink() for p in r.glob("train/*")], "missing", "no *.tar", "train: ", fast=True),
    in_set("no val", lambda r: shutil.rmtree(r / "val"), "missing", "no such folder", "/val: ", fast=True),
]

MEMBER_TYPES = {
    "a symbolic link": entry("link", kind=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": entry("link", kind=tarfile.LNKTYPE, linkname=f"{KEY}.json"),
    "a character device": entry("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "a block device": entry("disk", kind=tarfile.BLKTYPE, devmajor=8),
    "a directory": entry("folder", kind=tarfile.DIRTYPE),
    "a FIFO": entry("pipe", kind=tarfile.FIFOTYPE),
}
MEMBERSHIP = [
    *(
        in_file(
            f"no {kind}",
            rebuild(lambda all_, i=i: all_[: 5 + i] + all_[6 + i :]),
            "members",
            f"key {KEY} lacks {kind}",
            alone=False,
        )
        for i, kind in enumerate(KINDS)
    ),
    *(
        in_file(
            f"{kind} twice",
            rebuild(lambda all_, i=i: all_[: 6 + i] + all_[5 + i :]),
            "members",
            f"key {KEY} has twice {kind}",
            alone=False,
        )
        for i, kind in enumerate(KINDS)
    ),
    *(
        in_file(f"added {what}", insert(member), "member type", f"{member[0].name!r} is {what}", alone=False)
        for what, member in MEMBER_TYPES.items()
    ),
    in_file("foreign", insert(entry("notes.txt", b"hello")), "members", "'notes.txt' does not belong", alone=False),
    in_file("caption", insert(entry(f"{KEY}.txt", b"hello")), "members", f"'{KEY}.txt' does not", alone=False),
    in_file("foreign first", insert(entry("a"), before=0), "members", "'a' does not belong", alone=False),
    in_file("foreign last", insert(entry("z", b"z"), before=15), "members", "'z' does not belong", alone=False),
    in_file("dots", insert(entry("../../evil")), "member name", "'../../evil' does not belong", alone=False),
    in_file("absolute", insert(entry("/etc/passwd", b"x")), "member name", "'/etc/passwd' does not", alone=False),
    in_file(
        "pax header",
        rename(6, f"{KEY}.t5.bytes", tarfile.PAX_FORMAT, pax_headers={"note": "x"}),
        "member type",
        "is a pax header",
        alone=False,
    ),
    in_file("pax time", rename(6, f"{KEY}.t5.bytes", tarfile.PAX_FORMAT, mtime=1.5), "member type", "pax", alone=False),
    in_file("long name", rename(6, "n" * 150, tarfile.GNU_FORMAT), "member type", "a GNU long name", alone=False),
    in_file("long name in two parts", rename(6, "n" * 99 + "/" + "n" * 99), "members", "'nnn", fast=False, alone=False),
    in_file("sparse", gnu_sparse, "member type", f"'{KEY}.t5.bytes' is a sparse file", fast=False, alone=False),
    in_file(
        "link for an array",
        tar_field("t5", 156, b"2"),
        "member type",
        f"'{KEY}.t5.bytes' is a symbolic link",
        fast=False,
        alone=False,
    ),
    in_file("contiguous", tar_field("t5", 156, b"7"), "member type", "is of type b'7'", fast=False, alone=False),
    in_sample("mean and logvar exchanged", order(0, 1, 2, 4, 3), "members", f"'{KEY}.logvar.bytes' where {KEY}.mean"),
    in_sample("t5 and clip exchanged", order(0, 2, 1, 3, 4), "members", f"'{KEY}.clip.bytes' where", alone=False),
    in_sample("json last", order(1, 2, 3, 4, 0), "members", "found member", where="sample 1", alone=False),
    in_sample("renamed", rename(7, "x.clip.bytes"), "members", f"'x.clip.bytes' where {KEY}.clip.bytes belongs"),
    in_sample("of another sample", rename(7, "train_00000002.clip.bytes"), "members", f"where {KEY}.clip.bytes"),
    in_sample("out of the folder", rename(7, f"../{KEY}.clip.bytes"), "member name", "no plain", alone=False),
    in_sample("backslash", rename(7, f"a\\{KEY}.clip.bytes"), "member name", "no plain file name", alone=False),
    in_sample("escape sequence", rename(7, "\x1b[2J.clip.bytes"), "member name", r"\x1b[2J", alone=False),
    in_sample("not UTF-8", tar_field("clip", 0, b"\xff\xfe"), "member name", r"\\xff\\xfe", alone=False),
    in_sample("in a folder", tar_field("clip", 345, b"folder"), "member name", "'folder/train", alone=False),
]

HEADERS = [
    in_sample("flipped time", tar_field("t5", 140, b"1", signed=False), "tar header", "has a wrong checksum"),
    in_sample("wrong checksum", tar_field("json", 148, b"000001\0 ", signed=False), "tar header", "a wrong checksum"),
    in_sample("no checksum", tar_field("logvar", 148, b"xxxxxxxx", signed=False), "tar header", "a wrong checksum"),
    in_sample("zeroed", at("t5", "tar", bytes(BLOCK)), "tar header", f"no tar header where that of {KEY}.t5.bytes"),
    in_sample("zeroed json's", at("json", "tar", bytes(BLOCK)), "tar header", "that of KEY.json", where="sample 1: "),
    in_sample("no magic", tar_field("clip", 257, b"xxxxx"), "tar header", "no tar header where"),
    in_sample("size of letters", tar_field("mean", 124, b"size?"), "tar header", "no tar header where"),
    in_sample("negative size", tar_field("mean", 124, b"\xff" * 12), "tar header", "no tar header where"),
    in_sample("huge size", tar_field("mean", 124, b"77777777777\0"), "member size", "mean has 8589934591 bytes, want"),
    in_sample(
        "64-bit size",
        tar_field("t5", 124, b"\x80" + b"\x7f" * 11),
        "member size",
        "t5 has 154135671558081661678616447 bytes",
    ),
    in_sample("size 0", tar_field("clip", 124, b"00000000000\0"), "member size", "clip has 0 bytes, want"),
    in_sample(
        "long json",
        tar_field("json", 124, b"%011o\0" % 513),
        "member size",
        "json has 513 bytes, want at most 512",
        alone=False,
    ),
    Damage(
        "first header zeroed",
        at("json", "tar", bytes(BLOCK), sample=0),
        "tar header",
        "that of KEY.json",
        f"{TRAIN_0}, sample 0: ",
        fast=True,
    ),
    Damage(
        "last header flipped",
        at("logvar", "tar", b"1", extra=140, sample=2),
        "tar header",
        "wrong checksum",
        f"{TRAIN_0}, sample 2, key train_00000002: ",
        fast=True,
    ),
]

ARRAYS = [
    in_sample("float16", npy("t5", descr="<f2"), "array header", "t5 is float16 (9, 28), want uint16 (9, 28)"),
    in_sample("float32", npy("clip", descr="<f4"), "array header", "clip is float32 (14,)"),
    in_sample("int16", npy("mean", descr="<i2"), "array header", "mean is int16"),
    in_sample("big-endian", npy("mean", descr=">u2"), "array header", "mean is >u2"),
    in_sample("objects", npy("mean", descr="|O"), "array header", "mean is object"),
    in_sample("Fortran order", npy("mean", fortran_order=True), "array header", "in Fortran order, want uint16"),
    in_sample("transposed", npy("t5", shape=(28, 9)), "array header", "t5 is uint16 (28, 9), want"),
    in_sample("batch axis", npy("clip", shape=(1, 14)), "array header", "clip is uint16 (1, 14)"),
    in_sample("no array", at("clip", "npy", b"no numpy"), "array header", "clip is not a .npy blob"),
    in_sample("NaN", values("t5", NAN, 251), "NaN or infinite", "t5 holds NaN or infinite values"),
    in_sample("negative NaN", values("clip", NAN | 0x8000, 13), "NaN or infinite", "clip holds NaN"),
    in_sample("infinity", values("mean", INF), "NaN or infinite", "mean holds NaN or infinite"),
    in_sample("minus infinity", values("logvar", MINUS_INF, 99), "NaN or infinite", "logvar holds NaN"),
    *(in_sample(f"{name} of zeros", full(name, 0), "zeros", f"{name} is all zeros") for name in MEMBERS),
    in_sample("negative zeros", full("mean", 0x8000), "zeros", "mean is all zeros"),
    in_sample("random bits", values("t5", GARBAGE), "range", "t5 reaches from"),
    in_sample("random signed bits", values("t5", GARBAGE | 0x8000), "range", "t5 reaches from -3"),
    in_sample("a flipped exponent", values("t5", 0x7E80, 7), "range", "8.51e+37, want values from -1000 to 1000"),
    in_sample("a huge clip", values("clip", 0x4680), "range", "clip reaches from"),
    in_sample("a huge mean", values("mean", 0xC680), "range", "mean reaches from -1.64e+04 to"),
    in_sample("a variance of e^30", values("logvar", 0x41F0), "range", "to 30, want values from -100 to 20"),
    in_sample("a variance of e^-200", values("logvar", 0xC348), "range", "logvar reaches from -200 to"),
]

TEXTS = [
    in_sample("a list", text("[]"), "json", "its json is no JSON object"),
    in_sample("nothing", text(""), "json", "no JSON object"),
    in_sample("half a json", text('{"key": '), "json", "no JSON object"),
    in_sample("deep", text("[" * 500), "json", "no JSON object"),
    in_sample("not UTF-8", text('{"key": "\udcff"}'), "json", "no JSON object"),
    in_sample("another key", say(key="train_00000002"), "json", "its json has the key 'train_00000002'"),
    in_sample("no key", say(key=...), "json", "its json has the key None"),
    in_sample("key of another type", say(key=1), "json", "its json has the key 1"),
    in_sample("caption of another type", say(caption=["words"]), "json", "caption ['words'], want text"),
    in_sample("timestep in train", say(timestep=3), "timestep", "has timestep 3, want none"),
    *(
        in_sample(
            f"timestep {value!r}",
            say(timestep=value),
            "timestep",
            f"has timestep {value!r}, want 0 to 7",
            shard=VAL_0,
            where=f"{VAL_0}, sample 1, key val_00000001: ",
            alone=False,
        )
        for value in (8, -1, "3", 3.0, True, [3], None, 10**30)
    ),
    *(
        Damage(f"timestep {value!r} first", say(0, timestep=value), "timestep", "want none", "sample 0", fast=True)
        for value in (0, "0", 8, False)
    ),
]

SETS = [
    in_set(
        "unbalanced", lambda r: say(timestep=7)(r / VAL_0), "timestep counts", "come 2, 1, 2, 2, 2, 2, 2, 3", "val: "
    ),
    in_set(
        "wrong count",
        lambda r: None,
        "sample count",
        "holds 8 samples, want 9",
        "train: ",
        args=("--expect-samples", "9"),
        shard="train",
        fast=True,
    ),
    in_set(
        "key twice",
        copy_sample(TRAIN_1, TRAIN_0),
        "repeated key",
        "so is the key of",
        f"{TRAIN_1}, sample 0, key",
        alone=False,
    ),
    in_set(
        "key in both splits",
        copy_sample(TRAIN_1, VAL_0, timestep=1),
        "repeated key",
        "so is the key of",
        f"{VAL_0}, sample 1, key train_00000003: ",
        alone=False,
    ),
    in_set(
        "sample under another key",
        copy_sample(TRAIN_1, TRAIN_0, "other"),
        "repeated sample",
        "its four members are those of",
        f"{TRAIN_1}, sample 0, key train_00000003: ",
    ),
    in_set(
        "validation sample in train",
        copy_sample(VAL_0, TRAIN_0, KEY, None),
        "repeated sample",
        f"its four members are those of {{root}}/{ONE[:-2]}",
        f"{VAL_0}, sample 0, key val_00000000: ",
    ),
]

EMPTY = [
    in_set(
        f"{name}: {words}",
        plant,
        "empty encoding" if words != "no such" else "missing",
        words,
        "empty_encodings",
        fast=True,
    )
    for name, plant, words in (
        ("no folder", lambda r: shutil.rmtree(r / "empty_encodings"), "no such"),
        ("no file", lambda r: (r / "empty_encodings/clip_empty.npy").unlink(), "No such file"),
        ("no array", lambda r: (r / "empty_encodings/t5_empty.npy").write_text("text"), "t5_empty.npy"),
        ("shape", save_empty("t5", np.ones((1, 28, 9), np.float16)), "float16 (1, 28, 9)"),
        ("dtype", save_empty("clip", np.ones(14)), "float64 (14,)"),
        ("NaN", save_empty("t5", np.full((9, 28), np.nan, np.float32)), "holds NaN or infinite"),
        ("zeros", save_empty("t5", np.zeros((9, 28), np.float32)), "t5 is all zeros"),
        ("range", save_empty("clip", np.full(14, 1e9, np.float32)), "clip reaches from 0 to 9.98e+08"),
    )
]
ALL = [damage for damage in (*FILES, *NAMES, *MEMBERSHIP, *HEADERS, *ARRAYS, *TEXTS, *SETS, *EMPTY) if damage]


def has_line(result: Result, damage: Damage, root: Path) -> bool:
    words = damage.words.replace("{root}", str(root))
    return any(words in line and damage.where in line for line in result.lines)


def plant(damage: Damage, root: Path) -> Path:
    """Do the damage; returns the folder to check."""
    inside = damage.shard.endswith(".tar")
    damage.plant(root / damage.shard if inside else root)
    return root if inside else root / damage.shard


def identify(damage: Damage) -> str:
    return ascii(damage.name)[1:-1]


@pytest.mark.parametrize("damage", ALL, ids=identify)
def test_damage_is_found_named_and_counted_and_nothing_is_written(damage, root, run):
    folder = plant(damage, root)
    before = snapshot(root.parent)
    result = run(folder, *damage.args)
    assert result.code == 1, result.text
    assert result.text.splitlines()[-1].startswith("FAIL")
    assert has_line(result, damage, root), result.text
    assert damage.kind in result.kinds and (not damage.alone or result.kinds == {damage.kind}), result.text
    assert all(line.isprintable() and str(root) in line for line in result.lines)
    assert snapshot(root.parent) == before


@pytest.mark.parametrize("damage", [damage for damage in ALL if damage.fast], ids=identify)
def test_the_fast_check_finds_what_names_sizes_and_the_headers_at_the_ends_show(damage, root, run):
    folder = plant(damage, root)
    before = snapshot(root.parent)
    result = run(folder, "--fast", *damage.args)
    assert result.code == 1 and damage.kind in result.kinds and has_line(result, damage, root), result.text
    assert snapshot(root.parent) == before


@pytest.mark.parametrize(
    "plant",
    [
        values("t5", NAN),
        at("clip", "tar", b"1", extra=140),
        say(key="other"),
        full("mean", 0),
        tar_field("t5", 156, b"2"),
    ],
)
def test_the_fast_check_reads_nothing_between_the_ends(plant, root, run):
    plant(root / TRAIN_0)
    assert run(root, "--fast").code == 0
    assert run(root).code == 1


# Sets that are as they should be


def test_a_clean_set_passes_and_is_summed_up_on_one_screen(root, run):
    result = run(root)
    assert result.code == 0 and not result.lines
    text = result.text.splitlines()
    assert len(text) == 6
    assert text[1].split() == ["train", "3", "8", f"{8 * STRIDE + 3 * END_BYTES:,}", *"00000000", "8"]
    assert text[2].split() == ["val", "6", "16", f"{16 * STRIDE + 6 * END_BYTES:,}", *"22222222", "0"]
    assert text[3:5] == ["problems: none", "warnings: none"] and re.match(r"PASS in \d+\.\d s, [\d,]+ MB/s", text[5])


@pytest.mark.parametrize("count", [1, 2, 8, 9, 24])
@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["narrow", "wide"])
def test_sets_of_any_size_pass(count, sizes, tmp_path, run):
    model = replace(config_file.load(MICRO).model, **sizes)
    (tmp_path / "sizes.toml").write_text(
        "".join(f"model.{key} = {list(n) if isinstance(n, tuple) else n}\n" for key, n in vars(model).items())
    )
    write_set(tmp_path / "set", shards.layout(model), count, 8 * count)
    for more in ((), ("--fast",)):
        result = run(tmp_path / "set", "--config", str(tmp_path / "sizes.toml"), *more)
        assert result.code == 0 and not result.lines, result.text


def test_the_shapes_set_passes_and_its_repetitions_are_told(shapes_dir, run):
    result = run(shapes_dir, "--config", str(MICRO), "--manifest", "none")
    assert result.code == 0, result.text
    assert result.counts("warnings")["repeated t5"] > 0 and result.counts("warnings")["uneven timesteps"] == 1


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_plain_tarfile_writes_passes_where_the_reader_takes_it(form, root, run):
    for path in root.rglob("*.tar"):
        stream = io.BytesIO()
        with tarfile.open(path) as old, tarfile.open(fileobj=stream, mode="w", format=form) as new:
            for info in old:
                new.addfile(info, old.extractfile(info))
        path.write_bytes(stream.getvalue())
        assert path.stat().st_size % RECORD == 0
    assert len(ShardSet(root / "train", LAYOUT)) == TRAIN
    for more in ((), ("--fast",)):
        assert run(root, *more).code == 0


def test_the_names_that_nvidias_converter_gives_pass(root, run):
    """Members by running number in each split; the source's key in the json, which in train has no timestep."""
    for split in ("train", "val"):
        for path in (root / split).glob("*.tar"):

            def change(members: list[Member], split: str = split) -> list[Member]:
                renamed = []
                for info, content in members:
                    key, _, kind = info.name.partition(".")
                    if kind == "json":
                        timestep = json.loads(content)["timestep"]
                        found = {"key": f"source of {key}"} | ({} if timestep is None else {"timestep": timestep})
                        content = json.dumps(found).encode()
                    renamed.append(entry(f"{key.removeprefix(split + '_')}.{kind}", content))
                return renamed

            rebuild(change)(path)
    assert run(root).code == 0
    copy_sample(TRAIN_1, TRAIN_0)(root)
    assert "repeated key" in run(root, "--manifest", "none").kinds


@pytest.mark.parametrize("split, folder", [("train", "train"), ("val", "val"), ("any", "train"), ("any", "val")])
def test_a_single_folder_of_shards_is_checked_as_what_its_name_says_or_as_told(split, folder, root, run):
    assert run(root / folder).code == 0
    assert run((root / folder).rename(root / "else")).code == 0
    assert run(root / "else", "--split", split).code == 0
    other = {"train": "val", "val": "train"}[folder]
    assert run(root / "else", "--split", other).kinds >= {"timestep"}


def test_energons_folders_have_the_empty_encodings_beside_them(root, run):
    (root / "empty_encodings").rename(root.parent / "empty_encodings")
    assert run(root).kinds == {"missing"}
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta/split.yaml").write_text("split_parts: {}")
    (root / "train/shard_000000.tar.idx").write_bytes(b"index")
    for more in ((), ("--fast",), ()):
        result = run(root, *more)
        assert result.code == 0 and not result.lines, result.text


def test_a_folder_is_checked_from_within(root, run, monkeypatch):
    monkeypatch.chdir(root / "train")
    assert run(Path()).code == 0
    assert len(Path("manifest.sha256").read_text().splitlines()) == 3
    say(timestep=3)(root / TRAIN_0)
    assert "shard_000000.tar, sample 1, key train_00000001: has timestep 3, want none" in run(Path()).lines


@pytest.mark.parametrize("count, code", [("8", 0), ("any", 0), ("7", 1), ("9", 1)])
def test_the_number_of_samples_is_that_of_the_command_line_else_of_the_config(count, code, root, run, tmp_path, micro):
    for more in ((), ("--fast",)):
        assert run(root / "train", "--expect-samples", count, *more).code == code
        for given, there in (("8", 0), ("9", 1)):
            (tmp_path / "count.toml").write_text(micro.read_text() + f"\ndata.train_count = {given}")
            options = ("--config", str(tmp_path / "count.toml"), *more)
            assert run(root, *options).code == there
            assert run(root / "train", "--expect-samples", count, *options).code == code


def test_flux1_schnells_sizes_are_expected_unless_a_config_says_otherwise(root, capsys):
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    assert verify.run(parser.parse_args([str(root), "--workers", "1"])) == 1
    assert "truncated or foreign" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, low, high", [("t5", -50, 50), ("clip", -60, 60), ("mean", -40, 40), ("logvar", -30, 19)]
)
def test_no_value_that_real_encoders_could_give_is_called_implausible(name, low, high):
    bits = shards.to_bf16_bits(np.linspace(low, high, 1001))
    assert shard_check.implausible(name, bits) is None
    assert shard_check.implausible(name, bits[:1]) is None and shard_check.implausible(name, bits[-1:]) is None


def test_captions_that_come_twice_are_a_warning_with_their_number(root, run):
    with tarfile.open(root / TRAIN_1) as archive:
        caption = [archive.extractfile(info).read() for info in list(archive)[1:3]]
    for kind, content in zip(("t5", "clip"), caption):
        for sample in (1, 2):
            at(kind, "npy", content, sample=sample)(root / TRAIN_0)
    result = run(root)
    assert result.code == 0 and result.counts("warnings") == {"repeated t5": 2, "repeated clip": 2}
    assert "in 2 samples t5 is that of an earlier one" in result.text


def test_timesteps_of_a_number_that_eight_does_not_divide_are_a_warning(root, run):
    (root / "val/shard_000005.tar").unlink()
    result = run(root)
    assert result.code == 0 and result.counts("warnings") == {"uneven timesteps": 1}
    assert "come 2, 2, 2, 2, 2, 2, 2, 1 times" in result.text


def test_a_hundred_problems_are_twenty_lines_and_a_number(tmp_path, micro, run):
    shard_writer.write(tmp_path / "set", samples(100, 0, True), "some", 60)
    result = run(tmp_path / "set", "--split", "train")
    assert result.counts("problems") == {"timestep": 100}
    assert len(result.lines) == 21 and result.lines[-1] == "... and 80 more of this kind: timestep"
    assert result.lines[0].endswith("shard_000000.tar, sample 0, key some_00000000: has timestep 0, want none")


def test_all_damage_is_told_not_only_the_first(root, run):
    values("t5", NAN)(root / TRAIN_0)
    full("clip", 0)(root / TRAIN_0)
    npy("mean", descr="<f2")(root / TRAIN_1)
    say(timestep=9)(root / VAL_0)
    (root / "val/shard_000002.tar").write_bytes(b"")
    assert run(root).kinds >= {"NaN or infinite", "zeros", "array header", "timestep", "no sample"}


# The manifest


def test_the_first_pass_leaves_a_manifest_of_all_files_that_sha256sum_takes(root, run):
    (root / "train/index.txt").write_text("shard_000000.tar\n")
    before = snapshot(root.parent)
    assert run(root).code == 0
    after = snapshot(root.parent)
    written = after.pop("set/manifest.sha256")[2].decode()
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in after.keys() - {"set"})
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "manifest.sha256"]
    want = {f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root)}" for path in files}
    assert set(written.splitlines()) == want and len(want) == 12
    process = subprocess.run(["sha256sum", "--strict", "-c", "manifest.sha256"], cwd=root, capture_output=True)
    assert process.returncode == 0, process.stderr


def test_later_passes_compare_with_the_manifest_and_leave_it_alone(root, run):
    run(root)
    before = snapshot(root.parent)
    for mode in ("write", "check", "none"):
        for more in ((), ("--fast",)):
            assert run(root, "--manifest", mode, *more).code == 0
    assert snapshot(root.parent) == before


@pytest.mark.parametrize("args", [("--fast",), ("--manifest", "none"), ("--manifest", "none", "--fast")])
def test_no_manifest_is_written_by_a_fast_check_or_where_none_is_wanted(args, root, run):
    before = snapshot(root.parent)
    assert run(root, *args).code == 0
    assert snapshot(root.parent) == before


def test_a_manifest_that_must_be_there_and_is_not_is_a_problem(root, run):
    before = snapshot(root.parent)
    for more in ((), ("--fast",)):
        result = run(root, "--manifest", "check", *more)
        assert result.code == 1 and "manifest.sha256: there is no such file" in result.text
    assert snapshot(root.parent) == before


def test_a_manifest_that_cannot_be_written_is_a_warning(root, run):
    (root / ".manifest.sha256.partial").mkdir()
    result = run(root)
    assert result.code == 0 and result.counts("warnings") == {"no manifest": 1}
    assert not (root / "manifest.sha256").exists()


def edit(change: Callable[[str], str]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        path = root / "manifest.sha256"
        path.write_text(change(path.read_text()), encoding="utf-8", errors="surrogateescape")

    return plant


FLIP = values("mean", 0x3F80, 5)  # to 1.0, which nothing but the manifest tells
LISTED = [
    in_set("payload", lambda r: FLIP(r / TRAIN_0), "manifest", "has changed", TRAIN_0),
    in_set("padding", lambda r: at("t5", "payload", b"x", 600)(r / TRAIN_0), "manifest", "has changed", TRAIN_0),
    in_set("owner", lambda r: tar_field("t5", 108, b"0000777\0")(r / TRAIN_0), "manifest", "has changed", TRAIN_0),
    in_set("swapped samples", swap_samples, "manifest", "has changed", TRAIN_1),
    in_set(
        "swapped shards",
        lambda r: [move(a, b)(r) for a, b in ((TRAIN_0, "x"), (TRAIN_1, TRAIN_0), ("x", TRAIN_1))],
        "manifest",
        "has changed",
        TRAIN_1,
    ),
    in_set("last shard gone", lambda r: (r / TRAIN_2).unlink(), "manifest", "is missing", TRAIN_2, fast=True),
    in_set(
        "one more shard",
        lambda r: shutil.copy(r / TRAIN_1, r / "train/shard_000003.tar"),
        "manifest",
        "is not in manifest.sha256",
        "train/shard_000003.tar",
        alone=False,
        fast=True,
    ),
    in_set(
        "empty encoding",
        save_empty("t5", np.full((9, 28), 2, np.float16)),
        "manifest",
        "has changed",
        "empty_encodings/t5_empty.npy",
    ),
    in_set("digest", edit(lambda t: "0" * 64 + t[64:]), "manifest", "has changed", "clip_empty.npy"),
    in_set("line gone", edit(lambda t: t.replace("  train/shard_000001", "  x")), "manifest", "is not in", TRAIN_1),
    in_set("rubbish", edit(lambda t: t + "rubbish\n"), "manifest", "is none of sha256sum's", "line 12", fast=True),
    in_set(
        "short digest", edit(lambda t: t[1:]), "manifest", "is none of sha256sum's", "line 1:", alone=False, fast=True
    ),
    in_set(
        "a name twice", edit(lambda t: t + t.splitlines()[0]), "manifest", "names a file again", "line 12", fast=True
    ),
    in_set("a file elsewhere", edit(lambda t: t + f"{'0' * 64}  ../beside.txt\n"), "manifest", "is missing", "beside"),
    in_set("not UTF-8", edit(lambda t: t + "\udcff\n"), "manifest", "is none of sha256sum's", "line 12", fast=True),
    in_set("emptied", edit(lambda t: ""), "manifest", "is not in manifest", TRAIN_0, fast=True),
]


@pytest.mark.parametrize("damage", LISTED, ids=identify)
def test_what_differs_from_the_manifest_is_found(damage, root, run):
    assert run(root).code == 0
    damage.plant(root)
    before = snapshot(root.parent)
    for more in ((), ("--fast",)) if damage.fast else ((),):
        result = run(root, *more)
        assert result.code == 1 and has_line(result, damage, root), result.text
        assert damage.kind in result.kinds and (not damage.alone or result.kinds == {damage.kind}), result.text
    assert snapshot(root.parent) == before


def test_a_new_file_that_is_no_shard_is_a_warning(root, run):
    run(root)
    (root / "train/index.txt").write_text("notes")
    result = run(root)
    assert result.code == 0 and result.counts("warnings") == {"new file": 1} and "train/index.txt" in result.text


@pytest.mark.parametrize("change", [lambda t: t.replace("  ", " *"), lambda t: t.replace("  ", "  ./"), str.upper])
def test_manifests_that_others_wrote_are_taken(change, root, run):
    run(root)
    path = root / "manifest.sha256"
    lines = [change(line[:66]) + line[66:] if change is str.upper else change(line) for line in path.open()]
    path.write_text("".join(lines))
    assert run(root, "--manifest", "check").code == 0


# What cannot be checked


@pytest.mark.parametrize(
    "folder, args, words",
    [
        ("none", (), "is no folder"),
        ("beside.txt", (), "is no folder"),
        ("set", ("--split", "val"), "is about one folder of shards"),
        ("set", ("--expect-samples", "8"), "is about one folder of shards"),
        ("set", ("--config", "none.toml"), "none.toml"),
    ],
)
def test_a_folder_that_cannot_be_checked_is_refused(folder, args, words, root, run):
    before = snapshot(root.parent)
    with pytest.raises(Refusal, match=words) as refused:
        run(root.parent / folder, *args)
    assert refused.value.exit_code == 2 and snapshot(root.parent) == before


@pytest.mark.parametrize(
    "args", [("--workers", "0"), ("--expect-samples", "-1"), ("--split", "x"), ("--manifest", "x"), ()]
)
def test_a_command_line_that_makes_no_sense_is_refused(args, capsys):
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["folder", *args] if args else [])


def test_a_folder_of_nothing_fails(tmp_path, run):
    result = run(tmp_path)
    assert result.code == 1 and result.kinds == {"missing"} and "holds no *.tar shard" in result.text


# Any damage at all


def test_whatever_passes_is_read_without_complaint(root):
    """Changed bytes, stretches and lengths: the check never crashes, and what it lets pass the reader takes."""
    shard, rng, passed, failed = root / TRAIN_0, random.Random(0), 0, 0
    whole = shard.read_bytes()
    heads = [position(kind, "tar", i) + k for i in range(3) for kind in KINDS for k in range(BLOCK + NPY_HEADER)]
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            place = rng.choice(heads) if rng.random() < 0.8 else rng.randrange(len(whole))
            source = rng.choice((b"0123456789", b"'\"(){}[]:,\\ \n\0", bytes(range(256)), b"\0"))
            stretch = bytes(rng.choices(source, k=rng.choice((1, 1, 2, 12, 512))))
            content[place : place + len(stretch)] = stretch
        if rng.random() < 0.2:
            del content[rng.randrange(len(content)) :]
        shard.write_bytes(content)
        with warnings.catch_warnings(action="error"):
            found = shard_check.check(Job(shard, "train", LAYOUT, False), lambda count: None)
        assert found.sha256 == hashlib.sha256(content).hexdigest()
        shard_check.check(Job(shard, "train", LAYOUT, True), lambda count: None)
        passed, failed = passed + (not found.problems.counts), failed + bool(found.problems.counts)
        if not found.problems.counts:
            read_all(shard.parent, found.samples)
    assert passed > 50 and failed > 200


def read_all(folder: Path, count: int) -> None:
    """Read the first samples of a folder as the trainer does."""
    found = ShardSet(folder, LAYOUT)
    found.open()
    rows = {name: np.empty(shape, np.uint16) for name, shape in LAYOUT.shapes.items()}
    for index in range(count):
        found.read(index, rows)
    for descriptor in found.descriptors:
        os.close(descriptor)


def test_no_length_of_a_truncated_shard_passes_for_the_whole(root):
    shard = root / TRAIN_0
    whole = shard.read_bytes()
    starts = [position(kind, "tar", i) for i in range(3) for kind in KINDS]
    near = {start + k for start in starts for k in (-1, 0, 1, BLOCK, BLOCK + NPY_HEADER + 9)}
    lengths = {*near, *range(0, len(whole), 509), *range(len(whole) - END_BYTES, len(whole), 101), len(whole) - 1} - {
        -1
    }
    for length in sorted(lengths):
        shard.write_bytes(whole[:length])
        for fast in (False, True):
            assert shard_check.check(Job(shard, "train", LAYOUT, fast), lambda count: None).problems.counts, length


# Reading


def test_every_byte_is_read_once_and_memory_does_not_grow_with_the_shard(tmp_path):
    layout, peaks = Layout({**LAYOUT.shapes, "t5": (64, 1024)}), []
    for count in (4, 64):
        shard_writer.write(tmp_path / str(count), samples(count, 0, False, layout), "some")
        path, read = tmp_path / str(count) / "shard_000000.tar", []
        tracemalloc.start()
        report = shard_check.check(Job(path, "train", layout, False), read.append)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(read) == path.stat().st_size and not report.problems.counts
    assert max(peaks) < 2 * layout.stride + 60 * 1024


def test_the_fast_check_reads_kilobytes(tmp_path, monkeypatch):
    layout, read = Layout({**LAYOUT.shapes, "t5": (64, 1024)}), []
    shard_writer.write(tmp_path / "set", samples(20, 0, False, layout), "some")
    seen = shard_check._Check.read, shard_check._Check.peek
    monkeypatch.setattr(shard_check._Check, "read", lambda self, size: (read.append(size), seen[0](self, size))[1])
    monkeypatch.setattr(shard_check._Check, "peek", lambda *args: (read.append(args[1]), seen[1](*args))[1])
    report = shard_check.check(Job(tmp_path / "set/shard_000000.tar", "train", layout, True), lambda count: None)
    assert report.samples == 20 and not report.problems.counts and sum(read) < 25_000


def test_several_processes_find_what_one_finds(root, run):
    values("t5", NAN)(root / TRAIN_0)
    say(timestep=9)(root / VAL_1)
    (root / TRAIN_1).unlink()
    one, two = run(root, workers=1), run(root, workers=2)
    assert two.code == 1 and one.text.splitlines()[:-1] == two.text.splitlines()[:-1]


COMMAND = (
    "import argparse, sys; from flux_ref.prepare import verify; parser = argparse.ArgumentParser();"
    " verify.add_arguments(parser); sys.exit(verify.run(parser.parse_args()))"
)


@pytest.fixture
def long_check(root, micro):
    """Checks that take a while, as there are huge files beside the shards; ended with the test."""
    started = []

    def start(workers: int) -> subprocess.Popen:
        for i in range(2):
            with (root / f"huge_{i}").open("wb") as file:
                file.truncate(1 << 40)  # takes no space
        command = [sys.executable, "-c", COMMAND, str(root), "--config", str(micro), "--workers", str(workers)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(readers(process.pid, root)) < workers:
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def readers(parent: int, root: Path) -> list[int]:
    """Which processes, the parent or its children, have a huge file open."""
    found = []
    for process in [parent, *children(parent)]:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:
            continue
        found += [process] * any(link.startswith(f"{root}/huge") for link in links)
    return found


def children(parent: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def gone(processes: list[int]) -> bool:
    """Whether processes end within a while."""
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_all_processes_and_writes_nothing(workers, root, long_check):
    process = long_check(workers)
    before, family = snapshot_names(root.parent), children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped before the end" in out and "Traceback" not in err
    assert gone(family) and snapshot_names(root.parent) == before


def snapshot_names(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def test_no_process_outlives_a_check_that_is_killed(root, long_check):
    process = long_check(2)
    family = children(process.pid)
    process.kill()
    assert len(family) >= 2 and gone(family)


def test_a_process_that_is_killed_is_told(root, long_check):
    process = long_check(2)
    os.kill(readers(process.pid, root)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert "Refusal: a process was killed; if memory ran out, use fewer --workers" in err
