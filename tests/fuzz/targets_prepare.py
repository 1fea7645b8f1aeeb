"""Targets: what data sets are made from (pictures with captions, arrow files) and the notes of a job that goes on.

A hurt picture or caption may lose or change its own sample and no other. The oracle pairs captions and pictures by
itself, and reads arrow files by pyarrow alone.
"""

import csv
import io
import json
import os
import re
import tarfile
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import arrow_files
import numpy as np
import pyarrow as pa
import shard_damage
from fuzz.damage import BYTES, JSON, TEXT, at, edits
from fuzz.damage_files import ARCHIVE, PLACES, npy_head
from fuzz.engine import Target
from fuzz.targets_data import LAYOUT, crc
from PIL import Image

from flux_ref.formats import shard_writer
from tools.prepare import images, jobs, mlcommons, raw_images

COUNT, SIDE = 4, 16


def picture(number: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (64, 70, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def contents(seed: int = 0) -> dict[str, bytes]:
    """The files of a few samples: captions beside as txt, or as json with a timestep."""
    found = {}
    for number in range(COUNT):
        kind = ("PNG", "JPEG")[number % 2]
        found[f"{number}.{kind.lower()}"] = picture(number + 10 * seed, kind)
        if number < 2:
            found[f"{number}.txt"] = f"a cat {number}{seed}".encode()
        else:
            found[f"{number}.json"] = json.dumps({"caption": f"a dog {number}{seed}", "timestep": number}).encode()
    return found


def make_pictures(folder: Path) -> None:
    for name, seed in (("set", 0), ("other", 1)):
        (folder / name).mkdir()
        for file, content in contents(seed).items():
            (folder / name / file).write_bytes(content)


def make_listed(folder: Path, kind: str) -> None:
    """All captions in metadata.jsonl or metadata.csv."""
    make_pictures(folder)
    for seed, name in enumerate(("set", "other")):
        rows = [{"file_name": path.name, "text": f'a "cat", {seed} é'} for path in sorted((folder / name).glob("*g"))]
        for path in (folder / name).glob("*.[tj][xs]*"):
            path.unlink()
        with (folder / name / f"metadata.{kind}").open("w", encoding="utf-8", newline="") as file:
            if kind == "csv":
                table = csv.DictWriter(file, rows[0])
                table.writeheader()
                table.writerows(rows)
            else:
                file.write("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def make_archives(folder: Path) -> None:
    make_pictures(folder)
    for name in ("set", "other"):
        paths = sorted((folder / name).iterdir())
        with tarfile.open(folder / name / "0.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for path in paths:
                archive.add(path, path.name)
                path.unlink()


def run_pictures(folder: Path) -> list[tuple]:
    """Name, caption, timestep and checksum of the pixels of each sample, or why it is rejected."""
    source, found = raw_images.source("set"), []
    for part in source.parts(source.files()):
        for candidate in part():
            sample = candidate.load(SIDE, SIDE)
            read = (
                (sample.rejected,) if sample.rejected else (sample.caption, sample.timestep, crc(sample.pixels.numpy()))
            )
            found.append((sample.name, *read))
    return found


def judge_pictures(folder: Path, outcome: list[tuple]) -> str:
    """Each accepted sample has the picture and a caption of its name; no picture is lost without a word."""
    files, is_whole = _files()
    found = {_stem(name) for name, *_ in outcome}
    shown = {_stem(name) for name in files if name.endswith(raw_images.SUFFIXES)}
    lost = {stem for stem in shown - found if re.fullmatch(r"(set/.*\.tar/)?[0-9]", stem)}
    if lost and is_whole and not any("damaged archive" in str(read[0]) for _, *read in outcome):
        return f"{lost} are lost without a word"
    captions = _listed()
    for name, caption, *read in outcome:
        if read and is_whole:
            texts = [own for file, own in captions if file == name]
            beside = [name] if texts else [file for file in files if _stem(file) == _stem(name)]
            texts = texts or [_caption(file, files[file]) for file in beside]
            pictures = [files[file] for file in beside if Path(file).suffix.lower() in raw_images.SUFFIXES]
            sums = [crc(raw_images.pixels(content, SIDE, SIDE).numpy()) for content in pictures]
            if caption not in texts or read[1:] != sums:
                return f"{name} is not what its files say"
    return ""


def _files() -> tuple[dict[str, bytes], bool]:
    """The plain files and members of archives, and whether Python's tarfile reads all of them."""
    files = {}
    is_whole = True
    for path in sorted(path for path in Path("set").iterdir() if path.is_file()):
        if path.suffix != ".tar":
            with path.open("rb") as file:
                files[path.name] = file.read(2**20)
            continue
        try:
            with tarfile.open(path, "r:", errorlevel=2) as archive:
                for entry in filter(tarfile.TarInfo.isreg, archive):
                    files.setdefault(f"{path}/{entry.name}", archive.extractfile(entry).read())
        except Exception:  # tarfile raises a dozen kinds
            is_whole = False
    return files, is_whole


def _listed() -> list[tuple[str, str]]:
    """(name, caption) of each row of metadata.jsonl or metadata.csv."""
    path = next(Path("set").glob("metadata.*"), Path("none"))
    text = path.read_bytes().decode("utf-8-sig") if path.suffix in (".jsonl", ".csv") else ""
    rows = list(csv.DictReader(io.StringIO(text, newline=""))) if path.suffix == ".csv" else []
    for line in text.split("\n") if not rows else []:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [(os.path.normpath(row["file_name"]), str(row.get("text")).strip()) for row in rows if _names_a_file(row)]


def _names_a_file(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("file_name"), str)


def _caption(name: str, content: bytes) -> str | None:
    """The caption in a file beside a picture."""
    with suppress(ValueError, TypeError):
        return (content.decode() if name.endswith(".txt") else json.loads(content)["caption"]).strip()


def _stem(name: str) -> str:
    return name.removesuffix(Path(name).suffix)


# Arrow files


def make_arrow(folder: Path) -> None:
    for name, seed in (("set", 0), ("other", 1)):
        rows = []
        for sample in shard_damage.samples(5, seed):
            blobs = {mlcommons.COLUMNS[key]: shard_writer.npy_blob(bits) for key, bits in sample.members.items()}
            rows.append({"timestep": sample.timestep, **blobs})
        files = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        arrow_files.write_arrow(folder / name / files[0], rows[:3], (1, 1, 1))
        arrow_files.write_arrow(folder / name / files[1], rows[3:], (1, 1))
        arrow_files.write_state(folder / name, files)


def run_arrow(folder: Path) -> list[tuple]:
    rows = mlcommons._inspect(Path("set"), "val", LAYOUT)
    found = mlcommons._samples(rows, range(sum(rows.values())), "val", LAYOUT)
    return [(timestep, [crc(blob) for blob in blobs.values()]) for _, blobs, timestep in found]


def read_arrow(folder: Path) -> list[tuple]:
    state, found = Path("set/state.json"), []
    names = sorted(path.name for path in Path("set").glob("data-*.arrow"))
    if state.exists():
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
    if len(names) != 2:
        raise ValueError("not all files of the set")
    for name in names:
        try:
            with pa.memory_map(f"set/{name}") as file:
                table = pa.ipc.open_stream(file).read_all()
        except pa.ArrowException as error:
            raise ValueError(str(error)) from None
        for row in table.to_pylist():
            found.append((row["timestep"], [crc(row[column]) for column in mlcommons.COLUMNS.values()]))
    return found


# A job that goes on

PLAN = {"options": {"split": "train", "per_shard": 2}, "files": [["a.png", 10, 11], ["b.png", 12, 13]]}
PARTS = [[3, [[1, "b.png", "too small"]]], [2, []]]


def make_job(folder: Path) -> None:
    growing = jobs.growing(folder / "train")
    growing.mkdir()
    (growing / jobs.PLAN).write_text(json.dumps(PLAN))
    checked = {"crc32": zlib.crc32(json.dumps(PARTS).encode()), "parts": PARTS}
    (growing / images.CHECKED).write_text(json.dumps(checked))
    (growing / "shard_000001.tar").write_bytes(b"x")


def run_job(folder: Path) -> tuple:
    final = Path("train").resolve()
    checked = jobs.growing(final) / images.CHECKED
    with jobs.claimed(final, PLAN):
        found = sorted(jobs.missing(final, 5, 2)), images._read_checked(checked) if checked.exists() else PARTS
    final.rename(jobs.growing(final))
    return found


PICTURES = at("set/*.*g", BYTES, "picture_") | at("set/*.txt", TEXT, "text_") | at("set/*.json", JSON, "json_")
LISTED = at("set/metadata.*", TEXT) | at("set/*.*", PLACES)
ARROW = at("set/*.arrow", BYTES, "file_") | at("set/*.arrow", edits(npy_head=npy_head) | PLACES)
JOB = at("train.partial/plan.json", JSON, "plan_") | at("train.partial/checked.json", JSON, "checked_")
TARGETS = [
    Target("pictures", make_pictures, PICTURES | at("set/*.*", PLACES), run_pictures, judge=judge_pictures),
    *(
        Target(f"listed_{kind}", partial(make_listed, kind=kind), LISTED, run_pictures, judge=judge_pictures)
        for kind in ("jsonl", "csv")
    ),
    Target("archives", make_archives, at("set/*.tar", BYTES | ARCHIVE), run_pictures, judge=judge_pictures),
    Target("arrow", make_arrow, ARROW | at("set/state.json", JSON, "state_"), run_arrow, reading=read_arrow),
    Target("job", make_job, JOB, run_job),
]
