"""Evaluate weights: the validation loss, and pictures.

    python eval.py runs/tiny                                 the newest checkpoint of a run
    python eval.py runs/tiny/checkpoints/step_000000800      another one
    python eval.py runs/tiny --all                           every checkpoint
    python eval.py runs/tiny --ema                           the average of the weights that optim.ema_half_life keeps
    python eval.py runs/tiny --prompt "a small red circle at the middle" --prompt "..." --draw-only
    torchrun --nproc-per-node 8 eval.py FLUX.1-schnell --prompts=FILE --draw-only --steps=4
    torchrun --nproc-per-node 8 eval.py flux1-schnell.safetensors --data.val=DIR --pictures.count=8 --vae=ae.safetensors

Takes a run, a checkpoint, a safetensors file in BFL's layout, diffusers' transformer folder or FLUX.1-schnell's
repository. Uses a run's or checkpoint's own settings, for other weights those of --config=FILE (FLUX.1-schnell's); any
key of flux_ref/config.py can be given. With the run's own settings the number equals the one that training logged;
with --ema it is that of the average, which training never logs.
Draws prompts, else pictures.count stored captions, with --steps=N --guidance=X --seed=N, into a new file in the run's
samples/, for other weights in the current folder. --draw-only measures no loss; prompts then need no data set.
The encoders lie in the folder --vae=PATH, else in that of the model, as in FLUX.1-schnell's repository.
--json prints one object on a line for each set of weights.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import contextlib
import json
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

from flux_ref import checkpoint, cli, config, config_file, ranks, sharding, weights
from flux_ref.cli import Options, Refusal, Say, printable, shown
from flux_ref.config import Config
from flux_ref.dataloader import ValSet
from flux_ref.evaluate import validation_loss
from flux_ref.files import read_text
from flux_ref.optim import EMA
from flux_ref.precision.recipe import PrecisionRecipe
from flux_ref.ranks import World
from flux_ref.trainer import Validator
from flux_ref.watchdog import Watchdog


def main(argv: list[str]) -> int:
    """Raises: Refusal."""
    if "-h" in argv or "--help" in argv:
        print((__doc__ or "") + config_file.key_list())
        return 0
    options = parse(argv)
    path = weights.find(options.path)
    paths = [path]
    if options.all:
        paths = checkpoint.list_checkpoints(options.path) or paths
    cfg = weights.config_of(path, options.config)
    own = {"parallel.replicate": 1} | config_file.parsed(options.overrides)  # one copy fits any world
    cfg = config_file.from_flat(cfg.name, config.flat(cfg) | own)
    with contextlib.ExitStack() as stack:
        alive = stack.enter_context(Watchdog("eval.py", cfg.run.watchdog_s))
        world = ranks.start(cfg.parallel, cfg.data.kind == "toy")
        alive.share(world.store)
        # Training may save and delete checkpoints while ranks look.
        names = ranks.gather_objects([str(path) for path in paths])[0]
        sharding.choose_compile_cache(cfg, world)
        evaluate(cfg, world, [Path(name) for name in names], options, alive.mark)
    ranks.stop()
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """What the command line asks for; `overrides` are keys of the config. Raises: Refusal."""
    parser = Options("eval.py", __doc__, add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompt", dest="prompts", action="append", type=utf8, default=[])
    parser.add_argument("--prompts", action="extend", type=listed)
    parser.add_argument("--draw-only", action="store_true")
    for name in ("vae", "steps", "guidance", "seed"):
        key = f"--pictures.{name}={{}}"
        parser.add_argument(f"--{name}", dest="overrides", action="append", type=key.format, default=[])
    options, rest = parser.parse_known_args(argv)
    path, overrides = config_file.config_and_overrides(rest, default="runs/tiny")
    options.path = Path(path)
    options.overrides = [*overrides, *options.overrides]
    return options


def utf8(prompt: str) -> str:
    """A prompt as it was typed. Raises: ValueError for bytes of another encoding, which Python keeps as surrogates."""
    prompt.encode()
    return prompt


def listed(path: str) -> list[str]:
    """The lines of a file that hold text. Raises: Refusal."""
    lines = read_text(Path(path)).split("\n")
    return [line.strip() for line in lines if line.strip()]


def evaluate(cfg: Config, world: World, paths: list[Path], options: argparse.Namespace, at: Say) -> None:
    """Measure and draw with each set of weights, and print a record of it. Collective. Raises: Refusal.

    at: called with the name of what this rank does.
    """
    with ranks.agreed():
        # A wrong file is named before the data set is opened.
        if paths[0].exists():  # else training has deleted it; see below
            weights.open_source(paths[0], cfg.model, options.ema)
        val_set = None
        if not (options.draw_only and options.prompts):
            if not cfg.data.val:
                raise Refusal("data.val is empty; give --data.val=DIR, or --prompt=TEXT with --draw-only")
            val_set = ValSet(cfg, world.rank, world.size, world.pin)
            val_set.open()
    artist = None
    if options.draw_only or options.prompts or cfg.pictures.count:
        artist = artist_of(cfg, world, val_set, options, at)
    recipe = PrecisionRecipe(cfg)
    steps = Validator(sharding.build(cfg, world, None, recipe), cfg, world)
    for path in paths:
        try:
            with ranks.agreed():
                source = weights.open_source(path, cfg.model, options.ema)
                weights.load(steps.net, source)
        except Refusal as refusal:
            if not (newer := newest_if_deleted(path, options.path)):
                raise
            cli.notice(f"{refusal}; the newest is {newer}")
            if newer not in paths:
                paths.append(newer)  # read by this loop
            continue
        said = {key: str(source.info[key]) for key in ("samples", EMA) if key in source.info}
        for key, value in said.items():
            if not re.fullmatch(r"\d{1,18}", value, re.ASCII):
                raise Refusal(f"{path}: {key}={shown(value)} in its metadata is no number of samples; export it again")
        known = {key: int(value) for key, value in said.items()}
        record = {"weights": str(path), "name": source.info.get("name"), "samples": None, **known}
        samples = known.get("samples", 0)
        recipe.begin(samples // cfg.train.global_batch)  # computes as the run at that time
        if val_set and not options.draw_only:
            result = validation_loss(steps, val_set, samples, at)
            record |= vars(result) | {"noise": cfg.eval.noise}
            if cfg.eval.noise == "fresh" and not known:
                record["note"] = "noise of evaluation 0, as samples are not known; compare with --eval.noise=fixed"
        if artist:
            place = unused_path(options, path)
            if pictures := artist.paint(steps.net, at):  # on rank 0
                artist.save(pictures, place)
            record["pictures"] = str(place)
        if world.rank == 0:
            print(json.dumps(record) if options.json else text(record))


def newest_if_deleted(path: Path, given: Path) -> Path | None:
    """The newest checkpoint of the run that a user gave, if training has deleted the one at `path`. Collective."""
    with ranks.agreed():
        newest = None if path.exists() or path == given else weights.find(given)
    found = ranks.gather_objects(newest and str(newest))[0]
    return Path(found) if found else None


def artist_of(cfg: Config, world: World, val_set: ValSet | None, options: argparse.Namespace, at: Say) -> Any:
    """Who draws the prompts, or else captions of the validation set. Collective. Raises: Refusal.

    The encoders lie in the folder of the autoencoder, or else of the model.
    """
    from flux_ref.pictures.artist import Artist

    home = Path(cfg.pictures.vae or options.path)
    if not home.is_dir():
        home = home.parent
    artist = Artist(cfg, world, Path(cfg.pictures.vae or home))
    with ranks.agreed():
        if options.prompts:
            artist.take_prompts(options.prompts, home, at)
        elif val_set:
            artist.take_stored(val_set.shards)
        if not artist.captions:
            raise Refusal("--draw-only has nothing to draw; give --prompt=TEXT or set pictures.count above 0")
    return artist


def unused_path(options: argparse.Namespace, path: Path) -> Path:
    """The first free name for pictures of the weights at a path."""
    folder = options.path / "samples" if (options.path / "config.toml").is_file() else Path.cwd()
    mark = "_ema" if options.ema else ""
    names = (f"eval_{path.stem}{mark}_{number}.png" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def text(record: dict[str, Any]) -> str:
    """A record for people: a line for each thing that is known."""
    lines = []
    for name, value in record.items():
        values = value if isinstance(value, list) else [value]
        shown = [f"{one:.4f}" if isinstance(one, float) else str(one) for one in values]
        lines.append(f"{name:<22} {' '.join(shown)}")
    return "\n".join(map(printable, lines))


if __name__ == "__main__":
    cli.exit_now(cli.run("eval.py", main, sys.argv[1:]))
