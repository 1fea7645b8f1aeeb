"""Checkpoints: what they hold, saving behind the training, and loading on any number of ranks.

    step_000000800/
        rank_00000_000.safetensors   rows of this rank, in files of about FILE_BYTES
        manifest.json                counters and config; which file holds which rows; a checksum of each file

A folder gets this name only after every byte is on the disk; folders with other names are ignored. Nothing is pickled.

A checkpoint holds fp32 weights, the optimizer's moments, the history of delayed FP8 scales, the counters and the
config. Nothing in it belongs to a rank, so any number of ranks can continue from it. With NAME as Black Forest Labs'
name of a parameter, its keys are model.NAME, optimizer.state.NAME.{exp_avg,exp_avg_sq} and fp8.history.LAYER. With
optim.ema_half_life there is also optimizer.state.NAME.ema.
"""

import json
import shlex
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flux_ref import config, files, ranks, safetensors_io, sharding
from flux_ref.cli import Fault, Refusal, Say, one_line
from flux_ref.config import Config, Shapes
from flux_ref.ranks import World
from flux_ref.trainer import TrainState

MANIFEST = "manifest.json"
FORMAT = 3  # of the manifest and the files
NAMES = "step_" + 9 * "[0-9]"  # as of files
FILE_BYTES = 2**28  # writing takes as much host memory; a reader of some rows reads the whole file, for its checksum


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def list_checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first. Raises: OSError for a folder that may not be read."""
    return files.matching(folder_of(run), NAMES)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what interrupted saves and deletions have left."""
    for path in list_checkpoints(run)[:-keep]:
        path.rename(path.with_name(f".{path.name}.deleted{files.PARTIAL}"))
    files.remove_partial_files(folder_of(run))


# The rows of a state that a rank holds


@dataclass(frozen=True)
class TensorSlice:
    """Rows first, first + 1, ... of a tensor of `shape`, as `local` on this rank. replicated: every rank has all."""

    local: Tensor
    first: int
    shape: torch.Size
    replicated: bool = False


Rows = dict[str, TensorSlice]  # by checkpoint key


def rows_of(state: TrainState) -> Rows:
    """All tensors of a state by checkpoint key, as the rows that this rank holds. They share memory with the state."""
    rows = {}
    for name, parameter in sharding.named_parameters(state.net).items():
        first, local = sharding.local_rows(parameter)
        rows[f"model.{name}"] = TensorSlice(local.detach(), first, parameter.shape)
    for moment, values in state.opt.states().items():
        for name, tensor in zip(state.opt.names, values):
            rows[f"optimizer.state.{name}.{moment}"] = replace(rows[f"model.{name}"], local=tensor)
    replicated = {key: TensorSlice(tensor, 0, tensor.shape, True) for key, tensor in state.recipe.state().items()}
    return rows | replicated


def rows_to_write(rows: Rows, world: World) -> Rows:
    """The rows that this rank writes. Replicas hold equal rows; each tensor is written by one replica.

    The next tensor goes to the replica with the fewest elements so far, so all nodes write about equally much.
    """
    replica = world.mesh.get_local_rank(0) if world.mesh.ndim == 2 else 0
    shard = world.mesh.get_local_rank("shard")
    written = [0] * world.replicas
    own = {}
    for key, part in rows.items():
        writer = written.index(min(written))
        written[writer] += part.shape.numel()
        if writer == replica and part.local.numel() and (shard == 0 or not part.replicated):
            own[key] = part
    return own


def allocate_host_buffers(rows: Rows, pin: bool) -> list[Rows]:
    """The same rows, all fp32, as undefined host tensors, in groups that become files. pin: pinned.

    A group has one buffer of at most FILE_BYTES, or one tensor: torch rounds each pinned allocation up to a power of
    two, so one buffer per tensor would take a third more. Raises: RuntimeError.
    """
    groups: list[Rows] = []
    room = 0
    for key, row in rows.items():
        if row.local.nbytes > room:
            groups.append({})
            room = FILE_BYTES
        groups[-1][key] = row
        room -= row.local.nbytes
    for group in groups:
        sizes = [row.local.numel() for row in group.values()]
        buffer = torch.empty(sum(sizes), pin_memory=pin)
        for (key, row), part in zip(group.items(), buffer.split(sizes)):
            group[key] = replace(row, local=part.view(row.local.shape))
    return groups


# Writing

# Of each file: its CRC-32, and {key: (first row, number of rows)}. Manifests hold it, too.
Written = dict[str, tuple[int, dict[str, tuple[int, int]]]]


def _checksum(content: dict) -> int:
    """Of a manifest without its checksum."""
    return zlib.crc32(json.dumps(content).encode())


