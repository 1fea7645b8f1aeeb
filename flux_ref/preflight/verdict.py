"""Which nodes are unfit, given the reports of all of them.

What a node has is compared with what most nodes have. How fast a node is is compared with the median node.
"""

import argparse
import statistics
from collections import Counter
from dataclasses import dataclass

DISK = 0.25  # of --slow: disks vary more than devices
NETWORK = "look at its network cards, cables and switch ports"
FREE = 0.9  # share of a device's memory that must be free


@dataclass
class NodeReport:
    """What is known about one node."""

    facts: dict  # Node.facts
    ahead_s: float  # of its clock
    alone: dict  # {"devices": figures of fitness.py} or {"problem": text}
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
        """The report in a line."""
        disks = (
            f"{name} {disk['free_gb']:,.0f} GB free, {disk['write']:,.0f} / {disk['read']:,.0f} MB/s"
            for name, disk in self.facts["disks"].items()
            if "problem" not in disk
        )
        speeds = (
            f"{self.least('tflops'):.3g} TFLOP/s",
            f"{self.least('gb_per_s'):.3g} GB/s inside",
            f"{self.between:.3g} GB/s between",
        )
        clock = f"clock {self.ahead_s:+.3f} s"
        return " | ".join((self.kinds(), self.facts["driver"], self.facts["links"], *disks, clock, *speeds))


class Verdict:
    """Complaints about nodes."""

    def __init__(self, names: list[str]):
        self.names, self.complaints = names, {}

    def add(self, node: int, what: str, remedy: str) -> None:
        self.complaints.setdefault(node, []).append(f"{what}; {remedy}")

    def same(self, what: str, values: dict[int, object], remedy: str) -> None:
        """Blame nodes that differ from most; all nodes if there is no majority."""
        (common, most), *_ = Counter(values.values()).most_common(1)
        common = common if 2 * most > len(values) else None
        others = f"most have {common}" if common is not None else "the nodes do not agree"
        for node, value in values.items():
            if value != common:
                self.add(node, f"{what} {value}, {others}", remedy)

    def fast(self, what: str, unit: str, values: dict[int, float], share: float, remedy: str) -> None:
        """Blame nodes that reach less than a share of the median node's speed."""
        median = statistics.median_high(values.values()) if values else 0.0
        for node, value in values.items():
            if value < share * median:
                self.add(node, f"{what} {value:.3g} {unit}, the median node {median:.3g}", remedy)

    def lines(self) -> list[str]:
        texts = [f"{self.names[node]}: {text}" for node in sorted(self.complaints) for text in self.complaints[node]]
        return [*texts, f"bad nodes: {','.join(self.names[node] for node in sorted(self.complaints))}"]


def judge(verdict: Verdict, reports: dict[int, NodeReport], args: argparse.Namespace) -> None:
    """Add all complaints to the verdict."""
    for node in set(range(len(args.nodes))) - reports.keys():
        verdict.add(node, "answers no more", "look at its kernel log")
    for node, report in reports.items():
        _judge_alone(verdict, node, report, args)
    for name in map(str, args.disk):
        for way in ("write", "read"):
            disks = {node: report.facts["disks"][name] for node, report in reports.items()}
            speeds = {node: disk[way] for node, disk in disks.items() if way in disk}
            verdict.fast(f"disk {name}: {way}s", "MB/s", speeds, DISK * args.slow, "look at what else uses it")
    sound = {node: report for node, report in reports.items() if report.devices}
    if not sound:
        return
    verdict.same("has", {node: report.kinds() for node, report in sound.items()}, "look for the missing device")
    for fact, remedy in (("driver", "install the same one"), ("links", "look at cable, port and switch")):
        verdict.same(fact, {node: report.facts[fact] for node, report in reports.items()}, remedy)
    multiplied = {node: report.least("tflops") for node, report in sound.items()}
    verdict.fast(
        "multiplies at", "TFLOP/s", multiplied, args.slow, "look at temperature, power limit and clocks of its devices"
    )
    inside = {node: report.least("gb_per_s") for node, report in sound.items()}
    verdict.fast("all-reduces inside the node at", "GB/s", inside, args.slow, "look at the links between its devices")
    between = {node: report.between for node, report in sound.items() if report.between}
    verdict.fast("all-reduces with its neighbours at", "GB/s", between, args.slow, NETWORK)
    for node in sound.keys() - between.keys() if len(args.nodes) > 1 else ():
        problem = sound[node].problem or "none is left"
        verdict.add(node, f"all-reduces with no neighbour: {problem}", NETWORK)


def _judge_alone(verdict: Verdict, node: int, report: NodeReport, args: argparse.Namespace) -> None:
    """Complaints about a node that need no other node."""
    if not report.devices:
        verdict.add(node, report.alone["problem"], "look at its kernel log and the device's own tools")
    for device in report.devices:
        if device.get("free_gb", 1) < FREE * device.get("total_gb", 1):
            free = f"{device['free_gb']:.0f} of {device['total_gb']:.0f} GB of device memory are free"
            verdict.add(node, free, "end the process that holds the rest")
    if abs(report.ahead_s) > args.clock:
        verdict.add(node, f"its clock is {report.ahead_s:+.1f} s off node 0's", "start its time service (chrony, ntpd)")
    for name, disk in report.facts["disks"].items():
        if "problem" in disk:
            verdict.add(node, f"disk {name}: {disk['problem']}", "mend it or name another folder")
        elif disk["free_gb"] < args.free:
            free = f"disk {name}: {disk['free_gb']:.3g} GB free, want {args.free:g}"
            verdict.add(node, free, "make room or name another folder")
