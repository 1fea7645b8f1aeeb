"""Bringing a data set from shared storage to the local disk of every node, before a run.

    python -m tools.prepare stage SRC DST                                             this node
    torchrun --nnodes N --nproc-per-node 1 -m tools.prepare stage SRC DST             N nodes; SRC is read once

Every node gets the whole set: training shuffles globally, so any rank may read any sample. The files are dealt to
STREAMS streams, and each stream copies one file after another. One node reads a file. Each chunk of it goes down a
chain through all nodes that lack the file; each node passes it on while it checksums and writes it. So storage delivers
as much as one node takes in, and no link carries a byte twice. A stream waits for one thing at a time; eight streams
keep storage, network, processors and disk busy. All nodes take a stream's chunks in the same order, so the first
unfinished chunk can always move: nothing deadlocks.

DST/.stage/files holds unfinished files; a restart copies them again. A file gets its name in DST when it is on the disk
and has the size, the time and the SHA-256 of SRC/manifest.sha256. So a restart trusts a file in DST that has the size
and the time of SRC's. Without such a manifest, DST/manifest.sha256 is written at the end, and all nodes must agree on
it. `sha256sum -c manifest.sha256` reads all files.
"""

import argparse
import hashlib
import os
import shutil
import socket
import stat
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import files as whole_files
from flux_ref.formats.claim import Claim, hold
from flux_ref.formats.outside import told
from flux_ref.run import cli
from flux_ref.run.progress import progress
from tools.prepare import manifest, pool
from tools.prepare.manifest import HIDDEN, MANIFEST

STREAMS = 8
CHUNK = 16 << 20  # bytes; a stream holds one
FAILED = "stage/failed"  # key of the reason, in the store that all nodes share
POLL_S = 0.2  # between two looks at it
STOP_S = 2.0  # for a stream to end with its chunk


class File(NamedTuple):
    """A version of a file: its path below SRC or DST, its size, and the time of its last change, which a copy keeps."""

    name: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Transfer:
    """A file, and the nodes that lack it in the order in which they pass it on. The first one reads it from SRC."""

    file: File
    sha256: str | None  # None: not known
    chain: tuple[int, ...]


def scan(root: Path) -> dict[str, File]:
    """All files below a folder, by name, without those in .stage. Raises: Refusal for a link or FIFO; OSError."""
    files = {}
    for path in manifest.walk(root):
        status = path.lstat()
        name = path.relative_to(root).as_posix()
        if not stat.S_ISREG(status.st_mode):
            raise Refusal(f"{path} is a link or special file; only plain files are staged: replace or remove it")
        if not manifest.fits(name):
            raise Refusal(f"{str(path)!r} has a name that does not fit into a line of {MANIFEST}; rename it")
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
    path = src / MANIFEST
    sums = manifest.read(path)
    for name in sorted(sums.keys() ^ (files.keys() - {MANIFEST})):
        raise Refusal(f"{path} and the files do not fit: only one of them has {name}; make it again")
    return files, sums


def claimed(dst: Path) -> Claim:
    """No other process stages to DST while this is held. Raises: Refusal, OSError."""
    (dst / HIDDEN).mkdir(parents=True, exist_ok=True)
    return hold(dst / HIDDEN / "claim", f"{dst} is being staged", "every node needs its own DST")


def partial_of(dst: Path, name: str = "") -> Path:
    """Where an unfinished file lies."""
    return dst / HIDDEN / "files" / name


def take_stock(dst: Path, files: dict[str, File]) -> list[str]:
    """The names of the whole files in DST, of which there is only one process's. Raises: Refusal, OSError."""
    whole_files.remove(partial_of(dst))
    copies = scan(dst)
    if MANIFEST not in files:
        copies.pop(MANIFEST, None)
    for name, copy in copies.items():
        if name not in files:
            raise Refusal(f"{dst / name} is not in the source; remove it")
        if copy != files[name]:
            raise Refusal(f"{dst / name} or its source has changed since it was staged; remove it to stage it again")
    missing = sum(files[name].bytes for name in files.keys() - copies.keys())
    free = shutil.disk_usage(dst).free
    if missing > free:
        space = f"{free / 1e9:,.3f} GB free, but {missing / 1e9:,.3f} GB are missing"
        raise Refusal(f"{dst} on {socket.gethostname()} has {space}")
    return list(copies)


