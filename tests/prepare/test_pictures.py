"""Pictures and captions of people: each that is found is a sample that looks as people see it, or has its reason."""

import gzip
import io
import json
import os
import tarfile

import numpy as np
import pytest
import torch
from colour_profiles import DISPLAY_P3, LINEAR_GREY
from conftest import refusal
from PIL import Image, ImageCms
from torchvision.transforms import InterpolationMode, v2

from flux_ref import cli
from flux_ref.pictures import captioned as pictures
from flux_ref.pictures.captioned import SRGB, Rejected
from tools.prepare.tars import split_into_parts

# Pictures


def drawn(width, height, seed=0):
    """Smooth, in all colours, and different at every corner."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels(content, height=256, width=256):
    return pictures.pixels(content, height, width)


def distance(ours, shown):
    """The largest difference of a value."""
    theirs = v2.functional.pil_to_tensor(shown.convert("RGB"))
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.uint8
    return int((ours.int() - theirs.int()).abs().max())


def stored():
    """What, the bytes of a file, the picture that it shows at 256 x 256, the largest difference of a value."""
    theirs = v2.Compose([v2.Resize(256, InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(256)])
    for size in ((640, 480), (333, 1000)):  # torchvision cuts whole pixels after the resize
        yield f"size {size}", saved(drawn(*size)), theirs(drawn(*size)), 4
    square = drawn(256, 256)
    jpeg = {"kind": "JPEG", "quality": 100, "subsampling": 0}
    grey = square.convert("L")
    yield "16 bits", saved(Image.fromarray(np.array(grey).astype(np.uint16) * 257)), grey, 0
    yield "CMYK", saved(square.convert("CMYK"), **jpeg), square, 8
    yield "damaged EXIF", saved(square, exif=b"Exif\0\0" + bytes(99), **jpeg), square, 6
    yield "animated", saved(square, "GIF", save_all=True, append_images=[grey], duration=100), square.quantize(), 5
    exif = Image.Exif()
    methods = (None, 0, 3, 1, 5, 2, 6, 4)  # of Image.transpose: the inverse of what each orientation asks for
    for orientation, method in enumerate(methods, 1):
        exif[0x0112] = orientation
        turned = square if method is None else square.transpose(Image.Transpose(method))
        yield f"orientation {orientation}", saved(turned, exif=exif), square, 0

    white = Image.new("RGB", square.size, "white")
    opacity = Image.linear_gradient("L")
    for mode, kind in (("LA", "PNG"), ("RGBA", "WEBP")):
        faded = square.convert(mode)
        faded.putalpha(opacity)
        want = Image.composite(faded.convert("RGB"), white, opacity)
        yield f"transparent {mode}", saved(faded, kind, lossless=True, exact=True), want, 1
    palette = square.convert("P")
    shown = Image.fromarray(np.where(np.asarray(palette) == 3, 0, 255).astype(np.uint8))
    yield "palette", saved(palette, transparency=3), Image.composite(palette.convert("RGB"), white, shown), 0

    yield "profile of RGB on grey", saved(grey, icc_profile=ImageCms.ImageCmsProfile(SRGB).tobytes()), grey, 1
    yield "a profile of another kind", saved(square.convert("CMYK"), **jpeg, icc_profile=DISPLAY_P3), square, 8
    yield "no profile", saved(square, icc_profile=b"no profile"), square, 0
    yield from profiled(square)


def profiled(square):
    """Pictures with colour profiles, as ImageCms alone converts what is stored."""
    lossless = {"kind": "WEBP", "lossless": True}
    cases = [
        *(("Display P3", DISPLAY_P3, "RGB", options) for options in ({}, lossless)),
        *(("linear grey", LINEAR_GREY, mode, {}) for mode in ("L", "LA")),
    ]
    for name, own, mode, options in cases:
        file = saved(square.convert(mode), icc_profile=own, **options)
        held = Image.open(io.BytesIO(file)).convert("L" if mode == "LA" else mode)
        change = ImageCms.buildTransform(io.BytesIO(own), SRGB, held.mode, "RGB")
        yield f"{name}, {mode}, {options}", file, ImageCms.applyTransform(held, change), 0


@pytest.mark.filterwarnings("ignore")
def test_pictures_of_all_forms_show_what_they_show_to_people():
    """The shorter side becomes 256 and the centre is kept; what is transparent shows white; colours are sRGB's."""
    assert [
        (what, found) for what, file, shown, most in stored() if (found := distance(pixels(file), shown)) > most
    ] == []
    for own, colour, srgb in (  # by the formulas of Display P3 and sRGB, of colours that are rounded in the file
        (DISPLAY_P3, (95, 197, 81), (30, 200, 60)),
        (LINEAR_GREY, 55, (128, 128, 128)),
    ):
        one = Image.new("L" if own == LINEAR_GREY else "RGB", (256, 256), colour)
        assert distance(pixels(saved(one, icc_profile=own)), Image.new("RGB", one.size, srgb)) <= 2
    shown = drawn(120, 300).resize((48, 120), 3).crop((0, 44, 48, 76))
    assert distance(pixels(saved(drawn(120, 300)), 32, 48), shown) == 0, "a shape that is no square"


