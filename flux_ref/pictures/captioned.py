"""Pictures and captions of people, in folders.

Each picture that is found is a sample, or is rejected with a reason; none vanishes. Hidden names are not read. Only the
decoders of FORMATS see a picture.
"""

import contextlib
import csv
import io
import json
import os
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from flux_ref.cli import Refusal, count_progress, shown
from flux_ref.files import decode, json_object_or_empty, read_bytes, read_text, reraise

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # known by their content, whatever a file's name says
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
TEXTS = (".txt", ".caption", ".json")  # the first that is there counts; kohya's scripts write .caption
LISTINGS = ("metadata.jsonl", "metadata.csv")  # as Hugging Face's imagefolder has them
FILE_NAME = "file_name"  # a column: the path in the folder
MIN_SIDE = 64  # pixels
SRGB = ImageCms.createProfile("sRGB")
Content = bytes | Path  # of a file: what it holds, or where it is


class Rejected(Exception):
    """A picture cannot be used. The message is one of a few reasons, so that pictures can be counted by reason."""


@dataclass(frozen=True)
class Picture:
    """What may become a sample. rejected: why it cannot. texts: the files of TEXTS that describe it, by suffix."""

    name: str
    rejected: str = ""
    content: Content = b""
    texts: dict[str, Content] = field(default_factory=dict)

    def load(self, height: int, width: int) -> tuple[Tensor, str]:
        """(pixels, caption); for the sizes see `pixels`. Raises: Rejected."""
        caption = self.caption()
        return pixels(_bytes(self.content, "file"), height, width), caption

    def caption(self) -> str:
        """What the .txt or .caption says, or else the "caption" of the .json. Raises: Rejected."""
        if self.rejected:
            raise Rejected(self.rejected)
        suffix = next((suffix for suffix in TEXTS if suffix in self.texts), ".json")
        text = _bytes(self.texts.get(suffix, b"{}"), "caption")
        try:
            caption = json.loads(text).get("caption") or "" if suffix == ".json" else decode(text)
            # JSON may hold NULs and halves of surrogate pairs, which are ValueErrors.
            caption = decode(caption.encode()).strip()
        except (ValueError, AttributeError, RecursionError):
            raise Rejected("unreadable caption") from None
        if not caption:
            raise Rejected("no caption")
        return caption


def _bytes(content: Content, what: str) -> bytes:
    """What a regular file holds. Raises: Rejected."""
    if isinstance(content, bytes):
        return content
    try:
        return read_bytes(content)
    except (Refusal, OSError):
        raise Rejected(f"unreadable {what}") from None


# From a file to pixels


