"""Preflight: what it says of tables of nodes, of damaged trees of /sys, and of processes that play nodes."""

import argparse
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, refusal

from flux_ref import errors
from flux_ref.errors import Fault, Refusal
from tools.preflight import commands
from tools.preflight import nodes as preflight
from tools.preflight.verdict import NodeReport, Verdict, judge

NAMES = ["a", "b", "c", "d"]
DEVICE = {"device": "X1", "free_gb": 99.0, "total_gb": 100.0, "tflops": 700.0, "gb_per_s": 400.0}


def found(**differences: dict) -> dict[int, NodeReport]:
    """Four equal nodes of two devices, but for the differences of one node: b={"between": 5}."""
    nodes = {}
    for number, name in enumerate(NAMES):
        odd = {"between": 300.0, "problem": "", "device": {}, "count": 2, "facts": {}} | differences.get(name, {})
        facts = {"driver": "d 1", "links": "8 x RDMA 400 Gb/s"} | odd["facts"]
        devices = [DEVICE] * (odd["count"] - 1) + [DEVICE | odd["device"]]
        alone = {"devices": devices} if odd["count"] else {"problem": "device 1: no such thing"}
        nodes[number] = NodeReport(facts, alone, odd["between"], odd["problem"])
    return nodes


def complaints(nodes: dict[int, NodeReport]) -> list[str]:
    verdict = Verdict(NAMES[: len(nodes)])
    judge(verdict, nodes, slow=0.8)
    return verdict.lines()


FAULTS = [
    ({"device": {"tflops": 500.0}}, "multiplies at 500 TFLOP/s, the median node 700"),
    ({"device": {"gb_per_s": 40.0}}, "all-reduces inside the node at 40 GB/s, the median node 400"),
    ({"between": 200.0}, "all-reduces with its neighbours at 200 GB/s, the median node 300"),
    ({"between": 0.0, "problem": "device 1 hangs"}, "all-reduces with no neighbour: device 1 hangs"),
    ({"count": 1}, "devices 1 x X1, most have 2 x X1"),
    ({"count": 0}, "device 1: no such thing"),
    ({"device": {"device": "X2"}}, "devices 1 x X1 + 1 x X2, most have 2 x X1"),
    ({"device": {"free_gb": 80.0}}, "80 of 100 GB of device memory are free"),
    ({"facts": {"driver": "d 2"}}, "driver d 2, most have d 1"),
    ({"facts": {"links": "7 x RDMA 400 Gb/s, 1 x RDMA down"}}, "links 7 x RDMA 400 Gb/s, 1 x RDMA down, most have"),
]


def test_the_node_that_differs_is_named_and_no_other():
    judged = {text: complaints(found(c=fault)) for fault, text in FAULTS}
    wrong = {text: lines for text, lines in judged.items() if lines[1:] != ["bad nodes: c"]}
    wrong |= {text: lines for text, lines in judged.items() if not lines[0].startswith(f"c: {text}")}
    assert wrong == {}


def test_judging_without_an_odd_node():
    """A little less is no fault. All nodes are named if they do not agree. The faster of two sets the measure."""
    slower = {"tflops": 600.0, "gb_per_s": 330.0, "free_gb": 91.0}
    assert complaints(found(c={"device": slower, "between": 250.0})) == ["bad nodes: "]
    lines = complaints(found(a={"facts": {"driver": "d 2"}}, b={"facts": {"driver": "d 2"}}))
    assert lines[-1] == "bad nodes: a,b,c,d" and "the nodes do not agree" in lines[0]
    two = found(b={"device": {"tflops": 500.0}})
    assert complaints({0: two[0], 1: two[1]})[-1] == "bad nodes: b"


def test_a_row_says_only_what_was_measured():
    lone = {"devices": [DEVICE | {"gb_per_s": 0.0}]}
    assert NodeReport({"driver": "d", "links": "none"}, lone).row() == "1 x X1 | d | none | 700 TFLOP/s"
    assert found()[0].row().endswith(" | 700 TFLOP/s | 400 GB/s inside | 300 GB/s between")


