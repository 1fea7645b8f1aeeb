"""Pictures and captions in folders and raw WebDatasets, and how a picture gets the size of the model's pictures.

All of it is data from outside. A sample that cannot be used is rejected with one of a few reasons and never stops a
job. Only the decoders of FORMATS see a picture. No name in an archive leads out of its folder.
"""

import contextlib
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms
from webdataset import tariterators

from flux_ref.errors import Refusal
from flux_ref.formats import braces, outside
from flux_ref.schedule import TIMESTEPS
from tools.prepare import manifest, metadata

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # known by their content, whatever a file's name says
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
TEXTS = (".txt", ".json")
MIN_SIDE = 64  # pixels
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of decompression bombs
PICTURE_BYTES = 2**28  # of a file or a member of an archive
TWINS = "several images for one caption"  # which of them the caption describes is unknown
TEXT_BYTES = 2**20  # of a caption or its JSON
PART = 1024  # files that one rank looks at in one go


class Rejected(Exception):
    """A sample cannot be used. The message is one of a few reasons, so that samples can be counted by reason."""


Entry = tuple[bytes, str, int | None]  # a picture that is not decoded yet, its caption, its timestep if it has one


@dataclass(frozen=True)
class Sample:
    """pixels: (3, H, W) uint8. rejected: why it cannot be used; it then has only a name."""

    name: str
    rejected: str = ""
    pixels: Tensor | None = None
    caption: str = ""
    timestep: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One sample of the input that is not read yet. read: raises Rejected."""

    name: str
    read: Callable[[], Entry]

    def load(self, height: int, width: int) -> Sample:
        """Read and decode it; for the sizes see `pixels`."""
        try:
            content, caption, timestep = self.read()
            return Sample(self.name, "", pixels(content, height, width), caption, timestep)
        except Rejected as error:
            return Sample(self.name, str(error))


Part = Callable[[], Iterator[Candidate]]  # some consecutive candidates; every call gives the same ones
Files = list[list]  # [name, bytes, mtime in ns] of each file; -1 bytes: the file is missing


# From a file to pixels


def pixels(content: bytes, height: int, width: int) -> Tensor:
    """The picture in a file as (3, height, width) uint8; the first frame of an animation. Raises: Rejected."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Rejected("too many pixels")
            if min(image.size) < MIN_SIDE:
                raise Rejected("too small")
            image.load()
            return cover(rgb(image), height, width)
    except Rejected:
        raise
    except Image.DecompressionBombError:
        raise Rejected("too many pixels") from None
    except Image.UnidentifiedImageError:
        raise Rejected("not an image") from None
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


@dataclass(frozen=True)
class Folder:
    """Pictures and their captions; sub-folders too, by name.

    Captions: NAME.txt, or NAME.json with "caption" and perhaps "timestep", beside; or metadata.jsonl or .csv for all.
    """

    root: Path
    listing: Path | None = None  # of all captions
    column: str = ""  # of the captions in it

    def files(self) -> Files:
        names = sorted(path.relative_to(self.root).as_posix() for path in manifest.walk(self.root))
        return [stamp(self.root / name, name) for name in names if "/." not in f"/{name}"]  # none is hidden

    def parts(self, files: Files) -> list[Part]:
        """Raises: Refusal if captions are where they are not looked for, or in two places."""
        texts = {name for name, *_ in files if name.lower().endswith(TEXTS)}
        names = [name for name, *_ in files if name not in texts]
        stems = Counter(_stem(name) for name in names if name.lower().endswith(SUFFIXES))
        if self.listing:
            for beside in (stem + suffix for stem in stems for suffix in TEXTS):
                if beside in texts:
                    raise Refusal(f"{self.root} has captions in {self.listing.name} and in {beside}; keep one kind")
            entries = metadata.entries(self.listing, self.column, names)
        else:
            for path in (self.root / name for name in names):
                if path.name in metadata.NAMES:
                    raise Refusal(f"{path} is not at the top of --input; give {path.parent}")
            entries = [(name, TWINS if stems[_stem(name)] > 1 else "", None) for name in names]
        return [partial(self._part, entries[start : start + PART]) for start in range(0, len(entries), PART)]

    def _part(self, entries: list[metadata.Entry]) -> Iterator[Candidate]:
        for name, reason, caption in entries:
            yield Candidate(name, partial(self._read, self.root / name, reason, caption))

    def _read(self, path: Path, reason: str, caption: object) -> Entry:
        if reason or path.suffix.lower() not in SUFFIXES:
            raise Rejected(reason or "unsupported type")
        if self.listing:
            texts = {"json": json.dumps({"caption": caption})}
        else:
            beside = [path.with_suffix(suffix) for suffix in TEXTS]
            texts = {text.suffix[1:]: _bytes(text, "caption", TEXT_BYTES) for text in beside if text.is_file()}
        described = _described(texts)
        return _bytes(path, "file", PICTURE_BYTES), *described


