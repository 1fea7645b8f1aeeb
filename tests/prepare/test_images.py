"""From pictures and captions to shards: every kind of picture, every kind of input, encoders, restarts."""

import contextlib
import csv
import io
import json
import os
import pickle
import re
import shutil
import struct
import tarfile
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO, refusal, script, the_line
from payload import Payload
from peer_vae import relative_error
from PIL import Image
from run_files import contents
from safetensors.torch import load_file, save_file
from shard_damage import LAYOUT, opened
from small_encoders import SMALL, WORDS, save_ae, save_clip, save_t5
from torchvision.transforms import InterpolationMode, v2
from transformers import CLIPTextModel, PreTrainedTokenizerFast, T5EncoderModel

from flux_ref import config_file
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import shard_writer, shards
from flux_ref.sampling import vae
from flux_ref.sampling.encoders import Encoders
from flux_ref.sampling.vae import FLUX
from tools.prepare import commands as prepare
from tools.prepare import images, raw_images
from tools.prepare.raw_images import Candidate, Rejected

HEIGHT, WIDTH = 32, 48  # the micro model's
MODEL = config_file.load(MICRO).model


# Pictures


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth, in all colours, and different at every corner."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG whose head claims another size."""
    content = saved(drawn(8, 8))
    head = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


def pixels(content: bytes, height: int = 256, width: int = 256) -> torch.Tensor:
    return raw_images.pixels(content, height, width)


def distance(ours: torch.Tensor, shown: Image.Image) -> int:
    """The largest difference of a value."""
    theirs = v2.functional.pil_to_tensor(shown.convert("RGB"))
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.uint8
    return int((ours.int() - theirs.int()).abs().max())


