"""Train FLUX.1 from scratch, as the MLPerf Training benchmark asks.

    torchrun train.py                                        a tiny FLUX on the CPU, no download
    torchrun --nproc-per-node 8 train.py configs/schnell_gbs512.toml
    torchrun train.py configs/tiny.toml --optim.lr=1e-3      any key of flux_ref/config.py

The run's folder (runs/<config name>, or --run.dir=DIR) receives config.toml, metrics.jsonl, eval.jsonl,
result_0.txt (the benchmark's log), loss.png, samples/ and weights.safetensors.
Exit codes: 0 the run did what was asked, 2 it was refused before it started, 3 a fault stopped it.
"""

import sys
from collections.abc import Callable

from flux_ref import cli, config, metrics, parallel, pictures, prepare, sample, schedule, weights
from flux_ref.config import Config
from flux_ref.data import Batch, TrainSet, ValSet, allocate
from flux_ref.errors import Refusal
from flux_ref.evaluate import Validation, validation_loss
from flux_ref.metrics import Reporter
from flux_ref.optim import ShardedAdamW
from flux_ref.parallel import World
from flux_ref.step import Health, State, train_step, warm_up


def main(argv: list[str]) -> int:
    cfg = config.load(*cli.config_and_overrides(argv, default="configs/tiny.toml"))
    world = parallel.start(cfg.parallel)
    config.validate_world(cfg, world.size)
    parallel.require_same(config.dump(cfg), "config")
    parallel.together(lambda: world.rank or prepare.ensure(cfg))
    train_set = parallel.together(lambda: TrainSet(cfg, world.rank, world.size, world.pin))
    val_set = parallel.together(lambda: ValSet(cfg, world.rank, world.size, world.pin))
    parallel.together(lambda: world.rank or metrics.claim(cfg))
    reporter = Reporter(cfg, world)
    try:
        reporter.introduce(len(train_set.shards), len(val_set.shards))
        run(cfg, world, train_set, val_set, reporter)
    except Refusal:
        if world.rank == 0:
            metrics.release(cfg)
        raise
    finally:
        reporter.close()
    return 0


def run(cfg: Config, world: World, train_set: TrainSet, val_set: ValSet, reporter: Reporter) -> None:
    """One benchmark run, from initialisation to the final weights."""
    log = reporter.log
    if cfg.data.evict:
        train_set.shards.evict()
        val_set.shards.evict()
        log.cache_clear()
    log.init_start()
    log.describe(cfg, world.size, len(train_set.shards), len(val_set.shards))
    net = parallel.build(cfg, world, cfg.train.seed)
    state = State(net, ShardedAdamW(net, cfg.optim, world))
    train_batch = allocate(cfg.model, cfg.train.global_batch // world.size, world.device)
    val_batch = allocate(cfg.model, cfg.eval.batch, world.device)
    warm_up(state, train_batch, val_batch, cfg)

    def evaluate(permute_captions: bool = False) -> Validation:
        return validation_loss(state.net, val_set, val_batch, cfg, state.samples, permute_captions)

    log.run_start()  # spec: the first byte of training data is read after this
    try:
        parallel.together(train_set.open)
        parallel.together(val_set.open)
        reached = train(cfg, state, train_set, train_batch, reporter, evaluate)
    except BaseException as error:
        log.run_stop(state.samples, success=False, reason=str(error) or type(error).__name__)
        raise
    log.run_stop(state.samples, success=reached, reason="target reached" if reached else "train.max_samples reached")

    weights.save(
        state.net, reporter.folder / "weights.safetensors", {"samples": str(state.samples), "step": str(state.step)}
    )
    if cfg.eval.permuted_captions:
        reporter.say(f"with captions permuted among the samples: {evaluate(permute_captions=True).loss:.4f}")
    if cfg.sample.count:
        captions, drawn = sample.draw(state.net, val_set, train_set.empty, cfg, world.device)
        if world.rank == 0:
            pictures.grid(drawn, captions, reporter.folder / "samples" / f"{state.samples:09d}.png")
    reporter.conclude(reached)


def train(cfg: Config, state: State, train_set: TrainSet, batch: Batch, reporter: Reporter, evaluate: Callable) -> bool:
    """Train until the target or train.max_samples; returns whether the target was reached."""
    global_batch, health = cfg.train.global_batch, Health(state.opt.lr.device, state.step)
    feed = train_set.feed(state.samples)
    reporter.begin(state.samples)
    try:
        if cfg.eval.at_start and reporter.evaluation(state.samples, evaluate):
            return True
        while state.samples < cfg.train.max_samples:
            parallel.to_device(feed, batch)
            state.opt.lr.fill_(schedule.lr(state.step, cfg.optim.lr, cfg.optim.warmup_steps))
            loss, grad_norm = train_step(state.net, state.opt, batch, health, cfg)
            state.advance(global_batch)
            reporter.tick()
            last = state.samples >= cfg.train.max_samples
            evaluates = last or schedule.due(state.samples, cfg.eval.every_samples, global_batch)
            if evaluates or schedule.due(state.samples, cfg.train.log_every_samples, global_batch):
                reporter.step(state, loss, grad_norm, health, feed, train_set)
            if evaluates and reporter.evaluation(state.samples, evaluate):
                return True
        return False
    finally:
        feed.close()


if __name__ == "__main__":
    cli.leave(cli.run("train.py", __doc__, main, sys.argv[1:]))
