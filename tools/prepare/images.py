"""From pictures and captions to shards: read, resize, encode.

    python -m tools.prepare images --input DIR --output data/own --val-share 0.05
    torchrun --nproc-per-node 8 -m tools.prepare images --input DIR --output data/own --val-share 0.05

Each picture becomes a sample of OUTPUT/train or OUTPUT/val, as a hash of its name chooses, or a row of
OUTPUT/rejected.tsv with the reason. The pictures are cut into parts: a tar, or --per-shard files of a folder. One rank
(number % ranks) makes a part: its shard of either set and, last, the list of its rejected pictures, which says that the
part is done. So the bytes do not depend on the number of ranks. At the end the samples of validation are copied into
one sequence, in which the timesteps take turns.

All this grows in OUTPUT.partial. A stopped command goes on with the parts that are not done.
"""

import argparse
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from flux_ref import files, ranks, sharding, shards
from flux_ref.config import ModelConfig, ParallelConfig
from flux_ref.errors import Refusal, between, one_line
from flux_ref.pictures.encoders import Encoders
from flux_ref.progress import progress
from flux_ref.schedule import TIMESTEPS
from tools.prepare import job, pictures
from tools.prepare.pictures import Part, Picture, Rejected

THREADS = 8  # of a rank, that decode pictures
Loaded = tuple[Picture, tuple[Tensor, str] | None, str]  # pixels and caption, or why it is rejected


@dataclass(frozen=True)
class Maker:
    """What this rank makes parts with. folder: in which the data set grows."""

    args: argparse.Namespace
    folder: Path
    model: ModelConfig
    nets: Encoders
    pool: ThreadPoolExecutor
    bar: tqdm

    def make(self, number: int, part: Part) -> int:
        """Write the shards of a part, then its list of rejected pictures. Returns how many captions T5 cuts."""
        longer = 0
        count = 0
        rejected = []
        with ExitStack() as stack:
            written: dict[str, BinaryIO] = {}
            for batch in self._batches(part):
                rejected += [f"{one_line(picture.name)}\t{reason}\n" for picture, loaded, reason in batch if not loaded]
                good = [(picture.name, *loaded) for picture, loaded, _ in batch if loaded]
                if not good:
                    continue
                names, found, captions = zip(*good)
                longer += self.nets.t5.longer(captions)
                members = self.nets.encode(torch.stack(found), captions)
                for i, (name, caption) in enumerate(zip(names, captions)):
                    split = _split(name, self.args.val_share)
                    if split not in written:
                        path = shards.shard_path(_made(self.folder, split), number)
                        written[split] = stack.enter_context(shards.new_shard(path))
                    blobs = {kind: shards.npy_blob(bits[i]) for kind, bits in members.items()}
                    shards.add(written[split], shards.key_of(f"{split}_{number:06d}", count), blobs, None, caption)
                    count += 1
        files.write_whole(_done(self.folder, number), "".join(rejected))
        return longer

    def _batches(self, part: Part) -> Iterator[list[Loaded]]:
        """The pictures of a part, in order. Threads load some of the next ones meanwhile."""
        found = part()
        while block := list(islice(found, 4 * max(self.args.batch, THREADS))):
            loaded = self.pool.map(self._load, block)
            while batch := list(islice(loaded, self.args.batch)):
                yield batch
                self.bar.update(len(batch))

    def _load(self, picture: Picture) -> Loaded:
        try:
            return picture, picture.load(8 * self.model.latent_height, 8 * self.model.latent_width), ""
        except Rejected as error:
            return picture, None, str(error)


def _split(name: str, val_share: float) -> str:
    """By a hash of the name, so that a larger share keeps what a smaller one chose."""
    word = hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4]
    return "val" if int.from_bytes(word) < val_share * 2**32 else "train"


def _made(folder: Path, split: str) -> Path:
    """Where the parts' shards are: of training in the set, of validation beside it."""
    return folder / "set" / "train" if split == "train" else folder / "val"


def _done(folder: Path, number: int) -> Path:
    return folder / f"rejected_{number:06d}.tsv"


def _missing(count: Counter[str], val_share: float) -> str:
    """What there is too little of, in words."""
    if val_share > 0 and count["val"] < TIMESTEPS:
        return f"{count['val']} of the {TIMESTEPS} samples that validation needs"
    return "no training sample" if val_share < 1 and not count["train"] else ""


def _require_enough(parts: list[Part], val_share: float) -> None:
    """A look at the first pictures, as T5-XXL loads for minutes. Raises: Refusal."""
    count = Counter[str]()
    for picture in chain.from_iterable(part() for part in parts):
        count[_split(picture.name, val_share)] += not picture.rejected
        if not _missing(count, val_share):
            return
    missing = _missing(count, val_share)
    raise Refusal(f"--input holds {count.total()} pictures, which give {missing}; add pictures or change --val-share")


