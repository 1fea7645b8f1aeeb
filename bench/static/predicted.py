"""What committed counts say that a report of the sweep should measure. Nothing is compiled or run for it.

A part's time is affine in the rows of a micro-batch: kernels and products grow with the rows, weights do not. So two
counted micro-batches give the time at any other. A region of several blocks is taken for as many regions of one block.
"""

from bench.static.parts import ADAMW_BYTES

# Per weight on one rank, where FSDP2 gathers nothing: it casts the shard and copies it into the gathered weight.
GATHER_BYTES = (4 + 2) + (2 + 2)
REDUCE_BYTES = (2 + 4) + (4 + 4)  # it copies gradients into the input of a reduction, and this input to its output


class Counts:
    """The runs of a file of bench.static. Times are milliseconds, by the file's roofline; None: nothing like it."""

    def __init__(self, counted: dict):
        self.runs, self.rates = counted["runs"], counted["rates"]

    def parts(self, arch: str, keys: dict, rows: int, kinds: tuple[str, ...] = ()) -> dict[str, float]:
        """Forward and backward of one "double" and one "single" block and of the "ends"; {} if nothing is like it.

        keys: a config, flat. kinds: of time, such as "products"; by default all.
        """
        preset, compiles = keys["precision.preset"], keys["parallel.compile"]
        precision = keys["parallel.dtype"] if preset == "bf16" else preset
        wanted = (arch, precision, keys["parallel.activation_budget"] if compiles else 1.0, compiles)
        alike = [run for run in self.runs if (run["arch"], run["precision"], run["budget"], run["compile"]) == wanted]
        alike.sort(key=lambda run: abs(run["micro_batch"] - rows))
        known = [(run["micro_batch"], _times(run, kinds)) for run in alike[:2]]
        if len(known) == 2:
            return {part: _at(rows, *((count, times[part]) for count, times in known)) for part in known[0][1]}
        return known[0][1] if known and known[0][0] == rows else {}

    def blocks(self, arch: str, keys: dict, rows: int) -> float | None:
        """Forward and backward of a net of one micro-batch, without FSDP2."""
        times = self.parts(arch, keys, rows)
        if not times:
            return None
        in_blocks = keys["model.double_blocks"] * times["double"] + keys["model.single_blocks"] * times["single"]
        return in_blocks + times["ends"]

    def moved(self, arch: str, size: float) -> float:
        """So many bytes, read or written."""
        return size / self.rates[arch]["memory_tb_s"] / 1e9

    def step(self, report: dict) -> float | None:
        """A step of bench.step or bench.kernels on one rank."""
        keys, arch, weights = report["config"], report["arch"], report["parameters"]
        rows = keys["train.micro_batch"] or keys["train.global_batch"]
        blocks = self.blocks(arch, keys, rows)
        if blocks is None or report["ranks"] > 1:
            return None
        copies = GATHER_BYTES * (1 + keys["parallel.reshard_after_forward"]) + REDUCE_BYTES
        micro = blocks + self.moved(arch, copies * weights)
        return keys["train.global_batch"] // rows * micro + self.moved(arch, ADAMW_BYTES * weights)

    def whole(self, report: dict, rows: int) -> float | None:
        """A step of bench.whole of so many rows."""
        blocks, shards = self.blocks(report["arch"], report["config"], rows), report["optimizer"].get("parameters")
        if blocks is None or shards is None:
            return None
        return blocks + self.moved(report["arch"], ADAMW_BYTES * shards)

    def products(self, report: dict, rows: int, in_fp8: bool) -> float | None:
        """The matrix products of bench.ceiling, of so many rows."""
        own = {"precision.preset": "fp8" if in_fp8 else "bf16", "parallel.compile": True}
        keys = report["config"] | own | {"parallel.activation_budget": 1.0}
        times = self.parts(report["arch"], keys, rows, ("products",))
        if not times:
            return None
        return keys["model.double_blocks"] * times["double"] + keys["model.single_blocks"] * times["single"]


def _times(run: dict, kinds: tuple[str, ...]) -> dict[str, float]:
    """Of each part, forward and backward together."""
    found = {}
    for part in ("double", "single", "ends"):
        passes = run["parts"][part].values()
        found[part] = sum(sum(one["ms_of"][kind] for kind in kinds or one["ms_of"]) for one in passes)
    return found


def _at(rows: int, one: tuple[int, float], other: tuple[int, float]) -> float:
    """The value at `rows` of the line through two points (rows, value)."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return one[1] + slope * (rows - one[0])
