"""Saving a run and continuing it: what a checkpoint holds, when it becomes one, and which ones stay.

It holds fp32 weights, AdamW's moments, the history of delayed FP8 scaling, the counters and the config. Nothing in it
belongs to a rank, so any number of ranks continues from it. Keys, with BFL's NAME: model.NAME,
optimizer.state.NAME.{exp_avg,exp_avg_sq} and fp8.history.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from flux_ref import config, ranks, schedule, sharding
from flux_ref.config import Config
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import checkpoint_files, safetensors_io
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.step import State

BYTES_PER_PARAMETER = 12  # a weight and two moments, fp32


@dataclass(frozen=True)
class Rows:
    """This rank's rows first, first + 1, ... of a tensor of `shape`."""

    local: Tensor
    first: int
    shape: torch.Size


def rows_of(state: State) -> dict[str, Rows]:
    """All tensors of a state, by checkpoint key; shares memory with the state."""
    found = {}
    for name, parameter in sharding.named_parameters(state.net).items():
        first, local = sharding.local_rows(parameter)
        found[f"model.{name}"] = Rows(local.detach(), first, parameter.shape)
    for moment, tensors in state.opt.moments().items():
        for name, tensor in zip(state.opt.names, tensors):
            found[f"optimizer.state.{name}.{moment}"] = replace(found[f"model.{name}"], local=tensor)
    history = state.net.fp8.history
    if history.numel():  # every rank has all of it; as of replicas' rows, one copy is written
        found["fp8.history"] = Rows(history, 0, history.shape)
    return found


