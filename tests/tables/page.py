"""docs/tables.md: tables for ports, made from the code at the benchmark's shape. No weights are allocated.

PYTHONPATH=. python tests/tables/page.py          write the page anew
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

from flux_ref import config_file, weights
from flux_ref.benchmark.closed import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.benchmark.mllog import BenchmarkLog
from flux_ref.config import KEYS, Config
from flux_ref.model import TIME_WAVES, initial, parameter_table
from flux_ref.precision.layers import layers
from tools.shared import communication as closed_forms
from tools.shared import flops

BENCHMARK = Config(name="schnell_gbs512")  # the defaults are the benchmark's
NODE = 8  # ranks
MESHES = ((1, NODE), (8, NODE), (1, 64), (64, NODE), (1, 512))  # (replicas, shards)
RULESETS = ("5.1.0", "6.0.0", "6.1.0")
PAGE = Path(__file__).parents[2] / "docs" / "tables.md"
SAMPLE = PAGE.parents[1] / "tests" / "golden" / "result_0.txt"
DTYPE = BENCHMARK.parallel.dtype
REDUCE = BENCHMARK.parallel.reduce_dtype
ITEM = closed_forms.ITEM_BYTES[DTYPE]
REDUCED_ITEM = closed_forms.ITEM_BYTES[REDUCE]
GB = 1e9
GFLOP = 1e9


def markdown(header: str, rows: Iterable[Iterable[object]]) -> str:
    """A table. header: the names of the columns, with | between; > before a name aligns the column to the right."""
    columns = [name.strip() for name in header.split("|")]
    rules = ["---:" if name.startswith(">") else "---" for name in columns]
    lines = [[name.lstrip(">") for name in columns], rules, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def shapes() -> str:
    """The sizes of FLUX.1-schnell at the benchmark's resolution."""
    m = BENCHMARK.model
    rope = m.rope_axes
    grid = (m.latent_height // 2, m.latent_width // 2)
    latent = " x ".join(map(str, m.latent_shape))
    axes = ", ".join(map(str, rope))
    pairs = ", ".join(str(axis // 2) for axis in rope)
    rows = [
        ["hidden width", m.hidden, f"{m.heads} heads of {m.head_dim} features"],
        ["MLP width", m.mlp_ratio * m.hidden, f"{m.mlp_ratio} times the hidden width"],
        ["blocks", f"{m.double_blocks} double, {m.single_blocks} single", "double blocks come first"],
        ["text", f"{m.text_tokens} x {m.t5_dim}", "tokens x features of T5; all tokens take part, padding too"],
        ["CLIP", m.clip_dim, "features of the pooled vector"],
        ["waves of t", TIME_WAVES, "half of them cosines"],
        ["latent", latent, "channels x rows x columns; the image has 8 times as many pixels"],
        ["image tokens", m.image_tokens, f"a grid of {grid[0]} x {grid[1]} patches of 2 x 2, row by row"],
        ["features of a token", m.packed_channels, "(channel, dy, dx): 4 per channel"],
        ["RoPE axes", axes, "features of a head that turn by 0, by the row and by the column, in this order"],
        ["pairs of RoPE", pairs, f"theta {m.rope_theta}; the first pairs never turn"],
    ]
    return "Sizes of FLUX.1-schnell at 256 x 256 pixels.\n\n" + markdown("what | size | meaning", rows)


def parameters() -> str:
    """Every parameter. A row stands for the parameters of one name in all blocks of a kind."""
    shapes = parameter_table(BENCHMARK.model)
    parts = weights.diffusers_parts(BENCHMARK.model)
    total = sum(map(prod, shapes.values()))
    decay = BENCHMARK.optim.weight_decay
    counts = Counter(map(_fold, shapes))
    rows = []
    for name, shape in shapes.items():
        if re.search(r"blocks\.[1-9]", name):  # is equal to block 0's
            continue
        kind, width = initial(name, shape)
        module, _, leaf = name.rpartition(".")
        is_fp8 = leaf == "weight" and module in layers(BENCHMARK.model)
        theirs = ", ".join(f"`{other}`" for other in dict.fromkeys(_fold(part.name) for part in parts[name]))
        theirs += " (halves exchanged)" if parts[name][0].first else ""
        start = f"{kind} {width:.4g}" if width else kind
        size = " x ".join(map(str, shape))
        rows.append([f"`{_fold(name)}`", counts[_fold(name)], size, start, "yes" if is_fp8 else "no", theirs])
    return f"""{len(shapes)} tensors, {total:,} parameters; * stands for the number of a block.

- Each master weight, its moments and its gradient shards are fp32. Products read the weight in {DTYPE} or FP8.
- Each parameter decays by {decay}. Its axis 0 is split over the ranks of a replica, as torch.chunk does.
- shape: a weight is (outputs, inputs).
- start: "normal s" has the standard deviation s, "uniform w" lies between -w and w. An initial value is a function of
  (seed, name, element).

{markdown("name | >tensors | shape | start | FP8 | in diffusers", rows)}"""


def _fold(name: str) -> str:
    return re.sub(r"(blocks)\.\d+\.", r"\1.*.", name)


def operations() -> str:
    """The arithmetic of every matrix product and attention of the net."""
    rows = []
    for op in flops.operations(BENCHMARK.model):
        figures = [f"{figure / GFLOP:.4g}" for figure in (op.forward, op.backward)]
        rows.append([f"{op.part}: {op.name}", op.times, op.rows, *figures])
    return f"""{flops.per_sample(BENCHMARK.model) / 1e12:.4g} TFLOP per training sample. GFLOP count one sample and one
occurrence of the operation.

{markdown("operation | >number | >rows | >forward GFLOP | >backward GFLOP", rows)}"""


def communication() -> str:
    """The bytes that a rank sends in a step."""
    keeping = config_file.replace(BENCHMARK, parallel__kept_regions=-1)
    rows = []
    for replicas, shards in MESHES:
        layout = closed_forms.layout(BENCHMARK, parameter_table(BENCHMARK.model), replicas * shards, replicas)
        sent, kept = (closed_forms.sent(cfg, layout, micros=1) for cfg in (BENCHMARK, keeping))
        figures = (sent["all_gather"], kept["all_gather"], sent["reduce_scatter"], sent["all_reduce"])
        padding = sum(unit.padded - unit.whole for unit in layout.units)
        mesh = f"{replicas} x {shards}"
        rows.append([replicas * shards, mesh, f"{padding:,}", *(f"{figure / GB:.2f}" for figure in figures)])
    header = (
        "ranks | replicas x shards | >padding | >all-gather | >all-gather, weights kept | >reduce-scatter"
        " | >all-reduce of replicas"
    )
    return f"""GB that a rank sends in rings per optimizer step of one micro-batch. It receives as much.

- n: ranks that hold one copy of the weights together; r: copies; m: micro-batches of a step.
- W: elements of all parameters, with the padding that makes the n shards of each parameter equal.
- E: elements of the parameters outside of blocks, padded in the same way.
- Each element is gathered in {ITEM} bytes (parallel.dtype={DTYPE}) and reduced in {REDUCED_ITEM}
  (parallel.reduce_dtype={REDUCE}; bf16 takes 2).

| collective | when | bytes |
| --- | --- | --- |
| all-gather | forward and backward of each region, once outside of them | m * {ITEM} * (2 W - E) * (n - 1) / n |
| the same with parallel.kept_regions=-1 | forward | m * {ITEM} * W * (n - 1) / n |
| reduce-scatter | backward of each region, each micro-batch | m * {REDUCED_ITEM} * W * (n - 1) / n |
| all-reduce of a shard's copies (HSDP) | backward of the last micro-batch | 2 * {REDUCED_ITEM} * W / n * (r - 1) / r |
| all-reduce of the gradient norm | once | one fp32 number |

{_uneven(512)}

With parallel.replicate=0 each node of {NODE} ranks holds a copy. Beyond one node, the second row shows
parallel.replicate=1.

{markdown(header, rows)}"""


def _uneven(ranks: int) -> str:
    """Which tensors a number of ranks cannot share equally, in words."""
    uneven = {name: shape for name, shape in parameter_table(BENCHMARK.model).items() if shape[0] % ranks}
    number = len(uneven)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in uneven} == {"linear", "query_norm", "key_norm"}
    head = uneven["final_layer.linear.weight"][0]
    scale = BENCHMARK.model.head_dim
    return f"""With {ranks} shards, {number} tensors are uneven: `final_layer.linear.weight` and `.bias` with {head}
rows, and all `query_norm.scale` and `key_norm.scale` with {scale} elements. torch.chunk gives each
rank ceil(rows / ranks) rows until none are left. So ranks 0 to {head - 1} hold one row of the head each.
Ranks 0 to {scale - 1} hold one element of each scale. The other ranks hold none.
A framework that needs equal shards adds zeros to these tensors, or copies them to every rank."""


def log() -> str:
    """The benchmark's log: its keys in their order, by ruleset."""
    logs = {ruleset: events(ruleset) for ruleset in RULESETS}
    keys = {ruleset: [event["key"] for event in events] for ruleset, events in logs.items()}
    newest = keys[RULESETS[-1]]
    first = {key: next(ruleset for ruleset in RULESETS if key in keys[ruleset]) for key in newest}
    rows = []
    for event in logs[RULESETS[-1]]:
        extra = ", ".join(name for name in event["metadata"] if name not in ("file", "lineno"))
        value = "" if event["value"] is None else f"`{json.dumps(event['value'])}`"
        if event["key"] not in KEYS:
            later = "" if first[event["key"]] == RULESETS[0] else first[event["key"]]
            rows.append([f"`{event['key']}`", event["event_type"], value, extra, later])
    for ruleset in RULESETS:  # a ruleset's lines are those that began with it or before it, in their order
        assert [key for key in newest if first[key] <= ruleset] == keys[ruleset]
    own = ", ".join(f"`{key}`" for key in newest if key in KEYS)
    return f"""The lines of a run in their order, with the values of {BENCHMARK.name} on {NODE} ranks.

- The lines from block_start to eval_stop repeat.
- cache_clear is logged only with data.evict=true.
- Before lowest_numerical_precision_in_eval, a POINT_IN_TIME each, come the closed keys of the config that have no
  official name: {own}. No official checker reads these lines.
- A rehearsal adds `rehearsal`.
- What makes a run no timed result adds `disqualified`, with the reason as value. The run then ends as aborted.
- In the open division averaged_validation_loss follows eval_accuracy, with the same value and samples_count.
- From ruleset 6.1.0 on, evaluation_frequency is rounded up to whole steps.

{markdown("key | type | value | metadata | from ruleset", rows)}"""


def sample() -> str:
    """The log of a run of one evaluation, with made-up times and places."""
    lines = []
    for number, event in enumerate(events("6.1.0")):
        event["time_ms"] = 1_760_000_000_000 + 1200 * number
        event["metadata"]["file"] = event["metadata"]["file"].replace(str(PAGE.parents[1]), "/app")
        lines.append(f":::MLLOG {json.dumps(event)}\n")
    return "".join(lines)


def events(ruleset: str) -> list[dict]:
    """The events that a run of one evaluation writes."""
    cfg = config_file.replace(BENCHMARK, mllog__ruleset=ruleset)
    interval = cfg.eval.every_samples
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result_0.txt"
        written = BenchmarkLog()
        written.write_to(path)
        written.cache_clear()
        written.init_start()
        written.describe(cfg, NODE, TRAIN_SAMPLES, VAL_SAMPLES)
        written.run_start()
        written.block_start(0)
        written.eval_start(interval)
        written.eval_stop(interval, cfg.eval.target)
        written.run_stop(interval, True, "target reached")
        return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def keys() -> str:
    """Every key of a config, as config.py declares it."""
    rows = []
    for key, known in KEYS.items():
        default = f"`{config_file.toml_text(known.default)}`"
        rows.append([f"`{key}`", default, "yes" if known.resume else "", known.closed])
    return f"""`python train.py --help` gives the meaning of each key and its bounds.

- free: a run may continue with another value. Of precision.switch the entries that begin later may change.
- closed: what fixes the default in MLPerf's closed division: the rules (mlcommons/training_policies), the code of the
  reference (mlcommons/training), or the checker of logs (mlperf-logging).

{markdown("key | default | free | closed", rows)}"""


TABLES = {
    "Keys of a config": keys,
    "Shapes": shapes,
    "Parameters": parameters,
    "Operations": operations,
    "Communication": communication,
    "Keys of the benchmark's log": log,
}
INTRO = "# Tables\n\n`PYTHONPATH=. python tests/tables/page.py` writes this page. A test keeps it so."


def page() -> str:
    """The tables, each under its heading."""
    parts = [f"## {heading}\n\n{table()}" for heading, table in TABLES.items()]
    return "\n\n".join([INTRO, *parts]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    SAMPLE.write_text(sample())