def plan(files: dict[str, File], sums: dict[str, str], stocks: list[list[str]]) -> list[list[Transfer]]:
    """The transfers of each stream, in order. Every node makes the same plan. stocks: each node's `take_stock`."""
    transfers = []
    for file in sorted(files.values(), key=lambda file: -file.bytes):
        lacking = [node for node, stock in enumerate(stocks) if file.name not in stock]
        if lacking:
            first = len(transfers) % len(lacking)  # nodes take turns in reading
            chain = (*lacking[first:], *lacking[:first])
            transfers.append(Transfer(file, sums.get(file.name), chain))
    return [transfers[stream::STREAMS] for stream in range(min(STREAMS, len(transfers)))]


def fill(chunk: memoryview, source: IO, file: File) -> None:
    """Read on in a file that must not change meanwhile. Raises: Fault, OSError."""
    while chunk and (count := source.readinto(chunk)):
        chunk = chunk[count:]
    status = os.fstat(source.fileno())
    if chunk or (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise Fault(f"{source.name} changed while it was copied; start again once it is at rest")


class Stream(threading.Thread):
    """A thread that takes this node's part in one transfer after another."""

    def __init__(self, transfers: list[Transfer], src: Path, dst: Path, group: dist.ProcessGroup):
        super().__init__(daemon=True)  # a stream that waits for a lost node must not keep the process alive
        self.rank = dist.get_rank()
        self.src = src
        self.dst = dst
        self.group = group
        self.transfers = [transfer for transfer in transfers if self.rank in transfer.chain]
        self.passed = 0  # bytes through this node
        self.sums: dict[str, str] = {}  # the SHA-256 of each copied file
        self.failure: Exception | None = None

    def stop(self) -> None:
        """Give up the transfers. The stream ends with its chunk, unless it waits for another node or for storage."""
        self.transfers.clear()
        self.join(STOP_S)

    def run(self) -> None:
        buffer = torch.empty(CHUNK, dtype=torch.uint8)
        try:
            for transfer in self.transfers:
                what = f"copying {transfer.file.name} to {self.dst}"
                self._move(transfer, buffer)
            dist.barrier(group=self.group)  # a node that is done waits, to notice that another node was lost
        except (OSError, MemoryError) as error:
            self.failure = Fault(f"{what}: {told(error) if isinstance(error, OSError) else 'out of memory'}")
        except Exception as error:
            self.failure = error

    def _move(self, transfer: Transfer, buffer: torch.Tensor) -> None:
        file = transfer.file
        place = transfer.chain.index(self.rank)
        digest = hashlib.sha256()
        partial = partial_of(self.dst, file.name)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            source = None if place else opened.enter_context((self.src / file.name).open("rb", buffering=0))
            output = opened.enter_context(partial.open("wb"))
            for offset in range(0, file.bytes, CHUNK):
                if not self.transfers:
                    return
                chunk = buffer[: min(CHUNK, file.bytes - offset)]
                view = memoryview(chunk.numpy())
                if source:
                    fill(view, source, file)
                else:
                    dist.recv(chunk, transfer.chain[place - 1], group=self.group)
                sending = [dist.isend(chunk, node, group=self.group) for node in transfer.chain[place + 1 :][:1]]
                digest.update(view)
                output.write(view)
                for work in sending:
                    work.wait()
                self.passed += len(view)
            self._keep(transfer, output, digest.hexdigest())

    def _keep(self, transfer: Transfer, output: IO, digest: str) -> None:
        """Give a file its name once it is on the disk. Raises: Fault if it is not what it should be; OSError."""
        file = transfer.file
        if transfer.sha256 not in (None, digest):
            raise Fault(f"{file.name} is damaged: its sha256 is {digest}, want {transfer.sha256}")
        output.flush()
        os.utime(output.fileno(), ns=(file.mtime_ns, file.mtime_ns))
        os.fsync(output.fileno())
        # Terabytes that are read next in training, in another order, would push all else out of memory.
        os.posix_fadvise(output.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path = self.dst / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_of(self.dst, file.name).rename(path)
        whole_files.sync(path.parent)
        self.sums[file.name] = digest


def move(streams: list[Stream]) -> None:
    """Run this node's streams to their end. Raises: Fault, on every node; RuntimeError if a node was lost."""
    store = ranks.store_clone()
    rank = dist.get_rank()
    working = True
    total = sum(transfer.file.bytes for stream in streams for transfer in stream.transfers)
    for stream in streams:
        stream.start()
    with progress(total=total, desc="staging", unit="B", unit_scale=True, leave=False, disable=rank > 0) as bar:
        while working:
            working = any(stream.is_alive() for stream in streams)
            bar.update(sum(stream.passed for stream in streams) - bar.n)
            failure = next((stream.failure for stream in streams if stream.failure), None)
            if isinstance(failure, Fault) and not ranks.is_single():  # a RuntimeError tells of a neighbour's failure
                store.compare_set(FAILED, "", f"node {rank} ({socket.gethostname()}): {failure}")
                time.sleep(3 * POLL_S)  # for the others to read it before this process and perhaps the store end
            if store.check([FAILED]):
                raise Fault(store.get(FAILED).decode())
            if failure:
                raise failure
            time.sleep(POLL_S * working)


def checksums(dst: Path, names: list[str]) -> dict[str, str]:
    """The SHA-256 of files that an earlier process has copied. Raises: OSError."""

    def read(name: str, advance: pool.Advance) -> str:
        with (dst / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        advance(1)
        return digest.hexdigest()

    with progress(total=len(names), desc="checksums", unit=" files", leave=False, disable=dist.get_rank() > 0) as bar:
        return dict(zip(names, pool.run(read, names, STREAMS, bar)))


def join() -> None:
    """Join the other nodes, if torchrun says that there are any. Raises: Refusal."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise Refusal("one process stages for its whole node; start with torchrun --nproc-per-node 1")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(ranks.BACKENDS["cpu"], **alone)
    except (RuntimeError, ValueError) as error:
        raise Refusal(f"cannot form the process group: {str(error).splitlines()[0]}") from None


def stage(src: Path, dst: Path) -> int:
    """Copy all files below src to dst, on every node. Raises: Refusal, Fault."""
    began = time.monotonic()
    src = src.resolve()
    dst = dst.resolve()
    join()
    with ranks.agreed():
        files, sums = survey(src, dst)
    first, *others = ranks.gather_objects([list(files.values()), sums])
    for node, other in enumerate(others, 1):
        if other != first:
            raise Refusal(f"node {node} sees other files in {src} than node 0; is it the same storage, and at rest?")
    with ExitStack() as opened:
        with ranks.agreed():
            opened.enter_context(claimed(dst))
            whole = take_stock(dst, files)
        transfers = plan(files, sums, ranks.gather_objects(whole))
        streams = [Stream(part, src, dst, ranks.host_group(f"stage {i}")) for i, part in enumerate(transfers)]
        try:
            move(streams)
        finally:
            if ranks.is_single():  # this process then leaves the group, which crashes under a stream
                for stream in streams:
                    stream.stop()
        if MANIFEST not in files:
            with ranks.agreed():
                sums = checksums(dst, whole)
                for stream in streams:
                    sums |= stream.sums
            text = manifest.written(sums)
            ranks.require_same(text, f"{dst}: {MANIFEST}")
            with ranks.agreed():
                whole_files.write_whole(dst / MANIFEST, text)
        whole_files.remove(partial_of(dst))
    if dist.get_rank() == 0:
        seconds = time.monotonic() - began
        total = sum(file.bytes for file in files.values())
        read = sum(transfer.file.bytes for part in transfers for transfer in part)
        done = f"{dst}: {len(files)} files, {total:,} bytes; read {read:,} bytes of {src}"
        print(f"{done} in {seconds:.1f} s, {read / 1e9 / seconds:.2f} GB/s")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", type=Path, metavar="SRC", help="folder on shared storage")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder on this node's own disk; staging goes on there")


def run(args: argparse.Namespace) -> int:
    """Stage and return an exit code: 0 done, 2 refused, 3 broken. Prints the reason, on one node."""
    code = cli.run("stage", "", lambda _: stage(args.src, args.dst), [])
    return code if code == 0 or ranks.is_single() else cli.leave(code)  # streams wait for those who never come
