"""Evaluate weights: the validation loss, and pictures.

    python eval.py runs/tiny                                 the newest checkpoint of a run
    python eval.py runs/tiny --checkpoint=900                that of step 900
    python eval.py runs/tiny --all                           every checkpoint, and the curve as a picture
    python eval.py runs/tiny --sample.captions='["a small red circle at the middle"]'
    torchrun --nproc-per-node 8 eval.py flux1-schnell.safetensors --data.val=DIR --sample.count=16 --vae=ae.safetensors

Takes a run, a checkpoint, a safetensors file in BFL's layout or diffusers' transformer folder. A run's or checkpoint's
own settings are used, for other weights those of --config=FILE (default: FLUX.1-schnell's); any key of
flux_ref/config.py can be given. --json prints one JSON object instead of text. With the run's own settings the number
equals the one that training logged.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from flux_ref import config, config_file, ranks, sharding
from flux_ref.config import Config
from flux_ref.data import ValSet, allocate
from flux_ref.errors import Refusal
from flux_ref.evaluate import validation_loss
from flux_ref.formats import checkpoint_files, shards
from flux_ref.ranks import World
from flux_ref.run import cli, loss_chart, reporter
from flux_ref.run.hang_watch import Watch
from flux_ref.sampling import euler
from flux_ref.weights import files


@dataclass(frozen=True)
class Options:
    """What the command line asks for beside the config."""

    path: Path
    overrides: list[str]
    step: int | None = None
    config: str | None = None
    all: bool = False
    json: bool = False


def parse(argv: list[str]) -> Options:
    """Raises: Refusal."""
    path, rest = cli.config_and_overrides(argv, default="runs/tiny")
    known, overrides = {}, []
    for text in rest:
        key, _, value = text.partition("=")
        if text in ("--all", "--json"):
            known[text[2:]] = True
        elif key == "--checkpoint":
            if not value.isdecimal():
                raise Refusal(f"{text}: give the step of a checkpoint, as in --checkpoint=900")
            known["step"] = int(value)
        elif key == "--config":
            known["config"] = value
        else:
            overrides.append(text.replace("--vae=", "--sample.vae=") if key == "--vae" else text)
    if known.get("all") and "step" in known:
        raise Refusal("--all and --checkpoint exclude each other")
    return Options(Path(path), overrides, **known)


def main(argv: list[str]) -> int:
    options = parse(argv)
    first = files.find(options.path, options.step)
    paths = checkpoint_files.found(options.path) if options.all else [first]
    if not paths:
        raise Refusal(f"{options.path} is not a run, so --all has no checkpoints to walk through; {files.KINDS}")
    cfg = config_file.override(files.config_of(first, options.config), options.overrides)
    world = ranks.start(cfg.parallel, timeout_s=2 * cfg.run.hang_s)  # hang.py speaks first
    paths = ranks.gather_objects(paths)[0]  # training may save and delete while ranks look
    with contextlib.closing(Watch("eval.py", world, ranks.groups(world), cfg.run.hang_s)) as watch:
        records = evaluate(cfg, world, watch, paths, options)
    if world.rank > 0:
        return 0
    chart = options.path / "eval_all.png"
    if options.all:
        loss_chart.chart([], [(record["samples"], record["val_loss"]) for record in records], cfg.eval.target, chart)
    if options.json:
        print(json.dumps({"checkpoints": records, "chart": str(chart)} if options.all else records[0]))
    elif options.all:
        print(f"curve: {chart}")
    return 0


def evaluate(cfg: Config, world: World, watch: Watch, paths: list[Path], options: Options) -> list[dict]:
    """One record per set of weights. Collective."""
    say = print if world.rank == 0 and not options.json else lambda line: None
    ranks.together(lambda: files.open_source(paths[0], cfg.model))  # a file that is none is named before the data
    val_set = ranks.together(lambda: ValSet(cfg, world.rank, world.size, world.pin))
    ranks.together(val_set.open)
    pictured = bool(cfg.sample.count or cfg.sample.captions)
    empty = ranks.together(lambda: pictured and shards.read_empty(config.empty_dir(cfg), val_set.shards.layout))
    decode = ranks.together(lambda: euler.decoder(cfg) if pictured and world.rank == 0 else None)
    net = sharding.build(cfg, world, seed=None)
    batch = allocate(cfg.model, cfg.eval.batch, world.device)
    records = []

    def at(batch: int) -> None:
        watch.at(f"validation batch {batch}")

    for path in paths:
        source = ranks.together(lambda path=path: files.open_source(path, cfg.model))
        ranks.together(lambda source=source: files.load(net, source))
        samples = int(source.info.get("samples", 0))
        result = validation_loss(net, val_set, batch, cfg, samples, between=at)
        say(f"{path} after {samples:,} training samples")
        say(reporter.table(result))
        record = {"weights": str(path), "samples": samples} | reporter.validation_record(result)
        if cfg.eval.permuted_captions:
            permuted = validation_loss(net, val_set, batch, cfg, samples, permute_captions=True, between=at)
            record["captions_permuted"] = permuted.loss
            say(f"with captions permuted among the samples: {permuted.loss:.4f}")
        if pictured:
            folder = options.path / "samples" if (options.path / "config.toml").is_file() else Path()
            record["pictures"] = str(folder / f"eval_{path.stem}.png")
            say(euler.draw(net, decode, val_set, empty, cfg, world, Path(record["pictures"]), watch.at))
        records.append(record)
    return records


if __name__ == "__main__":
    cli.leave(cli.run("eval.py", __doc__, main, sys.argv[1:]))