WHOLE = saved(drawn(300, 200))
BAD = {  # reason, content
    "not a picture": [b"", b"this is no picture\n" * 20, saved(drawn(80, 80), "TIFF"), WHOLE[:40]],
    "too small": [saved(drawn(300, 63))],
    "too many pixels": [saved(Image.new("1", (14_000, 14_000)))],
    "damaged picture": [WHOLE[: len(WHOLE) // 2], WHOLE[:20_000] + bytes(40) + WHOLE[20_040:]],
}


def test_what_cannot_be_used_is_rejected():
    for reason, contents in BAD.items():
        assert [refusal(pixels, content, kind=Rejected) for content in contents] == [reason] * len(contents)


# Text


def caption_of(picture):
    """Or why it is rejected."""
    try:
        return f"= {picture.load(32, 48)[1]}"
    except Rejected as error:
        return str(error)


TEXTS = {  # what a caption's files hold: the caption, or why it is rejected
    "= a cat": [
        *({".txt": text} for text in (b"a cat\r\n", "\ufeffa cat".encode(), "a cat".encode("utf-16"))),
        {".json": '\ufeff{"caption": " a cat"}'.encode()},
        {".txt": b"a cat", ".json": b'{"caption": "a dog"}'},
    ],
    "no caption": [{}, {".json": b'{"width": 1}'}, *({".txt": text.encode()} for text in (" \n", "\ufeff"))],
    "unreadable caption": [
        *({".txt": text} for text in ("l'été".encode("latin-1"), "a cat".encode("utf-16-le"))),
        *(
            {".json": text}
            for text in (
                b"[1]",
                b'{"caption": 7}',
                b"{",
                b"[" * 100_000,
                b'{"caption": "\\ud83d"}',
                b'{"caption": "a\\u0000"}',
            )
        ),
    ],
}


def test_captions_are_read_or_have_a_reason():
    for want, cases in TEXTS.items():
        found = [caption_of(pictures.Picture("name", "", WHOLE, texts)) for texts in cases]
        assert found == [want] * len(cases)


# Folders and tars

TWINS = "several pictures for one caption"


PNG, CAT = saved(drawn(100, 90)), b"a cat"


def put(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return folder


def outcome(folder, column="text"):
    """Name and caption, or why it is rejected, of each picture."""
    found = [picture for part in split_into_parts(folder, pictures.list_files(folder), column, 3) for picture in part()]
    return [(picture.name, caption_of(picture)) for picture in found]


def test_a_folder_gives_each_picture_with_the_text_of_its_name(tmp_path):
    beside = {"IMG_1.PNG": PNG, "IMG_1.TXT": CAT, "cat.2.webp": PNG, "cat.2.json": '{"caption": "a cat"}'}
    beside |= {"kohya.png": PNG, "kohya.caption": CAT, "kohya.json": "{}"}
    beside |= {"both.png": PNG, "both.txt": CAT, "both.caption": b"a dog"}
    beside |= {"two.png": PNG, "two.jpg": PNG, "two.txt": CAT, "alone.gif": PNG, "note.pdf": b"", "README.txt": CAT}
    root = put(
        tmp_path / "in", beside | {".hidden.png": PNG, "sub/.DS_Store": b"", "sub/a.jpeg": PNG, "sub/a.txt": CAT}
    )
    put(tmp_path / "elsewhere", {"b.png": PNG, "b.txt": CAT})
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "sub" / "loop").symlink_to(root)
    for name in ("gone.png", "gone.tar"):
        (root / name).symlink_to("nowhere")
    for name in ("pipe.png", "pipe.tar.gz"):
        os.mkfifo(root / name)
    for name in ("gone.txt", "pipe.txt"):
        (root / name).write_bytes(CAT)
    before = cli.ProgressCount.total
    assert sorted(outcome(root)) == [
        ("IMG_1.PNG", "= a cat"),
        ("alone.gif", "no caption"),
        ("both.png", "= a cat"),
        ("cat.2.webp", "= a cat"),
        ("gone.png", "unreadable file"),
        ("gone.tar", "unsupported type"),
        ("kohya.png", "= a cat"),
        ("linked/b.png", "= a cat"),
        ("note.pdf", "unsupported type"),
        ("pipe.png", "unreadable file"),
        ("pipe.tar.gz", "unsupported type"),
        ("sub/a.jpeg", "= a cat"),
        ("two.jpg", TWINS),
        ("two.png", TWINS),
    ]
    assert cli.ProgressCount.total - before == 3, "each folder counts for the watch over hangs"


def test_each_row_and_each_file_is_a_sample_or_is_rejected_with_a_reason(tmp_path):
    rows = [
        '{"file_name": "sub/../sub/c.png", "text": " a cat\\n", "more": [1]}',
        '{"file_name": "b.png", "text": "a second\u2028line"}',
        *(json.dumps({"file_name": name, "text": "x"}) for name in ("cafe\u0301.png", "sub\\c.png", "SUB/c.png")),
        *(json.dumps({"file_name": name, "text": "x"}) for name in ("../in/a.png", ".hidden.png", "note.pdf", 3)),
        *("", "[1]", '{"file_name"', '{"text": "x"}'),
        *(f'{{"file_name": "b.png"{text}}}' for text in ("", ', "text": ["x"]', ', "text": "\\ud83d"')),
    ]
    files = dict.fromkeys(("a.png", "b.png", "sub/c.png", "caf\u00e9.png", ".hidden.png", "note.pdf"), PNG)
    assert outcome(put(tmp_path / "in", files | {"a.txt": CAT, "metadata.jsonl": "\ufeff" + "\n".join(rows)})) == [
        ("sub/c.png", "= a cat"),
        ("b.png", "= a second\u2028line"),
        ("caf\u00e9.png", "= x"),
        ("sub/c.png", "= x"),
        *((name, "not in the folder") for name in ("SUB/c.png", "../in/a.png", ".hidden.png")),
        ("note.pdf", "unsupported type"),
        *((f"metadata.jsonl, row {row}", "unreadable row") for row in (9, 10, 11, 12)),
        *(("b.png", reason) for reason in ("no caption", "unreadable caption", "unreadable caption")),
        ("a.png", "not in metadata.jsonl"),
    ]
    table = 'file_name,prompt,n\r\nb.png,"a cat, ""red""\nand blue",1\r\na.png,bare, comma,1\r\nsub/c.png\r\n'
    few = {name: files[name] for name in ("a.png", "b.png", "sub/c.png")}
    assert outcome(put(tmp_path / "csv", few | {"metadata.csv": table.encode("utf-8-sig")}), "prompt") == [
        ("b.png", '= a cat, "red"\nand blue'),
        ("metadata.csv, row 2", "unreadable row"),
        ("sub/c.png", "no caption"),
        ("a.png", "not in metadata.csv"),
    ]


def test_a_list_in_a_sub_folder_names_files_there(tmp_path):
    """As in Hugging Face's FOLDER/train/metadata.jsonl."""
    line = '{"file_name": "a.png", "text": "a cat"}'
    put(tmp_path, {"train/metadata.jsonl": line, "train/a.png": PNG, "a.png": PNG})
    assert outcome(tmp_path) == [("train/a.png", "= a cat"), ("a.png", "not in train/metadata.jsonl")]


def test_lists_that_say_nothing_are_refused(tmp_path):
    pretty = '{\n"file_name": "a.png",\n"text": "x"\n}'
    cases = (  # files, words of the refusal
        ({"metadata.jsonl": "{}", "metadata.csv": ""}, "has metadata.csv and metadata.jsonl; keep"),
        ({"train/metadata.csv": "", "test/metadata.csv": ""}, "has test/metadata.csv and train/metadata.csv; keep"),
        ({"metadata.jsonl": pretty}, "its columns: none; give each picture a line of its own"),
        ({"metadata.csv": 'file_name,text\na.png,"x\nb.png,y\n'}, "unexpected end"),
        ({"metadata.csv": "file_name;text\na.png;x\n"}, "its columns: 'file_name;text'; give each"),
        ({"metadata.jsonl": "\udc80"}, "save it as UTF-8"),
    )
    for number, (files, words) in enumerate(cases):
        assert words in refusal(outcome, put(tmp_path / str(number), files))


def write_tar(path, members):
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


def pair(key):
    return [(f"{key}.png", PNG), (f"{key}.txt", CAT)]


DOT = "a dot in its name: webdataset ends a key at the first dot"


def test_no_picture_of_a_tar_vanishes(tmp_path):
    """Each is a sample or has the rule that rejects it as its reason."""
    nothing = "a link to nothing in its archive"
    members = [member for key in ("cat", "cat.2", "St. John", "St. Paul", "dog") for member in pair(key)]
    members += [("0.JPG", PNG), ("0.png", PNG), ("0.txt", CAT), ("9.txt", CAT), ("8.avif", b"x"), ("8.txt", CAT)]
    members += [("1.png", PNG), ("./._1.txt", b"Mac"), ("1.txt", CAT), ("._1.png", b"Mac")]
    members += [("7.png", PNG), ("7.cls", b"7")]
    members += [("hard.png", "cat.png"), ("hard.txt", "cat.txt"), ("soft.png", "->dog.png"), ("soft.txt", CAT)]
    members += [("out.png", "->/etc/passwd"), ("out.txt", CAT), ("self.png", "->self.png"), *pair("../../up")]
    want = [
        *(("cat.png", "= a cat"), ("cat.2.png", DOT), ("St. John.png", DOT), ("St. Paul.png", DOT)),
        *(("dog.png", "= a cat"), ("0.JPG", TWINS), ("0.png", TWINS), ("8.avif", "unsupported type")),
        *(
            ("1.png", "= a cat"),
            ("7.png", "no caption"),
            ("7.cls", "unsupported type"),
            ("hard.png", "= a cat"),
            ("soft.png", "= a cat"),
        ),
        *(("out.png", nothing), ("self.png", nothing), ("../../up.png", "= a cat")),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    for content in (path.read_bytes(), gzip.compress(path.read_bytes())):
        path.write_bytes(content)
        assert outcome(tmp_path) == [(f"x.tar/{member}", found) for member, found in want]
    path.rename(tmp_path / "x.tgz")
    put(tmp_path, {"beside.png": PNG, "beside.txt": CAT})
    assert outcome(tmp_path)[-2:] == [("x.tgz/../../up.png", "= a cat"), ("beside.png", "= a cat")]
    assert {path.name for path in tmp_path.iterdir()} == {"x.tgz", "beside.png", "beside.txt"}


def test_damage_to_an_archive_loses_only_what_it_hits(tmp_path):
    path = write_tar(tmp_path / "x.tar", [member for i in range(8) for member in pair(str(i))])
    whole = [(f"x.tar/{i}.png", "= a cat") for i in range(8)]
    damage = [("x.tar", "damaged archive: it has no end, or does not end there")]
    content = path.read_bytes()
    header = content.index(b"4.png")
    for damaged, kept in (
        (content[: content.index(b"4.txt")], [*whole[:4], ("x.tar/4.png", "no caption"), *damage]),
        (content[: header + 600], [*whole[:4], *damage]),
        (content[:header] + bytes(512) + content[header + 512 :], [*whole[:4], *damage]),
        (content + content, whole + damage),
        (gzip.compress(content)[:-20], whole + damage),
        (b"not a tar" * 1000, damage),
    ):
        path.write_bytes(damaged)
        assert outcome(tmp_path) == kept
