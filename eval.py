"""Evaluate weights: the validation loss, and pictures.

    python eval.py runs/tiny                                 the newest checkpoint of a run
    python eval.py runs/tiny --checkpoint=800                that of step 800
    python eval.py runs/tiny --all                           every checkpoint, and the curve as a picture
    python eval.py runs/tiny --ema                           the average of the weights that optim.ema keeps
    python eval.py runs/tiny --prompt "a small red circle at the middle" --prompt "..." --draw-only
    torchrun --nproc-per-node 8 eval.py FLUX.1-schnell --prompts=FILE --draw-only --steps=4
    torchrun --nproc-per-node 8 eval.py flux1-schnell.safetensors --data.val=DIR --sample.count=16 --vae=ae.safetensors

Takes a run, a checkpoint, a safetensors file in BFL's layout, diffusers' transformer folder or FLUX.1-schnell's
repository. Uses a run's or checkpoint's own settings, for other weights those of --config=FILE (FLUX.1-schnell's); any
key of flux_ref/config.py can be given. With the run's own settings the number equals the one that training logged;
with --ema it is that of the average, which training never logs.
Draws prompts, else sample.count stored captions, with --steps=N --guidance=X --seed=N, into a new file in the run's
samples/, for other weights in the current folder. --draw-only measures no loss; prompts then need no data set.
Encoders are --t5=DIR --clip=DIR --vae=PATH, else those beside --vae or the model, as in FLUX.1-schnell's repository.
--json prints one object.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from flux_ref import checkpoint, config_file, errors, files, loss_chart, ranks, sharding
from flux_ref.alive import Timer
from flux_ref.arithmetic import arithmetic_of
from flux_ref.config import Config
from flux_ref.data import ValSet
from flux_ref.errors import Options, Refusal
from flux_ref.evaluate import Validation, validation_loss
from flux_ref.formats import outside
from flux_ref.optim import EMA
from flux_ref.pictures import drawing
from flux_ref.ranks import World
from flux_ref.run import compiler_folder, reporter, weight_files
from flux_ref.schedule import TIMESTEPS
from flux_ref.step_runner import Validator

MOST_PROMPTS = 256  # their encodings are in memory together


def table(result: Validation) -> str:
    """The eight losses and their mean as text, one per line."""
    names = [f"t = {k}/{TIMESTEPS}" for k in range(TIMESTEPS)]
    rows = []
    for name, loss, stderr in zip((*names, "mean   "), (*result.losses, result.loss), (*result.stderrs, result.stderr)):
        error = f" +- {stderr:.4f}" if files.is_number(stderr) else ""
        rows.append(f"{name}   {loss:.4f}{error}")
    return "\n".join(rows) + f"  over {result.count:,} samples"


def parse(argv: list[str]) -> argparse.Namespace:
    """What the command line asks for; `overrides` are keys of the config. Raises: Refusal."""
    parser = Options("eval.py", __doc__, add_help=False)
    parser.add_argument("--checkpoint", dest="step", type=int, metavar="STEP")
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--json", action="store_true")
    drawing.add_options(parser)
    path = [word for word in argv[:1] if not word.startswith("-")]
    options, rest = parser.parse_known_args(argv[len(path) :])
    path, rest = config_file.config_and_overrides([*path, *rest], default="runs/tiny")
    if options.all and options.step is not None:
        raise Refusal("--all and --checkpoint exclude each other")
    options.path = Path(path)
    options.mark = "_ema" if options.ema else ""  # in the names of files
    options.overrides = [*rest, *options.overrides]
    if len(options.prompts) > MOST_PROMPTS:
        raise Refusal(f"{len(options.prompts):,} prompts; give at most {MOST_PROMPTS} at a time")
    return options


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(__doc__ + config_file.key_list())
        return 0
    options = parse(argv)
    first = weight_files.find(options.path, options.step)
    paths = [first]
    if options.all:
        paths = checkpoint.list_checkpoints(options.path)
    if not paths:
        raise Refusal(
            f"{options.path} is not a run, so --all has no checkpoints to walk through; {weight_files.REMEDY}"
        )
    cfg = config_file.override(weight_files.config_of(first, options.config), options.overrides)
    with contextlib.ExitStack() as stack:
        timer = stack.enter_context(Timer("eval.py", cfg.run.hang_s))
        world = ranks.start(cfg.parallel)
        # Training may save and delete checkpoints while ranks look.
        paths = [Path(path) for path in ranks.gather_objects([*map(str, paths)])[0]]
        if cfg.parallel.compile:
            compiler_folder.choose(cfg, world, stack)
        records = evaluate(cfg, world, timer, paths, options)
    ranks.stop()
    if world.rank > 0:
        return 0
    chart = ""
    if options.all and not options.draw_only:
        chart = draw_curve(cfg, records, options)
    if options.json:
        print(json.dumps({"checkpoints": records, "chart": str(chart)} if options.all else records[0]))
    elif chart:
        print(f"curve: {chart}")
    return 0


def draw_curve(cfg: Config, records: list[dict], options: argparse.Namespace) -> Path:
    """The validation losses of a run's checkpoints as a picture in its folder, and those that training logged."""
    curve = {}
    # Losses of training stand beside losses of the same config only. They are never those of an average.
    if not (options.config or options.ema) and all(word.startswith("--sample.") for word in options.overrides):
        for record in files.records(options.path / "eval.jsonl", figures=("val_loss",)):
            curve[record["samples"]] = record["val_loss"]  # also where no checkpoint was saved
    for record in records:
        curve[record["samples"]] = record["val_loss"]
    path = options.path / f"eval_all{options.mark}.png"
    loss_chart.chart([], sorted(curve.items()), cfg.eval.target, path)
    return path


