"""Which nodes are unfit, given the reports of all of them.

What a node has is compared with what most nodes have. How fast a node is is compared with the median node.
"""

import statistics
from collections import Counter
from dataclasses import dataclass

NETWORK = "look at its network cards, cables and switch ports"
FREE = 0.9  # share of a device's memory that must be free


@dataclass
class NodeReport:
    """What is known about one node."""

    facts: dict  # of nodes.facts
    alone: dict  # {"devices": figures of fitness.py} or {"problem": text}
    between: float = 0.0  # GB/s in the best of its pairs
    problem: str = "no other node is left"  # in its last pair

    @property
    def devices(self) -> list[dict]:
        return self.alone.get("devices", [])

    def add_pair(self, result: dict) -> None:
        """result: of a measurement with another node, of the same form as `alone`."""
        self.problem = result.get("problem", "")
        speed = min((device["gb_per_s"] for device in result.get("devices", ())), default=0.0)
        self.between = max(self.between, speed)

    def least(self, key: str) -> float:
        return min((device[key] for device in self.devices), default=0.0)

    def kinds(self) -> str:
        counts = Counter(device["device"] for device in self.devices)
        return " + ".join(f"{count} x {name}" for name, count in counts.items())

    def row(self) -> str:
        """The report in a line."""
        inside = f"{self.least('tflops'):.3g} TFLOP/s | {self.least('gb_per_s'):.3g} GB/s inside"
        between = f"{self.between:.3g} GB/s between"
        return " | ".join((self.kinds(), self.facts["driver"], self.facts["links"], inside, between))


class Verdict:
    """Complaints about nodes."""

    def __init__(self, names: list[str]):
        self.names = names
        self.complaints: dict[int, list[str]] = {}

    def add(self, node: int, what: str, remedy: str) -> None:
        self.complaints.setdefault(node, []).append(f"{what}; {remedy}")

    def same(self, what: str, values: dict[int, object], remedy: str) -> None:
        """Blame nodes that differ from most; all nodes if there is no majority."""
        (common, most), *_ = Counter(values.values()).most_common(1)
        agreed = 2 * most > len(values)
        others = f"most have {common}" if agreed else "the nodes do not agree"
        for node, value in values.items():
            if value != common or not agreed:
                self.add(node, f"{what} {value}, {others}", remedy)

    def fast(self, what: str, unit: str, values: dict[int, float], share: float, remedy: str) -> None:
        """Blame nodes that reach less than a share of the median node's speed."""
        median = statistics.median_high(values.values()) if values else 0.0
        for node, value in values.items():
            if value < share * median:
                self.add(node, f"{what} {value:.3g} {unit}, the median node {median:.3g}", remedy)

    def lines(self) -> list[str]:
        bad = sorted(self.complaints)
        texts = [f"{self.names[node]}: {text}" for node in bad for text in self.complaints[node]]
        return [*texts, f"bad nodes: {','.join(self.names[node] for node in bad)}"]


def judge(verdict: Verdict, reports: dict[int, NodeReport], slow: float) -> None:
    """Add all complaints to the verdict. slow: the share of the median speed below which a node is slow."""
    for node, report in reports.items():
        if not report.devices:
            verdict.add(node, report.alone["problem"], "look at its kernel log and the device's own tools")
        for device in report.devices:
            if device.get("free_gb", 1) < FREE * device.get("total_gb", 1):
                free = f"{device['free_gb']:.0f} of {device['total_gb']:.0f} GB of device memory are free"
                verdict.add(node, free, "end the process that holds the rest")
    for fact, remedy in (("driver", "install the same one"), ("links", "look at cable, port and switch")):
        verdict.same(fact, {node: report.facts[fact] for node, report in reports.items()}, remedy)
    sound = {node: report for node, report in reports.items() if report.devices}
    if not sound:
        return
    verdict.same("has", {node: report.kinds() for node, report in sound.items()}, "look for the missing device")
    flops = {node: report.least("tflops") for node, report in sound.items()}
    inside = {node: report.least("gb_per_s") for node, report in sound.items()}
    between = {node: report.between for node, report in sound.items() if report.between}
    for what, unit, speeds, remedy in (
        ("multiplies at", "TFLOP/s", flops, "look at its devices' temperature, power limit and clocks"),
        ("all-reduces inside the node at", "GB/s", inside, "look at the links between its devices"),
        ("all-reduces with its neighbours at", "GB/s", between, NETWORK),
    ):
        verdict.fast(what, unit, speeds, slow, remedy)
    if len(verdict.names) > 1:
        for node in sound.keys() - between.keys():
            verdict.add(node, f"all-reduces with no neighbour: {sound[node].problem}", NETWORK)
