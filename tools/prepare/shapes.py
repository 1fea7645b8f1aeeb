"""The toy data set of captioned drawings, as data.kind=toy makes it on first use."""

import argparse
from pathlib import Path

from flux_ref import config_file, toy
from tools.prepare import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--config", default="configs/tiny.toml", help="use this config's sizes (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal."""
    cfg = config_file.load(args.config)
    job.require_new(args.out)
    toy.make_once(args.out, lambda: toy.make_shapes(args.out, cfg))
    print(f"{args.out}: {cfg.data.train_samples} training and {cfg.data.val_samples} validation samples")
    return 0
