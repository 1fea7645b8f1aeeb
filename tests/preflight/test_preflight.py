"""Preflight: what it says of tables of nodes, of damaged trees of /sys, and of processes that play nodes."""

import argparse
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT

from flux_ref.errors import Fault, Refusal
from flux_ref.preflight import commands
from flux_ref.preflight import nodes as preflight
from flux_ref.preflight.verdict import NodeReport, Verdict, judge
from flux_ref.run.attempt import attempt

ARGS = argparse.Namespace(nodes=["a", "b", "c", "d"], disk=[Path("/d")], slow=0.8, clock=1.0, free=1.0)
DEVICE = {"device": "X1", "free_gb": 99.0, "total_gb": 100.0, "tflops": 700.0, "gb_per_s": 400.0}


def found(**differences: dict) -> dict[int, NodeReport]:
    """Four equal nodes of two devices but for what one is given: b=dict(ahead_s=5)."""
    nodes = {}
    for number, name in enumerate(ARGS.nodes):
        facts = {"driver": "d 1", "links": "RDMA 8 x 400 Gb/s"}
        facts |= {"disks": {"/d": {"free_gb": 50.0, "write": 1000.0, "read": 2000.0}}}
        own = {"ahead_s": 0.0, "between": 300.0, "problem": "", "device": {}, "count": 2, "facts": {}, "disk": {}}
        own |= differences.get(name, {})
        facts["disks"]["/d"] |= own["disk"]
        devices = [DEVICE] * (own["count"] - 1) + [DEVICE | own["device"]]
        alone = {"devices": devices} if own["count"] else {"problem": "device 1: no such thing"}
        nodes[number] = NodeReport(facts | own["facts"], own["ahead_s"], alone, own["between"], own["problem"])
    return nodes


def complaints(nodes: dict[int, NodeReport], args: argparse.Namespace = ARGS) -> list[str]:
    verdict = Verdict(args.nodes)
    judge(verdict, nodes, args)
    return verdict.lines()


FAULTS = [
    ({"device": {"tflops": 500.0}}, "multiplies at 500 TFLOP/s, the median node 700"),
    ({"device": {"gb_per_s": 40.0}}, "all-reduces inside the node at 40 GB/s, the median node 400"),
    ({"between": 200.0}, "all-reduces with its neighbours at 200 GB/s, the median node 300"),
    ({"between": 0.0, "problem": "device 1 hangs"}, "all-reduces with no neighbour: device 1 hangs"),
    ({"count": 1}, "has 1 x X1, most have 2 x X1"),
    ({"count": 0}, "device 1: no such thing"),
    ({"device": {"device": "X2"}}, "has 1 x X1 + 1 x X2, most have 2 x X1"),
    ({"device": {"free_gb": 80.0}}, "80 of 100 GB of device memory are free"),
    ({"facts": {"driver": "d 2"}}, "driver d 2, most have d 1"),
    ({"facts": {"links": "RDMA 7 x 400 Gb/s + 1 x down"}}, "links RDMA 7 x 400 Gb/s + 1 x down, most have"),
    ({"ahead_s": -3.0}, "its clock is -3.0 s off node 0's"),
    ({"disk": {"free_gb": 0.5}}, "disk /d: 0.5 GB free, want 1"),
    ({"disk": {"problem": "Read-only file system"}}, "disk /d: Read-only file system"),
    ({"disk": {"write": 100.0}}, "disk /d: writes 100 MB/s, the median node 1e+03"),
]


def test_the_node_that_differs_is_named_and_no_other():
    judged = {text: complaints(found(c=fault)) for fault, text in FAULTS}
    assert {text: lines[1:] for text, lines in judged.items() if lines[1:] != ["bad nodes: c"]} == {}
    assert [text for text, (line, *_) in judged.items() if not line.startswith(f"c: {text}") or "; " not in line] == []


