"""Train FLUX.1 from scratch, as the MLPerf Training benchmark specifies.

    torchrun train.py                                        a tiny FLUX on the CPU, no download
    torchrun --nproc-per-node 8 train.py configs/schnell_gbs512.toml
    torchrun train.py configs/tiny.toml --optim.lr=1e-3      any key of flux_ref/config.py

All files of a run lie in runs/<config name>, or in --run.dir=DIR. The same command continues an interrupted run.
Exit codes: 0 done, 2 refused, 3 a fault stopped it, 1 a stuck rank was ended; stopped by 130 Ctrl-C, 143 SIGTERM,
138 SIGUSR1. docs/guide.md tells which of these save a checkpoint.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flux_ref import checkpoint, config, config_file, folder, ranks, schedule, sharding, step_runner, toy
from flux_ref.alive import Alive
from flux_ref.arithmetic import Arithmetic, arithmetic_of
from flux_ref.benchmark import closed, convergence
from flux_ref.benchmark.mllog import RESUMED, BenchmarkLog
from flux_ref.config import Config
from flux_ref.data import HostBatch, TrainSet, ValSet
from flux_ref.errors import Interrupted
from flux_ref.evaluate import Validation, validation_loss
from flux_ref.formats import shards
from flux_ref.pictures.drawing import Gallery
from flux_ref.ranks import World
from flux_ref.run import cli, compiler_folder, weight_files
from flux_ref.run.reporter import Reporter
from flux_ref.saver import Saver, load
from flux_ref.step_runner import State, StepRunner


def main(argv: list[str]) -> int:
    """The order of a run."""
    cfg = config_file.load(*cli.config_and_overrides(argv, default="configs/tiny.toml"))
    with contextlib.ExitStack() as stack:
        alive = stack.enter_context(Alive("train.py", cfg.run.hang_s))
        world = ranks.start(cfg.parallel)
        config_file.validate_world(cfg, world.size)
        arithmetic = arithmetic_of(cfg)
        arithmetic.require(config.micro_batch(cfg, world.size), world.device)
        with ranks.agreed():
            mode = step_runner.mode(cfg, world.device)
        ranks.require_same(f"{config_file.dump(cfg)}the mode of steps: {mode}", "config")
        alive.mark("opening the data sets")
        train_set, val_set = data_sets(cfg, world)
        sizes = {"train_samples": len(train_set.shards), "val_samples": len(val_set.shards)}
        if cfg.parallel.compile:
            compiler_folder.choose(cfg, world, stack)
        start = stack.enter_context(folder.held(cfg, world, sizes))
        log = BenchmarkLog()
        report = stack.enter_context(contextlib.closing(Reporter(cfg, world, log.text)))
        report.introduce(*sizes.values(), start.unlocked)
        for line in closed.warnings(cfg, *sizes.values()):
            report.say(line)
        gallery = None
        if cfg.sample.count:  # before the clock starts, since a wrong autoencoder is refused
            gallery = Gallery(cfg, world, report, val_set if cfg.data.val else train_set, train_set)
        if cfg.data.evict and shards.CAN_EVICT:
            train_set.shards.evict()
            val_set.shards.evict()
            log.cache_clear()
        elif cfg.data.evict:
            report.say("this system cannot drop the data set from its page cache, so the log has no cache_clear")
        log.init_start()
        log.describe(cfg, world.size, *sizes.values())
        alive.mark("building the model")
        state = initial_state(cfg, world, arithmetic, is_loaded=start.checkpoint is not None)
        steps = StepRunner(state, cfg, world)
        stack.callback(steps.close)
        saved_step = checkpoint.step_of(start.checkpoint) if start.checkpoint else None
        saver = Saver(cfg, world, state, sizes, report.say, saved_step) if cfg.checkpoint.save else None
        stack.callback(lambda: saver and saver.wait())
        alive.mark("the first step of the warm-up")
        steps.warm_up()
        if start.checkpoint:
            alive.mark("loading the checkpoint")
            load(start.checkpoint, state)
        alive.mark("capturing the steps")
        draws_beside = gallery and cfg.sample.every_samples
        steps.capture(beside=partial(gallery.artist.rehearse, state.net) if draws_beside else None)
        # What can be refused has been refused: from here on the run writes into its folder.
        told = folder.begin(cfg, world, start)
        log.write_to(config.run_dir(cfg) / folder.LOG if world.rank == 0 else None)
        report.settle_in(told)
        if start.resumes:
            report.resume(state.step, state.samples)
            log.disqualify(f"{RESUMED} {state.step}")

        run = Run(cfg, state, steps, train_set, val_set, saver, report, log, alive, gallery)
        reached = run.train_on_the_clock()
        run.save(finish=True)
        alive.let_go()
        steps.close(agreed=True)  # the pictures need the memory of the graphs
        if gallery:
            gallery.paint(state, alive.mark)
        report.conclude(state, reached, log.flaw)
    return 0


def data_sets(cfg: Config, world: World) -> tuple[TrainSet, ValSet]:
    """Both data sets, still closed. Makes the drawings of data.kind=shapes on first use. Collective."""
    with ranks.agreed():
        if cfg.data.kind == "shapes" and world.rank == 0:
            toy.ensure(cfg)
    with ranks.agreed():
        return TrainSet(cfg, world.rank, world.size, world.pin), ValSet(cfg, world.rank, world.size, world.pin)


def initial_state(cfg: Config, world: World, arithmetic: Arithmetic, is_loaded: bool) -> State:
    """A state with the weights of the seed or of init.weights. is_loaded: those of a checkpoint come later.

    The warm-up then takes the weights of no seed: any that are finite serve.
    """
    seed = None if is_loaded or cfg.init.weights else cfg.train.seed
    state = State.build(cfg, world, seed, arithmetic)
    if is_loaded:
        sharding.fill_for_warm_up(state.net)
    elif cfg.init.weights:
        weight_files.load_everywhere(state.net, Path(cfg.init.weights), cfg.model)
    return state


@dataclass(frozen=True)
class Run:
    """What the training loop uses."""

    cfg: Config
    state: State
    steps: StepRunner
    train_set: TrainSet
    val_set: ValSet
    saver: Saver | None
    report: Reporter
    log: BenchmarkLog
    alive: Alive
    gallery: Gallery | None

    def train_on_the_clock(self) -> bool:
        """Train between run_start and run_stop of the benchmark's log. Returns whether the target was reached."""
        self.log.run_start()  # spec: the first byte of training and validation data is read after this
        try:
            ranks.gather_objects(None)  # rank 0 has the clock; no rank reads before it has started
            with ranks.agreed():
                self.train_set.open()
                self.val_set.open()
            with contextlib.closing(self.train_set.feed(self.state.samples)) as feed:
                reached = self.train(feed)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the disk may be the reason
                self.log.run_stop(self.state.samples, success=False, reason=str(error) or type(error).__name__)
            raise
        self.log.run_stop(self.state.samples, reached, "target reached" if reached else "train.max_samples reached")
        return reached

    def train(self, feed: Iterator[HostBatch]) -> bool:
        """Train until the target or train.max_samples. Returns whether the target was reached."""
        cfg = self.cfg
        state = self.state
        steps = self.steps
        report = self.report
        batch = cfg.train.global_batch
        log_every = cfg.train.log_every_samples
        most = cfg.train.max_samples
        steps.health.restart(state.step)
        report.begin(state.samples, steps.warm_s)
        try:
            while True:
                if preset := state.arithmetic.switched(state.step):
                    report.say(f"samples {state.samples:>10,}  precision switches to {preset}")
                if self.gallery and schedule.due(state.samples, cfg.sample.every_samples, batch):
                    self.gallery.paint(state, self.alive.at)  # a run that breaks off in a drawing repeats it
                if schedule.evaluates(state.samples, cfg) and self.evaluate_on_the_clock() <= cfg.eval.target:
                    return True
                if state.samples >= most:
                    return False
                self.log.block_start(state.samples)
                loss, grad_norm = steps.train_on(feed)
                report.tick()
                is_last = state.samples >= most  # the last step has a record even if no evaluation follows
                if is_last or schedule.evaluates(state.samples, cfg) or schedule.due(state.samples, log_every, batch):
                    report.step(state, loss, grad_norm, steps.health, steps.data_wait_s)
                if schedule.due(state.samples, cfg.checkpoint.every_samples, batch):
                    report.require_healthy(steps.health)
                    self.save()  # before the evaluation: a run that breaks off in an evaluation repeats it
                self.alive.at(f"the end of step {state.step}")
        except Interrupted as error:
            report.require_healthy(steps.health)
            self.save(finish=True)
            rest = "the same command goes on from there" if self.saver else "nothing is saved (checkpoint.save=false)"
            report.say(f"{error} after step {state.step}; {rest}")
            raise
        finally:
            report.settle()

    def evaluate_on_the_clock(self) -> float:
        """The validation loss now, logged and recorded. A resumed run does not repeat a recorded evaluation."""
        samples = self.state.samples
        begin = time.perf_counter()
        if (recorded := self.report.val_loss_at(samples)) is not None:
            return recorded
        self.log.eval_start(samples)
        result = self.evaluate()
        self.log.eval_stop(samples, result.loss)
        self.report.evaluation(samples, result, time.perf_counter() - begin)
        if warning := convergence.warning(self.cfg, self.report.val_curve):
            self.report.say(warning)
        return result.loss

    def evaluate(self) -> Validation:
        """The validation loss now. Collective."""
        return validation_loss(self.steps, self.val_set, self.state.samples, self.alive.at)

    def save(self, finish: bool = False) -> None:
        """Begin to save a checkpoint. finish: wait until it is saved. Collective."""
        if self.saver:
            self.saver.save(self.state)
            if finish:
                self.saver.finish()


if __name__ == "__main__":
    cli.leave(cli.run("train.py", __doc__, main, sys.argv[1:]))
