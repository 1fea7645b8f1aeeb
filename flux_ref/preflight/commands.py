"""Are the nodes fit for a run? Names the missing, broken, slow and odd ones, before the clock starts.

    python -m flux_ref.preflight                                                            this node alone
    srun --ntasks-per-node 1 python -m flux_ref.preflight --nodes n1,n2 --address n1:29500  all nodes, one process each

Node 0 hosts a store at the address, calls the roll, compares the clocks, and has groups of nodes measured in rounds:
first each node alone, then all pairs of neighbours on a ring. A node is slow if both of its pairs are; so would be a
good one between two slow ones, so suspects are paired once more, with nodes that are not. Each measurement is made by
processes of its own (fitness.py), which are killed if they hang: a device or a link that is dead ends no other test.

What makes a node unfit is in verdict.py. launch/slurm.sbatch requeues the job without it, launch/one_node.sh stops.

Prints a line per node, then a line per complaint: which node, what, what to do. Exit codes: 0 all nodes are fit, 3 some
are not (the last line lists them), 2 the arguments make no sense.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from flux_ref.errors import Fault, Refusal
from flux_ref.preflight import node_facts
from flux_ref.preflight.verdict import Found, Verdict, judge

PINGS = 5
POLL_S = 0.005
LINGER_S = 5.0  # lets processes that have lost another end by themselves
RANGES = {"gpus": (1, 1024), "free": (0, 10**6), "wait": (1, 86400), "slow": (0, 1), "clock": (0, 86400)}


class Node:
    """This node among the others, and the store by which they speak."""

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
                raise Gone([f"{args.nodes[0]}: {what}", f"bad nodes: {args.nodes[0]}"]) from None
            why = (str(error) or silent).splitlines()[0]
            raise Refusal(f"--address={args.address}: {why}; choose a name of node 0 and a free port") from None
        self.address = f"{host}:{self.store.port}"

    def tell(self, key: str, value: object = "") -> None:
        self.store.set(key, json.dumps(value))

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
                    raise Gone([f"{name}: {host}:{port} does not answer ({error})", f"bad nodes: {name}"]) from None
                time.sleep(0.2)

    def hear(self, key: str, wait_s: float) -> object:
        """The value of a key; None if it does not come in time. Raises: Gone if node 0 has ended."""
        deadline = time.monotonic() + wait_s
        try:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_S)
            return json.loads(self.store.get(key))
        except RuntimeError:
            raise Gone(["node 0 has ended"]) from None

    def serve(self) -> bool:
        """What all but node 0 do: answer the roll and the clock, then measure in every round.

        Returns whether that came to its end.
        """
        self.tell(f"here/{self.number}", self.gpus)
        for ping in range(PINGS):
            if not self.hear(f"ask/{self.number}/{ping}", 3 * self.wait_s):
                return False
            self.tell(f"clock/{self.number}/{ping}", time.time())
        self.tell(f"facts/{self.number}", self.facts())
        turn = 0
        while groups := self.hear(f"round/{turn}", 3 * self.wait_s):
            self.measure(turn, groups)
            turn += 1
        self.tell(f"bye/{self.number}")
        return groups is not None

    def facts(self) -> dict[str, object]:
        return {
            "driver": node_facts.driver(),
            "links": node_facts.links(),
            "disks": {str(path): node_facts.disk(path) for path in self.folders},
        }

    def measure(self, turn: int, groups: list[list[int]]) -> None:
        """This node's part in a round, told under turn/TURN/NODE: what its devices found, or a problem."""
        group = next((group for group in groups if self.number in group), None)
        if group is None:
            return
        first, size, name = group.index(self.number) * self.gpus, len(group) * self.gpus, f"{turn}/{group}"
        own = [(first + gpu, size, gpu, self.address, name) for gpu in range(self.gpus)]
        found = measured(
            [[sys.executable, "-m", "flux_ref.preflight.fitness", *map(str, args)] for args in own], self.wait_s
        )
        self.tell(f"turn/{turn}/{self.number}", found)


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
    """What processes of fitness.py, one per device, have found, or the problem of one that did not."""
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
    """What node 0 does."""

    def __init__(self, node: Node, nodes: int, slow: float):
        self.node, self.slow, self.turn = node, slow, 0
        self.everyone = range(nodes)

    def roll(self) -> dict[int, int]:
        """{node: its devices} of those that come."""
        self.node.tell("here/0", self.node.gpus)
        return self._gather("here/{}", self.everyone, self.node.wait_s)

    def dismiss(self) -> None:
        """Send home those that wait for their clocks to be asked for."""
        for node in self.everyone[1:]:
            self.node.tell(f"ask/{node}/0", False)
        time.sleep(1.0)  # the store ends with this process

    def _gather(self, key: str, nodes: Sequence[int], wait_s: float) -> dict[int, object]:
        """What nodes tell, of those that do so in time."""
        deadline = time.monotonic() + wait_s
        told = {node: self.node.hear(key.format(node), deadline - time.monotonic()) for node in nodes}
        return {node: value for node, value in told.items() if value is not None}

    def ahead(self, node: int) -> float | None:
        """Seconds by which a node's clock is ahead of ours, from the ping that was answered fastest."""
        pings = []
        for ping in range(PINGS):
            asked = time.time()
            self.node.tell(f"ask/{node}/{ping}", True)
            there = self.node.hear(f"clock/{node}/{ping}", self.node.wait_s)
            if there is None:
                return None
            heard = time.time()
            pings.append((heard - asked, there - (asked + heard) / 2))
        return min(pings)[1]

    def round(self, groups: list[list[int]]) -> dict[int, dict]:
        """Have groups of nodes measured at the same time; what each node told."""
        turn, nodes = self.turn, [node for group in groups for node in group]
        begin, self.turn = time.monotonic(), self.turn + 1
        self.node.tell(f"round/{turn}", groups)
        self.node.measure(turn, groups)
        told = self._gather(f"turn/{turn}/{{}}", nodes, 2 * self.node.wait_s - (time.monotonic() - begin))
        return {node: told.get(node, {"problem": "answers no more"}) for node in nodes}

    def survey(self) -> dict[int, Found]:
        """All there is to know of all nodes. Ends the service of the others."""
        ahead = {node: self.ahead(node) if node else 0.0 for node in self.everyone}
        self.node.tell("facts/0", self.node.facts())
        facts = self._gather("facts/{}", self.everyone, self.node.wait_s)
        alone = self.round([[node] for node in facts])
        found = {node: Found(facts[node], ahead[node] or 0.0, alone[node]) for node in facts}
        self._pair([node for node in facts if "devices" in alone[node]], found)
        self.node.tell(f"round/{self.turn}", [])
        self._gather("bye/{}", list(facts)[1:], 5.0)  # the store ends with this process
        return found

    def _pair(self, nodes: list[int], found: dict[int, Found]) -> None:
        """Measure pairs of nodes: neighbours on a ring, then those that may be slow with those that are not."""

        def run(groups: list[list[int]]) -> None:
            for node, told in self.round(groups).items():
                speed = min((device["gb_per_s"] for device in told.get("devices", ())), default=0.0)
                found[node].between = max(found[node].between, speed)
                found[node].problem = told.get("problem", "")

        for groups in ring(nodes):
            run(groups)
        if len(nodes) > 2:
            limit = self.slow * statistics.median_high(found[node].between for node in nodes)
            sound = [node for node in nodes if found[node].between >= limit]
            suspects = [node for node in nodes if node not in sound]
            for begin in range(0, len(suspects), len(sound)):
                run([list(pair) for pair in zip(suspects[begin:], sound)])


