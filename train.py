"""Train FLUX.1 from scratch, as the MLPerf Training benchmark asks.

    torchrun train.py                                        a tiny FLUX on the CPU, no download
    torchrun --nproc-per-node 8 train.py configs/schnell_gbs512.toml
    torchrun train.py configs/tiny.toml --optim.lr=1e-3      any key of flux_ref/config.py

The run's folder (runs/<config name>, or --run.dir=DIR) receives config.toml, metrics.jsonl, eval.jsonl,
result_0.txt (the benchmark's log), loss.png, samples/ and checkpoints/. A run that broke off goes on from its last
checkpoint with the same command.
Exit codes: 0 the run did what was asked, 2 it was refused before it started, 3 a fault stopped it, 143 SIGTERM and
138 SIGUSR1 stopped it, with a checkpoint saved.
"""

import contextlib
import sys
from pathlib import Path

from flux_ref import checkpoint, config_file, config_rules, data, ranks, schedule, sharding, steps
from flux_ref.benchmark import convergence
from flux_ref.checkpoint import Saver
from flux_ref.config import Config
from flux_ref.data import TrainSet, ValSet
from flux_ref.errors import Interrupted, Refusal
from flux_ref.evaluate import Validation, validation_loss
from flux_ref.formats.checkpoint_files import Checkpoint
from flux_ref.optim import ShardedAdamW
from flux_ref.ranks import World
from flux_ref.run import cli, folder
from flux_ref.run.hang_watch import Watch
from flux_ref.run.reporter import Reporter
from flux_ref.run.stopping import Stopping
from flux_ref.sampling import euler
from flux_ref.step import State
from flux_ref.steps import Steps
from flux_ref.toy import make
from flux_ref.weights import files


def main(argv: list[str]) -> int:
    cfg = config_file.load(*cli.config_and_overrides(argv, default="configs/tiny.toml"))
    world = ranks.start(cfg.parallel, timeout_s=2 * cfg.run.hang_s)  # hang.py speaks first
    config_rules.validate_world(cfg, world.size)
    ranks.require_same(config_file.dump(cfg), "config")
    ranks.require_same(ranks.together(lambda: steps.manner(cfg, world.device)), "the manner of steps")
    ranks.together(lambda: world.rank or make.ensure(cfg))
    train_set = ranks.together(lambda: TrainSet(cfg, world.rank, world.size, world.pin))
    val_set = ranks.together(lambda: ValSet(cfg, world.rank, world.size, world.pin))
    band = ranks.together(lambda: convergence.of_config(cfg))
    restarted = ranks.is_restarted()
    claimed = ranks.together(lambda: None if world.rank else folder.claim(cfg, restarted))
    fresh, start = ranks.gather_objects(claimed and (claimed.fresh, claimed.start))[0]
    reporter = Reporter(cfg, world, band)
    try:
        reporter.introduce(len(train_set.shards), len(val_set.shards))
        with (
            contextlib.closing(Watch("train.py", world, ranks.groups(world), cfg.run.hang_s)) as watch,
            contextlib.closing(Run(cfg, world, watch, train_set, val_set, reporter, fresh, start)) as run,
        ):
            run.go()
    except Refusal:
        if claimed:
            folder.release(claimed)
        raise
    finally:
        reporter.close()
    return 0


