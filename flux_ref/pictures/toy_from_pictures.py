"""The toy data set of a folder of captioned pictures: data.kind=toy with data.pictures.

Pictures go through the stand-in encoders of toy.py, so nothing is downloaded and little is computed.
"""

import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

from flux_ref import dataset, files, toy
from flux_ref.cli import Refusal, notice, one_line, progress
from flux_ref.config import Config, ModelConfig
from flux_ref.pictures import captioned
from flux_ref.pictures.captioned import Rejected
from flux_ref.schedule import TIMESTEPS

EVERY = 10  # one of so many pictures is held out
MADE_FROM = "made_from.txt"


def ensure(cfg: Config) -> None:
    """Make the set of data.pictures in the folder above data.train, if it is not there. Raises: Refusal, OSError.

    A set that was made from other files is refused: made_from.txt has the checksum of each by its name.
    """
    folder = Path(cfg.data.train).parent
    root = Path(cfg.data.pictures)
    note = folder / MADE_FROM
    if note.is_file() and not root.exists():
        notice(f"data.pictures={root} is gone; {folder} is used as it was made from it")
        return
    toy.make_once(folder, lambda: make(folder, root, cfg.model))
    made_from = files.json_object_or_empty(note.read_bytes() if note.is_file() else b"")
    now = _checksums(root)
    differ = sorted(name for name in now | made_from if now.get(name) != made_from.get(name))
    if differ:
        raise Refusal(
            f"the folder {folder} was not made from what {root} holds now: files that are new, gone or changed:"
            f" {len(differ)}, such as {differ[0]};"
            " for a new set and its run give another --data.train=DIR/train, --data.val=DIR/val and --run.dir"
        )


def _checksums(root: Path) -> dict[str, str]:
    """Of the files of a folder, by name; "" for what cannot be read."""
    found = {}
    for name in progress(captioned.list_files(root), desc=f"looking at {root}", unit=" files", leave=False, delay=2):
        found[name] = ""
        if os.path.isfile(root / name):  # a pipe would wait for ever
            with suppress(OSError), (root / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def make(folder: Path, root: Path, model: ModelConfig) -> None:
    """Write the set, which appears once it is whole, and say what there is."""
    made_from = _checksums(root)
    counts = Counter[str]()
    reasons = Counter[str]()
    rejected = []
    found = captioned.find_pictures(root, [*made_from], "text")
    with (
        files.whole(folder, is_new=True) as place,
        dataset.new_shard(dataset.shard_path(place / "train", 0)) as train,
        dataset.new_shard(dataset.shard_path(place / "val", 0)) as val,
    ):
        for picture in progress(found, desc=f"encoding {root}", unit=" pictures", leave=False):
            try:
                pixels, caption = picture.load(8 * model.latent_height, 8 * model.latent_width)
            except Rejected as error:
                rejected.append(f"{one_line(picture.name)}\t{error}\n")
                reasons[str(error)] += 1
                continue
            values = pixels.numpy() / np.float32(127.5) - 1
            split, shard = ("val", val) if is_held_out(counts.total()) else ("train", train)
            dataset.add(shard, *toy.make_sample(split, counts[split], values, caption, model, own=True))
            counts[split] += 1
        if counts["val"] < TIMESTEPS:
            why = "".join(f", {count} for: {reason}" for reason, count in reasons.most_common(3))
            raise Refusal(
                f"data.pictures={root} gives {counts['train']} pictures to train on and {counts['val']} held out;"
                f" {len(rejected)} are rejected{why}."
                f" One picture of {EVERY} is held out, and {TIMESTEPS} must be; give {EVERY * TIMESTEPS} good ones"
            )
        toy.write_empty(place, model, own=True)
        files.write_whole(place / "rejected.tsv", "picture\treason\n" + "".join(rejected))
        files.write_whole(place / MADE_FROM, json.dumps(made_from, indent=0))
    print(
        f"{folder}: {counts['train']:,} pictures to train on and {counts['val']:,} held out;"
        f" {len(rejected):,} rejected, see {folder}/rejected.tsv"
    )


def is_held_out(number: int) -> bool:
    """Whether picture `number` of a folder is of validation. Its place among EVERY walks, as folders may repeat."""
    return number % EVERY == 7 * (number // EVERY) % EVERY
