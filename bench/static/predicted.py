"""What committed counts say that a report of the sweep should measure. Nothing is compiled or run for it.

A part's time is affine in the rows of a micro-batch: kernels and products grow with the rows, weights do not. So two
counted micro-batches give the time at any other. A region of several blocks is taken for as many regions of one block.
"""

ADAMW_BYTES = 4 + 16 + 12  # per parameter: the norm reads the gradient; AdamW reads g, w, m, v and writes w, m, v
# Per weight on one rank, where FSDP2 gathers nothing: it casts the shard and copies it into the gathered weight.
GATHER_BYTES = (4 + 2) + (2 + 2)
REDUCE_BYTES = (2 + 4) + (4 + 4)  # it copies gradients into the input of a reduction, and this input to its output
KINDS = ("products", "attention", "kernels")  # of time
CLASSES = {"gemm": "products", "attention": "attention", "elementwise": "kernels"}  # of bench.kernels


class Counts:
    """The runs of a file of bench.static. Times are milliseconds, by the file's roofline; None: nothing like it."""

    def __init__(self, counted: dict):
        self.runs, self.rates = counted["runs"], counted["rates"]

    def blocks(self, arch: str, keys: dict, rows: int, kinds: tuple[str, ...] = KINDS, ends: int = 1) -> float | None:
        """Forward and backward of a net of one micro-batch, without FSDP2.

        keys: a config, flat. ends: 0 leaves out embedders, head and loss.
        """
        preset, compiles = keys["precision.preset"], keys["parallel.compile"]
        wanted = {
            "arch": arch,
            "precision": keys["parallel.dtype"] if preset == "bf16" else preset,
            "budget": keys["parallel.activation_budget"] if compiles else 1.0,
            "compile": compiles,
        }
        times = {"double": keys["model.double_blocks"], "single": keys["model.single_blocks"], "ends": ends}
        known = {}
        for run in self.runs:
            if wanted.items() <= run.items():
                known[run["micro_batch"]] = sum(count * _ms(run["parts"][part], kinds) for part, count in times.items())
        nearest = sorted(known, key=lambda count: abs(count - rows))[:2]
        if rows in known or len(nearest) < 2:
            return known.get(rows)
        one, other = nearest
        return known[one] + (known[other] - known[one]) / (other - one) * (rows - one)

    def moved(self, arch: str, size: float) -> float:
        """So many bytes, read or written."""
        return size / self.rates[arch]["memory_tb_s"] / 1e9

    def step(self, report: dict) -> float | None:
        """A step of bench.step on one rank."""
        keys, arch, weights = report["config"], report["arch"], report["parameters"]
        rows = keys["train.micro_batch"] or keys["train.global_batch"]
        blocks = self.blocks(arch, keys, rows)
        if blocks is None or report["ranks"] > 1:
            return None
        copies = GATHER_BYTES * (1 + keys["parallel.reshard_after_forward"]) + REDUCE_BYTES
        micro = blocks + self.moved(arch, copies * weights)
        return keys["train.global_batch"] // rows * micro + self.moved(arch, ADAMW_BYTES * weights)

    def classes(self, report: dict) -> dict[str, float]:
        """Those classes of bench.kernels that are counted, in the blocks and ends of a step of bench.step."""
        keys = report["config"]
        rows = keys["train.micro_batch"] or keys["train.global_batch"]
        micros = keys["train.global_batch"] // rows
        found = {name: self.blocks(report["arch"], keys, rows, (kind,)) for name, kind in CLASSES.items()}
        return {name: micros * ms for name, ms in found.items() if ms is not None}

    def whole(self, report: dict, rows: int) -> float | None:
        """A step of bench.whole of so many rows."""
        blocks, shards = self.blocks(report["arch"], report["config"], rows), report["optimizer"].get("parameters")
        if blocks is None or shards is None:
            return None
        return blocks + self.moved(report["arch"], ADAMW_BYTES * shards)

    def products(self, report: dict, rows: int, in_fp8: bool) -> float | None:
        """The matrix products of bench.ceiling, of so many rows."""
        preset = "fp8" if in_fp8 else "bf16"
        own = {"precision.preset": preset, "parallel.compile": True, "parallel.activation_budget": 1.0}
        return self.blocks(report["arch"], report["config"] | own, rows, ("products",), ends=0)


def _ms(passes: dict[str, dict], kinds: tuple[str, ...]) -> float:
    """Of a part, forward and backward together."""
    return sum(one["ms_of"][kind] for one in passes.values() for kind in kinds)
