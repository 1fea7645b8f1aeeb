"""What a run writes into its folder and shows on the terminal while it runs. Rank 0 speaks."""

import json
import os
import sys
import time
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from tqdm import tqdm

from flux_ref import config, ranks, schedule, steps
from flux_ref.benchmark import alarms, convergence
from flux_ref.benchmark.convergence import Band
from flux_ref.benchmark.mllog import BenchmarkLog
from flux_ref.config import Config
from flux_ref.data import Feed, TrainSet, rank_slice
from flux_ref.errors import Fault
from flux_ref.evaluate import Validation
from flux_ref.formats.files import write_whole
from flux_ref.formats.jsonl import ENDED, REACHED, records, rewrite
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.run import loss_chart
from flux_ref.run.environment import environment
from flux_ref.run.progress import progress
from flux_ref.speed import fp8
from flux_ref.speed.attention import attention_kernel
from flux_ref.step import NEVER, Health, State


class Reporter:
    """Terminal, metrics.jsonl, eval.jsonl and loss.png of one run; on ranks above 0 it only computes."""

    def __init__(self, cfg: Config, world: World, band: Band | None):
        """band: what validation losses are held against."""
        self.cfg, self.world, self.band, self.folder = cfg, world, band, config.run_dir(cfg)
        self.speaks = world.rank == 0
        self.log = BenchmarkLog(self.folder / "result_0.txt" if self.speaks else None)
        self.train_curve: list[tuple[int, float]] = []
        self.val_curve: list[tuple[int, float]] = []
        self.recent: list[dict] = []  # the last logged steps
        self.is_slow = False
        self.bar: tqdm | None = None
        self._mark(0, 0.0)

    def say(self, line: str) -> None:
        """One line on the terminal and in the result file."""
        if self.speaks:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
            self.log.text(line)

    def introduce(self, train_count: int, val_count: int) -> None:
        """Say what is about to run."""
        cfg, world = self.cfg, self.world
        parameters = sum(prod(shape) for shape in parameter_table(cfg.model).values())
        micro = config.micro_batch(cfg, world.size)
        mesh = ranks.describe_mesh(world.replicas, world.nodes)
        found = environment(world)
        self.say(
            f"flux_ref {cfg.name}: FLUX.1 with {cfg.model.double_blocks} + {cfg.model.single_blocks} blocks,"
            f" {parameters:,} parameters\n"
            f"  ranks   {world.size} x {found['device']} ({mesh}), torch {torch.__version__}\n"
            f"  compute {fp8.describe(cfg)}; attention: {attention_kernel(cfg, world.device)}\n"
            f"  steps   {steps.manner(cfg, world.device)}\n"
            f"  batch   {cfg.train.global_batch} = {world.size} ranks x {micro} samples"
            f" x {cfg.train.global_batch // (world.size * micro)} micro-batches\n"
            f"  data    {train_count:,} samples in {cfg.data.train}, validation {val_count:,} in {cfg.data.val}\n"
            f"  run     {self.folder}"
        )
        for complaint in convergence.unlike_reference(cfg):
            self.say(f"warning: {complaint}")
        if self.speaks:
            write_whole(self.folder / "environment.json", json.dumps(found, indent=2) + "\n")

    def resume(self, step: int, samples: int) -> None:
        """Take up the records of the run so far, up to the checkpoint it goes on from. Collective. Raises: Refusal.

        What came after the checkpoint is cut off: it will come again, the same.
        """
        figures = {"metrics.jsonl": ("loss",), "eval.jsonl": ("val_loss",)} if self.speaks else {}
        kept = ranks.together(lambda: [records(self.folder / name, samples, own) for name, own in figures.items()])
        ranks.together(lambda: [rewrite(self.folder / name, own) for name, own in zip(figures, kept)])
        trained, evaluated = kept or ([], [])
        self.train_curve = [(record["samples"], record["loss"]) for record in trained]
        self.val_curve = ranks.gather_objects([(record["samples"], record["val_loss"]) for record in evaluated])[0]
        self.log.disqualify("resumed_from_step", step, "resumed")
        self.say(f"  resume  the run in this folder, from step {step:,} ({samples:,} samples); not a timed result")

    def begin(self, samples: int, evaluates: bool) -> None:
        """Show the progress bar and start counting time. evaluates: whether an evaluation comes before any step."""
        total = (
            schedule.steps_for(self.cfg.train.max_samples, self.cfg.train.global_batch) * self.cfg.train.global_batch
        )
        self.bar = progress(
            total=total,
            initial=samples,
            unit=" samples",
            unit_scale=True,
            disable=not self.speaks,
        )
        self._mark(samples, 0.0)
        if not evaluates:
            self.log.block_start(samples)

    def tick(self) -> None:
        """One step is under way."""
        self.bar.update(self.cfg.train.global_batch)

    def _mark(self, samples: int, wait_s: float) -> None:
        self.since = (time.perf_counter(), samples, wait_s)

    def step(self, state: State, loss: Tensor, grad_norm: Tensor, health: Health, feed: Feed, data: TrainSet) -> None:
        """Report one training step. Collective.

        sync: the training loop reads the device here and for evaluations only, not in the steps between.

        Raises: Fault, on every rank, if training is not healthy or too many samples were skipped.
        """
        self.require_healthy(health)
        own = torch.stack((loss.double(), grad_norm.double(), loss.new_tensor(len(data.skipped)).double()))
        told = ranks.gather(own)
        skipped = self.skipped(data) if any(values[2] for values in told) else {}
        if len(skipped) > self.cfg.data.skip_bad:
            raise Fault(
                f"{len(skipped)} bad training samples, data.skip_bad={self.cfg.data.skip_bad} allows no more:"
                f" {'; '.join(skipped.values())}"
            )
        begin, samples, wait_s = self.since
        elapsed = time.perf_counter() - begin
        record = {
            "step": state.step,
            "samples": state.samples,
            "loss": sum(values[0] for values in told) / len(told),
            "grad_norm": told[0][1],
            "lr": float(state.opt.lr),
            "samples_per_s": (state.samples - samples) / elapsed,
            "data_wait": (feed.wait_s - wait_s) / elapsed,  # share of the time
            "peak_memory_gb": ranks.peak_memory_gb(self.world.device),
            "skipped": len(skipped),
        }
        self._append("metrics.jsonl", record)
        self._look_at_rate(record)
        self.train_curve.append((state.samples, record["loss"]))
        self.bar.set_postfix_str(f"loss {record['loss']:.4f}")
        self._mark(state.samples, feed.wait_s)

    def _look_at_rate(self, record: dict) -> None:
        self.recent = [*self.recent, record][-alarms.RATE_SPAN :]
        alarm = alarms.of_last_rate(self.recent)
        if alarm and not self.is_slow:
            self.say(f"warning: samples {alarm.samples:,}: {alarm.text}")
        self.is_slow = alarm is not None

    def require_healthy(self, health: Health) -> None:
        """Raises: Fault, on every rank, if a loss or a norm since the run began was not finite. Collective.

        sync: the host waits for the device.
        """
        complaint = blame(ranks.gather(health.flags[1:]), self.cfg.train.global_batch)
        if complaint:
            raise Fault(complaint)

    @staticmethod
    def skipped(data: TrainSet) -> dict[int, str]:
        """The damaged samples that any rank has passed over so far, and why. Collective."""
        return {sample: reason for rank in ranks.gather_objects(data.skipped) for sample, reason in rank.items()}

    def evaluation(self, samples: int, evaluate: Callable[[], Validation]) -> bool:
        """Run and report one evaluation; returns whether the target was reached, the same on every rank.

        One that was reported before the run broke off is not repeated.
        """
        if self.val_curve and self.val_curve[-1][0] == samples:
            return self._reaches(self.val_curve[-1][1])
        begin = time.perf_counter()
        self.log.eval_start(samples)
        result = evaluate()
        self.log.eval_stop(samples, result.loss)
        seconds = time.perf_counter() - begin
        self._append("eval.jsonl", {"samples": samples} | validation_record(result) | {"seconds": seconds})
        self.val_curve.append((samples, result.loss))
        target = f", target {self.cfg.eval.target:g}" if self.cfg.eval.target else ""
        self.say(
            f"samples {samples:>10,}  validation loss {result.loss:.4f} +- {result.stderr:.4f}"
            f" over {result.count:,} samples in {seconds:.1f} s{target}"
        )
        for alarm in alarms.of_losses(self.val_curve, self.band, convergence.bias_of_config(self.cfg)):
            if alarm.samples == samples:
                self.say(f"{alarm.level}: {alarm.text}")
        self._chart()
        # Evaluations do not count in the training rate.
        self.since = (self.since[0] + time.perf_counter() - begin, *self.since[1:])
        reached = self._reaches(result.loss)
        if not reached and samples < self.cfg.train.max_samples:
            self.log.block_start(samples)
        return reached

    def _reaches(self, loss: float) -> bool:
        """Alike on every rank, for the loss has the same bits on all."""
        return self.cfg.eval.target > 0 and loss <= self.cfg.eval.target

    def conclude(self, state: State, reached: bool) -> None:
        """Say how the run ended and where to look; outcome.json marks it as finished."""
        outcome = REACHED if reached else ENDED
        lines = [outcome, f"  losses    {self.folder}/loss.png"]
        if self.cfg.sample.count:
            lines.append(f"  pictures  {self.folder}/samples")
        if self.cfg.checkpoint.save:
            lines.append(f"  weights   python eval.py {self.folder}")
        self.say("\n".join(lines))
        if self.speaks:
            record = {
                "outcome": outcome,
                "step": state.step,
                "samples": state.samples,
                "val_loss": self.val_curve[-1][1],
                "not_a_timed_result": self.log.flaw,
            }
            write_whole(self.folder / "outcome.json", json.dumps(record) + "\n")

    def _append(self, name: str, record: dict) -> None:
        if self.speaks:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint that comes later must not outlive its line

    def _chart(self) -> None:
        if self.speaks:
            loss_chart.chart(self.train_curve, self.val_curve, self.cfg.eval.target, self.folder / "loss.png")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.log.close()


