"""What a port needs as tables, made from the code at the benchmark's shape.

    python -m flux_ref.tables                 all, as docs/tables.md holds them
    python -m flux_ref.tables NAME            one: parameters, operations, activations, communication, log

Needs no device and allocates no weights.
Exit codes: 0 done, 2 refused.
"""

import json
import re
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

from flux_ref import config_file
from flux_ref.benchmark import communication as closed_forms
from flux_ref.benchmark import flops
from flux_ref.benchmark.facts import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.benchmark.mllog import BenchmarkLog
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import diffusers_names
from flux_ref.model import initialiser, parameter_table
from flux_ref.sharding import DTYPES
from flux_ref.speed import fp8

BENCHMARK = Config(name="schnell_gbs512")  # the defaults are the benchmark's
RANKS, NODE = (8, 64, 512), 8
RULESETS = ("5.1.0", "6.0.0", "6.1.0")
DTYPE, REDUCE = BENCHMARK.parallel.dtype, BENCHMARK.parallel.reduce_dtype
ITEM = DTYPES[DTYPE].itemsize
MB, GB, GFLOP = 1e6, 1e9, 1e9


def markdown(header: str, rows: Iterable[Iterable[object]]) -> str:
    """A table. header: its columns, with | between; a column that starts with > is aligned to the right."""
    columns = [name.strip() for name in header.split("|")]
    lines = [[name.lstrip(">") for name in columns], ["---:" if name[0] == ">" else "---" for name in columns]]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [*lines, *rows])


def parameters() -> str:
    """Every parameter; those of equal blocks in one row."""
    model, decay = BENCHMARK.model, BENCHMARK.optim.weight_decay
    shapes, parts = parameter_table(model), diffusers_names.diffusers_parts(model)
    folded: dict[str, list[str]] = {}
    for name in shapes:
        folded.setdefault(_fold(name), []).append(name)
    rows = []
    for fold, members in folded.items():
        shape = shapes[members[0]]
        assert all(shapes[name] == shape for name in members), fold
        kind, width = initialiser(members[0], shape)
        start = f"{kind} {width:.4g}" if width else kind
        module, _, leaf = fold.replace("*", "0").rpartition(".")
        is_fp8 = leaf == "weight" and fp8.CONVERTED.fullmatch(module) is not None
        size = " x ".join(map(str, shape))
        other = _diffusers(parts[members[0]])
        rows.append([f"`{fold}`", len(members), size, "fp32", start, decay, "yes" if is_fp8 else "no", 0, other])
    total = sum(map(prod, shapes.values()))
    header = "name | >tensors | shape | dtype | start | decay | FP8 | shard axis | in diffusers"
    return f"""{len(shapes)} tensors, {total:,} parameters; * is the number of a block.

dtype: of the master weight, its moments and its gradient on shards; products see it in {DTYPE}, or in
FP8 where asked for. start: normal with this standard deviation, uniform between minus and plus this; a function of
(seed, name, element). A weight is (outputs, inputs); its axis 0 is split over a replica's ranks as torch.chunk does.

{markdown(header, rows)}"""


def _fold(name: str) -> str:
    return re.sub(r"^(double_blocks|single_blocks)\.\d+\.", r"\1.*.", name)


def _diffusers(parts: list[diffusers_names.Part]) -> str:
    found = list(dict.fromkeys(_star(part.name) for part in parts))
    swapped = " (halves exchanged)" if parts[0].first else ""
    return ", ".join(f"`{name}`" for name in found) + swapped


def _star(name: str) -> str:
    return re.sub(r"transformer_blocks\.\d+\.", "transformer_blocks.*.", name)


def operations() -> str:
    """Every operation of the net: what it computes and moves."""
    found = flops.operations(BENCHMARK.model)
    rows = [
        [
            f"{op.part}: {op.name}",
            op.times,
            op.rows,
            *(f"{value / GFLOP:.4g}" for value in (op.forward, op.backward)),
            *(f"{ITEM * value / MB:.4g}" for value in (op.forward_moved, op.backward_moved)),
            *(f"{ITEM * value / MB:.4g}" for value in (op.forward_weights, op.backward_weights)),
        ]
        for op in found
    ]

    def total(field: str, unit: float) -> str:
        return f"{sum(op.times * getattr(op, field) for op in found) / unit:,.1f}"

    fields = ("forward_moved", "backward_moved", "forward_weights", "backward_weights")
    moved = [total(field, MB / ITEM) for field in fields]
    rows.append(["all, times their number", "", "", total("forward", GFLOP), total("backward", GFLOP), *moved])
    header = (
        "operation | >number | >rows | >forward GFLOP | >backward GFLOP | >forward MB | >backward MB"
        " | >forward weights MB | >backward weights MB"
    )
    tflop = flops.per_sample(BENCHMARK.model) / 1e12
    return f"""{tflop:.4g} TFLOP per training sample. GFLOP and MB are per sample and occurrence, MB of weights
per pass whatever its samples. Bytes are those of one kernel per operation, in {DTYPE}: each input read once, each
output written once; flux_ref/flops.py says what is left out.

{markdown(header, rows)}"""


def activations() -> str:
    """What backward reads of forward."""
    found = [op for op in flops.operations(BENCHMARK.model) if op.kept]
    rows = [
        [f"{op.part}: {op.name}", op.keeps, op.times, f"{op.rows} x {op.kept // op.rows}", f"{ITEM * op.kept / MB:.4g}"]
        for op in found
    ]
    for part in dict.fromkeys(op.part for op in found):
        size = sum(ITEM * op.times * op.kept for op in found if op.part == part)
        rows.append([f"all {part}", "", "", "", f"{size / MB:,.1f}"])
    size = sum(ITEM * op.times * op.kept for op in found)
    return f"""{size / GB:.3g} GB per sample of a micro-batch if each operation is one kernel, nothing is kept
twice and nothing is computed again, in {DTYPE}.

torch.compile keeps attention's output once more per block, eager steps also what lies inside of norms;
`python -m flux_ref.plan` counts both, and recomputation.

{markdown("operation | keeps | >number | shape per sample | >MB", rows)}"""


