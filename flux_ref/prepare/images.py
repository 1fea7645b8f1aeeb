"""From pictures and captions to shards: decode, resize, encode.

    python -m flux_ref.prepare images --input DIR --output data/own --split train --vae FILE --t5 DIR --clip DIR
    torchrun --nproc-per-node 8 -m flux_ref.prepare images ...

Two passes over the input. The first decodes every picture, so that what cannot be used is known, and listed in
OUTPUT/SPLIT_rejected.tsv, before an encoder has worked an hour. Only then are the others numbered: keys and timesteps
run without gaps and every shard but the last is full, whatever was rejected. The second encodes shard by shard, each
on one rank (number % ranks) in batches of its own, so that the number of ranks does not show in the bytes.

A set grows in OUTPUT/SPLIT.partial beside plan.json, which says what it is made from, and checked.json, the outcome of
the first pass, and becomes OUTPUT/SPLIT once it is whole. The same command goes on with the shards that are missing.
"""

import argparse
import csv
import fcntl
import io
import json
import os
import shutil
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from flux_ref import config_file, ranks, sharding
from flux_ref.config import Config, ModelConfig, ParallelConfig
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import shards
from flux_ref.formats.shard_writer import PER_SHARD, ShardWriter, key_of, npy_blob, shard_path
from flux_ref.prepare import encoders, raw_images
from flux_ref.prepare.encoders import Encoders
from flux_ref.prepare.raw_images import Candidate, Files, Part, Rejected
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.run.progress import progress
from flux_ref.schedule import TIMESTEPS

PLAN, CHECKED, LOCK = "plan.json", "checked.json", ".lock"
WAIT_S = 14 * 86_400.0  # for the slowest rank at the end of a pass
OTHER = 0.1  # encodings of the empty caption that differ by more come from other encoders, not from rounding

Checked = list[list]  # per part [candidates, [[position in the part, name, reason] of each that is rejected]]


@dataclass(frozen=True)
class Sample:
    """What the encoders get. pixels: (3, H, W) uint8."""

    pixels: Tensor
    caption: str
    timestep: int | None
    id: str


@dataclass(frozen=True)
class Job:
    """What is made from what, by this rank. folder: where the shards grow."""

    args: argparse.Namespace
    model: ModelConfig
    world: World
    folder: Path
    parts: list[Part]
    pool: ThreadPoolExecutor

    def load(self, candidate: Candidate) -> Sample:
        """Raises: Rejected."""
        try:
            entry = candidate.read()
        except OSError:
            raise Rejected("unreadable file") from None
        with entry.file:
            sides = 8 * self.model.latent_height, 8 * self.model.latent_width
            pixels = raw_images.pixels(entry.file, *sides, self.args.min_side)
        return Sample(pixels, entry.caption, entry.timestep, entry.id)

    def ahead(self, function: Callable, items: Iterable) -> Iterator:
        """function(item) of each item in order, worked out by threads for some items to come."""
        waiting = deque()
        for item in items:
            waiting.append(self.pool.submit(function, item))
            if len(waiting) > 2 * max(self.args.batch, self.args.workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def bar(self, what: str, total: int | None = None) -> tqdm:
        """Of rank 0's share."""
        share = f", rank 0 of {self.world.size}" if self.world.size > 1 else ""
        return progress(
            total=total, desc=f"{what} {self.args.split}{share}", unit=" images", disable=self.world.rank > 0
        )


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of pictures that are counted anyway
    return cli.run("prepare", "", lambda _: _make(args), [])


def _make(args: argparse.Namespace) -> int:
    model = (config_file.load(args.config) if args.config else Config()).model
    world = ranks.start(ParallelConfig(replicate=1), timeout_s=WAIT_S)
    final, folder = args.output / args.split, args.output / f"{args.split}.partial"
    found = ranks.together(lambda: _source(args, final))
    dtype = sharding.DTYPES[args.dtype]
    nets = ranks.together(lambda: Encoders(args.vae, args.t5, args.clip, model, world.device, dtype))
    lock = ranks.together(lambda: None if world.rank else _claim(folder, _plan(args, model, found.files())))
    ranks.together(lambda: world.rank or _write_empty(args.output, nets.empty, shards.layout(model)))
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))  # what rank 0 has seen
    with ThreadPoolExecutor(args.workers) as pool:
        job = Job(args, model, world, folder, found.parts(plan["files"]), pool)
        checked = _check(job)
        report = args.output / f"{args.split}_rejected.tsv"
        ranks.together(lambda: world.rank or _report(checked, report))
        begin = time.monotonic()
        made = _encode(job, checked, nets)
    ranks.together(lambda: None)  # all shards are there
    if world.rank == 0:
        (folder / LOCK).unlink()
        folder.rename(final)
        lock.close()
        speed = made / (time.monotonic() - begin)
        print(f"{final}: {_kept(checked)} samples, {speed:.1f} images/s; {_summary(checked)}, see {report}")
    return 0


