"""A model's weights in the forms in which people keep them, read and written a few rows at a time.

    python -m flux_ref.weights export runs/tiny tiny.safetensors               BFL's layout, fp32
    python -m flux_ref.weights export RUN OUT --format=diffusers --dtype=bf16  a folder for diffusers
    python -m flux_ref.weights import flux1-schnell.safetensors OUT            a checkpoint
    python -m flux_ref.weights inspect PATH [--verify]

A source is a run (its newest checkpoint, or --checkpoint=STEP), a checkpoint, a safetensors file in BFL's layout (also
with the prefix model.diffusion_model.) or diffusers' transformer folder. The sizes of the model come from the run or
checkpoint, else from --config=FILE, else they are FLUX.1-schnell's.
"""

import argparse
import sys
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.weights.files import SAFETENSORS_NAMES, config_of, export, find, import_, inspect, open_source


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flux_ref.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("export", "import", "inspect"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("--checkpoint", type=int, metavar="STEP", help="of a run; default: the newest")
        command.add_argument("--config", help="whose model's sizes the weights have")
        if name != "inspect":
            command.add_argument("out", type=Path)
        else:
            command.add_argument("--verify", action="store_true", help="read everything")
        if name == "export":
            command.add_argument("--format", choices=("bfl", "diffusers"), default="bfl")
            command.add_argument("--dtype", choices=tuple(SAFETENSORS_NAMES), default="fp32")
    args = parser.parse_args(argv)
    try:
        return _command(args)
    except (Refusal, OSError) as error:
        print(f"weights: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _command(args: argparse.Namespace) -> int:
    path = find(args.source, args.checkpoint)
    cfg = config_of(path, args.config)
    source = open_source(path, cfg.model)
    if args.command == "inspect":
        print(inspect(source, cfg.model, args.verify))
        return 0
    if args.command == "export":
        export(source, cfg.model, args.out, args.format, args.dtype)
    else:
        import_(source, cfg, args.out)
    print(f"{args.out}: written from {path}")
    return 0
