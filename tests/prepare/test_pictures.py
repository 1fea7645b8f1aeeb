"""Pictures and captions of people: each that is found is a sample that looks as people see it, or has its reason."""

import gzip
import io
import json
import os
import struct
import tarfile
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import refusal
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from flux_ref.formats.files import decode_text
from tools.prepare import pictures
from tools.prepare.pictures import TWINS, Rejected

# Pictures


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth, in all colours, and different at every corner."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(size: int, bits: int, colour: int, row: bytes, clear: tuple[int, ...] = ()) -> bytes:
    """A square PNG of equal rows. colour: 0 grey, 2 RGB. clear: the grey or colour that is transparent."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, bits, colour, 0, 0, 0))
    hidden = chunk(b"tRNS", struct.pack(f">{len(clear)}H", *clear)) if clear else b""
    body = chunk(b"IDAT", zlib.compress((b"\0" + row) * size))
    return b"\x89PNG\r\n\x1a\n" + head + hidden + body + chunk(b"IEND", b"")


def display_p3() -> bytes:
    """An ICC profile of Display P3's colours, with 2.2 as its curve."""
    xyz = {b"wtpt": (0.9642, 1.0, 0.8249), b"rXYZ": (0.5151, 0.2412, -0.0011)}
    xyz |= {b"gXYZ": (0.2920, 0.6922, 0.0419), b"bXYZ": (0.1571, 0.0666, 0.7841)}
    tags = {name: b"XYZ " + struct.pack(">4x3i", *(round(65536 * x) for x in point)) for name, point in xyz.items()}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), b"curv" + struct.pack(">4xIHxx", 1, round(2.2 * 256)))
    head = struct.pack(">4xI4s4s4s12x4s28x", 0x02400000, b"mntr", b"RGB ", b"XYZ ", b"acsp") + tags[b"wtpt"][8:]
    head = head.ljust(124, b"\0")
    table, content = struct.pack(">I", len(tags)), b""
    for name, tag in tags.items():
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(content), len(tag))
        content += tag
    return struct.pack(">I", len(head + table + content) + 4) + head + table + content


def pixels(content: bytes, height: int = 256, width: int = 256) -> torch.Tensor:
    return pictures.pixels(content, height, width)


def distance(ours: torch.Tensor, shown: Image.Image) -> int:
    """The largest difference of a value."""
    theirs = v2.functional.pil_to_tensor(shown.convert("RGB"))
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.uint8
    return int((ours.int() - theirs.int()).abs().max())