def test_equal_nodes_are_fit_and_a_little_less_is_no_fault():
    assert complaints(found()) == ["bad nodes: "]
    slower = {"tflops": 600.0, "gb_per_s": 330.0, "free_gb": 91.0}
    assert complaints(found(c={"device": slower, "between": 250.0, "ahead_s": 0.9})) == ["bad nodes: "]


def test_judging_without_a_clear_majority():
    """All nodes are named if they do not agree. Of two nodes the faster sets the measure. A silent node is bad."""
    lines = complaints(found(a={"facts": {"driver": "d 2"}}, b={"facts": {"driver": "d 2"}}))
    assert lines[-1] == "bad nodes: a,b,c,d" and "the nodes do not agree" in lines[0]
    args = argparse.Namespace(**vars(ARGS) | {"nodes": ["a", "b"]})
    nodes = {node: one for node, one in found(b={"device": {"tflops": 500.0}}).items() if node < 2}
    assert complaints(nodes, args)[-1] == "bad nodes: b"
    nodes = found()
    del nodes[2]
    assert complaints(nodes)[-1] == "bad nodes: c"


# Pairs


def test_a_ring_pairs_all_neighbours_once_and_no_node_twice_in_a_round():
    for count in range(2, 9):
        nodes = list(range(10, 10 + count))
        rounds = preflight.ring(nodes)
        pairs = [tuple(sorted(pair)) for groups in rounds for pair in groups]
        assert len(pairs) == len(set(pairs)) == (1 if count == 2 else count)
        for groups in rounds:
            assert len({node for pair in groups for node in pair}) == 2 * len(groups)
        degree = [sum(node in pair for pair in pairs) for node in nodes]
        assert degree == [1 if count == 2 else 2] * count


def test_pairs_find_the_slow_nodes_also_when_a_good_one_is_between_two():
    """A pair is as slow as its slower node; 6 nodes."""

    class Network(preflight.Leader):
        def round(self, groups):
            speeds = {node: 30.0 if bad & set(group) else 300.0 for group in groups for node in group}
            return {node: {"devices": [DEVICE | {"gb_per_s": speed}]} for node, speed in speeds.items()}

    for bad in ({3}, {2, 4}, {0, 1}, {5}, set()):
        nodes = {number: NodeReport({}, 0.0, {}) for number in range(6)}
        Network(None, 6, slow=0.8).pair(list(nodes), nodes)
        assert {number for number, report in nodes.items() if report.between < 240} == bad


# What the operating system says


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


def test_links_count_ports_by_speed_and_leave_out_what_is_no_hardware(tmp_path):
    assert preflight.links(tmp_path) == "none"
    for port in range(3):
        tree(tmp_path, **{f"class__infiniband__m{port}__ports__1__state": "4: ACTIVE"})
        tree(tmp_path, **{f"class__infiniband__m{port}__ports__1__rate": "400 Gb/sec (4X NDR)"})
    tree(tmp_path, class__infiniband__m2__ports__1__state="1: DOWN")
    tree(tmp_path, class__net__e0__operstate="up", class__net__e0__speed="25000", class__net__e0__device__x="")
    tree(tmp_path, class__net__e1__operstate="down", class__net__e1__device__x="")
    tree(tmp_path, class__net__docker0__operstate="up", class__net__docker0__speed="10000")
    assert preflight.links(tmp_path) == "RDMA 2 x 400 Gb/s + 1 x down, Ethernet 1 x 25 Gb/s + 1 x down"


def test_driver(tmp_path):
    assert preflight.driver(tmp_path).startswith("Linux ")
    assert preflight.driver(tree(tmp_path, module__amdgpu__version="6.12")) == "amdgpu 6.12"


def test_disk(tmp_path):
    assert set(preflight.disk(tmp_path)) == {"free_gb", "write", "read"}
    assert not list(tmp_path.iterdir())
    assert preflight.disk(tmp_path / "none") == {"problem": "No such file or directory"}
    tree(tmp_path, file="")
    assert preflight.disk(tmp_path / "file") == {"problem": "Not a directory"}
    assert preflight.disk(Path("/dev/full").parent / "nothing")["problem"]


# Measurements


