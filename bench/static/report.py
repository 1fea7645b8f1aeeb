"""Counts as figures, tables and limits; the time of each part by a roofline."""

import argparse
from collections.abc import Iterator
from math import prod

from bench.static.absent_gpu import AbsentGpu
from bench.static.binaries import binaries
from bench.static.inductor import Count, words
from flux_ref.config import Config
from flux_ref.speed import policy
from tools.shared import flops, hardware

# What a large copy, product or attention reaches of the datasheet's rate. Assumed; bench.ceiling measures products.
SHARES = {"memory_tb_s": 0.83, "bf16_tflops": 0.79, "fp8_tflops": 0.65, "attention_tflops": 0.5}
LARGE = 20e6  # bytes of a kernel whose binary is looked at


def rates(card: str, args: argparse.Namespace) -> dict[str, float]:
    """The rates of the roofline: those given as options, else shares of the datasheet."""
    gpu, _ = hardware.load(card)
    given = {name: getattr(args, name) for name in SHARES}
    peak = {name: getattr(gpu, name, gpu.bf16_tflops) for name in SHARES}
    return {name: given[name] or share * peak[name] for name, share in SHARES.items()}


def run(arch: str, cfg: Config, found: dict[str, dict[str, Count]], known: dict[str, float], micro_batch: int) -> dict:
    """The figures of one setting, as --json gives them."""
    times = {"double": cfg.model.double_blocks, "single": cfg.model.single_blocks}
    rows = {part: {name: _figures(one, known) for name, one in passes.items()} for part, passes in found.items()}
    ms = sum(figures["ms"] * times.get(part, 1) for part, passes in rows.items() for figures in passes.values())
    ceiling = _ceiling(found, times, known)
    rate = flops.per_sample(cfg.model) * micro_batch / ms / 1e9
    saved = sum(found[part]["forward"].saved * count for part, count in times.items())
    return {
        "arch": arch,
        "precision": cfg.precision.preset if policy.narrowest(cfg) else cfg.parallel.dtype,
        "micro_batch": micro_batch,
        "budget": cfg.parallel.activation_budget,
        "compile": cfg.parallel.compile,
        "parts": rows,
        "times": times,
        "ms": ms,
        "samples_per_s": micro_batch * 1e3 / ms,
        "ceiling_share": rate / ceiling,
        "saved_gb": saved / 1e9,
    }


def _figures(one: Count, known: dict[str, float]) -> dict[str, object]:
    products = [{"product": words(product), "calls": calls} for product, calls in sorted(one.products.items())]
    spent = _ms(one, known)
    return {
        "kernels": one.launches.total(),
        "bytes": round(one.bytes),
        "ms": sum(spent.values()),
        "ms_of": spent,
        "products": products,
        "attentions": one.attentions.total(),
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


def _ceiling(found: dict[str, dict[str, Count]], times: dict[str, int], known: dict[str, float]) -> float:
    """1e12 operations per second of the blocks' matrix products alone."""
    done = spent = 0.0
    for part, count in times.items():
        for one in found[part].values():
            spent += count * _ms(one, known)["products"]
            done += sum(count * calls * 2 * prod(a[0]) * b[0][-1] for (_, a, b), calls in one.products.items())
    return done / spent / 1e9


def table(run: dict) -> str:
    """One setting as a table."""
    lines = [f"{run['arch']}, {run['precision']}, micro-batch {run['micro_batch']}, budget {run['budget']}"]
    lines[0] += "" if run["compile"] else ", eager"
    lines += [f"  {'part':<20} {'kernels':>8} {'GB':>9} {'products':>9} {'attention':>10} {'ms':>9}"]
    for label, figures in _rows(run):
        products = sum(product["calls"] for product in figures["products"])
        size, ms = figures["bytes"] / 1e9, figures["ms"]
        lines.append(
            f"  {label:<20} {figures['kernels']:>8} {size:>9.3f} {products:>9} {figures['attentions']:>10} {ms:>9.3f}"
        )
    lines.append(
        f"  one step {run['ms']:.0f} ms, {run['samples_per_s']:.1f} samples/s per GPU, {run['ceiling_share']:.0%} of"
        f" the products' rate; {run['saved_gb']:.1f} GB kept for backward"
    )
    return "\n".join(lines)


def _rows(run: dict) -> Iterator[tuple[str, dict]]:
    for part, passes in run["parts"].items():
        for direction, figures in passes.items():
            yield f"{part} {direction}", figures


def compare(old: list[dict], new: list[dict]) -> str:
    """Two lists of runs side by side: kernels and bytes of equal settings."""
    lines = []
    for before, after in _pairs(old, new):
        names = f"{before['arch']}, {before['precision']}, micro-batch {before['micro_batch']}, budget"
        lines.append(f"{names} {before['budget']} -> {after['budget']}")
        for (label, one), (_, other) in zip(_rows(before), _rows(after)):
            lines.append(
                f"  {label:<20} kernels {one['kernels']:>4} -> {other['kernels']:<4}"
                f" GB {one['bytes'] / 1e9:>7.3f} -> {other['bytes'] / 1e9:<7.3f}"
                f" ms {one['ms']:>7.3f} -> {other['ms']:<7.3f}"
            )
        lines.append(f"  samples/s {before['samples_per_s']:.1f} -> {after['samples_per_s']:.1f}")
    return "\n".join(lines)


def above(limits: list[dict], runs: list[dict], slack: float) -> list[str]:
    """Every count of kernels or bytes that is above its limit times slack."""
    found = []
    for limit, run in _pairs(limits, runs):
        figures_of = dict(_rows(run))
        for label, most in _rows(limit):
            figures = figures_of[label]
            for name in ("kernels", "bytes"):
                if figures[name] > most[name] * slack:
                    found.append(f"{run['precision']} {label}: {name} {figures[name]}, limit {most[name]}")
    return found


def _pairs(old: list[dict], new: list[dict]) -> Iterator[tuple[dict, dict]]:
    def key(run: dict) -> tuple:
        return run["arch"], run["precision"], run["micro_batch"], run.get("compile", True)

    known = {key(run): run for run in old}
    return ((known[key(run)], run) for run in new if key(run) in known)


def flagged(gpu: AbsentGpu, found: dict[str, dict[str, Count]]) -> Iterator[str]:
    """One line per large kernel: its configurations' registers, spills, shared memory and narrowest store."""
    for part, passes in found.items():
        for direction, one in passes.items():
            for name, source in one.sources.items():
                size = one.sizes[name]
                if size < LARGE:
                    continue
                made = binaries(gpu, name, source)
                spills = sum(binary.spilled > 0 for binary in made)
                narrow = min((width for binary in made for width in binary.stores), default=0)
                flag = f", {spills} SPILL up to {max(b.spilled for b in made)}" if spills else ""
                low, high = (pick(binary.registers for binary in made) for pick in (min, max))
                shared = max(binary.shared for binary in made)
                yield (
                    f"{part} {direction} {size / 1e6:.0f} MB, {len(made)} configurations{flag}; registers {low} to"
                    f" {high}, shared {shared}, narrowest store {narrow} B: {name[:60]}"
                )
