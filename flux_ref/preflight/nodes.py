"""How nodes measure themselves and each other.

Node 0 hosts a store at an address that all nodes reach. It calls the roll, compares the clocks, and has groups of nodes
measured in rounds: first each node alone, then all pairs of neighbours on a ring. A node is slow if both of its pairs
are slow. A good node between two slow ones looks the same, so suspects are paired once more, with nodes that are fast.
Each measurement is made by processes of its own (fitness.py). They are killed if they hang, so a dead device or link
ends no other measurement.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from flux_ref.errors import Fault, Refusal
from flux_ref.preflight.verdict import NodeReport

PINGS = 5
POLL_S = 0.005
LINGER_S = 5.0  # lets processes that have lost another end by themselves
SILENT = {"problem": "answers no more"}
PIECE, PIECES = 1 << 20, 64  # bytes that are written and read back


class Gone(Fault):
    """Node 0 does not answer."""

    def __init__(self, name: str, what: str):
        super().__init__(f"{name}: {what}\npreflight: bad nodes: {name}")


class Node:
    """This node among the others, and the store that they share."""

    def __init__(self, args: argparse.Namespace):
        """Raises: Refusal; Gone if node 0 does not answer."""
        self.number, self.gpus, self.folders, self.wait_s = args.node, args.gpus, args.disk, args.wait
        host, _, port = args.address.rpartition(":")
        if self.number:
            self._await(host, int(port), args.nodes[0])
        try:
            self.store = within(self.wait_s, lambda: self._store(host, int(port)))
        except (RuntimeError, OSError, UnicodeError) as error:
            silent = f"does not answer within {self.wait_s:g} s"
            if self.number and isinstance(error, TimeoutError):
                what = f"{args.address} listens but {silent}; has another program that port?"
                raise Gone(args.nodes[0], what) from None
            why = (str(error) or silent).splitlines()[0]
            raise Refusal(f"--address={args.address}: {why}; choose a name of node 0 and a free port") from None
        self.address = f"{host}:{self.store.port}"

    def _store(self, host: str, port: int) -> dist.TCPStore:
        leads = self.number == 0
        if leads:
            socket.getaddrinfo(host, port)  # c10d would try an unknown name again and again
        wait = timedelta(seconds=self.wait_s)
        return dist.TCPStore(host, port, is_master=leads, wait_for_workers=False, timeout=wait)

    def _await(self, host: str, port: int, name: str) -> None:
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                return socket.create_connection((host, port), timeout=self.wait_s).close()
            except (OSError, UnicodeError) as error:
                if time.monotonic() > deadline:
                    raise Gone(name, f"{host}:{port} does not answer ({error})") from None
                time.sleep(0.2)

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
        except RuntimeError:
            raise Fault("node 0 has ended") from None

    def serve(self) -> bool:
        """The part of all nodes but node 0: answer the roll and the pings, then measure in every round.

        Returns whether node 0 ended it.
        """
        self.set(f"here/{self.number}", self.gpus)
        for ping in range(PINGS):
            if not self.get(f"ask/{self.number}/{ping}", 3 * self.wait_s):
                return False
            self.set(f"clock/{self.number}/{ping}", time.time())
        self.set(f"facts/{self.number}", self.facts())
        turn = 0
        while groups := self.get(f"round/{turn}", 3 * self.wait_s):
            self.measure(turn, groups)
            turn += 1
        self.set(f"bye/{self.number}")
        return groups is not None

    def facts(self) -> dict[str, object]:
        """What the operating system says about this node."""
        disks = {str(path): disk(path) for path in self.folders}
        return {"driver": driver(), "links": links(), "disks": disks}

    def measure(self, turn: int, groups: list[list[int]]) -> None:
        """This node's part in a round. Sets turn/TURN/NODE to the figures of its devices, or to a problem."""
        group = next((group for group in groups if self.number in group), None)
        if group is None:
            return
        first, size, name = group.index(self.number) * self.gpus, len(group) * self.gpus, f"{turn}/{group}"
        words = [(first + gpu, size, gpu, self.address, name) for gpu in range(self.gpus)]
        module = [sys.executable, "-m", "flux_ref.preflight.fitness"]
        self.set(f"turn/{turn}/{self.number}", measured([[*module, *map(str, line)] for line in words], self.wait_s))


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
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = [subprocess.Popen(command, stdout=file, stderr=file) for command, file in zip(commands, files)]
        deadline = time.monotonic() + wait_s
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
            if any(codes):  # the others may wait for it
                deadline = min(deadline, time.monotonic() + LINGER_S)
            time.sleep(POLL_S)
        for process in processes:
            process.kill()
            process.wait()
        for file in files:
            file.seek(0)
        last = [(file.read().strip().splitlines() or [""])[-1] for file in files]
    for device, code in enumerate(codes):
        if code:
            return {"problem": f"device {device}: exit code {code}: {last[device]}"}
    if None in codes:
        return {"problem": f"device {codes.index(None)} hangs for {wait_s:g} s"}
    return {"devices": [json.loads(line) for line in last]}


