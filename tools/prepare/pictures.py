"""Pictures and captions of people: in folders, and in tars as img2dataset writes them.

Each picture that is found is a sample, or is rejected with a reason; none vanishes. Only the decoders of FORMATS see a
picture. No name in an archive leads out of it.
"""

import contextlib
import csv
import io
import json
import os
import tarfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms
from webdataset.tariterators import base_plus_ext

from flux_ref.errors import Refusal, shown
from flux_ref.files import OWN_BYTES, decode_text, read_bytes
from flux_ref.schedule import TIMESTEPS

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # known by their content, whatever a file's name says
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
TEXTS = (".txt", ".json")
TARS = (".tar", ".tar.gz", ".tgz")
LISTINGS = ("metadata.jsonl", "metadata.csv")  # as Hugging Face's imagefolder has them
FILE_NAME = "file_name"  # a column: the path in the folder
MIN_SIDE = 64  # pixels
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of decompression bombs
MOST_BYTES = 2**28  # of a picture or a text
SRGB = ImageCms.createProfile("sRGB")
MODES = {"GRAY": "L", "RGB ": "RGB", "CMYK": "CMYK"}  # by the colour space of a profile
TWINS = "several pictures for one caption"  # which of them the caption describes is unknown


class Rejected(Exception):
    """A picture cannot be used. The message is one of a few reasons, so that pictures can be counted by reason."""


class Sample(NamedTuple):
    """pixels: (3, H, W) uint8."""

    name: str
    pixels: Tensor
    caption: str
    timestep: int | None


class Rejection(NamedTuple):
    """Why a picture is no sample."""

    name: str
    reason: str


@dataclass(frozen=True)
class Picture:
    """What may become a sample. rejected: why it cannot.

    content: of its file. texts: of the files .txt and .json that describe it. Either may be the path of the file.
    """

    name: str
    rejected: str = ""
    content: bytes | Path = b""
    texts: Mapping[str, bytes | Path] = field(default_factory=dict)

    def load(self, height: int, width: int) -> Sample | Rejection:
        """Read and decode it; for the sizes see `pixels`."""
        try:
            if self.rejected:
                raise Rejected(self.rejected)
            caption, timestep = described({suffix: _bytes(text, "caption") for suffix, text in self.texts.items()})
            return Sample(self.name, pixels(_bytes(self.content, "file"), height, width), caption, timestep)
        except Rejected as error:
            return Rejection(self.name, str(error))


Part = Callable[[], Iterator[Picture]]  # some consecutive pictures; every call gives the same ones


def _bytes(content: bytes | Path, what: str) -> bytes:
    """What a regular file holds. Raises: Rejected."""
    try:
        return content if isinstance(content, bytes) else read_bytes(content, what, MOST_BYTES)
    except Refusal:
        raise Rejected(f"unreadable {what}") from None


def described(texts: dict[str, bytes]) -> tuple[str, int | None]:
    """(caption, timestep) from a .txt and a .json; the "caption" of the .json comes second. Raises: Rejected."""
    try:
        if not isinstance(content := json.loads(decode_text(texts.get(".json", b"{}"))), dict):
            raise Rejected("unreadable caption")
        caption = (decode_text(texts[".txt"]) if ".txt" in texts else content.get("caption") or "").strip()
        caption.encode()  # half of a surrogate pair, as JSON may hold it, is a ValueError
        timestep = content.get("timestep")
    except (ValueError, AttributeError):
        raise Rejected("unreadable caption") from None
    if not any(c.isprintable() and not c.isspace() for c in caption):  # marks of byte order and joiners show nothing
        raise Rejected("no caption")
    if timestep is not None and not (type(timestep) is int and 0 <= timestep < TIMESTEPS):
        raise Rejected(f"timestep is not 0 to {TIMESTEPS - 1}")
    return caption, timestep


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
            bits = content[24] if image.format == "PNG" else 8
            return cover(srgb(image, bits), height, width)
    except Rejected:
        raise
    except Image.DecompressionBombError:
        raise Rejected("too many pixels") from None
    except Image.UnidentifiedImageError:
        raise Rejected("not a picture") from None
    except Exception:  # Pillow raises a dozen kinds
        raise Rejected("damaged picture") from None


