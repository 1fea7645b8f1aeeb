"""Bringing a data set from shared storage to the local disk of every node, before a run.

    python -m flux_ref.prepare stage SRC DST                                             this node
    torchrun --nnodes N --nproc-per-node 1 -m flux_ref.prepare stage SRC DST             N nodes; SRC is read once

Every node gets the whole set: training shuffles globally, so any rank may read any sample. The files are dealt to
STREAMS streams, and each stream copies one file after another. One node reads a file. Each chunk of it goes down a
chain through all nodes that lack the file; each node passes it on while it checksums and writes it. So storage delivers
as much as one node takes in, and no link carries a byte twice. A stream waits for one thing at a time; eight streams
keep storage, network, processors and disk busy. All nodes take a stream's chunks in the same order, so the first
unfinished chunk can always move: nothing deadlocks.

DST/.stage/files holds unfinished files. DST/.stage/journal has a line for each mark: so many bytes of a file are on the
disk, and their SHA-256. A file gets its name in DST when it is on the disk and has the SHA-256 of SRC/manifest.sha256;
without such a manifest, DST/manifest.sha256 is written at the end. A restart goes on with an unfinished file from the
last mark that all nodes which lack the file have reached. It trusts a finished file if size and time are those of SRC
and of the journal; `sha256sum -c manifest.sha256` reads them all. A file is read from a node that has it, if any.
"""

import argparse
import hashlib
import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import files as whole_files
from flux_ref.formats import manifest
from flux_ref.formats.manifest import MANIFEST
from flux_ref.run import cli
from flux_ref.run.progress import progress

STREAMS = 8
CHUNK = 16 << 20  # bytes; a stream holds one
MARK = 16 * CHUNK  # bytes of a file between two marks: what a kill costs each stream at most
HIDDEN = ".stage"
FAILED = "stage/failed"  # key of the reason, in the store that all nodes share
POLL_S = 0.2  # between two looks at it


@dataclass(frozen=True)
class File:
    """A version of a file: its path below SRC or DST, its size, and the time of its last change, which a copy keeps."""

    name: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Transfer:
    """The bytes of a file from start on. The first node of the chain reads them, from SRC or from its own copy."""

    file: File
    sha256: str | None  # None: not known
    start: int
    chain: tuple[int, ...]
    from_copy: bool


def scan(root: Path, folder: Path | None = None) -> dict[str, File]:
    """All files below a folder, by name, without those in .stage. Raises: Refusal for a link or FIFO; OSError."""
    files = {}
    for path in sorted((folder or root).iterdir()):
        status, name = path.lstat(), path.relative_to(root).as_posix()
        if stat.S_ISDIR(status.st_mode):
            files |= scan(root, path) if name != HIDDEN else {}
        elif not stat.S_ISREG(status.st_mode):
            raise Refusal(f"{path} is a link or special file; only plain files are staged: replace or remove it")
        elif not manifest.fits(name):
            raise Refusal(f"{str(path)!r} has a name that does not fit into a line of {MANIFEST}; rename it")
        else:
            files[name] = File(name, status.st_size, status.st_mtime_ns)
    return files


def survey(src: Path, dst: Path) -> tuple[dict[str, File], dict[str, str]]:
    """The files of SRC, and their SHA-256 if SRC has a manifest. Raises: Refusal, also if the two disagree; OSError."""
    if not src.is_dir():
        raise Refusal(f"source {src} on {socket.gethostname()} does not exist or is no folder")
    if src == dst or src in dst.parents or dst in src.parents:
        raise Refusal(f"source {src} and destination {dst} lie inside each other; choose another destination")
    files = scan(src)
    if not files:
        raise Refusal(f"source {src} holds no file")
    if MANIFEST not in files:
        return files, {}
    sums, unusable = manifest.parse((src / MANIFEST).read_text("utf-8", "replace"))
    if unusable:
        raise Refusal(
            f"{src / MANIFEST}, line {unusable[0]}: not a line of sha256sum, or names a file again; remake it"
        )
    for name in sorted(sums.keys() ^ (files.keys() - {MANIFEST})):
        raise Refusal(f"{src / MANIFEST} and the files do not fit: only one of them has {name}; make it again")
    return files, sums


