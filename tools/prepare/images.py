"""From pictures and captions to shards: decode, resize, encode.

    python -m tools.prepare images --input DIR --output data/own --val-share 0.05
    torchrun --nproc-per-node 8 -m tools.prepare images --input DIR --output data/own --split train ...

The first pass decodes every picture, lists what cannot be used in OUTPUT/SPLIT_rejected.tsv and numbers the rest, so
that keys and timesteps run without gaps and every shard but the last is full. The second pass encodes shard by shard.
One rank (number % ranks) makes a whole shard, so the bytes do not depend on the number of ranks. The set grows as in
jobs.py; SPLIT.partial/checked.json keeps the outcome of the first pass.
"""

import argparse
import csv
import hashlib
import io
import json
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from flux_ref import ranks, sharding
from flux_ref.config import ModelConfig, ParallelConfig
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import files, outside, shards
from flux_ref.formats.shard_writer import PER_SHARD, key_of, new_shard, npy_blob, shard_path
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.run.options import between
from flux_ref.run.progress import progress
from flux_ref.sampling import encoders, vae
from flux_ref.sampling.encoders import Encoders
from flux_ref.schedule import TIMESTEPS
from tools.prepare import job, jobs, raw_images
from tools.prepare.raw_images import Candidate, Part, Sample

CHECKED = "checked.json"
WAIT_S = 14 * 86_400.0  # for the slowest rank at the end of a pass
OTHER_ENCODERS = 0.1  # relative difference of encodings of the empty caption; rounding differs by less
Checked = list[list]  # for each part [candidates, [[position in the part, name, reason] of each rejected candidate]]


@dataclass(frozen=True)
class Job:
    """What this rank makes of a set, and from what. final: the folder that the set becomes."""

    args: argparse.Namespace
    final: Path
    model: ModelConfig
    world: World
    parts: list[Part]
    pool: ThreadPoolExecutor

    def loaded(self, candidates: Iterable[Candidate]) -> Iterator[Sample]:
        """The samples, in order. Threads load some of the next samples meanwhile."""
        height = 8 * self.model.latent_height
        width = 8 * self.model.latent_width
        candidates = iter(candidates)
        while ahead := list(islice(candidates, 4 * max(self.args.batch, self.args.workers))):
            yield from self.pool.map(lambda candidate: candidate.load(height, width), ahead)

    def bar(self, what: str, total: int | None = None) -> tqdm:
        """Progress of rank 0's share."""
        text = f"{what} {self.final.name}, rank 0 of {self.world.size}"
        return progress(total=total, desc=text, unit=" images", disable=self.world.rank > 0)


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about pictures that are counted anyway
    return cli.run("prepare", "", lambda _: _make(args), [])


def _make(args: argparse.Namespace) -> int:
    model = job.config(args.config).model
    world = ranks.start(ParallelConfig(replicate=1), few_threads=False)  # encoders are large
    args.vae = args.vae or args.model
    args.t5, args.clip = (getattr(args, name) or args.model / kind[-1] for name, kind in encoders.KINDS.items())
    finals = [args.output / split for split in ([args.split] if args.split else ["val", "train"])]
    own = finals if world.rank == 0 else []  # rank 0 claims and names them for all
    with ranks.agreed():
        if args.output.resolve().is_relative_to(Path(args.input).resolve()):
            raise Refusal(f"--output {args.output} lies in --input, which may not change; choose another")
        source = raw_images.source(args.input, args.caption_column)
        for final in own:
            jobs.require_new(final)
        listed = source.files() if own else []
    listed = ranks.gather_objects(listed)[0]
    with ranks.agreed():
        parts = source.parts(listed)
        chosen = {final: _chosen(parts, final.name, args.val_share) for final in finals}
        for final, own_parts in chosen.items():
            pictures = chain.from_iterable(part() for part in own_parts)
            _require_enough(final, len(list(islice(pictures, TIMESTEPS))), "pictures")  # T5-XXL loads for minutes
        nets = Encoders(args.vae, args.t5, args.clip, model, world.device, sharding.DTYPES[args.dtype])
    with ExitStack() as claims, ThreadPoolExecutor(args.workers) as pool:
        with ranks.agreed():
            for final in own:
                claims.enter_context(jobs.claimed(final, _plan(args, final.name, model, listed)))
                _write_empty(final, nets.empty, shards.layout(model))
        for final, own_parts in chosen.items():
            _make_set(Job(args, final, model, world, own_parts, pool), nets)
    return 0


