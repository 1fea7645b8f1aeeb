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
GFLOP = 1e9
TEXT = """# Tables

`PYTHONPATH=.:tests/helpers python tests/tables/page.py` writes this page. A test keeps it so.

## Keys of a config

`python train.py --help` gives the meaning of each key and its bounds.

- free: a run may continue with another value. Of precision.switch the entries that begin later may change.
- closed: what fixes the default in MLPerf's closed division: the rules (mlcommons/training_policies), the code of the
  reference (mlcommons/training), or the checker of logs (mlperf-logging).

{keys}

## Parameters

{count} tensors, {elements:,} parameters; * stands for the number of a block.

- Each master weight, its moments and its gradient shards are fp32. Products read the weight in bf16 or FP8.
- Each parameter decays. Its axis 0 is split over the ranks of a replica, as torch.chunk does.
- shape: a weight is (outputs, inputs).
- start: "normal s" has the standard deviation s, "uniform w" lies between -w and w. An initial value is a function of
  (seed, name, element).

{parameters}

## Operations

{tflop:.4g} TFLOP per training sample. GFLOP count one sample and one occurrence of the operation.

{operations}

## Communication

GB that a rank sends in rings per optimizer step of one micro-batch. It receives as much.

- n: ranks that hold one copy of the weights together; r: copies; m: micro-batches of a step.
- W: elements of all parameters, with the padding that makes the n shards of each parameter equal.
- E: elements of the parameters outside of blocks, padded in the same way.
- g: bytes of compute.dtype. s: bytes of parallel.reduce_dtype. bf16 has 2, fp32 4.

| collective | when | bytes |
| --- | --- | --- |
| all-gather | each forward and backward of a region, once a step outside of them | g * (2 m (W - E) + E) (n - 1) / n |
| the same with parallel.kept_regions=-1 | forward of the first micro-batch | g * W * (n - 1) / n |
| reduce-scatter | backward of each region, each micro-batch | m * s * W * (n - 1) / n |
| all-reduce of a shard's copies (HSDP) | backward of the last micro-batch | 2 * s * W / n * (r - 1) / r |
| all-reduce of the gradient norm | once | one fp32 number |

torch.chunk gives each rank ceil(rows / ranks) rows until none are left. So with 512 shards, many ranks hold nothing of
`final_layer.linear`, which has 64 rows, and of each `query_norm.scale` and `key_norm.scale`, which have 128 elements.
A framework that needs equal shards adds zeros to these tensors, or copies them to every rank.

{communication}
"""


def markdown(header, rows):
    """A table. header: the names of the columns, with | between; > before a name aligns the column to the right."""
    columns = header.split(" | ")
    rules = ["---:" if name.startswith(">") else "---" for name in columns]
    lines = [[name.lstrip(">") for name in columns], rules, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def keys():
    """Every key of a config, as config.py declares it."""
    for key, known in KEYS.items():
        default = config_file.toml_text(known.default)
        yield [f"`{key}`", f"`{default}`", "yes" if known.resume else "", known.closed]


def parameters():
    """Every parameter. A row stands for the parameters of one name in all blocks of a kind."""
    parts = weights.parts_from_diffusers(BENCHMARK.model)
    counts = Counter(map(_fold, SHAPES))
    for name, shape in SHAPES.items():
        if re.search(r"blocks\.[1-9]", name):  # is equal to block 0's
            continue
        kind, width = init_spec(name, shape)
        module, _, leaf = name.rpartition(".")
        is_fp8 = leaf == "weight" and module in layers(BENCHMARK.model)
        theirs = ", ".join(f"`{other}`" for other in dict.fromkeys(_fold(part.name) for part in parts[name]))
        theirs += " (halves exchanged)" if parts[name][0].first else ""
        start = f"{kind} {width:.4g}" if width else kind
        size = " x ".join(map(str, shape))
        yield [f"`{_fold(name)}`", counts[_fold(name)], size, start, "yes" if is_fp8 else "no", theirs]


def _fold(name):
    return re.sub(r"(blocks)\.\d+\.", r"\1.*.", name)


def operations():
    """The arithmetic of every matrix product and attention of the net."""
    for op in flops_and_bytes.operations(BENCHMARK.model):
        figures = [f"{figure / GFLOP:.4g}" for figure in (op.forward, op.backward)]
        yield [f"`{op.name}`", op.times, op.rows, *figures]


def sent():
    """The bytes that a rank sends in a step."""
    keeping = config_file.replace(BENCHMARK, parallel__kept_regions=-1)
    for replicas, shards in MESHES:
        layout = flops_and_bytes.fsdp_layout(BENCHMARK, replicas * shards, replicas)
        plain, kept = (flops_and_bytes.sent(cfg, layout) for cfg in (BENCHMARK, keeping))
        figures = (plain["all_gather"], kept["all_gather"], plain["reduce_scatter"], plain["all_reduce"])
        yield [f"{replicas} x {shards}", *(f"{figure / GB:.2f}" for figure in figures)]


def page():
    """The tables, each under its heading."""
    header = "replicas x shards | >all-gather | >all-gather, weights kept | >reduce-scatter | >all-reduce of replicas"
    return TEXT.format(
        keys=markdown("key | default | free | closed", keys()),
        count=len(SHAPES),
        elements=sum(map(prod, SHAPES.values())),
        parameters=markdown("name | >tensors | shape | start | FP8 | in diffusers", parameters()),
        tflop=flops_and_bytes.per_sample(BENCHMARK.model) / 1e12,
        operations=markdown("operation | >number | >rows | >forward GFLOP | >backward GFLOP", operations()),
        communication=markdown(header, sent()),
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