def _source(args: argparse.Namespace, final: Path) -> raw_images.Source:
    if final.exists():
        raise Refusal(f"{final} exists; remove it or choose another --output")
    if args.output.resolve().is_relative_to(Path(args.input).resolve()):
        raise Refusal(f"--output {args.output} lies in --input, which may not change; choose another")
    return raw_images.source(args.input)


# The folder


def _plan(args: argparse.Namespace, model: ModelConfig, files: Files) -> dict:
    """What must be the same when a set goes on to be made."""
    options = {name: getattr(args, name) for name in ("split", "per_shard", "min_side", "dtype")}
    folders = {folder for given in (args.t5, args.clip) for folder in (given, encoders.tokenizer_folder(given))}
    weights = [args.vae, *sorted(path for folder in folders for path in folder.iterdir() if path.is_file())]
    stats = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in weights]
    plan = {"options": options | shards.layout(model).shapes, "encoders": stats, "files": files}
    return json.loads(json.dumps(plan))  # as it is read back, with lists for tuples


def _claim(folder: Path, plan: dict) -> IO:
    """Take the folder for as long as the returned file is open. Raises: Refusal if it is taken, or of another plan."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(f"{folder} is in use by another job; wait for it or choose another --output") from None
    for path in folder.glob(".*.partial"):  # of a job that was killed
        path.unlink()
    path = folder / PLAN
    began = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if began != plan:
        if any(folder.glob("*.tar")):
            raise Refusal(f"{folder} was begun otherwise: {_difference(began or {}, plan)}; remove it to begin anew")
        (folder / CHECKED).unlink(missing_ok=True)
        _write(path, json.dumps(plan))
    return lock


def _difference(began: dict, plan: dict) -> str:
    """The first few things that changed."""
    then, now = (
        {**content.get("options", {}), **{row[0]: row[1:] for kind in ("encoders", "files") for row in content[kind]}}
        for content in ({"encoders": [], "files": []} | began, plan)
    )
    changed = [str(name or "the table") for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "") + " changed"


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    growing = path.with_name(f".{path.name}.partial")
    with growing.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    growing.rename(path)


def _write_empty(output: Path, empty: dict[str, np.ndarray], layout: shards.Layout) -> None:
    """output/empty_encodings as bf16 bits. Raises: Refusal if others are there."""
    final, growing = output / "empty_encodings", output / ".empty_encodings.partial"
    if final.exists():
        for name, bits in shards.read_empty(final, layout).items():
            there, own = shards.from_bf16_bits(bits), shards.from_bf16_bits(empty[name])
            if np.linalg.norm(there - own) > OTHER * np.linalg.norm(own):
                raise Refusal(f"{final} was made with another {name}; use the same encoders or another --output")
        return
    shutil.rmtree(growing, ignore_errors=True)
    growing.mkdir()
    for name, bits in empty.items():
        np.save(growing / f"{name}_empty.npy", bits)
    growing.rename(final)


# The first pass


def _check(job: Job) -> Checked:
    """Decode every picture, unless that is done. Collective; the parts are dealt to the ranks."""
    path, mine = job.folder / CHECKED, {}
    if ranks.gather_objects(path.exists())[0]:
        return json.loads(path.read_text(encoding="utf-8"))

    def reason(candidate: Candidate) -> tuple[str, str]:
        try:
            job.load(candidate)
        except Rejected as error:
            return candidate.name, str(error)
        return candidate.name, ""

    with job.bar("checking") as bar:
        for number in range(job.world.rank, len(job.parts), job.world.size):
            count, rejected = 0, []
            for name, why in job.ahead(reason, job.parts[number]()):
                if why:
                    rejected.append([count, name, why])
                count += 1
                bar.update()
            mine[number] = [count, rejected]
    merged = {number: part for share in ranks.gather_objects(mine) for number, part in share.items()}
    checked = [merged[number] for number in range(len(job.parts))]
    ranks.together(lambda: job.world.rank or _write(path, json.dumps(checked)))
    return checked


def _kept(checked: Checked) -> int:
    return sum(count - len(rejected) for count, rejected in checked)


def _summary(checked: Checked) -> str:
    counts = Counter(why for _, rejected in checked for *_, why in rejected)
    each = ", ".join(f"{count} {why}" for why, count in counts.most_common())
    return f"{counts.total()} rejected" + (f" ({each})" if counts else "")


def _report(checked: Checked, path: Path) -> None:
    """The list of what is rejected. Raises: Refusal if nothing is left."""
    text = io.StringIO()
    table = csv.writer(text, dialect="excel-tab", lineterminator="\n")
    table.writerow(("path", "reason"))
    table.writerows(row[1:] for _, rejected in checked for row in rejected)
    _write(path, text.getvalue())
    if _kept(checked) == 0:
        raise Refusal(f"no sample can be used: {_summary(checked)}, see {path}")


# The second pass


def _encode(job: Job, checked: Checked, nets: Encoders) -> int:
    """Write this rank's shards that are missing; returns the number of samples that were missing over all ranks."""
    kept, per_shard = _kept(checked), job.args.per_shard
    missing = [n for n in range(-(-kept // per_shard)) if not shard_path(job.folder, n).exists()]
    ranges = {n: range(n * per_shard, min(kept, (n + 1) * per_shard)) for n in missing}
    mine = {n: indices for n, indices in ranges.items() if n % job.world.size == job.world.rank}
    with job.bar("encoding", sum(map(len, mine.values()))) as bar:
        for number, indices in mine.items():
            _write_shard(job, number, indices, _survivors(job.parts, checked, indices), nets, bar)
    return sum(map(len, ranges.values()))


def _survivors(parts: list[Part], checked: Checked, indices: range) -> Iterator[Candidate]:
    """The candidates of these numbers, counted without the rejected."""
    first = 0
    for part, (count, rejected) in zip(parts, checked):
        stop = first + count - len(rejected)
        if stop > indices.start and first < indices.stop:
            bad = {position for position, *_ in rejected}
            good = (candidate for position, candidate in enumerate(part()) if position not in bad)
            yield from islice(good, max(0, indices.start - first), min(stop, indices.stop) - first)
        first = stop


def _write_shard(
    job: Job, number: int, indices: range, candidates: Iterable[Candidate], nets: Encoders, bar: tqdm
) -> None:
    """Raises: Fault if the input is not what it was in the first pass."""

    def load(candidate: Candidate) -> Sample:
        try:
            return job.load(candidate)
        except Rejected as error:
            raise Fault(f"{candidate.name}: {error}, though it was good a while ago", alone=True) from None

    samples, left = job.ahead(load, candidates), iter(indices)
    with ShardWriter(shard_path(job.folder, number)) as shard:
        while batch := list(islice(samples, job.args.batch)):
            members = nets.encode(torch.stack([sample.pixels for sample in batch]), [s.caption for s in batch])
            for i, (sample, index) in enumerate(zip(batch, left)):
                key = f"{job.args.split}_{sample.id}" if sample.id else key_of(job.args.split, index)
                shard.add(
                    key,
                    {name: npy_blob(members[name][i]) for name in shards.MEMBERS},
                    _timestep(sample, index) if job.args.split == "val" else None,
                    sample.caption,
                )
            bar.update(len(batch))
        if next(left, None) is not None:
            raise Fault(f"{job.args.input} has fewer samples than a while ago", alone=True)


def _timestep(sample: Sample, index: int) -> int:
    """Of a validation sample: as the input says, else in turn."""
    return index % TIMESTEPS if sample.timestep is None else sample.timestep


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", required=True, metavar="DIR|FILE.tsv|TARS", help="images with captions; x-{000..137}.tar is many")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    add("--split", choices=("train", "val"), required=True)
    add("--vae", type=Path, required=True, help="ae.safetensors")
    add("--t5", type=Path, required=True, metavar="DIR", help="T5 encoder and tokenizer, or text_encoder_2 beside it")
    add("--clip", type=Path, required=True, metavar="DIR", help="CLIP and its tokenizer, or text_encoder beside it")
    add("--dtype", choices=tuple(sharding.DTYPES), default="fp32", help="of the text encoders (%(default)s)")
    add("--batch", type=_number, default=32, metavar="N", help="images encoded at a time (%(default)s)")
    add("--per-shard", type=_number, default=PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--min-side", type=_number, default=64, metavar="PIXELS", help="reject smaller images (%(default)s)")
    add("--workers", type=_number, default=8, metavar="N", help="decoding threads per rank (%(default)s)")
    add("--config", metavar="FILE", help="whose model's sizes to use (FLUX.1-schnell's)")


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
