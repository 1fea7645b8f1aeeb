"""What each matrix product of a net loses in the formats of each preset, and which products break a batch.

    python -m tools.census RUN_OR_CHECKPOINT [--preset=NAME] [--samples=16] [--json=FILE.json] [--section.key=value]
    python -m tools.census RUN_OR_CHECKPOINT --blame [--preset=NAME] [--bound=0.5]

Both sides of each product come from one step in bf16 on samples that the run trains on next. A line of the table is
the worst block of a class of layers. The table shows the product's error relative to fp32 under each preset. With
--preset it shows also, for the left / right side, the shares of values that become zero and that overflow, and
magnitudes. A dash stands for a product that stays in bf16. FILE.json gets all products. FILE.svg beside it has a row
for each preset, class of layers and product, and a column for each block, double blocks first. Delayed scales are
unknown here, so fp8 stands for fp8_delayed, too.
--blame finds a small set of products whose return to bf16 mends the samples, under a preset or the run's own precision.
None of the set can be left out; another set may mend the samples, too. Samples go wrong if loss or gradient is not
finite, or if the gradient's error relative to bf16 is above --bound. Without --bound only what is not finite is wrong.
Exit codes: 0 done, 2 refused.
"""

import math
from pathlib import Path

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats.files import write_whole
from flux_ref.run import weight_files
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options, between
from flux_ref.speed import policy
from tools.census import products
from tools.shared import json_option

ALL = [name for name in policy.PRESETS if name not in ("bf16", "fp8_delayed")]
ANY = 1e9  # a bound that only a gradient which is not finite exceeds
CELL, LEFT, DECADES = 14, 330, 2  # pixels of a cell and of the names beside cells; of errors, from dark to light
BARE = {"precision__rules": [], "precision__switch": [], "precision__gather": False}  # keys that a preset replaces


def rows_of(records: list[dict], doubles: int) -> dict[tuple[str, str, str], dict[int, dict]]:
    """Records by preset, class of layers and product, then by block."""
    rows = {}
    for record in records:
        kind, block, part = record["layer"].split(".", 2)
        names = (record["preset"], f"{kind}.{part}", record["product"])
        rows.setdefault(names, {})[int(block) + doubles * (kind == "single")] = record
    return dict(sorted(rows.items()))


def table(rows: dict) -> str:
    """The worst blocks: of several presets their errors, of one preset what happens to its sides, too."""
    worst = {names: max(row.values(), key=lambda record: record["error"]) for names, row in rows.items()}
    presets = list(dict.fromkeys(preset for preset, *_ in worst))
    if len(presets) > 1:
        lines = [["layers", "product", *presets]]
        for part in sorted({names[1:] for names in worst}):
            found = [worst.get((preset, *part)) for preset in presets]
            lines.append([*part, *(f"{one['error']:.2g}" if one else "-" for one in found)])
    else:
        lines = [["preset", "layers", "product", "block", "error", *products.FACTS]]
        for names, one in worst.items():
            line = [*names, one["layer"].split(".")[1], f"{one['error']:.2g}"]
            for fact in products.FACTS:
                line.append(f"{one[f'left_{fact}']:.2g} / {one[f'right_{fact}']:.2g}")
            lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)) for line in lines)


def loses_most(records: list[dict]) -> str:
    """A sentence about the largest error."""
    one = max(records, key=lambda record: record["error"])
    where = f"{one['product']} of {one['layer']} under {one['preset']}"
    return f"the product that loses most: {where}, error {one['error']:.2g} relative to fp32; -: stays in bf16"


def picture(rows: dict) -> str:
    """SVG: a row for each of the rows, a column for each block."""
    cells = []
    for number, (names, row) in enumerate(rows.items(), 1):
        y = CELL * number
        cells.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{" ".join(names)}</text>')
        for block, record in row.items():
            error = record["error"]
            dark = 1 + math.log10(min(max(error, 10**-DECADES), 1)) / DECADES
            colour = f"hsl(220 60% {95 - 70 * dark:.0f}%)" if error < math.inf else "red"
            cell = f'<rect x="{LEFT + CELL * block}" y="{y}" width="{CELL}" height="{CELL}" fill="{colour}">'
            cells.append(f"{cell}<title>{record['layer']} {record['product']}: {error:.3g}</title></rect>")
    legend = f'<text x="{LEFT}" y="11">error by block, from 1 (dark) to 1e-{DECADES} (light); red is not finite</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1200" height="{CELL * (len(rows) + 1)}" font-size="11">'
    return "\n".join([head, legend, *cells, "</svg>\n"])


