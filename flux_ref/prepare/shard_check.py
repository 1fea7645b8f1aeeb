"""Looking for damage in one file of a data set: every byte is hashed, and every sample of a shard is checked.

A shard has the fixed layout of shards.py, so the samples behind a damaged one are found where they belong. If members
are missing or added and nothing is where it belongs any more, the tar headers are followed instead, to say which.
"""

import hashlib
import json
import os
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flux_ref.formats import shards
from flux_ref.formats.shards import END_BYTES, MEMBERS, Layout
from flux_ref.formats.tar_index import BLOCK, NPY_HEADER, RECORD
from flux_ref.schedule import TIMESTEPS

SHOWN = 20  # lines per kind of problem
# Far beyond real data, yet a few random bf16 are sure to be beyond. T5's outputs lie in -7 .. 3 (black-forest-labs/flux
# issue 472), CLIP's in the tens; a latent's standard deviation is 1 / latents.SCALE = 2.8. Diffusers clamps logvar to
# -30 .. 20, BFL's autoencoder does not.
PLAUSIBLE = {"t5": (-1e3, 1e3), "clip": (-1e3, 1e3), "mean": (-1e3, 1e3), "logvar": (-100.0, 20.0)}
ENDINGS = {"json": ".json"} | {name: f".{name}.bytes" for name in MEMBERS}
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
WITHOUT_DATA = {
    **{tarfile.LNKTYPE: "a hard link", tarfile.SYMTYPE: "a symbolic link", tarfile.CHRTYPE: "a character device"},
    **{tarfile.BLKTYPE: "a block device", tarfile.DIRTYPE: "a directory", tarfile.FIFOTYPE: "a FIFO"},
}
WITH_DATA = {
    **{tarfile.GNUTYPE_SPARSE: "a sparse file", tarfile.GNUTYPE_LONGNAME: "a GNU long name"},
    **{tarfile.GNUTYPE_LONGLINK: "a GNU long link", tarfile.XHDTYPE: "a pax header", tarfile.XGLTYPE: "a pax header"},
}
UNREAD = bytes(8)  # in place of a digest


class Problems:
    """What is wrong, by kind: how many times, and the first lines."""

    def __init__(self):
        self.lines: dict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, where: object, what: str, count: int = 1) -> None:
        line = f"{where}: {what}"
        if not line.isprintable():  # names may hold anything
            line = line.encode("unicode_escape").decode()
        self._merge({kind: [line]}, {kind: count})

    def add_all(self, other: "Problems") -> None:
        self._merge(other.lines, other.counts)

    def _merge(self, lines: dict[str, list[str]], counts: dict[str, int]) -> None:
        for kind in lines:
            self.lines[kind] += lines[kind][: SHOWN - len(self.lines[kind])]
        self.counts.update(counts)


@dataclass(frozen=True)
class Job:
    """A file to look at. split: train, val or any; "" if it is no shard and only its sum is wanted."""

    path: Path
    split: str
    layout: Layout
    fast: bool  # read only the headers of the first and the last sample


@dataclass
class Report:
    """What a file turned out to hold."""

    job: Job
    bytes: int = 0
    samples: int = 0
    sha256: str = ""  # "" if not all was read
    seen: list[tuple[int, str, bytes]] = field(default_factory=list)  # sample, key; digests of key, t5, clip, all four
    timesteps: Counter[int | None] = field(default_factory=Counter)
    problems: Problems = field(default_factory=Problems)


def check(job: Job, advance: Callable[[int], object]) -> Report:
    """Look at one file. advance: told how many bytes were read."""
    report = Report(job)
    try:
        if job.path.is_file():  # a FIFO would wait for ever
            with job.path.open("rb", buffering=0) as file:
                _Check(report, file, advance).run()
        else:
            report.problems.add("unreadable", job.path, "is no file")
    except OSError as error:
        report.problems.add("unreadable", job.path, error.strerror)
    return report


