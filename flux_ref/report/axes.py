"""Axes of charts: a frame with a legend for curves over training samples, rows for figures of systems."""

import itertools
import math
from dataclasses import dataclass

from flux_ref.report.drawing import Drawing

WIDTH, PLOT, LEFT, RIGHT, BOTTOM = 860, 320, 70, 24, 50
LEGEND_ROW, LETTER = 20, 7.6  # height; rough width
ROW, LABELS = 34, 230  # of charts with a row per system
Curve = list[tuple[float, float]]


def short(value: float) -> str:
    """1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ticks(low: float, high: float, about: int = 8) -> list[float]:
    """Round numbers from low to high, about so many."""
    raw = max(high - low, 1e-12) / about
    step = 10 ** math.floor(math.log10(raw))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Entry:
    """Of a legend."""

    text: str
    colour: str
    dashed: bool = False


class Frame:
    """Axes over a range of values under a legend, drawn first; places values. x: training samples."""

    def __init__(self, title: str, x: tuple[float, float], y: tuple[float, float], legend: list[Entry]):
        self.x, self.y = x, y
        spots = _flow([30 + LETTER * len(entry.text) for entry in legend])
        self.top = max((y for _, y in spots), default=0) + LEGEND_ROW
        self.bottom = self.top + PLOT
        self.drawing = Drawing(WIDTH, self.bottom + BOTTOM, title)
        for entry, (left, height) in zip(legend, spots):
            self.drawing.line([(left, height), (left + 18, height)], entry.colour, 3, entry.dashed)
            self.drawing.text(left + 24, height, entry.text, "ink")
        for value in ticks(*y):
            spot = self.at(x[0], value)[1]
            self.drawing.line([(LEFT, spot), (WIDTH - RIGHT, spot)], "grid", 1)
            self.drawing.text(LEFT - 8, spot, f"{value:.6g}", anchor="end")
        for value in ticks(*x):
            self.drawing.text(self.at(value, y[0])[0], self.bottom + 16, short(value), anchor="middle")
        self.drawing.text((LEFT + WIDTH - RIGHT) / 2, self.bottom + 38, "training samples", anchor="middle")

    def at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x, self.y
        return (
            LEFT + (x - x0) / ((x1 - x0) or 1) * (WIDTH - LEFT - RIGHT),
            self.bottom - (y - y0) / ((y1 - y0) or 1) * (self.bottom - self.top),
        )

    def curve(self, points: Curve, colour: str, width: float = 1.5, dashed: bool = False) -> None:
        """A line through values; what lies above or below the axes is cut off."""
        for piece in cut(points, *self.y):
            self.drawing.line([self.at(*point) for point in piece], colour, width, dashed)


def _flow(widths: list[float]) -> list[tuple[float, float]]:
    """Places of entries of these widths in rows above the axes."""
    spots, x, y = [], float(LEFT), 12.0
    for width in widths:
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + LEGEND_ROW
        spots.append((x, y))
        x += width + 14
    return spots


def cut(points: Curve, low: float, high: float) -> list[Curve]:
    """The pieces of a line between two heights."""
    pieces: list[Curve] = [[]]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        edges = sorted((edge - y0) / (y1 - y0) for edge in (low, high)) if y1 != y0 else [-1.0, 2.0]
        outside = y1 == y0 and not low <= y0 <= high
        begin, end = max(0.0, edges[0]), min(1.0, edges[1])
        if outside or begin >= end:
            pieces.append([])
            continue
        first, last = ((x0 + (x1 - x0) * share, y0 + (y1 - y0) * share) for share in (begin, end))
        if pieces[-1] and begin == 0:
            pieces[-1].append(last)
        else:
            pieces.append([first, last])
    return [piece for piece in pieces if piece]


def flattened(xs: tuple, ys: tuple, top: float) -> Curve:
    """A line that runs along `top` where it would be above it."""
    points = list(zip(xs, ys))
    crossings = [
        (x0 + (x1 - x0) * (top - y0) / (y1 - y0), top)
        for (x0, y0), (x1, y1) in itertools.pairwise(points)
        if min(y0, y1) < top < max(y0, y1)
    ]
    return sorted((x, min(y, top)) for x, y in (*points, *crossings))


class Rows:
    """A row per system over one axis of values."""

    def __init__(self, title: str, names: list[str], low: float, high: float, unit: str):
        self.height = 16 + ROW * len(names) + 46
        self.drawing = Drawing(WIDTH, self.height, title)
        self.low, self.high = low, high
        bottom = self.height - 44
        for value in ticks(low, high):
            self.drawing.line([(self.x(value), 10), (self.x(value), bottom)], "grid", 1)
            self.drawing.text(self.x(value), bottom + 14, short(value), anchor="middle")
        self.drawing.text((LABELS + WIDTH - RIGHT) / 2, self.height - 10, unit, anchor="middle")
        for i, name in enumerate(names):
            name = name if len(name) <= 28 else "..." + name[-25:]
            self.drawing.text(LABELS - 12, self.y(i), name, "ink", "end")

    def x(self, value: float) -> float:
        return LABELS + (value - self.low) / ((self.high - self.low) or 1) * (WIDTH - LABELS - 70)

    def y(self, row: int) -> float:
        return 16 + ROW * (row + 0.5)