def srgb(image: Image.Image, bits: int) -> Image.Image:
    """Upright, 8 bits per channel, in sRGB; what is transparent shows white. bits: of a channel in the file."""
    with contextlib.suppress(Exception):  # Pillow raises a dozen kinds; a picture is as good without its EXIF
        ImageOps.exif_transpose(image, in_place=True)
    clear, profile = image.info.get("transparency"), image.info.get("icc_profile")
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip: its high byte, as Pillow takes of colours
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if isinstance(clear, int) and image.mode != "P":  # a grey as the file has it; Pillow scales the pixels only
        image.info["transparency"] = clear >> 8 if bits == 16 else clear * 255 // (2**bits - 1)
    elif isinstance(clear, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    spaces = {"L": ("GRAY", "RGB "), "LA": ("GRAY", "RGB "), "CMYK": ("CMYK",)}.get(image.mode, ("RGB ",))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    with contextlib.suppress(ImageCms.PyCMSError, OSError):  # a damaged profile is left aside
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile or b""))
        if (space := own.profile.xcolor_space) in spaces:  # else it is of another kind of picture
            image = ImageCms.profileToProfile(image.convert(MODES[space]), own, SRGB, outputMode="RGB") or image
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


# Folders


def find(root: Path) -> list[str]:
    """The files below a folder by their paths in it, sorted. Linked folders are read, too; hidden names are not."""
    names = []
    for folder, folders, own in os.walk(root, followlinks=True):
        place = Path(folder)
        above = {parent.resolve() for parent in (place, *place.parents)}
        folders[:] = [name for name in folders if name[0] != "." and (place / name).resolve() not in above]
        names += [(place / name).relative_to(root).as_posix() for name in own if name[0] != "."]
    return sorted(names)


def parts_of(root: Path, names: list[str], column: str, size: int) -> list[Part]:
    """The pictures of a folder: a part for each tar, then parts of `size` other pictures. Raises: Refusal.

    names: as `find` gives them. column: that of the captions in metadata.jsonl or metadata.csv.
    """
    tars = [name for name in names if name.lower().endswith(TARS)]
    listings = [name for name in names if name.lower() in LISTINGS]
    if len(listings) > 1:
        raise Refusal(f"{root} has {' and '.join(listings)}; keep the one that describes the pictures")
    texts: dict[str, dict[str, bytes | Path]] = defaultdict(dict)  # by what they describe
    files = []
    for name in names:
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in TEXTS:
            texts[stem][suffix.lower()] = root / name
        elif name not in (*tars, *listings):
            files.append(name)
    if listings:
        found = _listed(root, listings[0], files, column)
    else:
        twins = Counter(os.path.splitext(name)[0] for name in files if name.lower().endswith(SUFFIXES))
        found = []
        for name in files:
            stem = os.path.splitext(name)[0]
            found.append(Picture(name, TWINS if twins[stem] > 1 else _unsupported(name), root / name, texts[stem]))
    blocks = [found[start : start + size] for start in range(0, len(found), size)]
    return [partial(read_tar, root, name) for name in tars] + [partial(iter, block) for block in blocks]


def _unsupported(name: str) -> str:
    return "" if name.lower().endswith(SUFFIXES) else "unsupported type"


def _listed(root: Path, listing: str, files: list[str], column: str) -> list[Picture]:
    """The rows of metadata.jsonl or metadata.csv, then the files that no row names. Raises: Refusal."""
    alike = defaultdict(list)
    for name in files:
        alike[_plain(name)].append(name)
    rest = dict.fromkeys(files)
    found = []
    for number, row in enumerate(_rows(root / listing, column), 1):
        given = row.get(FILE_NAME)
        if not isinstance(given, str):
            found.append(Picture(f"{listing}, row {number}", "unreadable row"))
            continue
        name = os.path.normpath(given)
        names = alike[_plain(name)]
        if name not in names and len(names) == 1:
            (name,) = names
        rest.pop(name, None)
        caption = {".json": json.dumps({"caption": row.get(column)}).encode()}
        found.append(Picture(name, _unsupported(name) if name in names else "not in the folder", root / name, caption))
    return found + [Picture(name, f"not in {listing}") for name in rest]


