"""What a run writes into its folder and shows on the terminal while it trains. Only rank 0 writes."""

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flux_ref import config, graphs, loss_chart, ranks, run_folder, schedule
from flux_ref.cli import Fault, Say, one_line, printable, progress
from flux_ref.config import Config, Values
from flux_ref.evaluate import Validation
from flux_ref.files import append, records, write_whole
from flux_ref.loss_chart import Curve
from flux_ref.model import parameter_table
from flux_ref.precision.recipe import PrecisionRecipe
from flux_ref.ranks import World, device_name, peak_memory_gb
from flux_ref.sharding import attention_kernel
from flux_ref.trainer import NEVER, Health, Trainer, TrainState

FIGURES = {"metrics.jsonl": "loss", "eval.jsonl": "val_loss"}  # that each record must have
BAR = "{l_bar}{bar}| {n:,}/{total:,} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"  # digits as in messages


class Reporter:
    """Terminal, loss.png, outcome.json, TensorBoard's curves and the .jsonl files of one run."""

    def __init__(self, cfg: Config, world: World, write: Say):
        """write: adds a line to the result file."""
        self.cfg = cfg
        self.world = world
        self.write = write
        self.folder = config.run_dir(cfg)
        self.speaks = world.rank == 0
        self.train_curve: Curve = []
        self.val_curve: Curve = []
        self.bar = tqdm(disable=True)  # until training begins
        self.board: Any = None  # torch's SummaryWriter, where the package tensorboard is installed

    def say(self, line: str) -> None:
        """One line on the terminal and in the result file."""
        if self.speaks:
            line = "\n".join(map(printable, line.split("\n")))
            with suppress(OSError):  # standard output may be a file on a full disk
                tqdm.write(line)
            self.write(line)

    @contextmanager
    def spare(self, what: str) -> Iterator[None]:
        """The run goes on if this block, which shows something, has an error. A line says so."""
        try:
            yield
        except Exception as error:
            self.say(f"{what} NOT drawn: {one_line(error, 300)}; the run goes on without")

    def introduce(self, sizes: Values) -> None:
        """Print what runs. sizes: {"train_samples", "val_samples"} of the data."""
        cfg = self.cfg
        world = self.world
        parameters = sum(prod(shape) for shape in parameter_table(cfg.model).values())
        micro = config.micro_batch(cfg, world.size)
        compute, *sides = PrecisionRecipe(cfg).describe(micro, world.device)
        weights = cfg.init.weights or f"drawn from train.seed={cfg.train.seed}"
        lines = (
            f"flux_ref {cfg.name}: FLUX.1 of {parameters:,} parameters",
            f"  ranks   {world.size} x {device_name(world.device)} (replicas x shards: {world.replicas} x"
            f" {world.mesh.size(-1)}), torch {torch.__version__}",
            f"  compute {compute}; attention kernel: {attention_kernel(cfg, world.device)}",
            f"  steps   {graphs.mode(cfg, world.device)}",
            f"  batch   {cfg.train.global_batch} in micro-batches of {micro} per rank",
            f"  weights {weights}",
            f"  data    {cfg.data.train} ({sizes['train_samples']:,} samples); validation:"
            f" {cfg.data.val or 'none'} ({sizes['val_samples']:,})",
            f"  run     {self.folder}",
            *sides,
        )
        self.say("\n".join(lines))

    def write_environment(self, graph_bytes: int) -> None:
        """Write environment.json into the folder, which is there now. graph_bytes: as a Trainer has it."""
        if self.speaks:
            record = {
                "ranks": self.world.size,
                "replicas": self.world.replicas,
                "device": device_name(self.world.device),
                "torch": torch.__version__,
                "commit": commit(),
                "graph_bytes": graph_bytes,
            }
            write_whole(self.folder / "environment.json", json.dumps(record, indent=2) + "\n")
        if graph_bytes:
            self.say(f"  graphs  take {graph_bytes / 1e9:.2f} GB outside torch's allocator")

    def resume(self, info: dict) -> None:
        """Read the records of the run up to its checkpoint, and cut off later ones. Collective. Raises: Refusal.

        The run repeats what came after the checkpoint was saved, with the same results. info: of the checkpoint.
        """
        samples = info["samples"]
        with ranks.agreed():
            if self.speaks:
                # An evaluation at the checkpoint is repeated.
                most = {"metrics.jsonl": samples, "eval.jsonl": samples - schedule.evaluates(samples, self.cfg)}
                # All are read first: a damaged record is refused before a file changes.
                kept = {name: records(self.folder / name, figure) for name, figure in FIGURES.items()}
                for name, found in kept.items():
                    found[:] = [record for record in found if record["samples"] <= most[name]]
                    write_whole(self.folder / name, "".join(json.dumps(record) + "\n" for record in found))
                self.train_curve = [(record["samples"], record["loss"]) for record in kept["metrics.jsonl"]]
                self.val_curve = [(record["samples"], record["val_loss"]) for record in kept["eval.jsonl"]]
        self.say(
            f"  resume  the run in this folder, from step {info['step']:,} ({samples:,} samples); not a timed result"
        )

    def begin(self, samples: int) -> None:
        """Show the bar, which tells how long the rest takes, and start the clock."""
        batch = self.cfg.train.global_batch
        total = schedule.steps_for(self.cfg.train.max_samples, batch) * batch
        if self.speaks and find_spec("tensorboard"):
            with self.spare("TensorBoard's curves"):  # its import fails where protobuf is of another age
                from torch.utils.tensorboard import SummaryWriter

                # What an interrupted run has written after `samples` is left out.
                self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=samples + 1, flush_secs=10)
        self.bar = progress(total=total, initial=samples, unit=" samples", bar_format=BAR, disable=not self.speaks)
        # What the next record is measured from: time of a monotonic clock, samples, seconds of waiting for data
        self.since_s = time.perf_counter()
        self.since_samples = samples
        self.since_wait_s = 0.0

    def step(self, runner: Trainer) -> None:
        """Record the step that was just trained. Collective.

        sync: the host waits for the device, and so the device for the next launch: at logged steps only.
        Raises: Fault, as `require_healthy` does.
        """
        self.require_healthy(runner.health)
        losses = ranks.gather_objects(runner.health.loss.tolist())
        state = runner.state
        now_s = time.perf_counter()
        seconds = now_s - self.since_s
        figures = {
            "loss": sum(losses) / len(losses),
            "grad_norm": runner.health.grad_norm.item(),
            "lr": state.opt.lr.item(),
            "samples_per_s": (state.samples - self.since_samples) / seconds,
            "data_wait": (runner.data_wait_s - self.since_wait_s) / seconds,  # share of the time
            "peak_memory_gb": peak_memory_gb(self.world.device),
        }
        shown = {f"train/{name}": value for name, value in figures.items()}
        self._record("metrics.jsonl", {"step": state.step, "samples": state.samples} | figures, shown)
        self.train_curve.append((state.samples, figures["loss"]))
        self.bar.set_postfix_str(f"loss {figures['loss']:.4f}", refresh=False)
        self.since_s = now_s
        self.since_samples = state.samples
        self.since_wait_s = runner.data_wait_s

    def require_healthy(self, health: Health) -> None:
        """Raises: Fault, on every rank, if a loss or a norm since the run began was not finite. Collective.

        sync: the host waits for the device.
        """
        require_finite(ranks.gather_objects(health.first_bad.tolist()))

    def evaluation(self, samples: int, result: Validation, seconds: float) -> None:
        """Record and print the result of an evaluation that took so many seconds."""
        shown = {f"validation by t/t={k}_8": loss for k, loss in enumerate(result.val_loss_per_timestep)}
        shown["validation/loss"] = result.val_loss
        self._record("eval.jsonl", {"samples": samples} | vars(result) | {"seconds": seconds}, shown)
        self.val_curve.append((samples, result.val_loss))
        self.say(
            f"samples {samples:>10,}  validation loss {result.val_loss:.4f} over {result.count:,} samples"
            f" in {seconds:.1f} s"
        )
        self._chart()
        self.since_s = time.perf_counter()  # the step before an evaluation is always logged

    def _record(self, name: str, record: dict, shown: dict[str, float]) -> None:
        """Append a record to a file, and show figures in TensorBoard. Raises: OSError, which ends the run."""
        if self.speaks:
            append(self.folder / name, json.dumps(record) + "\n", on_disk=True)
        samples = record["samples"]
        self._show(lambda board: [board.add_scalar(name, value, samples) for name, value in shown.items()])

    def _show(self, what: Callable[[Any], object]) -> None:
        """Write something to TensorBoard's files. The first error ends them."""
        board, self.board = self.board, None
        if board:
            with self.spare("TensorBoard's curves"):
                what(board)
                self.board = board

    def _chart(self) -> None:
        with self.spare("loss.png"):
            if self.speaks:
                loss_chart.chart(self.train_curve, self.val_curve, self.cfg.eval.target, self.folder / "loss.png")

    def conclude(self, state: TrainState, outcome: str, flaw: str) -> None:
        """Print how the run ended and where its files are. outcome.json marks the run as finished.

        outcome: run_folder.REACHED or ENDED. flaw: why it is no benchmark result, in words; empty if it is one.
        """
        self._chart()
        self.say(f"{outcome}; losses and pictures lie in {self.folder}")
        if self.cfg.checkpoint.save:
            options = "" if self.cfg.data.val else " --draw-only --prompt TEXT"
            self.say(f"  next    python eval.py {shlex.quote(str(self.folder))}{options}")
        if self.speaks:
            record = {"outcome": outcome, "step": state.step, "samples": state.samples}
            record |= {"val_loss": self.val_curve[-1][1] if self.val_curve else None, "not_a_timed_result": flaw}
            write_whole(self.folder / run_folder.OUTCOME, json.dumps(record) + "\n")

    def close(self) -> None:
        self.bar.close()
        self._show(lambda board: board.close())


def require_finite(first_bad: list[tuple[float, float]]) -> None:
    """Raises: Fault that says what went first.

    first_bad: of each rank, the values of Health.first_bad.
    """
    found = [
        (step, kind, rank) for rank, steps in enumerate(first_bad) for kind, step in enumerate(steps) if step != NEVER
    ]
    if found:
        step, kind, rank = min(found)  # in one step, the loss of one rank spoils the norm of all
        what = ("loss", "gradient norm")[kind]
        raise Fault(
            f"{what} is not finite in step {step + 1:.0f}, first on rank {rank}; lower optim.lr or inspect its data"
        )


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of the code in a folder, "+" with changes that are not in it; "" outside a repository.

    Nothing is written: `git describe --dirty` would lock and rewrite the index.
    """
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    try:
        told = subprocess.run([*git, "status", "--porcelain=v2", "--branch", "-uno"], capture_output=True).stdout
    except OSError:  # there is no git
        return ""
    head = re.search(rb"^# branch.oid (\w{12})", told)
    is_changed = re.search(rb"^[^#]", told, re.MULTILINE)
    return head[1].decode() + ("+" if is_changed else "") if head else ""