class _RowsPlanner(DefaultSavePlanner):
    """Tells torch.distributed.checkpoint which rows this rank has; replicas' equal rows are written once."""

    def __init__(self, rows: dict[str, Rows]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.rows = rows  # not the state dict, of which torch.distributed.checkpoint logs every entry

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(key, rows) for key, rows in self.rows.items() if rows.local.numel()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.rows[index.fqn].local


def _item(key: str, rows: Rows) -> WriteItem:
    offsets = torch.Size((rows.first, *(0 for _ in rows.shape[1:])))
    chunk = ChunkStorageMetadata(offsets, rows.local.shape)
    data = TensorWriteData(chunk, TensorProperties(rows.local.dtype), rows.shape)
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


class Saver:
    """Writes checkpoints behind the training, one at a time.

    Training waits for the copy to host memory only, which takes as much memory as this rank's shards and moments.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        facts: dict,
        say: Callable[[str], None],
        saved: checkpoint_files.Checkpoint | None = None,
    ):
        """Collective. Raises: Refusal if the disk cannot hold one checkpoint, or some rank cannot write to it.

        facts: of the run, for the manifest, {"train_samples", "val_samples"}; saved: the checkpoint that the run
        goes on from.
        """
        self.cfg, self.world, self.facts, self.say = cfg, world, facts, say
        self.run = config.run_dir(cfg)
        self.group = ranks.host_group(ranks.SAVING)
        self.nonce = ranks.gather_objects(secrets.token_hex(4))[0]  # no two jobs write into one folder
        self.host: dict[str, Rows] = {}
        self.thread: threading.Thread | None = None
        self.step = saved.info["step"] if saved else None  # of the save begun last
        self.failure: str | None = None  # why the save begun last failed
        self._require_place()

    def _require_place(self) -> None:
        """Every rank writes where its files will go."""
        place = checkpoint_files.folder_of(self.run) / f".step_trial.{self.nonce}"
        need = BYTES_PER_PARAMETER * sum(prod(shape) for shape in parameter_table(self.cfg.model).values())

        def make() -> None:
            place.mkdir(parents=True)
            checkpoint_files.require_space(place.parent, need)

        try:
            ranks.together(lambda: self.world.rank or make())
            ranks.together(lambda: (place / str(self.world.rank)).touch())
        except Refusal as error:
            raise Refusal(
                f"no checkpoint can be saved: {error};"
                " set run.dir to another disk, which all nodes share, or checkpoint.save=false"
            ) from None
        finally:
            if self.world.rank == 0:
                shutil.rmtree(place, ignore_errors=True)

    def save(self, state: State, skipped: dict[int, str]) -> None:
        """Begin to save a state unless that is done; waits for the save before. Collective.

        skipped: the damaged samples that any rank has passed over, and why.
        """
        self.wait()
        if self.step == state.step and self.failure is None:
            return
        copied = self._stage(state)
        info = {
            "step": state.step,
            "samples": state.samples,
            "skipped": {str(sample): reason for sample, reason in skipped.items()},
            **self.facts,
            "name": self.cfg.name,
            "config": config.flat(self.cfg),
            "world_size": self.world.size,
            "torch": torch.__version__,
        }
        self.step = state.step
        self.thread = threading.Thread(target=self._write, args=(info, copied), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Until no save is under way."""
        if self.thread is not None:
            self.thread.join()

    def finish(self) -> None:
        """Wait for the last save. Raises: Fault, on every rank, if it failed."""
        self.wait()
        if self.failure is not None:
            raise Fault(f"checkpoint of step {self.step} is not saved: {self.failure}")

    def _stage(self, state: State) -> object:
        """Copy the state to buffers of the host that live as long as the run."""
        for key, rows in rows_of(state).items():
            if key not in self.host:
                buffer = torch.empty(rows.local.shape, dtype=rows.local.dtype, pin_memory=self.world.pin)
                self.host[key] = replace(rows, local=buffer)
            self.host[key].local.copy_(rows.local, non_blocking=True)
        return ranks.copied(self.world.device)

    def _write(self, info: dict, copied: object) -> None:
        name, begin = f"step_{info['step']:09d}", time.perf_counter()
        final = checkpoint_files.folder_of(self.run) / name
        writer = checkpoint_files.Writer(final.with_name(f".{name}.{self.nonce}"), final, info)
        try:
            if copied is not None:
                copied.synchronize()
            dcp.save({}, storage_writer=writer, planner=_RowsPlanner(self.host), process_group=self.group)
            self.failure = None
        except (Exception, dcp.CheckpointException) as error:  # on every rank: disks fill up
            self.failure = _reason(error)
        if self.world.rank > 0:
            return
        if self.failure is not None:
            shutil.rmtree(writer.partial, ignore_errors=True)
            self.say(f"checkpoint {final} NOT saved: {self.failure}; older ones are untouched, training goes on")
            return
        self.say(f"checkpoint {final} saved in {time.perf_counter() - begin:.1f} s")
        try:
            self._prune()
        except OSError as error:
            self.say(f"older checkpoints are not deleted: {error}; training goes on")

    def _prune(self) -> None:
        """Delete all but the last checkpoint.keep and every checkpoint.keep_every-th."""
        cfg = self.cfg
        interval = schedule.steps_for(cfg.checkpoint.every_samples, cfg.train.global_batch) * cfg.checkpoint.keep_every
        for path in checkpoint_files.found(self.run)[: -cfg.checkpoint.keep]:
            step = checkpoint_files.step_of(path)
            if not (interval and step and step % interval == 0):
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.deleted")))


def _reason(error: BaseException) -> str:
    """One line; torch.distributed.checkpoint wraps what each rank raised."""
    for rank, (cause, _) in sorted(getattr(error, "failures", {}).items()):
        return f"rank {rank}: {' '.join(str(cause).split())}"
    return " ".join(str(error).split())


def open_for(path: Path, state: State, facts: dict) -> checkpoint_files.Checkpoint:
    """A checkpoint from which a state can go on. facts: what `Saver` was given. Raises: Refusal."""
    saved = checkpoint_files.Checkpoint(path)
    has = {key: tuple(entry.shape) for key, entry in saved.tensors.items()}
    if not any(key.startswith("optimizer.") for key in has):
        raise Refusal(f"checkpoint {path} holds weights only; start a new run from it with --init.weights={path}")
    safetensors_io.require_fit(
        has, {key: tuple(rows.shape) for key, rows in rows_of(state).items()}, f"checkpoint {path}"
    )
    for key, value in facts.items():
        if saved.info[key] != value:
            raise Refusal(
                f"checkpoint {path} comes from a data set of {saved.info[key]} {key.replace('_', ' ')}, this one has"
                f" {value}: order and noise would change; give the data set of the run"
            )
    return saved


def load_weights(saved: checkpoint_files.Checkpoint, state: State) -> None:
    """Fill the weights. Raises: Refusal."""
    _load(saved, state, "model.")


def load_progress(saved: checkpoint_files.Checkpoint, state: State) -> None:
    """Fill AdamW's moments and FP8's history and set the clocks: what the warm-up would have lost. Raises: Refusal."""
    _load(saved, state, "optimizer.")
    _load(saved, state, "fp8.")
    state.net.fp8.rescale()
    state.step, state.samples = saved.info["step"], saved.info["samples"]
    state.opt.set_steps(state.step)


def _load(saved: checkpoint_files.Checkpoint, state: State, prefix: str) -> None:
    """Each rank reads its own rows only."""
    with torch.no_grad():
        for key, rows in rows_of(state).items():
            if key.startswith(prefix):
                rows.local.copy_(safetensors_io.finite(saved.read(key, rows.first, len(rows.local)), key, saved.folder))
