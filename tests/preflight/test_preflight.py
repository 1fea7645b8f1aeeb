"""Preflight: whom it blames, and ranks that play nodes, one of which is slow, wrong or hangs."""

import json
import math
import os
import re
import subprocess
import sys
import time
from itertools import chain

import pytest
import torch
from conftest import HELPERS, MICRO, PYTHONPATH, ROOT, refusal

from flux_ref import ranks
from tools import preflight
from tools.plan import __main__ as commands

PARTS = ("products", "elementwise", "copies", "links", "optimizer")


def test_the_node_far_below_the_median_is_named_and_no_other():
    """A little less is no fault; what was not measured is none."""
    names = ["a", "a", "b", "b", "c", "c", "d", "d"]
    for what, speed, remedy in (
        ("matrix product", 500.0, "look at its devices'"),
        ("all-reduce inside the node", 40.0, "look at the links"),
        ("all-reduce with a neighbour", 0.0, "look at its network"),
    ):
        fit = [600.0, 700.0, 700.0, 700.0, 700.0, 700.0, math.nan, math.nan]
        assert preflight.judge(names, what, fit, 700.0, 0.8)[1] == {}
        _, bad = preflight.judge(names, what, [*fit[:4], speed, *fit[5:]], 700.0, 0.8)
        assert [*bad] == ["c"] and bad["c"].startswith(f"preflight: c: {what} {speed:g} ")
        assert f", the median 700; {remedy}" in bad["c"]


def test_each_node_meets_its_neighbours_and_no_rank_twice_in_a_round():
    for nodes in (1, 2, 3, 6, 7):
        met = []
        for what, groups in preflight.rounds(2 * nodes, 2):
            ranks = [*chain(*groups)]
            assert len({*ranks}) == len(ranks)
            met += [(members[0] // 2, members[-1] // 2) for members in groups if "neighbour" in what]
        assert sorted(met) == [(node, node + 1) for node in range(nodes - 1)]


def test_what_fails_or_hangs_has_speed_0_and_says_why(capsys):
    def fails():
        raise RuntimeError("fell off the bus\nmore")

    for measure, says in ((fails, "fell off the bus"), (lambda: time.sleep(1) or 1.0, "hangs for 0.1 s")):
        assert preflight.limited(measure, torch.device("cpu"), 0.1) == 0.0
        assert says in capsys.readouterr().err


def test_options_that_make_no_sense_are_refused():
    for option in ("--slow=nan", "--slow=1", "--wait=0", "--gpus=8"):
        assert option.split("=")[0] in refusal(preflight.check, [option])


def test_a_plan_takes_the_rates_that_were_measured(tmp_path, monkeypatch, capsys):
    """And shows a report of bench.step beside its own times."""
    rates, report = tmp_path / "rates.json", tmp_path / "step.json"
    monkeypatch.setattr(preflight, "LONG_S", 0.1)
    assert preflight.check([f"--json={rates}"]) == 0
    ranks.stop()
    found = json.loads(rates.read_text())
    assert found["arch"] == "cpu" and found["fp8_tflops"] == 0 and found["node"] == 1 and found["bf16_tflops"] > 0
    report.write_text(json.dumps({"step_ms": {"median": 1.0}, "parts_ms": dict.fromkeys(PARTS, 0.5)}))
    argv = [str(MICRO), f"--measured={rates}"]
    assert commands.main([*argv, "--gpus=1", f"--step={report}"]) == 0
    out = capsys.readouterr().out
    assert f"measured,{rates};timesmaybeoffbyafactorof1.1" in "".join(out.split())  # lines break at hyphens, too
    rows = dict(re.findall(r"^  (\w+) +(\d+\.\d) ms planned +0\.5 ms measured$", out, re.M))
    assert tuple(rows) == PARTS and float(rows["products"]) > float(rows["optimizer"]) > float(rows["links"]) == 0, out
    assert "has no rate of the links that 8 GPUs use" in refusal(commands.main, [*argv, "--gpus=8"])
    rates.write_text('{"arch": "cpu"}')
    assert "arguments: 'memory_gb', " in refusal(commands.main, [*argv, "--gpus=1"])


PLAY = """
import os, time
from tools import preflight

def main(what, played):
    preflight.LONG_S = 0.1
    os.environ["SLURMD_NODENAME"] = f"n{os.environ['RANK']}"
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    if os.environ["RANK"] == "2":
        true, *rest = preflight.KINDS[what]
        preflight.KINDS[what] = (eval(played, {"true": true, "time": time}), *rest)
    return preflight.run("preflight", preflight.check, ["--slow=0.02", "--wait=10"])
"""


@pytest.mark.slow
def test_three_nodes_of_one_rank(tmp_path):
    (tmp_path / "play.py").write_text(PLAY)
    for what, played, says in (
        ("matrix product", "true", "all nodes are fit"),
        ("matrix product", "lambda *args: true(*args) / 1000", "bad nodes: n2"),
        ("all-reduce with a neighbour", "lambda *_: time.sleep(99)", "bad nodes: n2"),
    ):
        command = [sys.executable, HELPERS / "fork_ranks.py", "3", tmp_path / "play.py", what, played]
        env = os.environ | {"PYTHONPATH": PYTHONPATH}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.stdout.endswith(f"preflight: {says}\n"), done.stdout + done.stderr
        assert done.returncode == (0 if "fit" in says else 3)