def require_space(folder: Path, size: int) -> None:
    """Raises: OSError unless checkpoints of so many bytes fit. A full disk has no place for logs either."""
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < size:  # some file systems of FUSE do not tell their size
        room = f"{disk.free / 1e9:.3g} GB free; {size / 1e9:.3g} GB are needed for checkpoints"
        remedy = "free its disk, set run.dir to another disk, lower checkpoint.keep, or set checkpoint.save=false"
        raise OSError(f"{folder} has {room}; {remedy}")


class Saver:
    """Writes checkpoints behind the training, one at a time.

    Training waits only for the copy to host memory. The copy takes as much memory as the rows that this rank writes.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        state: TrainState,
        facts: dict[str, int],
        say: Say,
        saved: Path | None = None,
    ):
        """Takes the host memory of the copies. Collective.

        facts:  {"train_samples", "val_samples"}, for the manifest: sizes of the run's data.
        saved:  the checkpoint that the run starts from, which is not saved again.
        Raises: Refusal if the disk cannot hold all checkpoints of the run, or if a rank cannot write to it;
        RuntimeError if a rank lacks this memory.
        """
        self.cfg = cfg
        self.world = world
        self.facts = facts
        self.say = say
        self.run = config.run_dir(cfg)
        self.group = ranks.host_group("save")
        rows = rows_of(state)
        self.shapes = {key: list(row.shape) for key, row in rows.items()}
        self.bytes = sum(row.shape.numel() * row.local.itemsize for row in rows.values())  # of one checkpoint
        self.thread: threading.Thread | None = None
        self.step = step_of(saved) if saved else None  # of the newest save
        self.failure: str | None = None  # why the newest save failed
        self._require_place()
        with ranks.agreed():
            self.host = allocate_host_buffers(rows_to_write(rows, world), world.pin)

    def _require_place(self) -> None:
        """Rank 0 makes a file among the checkpoints, or above, and every rank looks for it."""
        place = folder_of(self.run).resolve()  # it may link to a larger disk
        folder = next(path for path in (place, *place.parents) if path.exists())
        trial = folder / f".{self.run.resolve().name}.trial{files.PARTIAL}"
        with ranks.agreed():
            if self.world.rank == 0:
                there = len(list_checkpoints(self.run)) if self.step else 0  # others lie aside by then
                # For a moment a new one is whole and the oldest is not yet gone.
                require_space(folder, max(1, self.cfg.checkpoint.keep + 1 - there) * self.bytes)
                trial.touch()
        try:
            with ranks.agreed():
                if not trial.exists():
                    raise Refusal(f"{folder} is not the folder that rank 0 sees; put run.dir on a disk of all nodes")
        finally:
            if self.world.rank == 0:
                trial.unlink()

    def save(self, state: TrainState) -> None:
        """Begin to save a state, unless this step is saved already. Waits for the save before. Collective."""
        self.wait()
        if self.step == state.step and self.failure is None:
            return
        self.step = state.step
        info = {
            "step": state.step,
            "samples": state.samples,
            **self.facts,
            "name": self.cfg.name,
            "config": config.flat(self.cfg),
        }
        rows = rows_of(state)
        for group in self.host:
            for key, copy in group.items():
                copy.local.copy_(rows[key].local, non_blocking=True)
        wait_for_copy = ranks.make_copy_waiter(self.world.device)
        self.thread = threading.Thread(target=self._save, args=(info, wait_for_copy), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Until no save is under way."""
        if self.thread:
            self.thread.join()

    def finish(self, reason: str = "") -> None:
        """Wait for the newest save. Raises: Fault, on every rank, if it failed. reason: as of train.save_and_wait."""
        self.wait()
        if self.failure is not None:
            raise Fault(f"{reason}checkpoint of step {self.step} is not saved: {self.failure}")

    def _save(self, info: dict, wait_for_copy: Callable[[], None]) -> None:
        """In a thread of its own, on every rank."""
        begin = time.perf_counter()
        final = folder_of(self.run) / f"step_{info['step']:09d}"
        partial = final.with_name(f".{final.name}{files.PARTIAL}")
        self.failure = None
        try:
            self._write(final, partial, info, wait_for_copy)
        except Exception as error:  # on every rank: disks fill up
            self.failure = one_line(error)
        if self.world.rank == 0 and self.failure:
            shutil.rmtree(partial, ignore_errors=True)
            self.say(f"checkpoint {final} NOT saved: {self.failure}; a stop now loses what came after the one before")
        elif self.world.rank == 0:
            prune(self.run, self.cfg.checkpoint.keep)
            self.say(f"checkpoint {final} saved in {time.perf_counter() - begin:.1f} s")

    def _write(self, final: Path, partial: Path, info: dict, wait_for_copy: Callable[[], None]) -> None:
        """Write all files, then make the folder visible under its name. Raises on all ranks if one rank fails."""
        with ranks.agreed(self.group):
            wait_for_copy()
            if self.world.rank == 0:
                final.parent.mkdir(exist_ok=True)  # if the user has deleted it; a deleted run folder stays away
                require_space(final.parent, self.bytes)
                files.remove(partial)  # of a save that was killed
                partial.mkdir()
        with ranks.agreed(self.group):
            own: Written = {}
            for number, rows in enumerate(self.host):
                name = f"rank_{self.world.rank:05d}_{number:03d}.safetensors"
                checksum = safetensors_io.write(partial / name, {key: row.local for key, row in rows.items()})
                own[name] = (checksum, {key: (row.first, len(row.local)) for key, row in rows.items()})
        written = ranks.gather_objects(own, self.group)
        with ranks.agreed(self.group):
            if self.world.rank == 0:
                every = {name: file for part in written for name, file in part.items()}
                content = {"format": FORMAT, "info": info, "shapes": self.shapes, "files": every}
                files.write_whole(partial / MANIFEST, json.dumps(content | {"crc32": _checksum(content)}))
                files.sync(partial)
                partial.rename(final)
                files.sync(final.parent)