def _chosen(parts: list[Part], split: str, val_share: float) -> list[Part]:
    """The parts of a split. val_share: 0 if it takes all."""
    return [partial(_of_split, part, split, val_share) for part in parts] if val_share else parts


def _require_enough(final: Path, count: int, found: str) -> None:
    """Raises: Refusal for a set of too few samples. found: what there are so many of."""
    least = TIMESTEPS if final.name == "val" else 1
    if count < least:
        raise Refusal(
            f"{final} needs {least} or more samples and has {count} {found}; add pictures or change the share"
        )


def _make_set(job: Job, nets: Encoders) -> None:
    """Fill the folder of a set. Collective. Raises: Refusal."""
    checked = _check(job)
    rejected = [row for _, rows in checked for row in rows]
    count = sum(candidates for candidates, _ in checked) - len(rejected)
    report = job.final.with_name(f"{job.final.name}_rejected.tsv")
    reasons = Counter(why for *_, why in rejected)
    counts = ", ".join(f"{number} {why}" for why, number in reasons.most_common()) or "none"
    summary = f"{count} samples; {len(rejected)} rejected ({counts}), see {report}"
    with ranks.agreed():
        if job.world.rank == 0:
            _report(rejected, report)
        _require_enough(job.final, count, summary.partition(" ")[2])
    longer = _encode(job, checked, count, nets)
    with ranks.agreed():
        pass  # all shards are there
    longer = sum(ranks.gather_objects(longer))
    if job.world.rank == 0:
        print(f"{job.final}: {summary}")
        if longer:
            most = job.model.text_tokens
            print(f"{job.final}: {longer} of the captions encoded now are cut after {most} tokens, model.text_tokens")


def _of_split(part: Part, split: str, val_share: float) -> Iterator[Candidate]:
    """The candidates of a split. A hash of the name decides, so that a larger share keeps what a smaller one chose."""
    for candidate in part():
        word = hashlib.sha256(candidate.name.encode(errors="surrogatepass")).digest()[:4]
        if (int.from_bytes(word) < val_share * 2**32) == (split == "val"):
            yield candidate


def _plan(args: argparse.Namespace, split: str, model: ModelConfig, listed: raw_images.Files) -> jobs.Plan:
    """What must be the same when a stopped job goes on."""
    names = ("val_share", "caption_column", "per_shard", "dtype")
    given = {"split": split} | {name: getattr(args, name) for name in names}
    nets = [vae.find(args.vae)]
    for net in (args.t5, args.clip):
        for folder in {net, encoders.tokenizer_folder(net)}:
            nets += [path for path in folder.iterdir() if path.is_file()]
    used = listed + [raw_images.stamp(path, str(path)) for path in sorted(nets)]
    return {"options": given | shards.layout(model).shapes, "files": used}


def _write_empty(final: Path, encodings: dict[str, np.ndarray], layout: shards.Layout) -> None:
    """Write empty_encodings beside the set. Raises: Refusal if those of other encoders are there."""
    folder = final.with_name("empty_encodings")
    if not folder.exists():
        jobs.write_empty(final, encodings)
    for name, bits in shards.read_empty(folder, layout).items():
        there = shards.from_bf16_bits(bits)
        ours = shards.from_bf16_bits(encodings[name])
        if np.linalg.norm(there - ours) > OTHER_ENCODERS * np.linalg.norm(ours):
            raise Refusal(f"{folder} was made with another {name}; use the same encoders or another --output")


# The first pass


def _check(job: Job) -> Checked:
    """Decode every picture, unless an earlier job did. Collective; each rank takes its share of the parts."""
    path = jobs.growing(job.final) / CHECKED
    if ranks.gather_objects(path.exists())[0]:
        with ranks.agreed():
            return _read_checked(path)
    mine = []
    with job.bar("checking") as bar:
        for number in range(job.world.rank, len(job.parts), job.world.size):
            outcomes = []
            for sample in job.loaded(job.parts[number]()):
                outcomes.append((sample.name, sample.rejected))
                bar.update()
            rejected = [[position, *outcome] for position, outcome in enumerate(outcomes) if outcome[1]]
            mine.append([number, len(outcomes), rejected])
    numbered = []
    for share in ranks.gather_objects(mine):
        numbered += share
    checked = [part for _, *part in sorted(numbered)]
    with ranks.agreed():
        if job.world.rank == 0:
            files.write_whole(path, json.dumps({"crc32": _crc32(checked), "parts": checked}))
    return checked