def pixels(content: bytes, height: int, width: int) -> Tensor:
    """The picture in a file as (3, height, width) uint8; the first frame of an animation. Raises: Rejected.

    It is resized until it just covers height x width, then cut to its centre.
    numerics: Pillow's own resize, in integers, gives the same pixels on every machine.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if min(image.size) < MIN_SIDE:
                raise Rejected("too small")
            image.load()
            return transforms.pil_to_tensor(ImageOps.fit(srgb(image), (width, height), Image.Resampling.BICUBIC))
    except Rejected:
        raise
    except Image.DecompressionBombError:
        raise Rejected("too many pixels") from None
    except Image.UnidentifiedImageError:
        raise Rejected("not a picture") from None
    except Exception:  # Pillow raises a dozen kinds
        raise Rejected("damaged picture") from None


def srgb(image: Image.Image) -> Image.Image:
    """Upright, 8 bits per channel, in sRGB; what is transparent shows white."""
    with contextlib.suppress(Exception):  # Pillow raises a dozen kinds; a picture is as good without its EXIF
        ImageOps.exif_transpose(image, in_place=True)
    profile = image.info.get("icc_profile")
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip: its high byte, as Pillow takes of colours
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    opacity = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if image.mode != "CMYK":
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    with contextlib.suppress(ImageCms.PyCMSError, OSError):  # a profile that is damaged or of another kind of picture
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile or b""))
        image = ImageCms.profileToProfile(image, own, SRGB, outputMode="RGB") or image
    image = image.convert("RGB")
    return Image.composite(image, Image.new("RGB", image.size, "white"), opacity) if opacity else image


# Files of one key


def grouped(key: str, files: list[Picture]) -> Iterator[Picture]:
    """Each file that is no text, of those whose names begin with one key."""
    suffixes = [file.name.removeprefix(key).lower() for file in files]
    texts = {suffix: file.content for suffix, file in zip(suffixes, files) if suffix in TEXTS}
    count = sum(suffix in SUFFIXES for suffix in suffixes)
    for suffix, file in zip(suffixes, files):
        if suffix.endswith(TEXTS):
            continue
        reason = file.rejected
        if not suffix.endswith(SUFFIXES):
            reason = reason or "unsupported type"
        elif suffix not in SUFFIXES:
            reason = "a dot in its name: webdataset ends a key at the first dot"
        elif count > 1:  # which of them the caption describes is unknown
            reason = "several pictures for one caption"
        yield Picture(file.name, reason, file.content, texts)


def list_files(root: Path) -> list[str]:
    """The files below a folder by their paths in it, sorted. Linked folders are read, too; hidden names are not.

    Raises: OSError for a folder that may not be read.
    """
    names = []
    for folder, folders, own in count_progress(os.walk(root, onerror=reraise, followlinks=True)):
        place = Path(folder)
        above = {parent.resolve() for parent in (place, *place.parents)}
        folders[:] = [name for name in folders if name[0] != "." and (place / name).resolve() not in above]
        names += [(place / name).relative_to(root).as_posix() for name in own if name[0] != "."]
    return sorted(names)


def find_pictures(root: Path, names: list[str], column: str) -> list[Picture]:
    """The pictures among the files of a folder. Raises: Refusal.

    names: as `list_files` gives them. column: that of the captions in metadata.jsonl or metadata.csv.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about pictures that are counted anyway
    listings = [name for name in names if os.path.basename(name) in LISTINGS]
    if len(listings) > 1:
        raise Refusal(f"{root} has {' and '.join(listings[:3])}; keep the one that describes the pictures")
    groups: dict[str, list[Picture]] = defaultdict(list)
    for name in names:
        if name not in listings:
            groups[os.path.splitext(name)[0]].append(Picture(name, content=root / name))
    found = [picture for key, files in groups.items() for picture in grouped(key, files)]
    if listings:
        found = _listed(root, listings[0], [picture.name for picture in found], column)
    return found


# Tables of captions


def _listed(root: Path, listing: str, files: list[str], column: str) -> list[Picture]:
    """The rows of metadata.jsonl or metadata.csv, then the files that no row names. Raises: Refusal."""
    own = {_plain(name): name for name in files} | {name: name for name in files}
    rest = dict.fromkeys(files)
    found = []
    for number, row in enumerate(_rows(root / listing, column), 1):
        given = row.get(FILE_NAME)
        if not isinstance(given, str):
            found.append(Picture(f"{listing}, row {number}", "unreadable row"))
            continue
        path = os.path.normpath(os.path.join(os.path.dirname(listing), given))
        name = own.get(path) or own.get(_plain(path))
        if not name:
            found.append(Picture(path, "not in the folder"))
            continue
        rest.pop(name, None)
        reason = "" if name.lower().endswith(SUFFIXES) else "unsupported type"
        caption: dict[str, Content] = {".json": json.dumps({"caption": row.get(column)}).encode()}
        found.append(Picture(name, reason, root / name, caption))
    return found + [Picture(name, f"not in {listing}", root / name) for name in rest]


def _plain(name: str) -> str:
    """What is the same in the names of one file on macOS, Windows and Linux."""
    return unicodedata.normalize("NFC", os.path.normpath(name.replace("\\", "/")))


def _rows(path: Path, column: str) -> list[dict]:
    """The rows of metadata.jsonl or metadata.csv; {} for one that cannot be read. Raises: Refusal."""
    try:
        text = read_text(path)
        if path.suffix == ".jsonl":
            rows = [json_object_or_empty(line) for line in text.split("\n") if line.strip()]
        else:  # strict: an open quote would swallow rows. csv puts the fields that the head does not name under None
            rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
            rows = [{} if None in row else row for row in rows]
    except (ValueError, csv.Error) as error:
        raise Refusal(f"{path}: {error}; mend it") from None
    columns = dict.fromkeys(name for row in rows for name in row)
    for name in (FILE_NAME, column):
        if name not in columns:
            names = ", ".join(map(shown, list(columns)[:20])) or "none"
            remedy = "give each picture a line of its own, in .jsonl one object; or give prepare --caption-column NAME"
            raise Refusal(f"{path}: no row has the column {name!r}; its columns: {names}; {remedy}")
    return rows
