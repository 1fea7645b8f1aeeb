"""Targets: what data sets are made from (pictures with captions, arrow files) and the notes of a job that goes on.

A hurt picture or caption may lose or change its own sample and no other. The oracle pairs captions and pictures by
itself, and reads arrow files by pyarrow alone.
"""

import csv
import io
import json
import os
import tarfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import shard_damage
from fuzz.damage import BYTES, JSON, TEXT, at, of_content
from fuzz.damage_files import ARCHIVE, PLACES, npy_head
from fuzz.engine import Target
from fuzz.targets_data import LAYOUT, crc
from PIL import Image
from torch import Tensor

from flux_ref.formats import shard_writer
from tools.prepare import images, jobs, mlcommons, raw_images

COUNT, SIDE = 4, 16


def picture(number: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), np.uint8)
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
    for name, seed in (("set", 0), ("other", 1)):
        (folder / name).mkdir()
        rows = {f"{number}.png": f'a "cat", {number}{seed} é' for number in range(COUNT)}
        for number, file in enumerate(rows):
            (folder / name / file).write_bytes(picture(number + 10 * seed))
        lines = [json.dumps({"file_name": file, "text": text}, ensure_ascii=False) for file, text in rows.items()]
        if kind == "csv":
            lines = [
                "file_name,text",
                *(f'{file},"{text.replace(chr(34), 2 * chr(34))}"' for file, text in rows.items()),
            ]
        (folder / name / f"metadata.{kind}").write_text("\n".join(lines))


def make_archives(folder: Path) -> None:
    for name, seed in (("set", 0), ("other", 1)):
        (folder / name).mkdir()
        with tarfile.open(folder / name / "0.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for file, content in contents(seed).items():
                entry = tarfile.TarInfo(file)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def run_pictures(folder: Path) -> list[tuple]:
    """Name, caption, timestep and checksum of the pixels of each sample, or why it is rejected."""
    source, found = raw_images.source("set"), []
    for part in source.parts(source.files()):
        for candidate in part():
            sample = candidate.load(SIDE, SIDE, 8)
            read = (sample.rejected,) if sample.rejected else (sample.caption, sample.timestep, crc_of(sample.pixels))
            found.append((sample.name, *read))
    return found


def crc_of(pixels: Tensor) -> int:
    return crc(pixels.numpy())


def judge_pictures(folder: Path, outcome: list[tuple]) -> str:
    """Each accepted sample is one picture and the caption of the same name; no sample is lost without a word."""
    files = {path.name: _head(path) for path in Path("set").iterdir() if path.is_file()}
    found = {name: rest for name, *rest in outcome}
    shown = [file for file in files if file.endswith(raw_images.SUFFIXES) and not file.startswith(".")]
    if not found.keys() >= set(shown):
        return "a picture is lost"
    return _judge(files, found)


def judge_listed(folder: Path, outcome: list[tuple]) -> str:
    """Each row and each picture is there, and each accepted sample has the caption and the picture of its row."""
    shown = {path.name for path in Path("set").iterdir() if path.suffix in raw_images.SUFFIXES and path.name[0] != "."}
    if lost := shown - {name for name, *_ in outcome}:
        return f"{lost} are lost"
    path = next(Path("set").glob("metadata.*"), None)
    if path is None or path.suffix not in (".jsonl", ".csv"):
        return "a caption from nowhere" if any(len(sample) > 2 for sample in outcome) else ""
    text = path.read_bytes().decode().removeprefix("\ufeff")
    if path.suffix == ".csv":
        head, *table = csv.reader(io.StringIO(text, newline=""))
        rows = [dict(zip(head, row)) for row in table if row]
    else:
        rows = [_object(line) for line in text.split("\n") if line.strip()]
    if sum(sample[1] != f"not in {path.name}" for sample in outcome) != len(rows):
        return "a row is lost"
    pairs = {(os.path.normpath(str(row.get("file_name"))), str(row.get("text")).strip()) for row in rows}
    for name, caption, *rest in (sample for sample in outcome if len(sample) > 2):
        with Path("set", name).open("rb") as file:
            if (name, caption) not in pairs or rest[1] != crc_of(raw_images.pixels(file, SIDE, SIDE, 8)):
                return f"{name} is not what its row says"
    return ""


def _object(line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(2**20)
    except OSError:
        return b""


def judge_archives(folder: Path, outcome: list[tuple]) -> str:
    """As read by Python's tarfile, as far as tarfile can read. Damage to the archive must be told."""
    found = {name: rest for name, *rest in outcome}
    damaged = any("damaged archive" in rest[0] for rest in found.values())
    files, complete = {}, True
    for path in sorted(Path("set").glob("*.tar")):
        try:
            with tarfile.open(path, "r:", errorlevel=2) as archive:
                for entry in archive:
                    name, keys = f"{path}/{entry.name}", {"data": archive.extractfile(entry)}
                    if name not in files and keys["data"]:
                        files[name] = keys["data"].read()
        except Exception:  # tarfile raises a dozen kinds
            complete = False
    lost = [name for name in ("0", "1", "2", "3") if not any(key.endswith(f"/{name}") for key in found)]
    if lost and not damaged and complete and any(f"/{name}." in file for name in lost for file in files):
        return f"{lost} are lost without a word"
    samples = {name: rest for name, rest in found.items() if len(rest) == 3}
    return _judge(files, samples) if complete else ""


def _judge(files: dict[str, bytes], found: dict[str, list]) -> str:
    for name, rest in found.items():
        if len(rest) == 3:
            beside = {Path(file).suffix: content for file, content in files.items() if _stem(file) == _stem(name)}
            caption = beside[".txt"].decode() if ".txt" in beside else json.loads(beside[".json"])["caption"]
            pictures = [content for suffix, content in beside.items() if suffix.lower() in raw_images.SUFFIXES]
            pixels = raw_images.pixels(io.BytesIO(pictures[0]), SIDE, SIDE, 8)
            if rest[0] != caption.strip() or len(pictures) != 1 or rest[2] != crc_of(pixels):
                return f"{name} is not what its files say"
    return ""


def _stem(name: str) -> str:
    return name.removesuffix(Path(name).suffix) if Path(name).suffix else name


# Arrow files


def make_arrow(folder: Path) -> None:
    import arrow_files  # needs pyarrow

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
    import pyarrow as pa

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


TARGETS = [
    Target(
        "pictures",
        make_pictures,
        at("set/*.*g", BYTES, "picture_")
        | at("set/*.txt", TEXT, "text_")
        | at("set/*.json", JSON, "json_")
        | at("set/*.*", PLACES),
        run_pictures,
        judge=judge_pictures,
        weight=2,
    ),
    *(
        Target(
            f"listed_{kind}",
            partial(make_listed, kind=kind),
            at("set/metadata.*", TEXT) | at("set/*.*", PLACES),
            run_pictures,
            judge=judge_listed,
        )
        for kind in ("jsonl", "csv")
    ),
    Target("archives", make_archives, at("set/*.tar", BYTES | ARCHIVE), run_pictures, judge=judge_archives, weight=2),
    Target(
        "arrow",
        make_arrow,
        at("set/*.arrow", BYTES, "file_")
        | at("set/*.arrow", of_content(npy_head) | PLACES)
        | at("set/state.json", JSON, "state_"),
        run_arrow,
        reading=read_arrow,
        weight=2,
    ),
    Target(
        "job",
        make_job,
        at("train.partial/plan.json", JSON, "plan_") | at("train.partial/checked.json", JSON, "checked_"),
        run_job,
    ),
]
