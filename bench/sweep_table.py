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
    tflop = report["tflop"]
    values = (
        report["samples_per_s"],
        report["step_ms"]["median"],
        counts.step(report),
        tflop["per_s_per_rank"],
        tflop["share_of_ceiling"],
        report["peak_memory_gb"],
    )
    lines = [(name, values, f"ceiling: best square; {report['left_out']}")]
    if "kernels" in report:
        lines += kernel_rows(report["kernels"], counts.classes(report))
    return lines


def kernel_rows(profile: dict, counted: dict[str, float]) -> list[Row]:
    """A line for each class of kernels in a step."""
    spent = profile["classes"] | {"idle": profile["idle"]}
    return [
        (f"  {kind}", (None, part["ms"], counted.get(kind)), f"{part['share']:.1%} of the step")
        for kind, part in spent.items()
        if part["share"] >= 0.001
    ]


def whole_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    lines = []
    for part in report["runs"]:
        tflop = part.get("tflop", {})
        values = (
            part.get("samples_per_s"),
            part.get("ms"),
            counts.whole(report, part["micro_batch"]),
            tflop.get("per_s_per_rank"),
            tflop.get("share_of_ceiling"),
            part.get("peak_memory_gb"),
        )
        note = part.get("failed") or report["optimizer"].get("failed") or f"without {report['left_out']}"
        lines.append((f"{name}, batch {part['micro_batch']}", values, note))
    for part in report["evaluation"]:
        values = (part.get("samples_per_s"), part.get("ms"), None, None, None, part.get("peak_memory_gb"))
        lines.append((f"{name}, validation {part['batch']}", values, part.get("failed", "")))
    return lines


def ceiling_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    lines = []
    for part in report["ceilings"]:
        for kind, title in (("plain", part["dtype"]), ("fp8", "fp8")):
            found, values = part[kind], ()
            note = found  # why there is none
            if isinstance(found, dict):
                predicted = counts.products(report, part["micro_batch"], kind == "fp8")
                values = (None, found["ms"], predicted, found["tflop_per_s"])
                note = f"best square {found['square_tflop_per_s']:.4g}"
            lines.append((f"{name} {title}, batch {part['micro_batch']}", values, note))
    return lines


def device_test_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    counted = ", ".join(f"{number} {outcome}" for outcome, number in report["counts"].items())
    lines = [(name, (), counted)]
    for test, one in report["tests"].items():
        if one["outcome"] != "passed":
            lines.append((f"  {test.partition('::')[2]}", (), f"{one['outcome']}: {one.get('reason', '')}"))
    return lines


def race_rows(name: str, report: dict, counts: Counts) -> list[Row]:
    low, high = report["ratio_quartiles"]
    note = f"diffusers' time by ours {report['ratio']:.3f}, quartiles {low:.3f} and {high:.3f}"
    return [(name, (None, report["ms"]["ours"]), note)]


ROWS = {
    "bench.step": step_rows,
    "bench.whole": whole_rows,
    "bench.ceiling": ceiling_rows,
    "bench.race": race_rows,
    "bench.device_tests": device_test_rows,
}


def table(records: list[dict], counts: Counts) -> str:
    """Records for the terminal."""
    lines = [row for record in records for row in rows(record, counts)]
    width = max(len(name) for name, _, _ in lines)
    shown = [f"{'variant':<{width}} " + " ".join(f"{column:>10}" for column in COLUMNS)]
    for name, values, note in lines:
        cells = ""
        for number, form in enumerate(COLUMNS.values()):
            value = values[number] if number < len(values) else None
            cells += f"{'' if value is None else format(value, form):>11}"
        shown.append(f"{name:<{width}}{cells}  {note}".rstrip())
    return "\n".join(shown)
