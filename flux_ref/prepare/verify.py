"""Checking a data set before a job relies on it.   python -m flux_ref.prepare verify DIR [--fast] [--workers K] ...

DIR holds shards of the fixed layout in shards.py, or train/, val/ and empty_encodings/. Every byte is read once, see
shard_check.py. The first pass that finds nothing wrong leaves DIR/manifest.sha256, which `sha256sum -c` takes; later
ones compare with it, and nothing else is ever written. --fast reads names, sizes and the headers of the first and last
sample of each shard. Exit codes: 0 nothing is wrong, 1 something is, 2 DIR cannot be checked.
"""

import argparse
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import shards
from flux_ref.formats.energon import META
from flux_ref.formats.shards import Layout
from flux_ref.prepare import shard_check
from flux_ref.prepare.shard_check import SHOWN, Job, Problems, Report
from flux_ref.run.progress import progress
from flux_ref.schedule import TIMESTEPS

MANIFEST, EMPTY, SPLITS = "manifest.sha256", "empty_encodings", ("train", "val")
# Kinds that leave a set usable.
WARNINGS = ("uneven timesteps", "repeated t5", "repeated clip", "repeated drawing", "new file", "no manifest")


# What there is


def _folders(root: Path, split: str | None, problems: Problems) -> dict[str, Path]:
    """The folders of shards, by what they are: train, val or any. Raises: Refusal."""
    if not root.is_dir():
        raise Refusal(f"{root} is no folder")
    inside = {name: root / name for name in SPLITS if (root / name).is_dir()}
    if not inside or any(root.glob("*.tar")):
        name = root.resolve().name
        return {split or (name if name in SPLITS else "any"): root}
    if split:
        raise Refusal(f"--split={split} is about one folder of shards, {root} holds {' and '.join(inside)}")
    for name in SPLITS if (root / META).is_dir() else (*SPLITS, EMPTY):  # Energon's folders have EMPTY beside them
        if not (root / name).is_dir():
            problems.add("missing", root / name, "there is no such folder")
    return inside


def _shards(folder: Path, problems: Problems) -> list[Path]:
    """The files that shards.py reads, after a look at their names."""
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        problems.add("missing", folder, "holds no *.tar shard")
        return paths
    named = {path: re.fullmatch(r"([\w.-]*?)(\d+)\.tar", path.name) for path in paths}
    series = Counter((name[1], len(name[2])) for name in named.values() if name)
    prefix, width = series.most_common(1)[0][0] if series else ("shard_", 6)
    numbers = [-1]
    for path, name in named.items():
        if name and (name[1], len(name[2])) == (prefix, width):
            numbers.append(int(name[2]))
        else:
            problems.add("file name", path, f"is not named as {prefix}{0:0{width}}.tar, the others are")
    for before, after in pairwise(numbers):
        if after > before + 1:
            gap = " to ".join(f"{prefix}{n:0{width}}.tar" for n in sorted({before + 1, after - 1}))
            problems.add("missing", folder, f"{gap}, although there is {prefix}{after:0{width}}.tar")
    return paths


