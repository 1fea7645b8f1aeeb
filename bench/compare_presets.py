"""Losses of every preset of precision beside bf16, from runs in pairs, as one table.

    python -m bench.compare_presets --out=runs/presets [--max-samples=N] [--seeds=3] [--section.key=value ...]
    python -m bench.compare_presets --out=runs/rates --key=optim.lr --values=3e-3,1e-3

Trains --config (configs/tiny.toml, with BASE) once for each value of a key and each seed. The first value is the one
that the others are compared with. The same command goes on after a stop and trains only what is missing; a value more
costs its own runs only. FOLDER/table.md and FOLDER/table.json are written again after each value. --max-samples
trains less and evaluates five times. A run that fails, as by diverging, has its reason in the table.
Exit codes: 0 the table is whole, 2 refused, 130 Ctrl-C.
"""

import argparse
import sys
from pathlib import Path

from bench import common
from flux_ref import config_file
from flux_ref.compare.commands import compare, train
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats.files import write_whole
from flux_ref.run import cli, json_option
from flux_ref.run.options import Options, between, listed
from flux_ref.speed.policy import PRESETS

BASE = (  # blocks of 16 and 32 need 16 text tokens; no pictures, whose time is not training's
    *("--model.text_tokens=16", "--parallel.dtype=bf16", "--eval.target=0", "--eval.permuted_captions=false"),
    *("--sample.count=0", "--checkpoint.keep=1"),
)
EVALUATIONS = 5  # with --max-samples


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and overrides for every run. Raises: Refusal."""
    parser = Options("python -m bench.compare_presets", __doc__)
    parser.add_argument("--config", default="configs/tiny.toml")
    parser.add_argument("--out", type=Path, default=Path("runs/presets"))
    parser.add_argument("--key", default="precision.preset")
    parser.add_argument("--values", type=listed(), default=list(PRESETS))
    parser.add_argument("--seeds", type=between(1, 1000), default=3)
    parser.add_argument("--ranks", type=between(1, 1024), default=1)
    parser.add_argument("--max-samples", type=between(1, 2**40))
    args, overrides = parser.parse_known_args(argv)
    if len(args.values) < 2 or len(set(args.values)) < len(args.values):
        raise Refusal(f"--values={','.join(args.values)}: give two different values or more, the usual one first")
    if any("/" in value for value in args.values):
        raise Refusal(f"--values={','.join(args.values)}: a value names a folder, so it holds no slash")
    return args, overrides


def configs(args: argparse.Namespace, overrides: list[str]) -> dict[str, Config]:
    """The config of each value. Raises: Refusal."""
    data = [f"--data.{part}={args.out}/data/{part}" for part in ("train", "val")]
    less = [f"--train.max_samples={args.max_samples}"] if args.max_samples else []
    less += [f"--eval.every_samples={-(-args.max_samples // EVALUATIONS)}"] if args.max_samples else []
    own = [*BASE, *data, *less, *overrides]
    return {value: config_file.load(args.config, [*own, f"--{args.key}={value}"]) for value in args.values}


def row(value: str, found: dict[str, dict], points: list[int], own: str) -> list[str]:
    """The cells of a value that has been compared. own: the side, "a" or "b", that the value is."""
    losses, rate = found["validation"], found["samples/s"]["median"]
    cells = [value, f"{losses[points[-1]][own]:.4f}"]
    if own == "a":
        return [*cells, *("0" for _ in points), "0", "1", "the others are compared with it"]
    cells += [*(signed(losses[point]) for point in points), signed(found["training"][points[-1]])]
    last = losses[points[-1]]
    seeds = f"; about {last['seeds']:,} seeds would show it" if last["seeds"] else ""
    sense = "no verdict from one seed" if last["p"] is None else f"not distinguishable{seeds}"
    if last["p"] is not None and last["p"] < 0.05:
        sense = f"{'worse' if last['b - a'] > 0 else 'better'}, p = {last['p']:.2g}"
    return [*cells, f"{rate['b'] / rate['a']:.3f}", sense]


def signed(figure: dict) -> str:
    """A difference with its standard error."""
    return f"{figure['b - a']:+.3g}" + (f" +- {figure['stderr']:.2g}" if figure["stderr"] is not None else "")


def table(args: argparse.Namespace, found: dict[str, dict], failed: dict[str, str]) -> str:
    """Markdown: a line for each value that has been trained or has failed."""
    usual = args.values[0]
    ends = [end for end in next(iter(found.values()))["validation"] if end] if found else []
    points = sorted({ends[round(i * (len(ends) - 1) / 2)] for i in range(3)}) if ends else []
    heads = [args.key, "validation loss", *(f"less {usual} after {point:,}" for point in points)]
    heads += ["training loss since the last evaluation but one, less " + usual]
    lines = [[*heads, f"samples/s by {usual}", f"verdict, {args.seeds} seeds"]]
    lines += [["---"] * len(lines[0])]
    for value in args.values:
        if value == usual and found:
            lines.append(row(value, next(iter(found.values())), points, "a"))
        elif value in found:
            lines.append(row(value, found[value], points, "b"))
        elif value in failed:
            lines.append([value, *("-" for _ in lines[0][2:]), failed[value].replace("|", "/")])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    wanted, found, failed, folders = configs(args, overrides), {}, {}, {}
    args.out.mkdir(parents=True, exist_ok=True)
    for value, cfg in wanted.items():
        print(f"{args.key}={value}", flush=True)
        try:
            (folders[value],) = train({value: cfg}, args.seeds, args.out, args.ranks)
        except (SystemExit, Refusal) as error:
            if value == args.values[0]:
                raise Refusal(f"nothing can be compared with {value}: {error}") from None
            failed[value] = str(error)
        else:
            if value != args.values[0]:
                found[value], _ = compare(folders[args.values[0]], folders[value])
        text = table(args, found, failed)
        write_whole(args.out / "table.md", text)
        report = common.head("bench.compare_presets", argv) | {"found": found, "failed": failed}
        json_option.give(report, args.out / "table.json")
    print(text, end="")
    return 0


if __name__ == "__main__":
    cli.leave(cli.run("bench.compare_presets", __doc__, main, sys.argv[1:]))
