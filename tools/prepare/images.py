"""From pictures and captions to shards: read, resize, encode.

    python -m tools.prepare images --input DIR --output data/own --val-share 0.05
    torchrun --nproc-per-node 8 -m tools.prepare images --input DIR --output data/own --val-share 0.05

Each picture becomes a sample of OUTPUT/train or OUTPUT/val, as a hash of its name chooses, or a row of
OUTPUT/rejected.tsv with the reason. The pictures are cut into parts: a tar, or PER_PART files of a folder. One rank
(number % ranks) makes a part: its shard of either set and, last, the list of its rejected pictures, which says that the
part is done. So the bytes do not depend on the number of ranks. At the end the samples of validation are copied into
one sequence, in which the timesteps take turns.

All this grows in OUTPUT.partial. A stopped command goes on with the parts that are not done.
"""

import hashlib
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from flux_ref import dataset, files, ranks
from flux_ref.cli import Refusal, one_line, progress
from flux_ref.config import ModelConfig, ParallelConfig
from flux_ref.dataset import Meta, ShardSet, key_of, shard_path
from flux_ref.pictures import captioned
from flux_ref.pictures.captioned import Rejected
from flux_ref.pictures.encoders import load_autoencoder, text_encoders
from flux_ref.precision.recipe import DTYPES
from flux_ref.ranks import agreed
from flux_ref.schedule import TIMESTEPS
from tools.figures import between
from tools.prepare import common
from tools.prepare.tars import Part, split_into_parts

THREADS = 8  # of a rank, that decode pictures
PER_PART = 1000  # files of a folder that become one shard
SHARDS_OF_PARTS = {"train": "set/train", "val": "val"}  # of each split, below the folder that grows


# B batch  H, W pixel rows and columns  C, Y, X latent  T text tokens (256)  E T5 features (4096)  V CLIP features (768)


