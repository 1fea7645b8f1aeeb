"""Pictures and captions in folders, tables and raw WebDatasets, and how a picture becomes 256 x 256 pixels.

All of it is data from outside. A sample that cannot be used is rejected with one of a few reasons and never stops a
job. Only the decoders of FORMATS see a picture. No name in a table or an archive leads out of its folder.
"""

import contextlib
import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from braceexpand import braceexpand
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms
from webdataset import tariterators

from flux_ref.errors import Refusal
from flux_ref.schedule import TIMESTEPS

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # known by their content, whatever a file's name says
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of decompression bombs
MAX_BYTES = 2**30  # of a file
PART = 1024  # files that one rank looks at in one go


class Rejected(Exception):
    """A sample cannot be used. The message is one of a few reasons, so that samples can be counted by reason."""


@dataclass(frozen=True)
class Entry:
    """What the input says about one sample. file: a picture that is not decoded yet; the user of it closes it."""

    file: BinaryIO
    caption: str
    timestep: int | None  # None: not said
    id: str = ""


@dataclass(frozen=True)
class Candidate:
    """One sample of the input. read: raises Rejected, OSError."""

    name: str
    read: Callable[[], Entry]


Part = Callable[[], Iterator[Candidate]]  # some consecutive candidates; every call gives the same ones
Files = list[list]  # [name, bytes, mtime in ns] of each file; -1 bytes: the file is missing


# From a file to pixels


def pixels(file: BinaryIO, height: int, width: int, min_side: int) -> Tensor:
    """The picture in a file as (3, height, width) uint8; the first frame of an animation.

    min_side: the least width and height of the picture in the file, in pixels. Raises: Rejected.
    """
    size = file.seek(0, os.SEEK_END)
    if size == 0 or size > MAX_BYTES:
        raise Rejected("too large a file" if size else "empty file")
    file.seek(0)
    try:
        with Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Rejected("too many pixels")
            if min(image.size) < min_side:
                raise Rejected("too small")
            image.load()
            return cover(rgb(image), height, width)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Rejected("too many pixels") from None
    except Image.UnidentifiedImageError:
        raise Rejected("not an image") from None
    except Rejected:
        raise
    except Exception:  # Pillow raises a dozen kinds
        raise Rejected("damaged image") from None


def rgb(image: Image.Image) -> Image.Image:
    """Upright and 8 bits per channel; what is transparent shows white."""
    with contextlib.suppress(Exception):  # Pillow raises a dozen kinds; a picture is as good without its EXIF
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip: its high byte, as Pillow takes of colours
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def cover(image: Image.Image, height: int, width: int) -> Tensor:
    """Resized until it just covers height x width, then cut to its centre: (3, height, width) uint8. Raises: Rejected.

    numerics: Pillow's own resize, in integers, gives the same pixels on every machine.
    """
    columns, rows = image.size
    is_slim = columns * height < rows * width
    size = [rows * width // columns, width] if is_slim else [height, columns * height // rows]
    if size[0] * size[1] > MAX_PIXELS:
        raise Rejected("too long and narrow")
    image = transforms.resize(image, size, InterpolationMode.BICUBIC, antialias=True)
    return transforms.pil_to_tensor(transforms.center_crop(image, [height, width]))


# Inputs. Each has files(): what it consists of, and parts(files): its samples, always in the same order


class Folder:
    """Pictures with NAME.txt, or NAME.json with "caption" and perhaps "timestep", beside; sub-folders too, by name."""

    def __init__(self, root: Path):
        self.root = root

    def files(self) -> Files:
        names = []
        for folder, folders, found in os.walk(self.root, onerror=_fail):
            found += [name for name in folders if Path(folder, name).is_symlink()]  # not followed, so rejected
            folders[:] = [name for name in folders if not name.startswith(".")]
            names += [os.path.relpath(Path(folder, name), self.root) for name in found if not name.startswith(".")]
        return [_stat(self.root / name, name) for name in sorted(names)]

    def parts(self, files: Files) -> list[Part]:
        names = [name for name, *_ in files if not name.lower().endswith((".txt", ".json"))]
        return [partial(self._part, names[start : start + PART]) for start in range(0, len(names), PART)]

    def _part(self, names: list[str]) -> Iterator[Candidate]:
        return (Candidate(name, partial(self._read, self.root / name)) for name in names)

    @staticmethod
    def _read(path: Path) -> Entry:
        if path.suffix.lower() not in SUFFIXES:
            raise Rejected("unsupported type")
        beside = {kind: path.with_suffix(f".{kind}") for kind in ("txt", "json")}
        described = _described({kind: text.read_bytes() for kind, text in beside.items() if text.is_file()})
        return Entry(_open(path), *described)


class Table:
    """A .tsv file as csv writes it, with the columns image (a path within the table's folder) and caption, perhaps id
    (for the key) and timestep. The samples come in the order of the lines."""

    def __init__(self, path: Path):
        """Raises: Refusal."""
        self.path, self.root = path, path.resolve().parent
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, dialect="excel-tab", strict=True)
                header, self.rows = reader.fieldnames or [], list(reader)
        except (OSError, csv.Error, ValueError) as error:
            raise Refusal(f"table {path}: {error}; want UTF-8 text with tabs between columns") from None
        if not {"image", "caption"} <= set(header) <= {"image", "caption", "id", "timestep"} or len(set(header)) < len(
            header
        ):
            raise Refusal(f"table {path} has the columns {header}; want image, caption and perhaps id, timestep")
        self.uses = Counter(row.get("id") for row in self.rows)

    def files(self) -> Files:
        listed = {}
        for name in {row["image"] or "": None for row in self.rows}:
            try:
                listed[name] = _stat(self._inside(name), name)
            except Rejected:
                listed[name] = [name, -1, 0]
        return [_stat(self.path, str(self.path)), *listed.values()]

    def parts(self, files: Files) -> list[Part]:
        return [partial(self._part, self.rows[start : start + PART]) for start in range(0, len(self.rows), PART)]

    def _part(self, rows: list[dict]) -> Iterator[Candidate]:
        return (Candidate(row["image"] or "", partial(self._read, row)) for row in rows)

    def _read(self, row: dict) -> Entry:
        if None in row or None in row.values():
            raise Rejected("another number of columns")
        key, said = row.get("id"), row.get("timestep") or None
        if key is not None and (self.uses[key] > 1 or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key)):
            raise Rejected("id is there twice or not of letters, digits, - and _")
        timestep = int(said) if said and re.fullmatch("[0-9]", said) else said
        described = _checked(row["caption"], timestep)
        return Entry(_open(self._inside(row["image"])), *described, key or "")

    def _inside(self, name: str) -> Path:
        try:
            path = (self.root / name).resolve()
        except (OSError, ValueError, RuntimeError):  # a null byte, a loop of links
            raise Rejected("missing file") from None
        if not path.is_relative_to(self.root):
            raise Rejected("outside the folder of the table")
        return path


