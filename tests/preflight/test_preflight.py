"""Preflight: whom it blames, and ranks that play nodes, one of which is slow, wrong or hangs."""

import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, refusal

from tools import preflight

NAMES = ["a", "b", "c", "d"]
CPU = torch.device("cpu")


def test_the_node_far_below_the_median_is_named_and_no_other():
    """A little less is no fault."""
    fit = {"product": 700.0, "inside": 400.0, "between": 300.0}
    for kind, speed, says in (
        ("product", 700.0, "all nodes are fit"),
        ("product", 500.0, "c: matrix product 500 TFLOP/s, the median 700; look at its devices'"),
        ("inside", 40.0, "c: all-reduce inside the node 40 GB/s, the median 400; look at the links"),
        ("between", 0.0, "c: all-reduce with a neighbour 0 GB/s, the median 300; look at its network"),
    ):
        speeds = {name: dict.fromkeys(range(4), fit[name]) | {0: 0.85 * fit[name]} for name in fit}
        speeds[kind][2] = speed
        lines, bad = preflight.judge(NAMES, speeds, 0.8)
        assert lines[4].startswith(f"preflight: {says}") and bad == ["c"] * (len(lines) - 5)
        assert lines[-1] == "preflight: bad nodes: c" or not bad


def test_each_node_meets_its_neighbours_and_no_rank_twice_in_a_round():
    for nodes in (1, 2, 3, 6, 7):
        met = []
        for kind, groups in preflight.rounds(2 * nodes, 2):
            ranks = [rank for members in groups for rank in members]
            assert len({*ranks}) == len(ranks)
            met += [(members[0] // 2, members[-1] // 2) for members in groups if kind == "between"]
        assert sorted(met) == [(node, node + 1) for node in range(nodes - 1)]


def test_what_fails_or_hangs_has_speed_0_and_says_why(capsys):
    def fails() -> float:
        raise RuntimeError("fell off the bus\nmore")

    for measure, says in ((fails, "fell off the bus"), (lambda: time.sleep(30) or 1.0, "hangs for 0.1 s")):
        assert preflight.limited(measure, CPU, 0.1) == 0.0
        assert says in capsys.readouterr().err


def test_options_that_make_no_sense_are_refused():
    for option in ("--slow=nan", "--slow=1", "--wait=0", "--gpus=8"):
        assert option.split("=")[0] in refusal(preflight.check, [option])


SLOW = """
import os, sys, time
from tools import preflight
true, all_reduce = preflight.multiply, preflight.all_reduce
if os.environ["RANK"] == "2":
    preflight.PLAYED
preflight.leave(preflight.run("preflight", preflight.check, ["--slow=0.02", "--wait=20"]))
"""
PLAYED = {
    "multiply = lambda device: true(device)": "all nodes are fit",
    "multiply = lambda device: true(device) / 1000": "bad nodes: n2",
    "all_reduce = lambda device, group: time.sleep(99)": "bad nodes: n2",
}


@pytest.mark.slow
def test_nodes_that_are_processes(tmp_path):
    """Three nodes of one rank, each under a torchrun of its own."""
    for number, (played, says) in enumerate(PLAYED.items()):
        program = tmp_path / f"{number}.py"
        program.write_text(SLOW.replace("PLAYED", played))
        nodes = []
        for node in range(3):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", f"--node-rank={node}"]
            command += ["--master-addr=127.0.0.1", f"--master-port={29710 + number}", program]
            env = {"SLURMD_NODENAME": f"n{node}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
        out = [node.communicate(timeout=200) for node in nodes]
        assert out[0][0].endswith(f"preflight: {says}\n"), out
        assert {node.returncode for node in nodes} == {0 if "fit" in says else 1}
