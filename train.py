"""Train FLUX.1 from scratch, as the MLPerf Training benchmark specifies.

    torchrun train.py                                        a tiny FLUX on the CPU, no download
    torchrun --nproc-per-node 8 train.py configs/schnell_gbs512.toml
    torchrun train.py configs/tiny.toml --optim.lr=1e-3      any key of flux_ref/config.py

All files of a run lie in runs/<config name>, or in --run.dir=DIR. The same command continues an interrupted run.
Exit codes: 0 done, 2 refused, 3 a fault stopped it; stopped by a signal, 128 + its number: 130 for Ctrl-C. Ctrl-C,
SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGHUP and SIGQUIT save a checkpoint.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from flux_ref import (
    cli,
    config,
    config_file,
    dataset,
    graphs,
    mlperf_closed,
    ranks,
    run_folder,
    schedule,
    sharding,
    toy,
    weights,
)
from flux_ref.checkpoint import Saver, load
from flux_ref.cli import Interrupted
from flux_ref.config import Config
from flux_ref.dataloader import TrainSet, ValSet
from flux_ref.evaluate import validation_loss
from flux_ref.mlperf_log import RESUMED, BenchmarkLog
from flux_ref.precision import policy
from flux_ref.precision.recipe import PrecisionRecipe
from flux_ref.ranks import World
from flux_ref.report import Reporter
from flux_ref.trainer import TrainState
from flux_ref.watchdog import Watchdog

DEFAULT = os.path.relpath(Path(__file__).parent / "configs" / "tiny.toml")


def main(argv: list[str]) -> int:
    """A run from its config to its last checkpoint."""
    if "-h" in argv or "--help" in argv:
        print((__doc__ or "") + config_file.key_list())
        return 0
    path, overrides = config_file.config_and_overrides(argv, default=DEFAULT)
    cfg = config_file.load(path, overrides)
    run_folder.require_own(path, cfg, overrides)
    batch = cfg.train.global_batch
    cli.notice(f"flux_ref trains {path}; data: {cfg.data.train}; the run's files: {config.run_dir(cfg)}")
    with contextlib.ExitStack() as stack:
        # Prepare: ranks, data sets, the run's folder
        alive = stack.enter_context(Watchdog("train.py", cfg.run.watchdog_s, config.run_dir(cfg)))
        world = ranks.start(cfg.parallel, cfg.data.kind == "toy")
        alive.share(world.store)
        config_file.validate_world(cfg, world.size)
        recipe = PrecisionRecipe(cfg)
        policy.require_rows(cfg, config.micro_batch(cfg, world.size))
        with ranks.agreed():
            mode = graphs.mode(cfg, world.device)
        ranks.require_same(f"{config_file.dump(cfg)}the mode of steps: {mode}")
        alive.mark("opening the data sets")
        train_set, val_set = data_sets(cfg, world)
        sizes = {"train_samples": train_set.count, "val_samples": val_set.count}
        sharding.choose_compile_cache(cfg, world)
        saved = stack.enter_context(run_folder.held(cfg, world, sizes))
        log = BenchmarkLog()
        report = stack.enter_context(contextlib.closing(Reporter(cfg, world, log.text)))
        report.introduce(sizes)
        if verdict := mlperf_closed.verdict(cfg, sizes):
            report.say(f"  rules   {verdict}")
        gallery = None
        if cfg.pictures.count:  # before the clock starts, since a wrong autoencoder is refused
            from flux_ref.pictures.artist import Gallery

            gallery = Gallery(cfg, world, report, (val_set if cfg.data.val else train_set).shards)
        if cfg.data.drop_page_cache and dataset.HAS_FADVISE:
            train_set.shards.drop_page_cache()
            val_set.shards.drop_page_cache()
            log.cache_clear()
        elif cfg.data.drop_page_cache:
            report.say("this system cannot drop the data set from its page cache, so the log has no cache_clear")

        # Build the state, warm up, then load a checkpoint: any finite weights serve the warm-up and the captures
        log.init_start()
        log.describe(cfg, world.size, sizes)
        alive.mark("building the model")
        imported = "" if saved else cfg.init.weights
        net = sharding.build(cfg, world, None if imported else cfg.train.seed, recipe)
        if imported:
            weights.load_pretrained(net, Path(imported), cfg.model)
        state = TrainState(net, cfg, world)
        runner = graphs.make_trainer(state, cfg, world)
        saver = Saver(cfg, world, state, sizes, report.say, saved) if cfg.checkpoint.save else None
        if saver:
            stack.callback(saver.wait)
        report.say(f"  warm-up {cfg.train.synthetic_steps} steps on synthetic batches")
        runner.warm_up(alive.mark)
        runner.capture(alive.mark)
        if saved:
            alive.mark("loading the checkpoint")
            report.resume(load(saved, state))
        # What can be refused has been refused: from here on the run writes into its folder
        renamed_run = run_folder.begin(cfg, world, saved, stack)
        log.write_to(config.run_dir(cfg) / run_folder.LOG if world.rank == 0 else Path(os.devnull))
        if renamed_run:
            report.say(f"  {renamed_run}")
        report.write_environment(runner.graph_bytes)
        if saved:
            log.disqualify(f"{RESUMED} {state.step}")

        # Train, until the target or train.max_samples is reached
        reached = False
        stack.enter_context(cli.os_errors_as_faults())
        log.run_start()  # spec: the first byte of training and validation data is read after this
        try:
            ranks.barrier()  # rank 0 has the clock; no rank reads before it has started
            with ranks.agreed():
                train_set.open()
                val_set.open()
            feed = stack.enter_context(contextlib.closing(train_set.feed(state.samples)))
            runner.health.restart(state.step)
            report.begin(state.samples)
            while True:
                if preset := recipe.switches.get(state.step):
                    report.say(f"samples {state.samples:>10,}  precision switches to {preset}")
                if gallery and schedule.due(state.samples, cfg.pictures.every_samples, batch):
                    if shortage := runner.shortage():
                        report.say(f"samples {state.samples:>10,}  no pictures: {shortage}")
                    else:
                        gallery.draw(state, alive.stop_point)  # a run that breaks off in a drawing repeats it
                if schedule.evaluates(state.samples, cfg):
                    begin = time.perf_counter()
                    log.eval_start(state.samples)
                    result = validation_loss(runner, val_set, state.samples, alive.stop_point)
                    log.eval_stop(state.samples, result.val_loss)
                    report.evaluation(state.samples, result, time.perf_counter() - begin)
                    if warning := mlperf_closed.convergence_warning(cfg, report.val_curve):
                        report.say(warning)
                    reached = result.val_loss <= cfg.eval.target
                if reached or state.samples >= cfg.train.max_samples:
                    break
                log.block_start(state.samples)
                runner.step(feed)
                report.bar.update(batch)
                if schedule.logs(state.samples, cfg):
                    report.step(runner)
                if saver and schedule.saves(state.samples, cfg):
                    report.require_healthy(runner.health)
                    saver.save(state)  # before the evaluation: a run that breaks off in an evaluation repeats it
                if log.failure:
                    raise log.failure
                alive.stop_point(f"the end of step {state.step}")  # raises Interrupted on all ranks
        except BaseException as error:
            try:
                if isinstance(error, Interrupted):
                    report.require_healthy(runner.health)
                    save_and_wait(saver, state, f"{error}; ")
                    rest = "the same command goes on from there" if saver else "checkpoint.save=false saves nothing"
                    report.say(f"{error} after step {state.step}; {rest}")
            finally:
                log.run_stop(state.samples, success=False, reason=str(error) or type(error).__name__)
            raise
        outcome = run_folder.REACHED if reached else run_folder.ENDED
        log.run_stop(state.samples, reached, outcome)

        # The end: the last checkpoint, and pictures, which need the memory of the graphs
        save_and_wait(saver, state)
        if log.failure:
            raise log.failure
        alive.release_signals()
        runner.close()
        if gallery:
            gallery.draw(state, alive.mark)
        report.conclude(state, outcome, log.flaw)
    ranks.stop()
    return 0


def data_sets(cfg: Config, world: World) -> tuple[TrainSet, ValSet]:
    """Both data sets, not opened yet. Makes a set of data.kind=toy on first use. Collective."""
    with ranks.agreed():
        if world.rank == 0 and cfg.data.pictures:
            from flux_ref.pictures import toy_from_pictures

            toy_from_pictures.ensure(cfg)
        elif world.rank == 0:
            toy.ensure(cfg)
    with ranks.agreed():
        return TrainSet(cfg, world.rank, world.size, world.pin), ValSet(cfg, world.rank, world.size, world.pin)


def save_and_wait(saver: Saver | None, state: TrainState, reason: str = "") -> None:
    """Save a checkpoint, and return when it is saved. Collective.

    reason: of the save, for the message of a Fault.
    """
    if saver:
        saver.save(state)
        saver.finish(reason)


if __name__ == "__main__":
    cli.exit_now(cli.run("train.py", main, sys.argv[1:]))