def test_every_pair_of_neighbours_is_measured_once_and_no_node_twice_in_a_round():
    for count in (1, 2, 3, 6, 7):
        rounds = preflight.ring([*range(count)])
        for groups in rounds:
            nodes = [node for group in groups for node in group]
            assert len(set(nodes)) == len(nodes), count
        pairs = {frozenset((node, (node + 1) % count)) for node in range(count)} if count > 1 else set()
        measured = [frozenset(group) for groups in rounds for group in groups]
        assert {*measured} == pairs and len(measured) == len(pairs), count


def test_the_better_of_two_neighbours_counts():
    report = NodeReport({}, {})
    for speed in (300.0, 30.0):
        report.add_pair({"devices": [DEVICE, DEVICE | {"gb_per_s": speed}]})
    assert report.between == 300.0


# What the operating system says


SYS = {
    **{f"class/infiniband/m{port}/ports/1/state": "4: ACTIVE" for port in range(2)},
    **{f"class/infiniband/m{port}/ports/1/rate": "400 Gb/sec (4X NDR)" for port in range(3)},
    "class/infiniband/m2/ports/1/state": "1: DOWN",
    **{"class/net/e0/operstate": "up", "class/net/e0/speed": "25000", "class/net/e0/device/x": ""},
    **{"class/net/e1/operstate": "down", "class/net/e1/device/x": ""},
    **{"class/net/docker0/operstate": "up", "class/net/docker0/speed": "10000"},  # no hardware
    "module/amdgpu/version": "6.12",
}


def test_driver_and_links_by_speed(tmp_path):
    assert preflight.links(tmp_path) == "none" and preflight.driver(tmp_path).startswith("Linux ")
    for name, text in SYS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert preflight.links(tmp_path) == "1 x Ethernet 25 Gb/s, 1 x Ethernet down, 2 x RDMA 400 Gb/s, 1 x RDMA down"
    assert preflight.driver(tmp_path) == "amdgpu 6.12"


# Measurements


def python(*programs: str, wait_s: float = 20) -> dict:
    return preflight.measured([[sys.executable, "-c", program] for program in programs], wait_s)


def test_a_process_that_fails_or_hangs_is_blamed_not_those_that_wait_for_it():
    one, two, hangs = "print('{\"tflops\": 1}'); print('NCCL version')", "print('{\"tflops\": 2}')", "while True: pass"
    fails = "raise RuntimeError('fell off the bus')"
    assert python(one, two) == {"devices": [{"tflops": 1}, {"tflops": 2}]}
    assert python(one, hangs, wait_s=1) == {"problem": "device 1 hangs for 1 s"}
    assert python(hangs, fails, wait_s=1) == {"problem": "device 1: exit code 1: RuntimeError: fell off the bus"}


# Arguments


ADDRESS = "give HOST:PORT of the first node, with a port from"
REFUSED = [
    (["--nodes=a,b", "--address=h:1"], "which of --nodes=a,b is this"),
    (["--node=x"], "argument --node: 'x': give a whole number from 0"),
    (["--nodes=a,b", "--node=2", "--address=h:1"], "which of --nodes=a,b is this"),
    (["--nodes=a,b", "--node=1"], f"--address=127.0.0.1:0: {ADDRESS} 1 to"),
    (["--nodes=a,b", "--node=1", "--address=h"], f"--address=h: {ADDRESS} 1 to"),
    *(
        ([f"--address={address}"], f"--address={address}: {ADDRESS} 0 to")
        for address in ("127.0.0.1", "127.0.0.1:abc", "127.0.0.1:99999", ":1")
    ),
    (["--slow=nan"], "argument --slow: 'nan': give a number from 0 to 1"),
    (["--slow=1.1"], "argument --slow: '1.1': give a number from 0 to 1"),
    (["--wait=0"], "argument --wait: '0': give a number from 1 to 86400"),
    (["--gpus=0"], "argument --gpus: '0': give a whole number from 1 to 1024"),
]


