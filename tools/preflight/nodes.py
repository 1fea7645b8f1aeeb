"""How nodes measure themselves and each other.

Node 0 hosts a store at an address that all nodes reach. It calls the roll and has groups of nodes measured in rounds:
first each node alone, then all pairs of neighbours on a ring. Each measurement is made by processes of its own
(fitness.py). They are killed if they hang, so a dead device or link ends no other measurement.
"""

import argparse
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from flux_ref.errors import Fault, Refusal
from flux_ref.formats.outside import one_line
from tools.preflight.verdict import NodeReport

POLL_S = 0.005


class Node:
    """This node among the others, and the store that they share."""

    def __init__(self, args: argparse.Namespace, facts: dict[str, object]):
        """facts: what this node has. Raises: Refusal; Fault if node 0 does not answer."""
        self.number = args.node
        self.gpus = args.gpus
        self.wait_s = args.wait
        host, _, port = args.address.rpartition(":")
        try:
            if self.number:
                awaited(host, int(port), self.wait_s)
                own = {"is_master": False}
            else:
                port, own = listener(host, int(port), len(args.nodes))
            wait = timedelta(seconds=self.wait_s)
            open_store = partial(dist.TCPStore, host, int(port), wait_for_workers=False, timeout=wait, **own)
            self.store = within(self.wait_s, open_store)
        except (RuntimeError, OSError, UnicodeError) as error:
            why = (str(error) or f"no store answers within {self.wait_s:g} s").splitlines()[0]
            if self.number:
                name = args.nodes[0]
                what = f"{args.address} does not answer: {why}; has another program that port?"
                print(one_line(f"preflight: {name}: {what}"), file=sys.stderr, flush=True)
                raise Fault(f"bad nodes: {name}") from None  # slurm.sbatch looks for this line
            raise Refusal(f"--address={args.address}: {why}; choose a name of node 0 and a free port") from None
        self.address = f"{host}:{self.store.port}"
        self.set(f"here/{self.number}", facts)

    def set(self, key: str, value: object = "") -> None:
        """Give a value to all nodes."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str, wait_s: float) -> object:
        """The value of a key; None if it does not come in time. Raises: Fault if node 0 has ended."""
        deadline = time.monotonic() + wait_s
        try:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_S)
            return json.loads(self.store.get(key))
        except ValueError:
            raise Fault(f"{self.address} gives no JSON for {key}; does something else write to this port?") from None
        except RuntimeError:
            raise Fault("node 0 has ended") from None

    def serve(self) -> None:
        """The part of all nodes but node 0: measure in every round. Raises: Fault."""
        turn = 0
        while groups := self.get(f"round/{turn}", 3 * self.wait_s):
            self.measure(turn, groups)
            turn += 1
        if groups is None:
            raise Fault("node 0 does not go on")
        self.set(f"bye/{self.number}")

    def measure(self, turn: int, groups: list[list[int]]) -> None:
        """This node's part in a round. Sets turn/TURN/NODE to the figures of its devices, or to a problem."""
        group = next((group for group in groups if self.number in group), None)
        if group is None:
            return
        first = group.index(self.number) * self.gpus
        commands = []
        for gpu in range(self.gpus):
            words = (first + gpu, len(group) * self.gpus, gpu, self.address, f"{turn}/{group}")
            commands.append([sys.executable, "-m", "tools.preflight.fitness", *map(str, words)])
        self.set(f"turn/{turn}/{self.number}", measured(commands, self.wait_s))


class Leader(Node):
    """Node 0."""

    turn = 0

    def gather(self, key: str, nodes: Iterable[int], wait_s: float) -> dict[int, object]:
        """{node: its value} of the nodes that set it in time."""
        deadline = time.monotonic() + wait_s
        values = {node: self.get(key.format(node), deadline - time.monotonic()) for node in nodes}
        return {node: value for node, value in values.items() if value is not None}

    def round(self, groups: list[list[int]]) -> dict[int, dict]:
        """Have groups of nodes measured at the same time: {node: its figures or problem}."""
        turn = self.turn
        nodes = [node for group in groups for node in group]
        begin = time.monotonic()
        self.turn = self.turn + 1
        self.set(f"round/{turn}", groups)
        self.measure(turn, groups)
        results = self.gather(f"turn/{turn}/{{}}", nodes, 2 * self.wait_s - (time.monotonic() - begin))
        return {node: results.get(node, {"problem": "answers no more"}) for node in nodes}

    def survey(self, facts: dict[int, dict]) -> dict[int, NodeReport]:
        """Measure each node alone and between its neighbours."""
        alone = self.round([[node] for node in facts])
        reports = {node: NodeReport(facts[node], alone[node]) for node in facts}
        for groups in ring([node for node, result in alone.items() if "devices" in result]):
            for node, result in self.round(groups).items():
                reports[node].add_pair(result)
        return reports

    def end(self, nodes: Iterable[int]) -> None:
        """Let the others end before this process, as the store ends with it."""
        self.set(f"round/{self.turn}", [])
        self.gather("bye/{}", set(nodes) - {0}, 5.0)