def _plain(name: str) -> str:
    """What is the same in the names of one file on macOS, Windows and Linux."""
    return unicodedata.normalize("NFC", os.path.normpath(name.replace("\\", "/")))


def _rows(path: Path, column: str) -> list[dict]:
    """The rows of metadata.jsonl or metadata.csv; {} for one that cannot be read. Raises: Refusal."""
    try:
        text = decode_text(read_bytes(path, "captions", OWN_BYTES))
        rows = _json_rows(text) if path.suffix == ".jsonl" else _csv_rows(text)
    except (ValueError, csv.Error) as error:
        raise Refusal(f"{path}: {error}; mend it, and save it as UTF-8") from None
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for absent in (FILE_NAME, column):
        if absent not in columns:
            names = ", ".join(map(shown, columns[:20])) or "none"
            raise Refusal(f"{path} has no column {absent!r}, only {names}; add it or give --caption-column NAME")
    return rows


def _json_rows(text: str) -> list[dict]:
    rows = []
    for line in filter(str.strip, text.split("\n")):
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        rows.append(content if isinstance(content, dict) else {})
    if not any(rows):
        raise ValueError("no line is a JSON object; write each object on one line, as `jq -c` does")
    return rows


def _csv_rows(text: str) -> list[dict]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)  # strict: an open quote would swallow rows
    # A caption with a bare comma has more fields than the head; csv puts them under None.
    return [dict.fromkeys(reader.fieldnames or ()) if None in row else row for row in reader]


# Tars


def read_tar(root: Path, tar: str) -> Iterator[Picture]:
    """The pictures of an archive, named TAR/MEMBER, in webdataset's groups: consecutive members with one key."""
    key = None
    group: list[Member] = []
    try:
        with tarfile.open(root / tar) as archive:
            for member in archive:
                if member.isdir():
                    continue
                own, extension = base_plus_ext(member.name)
                if own != key:
                    yield from _grouped(tar, key, group)
                    key, group = own, []
                group.append(Member(member.name, f".{extension or ''}".lower(), *_content(archive, member)))
            archive.fileobj.seek(archive.offset)
            end = archive.fileobj.read(2**20)
            if not end or any(end) or archive.fileobj.read(1):  # tarfile stops there without a word
                raise tarfile.ReadError
        yield from _grouped(tar, key, group)
    except Exception:  # tarfile and its decompressors raise a dozen kinds
        yield from _grouped(tar, key, group)
        yield Picture(tar, "damaged archive: it has no end, or does not end there")


class Member(NamedTuple):
    """A file in an archive. rejected: why its content cannot be had."""

    name: str
    extension: str
    content: bytes
    rejected: str = ""


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[bytes, str]:
    """(what a picture or text holds, or what it links to; why that cannot be had)."""
    if not member.name.lower().endswith(SUFFIXES + TEXTS):
        return b"", ""
    if member.size > MOST_BYTES:
        return b"", "unreadable file"
    try:
        file = archive.extractfile(member)
    except (KeyError, RecursionError):
        return b"", "a link to nothing in its archive"
    return (file.read(), "") if file else (b"", "unreadable file")


def _grouped(tar: str, key: str | None, group: list[Member]) -> Iterator[Picture]:
    """Each picture of a group. A group without one gives its key, to be rejected."""
    last = {member.extension: member for member in group}  # the later member of a name counts, as for tar
    texts = {suffix: last[suffix].content for suffix in TEXTS if suffix in last}
    pictures = [member for member in group if not _unsupported(member.name)]
    for member in pictures:
        reason = member.rejected
        if member.extension not in SUFFIXES:
            reason = "a dot in its name: webdataset ends a key at the first dot"
        elif last[member.extension] is not member:
            reason = "a later member of the archive has its name"
        elif len(last.keys() & {*SUFFIXES}) > 1:
            reason = TWINS
        yield Picture(f"{tar}/{member.name}", reason, member.content, texts)
    if group and not pictures:
        yield Picture(f"{tar}/{key}", "no picture of a supported type")
