"""What a run writes into its folder and shows on the terminal while it trains. Only rank 0 writes."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from flux_ref import config, folder, graphs, loss_chart, ranks, schedule
from flux_ref.arithmetic import arithmetic_of
from flux_ref.attention import attention_kernel
from flux_ref.board import Board
from flux_ref.config import Config
from flux_ref.data import rank_slice
from flux_ref.environment import environment, peak_memory_gb
from flux_ref.errors import Fault, Refusal, printable
from flux_ref.evaluate import Validation
from flux_ref.files import append, is_number, records, write_records, write_whole
from flux_ref.folder import ENDED, REACHED
from flux_ref.forecast import forecast
from flux_ref.model import parameter_table
from flux_ref.optim import bytes_per_parameter
from flux_ref.progress import progress
from flux_ref.ranks import World
from flux_ref.step import NEVER, Health
from flux_ref.step_runner import State


@dataclass
class Mark:
    """When the newest record of metrics.jsonl was written, and what the next record is measured from."""

    time: float  # in s, of a monotonic clock
    samples: int
    wait_s: float  # of waiting for data, since training began


class Reporter:
    """Terminal, metrics.jsonl, eval.jsonl, loss.png and outcome.json of one run."""

    def __init__(self, cfg: Config, world: World, write: Callable[[str], None]):
        self.cfg = cfg
        self.world = world
        self.write = write  # a line into the result file
        self.folder = config.run_dir(cfg)
        self.speaks = world.rank == 0
        self.train_curve: list[tuple[int, float]] = []
        self.val_curve: list[tuple[int, float]] = []
        self.bar: tqdm | None = None
        self.board: Board | None = None
        self.pending: Callable[[], None] | None = None  # writes the record of a step whose values are on their way

    def say(self, line: str) -> None:
        """One line on the terminal and in the result file."""
        if self.speaks:
            line = "\n".join(map(printable, line.split("\n")))
            (tqdm.write if sys.stderr.isatty() else print)(line, file=sys.stdout)
            sys.stdout.flush()
            self.write(line)

    @contextmanager
    def spare(self, what: str) -> Iterator[None]:
        """The run goes on if this block cannot write its file, a picture. A line says so."""
        try:
            yield
        except (OSError, Refusal) as error:
            self.say(f"{what} NOT drawn: {error}; the run goes on without")

    @ranks.agreed()
    def introduce(self, train_count: int, val_count: int, unlocked: str) -> None:
        """Print what runs. train_count, val_count: samples. unlocked: why the folder has no lock. Collective.

        Raises: Refusal.
        """
        self.val_count = val_count
        if not self.speaks:
            return
        cfg = self.cfg
        world = self.world
        self.facts = environment(world)
        parameters = sum(prod(shape) for shape in parameter_table(cfg.model).values())
        shards = world.size // world.replicas
        micro = config.micro_batch(cfg, world.size)
        parts = cfg.train.global_batch // (world.size * micro)
        compute, *sides = arithmetic_of(cfg).describe(micro, world.device)
        weights = f"init.weights={cfg.init.weights}" if cfg.init.weights else f"drawn from train.seed={cfg.train.seed}"
        validation = f"validation {val_count:,} in {cfg.data.val}" if cfg.data.val else "no validation"
        megabytes = bytes_per_parameter(cfg.optim) * 1e-6 * parameters
        size = f" (a checkpoint: {megabytes:,.0f} MB)" if cfg.checkpoint.save else ""
        blocks = f"{cfg.model.double_blocks} + {cfg.model.single_blocks} blocks"
        lines = (
            f"flux_ref {cfg.name}: FLUX.1 with {blocks}, {parameters:,} parameters",
            f"  ranks   {world.size} x {self.facts['device']} (replicas x shards: {world.replicas} x {shards}),"
            f" torch {torch.__version__}",
            f"  compute {compute}; attention kernel: {attention_kernel(cfg, world.device)}",
            f"  steps   {graphs.mode(cfg, world.device)}",
            f"  batch   {cfg.train.global_batch}: ranks x samples x micro-batches: {world.size} x {micro} x {parts}",
            f"  weights {weights}",
            f"  data    {train_count:,} samples in {cfg.data.train}, {validation}",
            f"  run     {self.folder}{size}",
        )
        self.say("\n".join(lines))
        for line in (*sides, *filter(None, [unlocked])):
            self.say(line)

    def settle_in(self, told: str) -> None:
        """Write environment.json into the folder, which is there now. told: what became of an older run."""
        if self.speaks:
            if told:
                self.say(f"  {told}")
            write_whole(self.folder / folder.ENVIRONMENT, json.dumps(self.facts, indent=2) + "\n")

    def resume(self, step: int, samples: int) -> None:
        """Read the records of the run up to its checkpoint, and cut off later ones. Collective. Raises: Refusal.

        The run repeats what came after the checkpoint, with the same results.
        """
        with ranks.agreed():
            if self.speaks:
                trained = records(self.folder / "metrics.jsonl", samples, ("loss",))
                evaluated = records(self.folder / "eval.jsonl", samples, ("val_loss",))
                write_records(self.folder / "metrics.jsonl", trained)
                write_records(self.folder / "eval.jsonl", evaluated)
                self.train_curve = [(record["samples"], record["loss"]) for record in trained]
                self.val_curve = [(record["samples"], record["val_loss"]) for record in evaluated]
        self.val_curve = ranks.gather_objects(self.val_curve)[0]
        self.say(f"  resume  the run in this folder, from step {step:,} ({samples:,} samples); not a timed result")

    def begin(self, samples: int, warm_s: float) -> None:
        """Tell how long the rest takes, show the bar, start the clock. warm_s: of the StepRunner. Raises: Refusal."""
        batch = self.cfg.train.global_batch
        total = schedule.steps_for(self.cfg.train.max_samples, batch) * batch
        if self.speaks:
            self.board = Board(self.folder, samples)
        if warm_s and self.speaks:
            words = forecast(
                self.cfg,
                ranks=self.world.size,
                samples=samples,
                is_evaluated=self.val_loss_at(samples) is not None,
                val_count=self.val_count,
                warm_s=warm_s,
                is_captured=graphs.mode(self.cfg, self.world.device) == graphs.CAPTURED,
            )
            self.say(f"  time    {words}")
        self.bar = progress(total=total, initial=samples, unit=" samples", unit_scale=True, disable=not self.speaks)
        self.since = Mark(time.perf_counter(), samples, wait_s=0.0)

    def tick(self) -> None:
        """A step is launched: settle the report of the step before it, and move the bar."""
        self.settle()
        self.bar.update(self.cfg.train.global_batch)

    def step(self, state: State, loss: Tensor, grad_norm: Tensor, health: Health, wait_s: float) -> None:
        """Report one training step. Collective. `settle` reads its values after the next launch, so the device goes on.

        Before an evaluation, and on the CPU, `settle` reads them at once. wait_s: seconds that the device has waited
        for data since training began. Raises: Fault, as `settle` does.
        """
        values = torch.cat((health.first_bad, torch.stack((loss, grad_norm, state.opt.lr)).double()))
        read = ranks.gather_later(values)
        self.pending = partial(self._record, read, state.step, state.samples, wait_s)
        if self.world.device.type == "cpu" or schedule.evaluates(state.samples, self.cfg):
            self.settle()

    def settle(self) -> None:
        """Write the record of the last logged step, unless it is written. Not collective.

        sync: the training loop reads the device here, for evaluations and for checkpoints, not in the steps between.

        Raises: Fault, on every rank, if training is not healthy.
        """
        if write := self.pending:
            self.pending = None
            write()

    def _record(self, read: Callable[[], list], step: int, samples: int, wait_s: float) -> None:
        """Write the record of a logged step. read: waits for its values, those of `step` of every rank."""
        bad_losses, bad_norms, losses, grad_norms, rates = zip(*read())
        self._require_finite(list(zip(bad_losses, bad_norms)))
        elapsed = time.perf_counter() - self.since.time
        record = {
            "step": step,
            "samples": samples,
            "loss": sum(losses) / len(losses),
            "grad_norm": grad_norms[0],
            "lr": rates[0],
            "samples_per_s": (samples - self.since.samples) / elapsed,
            "data_wait": (wait_s - self.since.wait_s) / elapsed,  # share of the time
            "peak_memory_gb": peak_memory_gb(self.world.device),
        }
        self._append("metrics.jsonl", record)
        if self.board:
            with self.spare("TensorBoard's curves"):
                self.board.step(record)
        self.train_curve.append((samples, record["loss"]))
        self.bar.set_postfix_str(f"loss {record['loss']:.4f}", refresh=False)
        self.since = Mark(time.perf_counter(), samples, wait_s)

    def require_healthy(self, health: Health) -> None:
        """Raises: Fault, on every rank, if a loss or a norm since the run began was not finite. Collective.

        sync: the host waits for the device.
        """
        self.settle()
        self._require_finite(ranks.gather(health.first_bad))

    def _require_finite(self, first_bad: list[list[float]]) -> None:
        if complaint := blame(first_bad, self.cfg):
            raise Fault(complaint)

    def val_loss_at(self, samples: int) -> float | None:
        """The validation loss that a resumed run has recorded at this point already; the same on every rank."""
        return self.val_curve[-1][1] if self.val_curve and self.val_curve[-1][0] == samples else None

    def evaluation(self, samples: int, result: Validation, seconds: float) -> None:
        """Record and print the result of an evaluation that took so many seconds."""
        begin = time.perf_counter()
        record = {"samples": samples} | validation_record(result) | {"seconds": seconds}
        self._append("eval.jsonl", record)
        if self.board:
            with self.spare("TensorBoard's curves"):
                self.board.evaluation(record)
        self.val_curve.append((samples, result.loss))
        target = f", target {self.cfg.eval.target:g}" if self.cfg.eval.target else ""
        error = f" +- {result.stderr:.4f}" if is_number(result.stderr) else ""  # NaN: one sample of a timestep
        loss = f"validation loss {result.loss:.4f}{error} over {result.count:,} samples"
        self.say(f"samples {samples:>10,}  {loss} in {seconds:.1f} s{target}")
        self._chart()
        self.pause(seconds + time.perf_counter() - begin)

    def picture(self, path: Path, samples: int) -> None:
        """A sheet of pictures was drawn."""
        if self.board:
            self.board.picture(path, samples)

    def _chart(self) -> None:
        with self.spare("loss.png"):
            if self.speaks:
                loss_chart.chart(self.train_curve, self.val_curve, self.cfg.eval.target, self.folder / "loss.png")

    def pause(self, seconds: float) -> None:
        """Leave the seconds of an evaluation or of pictures out of the rate of training."""
        self.since.time += seconds

    def conclude(self, state: State, reached: bool, flaw: str) -> None:
        """Print how the run ended and where its files are. outcome.json marks the run as finished.

        flaw: why it is no benchmark result, in words; empty if it is one.
        """
        outcome = REACHED if reached else ENDED
        val_loss = self.val_curve[-1][1] if self.val_curve else None
        if val_loss is None:  # no evaluation has drawn it
            self._chart()
        lines = [outcome, f"  losses    {self.folder}/loss.png"]
        if self.cfg.sample.count:
            lines.append(f"  pictures  {self.folder}/samples")
        if self.cfg.checkpoint.save:
            options = "" if self.cfg.data.val else " --draw-only --prompt TEXT"
            lines.append(f"  weights   {shlex.join(('python', 'eval.py', str(self.folder)))}{options}")
        self.say("\n".join(lines))
        if self.speaks:
            record = {"outcome": outcome, "step": state.step, "samples": state.samples}
            record |= {"val_loss": val_loss, "not_a_timed_result": flaw}
            write_whole(self.folder / folder.OUTCOME, json.dumps(record) + "\n")

    def _append(self, name: str, record: dict) -> None:
        if self.speaks:
            append(self.folder / name, json.dumps(record) + "\n", on_disk=True)  # before any later checkpoint

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.board:
            with suppress(OSError):
                self.board.close()


def blame(first_bad: list[list[float]], cfg: Config) -> str | None:
    """The complaint about the (first bad loss, first bad norm) of each rank. None if all values were finite."""
    bad = [(int(step), rank) for rank, (step, _) in enumerate(first_bad) if step != NEVER]
    norm_step = first_bad[0][1]
    if bad and (norm_step == NEVER or min(bad)[0] <= norm_step):
        step, rank = min(bad)
        where = rank_slice(cfg, step, rank, len(first_bad))
        return (
            f"loss is not finite in step {step + 1} on rank {rank}'s data"
            f" (positions {where.start} to {where.stop - 1} of the run); lower optim.lr or inspect the data"
        )
    if norm_step != NEVER:
        return f"gradient norm is not finite in step {norm_step + 1:.0f} though every rank's loss was; lower optim.lr"
    return None


def validation_record(result: Validation) -> dict[str, object]:
    """An evaluation as a record of eval.jsonl."""
    return {
        "val_loss": result.loss,
        "val_loss_per_timestep": result.losses,
        "count": result.count,
        "stderr": result.stderr if is_number(result.stderr) else None,  # JSON has no NaN
        "stderr_per_timestep": [error if is_number(error) else None for error in result.stderrs],
    }
