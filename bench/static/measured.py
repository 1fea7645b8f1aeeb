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
    counts = {(run["precision"], run["micro_batch"]): run for run in counted["runs"] if run["arch"] == arch}
    if len({run["budget"] for run in counts.values()}) > 1 or not all("times" in run for run in counts.values()):
        raise Refusal("the counts have several activation budgets, or no times of classes; count anew in one call")
    lines, missed = [], {}
    for name, rows, precision, found in _profiled(sweep):
        if (precision, rows) not in counts:
            continue
        run = counts[precision, rows]
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


def _profiled(sweep: dict) -> Iterator[tuple[str, int, str, dict[str, float]]]:
    """Name of the variant, micro-batch, precision and milliseconds by class of every profiled run."""
    for variant in sweep["runs"]:
        for run in variant.get("report", {}).get("runs", ()):
            if "kernels" not in run:
                continue
            ms = {kind: one["ms"] for kind, one in run["kernels"]["classes"].items()}
            ms["elementwise and copy"] = ms.pop("elementwise") + ms.pop("copy")
            ms |= {"optimizer": run.get("optimizer", 0.0), "idle": run["kernels"]["idle"]["ms"]}
            precision = variant["command"].partition("--precision.preset=")[2].split(" ")[0] or "bf16"
            yield variant["name"], run["micro_batch"], precision, {kind: one for kind, one in ms.items() if one}


def _counted(run: dict) -> dict[str, float]:
    """Milliseconds by class of a whole step; FSDP2's copies apart, which bench.whole does not make."""
    total = {"products": 0.0, "attention": 0.0, "kernels": 0.0}
    for part, passes in run["parts"].items():
        for figures in passes.values() if part not in ("fsdp", "optimizer") else ():
            for kind, ms in figures["ms_of"].items():
                total[kind] += run["times"].get(part, 1) * ms
    return total | {"optimizer": run["parts"]["optimizer"]["step"]["ms"]}
