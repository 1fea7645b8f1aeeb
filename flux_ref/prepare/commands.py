"""Making data sets and looking after them.   python -m flux_ref.prepare COMMAND --help"""

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal, attempt
from flux_ref.formats import shards, tar_index
from flux_ref.run.progress import progress
from flux_ref.toy.make import make_shapes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--config", default="configs/tiny.toml", help="whose model's sizes to use")
    parser.add_argument("--train", type=int, help="training samples (default: the config's)")
    parser.add_argument("--val", type=int, help="validation samples (default: the config's)")


def run(args: argparse.Namespace) -> int:
    cfg = config_file.load(args.config)
    train = cfg.data.train_count if args.train is None else args.train
    val = cfg.data.val_count if args.val is None else args.val
    if min(train, val) < 1:
        raise Refusal(f"--train={train} and --val={val} must both be at least 1")
    make_shapes(args.out, cfg.model, train, val)
    print(f"{args.out}: {train} training and {val} validation samples")
    return 0


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of *.tar shards")
    parser.add_argument("--config", help="whose model's sizes the samples have (default: FLUX.1-schnell's)")


def run_index(args: argparse.Namespace) -> int:
    """Walk every shard of a folder and keep what was found. Raises: Refusal."""
    layout = shards.layout((config_file.load(args.config) if args.config else Config()).model)
    paths = sorted(args.folder.glob("*.tar"))
    if not paths:
        raise Refusal(f"{args.folder} holds no *.tar shard")
    samples = 0
    for path in progress(paths, unit=" shards", leave=False):
        try:
            places = tar_index.walk(path, layout.payload_bytes)
        except tar_index.NotOurs as error:
            raise Refusal(f"shard {path}: {error}") from None
        tar_index.save(path, places)
        samples += len(places)
    print(f"{args.folder / tar_index.FOLDER}: {samples} samples in {len(paths)} shards")
    return 0


def _module(name: str) -> tuple[Callable, Callable]:
    module = importlib.import_module(f"flux_ref.prepare.{name}")
    return module.add_arguments, module.run


COMMANDS = {  # name: (what it does, its arguments and itself); imported when called, as their packages may be missing
    "shapes": ("captioned drawings with stand-in encoders, for the CPU", lambda: (add_arguments, run)),
    "mlcommons": ("the benchmark's preprocessed arrow folders to shards", lambda: _module("mlcommons")),
    "images": ("pictures and captions to shards, through the real encoders", lambda: _module("images")),
    "verify": ("check a data set before a job relies on it", lambda: _module("verify")),
    "stage": ("copy a data set to every node's own disk", lambda: _module("stage")),
    "index": ("keep where samples lie in shards that other tools wrote", lambda: (add_index_arguments, run_index)),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flux_ref.prepare", description="Make and look after data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, find) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if argv[:1] == [name]:
            arguments, task = find()
            arguments(command)
    args = parser.parse_args(argv)
    return attempt("prepare", lambda: task(args))