def evaluate(cfg: Config, world: World, timer: Timer, paths: list[Path], options: argparse.Namespace) -> list[dict]:
    """One record per set of weights. Collective."""

    def say(line: str) -> None:
        if world.rank == 0 and not options.json:
            print(line)

    with ranks.agreed():
        # A wrong file is named before the data set is opened.
        weight_files.open_source(paths[0], cfg.model, options.ema)
        val_set = None
        if not (options.draw_only and options.prompts):
            if not cfg.data.val:
                raise Refusal("data.val is empty; give --data.val=DIR, or --prompt=TEXT with --draw-only")
            val_set = ValSet(cfg, world.rank, world.size, world.pin)
            val_set.open()
    draws = options.draw_only or options.prompts or cfg.sample.count
    pictures = drawing.Drawing(cfg, world, options, val_set, timer.mark) if draws else None
    arithmetic = arithmetic_of(cfg)
    steps = Validator(sharding.build(cfg, world, None, arithmetic), cfg, world)
    records = []

    for path in paths:
        with ranks.agreed():
            source = weight_files.open_source(path, cfg.model, options.ema)
            weight_files.load(steps.net, source)
        is_clocked = "samples" in source.info
        samples = int(source.info.get("samples", 0))
        arithmetic.begin(samples // cfg.train.global_batch)  # computes as the run at that time
        record = {"weights": str(path), "samples": samples}
        count = f"{samples:,}" if is_clocked else "an unknown number of"
        whose = f"{source.info['name']}, run {source.info['run']}, " if "run" in source.info else ""
        which = ""
        if EMA in source.info:
            record[EMA] = int(source.info[EMA])
            which = f"; the average of the weights, with a half-life of {record[EMA]:,} samples"
        say(outside.printable(f"{path}: {whose}after {count} training samples{which}"))
        if not options.draw_only:
            result = validation_loss(steps, val_set, samples, at=timer.mark)
            say(table(result))
            record |= reporter.validation_record(result)
            if cfg.eval.noise == "fresh" and not is_clocked:
                say("noise of evaluation 0: these weights state no samples; compare files with --eval.noise=fixed")
        if pictures:
            folder = options.path / "samples" if (options.path / "config.toml").is_file() else Path.cwd()
            stem = f"eval_{path.stem}{options.mark}"
            record["pictures"] = pictures.draw(steps.net, folder, stem, timer.mark)
            say(f"pictures: {record['pictures']}")
        records.append(record)
    return records


if __name__ == "__main__":
    errors.leave(errors.run("eval.py", main, sys.argv[1:]))
