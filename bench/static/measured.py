"""What bench.whole measured on a device, beside what was counted for this device: where is the largest disagreement?"""

from collections.abc import Iterator

from flux_ref.errors import Refusal

# A class of the profile or a figure of bench.whole -> the counted one.
CLASSES = {"gemm": "products", "attention": "attention", "elementwise and copy": "kernels", "optimizer": "optimizer"}


def compare(arch: str, sweep: dict, counted: dict) -> str:
    """A table of milliseconds per class, and the class that misses its count by most milliseconds.

    sweep: the report of bench.sweep, whose variants of bench.whole were profiled. counted: that of bench.static.
    Raises: Refusal if no profiled run has a count.
    """
    counts = {
        (run["precision"], run["budget"], run["micro_batch"]): run
        for run in counted["runs"]
        if run["arch"] == arch and run["compile"]
    }
    lines, missed = [], {}
    for name, rows, precision, budget, found in _profiled(sweep):
        run = counts.get((precision, budget, rows))
        if run is None:
            continue
        title, expected = f"{name}, micro-batch {rows}", _counted(run)
        lines += [f"{title} ({precision}; counted with activation budget {run['budget']})"]
        lines += [f"  {'class':<22}{'measured ms':>12}{'counted ms':>12}{'ratio':>8}"]
        for kind, ms in found.items():
            want = expected.get(CLASSES.get(kind, kind))
            lines.append(f"  {kind:<22}{ms:>12.2f}" + (f"{want:>12.2f}{ms / want:>8.2f}" if want else ""))
            if want:
                missed[f"{kind} of {title}"] = ms - want
    if not missed:
        raise Refusal(f"no profiled run of bench.whole has a count for {arch}; count its micro-batch and preset, too")
    worst = max(missed, key=lambda name: abs(missed[name]))
    return "\n".join([*lines, f"largest disagreement: {worst}, {missed[worst]:+.2f} ms"])


def _profiled(sweep: dict) -> Iterator[tuple[str, int, str, float, dict[str, float]]]:
    """Name of the variant, micro-batch, precision, activation budget and milliseconds by class of each profiled run."""
    for variant in sweep["runs"]:
        keys = variant.get("report", {}).get("config", {})
        for run in variant.get("report", {}).get("runs", ()):
            if "kernels" not in run:
                continue
            ms = {kind: one["ms"] for kind, one in run["kernels"]["classes"].items()}
            ms["elementwise and copy"] = ms.pop("elementwise") + ms.pop("copy")
            ms |= {"optimizer": run.get("optimizer", 0.0), "idle": run["kernels"]["idle"]["ms"]}
            preset = keys["precision.preset"]
            precision = keys["parallel.dtype"] if preset == "bf16" else preset
            spent = {kind: one for kind, one in ms.items() if one}
            yield variant["name"], run["micro_batch"], precision, keys["parallel.activation_budget"], spent


def _counted(run: dict) -> dict[str, float]:
    """Milliseconds by class of a whole step; FSDP2's copies apart, which bench.whole does not make."""
    total = {"products": 0.0, "attention": 0.0, "kernels": 0.0}
    for part, passes in run["parts"].items():
        for figures in passes.values() if part not in ("fsdp", "optimizer") else ():
            for kind, ms in figures["ms_of"].items():
                total[kind] += run["times"].get(part, 1) * ms
    return total | {"optimizer": run["parts"]["optimizer"]["step"]["ms"]}