class _Check:
    """The inspection of one file, from front to back. Holds one member at a time."""

    def __init__(self, report: Report, file: BinaryIO, advance: Callable[[int], object]):
        self.report, self.job, self.file, self.advance = report, report.job, file, advance
        layout = self.job.layout
        self.sizes = {"json": BLOCK} | {name: NPY_HEADER + size for name, size in layout.payload_bytes.items()}
        self.npy_headers = {name: shards.npy_header(layout.shapes[name]) for name in MEMBERS}
        self.buffer = memoryview(bytearray(_padded(max(self.sizes.values()))))
        self.size = report.bytes = os.fstat(file.fileno()).st_size
        self.sha256 = None if self.job.fast else hashlib.sha256()
        self.sample = self.key = ""  # where we are, for the lines
        self.astray = False  # whether a member is not where it belongs

    def run(self) -> None:
        if self.job.split:
            self.check_shard()
        if self.sha256:
            with suppress(EOFError):
                while True:  # what the checks have left
                    self.read(len(self.buffer))
            self.report.sha256 = self.sha256.hexdigest()

    def add(self, kind: str, what: str) -> None:
        key = f", key {self.key}" if self.key else ""
        self.report.problems.add(kind, f"{self.job.path}{self.sample}{key}", what)

    def read(self, size: int) -> memoryview:
        """The next bytes, good until the next call. Raises: EOFError."""
        view, done = self.buffer[:size], 0
        while done < size and (count := self.file.readinto(view[done:])):
            done += count
        if self.sha256:
            self.sha256.update(view[:done])
            self.advance(done)
        if done < size:
            raise EOFError
        return view

    def peek(self, size: int, position: int) -> bytes:
        return os.pread(self.file.fileno(), size, position)

    def check_shard(self) -> None:
        start, stride = max(0, self.size - RECORD - END_BYTES), self.job.layout.stride
        used = start + len(self.peek(RECORD + END_BYTES, start).rstrip(b"\0"))
        count = -(-used // stride)
        while count and not any(self.peek(END_BYTES, (count - 1) * stride)):
            count -= 1  # what is behind an end marker is no sample
        gzip = self.peek(2, 0) == b"\x1f\x8b"
        if gzip or not count:
            return self.add("no sample", "is compressed with gzip; unpack it" if gzip else "holds no sample")
        self.report.samples = count
        end = count * stride + END_BYTES
        sizes = (end, -(-end // RECORD) * RECORD)  # what shards.py takes
        if used > end:
            self.add("bytes after the end", f"ends at byte {end}, yet goes on until byte {self.size}")
        elif self.size not in sizes:
            self.add("file size", f"is truncated or foreign: it has {self.size} bytes, want {sizes[0]} or {sizes[1]}")
        last = count - 1 if self.size in sizes else 0
        found = [True]
        with suppress(EOFError):  # the size has told
            for number in sorted({0, last}) if self.job.fast else range(count):
                if not any(found[-2:]):
                    break  # nothing is where it belongs any more
                found.append(self.check_sample(number))
        self.sample = self.key = ""
        if self.astray or self.size not in sizes:
            self.follow_headers(used)

    def check_sample(self, number: int) -> bool:
        """Whether there is a tar header at its beginning."""
        if self.job.fast:
            self.file.seek(number * self.job.layout.stride)
        self.sample, self.key = f", sample {number}", ""
        began, digests = True, []
        for kind in ENDINGS:
            entry, sound = parse_header(bytes(self.read(BLOCK)))
            self.check_header(entry, sound, kind)
            if kind == "json":
                began = entry is not None
                self.check_json(bytes(self.read(BLOCK)), entry)
            else:
                digests.append(self.check_array(kind))
        whole = UNREAD if UNREAD in digests else _digest(b"".join(digests))
        self.report.seen.append((number, self.key, _digest(self.key.encode()) + digests[0] + digests[1] + whole))
        return began

    def check_header(self, entry: tarfile.TarInfo | None, sound: bool, kind: str) -> None:
        if entry and not self.key and entry.name.endswith(ENDINGS[kind]):
            self.key = entry.name.removesuffix(ENDINGS[kind])
        want = f"{self.key or 'KEY'}{ENDINGS[kind]}"
        if entry is None:
            self.astray = True
            return self.add("tar header", f"no tar header where that of {want} belongs")
        self.astray |= entry.name != want or entry.type not in PLAIN
        if not sound:
            self.add("tar header", f"the tar header of {entry.name!r} has a wrong checksum")
        if entry.name != want:
            self.add("members", f"found member {entry.name!r} where {want} belongs")
        if not _is_plain(entry.name):
            self.add("member name", f"{entry.name!r} is no plain file name")
        if entry.size > self.sizes[kind] or (entry.size < self.sizes[kind] and kind != "json"):
            most = "at most " if kind == "json" else ""
            self.add("member size", f"{kind} has {entry.size} bytes, want {most}{self.sizes[kind]}")

    def check_json(self, block: bytes, entry: tarfile.TarInfo | None) -> None:
        try:
            content = json.loads(block[: entry.size] if entry else block.rstrip(b"\0"))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            return self.add("json", "its json is no JSON object")
        key, caption, timestep = content.get("key"), content.get("caption"), content.get("timestep")
        # NVIDIA's converter names members by their running number and keeps the source's key in the json.
        if self.key and key != self.key and not (self.key.isdecimal() and isinstance(key, str)):
            self.add("json", f"its json has the key {key!r}")
        if not isinstance(caption, str | None):
            self.add("json", f"its json has the caption {caption!r}, want text")
        takes_none, takes_number = self.job.split != "val", self.job.split != "train"
        number = type(timestep) is int and 0 <= timestep < TIMESTEPS
        if (timestep is None and takes_none) or (number and takes_number):
            self.report.timesteps[timestep] += 1
        else:
            want = [f"0 to {TIMESTEPS - 1}"] * takes_number + ["none"] * takes_none
            self.add("timestep", f"has timestep {timestep!r}, want {' or '.join(want)}")

    def check_array(self, name: str) -> bytes:
        """The digest of the payload, if there is a payload."""
        size, header = self.job.layout.payload_bytes[name], bytes(self.read(NPY_HEADER))
        fits, rest = header == self.npy_headers[name], _padded(NPY_HEADER + size) - NPY_HEADER
        if not fits:
            self.add("array header", f"{name} {shards._npy_complaint(header, self.job.layout.shapes[name])}")
        if self.job.fast:
            self.file.seek(rest, os.SEEK_CUR)
            return UNREAD
        payload = self.read(rest)[:size]
        if fits and (problem := implausible(name, np.frombuffer(payload, "<u2"))):
            self.add(*problem)
        return _digest(payload) if fits else UNREAD

    def follow_headers(self, end: int) -> None:
        """Say which members are at fault, from the tar headers as far as each leads to the next."""
        position, members = 0, defaultdict(list)
        while position < end:
            entry, sound = parse_header(self.peek(BLOCK, position))
            if not sound:
                if members:
                    members.popitem()  # the rest of it may follow
                break
            position += BLOCK + _padded(entry.size) * (entry.type not in WITHOUT_DATA)
            kind = next((kind for kind, ending in ENDINGS.items() if entry.name.endswith(ending)), "")
            if entry.type not in PLAIN:
                what = (WITHOUT_DATA | WITH_DATA).get(entry.type, f"of type {entry.type!r}")
                self.add("member type", f"{entry.name!r} is {what}; only plain files belong")
            elif kind:
                members[entry.name.removesuffix(ENDINGS[kind])].append(kind)
            else:
                self.add("members" if _is_plain(entry.name) else "member name", f"{entry.name!r} does not belong")
        for key, kinds in members.items():
            lacks = [kind for kind in ENDINGS if kind not in kinds]
            twice = [kind for kind in ENDINGS if kinds.count(kind) > 1]
            for words, some in (("lacks", lacks), ("has twice", twice)):
                if some:
                    self.add("members", f"key {key} {words} {', '.join(some)}")


def parse_header(block: bytes, sound: bool = True) -> tuple[tarfile.TarInfo | None, bool]:
    """A tar header and whether its checksum is right; (None, False) if the block is none."""
    if len(block) < BLOCK or block[257:262] != b"ustar":
        return None, False
    try:
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
    except tarfile.HeaderError:
        if not sound:
            return None, False
        mended = block[:148] + b"%06o\0 " % tarfile.calc_chksums(block)[0] + block[156:]
        return parse_header(mended, sound=False)
    return (entry, sound) if entry.name and entry.size >= 0 else (None, False)


def implausible(name: str, bits: np.ndarray) -> tuple[str, str] | None:
    """What is wrong with the values of a member, as bf16 bits: (kind of problem, what)."""
    # As signed numbers the largest bits are those of the largest value, as unsigned ones those of the lowest.
    high, low = max(0, int(bits.view(np.int16).max())), int(bits.max())
    low = low & 0x7FFF if low & 0x8000 else 0
    if max(high, low) >= 0x7F80:
        return "NaN or infinite", f"{name} holds NaN or infinite values"
    if high == low == 0:
        return "zeros", f"{name} is all zeros"
    top, bottom = shards.from_bf16_bits(np.array([high, low], np.uint16)) * (1, -1) + 0.0  # no -0
    least, most = PLAUSIBLE[name]
    if bottom < least or top > most:
        return "range", f"{name} reaches from {bottom:.3g} to {top:.3g}, want values from {least:g} to {most:g}"
    return None


def _is_plain(name: str) -> bool:
    return name.isprintable() and ".." not in name and not set(name) & set("/\\")


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()[:8]


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