def python(*programs: str, wait_s: float = 20) -> dict:
    return preflight.measured([[sys.executable, "-c", program] for program in programs], wait_s)


def test_what_processes_find_is_their_last_line_and_one_that_hangs_is_killed():
    one, two = "print('noise'); print('{\"tflops\": 1}')", "print('{\"tflops\": 2}')"
    assert python(one, two) == {"devices": [{"tflops": 1}, {"tflops": 2}]}
    assert python("print('{}')", "import time; time.sleep(100)", wait_s=1) == {"problem": "device 1 hangs for 1 s"}


@pytest.mark.timeout(60)
def test_a_process_that_fails_is_blamed_not_those_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(preflight, "LINGER_S", 0.2)
    found = python("import time; time.sleep(100)", "raise RuntimeError('fell off the bus')", wait_s=3600)
    assert found == {"problem": "device 1: exit code 1: RuntimeError: fell off the bus"}


# Arguments


ADDRESS = "give HOST:PORT of the first node, with a port from"
REFUSED = [
    (["--nodes=a,b", "--address=h:1"], "which of --nodes=a,b is this"),
    (["--nodes=a,b", "--node=2", "--address=h:1"], "which of --nodes=a,b is this"),
    (["--nodes=a,b", "--node=1"], f"--address=127.0.0.1:0: {ADDRESS} 1 to"),
    (["--nodes=a,b", "--node=1", "--address=h"], f"--address=h: {ADDRESS} 1 to"),
    *(
        ([f"--address={address}"], f"--address={address}: {ADDRESS} 0 to")
        for address in ("foo", "127.0.0.1", "127.0.0.1:abc", "127.0.0.1:99999", "127.0.0.1:-1", ":1")
    ),
    *(
        ([f"--{option}={value}"], f"argument --{option}: '{value}': give a number from ")
        for option in ("free", "slow", "clock", "wait")
        for value in ("nan", "inf", "-1.0", "x")
    ),
    (["--slow=1.1"], "argument --slow: '1.1': give a number from 0 to 1"),
    (["--wait=0"], "argument --wait: '0': give a number from 1 to 86400"),
    *(([f"--gpus={count}"], f"'{count}': give a whole number from 1 to 1024") for count in ("0", "-1", "1.5")),
]