@dataclass(frozen=True)
class Archives:
    """A raw WebDataset: tars of KEY.jpg, .png or .webp with KEY.txt, or KEY.json with "caption" and perhaps "timestep".

    Samples are named TAR/KEY. Nothing is unpacked, so the names of members lead nowhere.
    """

    paths: list[Path]

    def files(self) -> Files:
        return [stamp(path, str(path)) for path in self.paths]

    def parts(self, files: Files) -> list[Part]:
        return [partial(self._part, path) for path in self.paths]

    def _part(self, path: Path) -> Iterator[Candidate]:
        damages = []

        def note(error: Exception) -> bool:
            damages.append(error)
            return True  # go on with what can be read

        for sample in tariterators.group_by_keys(_members(path, note), handler=note):
            yield Candidate(f"{path}/{sample['__key__']}", partial(self._read, sample))
        if damages:
            yield Candidate(str(path), _lost)

    @staticmethod
    def _read(sample: dict) -> Entry:
        images = [sample[suffix[1:]] for suffix in SUFFIXES if suffix[1:] in sample]
        if len(images) != 1:
            raise Rejected(TWINS if images else "no image of a supported type")
        return images[0], *_described(sample)


def _lost() -> Entry:
    raise Rejected("damaged archive, some of it is lost")


class _Bounded(io.FileIO):
    """A file from which tarfile takes no more at a time than a member may have; headers announce any size."""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= PICTURE_BYTES:
            raise tarfile.ReadError(f"a header announces {size} bytes")
        return super().read(size)


def _members(path: Path, note: Callable[[Exception], object]) -> Iterator[dict]:
    """The pictures and texts of an archive, as webdataset groups them. note: is given what is damaged."""
    try:
        with _Bounded(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                archive.members = []  # of millions
                if not member.isreg() or not member.name.lower().endswith(SUFFIXES + TEXTS):
                    continue
                if member.size > PICTURE_BYTES:
                    note(ValueError(f"{member.name} is too large"))
                    continue
                yield {"fname": member.name, "data": archive.extractfile(member).read(), "__url__": str(path)}
            file.seek(archive.offset)
            end = file.read(2**20)
            if not end or any(end) or file.read(1):  # tarfile ends there without a word
                note(tarfile.ReadError("a damaged header, or members after the end"))
    except Exception as error:  # tarfile raises a dozen kinds
        note(error)


def source(text: str, column: str = "") -> Folder | Archives:
    """What --input names. column: --caption-column, "" if it is not given. Raises: Refusal."""
    path = Path(text)
    want = "want a folder of pictures, or tars such as x-{000..137}.tar"
    try:
        named = [text] if path.exists() else braces.expand([text])
    except ValueError as error:
        raise Refusal(f"--input {text}: {error}; {want}") from None
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [Path(name) for name in named]
    for tar in tars:
        if tar.suffix != ".tar" or not tar.is_file():
            raise Refusal(f"--input: {tar} {'is not a tar' if tar.exists() else 'does not exist'}; {want}")
    listings = [path / name for name in metadata.NAMES if (path / name).exists()]
    if len(several := [*listings, *tars[: len(listings)]]) > 1:
        raise Refusal(f"--input: {several[0]} and {several[1]} both describe pictures; keep one of them")
    if column and not listings:
        raise Refusal(f"--caption-column={column}: --input {text} has no {' or '.join(metadata.NAMES)}")
    return Archives(tars) if tars else Folder(path, next(iter(listings), None), column)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def stamp(path: Path, name: str) -> list:
    """An entry of Files."""
    status = path.stat() if path.is_file() else None
    return [name, status.st_size, status.st_mtime_ns] if status else [name, -1, 0]


def _bytes(path: Path, what: str, most: int) -> bytes:
    """The bytes of a regular file. Raises: Rejected."""
    try:
        return outside.read_bytes(path, what, most)
    except Refusal:
        raise Rejected(f"unreadable {what}") from None


def _described(texts: dict) -> tuple[str, int | None]:
    """(caption, timestep) from the bytes of txt and json files. Raises: Rejected."""
    try:
        content = outside.parse_json(texts.get("json", b"{}"))
        caption = (texts["txt"].decode() if "txt" in texts else content.get("caption") or "").strip()
        caption.encode()
        timestep = content.get("timestep")
    except (ValueError, AttributeError):  # also half of a surrogate pair, or no text
        raise Rejected("unreadable caption") from None
    if not caption:
        raise Rejected("no caption")
    if timestep is not None and not (type(timestep) is int and 0 <= timestep < TIMESTEPS):
        raise Rejected(f"timestep is not 0 to {TIMESTEPS - 1}")
    return caption, timestep
