"""Making data sets and looking after them.   python -m tools.prepare COMMAND --help"""

import importlib

from flux_ref import errors
from flux_ref.errors import Options

COMMANDS = {  # the file of each is imported when it is called, as the packages that it needs may be missing
    "shapes": "captioned drawings with stand-in encoders, for the CPU",
    "mlcommons": "the benchmark's preprocessed arrow folders to shards",
    "encoders": "random encoders and captioned drawings, to try images without a download",
    "images": "pictures and captions to shards, through the real encoders",
    "verify": "check a data set before a job relies on it",
}


def main(argv: list[str]) -> int:
    return errors.run("prepare", run, argv)


def run(argv: list[str]) -> int:
    parser = Options("python -m tools.prepare", "Make and look after data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, description=text, help=text)
        if argv[:1] == [name]:
            module = importlib.import_module(f"tools.prepare.{name}")
            module.add_arguments(command)
    args = parser.parse_args(argv)
    return module.run(args)