def test_arguments_that_make_no_sense_are_refused(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    wrong = {}
    for argv, text in REFUSED:
        code, lines = commands.main(argv), capsys.readouterr().err.splitlines()
        if code != 2 or len(lines) != 1 or text not in lines[0]:
            wrong[" ".join(argv)] = (code, lines)
    assert wrong == {}


def test_the_least_and_the_most_of_a_range_are_taken(monkeypatch):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    parsed = commands.parse(["--free=0", "--slow=1", "--clock=0", "--wait=1", "--gpus=1", "--address=h:65535"])
    assert (parsed.free, parsed.slow, parsed.clock, parsed.wait, parsed.gpus) == (0, 1, 0, 1, 1)


def test_a_node_knows_its_place(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_NODEID", "x")
    assert commands.main([]) == 2 and "SLURM_NODEID=x: give a whole number" in capsys.readouterr().err
    assert commands.parse(["--node=0"]).node == 0
    host = socket.gethostname().partition(".")[0]
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert commands.parse(["--nodes", f"a,{host}", "--address=a:1"]).node == 1
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert commands.parse(["--nodes", f"a,{host}", "--address=a:1"]).node == 0


# Nodes that are processes


class Nodes:
    """Processes that play the nodes n0, n1, ... but those left out. last: environment of the last one."""

    def __init__(self, count: int, *argv: str, absent: tuple[int, ...] = (), **last: str):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{one.getsockname()[1]}"
        names = ",".join(f"n{number}" for number in range(count))
        command = [sys.executable, "-m", "flux_ref.preflight", f"--nodes={names}", f"--address={address}", *argv]
        options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.processes = {}
        for number in set(range(count)) - set(absent):
            env = os.environ | (last if number == count - 1 else {})
            argv = [*command, f"--node={number}"]
            self.processes[number] = subprocess.Popen(argv, env=env, start_new_session=True, **options)

    def wait(self) -> tuple[dict[int, int], dict[int, str]]:
        """Exit codes and what was printed."""
        said = {number: process.communicate(timeout=500)[0] for number, process in self.processes.items()}
        return {number: process.returncode for number, process in self.processes.items()}, said


@pytest.mark.slow
def test_two_nodes_are_fit(tmp_path):
    codes, said = Nodes(2, "--slow=0.02", "--wait=100", f"--disk={tmp_path}", "--free=0").wait()
    assert codes == {0: 0, 1: 0} and said[1] == ""
    *rows, last = said[0].splitlines()
    assert [row.split(": ")[0] for row in rows] == ["n0", "n1"] and last == "preflight: 2 nodes are fit"
    assert all("1 x CPU" in row and "GB/s between" in row for row in rows)


@pytest.mark.nightly
def test_a_node_that_does_not_come_is_named_and_the_others_go_home():
    codes, said = Nodes(3, "--wait=30", absent=(1,)).wait()
    assert codes == {0: 3, 2: 3} and said[2] == ""
    first, last = said[0].splitlines()
    assert first.startswith("preflight: n1: has not come within 30 s; ") and last == "preflight: bad nodes: n1"


def test_a_first_node_that_does_not_answer_is_named_and_an_address_that_makes_no_sense_is_refused(monkeypatch, capsys):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        cases = [
            (1, f"127.0.0.1:{port}", f"n0: 127.0.0.1:{port} does not answer ("),
            (1, "no..host:29711", "n0: no..host:29711 does not answer ("),
            (0, "no..host:29711", "--address=no..host:29711: "),
        ]
        for node, address, text in cases:
            args = commands.parse(["--nodes=n0,n1", f"--node={node}", f"--address={address}"])
            args.wait = 0.2
            code = attempt("preflight", functools.partial(commands.check, args))
            lines = capsys.readouterr().err.splitlines()
            assert lines[0].startswith(f"preflight: {text}") and lines[1:] == ["preflight: bad nodes: n0"] * node
            assert code == (Fault if node else Refusal).exit_code


@pytest.mark.slow
def test_a_listener_that_is_no_store_is_not_waited_for_longer_than_asked():
    """In a process of its own: c10d goes on waiting behind our back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "flux_ref.preflight", "--nodes=n0,n1", "--wait=1", "--node=1"]
        done = subprocess.run([*command, f"--address={address}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    silent = f"preflight: n0: {address} listens but does not answer within 1 s; has another program that port?"
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [silent, "preflight: bad nodes: n0"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_node_whose_processes_hang_is_named(tmp_path):
    """What measures on the last of three nodes is stopped for good."""
    nodes = Nodes(3, "--slow=0", "--wait=30", f"--disk={tmp_path}", "--free=0")
    done = threading.Event()

    def stop() -> None:
        parent = nodes.processes[2].pid
        while not done.wait(0.05):
            for pid in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    threading.Thread(target=stop, daemon=True).start()
    codes, said = nodes.wait()
    done.set()
    assert codes[0] == 3 and said[0].splitlines()[-1] == "preflight: bad nodes: n2", said[0]
    assert "hangs" in said[0], said[0]


@pytest.mark.nightly
def test_a_node_that_is_slower_than_the_others_is_named(tmp_path):
    """All takes a hundred times as long on the last of three nodes, by its clock: other work here must not show."""
    code = "import time\nnow = time.perf_counter\ntime.perf_counter = lambda: 100 * now()\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    options = ("--slow=0.05", "--wait=200", f"--disk={tmp_path}", "--free=0")
    codes, said = Nodes(3, *options, PYTHONPATH=str(tmp_path)).wait()
    assert codes[0] == 3 and said[0].splitlines()[-1] == "preflight: bad nodes: n2", said[0]
    assert "hangs" not in said[0] and "TFLOP/s" in said[0], said[0]