class Disk:
    """The files that this node has. The process that has taken stock owns DST."""

    def __init__(self, dst: Path):
        self.dst, self.partial, self.lock = dst, dst / HIDDEN / "files", threading.Lock()
        self.marks: dict[File, dict[int, str]] = {}  # for a version of a file: {bytes on the disk: their sha256}
        self.whole: dict[str, str] = {}  # name: sha256

    def take_stock(self, files: dict[str, File]) -> tuple[dict[str, str], dict[str, int]]:
        """Whole files with their sha256, and the last mark of each unfinished file. Raises: Refusal, OSError."""
        self.partial.mkdir(parents=True, exist_ok=True)
        self._open_journal()
        whole_files.remove(whole_files.partial_of(self.dst / MANIFEST))
        copies = scan(self.dst)
        if MANIFEST not in files:
            copies.pop(MANIFEST, None)
        for name, copy in copies.items():
            path, digest = self.dst / name, self.marks.get(copy, {}).get(copy.bytes)
            if name not in files:
                raise Refusal(f"{path} is not in the source; remove it")
            if digest is None:
                raise Refusal(f"{path} is not as it was staged; remove it")
            if copy != files[name]:
                raise Refusal(f"{path} was staged from a source that has changed since; remove it to stage it again")
            self.whole[name] = digest
        begun = {name: part.bytes for name, part in scan(self.partial).items() if name in files}
        missing = sum(file.bytes for name, file in files.items() if name not in self.whole) - sum(begun.values())
        if missing > (free := shutil.disk_usage(self.dst).free):
            raise Refusal(
                f"{self.dst} on {socket.gethostname()} has {free / 1e9:,.3f} GB free, but"
                f" {missing / 1e9:,.3f} GB are missing"
            )
        marks = {name: [m for m in self.marks.get(files[name], ()) if m <= count] for name, count in begun.items()}
        return self.whole, {name: max(counts, default=0) for name, counts in marks.items()}

    def _open_journal(self) -> None:
        path = self.dst / HIDDEN / "journal"
        self.journal = whole_files.locked(path)
        if self.journal is None:
            raise Refusal(f"{self.dst} is being staged already; every node needs its own DST")
        for line in path.read_bytes().splitlines():
            try:
                *version, count, digest = json.loads(line)
                self.marks.setdefault(File(*version), {})[count] = digest
            except (ValueError, TypeError):
                continue  # cut short by a kill; bytes that no mark covers are copied again

    def note(self, file: File, count: int, digest: str) -> None:
        """Mark that so many bytes of a file are on the disk."""
        with self.lock:
            print("\n" + json.dumps([*astuple(file), count, digest]), end="", file=self.journal, flush=True)
            os.fsync(self.journal.fileno())

    def finish(self, files: dict[str, File]) -> str:
        """Write DST/manifest.sha256, unless SRC has one; returns the sums of all files as text."""
        text = manifest.written(self.whole)
        if MANIFEST not in files:
            whole_files.write_whole(self.dst / MANIFEST, text)
        shutil.rmtree(self.partial)
        self.journal.close()
        return text


