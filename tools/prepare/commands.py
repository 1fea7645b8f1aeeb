"""Making data sets and looking after them.   python -m tools.prepare COMMAND --help"""

from flux_ref import cli
from flux_ref.cli import Options
from tools.prepare import images, mlcommons, shapes, verify

COMMANDS = {
    "shapes": (shapes, "captioned drawings with stand-in encoders, for the CPU"),
    "mlcommons": (mlcommons, "the benchmark's preprocessed arrow folders to shards"),
    "images": (images, "pictures and captions to shards, through the real encoders"),
    "verify": (verify, "check a data set before a job relies on it"),
}


def main(argv: list[str]) -> int:
    return cli.run("prepare", run, argv)


def run(argv: list[str]) -> int:
    parser = Options("python -m tools.prepare", "Make and look after data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, description=text, help=text))
    args = parser.parse_args(argv)
    return COMMANDS[args.command][0].run(args)