def stored() -> Iterator[tuple[str, bytes, Image.Image, int]]:
    """What, the bytes of a file, the picture that it shows at 256 x 256, the largest difference of a value."""
    theirs = v2.Compose([v2.Resize(256, InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(256)])
    for size in ((640, 480), (333, 1000), (1001, 257), (64, 70), (256, 300)):
        yield f"size {size}", saved(drawn(*size)), theirs(drawn(*size)), 0
    square = drawn(256, 256)
    grey = square.convert("L")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8))
    yield "noise", saved(noise), noise, 0  # above all through no JPEG
    yield "grey", saved(grey), grey, 0
    yield "16 bits", saved(Image.fromarray(np.array(grey).astype(np.uint16) * 257)), grey, 0

    white = Image.new("RGB", square.size, "white")
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
        want = Image.composite(picture.convert("RGB"), white, alpha)
        yield f"transparent {picture.mode} {kind}", saved(picture, kind, **options), want, 1

    jpeg = {"kind": "JPEG", "quality": 100, "subsampling": 0}
    exif = Image.Exif()
    methods = (None, 0, 3, 1, 5, 2, 6, 4)  # of Image.transpose: the inverse of what each orientation asks for
    for orientation, method in enumerate(methods, 1):
        exif[0x0112] = orientation
        turned = square if method is None else square.transpose(Image.Transpose(method))
        yield f"orientation {orientation}", saved(turned, exif=exif), square, 0
        yield f"orientation {orientation} of a JPEG", saved(turned, exif=exif, **jpeg), square, 6
    for damaged in (b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0" + bytes(range(200))):
        yield f"EXIF {damaged[:20]}", saved(square, exif=damaged, **jpeg), square, 6
    first, *frames = (Image.new("RGB", (256, 256), colour) for colour in ("red", "blue", "green"))
    for kind in ("GIF", "WEBP", "PNG"):
        yield f"animated {kind}", saved(first, kind, save_all=True, append_images=frames, duration=100), first, 5


@pytest.mark.filterwarnings("ignore")
def test_pictures_of_all_forms_show_what_they_show_to_people():
    """The shorter side becomes 256 and the centre is kept; what is transparent shows white; EXIF turns a picture."""
    assert [what for what, file, shown, most in stored() if distance(pixels(file), shown) > most] == []
    for size, resized, kept in (((120, 300), (48, 120), (0, 44, 48, 76)), ((300, 120), (80, 32), (16, 0, 64, 32))):
        shown = drawn(*size).resize(resized, 3).crop(kept)
        assert distance(pixels(saved(drawn(*size)), HEIGHT, WIDTH), shown) == 0, size


def test_cmyk_is_not_inverted():
    content = saved(drawn(256, 256).convert("CMYK"), "JPEG", quality=95)
    assert Image.open(io.BytesIO(content)).mode == "CMYK"
    assert (pixels(content).float() - pixels(saved(drawn(256, 256))).float()).abs().mean() < 3


def cut(content: bytes, part: float = 0.5) -> bytes:
    return content[: int(len(content) * part)]


WHOLE = saved(drawn(300, 200))
BAD = {  # content, reason
    "empty.png": (b"", "not an image"),
    "text.png": (b"this is no picture\n" * 20, "not an image"),
    "svg.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image"),
    "tiff.png": (saved(drawn(80, 80), "TIFF"), "not an image"),
    "one.png": (saved(drawn(1, 1)), "too small"),
    "slim.png": (saved(drawn(300, 63)), "too small"),
    "bomb.png": (claiming(10_000, 10_000), "too many pixels"),
    "huge_bomb.png": (claiming(60_000, 30_000), "too many pixels"),
    "ribbon.png": (saved(Image.new("1", (64, 400_000))), "too long and narrow"),
    "cut_a.jpg": (cut(saved(drawn(300, 200), "JPEG")), "damaged image"),
    "cut_b.png": (cut(WHOLE), "damaged image"),
    "cut_c.webp": (cut(saved(drawn(300, 200), "WEBP")), "damaged image"),
    "damaged.png": (WHOLE[:20_000] + bytes(40) + WHOLE[20_040:], "damaged image"),
    "head.png": (WHOLE[:40], "not an image"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_used_is_rejected():
    found = {name: refusal(pixels, content, kind=Rejected) for name, (content, _) in BAD.items()}
    assert found == {name: reason for name, (_, reason) in BAD.items()}


# Encoders


@pytest.fixture(scope="module", autouse=True)
def small_autoencoder() -> Iterator[None]:
    """FLUX's autoencoder would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vae, "load", partial(vae.load, sizes=SMALL))
        yield


@pytest.fixture(scope="module")
def nets(tmp_path_factory) -> Path:
    """t5, clip/text_encoder and an autoencoder, all random; tests must not change them."""
    folder = tmp_path_factory.mktemp("nets")
    save_t5(folder / "t5")
    save_clip(folder / "clip")
    save_ae(folder / "ae.safetensors", SMALL)
    return folder


def make(nets: Path, source: object, output: Path, *args: object, split: str = "train") -> list[str]:
    """The arguments of the command."""
    options = {"input": source, "output": output, "split": split, "vae": nets / "ae.safetensors", "t5": nets / "t5"}
    options |= {"clip": nets / "clip" / "text_encoder", "config": MICRO, "batch": 3, "workers": 2}
    options |= {"per-shard": 5}
    return ["images", *(text for key, value in options.items() for text in (f"--{key}", str(value))), *map(str, args)]


def encoded(folder: Path) -> list[tuple[shards.Meta, dict[str, np.ndarray]]]:
    """What a set of shards holds, as float32."""
    stored, samples = opened(folder), []
    for i in range(len(stored)):
        rows = LAYOUT.rows()
        samples.append((stored.read(i, rows), {name: shards.from_bf16_bits(bits) for name, bits in rows.items()}))
    return samples


@contextlib.contextmanager
def failing(owner: type, name: str, at_call: int, error: BaseException) -> Iterator[None]:
    """A method raises the error at its call of this number."""
    method, calls = getattr(owner, name), []

    def fail(*given: object) -> object:
        calls.append(given)
        if len(calls) == at_call:
            raise error
        return method(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def refused(args: list[str], capsys, code: int = 2) -> str:
    assert prepare.main(args) == code
    return the_line(capsys.readouterr().err, "prepare")


# From a folder


T5_CUTS, CLIP_CUTS = "a large dog stands in the water at night " * 2, "the grass " * 60
PICTURES = {  # caption, content
    "01.png": ("a red cat sits on the grass", saved(drawn(300, 200, 1))),
    "02.jpg": ("a blue dog", saved(drawn(200, 300, 2), "JPEG")),
    "03_grey.png": ("a photo of water", saved(drawn(100, 100, 3).convert("L"))),
    "04.png": ("night", saved(drawn(90, 80, 4))),
    "05_rgba.png": (T5_CUTS, saved(drawn(256, 256, 5).convert("RGBA").rotate(30))),
    "06_cmyk.jpg": ("a small green cat", saved(drawn(120, 110, 6).convert("CMYK"), "JPEG")),
    "07.jpg": (CLIP_CUTS, saved(drawn(140, 100, 7), "JPEG")),
    "08.gif": ("zebra", saved(drawn(100, 90, 8), "GIF")),  # in no vocabulary
    "09_is_a_jpeg.png": ("a dog", saved(drawn(150, 140, 10), "JPEG")),
    "10.WEBP": ('a\tcat, "quoted", and l\'été 猫', saved(drawn(160, 150, 11), "WEBP")),
    "11_palette.png": ("in the water", saved(drawn(100, 100, 12).quantize(16))),
    "sub/12.jpeg": ("a cat", saved(drawn(100, 101, 13), "JPEG")),
}
GIVEN_TIMESTEP = 6  # of the fourth picture, in validation
CAPTIONS = {name: caption.strip() for name, (caption, _) in PICTURES.items()}


BAD_SAMPLES = {  # content, files beside, why it is rejected
    "00_cut.jpg": (BAD["cut_a.jpg"][0], {"txt": b"a cat"}, "damaged image"),
    "05_silent.png": (WHOLE, {}, "no caption"),
    "05_silent_json.png": (WHOLE, {"json": b'{"width": 1}'}, "no caption"),
    "05_blank.png": (WHOLE, {"txt": b" \n"}, "no caption"),
    "05_latin1.png": (WHOLE, {"txt": "l'été".encode("latin-1")}, "unreadable caption"),
    "05_list.png": (WHOLE, {"json": b"[1]"}, "unreadable caption"),
    "05_number.png": (WHOLE, {"json": b'{"caption": 7}'}, "unreadable caption"),
    "05_no_json.png": (WHOLE, {"json": b"{"}, "unreadable caption"),
    "05_deep.png": (WHOLE, {"json": b"[" * 100_000}, "unreadable caption"),
    "05_long.png": (WHOLE, {"txt": b"x" * 2**21}, "unreadable caption"),
    "05_half.png": (WHOLE, {"json": b'{"caption": "\\ud83d"}'}, "unreadable caption"),
    "05_eighth.png": (WHOLE, {"json": b'{"caption": "a cat", "timestep": 8}'}, "timestep is not 0 to 7"),
    "05_note.pdf": (WHOLE, {}, "unsupported type"),
    "13.png": (None, {"txt": b"a cat"}, "unreadable file"),
    "14.png": (None, {"txt": b"a cat"}, "unreadable file"),
}


def lay_out(folder: Path, with_bad: bool) -> None:
    """A folder of pictures and captions; a caption's file is of one of two kinds."""
    (folder / "sub").mkdir(parents=True)
    for number, (name, (caption, content)) in enumerate(PICTURES.items()):
        (folder / name).write_bytes(content)
        said = {"caption": caption, "width": 1} | ({"timestep": GIVEN_TIMESTEP} if number == 3 else {})
        kind, text = ("txt", f"{caption}\n") if number % 3 else ("json", json.dumps(said))
        (folder / name).with_suffix(f".{kind}").write_text(text, encoding="utf-8")
    for name, (content, texts, _) in BAD_SAMPLES.items() if with_bad else ():
        if content:
            (folder / name).write_bytes(content)
        for kind, text in texts.items():
            (folder / name).with_suffix(f".{kind}").write_bytes(text)
    if with_bad:
        (folder / "13.png").symlink_to("nowhere.png")
        os.mkfifo(folder / "14.png")
        (folder / ".hidden.png").write_bytes(b"")


@pytest.fixture(scope="module")
def made(nets, tmp_path_factory):
    """(input, output, what was printed) of a folder with all that can be wrong."""
    root = tmp_path_factory.mktemp("made")
    lay_out(root / "in", with_bad=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert prepare.main(make(nets, root / "in", root / "out")) == 0
    return root / "in", root / "out", printed.getvalue()


def test_bad_samples_are_listed_and_counted_and_the_good_fill_shards_without_gaps(made, nets):
    _, output, printed = made
    reasons = {name: reason for name, (*_, reason) in BAD_SAMPLES.items()}
    header, *lines = (output / "train_rejected.tsv").read_text().splitlines()
    assert header == "path\treason" and sorted(lines) == sorted(map("\t".join, reasons.items()))
    counts = [f"{count} {reason}" for reason, count in Counter(reasons.values()).items()]
    said = [f"{len(CAPTIONS)} samples", f"{len(reasons)} rejected", *counts]
    said.append(f"3 of the captions encoded now are cut after {MODEL.text_tokens} tokens, model.text_tokens")
    assert [words for words in said if words not in printed] == []
    metas = [meta for meta, _ in encoded(output / "train")]
    assert [(meta.key, meta.timestep) for meta in metas] == [(f"train_{i:08d}", None) for i in range(12)]
    assert [meta.caption[:50] for meta in metas] == [caption[:50] for caption in CAPTIONS.values()]
    assert shards.ShardSet(output / "train", LAYOUT).first.tolist() == [0, 5, 10, 12]
    assert {path.name for path in output.iterdir()} == {"train", "train_rejected.tsv", "empty_encodings"}
    names = {path.name for path in (output / "train").iterdir()}
    assert names == {"plan.json", "checked.json", *(f"shard_{i:06d}.tar" for i in range(3))}


def test_latents_are_the_autoencoders_of_the_pixels(made, nets):
    autoencoder = vae.load(nets / "ae.safetensors", torch.device("cpu"))
    for (_, content), (_, rows) in zip(PICTURES.values(), encoded(made[1] / "train"), strict=True):
        with torch.no_grad():
            moments = autoencoder.encode(pixels(content, HEIGHT, WIDTH)[None] / 255 * 2 - 1)
        for member, want in zip(("mean", "logvar"), moments):
            assert relative_error(torch.from_numpy(rows[member]), want[0].bfloat16().float()) < 3e-4


def theirs(nets: Path, caption: str) -> dict[str, torch.Tensor]:
    """T5 sees its pads; CLIP's output does not depend on what comes after the first end."""
    t5, clip = T5EncoderModel.from_pretrained(nets / "t5"), CLIPTextModel.from_pretrained(nets / "clip/text_encoder")
    cut = {"truncation": True, "return_tensors": "pt"}
    t5_ids = PreTrainedTokenizerFast.from_pretrained(nets / "t5")(caption, padding="max_length", max_length=9, **cut)
    clip_ids = PreTrainedTokenizerFast.from_pretrained(nets / "clip" / "tokenizer")(caption, max_length=77, **cut)
    with torch.no_grad():
        t5_1TE, pooled_1V = t5(t5_ids["input_ids"]).last_hidden_state, clip(clip_ids["input_ids"]).pooler_output
    return {"t5": t5_1TE[0], "clip": pooled_1V[0]}


def test_captions_and_the_empty_one_beside_are_encoded_as_transformers_does(made, nets):
    output = made[1]
    empty = shards.read_empty(output / "empty_encodings", LAYOUT)
    ours = [{name: shards.from_bf16_bits(bits) for name, bits in empty.items()}]
    ours += [rows for _, rows in encoded(output / "train")]
    for rows, caption in zip(ours, ["", *CAPTIONS.values()], strict=True):
        for name, want in theirs(nets, caption).items():
            assert relative_error(torch.from_numpy(rows[name]), want.bfloat16().float()) < 1e-3, (name, caption)


# Archives


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def write_archive(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def read(source: Path) -> list[tuple[str, str]]:
    """The name of every sample of an input, and its caption or why it cannot be used."""
    found, inputs = [], raw_images.source(str(source))
    for part in inputs.parts(inputs.files()):
        for candidate in part():
            sample = candidate.load(HEIGHT, WIDTH)
            assert sample.rejected or sample.pixels.shape == (3, HEIGHT, WIDTH)
            found.append((candidate.name.removeprefix(f"{source}/"), sample.rejected or sample.caption))
    return found


def test_folder_archives_and_lists_give_the_same_samples(tmp_path):
    lay_out(tmp_path / "folder", with_bad=False)
    members = {}
    for name, (caption, content) in PICTURES.items():
        key = name.replace(".", "_").replace("/", "_")
        members |= {f"{key}.{name.rsplit('.')[1]}": content, f"{key}.txt": caption.encode(), f"{key}.cls": b"7"}
    (tmp_path / "tars").mkdir()
    names = list(members)
    for number, part in enumerate((names[:15], names[15:18], names[18:])):
        write_archive(tmp_path / "tars" / f"x-{number:04d}.tar", [(name, members[name]) for name in part])
    rows = [{"file_name": name, "width": 1, "text": caption} for name, (caption, _) in PICTURES.items()]
    for kind in ("jsonl", "csv"):
        shutil.copytree(tmp_path / "folder", tmp_path / kind, ignore=shutil.ignore_patterns("*.txt", "*.json"))
    (tmp_path / "jsonl" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "csv" / "metadata.csv").open("w", encoding="utf-8-sig", newline="") as file:  # as Excel writes it
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    for source in ("folder", "tars", "tars/x-{0000..0002}.tar", "jsonl", "csv"):
        assert [caption for _, caption in read(tmp_path / source)] == list(CAPTIONS.values()), source


def test_damage_to_an_archive_loses_only_what_it_hits(tmp_path):
    members, damage = {}, "damaged archive, some of it is lost"
    for i in range(8):
        members |= {f"{i}.png": saved(drawn(100, 90, i)), f"{i}.txt": b"a cat", f"{i}.json": b'{"timestep": 3}'}
    members |= {"9.txt": b"alone", "8.png": saved(drawn(100, 90)), "7.mp4": b"film"}
    good = [(f"{i}", "a cat") for i in range(8)]
    path = write_archive(tmp_path / "a{1..2}.tar", members.items())  # braces in the name of a file that is there
    assert read(path) == [*good, ("9", "no image of a supported type"), ("8", "no caption")]
    content = path.read_bytes()
    *kept, last = read(write(path, cut(content, 0.6)))
    assert last == (str(path), damage) and kept[:3] == good[:3] and set(kept[:-1]) <= set(good)
    for other in (b"not a tar" * 1000, b""):
        assert read(write(path, other)) == [(str(path), damage)]
    assert (str(path), damage) in read(write(path, content + content))  # as cat would
    twice = [(name, members[name]) for name in ("0.png", "0.txt", "0.txt", "1.png", "1.txt")]
    assert read(write_archive(path, twice)) == [*good[:2], (str(path), damage)]


def test_a_caption_belongs_to_one_image(tmp_path):
    members = {"0.png": saved(drawn(100, 90)), "0.JPG": saved(drawn(100, 90), "JPEG"), "0.txt": b"a cat"}
    write_archive(tmp_path / "a.tar", members.items())
    (tmp_path / "in").mkdir()
    for name, content in members.items():
        write(tmp_path / "in" / name, content)
    assert read(tmp_path / "a.tar") == [("0", raw_images.TWINS)]
    assert read(tmp_path / "in") == [("0.JPG", raw_images.TWINS), ("0.png", raw_images.TWINS)]


def test_names_inside_an_archive_are_no_paths(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    picture = saved(drawn(100, 90))
    names = ("../../up", f"{tmp_path}/absolute", "a\nb\tc")
    members = [(f"{name}.{kind}", content) for name in names for kind, content in (("png", picture), ("txt", b"a cat"))]
    write_archive(tmp_path / "x.tar", members)
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        link = tarfile.TarInfo("link.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        archive.addfile(link)
    assert [caption for _, caption in read(tmp_path / "x.tar")] == ["a cat"] * 3
    assert {path.name for path in tmp_path.rglob("*")} == {"cwd", "x.tar"}


def test_inputs_that_are_none_are_refused(nets, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "x.csv").write_text("file_name,text\n")
    wrong = []
    for source, output, words in (
        ("absent", "out", "absent does not exist; want"),
        ("x-{1..3}.tar", "out", "x-1.tar does not exist"),
        ("x-{1..3.tar", "out", "want a folder of pictures"),
        ("in", "in/out", "lies in --input"),
        ("x.csv", "out", "x.csv is not a tar; want"),
    ):
        line = refused(make(nets, tmp_path / source, tmp_path / output), capsys)
        wrong += [line] * (words not in line or (tmp_path / output).exists())
    assert wrong == [] and not any((tmp_path / "in").iterdir())
    line = refused(make(nets, tmp_path / "in", tmp_path / "out"), capsys)
    assert "or more samples and has 0 pictures" in line


# A share for validation


def split_of_own(args: list[str], share: float) -> list[str]:
    """The arguments with --val-share in place of --split."""
    at = args.index("--split")
    return [*args[:at], *args[at + 2 :], "--val-share", str(share)]


def test_a_share_becomes_the_validation_set_in_one_go_and_after_a_stop(nets, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i}.png").write_bytes(saved(drawn(64, 64, i)))
    rows = [{"file_name": f"{i}.png", "text": f"cat {i}"} for i in range(41)]
    (tmp_path / "in" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whole, stopped = (split_of_own(make(nets, tmp_path / "in", tmp_path / out), 0.25) for out in ("whole", "stopped"))
    assert prepare.main(whole) == 0
    train, val = ([meta for meta, _ in encoded(tmp_path / "whole" / split)] for split in ("train", "val"))
    assert sorted(meta.caption for meta in train + val) == sorted(f"cat {i}" for i in range(40))
    assert [meta.timestep for meta in val] == [i % 8 for i in range(len(val))] and 8 <= len(val) < 20
    with failing(Encoders, "encode", len(val) // 3 + 4, KeyboardInterrupt()):  # in the second split
        assert prepare.main(stopped) == 130
    capsys.readouterr()
    folders = {path.name for path in (tmp_path / "stopped").iterdir() if path.is_dir()}
    assert folders == {"val.partial", "train.partial", "empty_encodings"}, "both sets get their names together"
    assert "val.partial was begun otherwise: val_share was 0.25, is 0.5" in refused([*stopped[:-1], "0.5"], capsys)
    assert prepare.main(stopped) == 0 and contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    assert "exists; remove it" in refused(stopped, capsys)
    few = split_of_own(make(nets, tmp_path / "in", tmp_path / "few"), 0.01)
    with failing(Encoders, "__init__", 0, AssertionError("pictures are counted first")):
        assert "val needs 8 or more samples and has 0 pictures" in refused(few, capsys)


# Ranks and restarts


@pytest.mark.slow
def test_two_ranks_make_the_same_bytes_as_one(made, nets, tmp_path, monkeypatch):
    flux = ("--vae", save_ae(tmp_path / "flux.safetensors", FLUX))  # no patch reaches the ranks
    monkeypatch.setattr(vae, "load", vae.load.func)
    alone, both = (split_of_own(make(nets, made[0], tmp_path / out, *flux), 0.72) for out in ("alone", "both"))
    assert prepare.main(alone) == 0
    done = script("tools/prepare/__main__.py", *both, ranks=2)
    assert done.returncode == 0, done.stderr
    assert sum(map(int, re.findall(r"(\d+) rejected", done.stdout))) == len(BAD_SAMPLES)
    assert contents(tmp_path / "both") == contents(tmp_path / "alone")


def test_timesteps_of_validation_take_turns_after_the_rejected_are_gone_or_are_those_given(made, nets, tmp_path):
    assert prepare.main(make(nets, made[0], tmp_path, split="val")) == 0
    timesteps = [meta.timestep for meta, _ in encoded(tmp_path / "val")]
    assert timesteps == [0, 1, 2, GIVEN_TIMESTEP, *(i % 8 for i in range(4, 12))]


@pytest.fixture
def stopped(nets, tmp_path, capsys) -> list[str]:
    """The arguments of a job that a full disk and then Ctrl-C have ended in its second shard. It reads tmp_path/in."""
    lay_out(tmp_path / "in", with_bad=False)
    args = make(nets, tmp_path / "in", tmp_path / "out")
    folder = tmp_path / "out" / "train.partial"
    with failing(shard_writer.ShardWriter, "add", 7, OSError(28, "No space left on device")):
        assert f"{folder / 'shard_000001.tar'}: No space left on device; free its disk" in refused(args, capsys, code=3)
    with failing(Encoders, "encode", 2, KeyboardInterrupt()):
        assert prepare.main(args) == 130
    assert {path.name for path in folder.iterdir()} == {"plan.json", "checked.json", "shard_000000.tar"}
    capsys.readouterr()
    return args


def test_a_job_stopped_by_a_full_disk_or_ctrl_c_goes_on_without_a_second_look(stopped, tmp_path, monkeypatch):
    looks, load = [], Candidate.load
    monkeypatch.setattr(Candidate, "load", lambda one, *sizes: looks.append(one.name) or load(one, *sizes))
    assert prepare.main(stopped) == 0
    assert looks == list(CAPTIONS)[5:]
    assert [meta.caption[:50] for meta, _ in encoded(tmp_path / "out" / "train")] == [c[:50] for c in CAPTIONS.values()]


def test_a_job_does_not_go_on_with_other_input_once_there_is_a_shard(stopped, tmp_path, capsys):
    before = contents(tmp_path / "out")
    write(tmp_path / "in" / "00.png", b"")
    for args, words in (
        ([], "00.png was missing, is [0, "),
        (["--dtype", "bf16"], "dtype was fp32, is bf16"),
        (["--t5", str(save_t5(tmp_path / "t5_copy"))], "/t5/model.safetensors"),
    ):
        line = refused([*stopped, *args], capsys)
        assert "was begun otherwise" in line and words in line and contents(tmp_path / "out") == before


def test_a_picture_that_changes_under_the_job_stops_it(nets, tmp_path, capsys, monkeypatch):
    lay_out(tmp_path / "in", with_bad=False)
    encode = Encoders.encode

    def spoil(self, *given):
        write(tmp_path / "in" / "11_palette.png", b"")
        return encode(self, *given)

    monkeypatch.setattr(Encoders, "encode", spoil)
    line = refused(make(nets, tmp_path / "in", tmp_path / "out", "--batch", 1, "--workers", 1), capsys, 3)
    assert "11_palette.png: not an image, though it was good a while ago" in line


def test_only_some_pictures_are_decoded_ahead():
    """Memory is bounded whatever the encoders take."""
    taken = []

    def candidates() -> Iterator[Namespace]:
        for number in range(40):
            taken.append(number)
            yield Namespace(load=lambda *sizes, number=number: number)

    with ThreadPoolExecutor(2) as pool:
        args = Namespace(batch=3, workers=2)
        for i, sample in enumerate(images.Job(args, None, MODEL, None, None, pool).loaded(candidates())):
            assert sample == i and len(taken) <= i + 4 * 3
    assert i == 39 and taken == list(range(40))


# What encoders are refused


def build(nets: Path, changes: Iterable = ()) -> Encoders:
    parts = {"vae_file": nets / "ae.safetensors", "t5": nets / "t5", "clip": nets / "clip" / "text_encoder"}
    parts |= {"model": MODEL, "device": torch.device("cpu"), "dtype": torch.float32}
    return Encoders(**parts | dict(changes))


def test_text_encoders_that_do_not_fit_are_refused(nets, tmp_path):
    lacking = save_t5(tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["encoder.block.1.layer.0.SelfAttention.q.weight"]  # transformers would put random values there
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    cases = (
        ({"t5": save_t5(tmp_path / "t5", 21)}, "(9, 21), the model wants (9, 28)"),
        ({"clip": save_clip(tmp_path / "clip", 16)}, "(16,), the model wants (14,)"),
        ({"t5": lacking}, "1 tensors are missing"),
        ({"clip": nets / "t5" / "gone"}, "is missing; give FLUX.1-schnell's text_encoder"),
        ({"model": config_file.load(MICRO, ["--model.latent_channels=4"]).model}, "model.latent_channels=4"),
    )
    assert [words for changes, words in cases if words not in refusal(build, nets, changes)] == []


def test_a_pickle_in_place_of_weights_and_code_beside_them_are_not_run(nets, tmp_path):
    folder = save_t5(tmp_path / "t5")
    mark = tmp_path / "it ran"
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).mkdir()\nclass Own: pass\n")
    owns = {"tokenizer_config.json": {"AutoTokenizer": ["own.Own", None]}, "config.json": {"AutoModel": "own.Own"}}
    for name, key in owns.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": key, "tokenizer_class": "Own"}))
    with contextlib.suppress(Refusal):
        build(nets, {"t5": folder})
    folder = save_t5(tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    write(folder / "pytorch_model.bin", pickle.dumps(Payload(mark)))
    assert "T5EncoderModel" in refusal(build, nets, {"t5": folder})
    assert not mark.exists()


def test_encodings_that_are_not_finite_stop_the_job_by_name(nets):
    net = build(nets)
    weight = net.t5.net.shared.weight.data
    weight[WORDS.index("dog") + 3] = torch.nan
    with pytest.raises(Fault, match="t5 of 'a dog' is NaN"):
        net.encode(torch.zeros(2, 3, HEIGHT, WIDTH, dtype=torch.uint8), ["a cat", "a dog"])


def test_bf16_text_encoders_differ_by_rounding_only(nets):
    full, half = (build(nets, {"dtype": dtype}).encode_text(["a red cat"]) for dtype in (torch.float32, torch.bfloat16))
    for name in ("t5", "clip"):
        ours, theirs = (torch.from_numpy(shards.from_bf16_bits(bits[name])) for bits in (half, full))
        assert 0 < relative_error(ours, theirs) < 0.05


def test_sets_of_other_encoders_do_not_share_an_output(tmp_path):
    draw = np.random.default_rng(0)
    values, other = ({name: draw.standard_normal(LAYOUT.shapes[name]) for name in ("t5", "clip")} for _ in range(2))

    def write(noise: float) -> None:
        bits = {name: shards.to_bf16_bits(array + noise * other[name]) for name, array in values.items()}
        images._write_empty(tmp_path / "train", bits, LAYOUT)

    (tmp_path / "train.partial").mkdir()
    write(0)
    before = contents(tmp_path)
    write(0.01)
    assert "empty_encodings was made with another t5" in refusal(write, 1)
    assert contents(tmp_path) == before