class Target:
    """A file that is being written in DST, from its last mark on."""

    def __init__(self, disk: Disk, transfer: Transfer):
        """Raises: Fault if what is there is not what was marked; OSError."""
        self.disk, self.file, self.want, self.bytes = disk, transfer.file, transfer.sha256, transfer.start
        self.path, self.partial = disk.dst / self.file.name, disk.partial / self.file.name
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self.output = self.partial.open("a+b")
        self.output.truncate(self.bytes)
        self.output.seek(0)
        self.state = hashlib.sha256()
        while part := self.output.read(CHUNK):
            self.state.update(part)
        if self.bytes and self.state.hexdigest() != disk.marks[self.file].get(self.bytes):
            self.partial.unlink()
            raise Fault(f"{self.partial} was damaged and is removed; start again")

    def write(self, chunk: memoryview) -> None:
        self.state.update(chunk)
        self.output.write(chunk)
        self.bytes += len(chunk)
        if self.bytes % MARK == 0 and self.bytes < self.file.bytes:
            self.mark()
            # Terabytes that are read next in training, in another order, would push all else out of memory.
            os.posix_fadvise(self.output.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def mark(self) -> None:
        """Wait until all bytes so far are on the disk, and note it in the journal."""
        self.output.flush()
        os.fsync(self.output.fileno())
        self.disk.note(self.file, self.bytes, self.state.hexdigest())

    def finish(self) -> None:
        """Give the file its name. Raises: Fault if it is not what it should be; OSError."""
        digest = self.state.hexdigest()
        if self.want not in (None, digest):
            self.partial.unlink()
            raise Fault(f"{self.file.name} is damaged: its sha256 is {digest}, want {self.want}")
        self.output.flush()
        os.utime(self.output.fileno(), ns=(self.file.mtime_ns, self.file.mtime_ns))
        self.mark()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.rename(self.path)
        whole_files.sync(self.path.parent)
        self.disk.whole[self.file.name] = digest


def fill(chunk: memoryview, source: IO, file: File) -> None:
    """Read on in a file that must not change meanwhile. Raises: Fault, OSError."""
    while chunk and (count := source.readinto(chunk)):
        chunk = chunk[count:]
    status = os.fstat(source.fileno())
    if chunk or (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise Fault(f"{source.name} changed while it was copied; start again once it is at rest")


def plan(files: dict[str, File], sums: dict[str, str], stocks: list[tuple[dict, dict]]) -> list[list[Transfer]]:
    """The transfers of each stream, in order. Every node makes the same plan. stocks: each node's Disk.take_stock.

    Raises: Refusal if nodes hold different copies of a file.
    """
    streams: list[list[Transfer]] = [[] for _ in range(STREAMS)]
    load, reads = [0] * STREAMS, [0] * len(stocks)  # bytes
    for file in sorted(files.values(), key=lambda file: -file.bytes):
        holders = {node: whole[file.name] for node, (whole, _) in enumerate(stocks) if file.name in whole}
        known = {sums.get(file.name), *holders.values()} - {None}
        if len(known) > 1:
            raise Refusal(f"the copies of {file.name} on nodes {sorted(holders)} are not all right; remove them there")
        lacking = [node for node in range(len(stocks)) if node not in holders]
        if not lacking:
            continue
        start = min(stocks[node][1].get(file.name, 0) for node in lacking)
        reader = min(holders or lacking, key=lambda node: reads[node])
        after = sorted(set(lacking) - {reader}, key=lambda node: (node - reader) % len(stocks))
        stream = load.index(min(load))
        streams[stream].append(Transfer(file, min(known, default=None), start, (reader, *after), bool(holders)))
        load[stream] += file.bytes - start
        reads[reader] += file.bytes - start
    return [stream for stream in streams if stream]


class Stream(threading.Thread):
    """A thread that takes this node's part in one transfer after another."""

    def __init__(self, transfers: list[Transfer], rank: int, src: Path, disk: Disk, group: dist.ProcessGroup):
        super().__init__(daemon=True)  # a stream that waits for a lost node must not keep the process alive
        self.transfers = [transfer for transfer in transfers if rank in transfer.chain]
        self.rank, self.src, self.disk, self.group = rank, src, disk, group
        self.read = self.passed = 0  # bytes: from SRC, through this node
        self.failure: Exception | None = None

    def run(self) -> None:
        buffer = torch.empty(CHUNK, dtype=torch.uint8)
        try:
            for transfer in self.transfers:
                what = f"copying {transfer.file.name} to {self.disk.dst}"
                self._move(transfer, buffer)
            dist.barrier(group=self.group)  # a node that is done waits, to notice that another node was lost
        except OSError as error:
            self.failure = Fault(f"{what}: {error.strerror}{f': {error.filename}' if error.filename else ''}")
        except Exception as error:
            self.failure = error
            if not isinstance(error, (Fault, RuntimeError)):  # a defect of ours: show where
                raise

    def _move(self, transfer: Transfer, buffer: torch.Tensor) -> None:
        file, place = transfer.file, transfer.chain.index(self.rank)
        source = target = None
        with ExitStack() as opened:
            if place == 0:
                folder = self.disk.dst if transfer.from_copy else self.src
                source = opened.enter_context((folder / file.name).open("rb", buffering=0))
                source.seek(transfer.start)
            if place or not transfer.from_copy:
                target = Target(self.disk, transfer)
                opened.enter_context(target.output)
            for offset in range(transfer.start, file.bytes, CHUNK):
                chunk = buffer[: min(CHUNK, file.bytes - offset)]
                view = memoryview(chunk.numpy())
                if source:
                    fill(view, source, file)
                    self.read += 0 if transfer.from_copy else len(view)
                else:
                    dist.recv(chunk, transfer.chain[place - 1], group=self.group)
                sending = [dist.isend(chunk, node, group=self.group) for node in transfer.chain[place + 1 :][:1]]
                if target:
                    target.write(view)
                for work in sending:
                    work.wait()
                self.passed += len(view)
            if target:
                target.finish()


def move(streams: list[Stream], rank: int, nodes: int) -> None:
    """Run this node's streams to their end. Raises: Fault, on every node; RuntimeError if a node was lost."""
    store = ranks.store_clone()
    total = sum(t.file.bytes - t.start for stream in streams for t in stream.transfers)
    for stream in streams:
        stream.start()
    working = True
    with progress(total=total, desc="staging", unit="B", unit_scale=True, leave=False, disable=rank > 0) as bar:
        while working:
            working = any(stream.is_alive() for stream in streams)
            bar.update(sum(stream.passed for stream in streams) - bar.n)
            failure = next((stream.failure for stream in streams if stream.failure), None)
            if failure and nodes > 1 and not isinstance(failure, RuntimeError):  # those are a neighbour's
                store.compare_set(FAILED, "", f"node {rank} ({socket.gethostname()}): {failure}")
                time.sleep(3 * POLL_S)  # for the others to read it before this process and perhaps the store end
            if store.check([FAILED]):
                raise Fault(store.get(FAILED).decode())
            if failure:
                raise failure
            time.sleep(POLL_S * working)


def everywhere(task: Callable[[], object]) -> list:
    """A task's result on every node. Raises: Refusal, on all nodes alike."""
    with ranks.agreed():
        result = task()
    return ranks.gather_objects(result)


def join() -> tuple[int, int]:
    """(this node, number of nodes). Raises: Refusal."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise Refusal("one process stages for its whole node; start with torchrun --nproc-per-node 1")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(ranks.BACKENDS["cpu"], **alone)
    except (RuntimeError, ValueError) as error:
        raise Refusal(f"cannot form the process group: {str(error).splitlines()[0]}") from None
    return dist.get_rank(), dist.get_world_size()


def stage(src: Path, dst: Path) -> int:
    """Copy all files below src to dst, on every node. Raises: Refusal, Fault."""
    began = time.monotonic()
    src, dst = src.resolve(), dst.resolve()
    rank, nodes = join()
    surveys = everywhere(lambda: survey(src, dst))
    for node, other in enumerate(surveys):
        if other != surveys[0]:
            raise Refusal(f"node {node} sees other files in {src} than node 0; is it the same storage, and at rest?")
    files, sums = surveys[0]
    disk = Disk(dst)
    transfers = plan(files, sums, everywhere(lambda: disk.take_stock(files)))
    streams = [Stream(part, rank, src, disk, ranks.host_group(f"stage {i}")) for i, part in enumerate(transfers)]
    move(streams, rank, nodes)
    ranks.require_same(everywhere(lambda: disk.finish(files))[rank], f"{dst}: {MANIFEST}")
    read, passed = zip(*everywhere(lambda: [sum(getattr(s, what) for s in streams) for what in ("read", "passed")]))
    seconds, total = time.monotonic() - began, sum(file.bytes for file in files.values())
    line = f"{dst}: {len(files)} files, {total:,} bytes; read {sum(read):,} bytes of {src}, moved {max(passed):,} bytes"
    if rank == 0:
        print(f"{line} per node in {seconds:.1f} s, {max(passed) / 1e9 / seconds:.2f} GB/s")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", type=Path, metavar="SRC", help="folder on shared storage")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder on this node's own disk; staging goes on there")


def run(args: argparse.Namespace) -> int:
    """Stage and return an exit code: 0 done, 2 refused, 3 broken. Prints the reason, on one node."""
    code = cli.run("stage", "", lambda _: stage(args.src, args.dst), [])
    return code if code == 0 or ranks.is_single() else cli.leave(code)  # streams wait for those who never come
