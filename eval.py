"""Evaluate the weights of a run.

    python eval.py runs/tiny                                        the eight losses, their mean, pictures
    python eval.py runs/tiny --sample.captions='["a small red circle at the middle"]'
    torchrun --nproc-per-node 8 eval.py RUN --data.val=DIR          any key of flux_ref/config.py

With the run's own settings the number equals the one that training logged last.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import sys
from pathlib import Path

from flux_ref import cli, config, metrics, parallel, pictures, sample, shards, weights
from flux_ref.data import ValSet, allocate
from flux_ref.errors import Refusal
from flux_ref.evaluate import validation_loss


def main(argv: list[str]) -> int:
    folder, overrides = cli.config_and_overrides(argv, default="runs/tiny")
    folder = Path(folder)
    if not (folder / "weights.safetensors").is_file():
        raise Refusal(f"{folder} holds no weights.safetensors; give the folder of a finished run")
    cfg = config.load(folder / "config.toml", overrides)
    world = parallel.start(cfg.parallel)
    val_set = parallel.together(lambda: ValSet(cfg, world.rank, world.size, world.pin))
    parallel.together(val_set.open)
    pictured = bool(cfg.sample.count or cfg.sample.captions)
    empty = parallel.together(lambda: pictured and shards.read_empty(config.empty_dir(cfg), val_set.shards.layout))
    net = parallel.build(cfg, world, seed=None)
    saved = parallel.together(lambda: weights.load(net, folder / "weights.safetensors"))
    samples = int(saved.get("samples", 0))
    batch = allocate(cfg.model, cfg.eval.batch, world.device)

    result = validation_loss(net, val_set, batch, cfg, samples)
    say = print if world.rank == 0 else lambda line: None
    say(f"{folder} after {samples:,} training samples")
    say(metrics.table(result))
    if cfg.eval.permuted_captions:
        permuted = validation_loss(net, val_set, batch, cfg, samples, permute_captions=True)
        say(f"with captions permuted among the samples: {permuted.loss:.4f}")
    if pictured:
        captions, drawn = sample.draw(net, val_set, empty, cfg, world.device)
        path = folder / "samples" / "eval.png"
        if world.rank == 0:
            pictures.grid(drawn, captions, path)
        say(f"pictures: {path}")
    return 0


if __name__ == "__main__":
    cli.leave(cli.run("eval.py", __doc__, main, sys.argv[1:]))