class Encoders:
    """From pixels and captions to the four members of samples, as bf16 bits."""

    def __init__(self, home: Path, model: ModelConfig, device: torch.device, dtype: torch.dtype):
        """home: as FLUX.1-schnell's repository. device: of the nets. dtype: of the text encoders.

        Raises: Refusal for files that do not fit the model.
        """
        self.autoencoder: Any = load_autoencoder(home, device)
        self.t5, self.clip = text_encoders(home, model, device, dtype)

    @torch.no_grad()
    def encode_text(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """{"t5": (B, T, E), "clip": (B, V)}. sync: the host waits for the device."""
        return {"t5": _bits(self.t5(captions)), "clip": _bits(self.clip(captions))}

    @torch.no_grad()
    def encode(self, pixels_B3HW: Tensor, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """encode_text and {"mean", "logvar": (B, C, Y, X)} at the autoencoder's own scale; pixels are uint8."""
        pixels_B3HW = pixels_B3HW.to(self.autoencoder.device).float() / 127.5 - 1
        moments = self.autoencoder.encode(pixels_B3HW).latent_dist.parameters
        mean, logvar = np.split(_bits(moments), 2, axis=1)
        return self.encode_text(captions) | {"mean": mean, "logvar": logvar}


def _bits(values: Tensor) -> np.ndarray:
    """Rounded to bf16, as its bits in uint16."""
    return values.bfloat16().view(torch.uint16).cpu().numpy()


def make_part(args: Namespace, nets: Encoders, bar: tqdm, number: int, part: Part) -> None:
    """Write the shards of a part, then its list of rejected pictures, which says that the part is done."""
    folder = common.partial_of(args.output)
    done = folder / f"rejected_{number:06d}.tsv"
    if done.exists():
        return
    rejected: list[str] = []
    count = 0
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(THREADS)
        stack.callback(pool.shutdown, cancel_futures=True)  # at Ctrl-C nobody waits for pictures
        loaded = _loaded(args, pool, bar, part, rejected)

        @cache
        def shard(split: str) -> BinaryIO:
            return stack.enter_context(dataset.new_shard(shard_path(folder / SHARDS_OF_PARTS[split], number)))

        while batch := list(islice(loaded, args.batch)):
            names, found, captions = zip(*batch)
            members = nets.encode(torch.stack(found), captions)
            for i, name in enumerate(names):
                split = _split(name, args.val_share)
                meta = Meta(key_of(f"{split}_{number:06d}", count), caption=captions[i])
                dataset.add(shard(split), meta, {kind: bits[i] for kind, bits in members.items()})
                count += 1
    files.write_whole(done, "".join(rejected))


def _loaded(
    args: Namespace, pool: ThreadPoolExecutor, bar: tqdm, part: Part, rejected: list[str]
) -> Iterator[tuple[str, Tensor, str]]:
    """Name, pixels and caption of the pictures of a part, in order. The pool loads some of the next ones meanwhile.

    rejected: gets a row for each picture that cannot be used.
    """
    pictures = part()
    model = args.config.model
    size = 8 * model.latent_height, 8 * model.latent_width
    while block := list(islice(pictures, 4 * max(args.batch, THREADS))):
        for picture, loading in [(picture, pool.submit(picture.load, *size)) for picture in block]:
            bar.update()
            try:
                yield picture.name, *loading.result()
            except Rejected as error:
                rejected.append(f"{one_line(picture.name)}\t{error}\n")


def _split(name: str, val_share: float) -> str:
    """By a hash of the name, so that a larger share keeps what a smaller one chose."""
    word = hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4]
    return "val" if int.from_bytes(word) < val_share * 2**32 else "train"


def _require_enough(args: Namespace, parts: list[Part]) -> None:
    """A look at the first pictures, as T5-XXL loads for minutes. Raises: Refusal."""
    wanted = Counter(val=TIMESTEPS * (args.val_share > 0), train=int(args.val_share < 1))
    found = Counter[str]()
    for picture in chain.from_iterable(part() for part in parts):
        try:
            picture.caption()
            kind = _split(picture.name, args.val_share)
        except Rejected as error:
            kind = str(error)
        found[kind] += 1
        if found >= wanted:
            return
    kinds = ", ".join(f"{kind}: {count}" for kind, count in found.items()) or "nothing"
    raise Refusal(
        f"--input {args.input} gives {kinds}; want at least {wanted['train']} train and {wanted['val']} val;"
        " add pictures or change --val-share"
    )


def _finish(args: Namespace, nets: Encoders) -> str:
    """Encode the empty caption, number the shards and join the lists of all parts.

    Returns what there is, in words. Raises: Refusal.
    """
    folder = common.partial_of(args.output)
    root = folder / "set"
    layout = dataset.sample_layout(args.config.model)
    train, val = (
        ShardSet(files.matching(folder / SHARDS_OF_PARTS[split], "[!.]*.tar"), layout) for split in ("train", "val")
    )
    files.remove(root / "empty_encodings")
    dataset.write_empty(root / "empty_encodings", nets.encode_text([""]))
    rows = "".join(path.read_text(encoding="utf-8") for path in files.matching(folder, "rejected_*.tsv"))
    files.write_whole(root / "rejected.tsv", f"picture\treason\n{rows}")
    for number, path in enumerate(train.paths):
        path.rename(shard_path(path.parent, number))  # a part without a sample leaves no gap
    files.remove(root / "val")
    if len(val):
        val.open()
        with dataset.new_shard(shard_path(root / "val", 0)) as file:
            for i in range(len(val)):
                meta, arrays = val.sample(i)
                dataset.add(file, Meta(key_of("val", i), i % TIMESTEPS, meta.caption), arrays)
    rejected = len(rows.splitlines())
    return f"{len(train):,} training and {len(val):,} validation samples; {rejected:,} rejected, see rejected.tsv"


def _made_from(args: Namespace, listed: list[str]) -> dict:
    """What must be the same when a stopped command goes on."""
    names = ("input", "val_share", "caption_column", "model", "dtype")
    digest = hashlib.sha256("\n".join(listed).encode(errors="surrogateescape")).hexdigest()
    return {
        **{name: str(getattr(args, name)) for name in names},
        **dataset.sample_layout(args.config.model).shapes,
        "files": digest,
    }


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        required=True,
        help="folder of pictures of 64 pixels or more, or of tars",
    )
    add("--output", type=Path, required=True, help="folder to make")
    add(
        "--val-share",
        type=between(0, 1, float),
        default=0.05,
        help="part of the pictures that becomes val; 0: none, 1: all (%(default)s)",
    )
    add("--caption-column", default="text", help="captions in metadata.jsonl or .csv (%(default)s)")
    add(
        "--model",
        type=Path,
        default=Path("FLUX.1-schnell"),
        help="folder of the encoders, as in FLUX.1-schnell's repository (%(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="fp32",
        help="of the text encoders; in fp32 T5-XXL takes 19 GB on each rank (%(default)s)",
    )
    add("--batch", type=between(1, 10**9), default=32, help="pictures encoded at a time (%(default)s)")
    common.add_config(parser)


def run(args: Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal."""
    world = ranks.start(ParallelConfig(replicate=1))
    with ExitStack() as stack:
        if world.size == 1:  # with more, torchrun ends the others after an error
            stack.callback(ranks.stop)
        with agreed():
            listed = captioned.list_files(args.input) if world.rank == 0 else []
        listed = ranks.gather_objects(listed)[0]
        with agreed():
            parts = split_into_parts(args.input, listed, args.caption_column, PER_PART)
            _require_enough(args, parts)
            if world.rank == 0:  # for all
                stack.enter_context(common.growing(args.output, _made_from(args, listed)))
        with agreed():
            nets = Encoders(args.model, args.config.model, world.device, DTYPES[args.dtype])
        bar = stack.enter_context(
            progress(desc=f"encoding, rank 0 of {world.size}", unit=" pictures", disable=world.rank > 0)
        )
        for number in range(world.rank, len(parts), world.size):
            make_part(args, nets, bar, number, parts[number])
        ranks.barrier()  # all parts are there
        with agreed():
            if world.rank == 0:
                print(f"{args.output}: {_finish(args, nets)}")
    return 0