def stage_of(cfg: Config, samples: int, step: int) -> policy.Stage:
    """What a run computes with at a step. Raises: Refusal if blocks do not fit the tokens of so many samples."""
    try:
        policy.require_rows(cfg, samples)
        stages = policy.stages(cfg)
    except Refusal as refusal:
        raise Refusal(f"--samples={samples}: {refusal}") from None
    return [stage for stage in stages if stage.first <= step][-1]


def run(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.census", __doc__)
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--preset", choices=[name for name, rules in policy.PRESETS.items() if rules])
    parser.add_argument("--samples", type=between(1, 2**16), default=16, metavar="N")
    parser.add_argument("--blame", action="store_true")
    parser.add_argument("--bound", type=between(0, ANY, float), default=ANY, metavar="ERROR")
    json_option.json_option(parser)
    args, overrides = parser.parse_known_args(argv)
    if args.bound < ANY and not args.blame:
        raise Refusal(f"--bound={args.bound} is for --blame; give both or none")
    path = weight_files.find(args.path)
    cfg = config_file.override(weight_files.config_of(path, None), [*overrides, "--parallel.dtype=bf16"])
    source = weight_files.open_source(path, cfg.model)
    configs = {preset: config_file.replace(cfg, precision__preset=preset, **BARE) for preset in ALL}
    if args.preset:
        configs = {args.preset: config_file.replace(cfg, precision__preset=args.preset, **BARE)}
    elif args.blame:
        configs = {"own": cfg}
    stages = {}
    misfits = {}
    for name, own in configs.items():
        try:
            stages[name] = stage_of(own, args.samples, int(source.info.get("step", 0)))
        except Refusal as refusal:
            misfits[name] = str(refusal)
    if not stages:
        raise Refusal("; ".join(misfits.values()))
    if args.blame and not policy.is_low(stages[name]):
        raise Refusal(f"{source.where} casts no product; give --preset=NAME")
    net, batch = products.prepared(source, cfg, args.samples)
    sides = products.sides(net, batch)
    records = []
    for preset, stage in stages.items():
        records += products.census(sides, stage.pairs, cfg.train.seed, preset)
    del sides  # before a search needs memory for gradients
    if args.blame:
        bad, evaluations = products.blame(net, batch, own, stage.pairs, records, args.bound)
        print_rules(bad, evaluations, len(records), args.json)
        return 0
    rows = rows_of(records, cfg.model.double_blocks)
    lines = [f"{path}, {args.samples} samples", table(rows)]
    lines += [f"{name} does not fit: {why}" for name, why in misfits.items()]
    if args.json not in (None, json_option.STDOUT):
        drawing = args.json.with_suffix(".svg")
        write_whole(drawing, picture(rows))
        lines.append(f"{args.json} holds every product; {drawing} shows the errors by block")
    lines.append(loses_most(records))
    json_option.show("\n".join(lines), {"products": records, "misfits": misfits}, args.json)
    return 0


def print_rules(bad: list[dict], evaluations: int, count: int, to: Path | None) -> None:
    """The rules that keep culprits in bf16. count: of all products. to: the value of --json."""
    lines = [f"{len(bad)} of {count} products return to bf16; evaluations: {evaluations}", "precision.rules = ["]
    for one in bad:
        lines.append(f'  "{one["layer"]} {one["product"]}: bf16 x bf16",  # was {one["cast"]}')
    json_option.show("\n".join([*lines, "]"]), {"products": bad, "evaluations": evaluations}, to)


def main(argv: list[str]) -> int:
    return attempt("census", lambda: run(argv))
