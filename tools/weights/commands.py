"""A model's weights in the forms in which people keep them, read and written a few rows at a time.

    python -m tools.weights export runs/tiny tiny.safetensors               BFL's layout, fp32
    python -m tools.weights export RUN OUT --format=diffusers --dtype=bf16  a folder for diffusers
    python -m tools.weights export RUN OUT --ema                            the average of the weights (optim.ema)
    python -m tools.weights import flux1-schnell.safetensors OUT            a checkpoint
    python -m tools.weights inspect PATH [--verify]

A source is a run (its newest checkpoint, or --checkpoint=STEP), a checkpoint, a safetensors file in BFL's layout or
diffusers' transformer folder. --config=FILE gives the sizes of the model. Without it, a run and a checkpoint know the
sizes; other weights have FLUX.1-schnell's.
"""

import argparse
from pathlib import Path

from flux_ref.run import weight_files
from flux_ref.run.attempt import attempt
from flux_ref.run.options import STEP, Options
from tools.weights.exports import SAFETENSORS_NAMES, export, import_, inspect


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Options("python -m tools.weights", __doc__)
    parser.set_defaults(ema=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("export", "import", "inspect"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("--checkpoint", type=STEP, metavar="STEP", help="of a run; default: the newest")
        command.add_argument("--config", help="a config with the sizes of the model")
        if name != "inspect":
            command.add_argument("out", type=Path)
        else:
            command.add_argument("--verify", action="store_true", help="read everything")
        if name == "export":
            command.add_argument("--format", choices=("bfl", "diffusers"), default="bfl")
            command.add_argument("--ema", action="store_true", help="the average of the weights")
            command.add_argument("--dtype", choices=tuple(SAFETENSORS_NAMES), default="fp32")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    path = weight_files.find(args.source, args.checkpoint)
    cfg = weight_files.config_of(path, args.config)
    source = weight_files.open_source(path, cfg.model, args.ema)
    if args.command == "inspect":
        print(inspect(source, cfg.model, args.verify))
        return 0
    if args.command == "export":
        export(source, cfg.model, args.out, args.format, args.dtype)
    else:
        import_(source, cfg, args.out)
    print(f"{args.out}: written from {path}{', the average of its weights' if args.ema else ''}")
    return 0


def main(argv: list[str]) -> int:
    return attempt("weights", lambda: run(parse(argv)))
