"""Counts as figures, a table and limits; the time of each part by a roofline."""

from collections.abc import Iterator
from math import prod

from bench.static.inductor import Count
from flux_ref.config import Config
from flux_ref.speed import policy
from tools.shared import hardware

# What a large copy, product or attention reaches of the datasheet's rate. Assumed; bench.ceiling measures products.
SHARES = {"memory_tb_s": 0.83, "bf16_tflops": 0.79, "fp8_tflops": 0.65, "attention_tflops": 0.5}
SLACK = 1.02  # a count above its limit times this is too high


def rates(card: str) -> dict[str, float]:
    """The rates of the roofline, shares of the datasheet's. Attention's is a share of bf16's."""
    gpu, _ = hardware.load(card)
    return {name: share * getattr(gpu, name, gpu.bf16_tflops) for name, share in SHARES.items()}


def run(arch: str, cfg: Config, found: dict[str, dict[str, Count]], known: dict[str, float], micro_batch: int) -> dict:
    """The figures of one setting, as --json gives them. found: of parts.counts. known: of rates."""
    times = {"double": cfg.model.double_blocks, "single": cfg.model.single_blocks}
    parts, ms = {}, 0.0
    for part, passes in found.items():
        parts[part] = {direction: _figures(count, known) for direction, count in passes.items()}
        ms += times.get(part, 1) * sum(figures["ms"] for figures in parts[part].values())
    return {
        "arch": arch,
        "precision": cfg.precision.preset if policy.narrowest(cfg) else cfg.parallel.dtype,
        "micro_batch": micro_batch,
        "budget": cfg.parallel.activation_budget,
        "compile": cfg.parallel.compile,
        "parts": parts,
        "ms": ms,
        "samples_per_s": micro_batch * 1e3 / ms,
    }


def _figures(one: Count, known: dict[str, float]) -> dict[str, object]:
    spent = _ms(one, known)
    return {
        "kernels": one.launches.total(),
        "bytes": round(one.bytes),
        "products": one.products.total(),
        "attentions": one.attentions.total(),
        "ms": sum(spent.values()),
        "ms_of": spent,
    }


def _ms(one: Count, known: dict[str, float]) -> dict[str, float]:
    """Milliseconds of kernels, products and attention, one after another."""
    spent = {"kernels": one.bytes / known["memory_tb_s"] / 1e9, "products": 0.0, "attention": 0.0}
    for (name, left, right), calls in one.products.items():
        rate = known["fp8_tflops" if name == "scaled_mm" else "bf16_tflops"]
        spent["products"] += calls * 2 * prod(left[0]) * right[0][-1] / rate / 1e9
    for (name, (batch, heads, tokens, width)), calls in one.attentions.items():
        matrices = 10 if "backward" in name else 4  # five products of scores' size, and two
        spent["attention"] += calls * matrices * batch * heads * tokens**2 * width / known["attention_tflops"] / 1e9
    return spent


def table(run: dict) -> str:
    """One setting as a table."""
    lines = [f"{run['arch']}, {run['precision']}, micro-batch {run['micro_batch']}, budget {run['budget']}"]
    lines[0] += "" if run["compile"] else ", eager"
    lines.append(f"  {'part':<20} {'kernels':>8} {'GB':>9} {'products':>9} {'attention':>10} {'ms':>9}")
    for label, figures in _rows(run):
        counted = f"{figures['products']:>9} {figures['attentions']:>10} {figures['ms']:>9.3f}"
        lines.append(f"  {label:<20} {figures['kernels']:>8} {figures['bytes'] / 1e9:>9.3f} {counted}")
    lines.append(f"  one step {run['ms']:.0f} ms, {run['samples_per_s']:.1f} samples/s per GPU")
    return "\n".join(lines)


def _rows(run: dict) -> Iterator[tuple[str, dict]]:
    for part, passes in run["parts"].items():
        for direction, figures in passes.items():
            yield f"{part} {direction}", figures


def above(limits: list[dict], runs: list[dict]) -> list[str]:
    """Every count of kernels or bytes that is above its limit times SLACK, and every run that has no limits."""
    known = {_setting(limit): limit for limit in limits}
    found = []
    for run in runs:
        limit = known.get(_setting(run))
        if limit is None:
            found.append(f"no limits are known for {_setting(run)}")
            continue
        figures_of = dict(_rows(run))
        for label, most in _rows(limit):
            for name in ("kernels", "bytes"):
                count = figures_of[label][name]
                if count > SLACK * most[name]:
                    found.append(f"{run['precision']} {label}: {name} {count}, limit {most[name]}")
    return found


def _setting(run: dict) -> tuple:
    return run["arch"], run["precision"], run["micro_batch"], run["budget"], run.get("compile", True)
