"""Which nodes are unfit, given the reports of all of them.

What a node has is compared with what most nodes have. How fast a node is is compared with the median node.
"""

import statistics
from collections import Counter
from dataclasses import dataclass

NETWORK = "look at its network cards, cables and switch ports"
FREE = 0.9  # share of a device's memory that must be free
ROW = "{devices} | {driver} | {links} | {tflops:.3g} TFLOP/s"
INSIDE, BETWEEN = " | {gb_per_s:.3g} GB/s inside", " | {between:.3g} GB/s between"  # if there are two devices or nodes
# What nodes must have in common, and the remedy.
ALIKE = {
    "driver": "install the same one",
    "links": "look at cable, port and switch",
    "devices": "look for the missing device",
}
# The speeds of nodes: in words, the unit, the remedy.
SPEEDS = {
    "tflops": ("multiplies at", "TFLOP/s", "look at its devices' temperature, power limit and clocks"),
    "gb_per_s": ("all-reduces inside the node at", "GB/s", "look at the links between its devices"),
    "between": ("all-reduces with its neighbours at", "GB/s", NETWORK),
}


@dataclass
class NodeReport:
    """What is known about one node."""

    facts: dict  # of nodes.facts
    alone: dict  # {"devices": figures of fitness.py} or {"problem": text}
    between: float = 0.0  # GB/s in the best of its pairs
    problem: str = "no other node is left"  # in its last pair

    def add_pair(self, result: dict) -> None:
        """result: of a measurement with another node, of the same form as `alone`."""
        self.problem = result.get("problem", "")
        self.between = max(self.between, slowest(result, "gb_per_s"))

    @property
    def known(self) -> dict[str, object]:
        """Facts, devices and speeds by name."""
        counts = Counter(device["device"] for device in self.alone.get("devices", ()))
        kinds = " + ".join(f"{count} x {name}" for name, count in counts.items())
        speeds = {name: slowest(self.alone, name) for name in ("tflops", "gb_per_s")}
        return self.facts | speeds | {"devices": kinds, "between": self.between}

    def row(self) -> str:
        """The report in a line, with what was measured."""
        known = self.known
        form = ROW + INSIDE * bool(known["gb_per_s"]) + BETWEEN * bool(self.between)
        return form.format(**known)


def slowest(found: dict, figure: str) -> float:
    """The least figure of the devices in a measurement; 0 without devices."""
    return min((device[figure] for device in found.get("devices", ())), default=0.0)


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

    def lines(self) -> list[str]:
        bad = sorted(self.complaints)
        texts = [f"{self.names[node]}: {text}" for node in bad for text in self.complaints[node]]
        return [*texts, f"bad nodes: {','.join(self.names[node] for node in bad)}"]


def judge(verdict: Verdict, reports: dict[int, NodeReport], slow: float) -> None:
    """Add all complaints to the verdict. slow: the share of the median speed below which a node is slow."""
    sound = {}
    for node, report in reports.items():
        if "problem" in report.alone:
            verdict.add(node, report.alone["problem"], "look at its kernel log and the device's own tools")
            continue
        sound[node] = report.known
        for device in report.alone["devices"]:
            if device.get("free_gb", 1) < FREE * device.get("total_gb", 1):
                free = f"{device['free_gb']:.0f} of {device['total_gb']:.0f} GB of device memory are free"
                verdict.add(node, free, "end the process that holds the rest")
        if not report.between and len(verdict.names) > 1:
            verdict.add(node, f"all-reduces with no neighbour: {report.problem}", NETWORK)
    for what, remedy in ALIKE.items() if sound else ():
        verdict.same(what, {node: known[what] for node, known in sound.items()}, remedy)
    for name, (what, unit, remedy) in SPEEDS.items():
        speeds = {node: known[name] for node, known in sound.items() if known[name]}
        median = statistics.median_high(speeds.values()) if speeds else 0.0
        for node, speed in speeds.items():
            if speed < slow * median:
                verdict.add(node, f"{what} {speed:.3g} {unit}, the median node {median:.3g}", remedy)
