"""Which nodes are unfit, given what is known of all of them.

What a node has is compared with what most nodes have; how fast it is, with the median node.
"""

import argparse
import statistics
from collections import Counter
from dataclasses import dataclass

DISK = 0.25  # of --slow: disks vary more than devices
FREE = 0.9  # share of a device's memory that must be free


@dataclass
class Found:
    """What is known of one node."""

    facts: dict
    ahead_s: float
    alone: dict  # {"devices": what fitness.py says of each} or {"problem": text}
    between: float = 0.0  # GB/s in the best of its pairs
    problem: str = ""  # in its last pair

    @property
    def devices(self) -> list[dict]:
        return self.alone.get("devices", [])

    def least(self, key: str) -> float:
        return min((device[key] for device in self.devices), default=0.0)

    def kinds(self) -> str:
        return " + ".join(f"{count} x {name}" for name, count in Counter(d["device"] for d in self.devices).items())

    def row(self) -> str:
        disks = (
            f"{name} {one['free_gb']:,.0f} GB free, {one['write']:,.0f} / {one['read']:,.0f} MB/s"
            for name, one in self.facts["disks"].items()
            if "problem" not in one
        )
        return " | ".join(
            (
                self.kinds(),
                self.facts["driver"],
                self.facts["links"],
                *disks,
                f"clock {self.ahead_s:+.3f} s",
                f"{self.least('tflops'):.3g} TFLOP/s",
                f"{self.least('gb_per_s'):.3g} GB/s inside",
                f"{self.between:.3g} GB/s between",
            )
        )


class Verdict:
    """Complaints about nodes."""

    def __init__(self, names: list[str]):
        self.names, self.complaints = names, {}

    def add(self, node: int, what: str, remedy: str) -> None:
        self.complaints.setdefault(node, []).append(f"{what}; {remedy}")

    def same(self, what: str, values: dict[int, object], remedy: str) -> None:
        """Nodes have what most of them have; without a majority, all are named."""
        (common, most), *_ = Counter(values.values()).most_common(1)
        common = common if 2 * most > len(values) else None
        others = f"most have {common}" if common is not None else "the nodes do not agree"
        for node, value in values.items():
            if value != common:
                self.add(node, f"{what} {value}, {others}", remedy)

    def fast(self, what: str, unit: str, values: dict[int, float], share: float, remedy: str) -> None:
        """Nodes reach a share of what the median node does."""
        median = statistics.median_high(values.values()) if values else 0.0
        for node, value in values.items():
            if value < share * median:
                self.add(node, f"{what} {value:.3g} {unit}, the median node {median:.3g}", remedy)

    def lines(self) -> list[str]:
        found = [f"{self.names[node]}: {text}" for node in sorted(self.complaints) for text in self.complaints[node]]
        return [*found, f"bad nodes: {','.join(self.names[node] for node in sorted(self.complaints))}"]


def judge(verdict: Verdict, found: dict[int, Found], args: argparse.Namespace) -> None:
    """Who is unfit."""
    sound = {node: one for node, one in found.items() if one.devices}
    for node in set(range(len(args.nodes))) - found.keys():
        verdict.add(node, "answers no more", "look at its kernel log")
    for node, one in found.items():
        if not one.devices:
            verdict.add(node, one.alone["problem"], "look at its kernel log and the device's own tools")
        for device in one.devices:
            if device.get("free_gb", 1) < FREE * device.get("total_gb", 1):
                taken = f"{device['free_gb']:.0f} of {device['total_gb']:.0f} GB of device memory are free"
                verdict.add(node, taken, "end the process that holds the rest")
        if abs(one.ahead_s) > args.clock:
            verdict.add(
                node, f"its clock is {one.ahead_s:+.1f} s off node 0's", "start its time service (chrony, ntpd)"
            )
        for name, state in one.facts["disks"].items():
            if "problem" in state:
                verdict.add(node, f"disk {name}: {state['problem']}", "mend it or name another folder")
            elif state["free_gb"] < args.free:
                free = f"disk {name}: {state['free_gb']:.3g} GB free, want {args.free:g}"
                verdict.add(node, free, "make room or name another folder")
    if sound:
        verdict.same("has", {node: one.kinds() for node, one in sound.items()}, "look for the missing device")
        verdict.same("driver", {node: one.facts["driver"] for node, one in found.items()}, "install the same one")
        verdict.same(
            "links", {node: one.facts["links"] for node, one in found.items()}, "look at cable, port and switch"
        )
    for name in map(str, args.disk):
        for way in ("write", "read"):
            speeds = {n: one.facts["disks"][name].get(way) for n, one in found.items()}
            speeds = {node: speed for node, speed in speeds.items() if speed is not None}
            verdict.fast(f"disk {name}: {way}s", "MB/s", speeds, DISK * args.slow, "look at what else uses it")
    remedy = "look at temperature, power limit and clocks of its devices"
    verdict.fast("multiplies at", "TFLOP/s", {n: one.least("tflops") for n, one in sound.items()}, args.slow, remedy)
    remedy = "look at the links between its devices"
    inside = {node: one.least("gb_per_s") for node, one in sound.items()}
    verdict.fast("all-reduces inside the node at", "GB/s", inside, args.slow, remedy)
    remedy = "look at its network cards, cables and switch ports"
    between = {node: one.between for node, one in sound.items() if one.between}
    verdict.fast("all-reduces with its neighbours at", "GB/s", between, args.slow, remedy)
    for node in (node for node in sound if len(args.nodes) > 1 and not sound[node].between):
        verdict.add(node, f"all-reduces with no neighbour: {sound[node].problem or 'none is left'}", remedy)