def ring(nodes: list[int]) -> list[list[list[int]]]:
    """Every pair of neighbours on a ring, in rounds in which no node has two."""
    if len(nodes) < 3:
        return [[nodes]] if len(nodes) == 2 else []
    pairs = [[node, nodes[(place + 1) % len(nodes)]] for place, node in enumerate(nodes)]
    odd = [pairs.pop()] if len(nodes) % 2 else []
    return [pairs[::2], pairs[1::2], *([odd] if odd else [])]


class Gone(Exception):
    """Node 0 does not answer; carries lines that say so."""


def check(args: argparse.Namespace) -> int:
    """Raises: Refusal, Gone."""
    node = Node(args)
    if args.node:
        return 0 if node.serve() else Fault.exit_code
    leader, verdict = Leader(node, len(args.nodes), args.slow), Verdict(args.nodes)
    came = leader.roll()
    for absent in set(leader.everyone) - came.keys():
        verdict.add(absent, f"has not come within {args.wait:g} s", f"is it up, and does it reach {args.address}?")
    if not verdict.complaints:
        verdict.same("runs with --gpus", came, "look for the missing device")
    if verdict.complaints:
        leader.dismiss()
    else:
        found = leader.survey()
        for number, one in found.items():
            print(f"{args.nodes[number]}: {one.row()}")
        judge(verdict, found, args)
    if verdict.complaints:
        print("\n".join(f"preflight: {line}" for line in verdict.lines()), flush=True)
        return Fault.exit_code
    print(f"preflight: {len(args.nodes)} nodes are fit")
    return 0


