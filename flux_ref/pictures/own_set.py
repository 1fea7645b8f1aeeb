"""The toy data set of a folder of captioned pictures: data.kind=toy with data.pictures.

Pictures go through the stand-in encoders of toy.py, so nothing is downloaded and little is computed.
"""

import json
from collections import Counter
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np

from flux_ref import files, shards, toy
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal, one_line, progress
from flux_ref.pictures import captioned, sheet
from flux_ref.pictures.captioned import Rejected
from flux_ref.schedule import TIMESTEPS

EVERY = 10  # one of so many pictures is held out
MADE_FROM = "made_from.txt"
SHOWN = 9  # pictures of codec.png


def ensure(cfg: Config) -> None:
    """Make the set of data.pictures in the folder above data.train, if it is not there. Raises: Refusal, OSError.

    A set that was made from other files is refused: made_from.txt has their names, sizes and times.
    """
    folder = Path(cfg.data.train).parent
    root = Path(cfg.data.pictures)
    if not root.is_dir():
        raise Refusal(f"data.pictures={root} is no folder; give the folder of your pictures")
    names = captioned.find(root)
    note = folder / MADE_FROM
    stats = {name: (root / name).stat() for name in names}
    made_from = [json.dumps([name, stat.st_size, stat.st_mtime_ns]) for name, stat in stats.items()]
    toy.make_once(folder, lambda: make(folder, root, names, cfg.model, "\n".join(made_from)))
    if differ := {*made_from} ^ {*(note.read_text().split("\n") if note.is_file() else ())}:
        raise Refusal(
            f"{folder} was made from something else than {root} holds now; name, size or time differ of {min(differ)};"
            f" remove {folder} and the run that it trained, or give another --data.train=DIR/train, --data.val=DIR/val"
            " and --run.dir"
        )


def make(folder: Path, root: Path, names: list[str], model: ModelConfig, made_from: str) -> None:
    """Write the set, which appears once it is whole, and say what there is. names: as captioned.find gives them."""
    counts = Counter[str]()
    rejected = []
    pairs: list[np.ndarray] = []  # for codec.png: a picture, then what the codec makes of it
    titles: list[str] = []
    found = chain.from_iterable(part() for part in captioned.parts_of(root, names, "text", 1000))
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
        files.write_whole(place / MADE_FROM, made_from)
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