def blame(ranks: list[list[float]], global_batch: int) -> str | None:
    """What to say, given the first bad loss and the first bad norm of each rank; None if all was finite."""
    bad = [(int(loss_step), rank) for rank, (loss_step, _) in enumerate(ranks) if loss_step != NEVER]
    norm_step = int(ranks[0][1])
    if bad and (norm_step == NEVER or min(bad)[0] <= norm_step):
        step, rank = min(bad)
        where = rank_slice(step, rank, len(ranks), global_batch)
        return (
            f"loss is not finite at step {step} on rank {rank}'s data"
            f" (positions {where.start} to {where.stop - 1} of the run); lower optim.lr or inspect the data"
        )
    if norm_step != NEVER:
        return f"gradient norm is not finite at step {norm_step} though every rank's loss was; lower optim.lr"
    return None


def validation_record(result: Validation) -> dict[str, object]:
    """The names under which an evaluation is written down."""
    return {
        "val_loss": result.loss,
        "val_loss_per_timestep": result.losses,
        "count": result.count,
        "stderr": result.stderr,
        "stderr_per_timestep": result.stderrs,
    }


def table(result: Validation) -> str:
    """The eight losses and their mean, for the terminal."""
    rows = [f"t = {k}/8   {loss:.4f} +- {err:.4f}" for k, (loss, err) in enumerate(zip(result.losses, result.stderrs))]
    return "\n".join([*rows, f"mean      {result.loss:.4f} +- {result.stderr:.4f}  over {result.count:,} samples"])
