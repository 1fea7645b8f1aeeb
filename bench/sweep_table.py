"""The table of a sweep: what each variant measured, beside what was predicted."""

from bench.static.predicted import Counts

COLUMNS = {"samples/s": ".2f", "ms": ".2f", "predicted": ".2f", "TFLOP/s": ".4g", "of ceiling": ".1%", "GB": ".1f"}
Row = tuple[str, tuple, str]  # name, values of COLUMNS or None, a note


def rows(record: dict, counts: Counts) -> list[Row]:
    """The lines of a record in the table."""
    if "report" not in record:
        return [(record["name"], (), f"{record['status']}: {record['line']}")]
    return ROWS[record["module"]](record["name"], record["report"], counts)


def step_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    tflop, times = report["tflop"], (report["step_ms"]["median"], counts.step(report))
    values = (report["samples_per_s"], *times, tflop["per_s_per_rank"], tflop["share_of_ceiling"])
    return [(name, (*values, report["peak_memory_gb"]), f"ceiling: best square; {report['left_out']}")]


def whole_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    lines = []
    for part in report["runs"]:
        note = part.get("failed") or report["optimizer"].get("failed") or f"without {report['left_out']}"
        note += f"; {kernel_shares(part['kernels'])}" if "kernels" in part else ""
        lines.append(
            (f"{name}, batch {part['micro_batch']}", values_of(part, counts.whole(report, part["micro_batch"])), note)
        )
    for part in report["evaluation"]:
        lines.append((f"{name}, validation {part['batch']}", values_of(part, None), part.get("failed", "")))
    return lines


def values_of(part: dict, predicted: float | None) -> tuple:
    """The values of COLUMNS that a part of bench.whole's report has."""
    rest = map(part.get, ("tflop_per_s", "share_of_ceiling", "peak_memory_gb"))
    return part.get("samples_per_s"), part.get("ms"), predicted, *rest


def ceiling_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    lines = []
    for part in report["ceilings"]:
        for kind, title in (("plain", part["dtype"]), ("fp8", "fp8")):
            values, note = (), part[kind]
            if isinstance(note, dict):
                predicted = counts.products(report, part["micro_batch"], kind == "fp8")
                values = (None, note["ms"], predicted, note["tflop_per_s"])
                note = f"best square {note['square_tflop_per_s']:.4g}"
            lines.append((f"{name} {title}, batch {part['micro_batch']}", values, note))
    return lines


def kernel_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    return [(name, (None, report["step_ms"], counts.step(report)), kernel_shares(report))]


def kernel_shares(report: dict) -> str:
    shares = {kind: part["share"] for kind, part in report["classes"].items()} | {"idle": report["idle"]["share"]}
    return ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items() if share >= 0.001)


def race_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    lines = [(f"{name}, {peer}", (), reason) for peer, reason in report["refused"].items()]
    for peer, part in report["peers"].items():
        note = f"{part['ratio']['step']:.3f} times ours ({part['ms']['ours']['step']:.2f} ms)"
        lines.append((f"{name}, {peer} {part['version']}", (None, part["ms"]["peer"]["step"]), note))
    return lines


def device_test_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    counted = ", ".join(f"{number} {outcome}" for outcome, number in report["counts"].items())
    lines = [(name, (), counted)]
    for test, one in report["tests"].items():
        if one["outcome"] != "passed":
            lines.append((f"  {test.partition('::')[2]}", (), f"{one['outcome']}: {one.get('reason', '')}"))
    return lines


ROWS = {
    **{"bench.step": step_rows, "bench.whole": whole_rows, "bench.ceiling": ceiling_rows},
    **{"bench.kernels": kernel_rows, "bench.race": race_rows, "bench.device_tests": device_test_rows},
}


def table(records: list[dict], counts: Counts) -> str:
    """Records for the terminal."""
    lines = [row for record in records for row in rows(record, counts)]
    width = max(len(name) for name, _, _ in lines)
    shown = [f"{'variant':<{width}} " + " ".join(f"{column:>10}" for column in COLUMNS)]
    for name, values, note in lines:
        padded = zip((*values, *[None] * (len(COLUMNS) - len(values))), COLUMNS.values())
        cells = "".join(f"{'' if value is None else format(value, form):>11}" for value, form in padded)
        shown.append(f"{name:<{width}}{cells}  {note}".rstrip())
    return "\n".join(shown)