def communication() -> str:
    """What a rank sends in a step."""
    rows = []
    for ranks in RANKS:
        for replicate in (0, 1) if ranks > NODE else (0,):
            replicas = replicate or max(1, ranks // NODE)
            layout = closed_forms.layout(BENCHMARK, parameter_table(BENCHMARK.model), ranks, replicas)
            sent, kept = (
                closed_forms.sent(
                    config_file.replace(BENCHMARK, parallel__reshard_after_forward=again), layout, micros=1
                )
                for again in (True, False)
            )
            figures = (sent["all_gather"], kept["all_gather"], sent["reduce_scatter"], sent["all_reduce"])
            how = f"{layout.replicas} x {layout.shards}"
            padding = sum(unit.padded - unit.whole for unit in layout.units)
            rows.append([ranks, how, f"{padding:,}", *(f"{figure / GB:.2f}" for figure in figures)])
    header = (
        "ranks | replicas x shards | >padding | >all-gather | >all-gather, weights kept | >reduce-scatter"
        " | >all-reduce of replicas"
    )
    gathered, reduced = ITEM, DTYPES[REDUCE].itemsize
    return f"""GB that a rank sends in rings, and receives, per optimizer step of one micro-batch.

n ranks hold a copy together, r copies; m micro-batches; W elements of all parameters with the padding that makes the
n shards of each equal, E those outside of blocks; {gathered} bytes gathered (parallel.dtype={DTYPE}),
{reduced} reduced (parallel.reduce_dtype={REDUCE}; 2 with bf16).

| collective | when | bytes |
| --- | --- | --- |
| all-gather | forward and backward of each region, once outside of them | m * {gathered} * (2 W - E) * (n - 1) / n |
| the same with parallel.reshard_after_forward=false | forward | m * {gathered} * W * (n - 1) / n |
| reduce-scatter | backward of each region, each micro-batch | m * {reduced} * W * (n - 1) / n |
| all-reduce of a shard's copies (HSDP) | backward of the last micro-batch | 2 * {reduced} * W / n * (r - 1) / r |
| all-reduce of the gradient norm | once | one fp32 number |

parallel.replicate=0, one copy per node of {NODE} ranks; beyond one node also parallel.replicate=1:

{markdown(header, rows)}"""


def log() -> str:
    """The benchmark's log: keys in their order, by ruleset."""
    logs = {ruleset: _events(ruleset) for ruleset in RULESETS}
    longest = max(logs.values(), key=len)
    keys = {ruleset: [event["key"] for event in events] for ruleset, events in logs.items()}
    for own in keys.values():  # so one table can show them all
        assert own == [event["key"] for event in longest if event["key"] in own]
    rows = []
    for event in longest:
        extra = ", ".join(name for name in event["metadata"] if name not in ("file", "lineno"))
        value = "" if event["value"] is None else f"`{json.dumps(event['value'])}`"
        marks = ["yes" if event["key"] in keys[ruleset] else "" for ruleset in RULESETS]
        rows.append([f"`{event['key']}`", event["event_type"], value, extra, *marks])
    return f"""The lines of a run in their order; from block_start to eval_stop they repeat. Values are those of
{BENCHMARK.name} on {RANKS[0]} ranks. cache_clear comes with data.evict=true only. A run from a checkpoint adds
`resumed_from_step`, one from given weights `init_weights`, both before init_stop; both end as aborted.
evaluation_frequency is rounded up to whole steps from 6.1.0 on.

{markdown("key | type | value | metadata | " + " | ".join(RULESETS), rows)}"""


def _events(ruleset: str) -> list[dict]:
    """What a run of one evaluation writes."""
    cfg, interval = config_file.replace(BENCHMARK, mllog__ruleset=ruleset), BENCHMARK.eval.every_samples
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result_0.txt"
        written = BenchmarkLog(path)
        written.cache_clear()
        written.init_start()
        written.describe(cfg, RANKS[0], TRAIN_SAMPLES, VAL_SAMPLES)
        written.run_start()
        written.block_start(0)
        written.eval_start(interval)
        written.eval_stop(interval, cfg.eval.target)
        written.run_stop(interval, True, "target reached")
        written.close()
        lines = path.read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


TABLES = {
    "parameters": ("Parameters", parameters),
    "operations": ("Operations and bytes", operations),
    "activations": ("Activations kept for backward", activations),
    "communication": ("Communication", communication),
    "log": ("Keys of the benchmark's log", log),
}


def page(wanted: Iterable[str] = TABLES) -> str:
    """The tables of these names, each under its heading."""
    return "\n\n".join(f"## {TABLES[name][0]}\n\n{TABLES[name][1]()}" for name in wanted) + "\n"


def main(argv: list[str]) -> int:
    unknown = [name for name in argv if name not in TABLES]
    if unknown or len(argv) > 1:
        raise Refusal(
            f"{' '.join(argv)!r} is not one table; give one of {', '.join(TABLES)}, or none for docs/tables.md"
        )
    intro = "# Tables\n\nPrinted by `python -m flux_ref.tables`; a test holds them equal.\n\n"
    print(page(argv) if argv else intro + page(), end="")
    return 0