class Archives:
    """A raw WebDataset: tars of KEY.jpg, .png or .webp with KEY.txt, or KEY.json with "caption" and perhaps "timestep".

    Samples are named TAR/KEY. Nothing is unpacked, so the names of members lead nowhere.
    """

    def __init__(self, paths: list[Path]):
        self.paths = paths

    def files(self) -> Files:
        return [_stat(path, str(path)) for path in self.paths]

    def parts(self, files: Files) -> list[Part]:
        return [partial(self._part, path) for path in self.paths]

    def _part(self, path: Path) -> Iterator[Candidate]:
        damages = []

        def note(error: Exception) -> bool:
            damages.append(error)
            return True  # go on with what can be read

        def wanted(name: str) -> bool:
            return name.lower().endswith((*SUFFIXES, ".txt", ".json"))

        with path.open("rb") as stream:
            members = tariterators.tar_file_expander([{"url": str(path), "stream": stream}], note, wanted)
            for sample in tariterators.group_by_keys(members, handler=note):
                yield Candidate(f"{path}/{sample['__key__']}", partial(self._read, sample))
        if damages:
            yield Candidate(str(path), self._damaged)

    @staticmethod
    def _read(sample: dict) -> Entry:
        images = [sample[suffix[1:]] for suffix in SUFFIXES if suffix[1:] in sample]
        if not images:
            raise Rejected("no image of a supported type")
        return Entry(io.BytesIO(images[0]), *_described(sample))

    @staticmethod
    def _damaged() -> Entry:
        raise Rejected("damaged archive, some of it is lost")


Source = Folder | Table | Archives


def source(text: str) -> Source:
    """What --input names. Raises: Refusal."""
    path = Path(text)
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
        return Archives(tars) if tars else Folder(path)
    if path.suffix == ".tsv":
        return Table(path)
    paths = [path] if path.is_file() else [Path(name) for name in braceexpand(text)]
    for path in paths:
        if path.suffix != ".tar" or not path.is_file():
            raise Refusal(f"--input: {path} is no file; want a folder, a .tsv table or tars such as x-{{000..137}}.tar")
    return Archives(paths)


def _fail(error: OSError) -> None:
    raise error  # os.walk would pass over a folder that it cannot read


def _stat(path: Path, name: str) -> list:
    status = path.stat() if path.is_file() else None
    return [name, status.st_size, status.st_mtime_ns] if status else [name, -1, 0]


def _open(path: Path) -> BinaryIO:
    if not path.is_file():  # a pipe, for one, would never end
        raise Rejected("missing file")
    return path.open("rb")


def _described(texts: dict) -> tuple[str, int | None]:
    """(caption, timestep) from the bytes of txt and json files. Raises: Rejected."""
    try:
        content = json.loads(texts.get("json", b"{}"))
        caption = texts["txt"].decode() if "txt" in texts else content.get("caption")
        return _checked(caption, content.get("timestep"))
    except (ValueError, AttributeError, RecursionError):  # also half of a surrogate pair, or no text
        raise Rejected("unreadable caption") from None


def _checked(caption: object, timestep: object) -> tuple[str, int | None]:
    """Raises: Rejected; ValueError or AttributeError if the caption is no text."""
    if caption is None:
        raise Rejected("no caption")
    caption.encode()
    if not caption.strip():
        raise Rejected("empty caption")
    if timestep is not None and not (type(timestep) is int and 0 <= timestep < TIMESTEPS):
        raise Rejected(f"timestep is not 0 to {TIMESTEPS - 1}")
    return caption.strip(), timestep
