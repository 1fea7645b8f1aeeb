"""Making data sets and looking after them.   python -m tools.prepare COMMAND --help"""

import argparse
import sys
from pathlib import Path

from flux_ref import cli, toy
from flux_ref.cli import Options
from tools.prepare import common, images, mlcommons, verify


def add_shapes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    common.add_config(parser, "configs/tiny.toml")


def make_shapes(args: argparse.Namespace) -> int:
    """The toy data set, as data.kind=toy makes it on first use. Returns the exit code. Raises: Refusal."""
    cfg = args.config
    common.require_new(args.out)
    toy.make_once(args.out, lambda: toy.make_shapes(args.out, cfg))
    print(
        f"{args.out}: {cfg.data.expected_train_samples} training and {cfg.data.expected_val_samples} validation samples"
    )
    return 0


COMMANDS = {  # the function that adds arguments, the command, and its help
    "shapes": (add_shapes_arguments, make_shapes, "captioned drawings with stand-in encoders, for the CPU"),
    "mlcommons": (mlcommons.add_arguments, mlcommons.run, "the benchmark's preprocessed arrow folders to shards"),
    "images": (images.add_arguments, images.run, "pictures and captions to shards, through the real encoders"),
    "verify": (verify.add_arguments, verify.run, "check a data set before a job relies on it"),
}


def main(argv: list[str]) -> int:
    return cli.run("prepare", run, argv)


def run(argv: list[str]) -> int:
    parser = Options("python -m tools.prepare", "Make and look after data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add_arguments, command, text) in COMMANDS.items():
        subparser = commands.add_parser(name, description=text, help=text)
        add_arguments(subparser)
        subparser.set_defaults(run=command)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    cli.exit_now(main(sys.argv[1:]))
