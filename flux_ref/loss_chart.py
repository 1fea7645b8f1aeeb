"""The chart of the losses of a run, and the range of losses that all charts show."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flux_ref.files import write_png

TRAIN = "#6e96cd"
VAL = "#c84628"
GOAL = "#3c8c46"
# Pixels of the edges of the chart in the picture.
LEFT = 80
TOP = 50
RIGHT = 860
BOTTOM = 460
EARLY = 0.1  # this share of a run has losses so high that they would hide all others

Curve = list[tuple[float, float]]  # training samples, loss


def span(curves: Sequence[Curve], target: float = 0.0) -> tuple[float, float]:
    """The range that a chart shows: the target (0: none) and all losses but the high ones at the start of each run."""
    every = [loss for curve in curves for _, loss in curve]
    late = [loss for curve in curves for samples, loss in curve if samples >= EARLY * curve[-1][0]]
    high = max([target, *late])
    low = min([target or high, *every])
    margin = 0.04 * (high - low) or 1.0
    return low - margin, high + margin


def chart(train: Curve, val: Curve, target: float, path: Path) -> None:
    """Save losses over training samples as a PNG. target: 0 for none. Losses above the range lie on its upper edge."""
    image = Image.new("RGB", (900, 520), "white")
    pen = ImageDraw.Draw(image)
    pen.font = ImageFont.load_default(size=15)
    most = max([1, *(samples for samples, _ in (*train, *val))])
    low, high = span([train, val], target)

    def place(samples: float, loss: float) -> tuple[float, float]:
        return np.interp(samples, (0, most), (LEFT, RIGHT)), np.interp(loss, (low, high), (BOTTOM, TOP))

    for share in np.linspace(0, 1, 6):
        samples = share * most
        loss = low + share * (high - low)
        x, y = place(samples, loss)
        pen.line([(LEFT, y), (RIGHT, y)], "lightgrey")
        pen.text((LEFT - 8, y), f"{loss:.3f}", "black", anchor="rm")
        pen.text((x, BOTTOM + 8), f"{samples:,.0f}", "black", anchor="mt")
    pen.text((RIGHT, BOTTOM + 32), "training samples", "black", anchor="rt")

    goal = [(0.0, target), (most, target)] if target else []
    for x, name, colour, curve in (
        (LEFT, "training loss", TRAIN, train),
        (LEFT + 140, "validation loss", VAL, val),
        (LEFT + 280, f"target {target:g}", GOAL, goal),
    ):
        if curve:
            pen.text((x, 12), name, colour)
            pen.line([place(*point) for point in curve], colour, 2)
    for point in val:
        pen.circle(place(*point), 4, VAL)
    write_png(path, image)