def _finish(folder: Path, args: argparse.Namespace, layout: shards.Layout) -> str:
    """Look at all parts, number their shards and join their lists. Returns what there is, in words. Raises: Refusal."""
    root = folder / "set"
    rows = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("rejected_*.tsv")))
    files.write_whole(root / "rejected.tsv", f"picture\treason\n{rows}")

    made = {}
    for split in ("train", "val"):
        place = _made(folder, split)
        made[split] = shards.ShardSet(place if any(place.iterdir()) else "", layout, "val")
    count = Counter({split: len(found) for split, found in made.items()})
    summary = (
        f"{count['train']:,} training and {count['val']:,} validation samples; {len(rows.splitlines()):,} rejected"
    )
    if missing := _missing(count, args.val_share):
        raise Refusal(f"{args.input} gives {missing}: {summary}, see {root}/rejected.tsv; then remove {folder}")

    for number, path in enumerate(made["train"].paths):
        path.rename(shards.shard_path(path.parent, number))  # a part without a sample leaves no gap
    files.remove(root / "val")
    if count["val"]:
        shards.write(root / "val", _in_turns(made["val"]), "val", args.per_shard)
    return summary


def _in_turns(val: shards.ShardSet) -> Iterator[shards.Sample]:
    """The samples of validation, each with its timestep."""
    val.open()
    for index in range(len(val)):
        rows = val.layout.rows()
        caption = val.read(index, rows).caption
        yield shards.Sample(rows, index % TIMESTEPS, caption)


def _made_from(args: argparse.Namespace, model: ModelConfig, listed: list[str]) -> dict:
    """What must be the same when a stopped command goes on."""
    names = ("input", "val_share", "caption_column", "per_shard", "model", "dtype")
    digest = hashlib.sha256("\n".join(listed).encode(errors="surrogateescape")).hexdigest()
    return {name: str(getattr(args, name)) for name in names} | shards.layout(model).shapes | {"files": digest}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", type=Path, required=True, metavar="DIR", help="folder of pictures of 64 pixels or more, or of tars")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to make")
    text = "part of the pictures that becomes val; 0: none, 1: all (%(default)s)"
    add("--val-share", type=between(0, 1, float), default=0.05, metavar="SHARE", help=text)
    add("--caption-column", default="text", metavar="NAME", help="captions in metadata.jsonl or .csv (%(default)s)")
    text = "folder of the encoders, as in FLUX.1-schnell's repository (%(default)s)"
    add("--model", type=Path, default=Path("FLUX.1-schnell"), metavar="DIR", help=text)
    text = "of the text encoders; in fp32 T5-XXL takes 19 GB on each rank (%(default)s)"
    add("--dtype", choices=tuple(sharding.DTYPES), default="fp32", help=text)
    add("--batch", type=job.number, default=32, metavar="N", help="pictures encoded at a time (%(default)s)")
    text = "files of a folder that become one shard; a tar becomes one shard (%(default)s)"
    add("--per-shard", type=job.number, default=1000, metavar="N", help=text)
    add("--config", metavar="FILE", help="use the sizes of this config's model (FLUX.1-schnell's)")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about pictures that are counted anyway
    try:
        return _make(args)
    finally:
        if ranks.is_single():
            ranks.stop()


def _make(args: argparse.Namespace) -> int:
    model = job.config(args.config).model
    world = ranks.start(ParallelConfig(replicate=1), few_threads=False)  # encoders are large
    with ranks.agreed():
        if not args.input.is_dir():
            raise Refusal(f"--input {args.input} is no folder; give the folder of the pictures or tars")
        if args.output.resolve().is_relative_to(args.input.resolve()):
            raise Refusal(f"--output {args.output} lies in --input, which may not change; choose another")
        job.require_new(args.output)
        listed = pictures.find(args.input) if world.rank == 0 else []
    listed = ranks.gather_objects(listed)[0]
    with ranks.agreed():
        parts = pictures.parts_of(args.input, listed, args.caption_column, args.per_shard)
        _require_enough(parts, args.val_share)
        nets = Encoders(args.model, model, world.device, sharding.DTYPES[args.dtype])
    with ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
        folder = job.partial_of(args.output)
        with ranks.agreed():
            if world.rank == 0:  # for all
                stack.enter_context(job.growing(args.output, _made_from(args, model, listed)))
                for split in ("train", "val"):
                    _made(folder, split).mkdir(exist_ok=True)
        bar = progress(desc=f"encoding, rank 0 of {world.size}", unit=" pictures", disable=world.rank > 0)
        maker = Maker(args, folder, model, nets, pool, stack.enter_context(bar))
        longer = 0
        for number in range(world.rank, len(parts), world.size):
            if not _done(folder, number).exists():
                longer += maker.make(number, parts[number])
        longer = sum(ranks.gather_objects(longer))
        with ranks.agreed():
            if world.rank == 0:
                files.remove(folder / "set" / "empty_encodings")
                shards.write_empty(folder / "set" / "empty_encodings", nets.empty)
                print(f"{args.output}: {_finish(folder, args, shards.layout(model))}, see rejected.tsv")
    if world.rank == 0 and longer:
        print(f"{longer} of the captions encoded now are cut after {model.text_tokens} tokens, model.text_tokens")
    return 0