class Leader:
    """Node 0's part."""

    def __init__(self, node: Node, nodes: int, slow: float):
        self.node, self.slow, self.turn = node, slow, 0
        self.everyone = range(nodes)

    def roll(self) -> dict[int, int]:
        """{node: number of its devices} of the nodes that come."""
        self.node.set("here/0", self.node.gpus)
        return self._gather("here/{}", self.everyone, self.node.wait_s)

    def dismiss(self) -> None:
        """End the nodes that wait for a ping."""
        for node in self.everyone[1:]:
            self.node.set(f"ask/{node}/0", False)
        time.sleep(1.0)  # the store ends with this process

    def _gather(self, key: str, nodes: Sequence[int], wait_s: float) -> dict[int, object]:
        """{node: its value} of the nodes that set it in time."""
        deadline = time.monotonic() + wait_s
        values = {node: self.node.get(key.format(node), deadline - time.monotonic()) for node in nodes}
        return {node: value for node, value in values.items() if value is not None}

    def ahead(self, node: int) -> float:
        """Seconds by which a node's clock is ahead of this one's, from the fastest ping; 0 if it does not answer."""
        pings = []
        for ping in range(PINGS):
            asked = time.time()
            self.node.set(f"ask/{node}/{ping}", True)
            there = self.node.get(f"clock/{node}/{ping}", self.node.wait_s)
            if there is None:
                return 0.0
            answered = time.time()
            pings.append((answered - asked, there - (asked + answered) / 2))
        return min(pings)[1]

    def round(self, groups: list[list[int]]) -> dict[int, dict]:
        """Have groups of nodes measured at the same time: {node: its figures or problem}."""
        turn, nodes = self.turn, [node for group in groups for node in group]
        begin, self.turn = time.monotonic(), self.turn + 1
        self.node.set(f"round/{turn}", groups)
        self.node.measure(turn, groups)
        results = self._gather(f"turn/{turn}/{{}}", nodes, 2 * self.node.wait_s - (time.monotonic() - begin))
        return {node: results.get(node, SILENT) for node in nodes}

    def survey(self) -> dict[int, NodeReport]:
        """All that there is to know about all nodes. Ends the service of the others."""
        ahead = {node: self.ahead(node) if node else 0.0 for node in self.everyone}
        self.node.set("facts/0", self.node.facts())
        facts = self._gather("facts/{}", self.everyone, self.node.wait_s)
        alone = self.round([[node] for node in facts])
        reports = {node: NodeReport(facts[node], ahead[node], alone[node]) for node in facts}
        self.pair([node for node in facts if "devices" in alone[node]], reports)
        self.node.set(f"round/{self.turn}", [])
        self._gather("bye/{}", list(facts)[1:], 5.0)  # the store ends with this process
        return reports

    def pair(self, nodes: list[int], reports: dict[int, NodeReport]) -> None:
        """Measure pairs of nodes: neighbours on a ring, then slow nodes with fast ones. The reports take the best."""
        for groups in ring(nodes):
            self._between(groups, reports)
        if len(nodes) > 2:
            limit = self.slow * statistics.median_high(reports[node].between for node in nodes)
            fast = [node for node in nodes if reports[node].between >= limit]
            suspects = [node for node in nodes if node not in fast]
            for begin in range(0, len(suspects), len(fast)):
                self._between([list(pair) for pair in zip(suspects[begin:], fast)], reports)

    def _between(self, groups: list[list[int]], reports: dict[int, NodeReport]) -> None:
        for node, result in self.round(groups).items():
            speed = min((device["gb_per_s"] for device in result.get("devices", ())), default=0.0)
            reports[node].between = max(reports[node].between, speed)
            reports[node].problem = result.get("problem", "")


def ring(nodes: list[int]) -> list[list[list[int]]]:
    """Every pair of neighbours on a ring, in rounds in which no node has two."""
    if len(nodes) < 3:
        return [[nodes]] if len(nodes) == 2 else []
    pairs = [[node, nodes[(place + 1) % len(nodes)]] for place, node in enumerate(nodes)]
    odd = [pairs.pop()] if len(nodes) % 2 else []
    return [pairs[::2], pairs[1::2], *([odd] if odd else [])]


# What the operating system says


def links(sys_root: Path = Path("/sys")) -> str:
    """The ports of InfiniBand and RoCE and the physical network cards: how many at which speed, how many down."""
    speeds: dict[str, list[str]] = {"RDMA": [], "Ethernet": []}
    for port in (sys_root / "class/infiniband").glob("*/ports/*"):
        up = "ACTIVE" in _text(port / "state")
        speeds["RDMA"].append(f"{_text(port / 'rate').split(' ')[0]} Gb/s" if up else "down")
    for card in (sys_root / "class/net").glob("*"):
        if (card / "device").exists():
            mbits = _text(card / "speed")
            known = f"{int(mbits) / 1000:g} Gb/s" if mbits.isdigit() else "up"
            speeds["Ethernet"].append(known if _text(card / "operstate") == "up" else "down")
    counted = [
        f"{kind} " + " + ".join(f"{count} x {speed}" for speed, count in sorted(Counter(found).items()))
        for kind, found in speeds.items()
        if found
    ]
    return ", ".join(counted) or "none"


def driver(sys_root: Path = Path("/sys")) -> str:
    """The version of the devices' kernel driver, else of the kernel."""
    versions = [f"{name} {_text(sys_root / 'module' / name / 'version')}" for name in ("nvidia", "amdgpu")]
    return next((text for text in versions if not text.endswith(" ")), f"Linux {os.uname().release}")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a card that is down has no speed
        return ""


def disk(folder: Path) -> dict[str, object]:
    """Free space, and how fast 64 MiB are written to the disk and read back from it; or what went wrong."""
    try:
        status = os.statvfs(folder)
        piece = os.urandom(PIECE)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            for _ in range(PIECES):
                if file.write(piece) != PIECE:
                    raise OSError(0, "a write was cut short: it is full")
            os.fsync(file.fileno())
            written = time.perf_counter()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            if any(file.read(PIECE) != piece for _ in range(PIECES)):
                raise OSError(0, "it gives back other bytes than were written")
        mb, end = PIECES * PIECE / 1e6, time.perf_counter()
        free = status.f_bavail * status.f_frsize / 1e9
        return {"free_gb": free, "write": mb / (written - begin), "read": mb / (end - written)}
    except OSError as error:
        return {"problem": error.strerror}