# Reading


class Checkpoint:
    """A whole checkpoint, open for reading. No rows of a file are read before its checksum was right.

    info:   what it says of the training: {"step", "samples", "config", ...}, as Saver writes it.
    shapes: of its tensors, by key.
    """

    def __init__(self, folder: Path):
        """Raises: Refusal if the manifest is missing, damaged or of another format."""
        self.folder = folder
        self._right: set[str] = set()  # files whose checksum was right
        path = folder / MANIFEST
        content = files.json_object_or_empty(path.read_bytes()) if path.is_file() else {}
        if content and content.get("format") != FORMAT:
            remedy = "continue its run with the code that wrote it (environment.json names the commit)"
            raise Refusal(f"checkpoint {folder} has format {content.get('format')}, not {FORMAT}; {remedy}")
        if content.pop("crc32", None) != _checksum(content):
            raise self._damaged(path)
        self.info: dict = content["info"]
        self.shapes: Shapes = {key: tuple(shape) for key, shape in content["shapes"].items()}
        self.files: Written = content["files"]

    def read(self, key: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows first .. first + count of a tensor, on the host, in fp32. Raises: Refusal for damage."""
        end = self.shapes[key][0] if count is None else first + count
        pieces = [torch.empty(0, *self.shapes[key][1:])]
        for start, length, name in sorted((*rows[key], name) for name, (_, rows) in self.files.items() if key in rows):
            low = max(first, start)
            high = min(end, start + length)
            if low < high:
                pieces.append(self._rows(name, key, low - start, high - low))
        return torch.cat(pieces)

    def _rows(self, name: str, key: str, first: int, count: int) -> Tensor:
        """Rows of a tensor in one of the files. Raises: Refusal."""
        path = self.folder / name
        if name not in self._right and (not path.is_file() or safetensors_io.crc32(path) != self.files[name][0]):
            raise self._damaged(path)
        self._right.add(name)
        return safetensors_io.read_rows(path, key, first, count)

    def _damaged(self, path: Path) -> Refusal:
        """What is damaged, and what to do. Nothing takes another checkpoint by itself: a run would train twice."""
        aside = shlex.join(("mv", str(self.folder), f"{self.folder}.damaged"))
        remedy = f"`{aside}` lets the run go on from the checkpoint before it"
        return Refusal(f"checkpoint file {path} is missing or damaged (checksum differs); {remedy}")


def load(path: Path, state: TrainState) -> dict:
    """Fill weights, moments, history and counters from a checkpoint of the same run. Collective. Raises: Refusal.

    Returns: what the checkpoint says of the training.

    Each rank reads only its own rows. A layer without a history in the checkpoint had no delayed sides so far. Its
    history begins empty, as in a run that knew all stages from the start.
    """
    with ranks.agreed(), torch.no_grad():
        saved = Checkpoint(path)
        for key, row in rows_of(state).items():
            if row.replicated and key not in saved.shapes:
                row.local.zero_()
            else:
                row.local.copy_(saved.read(key, row.first, len(row.local)))
    state.recipe.after_load()
    state.set_counters(saved.info["step"], saved.info["samples"])
    state.opt.set_steps(state.step)
    return saved.info