def stored() -> Iterator[tuple[str, bytes, Image.Image, int]]:
    """What, the bytes of a file, the picture that it shows at 256 x 256, the largest difference of a value."""
    theirs = v2.Compose([v2.Resize(256, InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(256)])
    for size in ((640, 480), (333, 1000), (64, 70)):
        yield f"size {size}", saved(drawn(*size)), theirs(drawn(*size)), 0
    square = drawn(256, 256)
    grey = square.convert("L")
    yield "grey", saved(grey), grey, 0
    yield "16 bits", saved(Image.fromarray(np.array(grey).astype(np.uint16) * 257)), grey, 0
    yield "CMYK", saved(square.convert("CMYK"), "JPEG", quality=100, subsampling=0), square, 8

    opacity = Image.linear_gradient("L")
    faded_grey, faded, palette = (square.convert(mode) for mode in ("LA", "RGBA", "P"))
    faded_grey.putalpha(opacity)
    faded.putalpha(opacity)
    shown = Image.fromarray(np.where(np.asarray(palette) == 3, 0, 255).astype(np.uint8))
    for picture, alpha, kind, options in (
        (faded_grey, opacity, "PNG", {}),
        (faded, opacity, "WEBP", {"lossless": True, "exact": True}),
        (palette, shown, "PNG", {"transparency": 3}),
        (palette, shown, "GIF", {"transparency": 3}),
    ):
        want = Image.composite(picture.convert("RGB"), Image.new("RGB", square.size, "white"), alpha)
        yield f"transparent {picture.mode} {kind}", saved(picture, kind, **options), want, 1
    for bits, colour, row, clear, other in (  # the left half is transparent
        (4, 0, b"\x33" * 64 + b"\x77" * 64, (3,), (0x77,) * 3),
        (16, 0, b"\x30\x07" * 128 + b"\x77\x00" * 128, (0x3007,), (0x77,) * 3),
        (
            16,
            2,
            b"\x30\x00\x40\x00\x50\x00" * 128 + b"\x10\x00\x20\x00\x30\x00" * 128,
            (0x3000, 0x4000, 0x5000),
            (16, 32, 48),
        ),
    ):
        want = Image.new("RGB", square.size, other)
        want.paste("white", (0, 0, 128, 256))
        yield f"tRNS of {bits} bits, colour {colour}", png(256, bits, colour, row, clear), want, 0

    exif = Image.Exif()
    methods = (None, 0, 3, 1, 5, 2, 6, 4)  # of Image.transpose: the inverse of what each orientation asks for
    for orientation, method in enumerate(methods, 1):
        exif[0x0112] = orientation
        turned = square if method is None else square.transpose(Image.Transpose(method))
        yield f"orientation {orientation}", saved(turned, exif=exif), square, 0
    yield "damaged EXIF", saved(square, "JPEG", quality=100, subsampling=0, exif=b"Exif\0\0" + bytes(99)), square, 6
    first, second = (Image.new("RGB", (256, 256), colour) for colour in ("red", "blue"))
    yield "animated", saved(first, "GIF", save_all=True, append_images=[second], duration=100), first, 5

    green, held = (Image.new("RGB", (256, 256), colour) for colour in ((30, 200, 60), (95, 197, 81)))
    yield "Display P3", saved(held, icc_profile=display_p3()), green, 9  # whose own curve is sRGB's, not 2.2
    yield "a profile of another kind", saved(held.convert("CMYK"), "JPEG", icc_profile=display_p3()), held, 5
    yield "no profile", saved(held, icc_profile=b"no profile"), held, 0


@pytest.mark.filterwarnings("ignore")
def test_pictures_of_all_forms_show_what_they_show_to_people():
    """The shorter side becomes 256 and the centre is kept; what is transparent shows white; colours are sRGB's."""
    assert [
        (what, found) for what, file, shown, most in stored() if (found := distance(pixels(file), shown)) > most
    ] == []
    for size, resized, kept in (((120, 300), (48, 120), (0, 44, 48, 76)), ((300, 120), (80, 32), (16, 0, 64, 32))):
        shown = drawn(*size).resize(resized, 3).crop(kept)
        assert distance(pixels(saved(drawn(*size)), 32, 48), shown) == 0, size


WHOLE = saved(drawn(300, 200))
BAD = {  # reason, content
    "not a picture": [b"", b"this is no picture\n" * 20, saved(drawn(80, 80), "TIFF"), WHOLE[:40]],
    "too small": [saved(drawn(300, 63))],
    "too many pixels": [png(size, 8, 2, b"") for size in (10_000, 60_000)],
    "too long and narrow": [saved(Image.new("1", (64, 400_000)))],
    "damaged picture": [WHOLE[: len(WHOLE) // 2], WHOLE[:20_000] + bytes(40) + WHOLE[20_040:]],
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_used_is_rejected():
    for reason, contents in BAD.items():
        assert [refusal(pixels, content, kind=Rejected) for content in contents] == [reason] * len(contents)


# Text


def test_text_of_people_is_decoded_in_one_way():
    for content in ("é".encode(), "\ufeffé".encode(), "é".encode("utf-16"), b"\xfe\xff" + "é".encode("utf-16-be")):
        assert decode_text(content) == "é"
    assert decode_text(b"\xef\xbb\xbf") == decode_text(b"\xff\xfe") == ""
    for content in ("é".encode("latin-1"), "ab".encode("utf-16-le"), b"\xff\xfea"):
        with pytest.raises(ValueError):
            decode_text(content)


def caption_of(picture: pictures.Picture) -> str:
    """Or why it is rejected."""
    loaded = picture.load(32, 48)
    return f"= {loaded.caption}" if isinstance(loaded, pictures.Sample) else loaded.reason


TEXTS = {  # what a caption's files hold: the caption, or why it is rejected
    "a cat": [
        *({".txt": text} for text in (b"a cat\r\n", "\ufeffa cat".encode(), "a cat".encode("utf-16"))),
        {".json": '\ufeff{"caption": " a cat"}'.encode()},
        {".txt": b"a cat", ".json": b'{"caption": "a dog"}'},
    ],
    "no caption": [{}, {".json": b'{"width": 1}'}, *({".txt": text.encode()} for text in (" \n", "\ufeff", "\u200b"))],
    "unreadable caption": [
        *({".txt": text} for text in ("l'été".encode("latin-1"), "a cat".encode("utf-16-le"))),
        *({".json": text} for text in (b"[1]", b'{"caption": 7}', b"{", b"[" * 100_000, b'{"caption": "\\ud83d"}')),
    ],
    "timestep is not 0 to 7": [{".json": b'{"caption": "a cat", "timestep": 8}'}],
}


def test_captions_are_read_or_have_a_reason():
    for want, cases in TEXTS.items():
        found = [caption_of(pictures.Picture("name", "", WHOLE, texts)) for texts in cases]
        assert found == [f"= {want}" if want == "a cat" else want] * len(cases)


# Folders and tars


PNG, CAT = saved(drawn(100, 90)), b"a cat"


def put(folder: Path, contents: dict[str, bytes | str]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return folder


def outcome(folder: Path, column: str = "text") -> list[tuple[str, str]]:
    """Name and caption, or why it is rejected, of each picture."""
    found = [picture for part in pictures.parts_of(folder, pictures.find(folder), column, 3) for picture in part()]
    return [(picture.name, caption_of(picture)) for picture in found]


def test_a_folder_gives_each_picture_with_the_text_of_its_name(tmp_path):
    beside = {"IMG_1.PNG": PNG, "IMG_1.TXT": CAT, "cat.2.webp": PNG, "cat.2.json": '{"caption": "a cat"}'}
    beside |= {"two.png": PNG, "two.jpg": PNG, "two.txt": CAT, "alone.gif": PNG, "note.pdf": b"", "README.txt": CAT}
    root = put(
        tmp_path / "in", beside | {".hidden.png": PNG, "sub/.DS_Store": b"", "sub/a.jpeg": PNG, "sub/a.txt": CAT}
    )
    put(tmp_path / "elsewhere", {"b.png": PNG, "b.txt": CAT})
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "sub" / "loop").symlink_to(root)
    (root / "gone.png").symlink_to("nowhere.png")
    os.mkfifo(root / "pipe.png")
    for name in ("gone.txt", "pipe.txt"):
        (root / name).write_bytes(CAT)
    assert outcome(root) == [
        ("IMG_1.PNG", "= a cat"),
        ("alone.gif", "no caption"),
        ("cat.2.webp", "= a cat"),
        ("gone.png", "unreadable file"),
        ("linked/b.png", "= a cat"),
        ("note.pdf", "unsupported type"),
        ("pipe.png", "unreadable file"),
        ("sub/a.jpeg", "= a cat"),
        ("two.jpg", TWINS),
        ("two.png", TWINS),
    ]


def test_each_row_and_each_file_is_a_sample_or_is_rejected_with_a_reason(tmp_path):
    rows = [
        '{"file_name": "sub/../sub/c.png", "text": " a cat\\n", "more": [1]}',
        '{"file_name": "b.png", "text": "a second\u2028line"}',
        '{"file_name": "b.png", "text": "a row more"}',
        *(json.dumps({"file_name": name, "text": "x"}) for name in ("cafe\u0301.png", "sub\\c.png", "SUB/c.png")),
        *(json.dumps({"file_name": name, "text": "x"}) for name in ("../in/a.png", ".hidden.png", "note.pdf", 3)),
        *("", "[1]", '{"file_name"', '{"text": "x"}'),
        *(f'{{"file_name": "b.png"{text}}}' for text in ("", ', "text": ["x"]', ', "text": "\\ud83d"')),
    ]
    files = dict.fromkeys(("a.png", "b.png", "sub/c.png", "caf\u00e9.png", ".hidden.png", "note.pdf"), PNG)
    assert outcome(put(tmp_path / "in", files | {"a.txt": CAT, "metadata.jsonl": "\ufeff" + "\n".join(rows)})) == [
        ("sub/c.png", "= a cat"),
        ("b.png", "= a second\u2028line"),
        ("b.png", "= a row more"),
        ("caf\u00e9.png", "= x"),
        ("sub/c.png", "= x"),
        *((name, "not in the folder") for name in ("SUB/c.png", "../in/a.png", ".hidden.png")),
        ("note.pdf", "unsupported type"),
        *((f"metadata.jsonl, row {row}", "unreadable row") for row in (10, 11, 12, 13)),
        *(("b.png", reason) for reason in ("no caption", "unreadable caption", "unreadable caption")),
        ("a.png", "not in metadata.jsonl"),
    ]
    table = 'file_name,prompt,n\r\nb.png,"a cat, ""red""\nand blue",1\r\na.png,bare, comma,1\r\nsub/c.png\r\n'
    few = {name: files[name] for name in ("a.png", "b.png", "sub/c.png")}
    assert outcome(put(tmp_path / "csv", few | {"metadata.csv": table.encode("utf-16")}), "prompt") == [
        ("b.png", '= a cat, "red"\nand blue'),
        ("metadata.csv, row 2", "unreadable row"),
        ("sub/c.png", "no caption"),
        ("a.png", "not in metadata.csv"),
    ]


def test_lists_that_say_nothing_are_refused(tmp_path):
    cases = {  # files, words of the refusal
        "two": ({"metadata.jsonl": "{}", "metadata.csv": ""}, "has metadata.csv and metadata.jsonl; keep"),
        "pretty": (
            {"metadata.jsonl": '{\n"file_name": "a.png",\n"text": "x"\n}'},
            "no line is a JSON object; write each",
        ),
        "quote": ({"metadata.csv": 'file_name,text\na.png,"x\nb.png,y\n'}, "unexpected end"),
        "empty": ({"metadata.csv": ""}, "no column 'file_name', only none"),
        "semicolons": (
            {"metadata.csv": "file_name;text\na.png;x\n"},
            "only 'file_name;text'; add it or give --caption-c",
        ),
        "latin": ({"metadata.jsonl": "\udc80"}, "save it as UTF-8"),
    }
    found = {name: refusal(outcome, put(tmp_path / name, files)) for name, (files, _) in cases.items()}
    assert [found[name] for name, (_, words) in cases.items() if words not in found[name]] == []


def write_tar(path: Path, members: list[tuple[str, bytes | str]]) -> Path:
    """A member whose content is text is a link to another one, hard or (with an arrow) soft."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type = tarfile.SYMTYPE if content.startswith("->") else tarfile.LNKTYPE
                entry.linkname = content.removeprefix("->")
            else:
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content) if entry.size else None)
    return path


def pair(key: str) -> list[tuple[str, bytes | str]]:
    return [(f"{key}.png", PNG), (f"{key}.txt", CAT)]


DOT = "a dot in its name: webdataset ends a key at the first dot"


def test_no_picture_of_a_tar_vanishes(tmp_path):
    """Each is a sample or has the rule that rejects it as its reason."""
    members = [member for key in ("cat", "cat.2", "cat.edited", "St. John", "St. Paul", "dog") for member in pair(key)]
    members += [("0.JPG", PNG), ("0.png", PNG), ("0.txt", CAT), ("9.txt", CAT), ("8.avif", b"x"), ("8.txt", CAT)]
    members += [("1.png", b"old"), ("1.txt", b"old"), *pair("1"), ("._1.png", b"Mac"), ("7.png", PNG), ("7.cls", b"7")]
    members += [
        ("hard.png", "cat.png"),
        ("hard.txt", "cat.txt"),
        ("soft.png", "->dog.png"),
        ("soft.json", b'{"caption": "x"}'),
    ]
    members += [
        ("out.png", "->/etc/passwd"),
        ("out.txt", CAT),
        ("self.png", "->self.png"),
        ("self.txt", CAT),
        *pair("../../up"),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    want = [
        *(("cat.png", "= a cat"), ("cat.2.png", DOT), ("cat.edited.png", DOT)),
        *(("St. John.png", DOT), ("St. Paul.png", DOT), ("dog.png", "= a cat"), ("0.JPG", TWINS), ("0.png", TWINS)),
        *((key, "no picture of a supported type") for key in "98"),
        *(("1.png", "a later member of the archive has its name"), ("1.png", "= a cat"), ("._1.png", DOT)),
        *(("7.png", "no caption"), ("hard.png", "= a cat"), ("soft.png", "= x")),
        *(("out.png", "a link to nothing in its archive"), ("self.png", "a link to nothing in its archive")),
        ("../../up.png", "= a cat"),
    ]
    for name, content in (("x.tar", path.read_bytes()), ("x.tar", gzip.compress(path.read_bytes()))):
        path.write_bytes(content)
        assert outcome(tmp_path) == [(f"{name}/{member}", found) for member, found in want]
    path.rename(tmp_path / "x.tgz")
    put(tmp_path, {"beside.png": PNG, "beside.txt": CAT})
    assert outcome(tmp_path)[-2:] == [("x.tgz/../../up.png", "= a cat"), ("beside.png", "= a cat")]
    assert {path.name for path in tmp_path.iterdir()} == {"x.tgz", "beside.png", "beside.txt"}


def test_damage_to_an_archive_loses_only_what_it_hits(tmp_path):
    path = write_tar(tmp_path / "x.tar", [member for i in range(8) for member in pair(str(i))])
    whole = [(f"x.tar/{i}.png", "= a cat") for i in range(8)]
    content, damage = path.read_bytes(), [("x.tar", "damaged archive: it has no end, or does not end there")]
    assert outcome(tmp_path) == whole
    packed, middle = gzip.compress(content), content.index(b"3.png")
    for damaged in (
        content[: len(content) * 6 // 10],
        packed[:-20],
        content[:middle] + bytes(512) + content[middle + 512 :],
    ):
        path.write_bytes(damaged)
        *kept, last = outcome(tmp_path)
        assert [last] == damage and kept and set(kept) < {*whole, (kept[-1][0], "no caption")}
    for other, want in ((b"not a tar" * 1000, []), (b"", []), (content + content, whole)):
        path.write_bytes(other)
        assert outcome(tmp_path) == want + damage


def test_names_of_one_file_on_several_systems_are_alike_only_if_one_file_fits(tmp_path):
    both = {unicodedata.normalize(form, "é.png"): PNG for form in ("NFC", "NFD")}
    rows = [json.dumps({"file_name": name, "text": name}) for name in (*both, "./é.png")]
    found = outcome(put(tmp_path, both | {"metadata.jsonl": "\n".join(rows)}))
    assert [what for _, what in found] == [*(f"= {name}" for name in both), "= ./é.png"]