def test_arguments_that_make_no_sense_are_refused(monkeypatch):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    told = [(text, refusal(commands.parse, argv)) for argv, text in REFUSED]
    assert [(text, line) for text, line in told if text not in line] == []
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert commands.parse(["--nodes=a,b", "--address=h:65535"]).node == 1
    assert commands.parse(["--nodes=a,b", "--address=h:1", "--node=0"]).node == 0
    assert commands.parse([]).node == 0, "alone"


# Nodes that are processes


def run_nodes(count: int, *argv: str, absent: int | None = None) -> tuple[dict[int, int], dict[int, str]]:
    """Exit codes of processes that play the nodes n0, n1, ... but one, and what they print."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    names = ",".join(f"n{number}" for number in range(count))
    command = [sys.executable, "-m", "tools.preflight", f"--nodes={names}", f"--address={address}", *argv]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {n: subprocess.Popen([*command, f"--node={n}"], **options) for n in range(count) if n != absent}
    said = {number: process.communicate(timeout=500)[0] for number, process in started.items()}
    return {number: process.returncode for number, process in started.items()}, said


@pytest.mark.slow
def test_two_nodes_are_fit():
    codes, said = run_nodes(2, "--slow=0.02", "--wait=100")
    assert codes == {0: 0, 1: 0} and said[1] == ""
    *rows, last = said[0].splitlines()
    assert [row.split(": ")[0] for row in rows] == ["n0", "n1"] and last == "preflight: all nodes are fit"
    assert all("1 x CPU" in row and "GB/s between" in row for row in rows)


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named_and_the_others_go_home():
    codes, said = run_nodes(3, "--wait=15", absent=1)
    assert codes == {0: 3, 2: 0} and said[2] == ""
    first, last = said[0].splitlines()
    assert first.startswith("preflight: n1: has not come within 15 s; ") and last == "preflight: bad nodes: n1"


@pytest.mark.slow
def test_a_listener_that_is_no_store_is_not_waited_for_longer_than_asked():
    """In a process of its own, as c10d goes on waiting in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "tools.preflight", "--nodes=n0,n1", "--wait=1", "--node=1"]
        done = subprocess.run([*command, f"--address={address}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    silent = f"preflight: n0: {address} does not answer: no store answers within 1 s; has another program that port?"
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [silent, "preflight: bad nodes: n0"]


def test_a_first_node_that_does_not_answer_is_named_and_an_address_that_makes_no_sense_is_refused(monkeypatch, capsys):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        cases = [
            (1, f"127.0.0.1:{port}", f"n0: 127.0.0.1:{port} does not answer: "),
            (1, "no..host:29711", "n0: no..host:29711 does not answer: "),
            (0, "no..host:29711", "--address=no..host:29711: "),
        ]
        for node, address, text in cases:
            args = commands.parse(["--nodes=n0,n1", f"--node={node}", f"--address={address}"])
            args.wait = 0.2
            code = errors.run("preflight", lambda _, args=args: commands.check(args), [])
            lines = capsys.readouterr().err.splitlines()
            assert lines[0].startswith(f"preflight: {text}") and lines[1:] == ["preflight: bad nodes: n0"] * node
            assert code == (Fault if node else Refusal).exit_code


def test_the_store_listens_on_the_given_address_only_and_its_values_are_json():
    """127.0.0.2 is this machine, too: what listens everywhere answers there."""
    args = argparse.Namespace(node=0, gpus=1, wait=5.0, address="127.0.0.1:0", nodes=["a"])
    leader = preflight.Leader(args, {})
    port = int(leader.address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    leader.set("key", [1, "two"])
    assert leader.get("key", 1.0) == [1, "two"]
    leader.store.set("strange", b"\x80\x04.")
    assert f"{leader.address} gives no JSON for strange" in refusal(leader.get, "strange", 1.0, kind=Fault)
    assert preflight.listener("localhost", 4, nodes=2) == (4, {"is_master": True})
