"""From pictures and captions to shards: decode, resize, encode.

    python -m flux_ref.prepare images --input DIR --output data/own --split train --vae FILE --t5 DIR --clip DIR
    torchrun --nproc-per-node 8 -m flux_ref.prepare images ...

The first pass decodes every picture, lists what cannot be used in OUTPUT/SPLIT_rejected.tsv and numbers the rest, so
that keys and timesteps run without gaps and every shard but the last is full. The second pass encodes shard by shard.
One rank (number % ranks) makes a whole shard, so the bytes do not depend on the number of ranks. The set grows as in
jobs.py; SPLIT.partial/checked.json keeps the outcome of the first pass.
"""

import argparse
import csv
import io
import json
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from flux_ref import ranks, sharding
from flux_ref.config import ModelConfig, ParallelConfig
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import files, shards
from flux_ref.formats.shard_writer import PER_SHARD, key_of, new_shard, npy_blob, shard_path
from flux_ref.prepare import encoders, jobs, options, raw_images
from flux_ref.prepare.encoders import Encoders
from flux_ref.prepare.raw_images import Candidate, Entry, Part, Rejected
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.run.progress import progress
from flux_ref.schedule import TIMESTEPS

CHECKED = "checked.json"
WAIT_S = 14 * 86_400.0  # for the slowest rank at the end of a pass
OTHER_ENCODERS = 0.1  # relative difference of encodings of the empty caption; rounding differs by less
Picture = tuple[Tensor, Entry]  # (3, H, W) uint8, and what the input says about the sample
Checked = list[list]  # for each part [candidates, [[position in the part, name, reason] of each rejected candidate]]


@dataclass(frozen=True)
class Job:
    """What this rank makes, and from what. folder: where the shards grow."""

    args: argparse.Namespace
    model: ModelConfig
    world: World
    folder: Path
    parts: list[Part]
    pool: ThreadPoolExecutor

    def load(self, candidate: Candidate) -> Picture:
        """Raises: Rejected."""
        try:
            entry = candidate.read()
        except OSError:
            raise Rejected("unreadable file") from None
        with entry.file:
            sides = 8 * self.model.latent_height, 8 * self.model.latent_width
            return raw_images.pixels(entry.file, *sides, self.args.min_side), entry

    def ahead(self, function: Callable, items: Iterable) -> Iterator:
        """function(item) of each item, in order. Threads work on some of the next items meanwhile."""
        waiting = deque()
        for item in items:
            waiting.append(self.pool.submit(function, item))
            if len(waiting) > 2 * max(self.args.batch, self.args.workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def bar(self, what: str, total: int | None = None) -> tqdm:
        """Progress of rank 0's share."""
        share = f", rank 0 of {self.world.size}" if self.world.size > 1 else ""
        text = f"{what} {self.args.split}{share}"
        return progress(total=total, desc=text, unit=" images", disable=self.world.rank > 0)


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about pictures that are counted anyway
    return cli.run("prepare", "", lambda _: _make(args), [])


def _make(args: argparse.Namespace) -> int:
    model = options.config(args.config).model
    world = ranks.start(ParallelConfig(replicate=1), timeout_s=WAIT_S)
    final, report = args.output / args.split, args.output / f"{args.split}_rejected.tsv"
    with ranks.agreed():
        source = _source(args, final)
    with ranks.agreed():
        nets = Encoders(args.vae, args.t5, args.clip, model, world.device, sharding.DTYPES[args.dtype])
    with ExitStack() as claim:  # of rank 0, for all
        with ranks.agreed():
            if world.rank == 0:
                claim.enter_context(jobs.claimed(final, _plan(args, model, source)))
                _write_empty(final, nets.empty, shards.layout(model))
        plan = json.loads((jobs.growing(final) / jobs.PLAN).read_text(encoding="utf-8"))  # what rank 0 has seen
        with ThreadPoolExecutor(args.workers) as pool:
            job = Job(args, model, world, jobs.growing(final), source.parts(plan["files"]), pool)
            checked = _check(job)
            with ranks.agreed():
                if world.rank == 0:
                    _report(checked, report)
            begin = time.monotonic()
            made = _encode(job, checked, nets)
        with ranks.agreed():
            pass  # all shards are there
    if world.rank == 0:
        speed = made / (time.monotonic() - begin)
        print(f"{final}: {_kept(checked)} samples, {speed:.1f} images/s; {_summary(checked)}, see {report}")
    return 0


def _source(args: argparse.Namespace, final: Path) -> raw_images.Source:
    jobs.require_new(final)
    if args.output.resolve().is_relative_to(Path(args.input).resolve()):
        raise Refusal(f"--output {args.output} lies in --input, which may not change; choose another")
    return raw_images.source(args.input)


def _plan(args: argparse.Namespace, model: ModelConfig, source: raw_images.Source) -> jobs.Plan:
    """What must be the same when a stopped job goes on."""
    given = {name: getattr(args, name) for name in ("split", "per_shard", "min_side", "dtype")}
    folders = {folder for net in (args.t5, args.clip) for folder in (net, encoders.tokenizer_folder(net))}
    weights = [args.vae, *sorted(path for folder in folders for path in folder.iterdir() if path.is_file())]
    stats = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in weights}
    return {"options": given | shards.layout(model).shapes | stats, "files": source.files()}


