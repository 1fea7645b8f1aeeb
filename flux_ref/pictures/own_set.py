"""The toy data set of a folder of captioned pictures: data.kind=toy with data.pictures.

Pictures go through the stand-in encoders of toy.py, so nothing is downloaded and little is computed.
"""

import hashlib
import json
import os
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

import numpy as np

from flux_ref import files, shards, toy
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal, counted, notice, one_line, progress
from flux_ref.pictures import captioned, sheet
from flux_ref.pictures.captioned import Rejected
from flux_ref.schedule import TIMESTEPS

EVERY = 10  # one of so many pictures is held out
MADE_FROM = "made_from.txt"
SHOWN = 9  # pictures of codec.png


def ensure(cfg: Config) -> None:
    """Make the set of data.pictures in the folder above data.train, if it is not there. Raises: Refusal, OSError.

    A set that was made from other files is refused: made_from.txt has the size, time and checksum of each by its name.
    """
    folder = Path(cfg.data.train).parent
    root = Path(cfg.data.pictures)
    note = folder / MADE_FROM
    if note.is_file() and not root.exists():
        notice(f"data.pictures={root} is gone; {folder} is used as it was made from it")
        return
    now = {name: _size_and_time(root / name) for name in counted(captioned.find(root))}
    toy.make_once(folder, lambda: make(folder, root, now, cfg.model))
    made_from = files.json_object(note.read_bytes()) if note.is_file() else {}
    if differs := f"it has no list {MADE_FROM}" if not made_from else _difference(root, now, made_from):
        raise Refusal(
            f"the folder {folder} is no set of what {root} holds now: {differs};"
            " for a new set and its run give another --data.train=DIR/train, --data.val=DIR/val and --run.dir"
        )


def _size_and_time(path: Path) -> list[int]:
    """Of a regular file; zeros of anything else, which nothing reads. Raises: OSError."""
    return [path.stat().st_size, path.stat().st_mtime_ns] if os.path.isfile(path) else [0, 0]


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with suppress(OSError), path.open("rb") as file:  # the list of rejected pictures has what cannot be read
        for block in counted(iter(lambda: file.read(2**20), b"")):
            digest.update(block)
    return digest.hexdigest()


def _difference(root: Path, now: dict[str, list], made_from: dict[str, list]) -> str:
    """The first file that is not as it was, in words; empty if there is none."""
    for name in counted(sorted({*now, *made_from})):
        if (name in now) != (name in made_from):
            return f"{name} is {'new' if name in now else 'gone'}"
        size, moment, checksum = made_from[name]
        if now[name][0] != size:
            return f"{name} has another size"
        if size and now[name][1] != moment and _checksum(root / name) != checksum:
            return f"{name} has other content"
    return ""


def make(folder: Path, root: Path, now: dict[str, list[int]], model: ModelConfig) -> None:
    """Write the set, which appears once it is whole, and say what there is.

    now: the size and time of each file, by the names that captioned.find gives.
    """
    counts = Counter[str]()
    rejected = []
    pairs: list[np.ndarray] = []  # for codec.png: a picture, then what the codec makes of it
    titles: list[str] = []
    found = chain.from_iterable(part() for part in captioned.parts_of(root, [*now], "text", 1000))
    sums = progress(now, desc=f"reading {root}", unit=" files", leave=False)
    made_from = {name: [*now[name], now[name][0] and _checksum(root / name)] for name in sums}  # a pipe has size 0
    with files.whole(folder, is_new=True) as place:
        with ExitStack() as stack:
            new = {
                split: stack.enter_context(shards.new_shard(shards.shard_path(place / split, 0)))
                for split in ("train", "val")
            }
            for picture in progress(found, desc=f"encoding {root}", unit=" pictures", leave=False):
                try:
                    pixels, caption = picture.load(8 * model.latent_height, 8 * model.latent_width)
                except Rejected as error:
                    rejected.append(f"{one_line(picture.name)}\t{error}\n")
                    continue
                values = pixels.numpy() / np.float32(127.5) - 1
                mean = toy.encode(values)
                number = counts.total()
                split = "val" if is_held_out(number) else "train"
                texts = toy.encode_caption(caption, model, own=True)
                meta, members = toy.sample(split, counts[split], mean, caption, texts)
                shards.add(new[split], meta, members)
                counts[split] += 1
                if number < SHOWN:
                    pairs += [values, toy.decode(mean)]
                    titles += [caption, "as the toy codec keeps it"]
        if counts["val"] < TIMESTEPS:
            reasons = Counter(row.rpartition("\t")[2].strip() for row in rejected).most_common(3)
            raise Refusal(
                f"data.pictures={root} gives {counts['train']} pictures to train on and {counts['val']} held out;"
                f" {len(rejected)} are rejected{''.join(f', {count} for: {reason}' for reason, count in reasons)}."
                f" One picture of {EVERY} is held out, and {TIMESTEPS} must be; give {EVERY * TIMESTEPS} good ones"
            )
        toy.write_empty(place, toy.encode_caption("", model, own=True))
        files.write_whole(place / "rejected.tsv", "picture\treason\n" + "".join(rejected))
        files.write_whole(place / MADE_FROM, json.dumps(made_from, indent=0))
        sheet.save(pairs, titles, place / "codec.png")
    shown = np.stack(pairs)
    lost = 127.5 * abs(shown[::2] - shown[1::2]).mean()
    print(
        f"{folder}: {counts['train']:,} pictures to train on and {counts['val']:,} held out;"
        f" {len(rejected):,} rejected, see {folder}/rejected.tsv\n"
        f"the toy codec changes a colour by about {lost:.1f} of 255; {folder}/codec.png shows it"
    )


def is_held_out(number: int) -> bool:
    """Whether picture `number` of a folder is of validation. Its place among EVERY walks, as folders may repeat."""
    return number % EVERY == 7 * (number // EVERY) % EVERY
