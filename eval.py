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

from flux_ref import (
    checkpoint,
    config_file,
    errors,
    files,
    loss_chart,
    ranks,
    report,
    sharding,
    weights,
)
from flux_ref.alive import Alive
from flux_ref.arithmetic import arithmetic_of
from flux_ref.config import Config
from flux_ref.data import ValSet
from flux_ref.environment import choose_compiler_folder
from flux_ref.errors import Options, Refusal, printable
from flux_ref.evaluate import validation_loss
from flux_ref.files import read_text
from flux_ref.optim import EMA
from flux_ref.ranks import World
from flux_ref.schedule import TIMESTEPS
from flux_ref.step_runner import Validator

MOST_PROMPTS = 256  # their encodings are in memory together


def text(record: dict) -> str:
    """What was measured of a set of weights and drawn by it, for people."""
    count = "an unknown number of" if record["samples"] is None else f"{record['samples']:,}"
    whose = f"{record['name']}, " if record["name"] else ""
    which = f"; the average of the weights, with a half-life of {record[EMA]:,} samples" if EMA in record else ""
    lines = [f"{record['weights']}: {whose}after {count} training samples{which}"]
    if "val_loss" in record:
        names = [*(f"t = {k}/{TIMESTEPS}" for k in range(TIMESTEPS)), "mean   "]
        losses = [*record["val_loss_per_timestep"], record["val_loss"]]
        for name, loss, stderr in zip(names, losses, [*record["stderr_per_timestep"], record["stderr"]]):
            lines.append(f"{name}   {loss:.4f}" + (f" +- {stderr:.4f}" if stderr is not None else ""))
        lines[-1] += f"  over {record['count']:,} samples"
        if record["noise"] == "fresh" and record["samples"] is None:
            lines.append("noise of evaluation 0: these weights state no samples; compare with --eval.noise=fixed")
    if "pictures" in record:
        lines.append(f"pictures: {record['pictures']}")
    return "\n".join(map(printable, lines))


def utf8(prompt: str) -> str:
    """A prompt as it was typed. A terminal in another encoding gives bytes that are no UTF-8."""
    if prompt.encode(errors="ignore").decode() != prompt:
        raise argparse.ArgumentTypeError(f"{prompt!r} is not UTF-8; give it in a file of --prompts")
    return prompt


def listed(path: str) -> list[str]:
    """The lines of a file that hold text. Raises: Refusal."""
    text = read_text(Path(path), "list of prompts")
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise Refusal(f"--prompts={path} holds no prompt; write one on each line")
    return lines


def parse(argv: list[str]) -> argparse.Namespace:
    """What the command line asks for; `overrides` are keys of the config. Raises: Refusal."""
    parser = Options("eval.py", __doc__, add_help=False)
    parser.add_argument("--checkpoint", dest="step", type=int, metavar="STEP")
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompt", action="append", type=utf8, dest="prompts", default=[], metavar="TEXT")
    parser.add_argument("--prompts", action="extend", type=listed, default=[], metavar="FILE")
    parser.add_argument("--draw-only", action="store_true")
    parser.add_argument("--t5", type=Path, metavar="DIR")
    parser.add_argument("--clip", type=Path, metavar="DIR")
    for name in ("vae", "steps", "guidance", "seed"):
        form = f"--sample.{name}={{}}".format
        parser.add_argument(f"--{name}", action="append", dest="overrides", type=form, default=[])
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
    first = weights.find(options.path, options.step)
    paths = checkpoint.list_checkpoints(options.path) if options.all else [first]
    if not paths:
        raise Refusal(f"{options.path} is not a run, so --all has no checkpoints to walk through; {weights.REMEDY}")
    cfg = config_file.replace(weights.config_of(first, options.config), parallel__replicate=1)  # fits any world
    cfg = config_file.override(cfg, options.overrides)
    with contextlib.ExitStack() as stack:
        timer = stack.enter_context(Alive("eval.py", cfg.run.hang_s))
        world = ranks.start(cfg.parallel)
        # Training may save and delete checkpoints while ranks look.
        paths = [Path(path) for path in ranks.gather_objects([*map(str, paths)])[0]]
        if cfg.parallel.compile:
            choose_compiler_folder(cfg, world, stack)
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
        for record in files.records(options.path / "eval.jsonl"):
            curve[record["samples"]] = record["val_loss"]  # also where no checkpoint was saved
    for record in records:
        curve[record["samples"]] = record["val_loss"]
    path = options.path / f"eval_all{options.mark}.png"
    loss_chart.chart([], sorted(curve.items()), cfg.eval.target, path)
    return path


def evaluate(cfg: Config, world: World, timer: Alive, paths: list[Path], options: argparse.Namespace) -> list[dict]:
    """One record per set of weights. Collective."""
    with ranks.agreed():
        # A wrong file is named before the data set is opened.
        weights.open_source(paths[0], cfg.model, options.ema)
        val_set = None
        if not (options.draw_only and options.prompts):
            if not cfg.data.val:
                raise Refusal("data.val is empty; give --data.val=DIR, or --prompt=TEXT with --draw-only")
            val_set = ValSet(cfg, world.rank, world.size, world.pin)
            val_set.open()
    draws = options.draw_only or options.prompts or cfg.sample.count
    pictures = None
    if draws:
        from flux_ref.pictures import drawing

        pictures = drawing.Drawing(cfg, world, options, val_set, timer.mark)
    arithmetic = arithmetic_of(cfg)
    steps = Validator(sharding.build(cfg, world, None, arithmetic), cfg, world)
    records = []
    for path in paths:
        with ranks.agreed():
            source = weights.open_source(path, cfg.model, options.ema)
            weights.load(steps.net, source)
        record = {"weights": str(path), "name": source.info.get("name"), "samples": None}
        record |= {key: int(source.info[key]) for key in ("samples", EMA) if key in source.info}
        samples = record["samples"] or 0
        arithmetic.begin(samples // cfg.train.global_batch)  # computes as the run at that time
        if val_set and not options.draw_only:
            result = validation_loss(steps, val_set, samples, at=timer.mark)
            record |= report.validation_record(result) | {"noise": cfg.eval.noise}
        if pictures:
            folder = options.path / "samples" if (options.path / "config.toml").is_file() else Path.cwd()
            record["pictures"] = pictures.draw(steps.net, folder, f"eval_{path.stem}{options.mark}", timer.mark)
        if world.rank == 0 and not options.json:
            print(text(record))
        records.append(record)
    return records


if __name__ == "__main__":
    errors.leave(errors.run("eval.py", main, sys.argv[1:]))