def _others(root: Path, known: set[Path], problems: Problems) -> list[Path]:
    """All other files, for the manifest covers them all. Raises: OSError."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name != ".stage"]  # what stage.py is busy with
            names = [name for name in names if MANIFEST not in name]
        found += [Path(folder, name) for name in names if Path(folder, name) not in known]
    for path in (*found, *known):
        name = str(path.relative_to(root))
        if not name.isprintable() or "\\" in name:
            problems.add("file name", path, f"does not fit into a line of {MANIFEST}")
    return sorted(found)


# Looking at the files


class Shared:
    """What all processes share: the bytes read of each file, and whether to stop. No lock: its holder may be killed."""

    read = None
    stop = None


def _look(jobs: list[Job], workers: int) -> list[Report]:
    """What the files hold, in their order. Raises: Refusal if a process died; KeyboardInterrupt."""
    total = sum(job.path.stat().st_size for job in jobs if job.path.is_file())
    quiet = all(job.fast for job in jobs)
    with progress(total=total, desc="verifying", unit="B", unit_scale=True, leave=False, disable=quiet) as bar:
        if workers == 1 or quiet or len(jobs) < 2:
            return [shard_check.check(job, bar.update) for job in jobs]
        spawn = multiprocessing.get_context("spawn")
        read, stop = spawn.RawArray("q", len(jobs)), spawn.RawValue("b")
        pool = ProcessPoolExecutor(min(workers, len(jobs)), spawn, _start, (read, stop))
        try:
            futures = [pool.submit(_check, number, job) for number, job in enumerate(jobs)]
            while wait(futures, timeout=0.2).not_done:
                bar.update(sum(read) - bar.n)
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise Refusal("a process was killed; if memory ran out, use fewer --workers") from None
        finally:
            stop.value = True
            pool.shutdown(cancel_futures=True)


def _start(read, stop) -> None:
    Shared.read, Shared.stop = read, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent then tells us to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _check(number: int, job: Job) -> Report:
    def advance(count: int) -> None:
        Shared.read[number] += count
        if Shared.stop.value:
            raise KeyboardInterrupt  # which nobody hears

    return shard_check.check(job, advance)


# What only all of them together tell


def _check_repeats(root: Path, kind: str, reports: list[Report], problems: Problems) -> None:
    """Keys and samples that are there twice are errors, captions are not. kind: data.kind of the config."""
    seen = [(report.job, number, key) for report in reports for number, key, _ in report.seen]
    digests = np.frombuffer(b"".join(row[2] for report in reports for row in report.seen), "<u8").reshape(-1, 4)

    def place(i: int) -> str:
        return f"{seen[i][0].path}, sample {seen[i][1]}, key {seen[i][2]}"

    for again, first in _repeats(digests[:, 0]):
        job, _, key = seen[again]
        # A running number tells a sample from others of its split only.
        if key and not (key.isdecimal() and job.split != seen[first][0].split):
            problems.add("repeated key", place(again), f"so is the key of {place(first)}")
    kind = "repeated drawing" if kind == "shapes" else "repeated sample"  # small drawings come out equal by chance
    for again, first in _repeats(digests[:, 3]):
        problems.add(kind, place(again), f"its four members are those of {place(first)}")
    for column, name in enumerate(("t5", "clip"), 1):
        if count := len(_repeats(digests[:, column])):
            problems.add(f"repeated {name}", root, f"in {count:,} samples {name} is that of an earlier one", count)


def _repeats(column: np.ndarray) -> list[tuple[int, int]]:
    """Positions of equal entries, (later, earlier); 0 equals nothing."""
    order = np.argsort(column, kind="stable")
    ordered = column[order]
    again = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0))
    return sorted(zip(order[again + 1].tolist(), order[again].tolist()))


def _check_totals(folder: Path, split: str, reports: list[Report], expect: int, problems: Problems) -> None:
    samples = sum(report.samples for report in reports)
    if expect not in (0, samples):
        problems.add("sample count", folder, f"holds {samples:,} samples, want {expect:,}")
    timesteps = sum((report.timesteps for report in reports), Counter())
    counts = [timesteps[k] for k in range(TIMESTEPS)]
    if split == "val" and max(counts) > min(counts) and not any(report.job.fast for report in reports):
        # A number of samples that 8 does not divide cannot do better than differ by one.
        kind = "uneven timesteps" if max(counts) == min(counts) + 1 else "timestep counts"
        problems.add(kind, folder, f"timesteps 0 to {TIMESTEPS - 1} come {', '.join(map(str, counts))} times")


def _check_empty(folder: Path, layout: Layout, problems: Problems) -> None:
    try:
        for name, bits in shards.read_empty(folder, layout).items():
            if problem := shard_check.implausible(name, bits.reshape(-1)):
                problems.add("empty encoding", folder / f"{name}_empty.npy", problem[1])
    except Refusal as error:
        problems.add("empty encoding", folder, str(error))


# The manifest


def _check_manifest(path: Path, found: dict[str, str], problems: Problems) -> None:
    """found: of each file its SHA-256, "" if unknown."""
    listed = {}
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        parts = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line)
        if parts and parts[2] not in listed:
            listed[parts[2]] = parts[1].lower()
        else:
            problems.add("manifest", f"{path}, line {number}", "is none of sha256sum's, or names a file again")
    for name in sorted(listed.keys() | found.keys()):
        file = path.parent / name
        if name not in found:
            problems.add("manifest", file, f"is missing, {MANIFEST} has it")
        elif name not in listed:
            problems.add("manifest" if name.endswith(".tar") else "new file", file, f"is not in {MANIFEST}")
        elif found[name] and found[name] != listed[name]:
            problems.add("manifest", file, f"has changed, its SHA-256 is not that of {MANIFEST}")


def _write_manifest(path: Path, found: dict[str, str], problems: Problems) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{digest}  {name}\n" for name, digest in sorted(found.items()))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError as error:
        problems.add("no manifest", path, f"cannot be written: {error.strerror}")
    finally:
        with suppress(OSError):
            partial.unlink()


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="folder of *.tar shards, or of train/, val/ and empty_encodings/")
    add("--config", metavar="FILE", help="whose model's sizes and sample counts to expect (FLUX.1-schnell's)")
    add("--split", choices=(*SPLITS, "any"), help="what the shards in DIR are (what DIR is called, else any)")
    add("--expect-samples", type=_number_or_any, metavar="N|any", help="how many there must be (the config's)")
    add("--fast", action="store_true", help="read only names, sizes and the headers of each shard's ends")
    add("--workers", type=_number, default=min(8, os.cpu_count() or 1), metavar="K", help="processes (%(default)s)")
    uses = f"write {MANIFEST} unless it is there, else compare with it; check: it must be there; none: leave it alone"
    add("--manifest", choices=("write", "check", "none"), default="write", help=uses)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _number_or_any(text: str) -> int:
    return 0 if text == "any" else _number(text)


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal and OSError, where it is 2."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("stopped before the end")
        return 130


def _run(args: argparse.Namespace) -> int:
    began, problems = time.monotonic(), Problems()
    cfg = config_file.load(args.config) if args.config else Config()
    layout, folders = shards.layout(cfg.model), _folders(args.dir, args.split, problems)
    if args.expect_samples and len(folders) > 1:
        raise Refusal(f"--expect-samples={args.expect_samples} is about one folder of shards, {args.dir} holds more")
    paths = {path: split for split, folder in folders.items() for path in _shards(folder, problems)}
    paths |= dict.fromkeys(_others(args.dir, set(paths), problems), "")
    reports = _look([Job(path, split, layout, args.fast) for path, split in paths.items()], args.workers)
    for report in reports:
        problems.add_all(report.problems)
    _check_repeats(args.dir, cfg.data.kind, reports, problems)
    for split, folder in folders.items():
        expect = args.expect_samples if args.expect_samples is not None else getattr(cfg.data, f"{split}_count", 0)
        _check_totals(folder, split, [r for r in reports if r.job.split == split], expect, problems)
    if (args.dir / EMPTY).is_dir():
        _check_empty(args.dir / EMPTY, layout, problems)
    manifest, found = args.dir / MANIFEST, {r.job.path.relative_to(args.dir).as_posix(): r.sha256 for r in reports}
    if args.manifest != "none" and manifest.exists():
        _check_manifest(manifest, found, problems)
    elif args.manifest == "check":
        problems.add("manifest", manifest, "there is no such file")
    elif args.manifest == "write" and not args.fast and not _failed(problems):
        _write_manifest(manifest, found, problems)
    _print_verdict(reports, list(folders), problems, time.monotonic() - began)
    return int(_failed(problems))


def _failed(problems: Problems) -> bool:
    return any(kind not in WARNINGS for kind in problems.counts)


def _print_verdict(reports: list[Report], splits: list[str], problems: Problems, seconds: float) -> None:
    for kind, lines in problems.lines.items():
        print("\n".join(lines))
        if problems.counts[kind] > len(lines) == SHOWN:
            print(f"... and {problems.counts[kind] - len(lines):,} more of this kind: {kind}")
    fast = any(report.job.fast for report in reports)
    columns = [] if fast else [*range(TIMESTEPS), None]
    heads = ["none" if column is None else f"t={column}" for column in columns]
    print(f"{'':6} {'shards':>6} {'samples':>10} {'bytes':>18}", *(f"{head:>7}" for head in heads))
    for split in splits:
        own = [report for report in reports if report.job.split == split]
        timesteps = sum((report.timesteps for report in own), Counter())
        samples, size = sum(report.samples for report in own), sum(report.bytes for report in own)
        print(f"{split:6} {len(own):6} {samples:10,} {size:18,}", *(f"{timesteps[column]:7}" for column in columns))
    for title, wanted in (("problems", False), ("warnings", True)):
        kinds = [f"{kind} {n:,}" for kind, n in problems.counts.items() if (kind in WARNINGS) == wanted]
        print(f"{title}: {', '.join(kinds) or 'none'}")
    speed = "names, sizes and headers only" if fast else f"{sum(r.bytes for r in reports) / seconds / 1e6:,.0f} MB/s"
    print(f"{'FAIL' if _failed(problems) else 'PASS'} in {seconds:.1f} s, {speed}")