def _crc32(checked: object) -> int:
    return zlib.crc32(json.dumps(checked).encode())


def _read_checked(path: Path) -> Checked:
    """The outcome of an earlier job's first pass. Raises: Refusal."""
    content = outside.read_json(path, "list of checked pictures", outside.OWN_BYTES)
    if _crc32(content.get("parts")) != content.get("crc32"):
        raise Refusal(f"list of checked pictures {path} is damaged; remove it to check all pictures again")
    return content["parts"]


def _report(rejected: list[list], path: Path) -> None:
    """Write the list of what is rejected."""
    text = io.StringIO()
    table = csv.writer(text, dialect="excel-tab", lineterminator="\n")
    table.writerows([("path", "reason"), *(row[1:] for row in rejected)])
    files.write_whole(path, text.getvalue().encode(errors="backslashreplace").decode())  # names that are not UTF-8


# The second pass


def _encode(job: Job, checked: Checked, count: int, nets: Encoders) -> int:
    """Write the shards that are missing of this rank's share. count: all samples. Returns how many captions T5 cut."""
    longer = 0
    missing = jobs.missing(job.final, count, job.args.per_shard)
    mine = {number: indices for number, indices in missing.items() if number % job.world.size == job.world.rank}
    with job.bar("encoding", sum(map(len, mine.values()))) as bar:
        for number, indices in mine.items():
            longer += _write_shard(job, number, indices, _survivors(job.parts, checked, indices), nets, bar)
    return longer


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
) -> int:
    """Encode and write a shard. Returns how many captions T5 cuts. Raises: Fault if the input has changed meanwhile."""
    longer = 0
    samples = job.loaded(candidates)
    split = job.final.name
    index = indices.start
    with new_shard(shard_path(jobs.growing(job.final), number)) as shard:
        while batch := list(islice(samples, job.args.batch)):
            for sample in batch:
                if sample.rejected:
                    raise Fault(f"{sample.name}: {sample.rejected}, though it was good a while ago", alone=True)
            pixels = torch.stack([sample.pixels for sample in batch])
            captions = [sample.caption for sample in batch]
            longer += nets.t5.longer(captions)
            members = nets.encode(pixels, captions)
            for i, sample in enumerate(batch):
                blobs = {name: npy_blob(bits[i]) for name, bits in members.items()}
                timestep = index % TIMESTEPS if sample.timestep is None else sample.timestep
                shard.add(key_of(split, index), blobs, timestep if split == "val" else None, sample.caption)
                index += 1
            bar.update(len(batch))
        if index < indices.stop:
            raise Fault(f"{job.args.input} has fewer samples than a while ago", alone=True)
    return longer


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", required=True, metavar="DIR|TARS", help="images of 64 pixels or more; x-{000..137}.tar is many")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    split = parser.add_mutually_exclusive_group(required=True)
    split.add_argument("--split", choices=("train", "val"), help="make one set of all images")
    share = between(0.0001, 0.9999, float)
    split.add_argument("--val-share", type=share, metavar="0.05", help="make both sets: about this share becomes val")
    add("--caption-column", default="", metavar="NAME", help="captions in metadata.jsonl or metadata.csv (text)")
    add("--model", type=Path, default=Path("FLUX.1-schnell"), metavar="DIR", help="folder of encoders (%(default)s)")
    add("--vae", type=Path, help="another ae.safetensors, or diffusers' vae")
    add("--t5", type=Path, metavar="DIR", help="another T5 encoder and tokenizer, or text_encoder_2 beside tokenizer_2")
    add("--clip", type=Path, metavar="DIR", help="another CLIP and tokenizer, or text_encoder beside tokenizer")
    text = "of the text encoders; in fp32 T5-XXL takes 19 GB on each rank (%(default)s)"
    add("--dtype", choices=tuple(sharding.DTYPES), default="fp32", help=text)
    add("--batch", type=job.number, default=32, metavar="N", help="images encoded at a time (%(default)s)")
    add("--per-shard", type=job.number, default=PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--workers", type=job.number, default=8, metavar="N", help="decoding threads per rank (%(default)s)")
    add("--config", metavar="FILE", help="use the sizes of this config's model (FLUX.1-schnell's)")