def place(names: list[str], host: str) -> int:
    """This node's place among the names; -1 if nothing tells. Raises: Refusal."""
    told = os.environ.get("SLURM_NODEID")
    if told is None:
        return names.index(host) if host in names else -1
    if not re.fullmatch("[0-9]+", told):
        raise Refusal(f"SLURM_NODEID={told}: give a whole number, or --node")
    return int(told)


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments. Raises: Refusal."""
    parser = argparse.ArgumentParser(prog="python -m flux_ref.preflight", description="Are the nodes fit for a run?")
    add = parser.add_argument
    host = socket.gethostname().partition(".")[0]
    add("--nodes", type=lambda text: text.split(","), default=[host], help="names of all nodes, by commas (this one)")
    add("--address", default="127.0.0.1:0", metavar="HOST:PORT", help="where all of them reach the first")
    add("--node", type=int, help="place of this one among them ($SLURM_NODEID, else where its hostname stands)")
    add("--gpus", type=int, help="devices per node that a run will use (what there is; 1 on the CPU)")
    add("--disk", type=Path, action="append", help="folder that must be writable; may be given again (the temporary)")
    add("--free", type=float, default=1.0, metavar="GB", help="space that it must have (1)")
    add("--wait", type=float, default=120.0, metavar="S", help="for a node to come, and for a measurement (120)")
    add("--slow", type=float, default=0.8, metavar="SHARE", help="of the median, below which a node is slow (0.8)")
    add("--clock", type=float, default=1.0, metavar="S", help="by which clocks may differ (1)")
    args = parser.parse_args(argv)
    args.disk = args.disk or [Path(tempfile.gettempdir())]
    if args.gpus is None:
        args.gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    for option, (least, most) in RANGES.items():
        value = getattr(args, option)
        if not least <= value <= most:  # NaN neither
            raise Refusal(f"--{option}={value}: give a number from {least} to {most}")
    if args.node is None:
        args.node = place(args.nodes, host)
    if not 0 <= args.node < len(args.nodes):
        raise Refusal(
            f"which of --nodes={','.join(args.nodes)} is this, {host}? give --node=0 to {len(args.nodes) - 1}"
        )
    least = 1 if len(args.nodes) > 1 else 0
    if not re.fullmatch(r".+:[0-9]{1,5}", args.address) or not least <= int(args.address.rpartition(":")[2]) <= 65535:
        raise Refusal(f"--address={args.address}: give HOST:PORT of the first node, with a port from {least} to 65535")
    return args


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        return check(args)
    except Refusal as error:
        print(f"preflight: {error}", file=sys.stderr)
        return error.exit_code
    except Gone as error:
        print("\n".join(f"preflight: {line}" for line in error.args[0]), flush=True)
        return Fault.exit_code