def listener(host: str, port: int, nodes: int) -> tuple[int, dict[str, object]]:
    """The port of node 0's store, and the store's options for a socket that listens on this address only.

    By itself the store listens on every network of the node, and it takes what anybody sends. It still does so where
    /etc/hosts leads the node's own name to the node itself (127.0.1.1) and other nodes come. Raises: OSError.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if nodes > 1 and host != address[0] and ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        return port, {"is_master": True}
    own = socket.create_server(address[:2], family=family)
    return own.getsockname()[1], {"is_master": True, "master_listen_fd": own.detach()}


def awaited(host: str, port: int, wait_s: float) -> None:
    """Wait until something listens at an address. Raises: OSError, UnicodeError. c10d would print a traceback."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=wait_s).close()
        except (OSError, UnicodeError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def ring(nodes: list[int]) -> list[list[list[int]]]:
    """Every pair of neighbours on a ring, in rounds in which no node has two."""
    if len(nodes) < 3:
        return [[nodes]] if len(nodes) == 2 else []
    pairs = [list(pair) for pair in zip(nodes, nodes[1:] + nodes[:1])]
    odd = [[pairs.pop()]] if len(nodes) % 2 else []
    return [pairs[::2], pairs[1::2], *odd]


def within(wait_s: float, task: Callable[[], object]) -> object:
    """What a task returns or raises. Raises: TimeoutError if it hangs, as c10d does on a listener that is no store."""
    future = Future()

    def work() -> None:
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(wait_s)


def measured(commands: list[list[str]], wait_s: float) -> dict[str, object]:
    """{"devices": the figures of each process of fitness.py}, or {"problem": what one process met}."""
    with ThreadPoolExecutor(len(commands)) as pool:
        ends = list(pool.map(partial(ended, wait_s), commands))
    hanging = [device for device, (code, _) in enumerate(ends) if code is None]
    for device, (code, last) in enumerate(ends):
        if code:  # what hangs may have waited for it
            return {"problem": f"device {device}: exit code {code}: {last}"}
    if hanging:
        return {"problem": f"device {hanging[0]} hangs for {wait_s:g} s"}
    return {"devices": [json.loads(last) for _, last in ends]}


def ended(wait_s: float, command: list[str]) -> tuple[int | None, str]:
    """The exit code of a process, and its line of JSON or its last line of an error; None for one that hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=wait_s)
    except subprocess.TimeoutExpired:
        return None, ""
    said = done.stderr.strip().splitlines()
    if not done.returncode:
        said = [line for line in done.stdout.splitlines() if line.startswith("{")]  # NCCL writes lines around it
    return done.returncode, (said or [""])[-1]


# What the operating system says


def facts(gpus: int) -> dict[str, object]:
    """What a node has."""
    return {"gpus": gpus, "driver": driver(), "links": links()}


def links(sys_root: Path = Path("/sys")) -> str:
    """The ports of InfiniBand and RoCE and the physical network cards: how many at which speed, how many down."""
    found = Counter()
    for port in (sys_root / "class/infiniband").glob("*/ports/*"):
        up = "ACTIVE" in _text(port / "state")
        found["RDMA " + (f"{_text(port / 'rate').split(' ')[0]} Gb/s" if up else "down")] += 1
    for device in (sys_root / "class/net").glob("*/device"):
        mbits = _text(device.parent / "speed")
        speed = f"{int(mbits) / 1000:g} Gb/s" if mbits.isdigit() else "up"
        found["Ethernet " + (speed if _text(device.parent / "operstate") == "up" else "down")] += 1
    return ", ".join(f"{count} x {link}" for link, count in sorted(found.items())) or "none"


def driver(sys_root: Path = Path("/sys")) -> str:
    """The version of the devices' kernel driver, else of the kernel."""
    for name in ("nvidia", "amdgpu"):
        if version := _text(sys_root / "module" / name / "version"):
            return f"{name} {version}"
    return f"Linux {os.uname().release}"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a card that is down has no speed
        return ""
