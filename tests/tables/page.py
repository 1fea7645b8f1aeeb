"""docs/tables.md and the sample of a log, made from the code at the benchmark's shape. No weights are allocated.

PYTHONPATH=.:tests/helpers python tests/tables/page.py          write both anew
"""

import re
import tempfile
from collections import Counter
from math import prod
from pathlib import Path

import made_logs

from flux_ref import config_file, weights
from flux_ref.config import KEYS, Config
from flux_ref.model import init_spec, parameter_table
from flux_ref.precision.policy import layers
from tools import flops_and_bytes

BENCHMARK = Config(name="schnell_gbs512")  # the defaults are the benchmark's
SHAPES = parameter_table(BENCHMARK.model)
MESHES = ((1, 8), (8, 8), (1, 64), (64, 8), (1, 512))  # (replicas, shards)
PAGE = Path(__file__).parents[2] / "docs" / "tables.md"
SAMPLE = PAGE.parents[1] / "tests" / "golden" / "result_0.txt"
GB = 1e9
TEXT = """# Tables

`PYTHONPATH=.:tests/helpers python tests/tables/page.py` writes this page, and a test compares it with the code.

## Keys of a config

Each key with its default; `python train.py --help` explains all of them and gives their bounds.

- `free`: you may change this key when you continue a run.
- `rules`, `reference`, `checker`: MLPerf's closed division fixes the default, by its rules
  (mlcommons/training_policies), the reference's code (mlcommons/training) or the log checker (mlperf-logging).

```
{keys}
```

## Parameters

{count} tensors, {elements:,} parameters. Master weights, moments and gradient shards are fp32. Every parameter decays.

- `*` stands for the number of a block. A weight has the shape (outputs, inputs). Each weight has a bias of
  shape (outputs), which starts at 0; its name in diffusers' files is the weight's with `.bias` for `.weight`.
- "normal s" has the standard deviation s; "uniform w" is between -w and w.
- FP8: the presets of [precision](precision.md) may cast this weight.

```
{parameters}
```

In the weight and bias of diffusers' norm_out.linear, shift and scale are swapped.

## Communication

GB that one rank sends per optimizer step of one micro-batch, with ring collectives; it receives as much.
`flops_and_bytes.sent` has the formulas. "kept" means `parallel.kept_regions=-1`, which gathers the weights once a step.

```
{communication}
```

Axis 0 of a parameter is split as torch.chunk does: each rank gets ceil(rows / ranks) rows until none are left. So with
512 shards many ranks hold no row of `final_layer.linear` (64 rows) or of the norm scales (128). A framework that needs
equal shards pads such tensors with zeros or copies them to every rank.
"""


def columns(rows):
    """A table in columns of equal width."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def keys():
    """Every key of a config, as config.py declares it."""
    for key, known in KEYS.items():
        marks = ["free"] * known.resume + [known.closed] * bool(known.closed)
        yield [key, config_file.toml_text(known.default), ", ".join(marks)]


def parameters():
    """Every weight and scale. A row stands for those of one name in all blocks of a kind."""
    yield ["name", "tensors", "shape", "start", "FP8", "in diffusers"]
    parts = weights.parts_from_diffusers(BENCHMARK.model)
    counts = Counter(map(_fold, SHAPES))
    for name, shape in SHAPES.items():
        if re.search(r"blocks\.[1-9]", name) or name.endswith(".bias"):  # equal to block 0's; said above the table
            continue
        kind, width = init_spec(name, shape)
        module, _, leaf = name.rpartition(".")
        is_fp8 = leaf == "weight" and module in layers(BENCHMARK.model)
        theirs = " + ".join(dict.fromkeys(_fold(part.name) for part in parts[name]))
        start = f"{kind} {width:.4g}" if width else kind
        size = " x ".join(map(str, shape))
        yield [_fold(name), counts[_fold(name)], size, start, "yes" if is_fp8 else "no", theirs]


def _fold(name):
    return re.sub(r"(blocks)\.\d+\.", r"\1.*.", name)


def sent():
    """The bytes that a rank sends in a step."""
    yield ["replicas x shards", "all-gather", "kept", "reduce-scatter", "all-reduce"]
    keeping = config_file.replace(BENCHMARK, parallel__kept_regions=-1)
    for replicas, shards in MESHES:
        layouts = [flops_and_bytes.fsdp_layout(cfg, replicas * shards, replicas) for cfg in (BENCHMARK, keeping)]
        plain, kept = map(flops_and_bytes.sent, layouts)
        figures = (plain["all_gather"], kept["all_gather"], plain["reduce_scatter"], plain["all_reduce"])
        yield [f"{replicas} x {shards}", *(f"{figure / GB:.2f}" for figure in figures)]


def page():
    """The tables, each under its heading."""
    return TEXT.format(
        keys=columns(keys()),
        count=len(SHAPES),
        elements=sum(map(prod, SHAPES.values())),
        parameters=columns(parameters()),
        communication=columns(sent()),
    )


def sample():
    """The log of a run of one evaluation, with made-up times and places."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        made_logs.ours(path, BENCHMARK, (BENCHMARK.eval.target,))
        text = path.read_text().replace(str(PAGE.parents[1]), "/app")
    lines = text.splitlines(keepends=True)
    times = range(1_760_000_000_000, 1_770_000_000_000, 1200)
    return "".join(re.sub(r'"time_ms": \d+', f'"time_ms": {time}', line) for time, line in zip(times, lines))


if __name__ == "__main__":
    PAGE.write_text(page())
    SAMPLE.write_text(sample())
