"""Saving a run and continuing it: what a checkpoint holds, who writes which rows, and which checkpoints stay.

A checkpoint holds fp32 weights, the optimizer's moments, the history of delayed FP8 scales, the counters and the
config. Nothing in it belongs to a rank, so any number of ranks can continue from it. With NAME as Black Forest Labs'
name of a parameter, its keys are model.NAME, optimizer.state.NAME.{exp_avg,exp_avg_sq} and fp8.history.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flux_ref import config, ranks, schedule, sharding
from flux_ref.config import Config
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import checkpoint_files, safetensors_io
from flux_ref.formats.checkpoint_files import HEAD_BYTES, Rows
from flux_ref.model import parameter_table
from flux_ref.optim import BYTES_PER_PARAMETER
from flux_ref.ranks import World
from flux_ref.step import State

if TYPE_CHECKING:
    from flux_ref.formats.checkpoint_reader import Checkpoint


def rows_of(state: State) -> dict[str, Rows]:
    """All tensors of a state by checkpoint key, as the rows that this rank holds. They share memory with the state."""
    rows = {}
    for name, parameter in sharding.named_parameters(state.net).items():
        first, local = sharding.local_rows(parameter)
        rows[f"model.{name}"] = Rows(local.detach(), first, parameter.shape)
    for moment, tensors in state.opt.moments().items():
        for name, tensor in zip(state.opt.names, tensors):
            rows[f"optimizer.state.{name}.{moment}"] = replace(rows[f"model.{name}"], local=tensor)
    history = state.fp8.history
    if history.numel():  # every rank has all rows
        rows["fp8.history"] = Rows(history, 0, history.shape)
    return rows


def rows_to_write(rows: dict[str, Rows], world: World) -> dict[str, Rows]:
    """The rows that this rank writes. Replicas hold equal rows; each tensor is written by one replica.

    The next tensor goes to the replica with the fewest elements so far, so all nodes write about equally much.
    """
    replica = world.mesh.get_local_rank(0) if world.mesh.ndim == 2 else 0
    shard = world.mesh.get_local_rank(world.mesh.ndim - 1)
    written, own = [0] * world.replicas, {}
    for key, part in rows.items():
        writer = written.index(min(written))
        written[writer] += part.shape.numel()
        is_whole = key == "fp8.history"
        if writer == replica and part.local.numel() and (shard == 0 or not is_whole):
            own[key] = part
    return own


class Saver:
    """Writes checkpoints behind the training, one at a time.

    Training waits only for the copy to host memory. The copy takes as much memory as this rank's shards and moments.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        data_sizes: dict[str, int],
        say: Callable[[str], None],
        resumed: "Checkpoint | None" = None,
    ):
        """Collective. Raises: Refusal if the disk cannot hold one checkpoint, or if a rank cannot write to it.

        data_sizes: {"train_samples", "val_samples"}, for the manifest. resumed: the checkpoint that the run started
        from, which is not saved again.
        """
        self.cfg, self.world, self.data_sizes, self.say = cfg, world, data_sizes, say
        self.run = config.run_dir(cfg)
        self.group = ranks.host_group(ranks.SAVING)
        self.nonce = ranks.gather_objects(secrets.token_hex(4))[0]  # two jobs never write into one folder
        self.host: dict[str, Rows] = {}
        self.thread: threading.Thread | None = None
        self.step = resumed.info["step"] if resumed else None  # step of the newest save
        self.failure: str | None = None  # why the newest save failed
        self._require_place()

    def _require_place(self) -> None:
        """Try the disk: every rank writes a file to the place of its later files."""
        size = BYTES_PER_PARAMETER * sum(prod(shape) for shape in parameter_table(self.cfg.model).values())
        trial = checkpoint_files.folder_of(self.run) / f".step_trial.{self.nonce}"
        try:
            with ranks.agreed():
                if self.world.rank == 0:
                    trial.mkdir(parents=True)
                    checkpoint_files.require_space(trial.parent, size)
            with ranks.agreed():
                (trial / str(self.world.rank)).touch()
        except Refusal as error:
            raise Refusal(
                f"no checkpoint can be saved: {error};"
                " set run.dir to another disk, which all nodes share, or checkpoint.save=false"
            ) from None
        finally:
            if self.world.rank == 0:
                shutil.rmtree(trial, ignore_errors=True)

    def save(self, state: State, skipped: dict[int, str]) -> None:
        """Begin to save a state, unless this step is saved already. Waits for the save before. Collective.

        skipped: the damaged samples that any rank has left out, with the reasons.
        """
        self.wait()
        if self.step == state.step and self.failure is None:
            return
        copied = self._copy(state)
        info = {
            "step": state.step,
            "samples": state.samples,
            "skipped": {str(sample): reason for sample, reason in skipped.items()},
            **self.data_sizes,
            "name": self.cfg.name,
            "config": config.flat(self.cfg),
            "world_size": self.world.size,
            "torch": torch.__version__,
        }
        self.step = state.step
        self.thread = threading.Thread(target=self._save, args=(info, copied), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Until no save is under way."""
        if self.thread is not None:
            self.thread.join()

    def finish(self) -> None:
        """Wait for the newest save. Raises: Fault, on every rank, if it failed."""
        self.wait()
        if self.failure is not None:
            raise Fault(f"checkpoint of step {self.step} is not saved: {self.failure}")

    def _copy(self, state: State) -> object:
        """Copy the state to host buffers that live as long as the run. Returns the mark of the copy's end."""
        for key, rows in rows_of(state).items():
            if key not in self.host:
                buffer = torch.empty(rows.local.shape, dtype=rows.local.dtype, pin_memory=self.world.pin)
                self.host[key] = replace(rows, local=buffer)
            self.host[key].local.copy_(rows.local, non_blocking=True)
        return ranks.copied(self.world.device)

    def _save(self, info: dict, copied: object) -> None:
        """In a thread of its own, on every rank."""
        name, begin = f"step_{info['step']:09d}", time.perf_counter()
        final = checkpoint_files.folder_of(self.run) / name
        partial = final.with_name(f".{name}.{self.nonce}")
        try:
            if copied is not None:
                copied.synchronize()
            self._write(partial, final, info)
            self.failure = None
        except Exception as error:  # on every rank: disks fill up
            self.failure = " ".join(str(error).split())
        if self.world.rank > 0:
            return
        if self.failure is not None:
            shutil.rmtree(partial, ignore_errors=True)
            self.say(f"checkpoint {final} NOT saved: {self.failure}; older ones are untouched, training goes on")
            return
        self.say(f"checkpoint {final} saved in {time.perf_counter() - begin:.1f} s")
        try:
            self._prune()
        except OSError as error:
            self.say(f"older checkpoints are not deleted: {error}; training goes on")

    def _write(self, partial: Path, final: Path, info: dict) -> None:
        """Write all files, then make the folder visible under its name. Raises on all ranks if one rank fails."""
        with ranks.agreed(self.group):
            if self.world.rank == 0:
                size = sum(rows.shape.numel() * rows.local.itemsize for rows in self.host.values())
                checkpoint_files.require_space(partial.parent, size + HEAD_BYTES * len(self.host) * self.world.size)
                partial.mkdir(parents=True)
        with ranks.agreed(self.group):
            part = checkpoint_files.write_rank(partial, self.world.rank, rows_to_write(self.host, self.world))
        parts = ranks.gather_objects(part, self.group)
        with ranks.agreed(self.group):
            if self.world.rank == 0:
                checkpoint_files.publish(partial, final, checkpoint_files.manifest(info, parts))

    def _prune(self) -> None:
        """Delete all checkpoints but the last checkpoint.keep and every checkpoint.keep_every-th."""
        cfg = self.cfg
        interval = schedule.steps_for(cfg.checkpoint.every_samples, cfg.train.global_batch) * cfg.checkpoint.keep_every
        for path in checkpoint_files.found(self.run)[: -cfg.checkpoint.keep]:
            step = checkpoint_files.step_of(path)
            if not (interval and step and step % interval == 0):
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.deleted")))


def resume(path: Path, state: State, data_sizes: dict[str, int]) -> "Checkpoint":
    """Fill the weights from a checkpoint of the same run. Collective. Raises: Refusal.

    `load_progress` fills the rest after the warm-up, which clears moments and FP8 history.
    """
    with ranks.agreed():
        saved = open_for(path, state, data_sizes)
        _load(saved, state, "model.")
    return saved


def open_for(path: Path, state: State, data_sizes: dict[str, int]) -> "Checkpoint":
    """A checkpoint from which a state can go on. data_sizes: as for `Saver`. Raises: Refusal."""
    from flux_ref.formats.checkpoint_reader import Checkpoint  # most runs go on from no checkpoint

    saved = Checkpoint(path)
    shapes = {key: tuple(entry.shape) for key, entry in saved.tensors.items()}
    if not any(key.startswith("optimizer.") for key in shapes):
        raise Refusal(f"checkpoint {path} holds weights only; start a new run from it with --init.weights={path}")
    wanted = {key: tuple(rows.shape) for key, rows in rows_of(state).items()}
    safetensors_io.require_fit(shapes, wanted, f"checkpoint {path}")
    for key, value in data_sizes.items():
        if saved.info[key] != value:
            raise Refusal(
                f"checkpoint {path} comes from a data set of {saved.info[key]} {key.replace('_', ' ')}, this one has"
                f" {value}: order and noise would change; give the data set of the run"
            )
    return saved


def load_progress(saved: "Checkpoint", state: State) -> None:
    """Fill the moments and the FP8 history, and set the counters. Collective. Raises: Refusal."""
    with ranks.agreed():
        _load(saved, state, "optimizer.")
        _load(saved, state, "fp8.")
    state.fp8.set_scales()
    state.step, state.samples = saved.info["step"], saved.info["samples"]
    state.opt.set_steps(state.step)


def _load(saved: "Checkpoint", state: State, prefix: str) -> None:
    """Each rank reads only its own rows."""
    with torch.no_grad():
        for key, rows in rows_of(state).items():
            if key.startswith(prefix):
                values = saved.read(key, rows.first, len(rows.local))
                rows.local.copy_(safetensors_io.finite(values, key, saved.folder))