class Run:
    """One run, from initialisation to its last checkpoint."""

    def __init__(
        self,
        cfg: Config,
        world: World,
        watch: Watch,
        train_set: TrainSet,
        val_set: ValSet,
        reporter: Reporter,
        fresh: bool,
        start: Path | None,
    ):
        """Everything that comes before the clock starts. start: where a run that is not fresh goes on."""
        self.cfg, self.world, self.train_set, self.val_set, self.reporter = cfg, world, train_set, val_set, reporter
        self.watch, self.stopping = watch, Stopping(2 * cfg.run.hang_s)  # hang.py speaks first
        watch.groups.append(self.stopping.group)
        drawn = cfg.sample.count and world.rank == 0
        self.decode = ranks.together(lambda: euler.decoder(cfg) if drawn else None)
        facts = {"train_samples": len(train_set.shards), "val_samples": len(val_set.shards)}
        if cfg.data.evict:
            train_set.shards.evict()
            val_set.shards.evict()
            reporter.log.cache_clear()
        reporter.log.init_start()
        reporter.log.describe(cfg, world.size, *facts.values())
        if cfg.init.weights:
            reporter.log.disqualify("init_weights", cfg.init.weights, "started from given weights")
        self.state, saved = initial_state(cfg, world, start, facts)
        self.saver = Saver(cfg, world, facts, reporter.say, saved) if cfg.checkpoint.save else None
        self.steps = Steps(self.state, cfg, world)
        self.steps.warm_up()
        if saved:
            ranks.together(lambda: checkpoint.load_progress(saved, self.state))
            train_set.take_up(saved.info["skipped"])
        if not fresh:
            reporter.resume(self.state.step, self.state.samples)
        self.steps.capture()  # last: from here on `close` is called whatever happens

    def go(self) -> None:
        """Train, save, evaluate, draw."""
        cfg, log, state = self.cfg, self.reporter.log, self.state
        log.run_start()  # spec: the first byte of training data is read after this
        try:
            ranks.together(self.train_set.open)
            ranks.together(self.val_set.open)
            reached = self.train()
        except BaseException as error:
            log.run_stop(state.samples, success=False, reason=str(error) or type(error).__name__)
            raise
        reason = "target reached" if reached else "train.max_samples reached"
        log.run_stop(state.samples, success=reached, reason=reason)

        self.save(finish=True)
        if cfg.eval.permuted_captions:
            loss = self.evaluate(permute_captions=True).loss
            self.reporter.say(f"with captions permuted among the samples: {loss:.4f}")
        self.steps.close(agreed=True)  # drawing wants its memory
        if cfg.sample.count:
            self.draw()
        self.reporter.conclude(state, reached)

    def train(self) -> bool:
        """Train until the target or train.max_samples; returns whether the target was reached."""
        cfg, state, steps, reporter = self.cfg, self.state, self.steps, self.reporter
        global_batch = cfg.train.global_batch
        steps.health.restart(state.step)
        feed = self.train_set.feed(state.samples)
        reporter.begin(state.samples, self.evaluates())
        try:
            while True:
                if self.evaluates() and reporter.evaluation(state.samples, self.evaluate):
                    return True
                if state.samples >= cfg.train.max_samples:
                    return False
                data.to_device(feed, steps.train_batch)
                state.opt.lr.fill_(schedule.lr(state.step, cfg.optim.lr, cfg.optim.warmup_steps))
                loss, grad_norm = steps.train()
                state.advance(global_batch)
                reporter.tick()
                if self.evaluates() or schedule.due(state.samples, cfg.train.log_every_samples, global_batch):
                    reporter.step(state, loss, grad_norm, steps.health, feed, self.train_set)
                if schedule.due(state.samples, cfg.checkpoint.every_samples, global_batch):
                    reporter.require_healthy(steps.health)
                    self.save()  # before the evaluation, which a run that breaks off in it repeats
                self.alive(f"the end of step {state.step}")
        except Interrupted as error:
            reporter.require_healthy(steps.health)
            self.save(finish=True)
            rest = "the same command goes on from there" if self.saver else "nothing is saved (checkpoint.save=false)"
            reporter.say(f"{error} after step {state.step}; {rest}")
            raise
        finally:
            feed.close()

    def close(self) -> None:
        """A save that is under way ends first. Not collective."""
        if self.saver:
            self.saver.wait()
        self.steps.close()

    def evaluates(self) -> bool:
        """Whether the validation loss is wanted now."""
        cfg = self.cfg
        every, most = cfg.eval.every_samples, cfg.train.max_samples
        return schedule.evaluates(self.state.samples, every, most, cfg.train.global_batch, cfg.eval.at_start)

    def evaluate(self, permute_captions: bool = False) -> Validation:
        """The validation loss now. Collective."""

        def between(batch: int) -> None:
            self.alive(f"validation batch {batch} after step {self.state.step}")

        net, samples, steps = self.state.net, self.state.samples, self.steps
        return validation_loss(
            net, self.val_set, steps.val_batch, self.cfg, samples, permute_captions, between, steps.validate
        )

    def save(self, finish: bool = False) -> None:
        """Begin a checkpoint; finish: and wait for it. Collective."""
        if self.saver:
            self.saver.save(self.state, self.reporter.skipped(self.train_set))
            if finish:
                self.saver.finish()

    def draw(self) -> None:
        """Pictures of what the net has learnt. Collective."""
        path = self.reporter.folder / "samples" / f"{self.state.samples:09d}.png"
        state, empty = self.state, self.train_set.empty
        line = euler.draw(state.net, self.decode, self.val_set, empty, self.cfg, self.world, path, self.watch.at)
        self.reporter.say(line)

    def alive(self, place: str) -> None:
        """Between two units of work. Collective. Raises: Interrupted."""
        self.watch.at(place)
        self.stopping.check()


def initial_state(cfg: Config, world: World, start: Path | None, facts: dict) -> tuple[State, Checkpoint | None]:
    """Weights from a checkpoint, init.weights or the seed; and the checkpoint, whose moments are to follow."""
    net = sharding.build(cfg, world, None if start or cfg.init.weights else cfg.train.seed)
    state = State(net, ShardedAdamW(net, cfg.optim, world))
    if start:
        saved = ranks.together(lambda: checkpoint.open_for(start, state, facts))
        ranks.together(lambda: checkpoint.load_weights(saved, state))
        return state, saved
    if cfg.init.weights:
        path = ranks.together(lambda: files.find(Path(cfg.init.weights)))
        path = ranks.gather_objects(path)[0]  # of a run that goes on, ranks may find another newest
        ranks.together(lambda: files.load(net, files.open_source(path, cfg.model)))
    return state, None


if __name__ == "__main__":
    cli.leave(cli.run("train.py", __doc__, main, sys.argv[1:]))
