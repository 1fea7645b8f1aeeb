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
and has the SHA-256 of SRC/manifest.sha256. Without such a manifest, DST/manifest.sha256 is written at the end.
DST/.stage/journal has the SHA-256 of each finished file. A restart trusts a finished file if its size and time are
those of SRC and of the journal; `sha256sum -c manifest.sha256` reads all files.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import claim, outside
from flux_ref.formats import files as whole_files
from flux_ref.run import cli
from flux_ref.run.progress import progress
from tools.prepare import manifest
from tools.prepare.manifest import MANIFEST

STREAMS = 8
CHUNK = 16 << 20  # bytes; a stream holds one
CHUNKS_IN_CACHE = 16  # of a file that is being written
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
    """A file, and the nodes that lack it in the order in which they pass it on. The first one reads it from SRC."""

    file: File
    sha256: str | None  # None: not known
    chain: tuple[int, ...]


def scan(root: Path) -> dict[str, File]:
    """All files below a folder, by name, without those in .stage. Raises: Refusal for a link or FIFO; OSError."""
    files = {}
    folders = [root]
    for path in (path for folder in folders for path in sorted(folder.iterdir())):
        status = path.lstat()
        name = path.relative_to(root).as_posix()
        if stat.S_ISDIR(status.st_mode):
            folders += [path] if name != HIDDEN else []
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
    sums, unusable = manifest.read(src / MANIFEST)
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
        self.dst = dst
        self.partial = dst / HIDDEN / "files"
        self.lock = threading.Lock()
        self.whole: dict[str, str] = {}  # name: sha256
        self.opened = ExitStack()
        self.close = self.opened.close  # leaves DST to other processes

    def take_stock(self, files: dict[str, File]) -> dict[str, str]:
        """The SHA-256 of each whole file. Raises: Refusal, OSError."""
        (self.dst / HIDDEN).mkdir(parents=True, exist_ok=True)
        staged = self._open_journal()
        whole_files.remove(self.partial)
        whole_files.remove(whole_files.partial_of(self.dst / MANIFEST))
        copies = scan(self.dst)
        if MANIFEST not in files:
            copies.pop(MANIFEST, None)
        for name, copy in copies.items():
            path = self.dst / name
            if name not in files:
                raise Refusal(f"{path} is not in the source; remove it")
            if copy not in staged:
                raise Refusal(f"{path} is not as it was staged; remove it")
            if copy != files[name]:
                raise Refusal(f"{path} was staged from a source that has changed since; remove it to stage it again")
            self.whole[name] = staged[copy]
        missing = sum(file.bytes for name, file in files.items() if name not in self.whole)
        if missing > (free := shutil.disk_usage(self.dst).free):
            raise Refusal(
                f"{self.dst} on {socket.gethostname()} has {free / 1e9:,.3f} GB free, but"
                f" {missing / 1e9:,.3f} GB are missing"
            )
        self.journal = self.opened.enter_context((self.dst / HIDDEN / "journal").open("a+", encoding="utf-8"))
        return self.whole

    def _open_journal(self) -> dict[File, str]:
        path = self.dst / HIDDEN / "journal"
        staged = {}
        place = path.with_name("claim")
        if (own := claim.take(place)) is None:
            raise Refusal(f"{self.dst} is being staged already ({claim.owner(place)}); every node needs its own DST")
        self.opened.enter_context(own)
        written = outside.read_bytes(path, "journal", outside.OWN_BYTES) if os.path.lexists(path) else b""
        for line in written.splitlines():
            with contextlib.suppress(ValueError, TypeError):  # cut short by a kill, before the file got its name
                name, size, mtime_ns, *_, digest = outside.parse_json(line)  # older versions put one number between
                if manifest.is_sha256(digest):
                    staged[File(name, size, mtime_ns)] = digest
        return staged

    def keep(self, transfer: Transfer, output: IO, digest: str) -> None:
        """Give a file its name once it is on the disk. Raises: Fault if it is not what it should be; OSError."""
        file = transfer.file
        partial = self.partial / transfer.file.name
        path = self.dst / transfer.file.name
        if transfer.sha256 not in (None, digest):
            partial.unlink()
            raise Fault(f"{file.name} is damaged: its sha256 is {digest}, want {transfer.sha256}")
        output.flush()
        os.utime(output.fileno(), ns=(file.mtime_ns, file.mtime_ns))
        settle(output)
        with self.lock:
            print("\n" + json.dumps([*astuple(file), digest]), end="", file=self.journal, flush=True)
            os.fsync(self.journal.fileno())
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(path)
        whole_files.sync(path.parent)
        self.whole[file.name] = digest

    def finish(self, files: dict[str, File]) -> str:
        """Write DST/manifest.sha256, unless SRC has one; returns the sums of all files as text."""
        text = manifest.written(self.whole)
        if MANIFEST not in files:
            whole_files.write_whole(self.dst / MANIFEST, text)
        whole_files.remove(self.partial)
        return text