def _write_empty(final: Path, encodings: dict[str, np.ndarray], layout: shards.Layout) -> None:
    """Write empty_encodings beside the set. Raises: Refusal if those of other encoders are there."""
    folder = final.with_name("empty_encodings")
    if not folder.exists():
        return jobs.write_empty(final, encodings)
    for name, bits in shards.read_empty(folder, layout).items():
        there, ours = shards.from_bf16_bits(bits), shards.from_bf16_bits(encodings[name])
        if np.linalg.norm(there - ours) > OTHER_ENCODERS * np.linalg.norm(ours):
            raise Refusal(f"{folder} was made with another {name}; use the same encoders or another --output")


# The first pass


def _check(job: Job) -> Checked:
    """Decode every picture, unless an earlier job did. Collective; each rank takes its share of the parts."""
    path, mine = job.folder / CHECKED, {}
    if ranks.gather_objects(path.exists())[0]:
        return json.loads(path.read_text(encoding="utf-8"))

    def rejection(candidate: Candidate) -> list[str]:
        try:
            job.load(candidate)
        except Rejected as error:
            return [candidate.name, str(error)]
        return []

    with job.bar("checking") as bar:
        for number in range(job.world.rank, len(job.parts), job.world.size):
            found = []
            for rejected in job.ahead(rejection, job.parts[number]()):
                found.append(rejected)
                bar.update()
            mine[number] = [len(found), [[position, *rejected] for position, rejected in enumerate(found) if rejected]]
    merged = {number: part for share in ranks.gather_objects(mine) for number, part in share.items()}
    checked = [merged[number] for number in range(len(job.parts))]
    with ranks.agreed():
        if job.world.rank == 0:
            files.write_whole(path, json.dumps(checked))
    return checked


def _kept(checked: Checked) -> int:
    return sum(count - len(rejected) for count, rejected in checked)


def _summary(checked: Checked) -> str:
    counts = Counter(why for _, rejected in checked for *_, why in rejected)
    reasons = ", ".join(f"{count} {why}" for why, count in counts.most_common())
    return f"{counts.total()} rejected" + (f" ({reasons})" if counts else "")


def _report(checked: Checked, path: Path) -> None:
    """Write the list of what is rejected. Raises: Refusal if no sample is left."""
    text = io.StringIO()
    table = csv.writer(text, dialect="excel-tab", lineterminator="\n")
    table.writerow(("path", "reason"))
    table.writerows(row[1:] for _, rejected in checked for row in rejected)
    files.write_whole(path, text.getvalue().encode(errors="backslashreplace").decode())  # names that are not UTF-8
    if _kept(checked) == 0:
        raise Refusal(f"no sample can be used: {_summary(checked)}, see {path}")


# The second pass


def _encode(job: Job, checked: Checked, nets: Encoders) -> int:
    """Write this rank's missing shards; returns the number of samples that were missing over all ranks."""
    missing = jobs.missing(job.args.output / job.args.split, _kept(checked), job.args.per_shard)
    mine = {n: indices for n, indices in missing.items() if n % job.world.size == job.world.rank}
    with job.bar("encoding", sum(map(len, mine.values()))) as bar:
        for number, indices in mine.items():
            _write_shard(job, number, indices, _survivors(job.parts, checked, indices), nets, bar)
    return sum(map(len, missing.values()))


def _survivors(parts: list[Part], checked: Checked, indices: range) -> Iterator[Candidate]:
    """The candidates with these numbers. Rejected candidates have no number."""
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
    """Encode and write a shard. Raises: Fault if the input has changed since the first pass."""

    def load(candidate: Candidate) -> Picture:
        try:
            return job.load(candidate)
        except Rejected as error:
            raise Fault(f"{candidate.name}: {error}, though it was good a while ago", alone=True) from None

    pictures, left = job.ahead(load, candidates), iter(indices)
    with new_shard(shard_path(job.folder, number)) as shard:
        while batch := list(islice(pictures, job.args.batch)):
            members = nets.encode(torch.stack([pixels for pixels, _ in batch]), [entry.caption for _, entry in batch])
            for i, ((_, entry), index) in enumerate(zip(batch, left)):
                key = f"{job.args.split}_{entry.id}" if entry.id else key_of(job.args.split, index)
                blobs = {name: npy_blob(members[name][i]) for name in shards.MEMBERS}
                timestep = index % TIMESTEPS if entry.timestep is None else entry.timestep
                shard.add(key, blobs, timestep if job.args.split == "val" else None, entry.caption)
            bar.update(len(batch))
        if next(left, None) is not None:
            raise Fault(f"{job.args.input} has fewer samples than a while ago", alone=True)


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", required=True, metavar="DIR|FILE.tsv|TARS", help="images with captions; x-{000..137}.tar is many")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    add("--split", choices=("train", "val"), required=True)
    add("--vae", type=Path, required=True, help="ae.safetensors")
    add("--t5", type=Path, required=True, metavar="DIR", help="T5 encoder and tokenizer, or text_encoder_2 beside it")
    add("--clip", type=Path, required=True, metavar="DIR", help="CLIP and its tokenizer, or text_encoder beside it")
    add("--dtype", choices=tuple(sharding.DTYPES), default="fp32", help="dtype of the text encoders (%(default)s)")
    add("--batch", type=options.number, default=32, metavar="N", help="images encoded at a time (%(default)s)")
    add("--per-shard", type=options.number, default=PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--min-side", type=options.number, default=64, metavar="PIXELS", help="reject smaller images (%(default)s)")
    add("--workers", type=options.number, default=8, metavar="N", help="decoding threads per rank (%(default)s)")
    add("--config", metavar="FILE", help="use the sizes of this config's model (FLUX.1-schnell's)")
