"""bench.static: bytes of kernels against closed forms, its report on made-up counts, and the committed limits."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT

from bench.static import report
from bench.static.inductor import Count
from bench.static.traffic import traffic
from flux_ref import config_file

HEAD = """
import triton
@triton_heuristics.pointwise(triton_meta={{'signature': {{{signature}}}}})
@triton.jit
def triton_kernel({arguments}, XBLOCK : tl.constexpr):
    xnumel = {elements}
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = tl.full([XBLOCK], True, tl.int1)[:]
"""
ROWS, WIDTH = 16384, 128
LIMITS = ("--parallel.activation_budget=1.0", "--limits")


def pointwise(body: str, elements: int, **kinds: str) -> float:
    """The bytes of a kernel as Inductor writes it. kinds: of its pointers."""
    signature = ", ".join(f"'{name}': '*{kind}'" for name, kind in kinds.items())
    arguments = ", ".join((*kinds, "xnumel"))
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return traffic(HEAD.format(signature=signature, arguments=arguments, elements=elements) + lines)


def test_bytes_of_kernels_have_closed_forms():
    elements = ROWS * WIDTH
    copy = "tl.store(b + (xindex), tl.load(a + (xindex), None).to(tl.float32), None)"
    assert pointwise(copy, elements, a="bf16", b="fp32") == elements * 6
    assert pointwise(copy, 64, a="bf16", b="fp8e4nv") == 64 * 3, "a small kernel runs whole"
    neighbours = """x0 = (xindex % 2)
even = tl.load(a + (xindex), None)
odd = tl.load(a + (1 + xindex + (-2)*x0), None)
tl.store(b + (xindex), even * odd, None)"""
    assert pointwise(neighbours, elements, a="bf16", b="bf16") == elements * 4, (
        "a line that is loaded twice counts once"
    )
    table = f"""x0 = (xindex % {512 * WIDTH})
tl.store(b + (xindex), tl.load(a + (xindex), None) * tl.load(t + (x0), None), None)"""
    once = 512 * WIDTH * 4
    assert pointwise(table, elements, a="bf16", t="fp32", b="bf16") == pytest.approx(elements * 4 + once, rel=1e-3)
    halves = f"""x0 = (xindex % {WIDTH})
left = x0 < tl.full([1], {WIDTH // 2}, tl.int64)
one = tl.load(a + (x0 + {WIDTH // 2}*(xindex // {WIDTH})), left, other=0.0)
two = tl.load(c + (x0 + {WIDTH // 2}*(xindex // {WIDTH}) - {WIDTH // 2}), left == 0, other=0.0)
tl.store(b + (xindex), tl.where(left, one, two), None)"""
    assert pointwise(halves, elements, a="bf16", c="bf16", b="bf16") == elements * 4, (
        "masked loads count what they read"
    )
    strided = f"tl.store(b + (xindex), tl.load(a + ({WIDTH}*xindex), None), None)"
    assert pointwise(strided, ROWS, a="bf16", b="bf16") == ROWS * (32 + 2), "a sector is read whole"


def made(kernels: int) -> dict[str, dict[str, Count]]:
    """Counts of one step whose only cost is 1 GB per kernel and one product."""
    count = Count()
    count.add("kernel", 1e9, kernels)
    count.products = Counter({("mm", ((1000, 1000), (1000, 1), "bfloat16"), ((1000, 1000), (1, 1000), "bfloat16")): 1})
    return {part: {"forward": count} for part in ("double", "single")}


def test_a_report_adds_up_and_limits_hold_to_two_percent():
    cfg = config_file.load("tests/micro.toml", [])
    known = {"memory_tb_s": 1.0, "bf16_tflops": 2.0, "fp8_tflops": 4.0, "attention_tflops": 1.0}
    runs = [report.run("sm90", cfg, made(kernels), known, 32) for kernels in (100, 103)]
    times = cfg.model.double_blocks + cfg.model.single_blocks
    assert runs[0]["ms"] == pytest.approx(times * (100 * 1.0 + 1.0))  # 1 GB at 1 TB/s, 2 GFLOP at 2 TFLOP/s
    assert runs[0]["samples_per_s"] == pytest.approx(32e3 / runs[0]["ms"])
    assert report.above([runs[0]], [runs[0]]) == []
    high = report.above([runs[0]], [runs[1]])
    assert len(high) == 4 and "double forward: kernels 103, limit 100" in high[0]
    assert "no limits are known" in report.above([], runs)[0]
    assert max(map(len, report.table(runs[0]).splitlines())) <= 120


def counted(*argv: str, json_file) -> dict:
    command = [sys.executable, "-m", "bench.static", *argv, f"--json={json_file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(json_file.read_text())


@pytest.mark.slow
def test_no_block_of_an_h200_moves_more_than_its_limit(tmp_path):
    """Counted anew for bf16 at micro-batch 32: two compilations."""
    found = counted("--arch", "sm90", *LIMITS, json_file=tmp_path / "found.json")
    (run,) = found["runs"]
    assert run["parts"]["single"]["forward"]["attentions"] == 1
    assert run["parts"]["double"]["backward"]["products"] == 20


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942", "gfx950"])
def test_no_architecture_and_recipe_is_above_its_limit(arch, tmp_path):
    argv = ("--arch", arch, "--presets", "bf16,fp8,fp8_delayed", *LIMITS)
    assert len(counted(*argv, json_file=tmp_path / "found.json")["runs"]) == 3