def fill(chunk: memoryview, source: IO, file: File) -> None:
    """Read on in a file that must not change meanwhile. Raises: Fault, OSError."""
    while chunk and (count := source.readinto(chunk)):
        chunk = chunk[count:]
    status = os.fstat(source.fileno())
    if chunk or (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise Fault(f"{source.name} changed while it was copied; start again once it is at rest")


def settle(output: IO) -> None:
    """Wait until what was written is on the disk, and drop it from the operating system's cache."""
    output.flush()
    os.fsync(output.fileno())
    # Terabytes that are read next in training, in another order, would push all else out of memory.
    os.posix_fadvise(output.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plan(files: dict[str, File], sums: dict[str, str], stocks: list[dict[str, str]]) -> list[list[Transfer]]:
    """The transfers of each stream, in order. Every node makes the same plan. stocks: each node's Disk.take_stock.

    Raises: Refusal if nodes hold different copies of a file.
    """
    transfers = []
    for file in sorted(files.values(), key=lambda file: -file.bytes):
        holders = [node for node, whole in enumerate(stocks) if file.name in whole]
        known = {sums.get(file.name), *(stocks[node][file.name] for node in holders)} - {None}
        if len(known) > 1:
            raise Refusal(f"the copies of {file.name} on nodes {holders} are not all right; remove them there")
        if lacking := [node for node in range(len(stocks)) if node not in holders]:
            first = len(transfers) % len(lacking)  # nodes take turns in reading
            transfers.append(Transfer(file, min(known, default=None), (*lacking[first:], *lacking[:first])))
    return [transfers[stream::STREAMS] for stream in range(min(STREAMS, len(transfers)))]


class Stream(threading.Thread):
    """A thread that takes this node's part in one transfer after another."""

    def __init__(self, transfers: list[Transfer], src: Path, disk: Disk, group: dist.ProcessGroup):
        super().__init__(daemon=True)  # a stream that waits for a lost node must not keep the process alive
        self.rank = dist.get_rank()
        self.src = src
        self.disk = disk
        self.group = group
        self.transfers = [transfer for transfer in transfers if self.rank in transfer.chain]
        self.passed = 0  # bytes through this node
        self.failure: Exception | None = None

    def run(self) -> None:
        buffer = torch.empty(CHUNK, dtype=torch.uint8)
        try:
            for transfer in self.transfers:
                what = f"copying {transfer.file.name} to {self.disk.dst}"
                self._move(transfer, buffer)
            dist.barrier(group=self.group)  # a node that is done waits, to notice that another node was lost
        except (OSError, MemoryError) as error:
            self.failure = Fault(f"{what}: {str(error) or 'out of memory'}")
        except Exception as error:
            self.failure = error

    def _move(self, transfer: Transfer, buffer: torch.Tensor) -> None:
        file = transfer.file
        place = transfer.chain.index(self.rank)
        digest = hashlib.sha256()
        partial = self.disk.partial / file.name
        partial.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            source = None if place else opened.enter_context((self.src / file.name).open("rb", buffering=0))
            output = opened.enter_context(partial.open("wb"))
            for offset in range(0, file.bytes, CHUNK):
                chunk = buffer[: min(CHUNK, file.bytes - offset)]
                view = memoryview(chunk.numpy())
                if source:
                    fill(view, source, file)
                else:
                    dist.recv(chunk, transfer.chain[place - 1], group=self.group)
                sending = [dist.isend(chunk, node, group=self.group) for node in transfer.chain[place + 1 :][:1]]
                digest.update(view)
                output.write(view)
                if (offset // CHUNK + 1) % CHUNKS_IN_CACHE == 0:
                    settle(output)
                for work in sending:
                    work.wait()
                self.passed += len(view)
            self.disk.keep(transfer, output, digest.hexdigest())


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
            is_defect = failure is not None and not isinstance(failure, (Fault, RuntimeError))
            if (is_defect or isinstance(failure, Fault)) and not ranks.is_single():  # RuntimeErrors are a neighbour's
                text = repr(failure) if is_defect else failure
                store.compare_set(FAILED, "", f"node {rank} ({socket.gethostname()}): {text}")
                time.sleep(3 * POLL_S)  # for the others to read it before this process and perhaps the store end
            if store.check([FAILED]) and not is_defect:  # a defect is shown with its traceback
                raise Fault(store.get(FAILED).decode())
            if failure:
                raise failure
            time.sleep(POLL_S * working)


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
    first, *others = ranks.gather_objects([[astuple(file) for file in files.values()], sums])
    for node, other in enumerate(others, 1):
        if other != first:
            raise Refusal(f"node {node} sees other files in {src} than node 0; is it the same storage, and at rest?")
    with closing(Disk(dst)) as disk:
        with ranks.agreed():
            whole = disk.take_stock(files)
        transfers = plan(files, sums, ranks.gather_objects(whole))
        move([Stream(part, src, disk, ranks.host_group(f"stage {i}")) for i, part in enumerate(transfers)])
        with ranks.agreed():
            text = disk.finish(files)
    ranks.require_same(text, f"{dst}: {MANIFEST}")
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
