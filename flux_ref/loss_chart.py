"""The chart of the losses of a run, and the range of losses that all charts show."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from flux_ref.files import whole

INK, PALE = "#282828", "#d7d7d7"
TRAIN, VAL, GOAL = "#6e96cd", "#c84628", "#3c8c46"
WIDTH, HEIGHT = 900, 520  # pixels
LEFT, TOP, RIGHT, BOTTOM = 80, 50, 860, 460
EARLY = 0.1  # this share of a run has losses so high that they would hide all others

Curve = Sequence[tuple[float, float]]  # training samples, loss


def span(curves: Sequence[Curve], target: float = 0.0) -> tuple[float, float]:
    """The range that a chart shows: the target (0: none) and all losses but the high ones at the start of each run."""
    late = [loss for curve in curves for samples, loss in curve if samples >= EARLY * curve[-1][0]]
    high = max([target, *late])
    low = min([loss for curve in curves for _, loss in curve] + [target] * (target > 0), default=0.0)
    margin = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> dict[float, str]:
    """Round numbers from low to high, two to ten of them, each with its text."""
    step = 10.0 ** math.floor(math.log10(high - low))
    step = step if high - low >= 4 * step else step / 2
    decimals = max(0, -math.floor(math.log10(step)))
    return {i * step: f"{i * step:,.{decimals}f}" for i in range(math.ceil(low / step), math.floor(high / step) + 1)}


def chart(train: Curve, val: Curve, target: float, path: Path) -> None:
    """Save losses over training samples as a PNG. target: 0 for none. Losses above the range lie on its upper edge."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    pen.font = ImageFont.load_default(size=15)
    most = max((samples for samples, _ in (*train, *val)), default=0) or 1
    low, high = span([curve for curve in (train, val) if curve], target)

    def place(samples: float, loss: float) -> tuple[float, float]:
        height = min(1.0, (loss - low) / (high - low))
        return LEFT + samples / most * (RIGHT - LEFT), BOTTOM - height * (BOTTOM - TOP)

    for loss, text in ticks(low, high).items():
        pen.line([place(0, loss), place(most, loss)], fill=PALE)
        pen.text((LEFT - 8, place(0, loss)[1]), text, fill=INK, anchor="rm")
    for samples, text in ticks(0, most).items():
        pen.text((place(samples, low)[0], BOTTOM + 8), text, fill=INK, anchor="mt")
    pen.text((RIGHT, BOTTOM + 32), "training samples", fill=INK, anchor="rt")

    goal = [(0, target), (most, target)] if target else []
    named = (("training loss", TRAIN, train), ("validation loss", VAL, val), (f"target {target:g}", GOAL, goal))
    for column, (name, colour, curve) in enumerate(named):
        if curve:
            pen.line([place(*point) for point in curve], fill=colour, width=2)
            pen.text((LEFT + 140 * column, 12), name, fill=colour)
    for point in val:
        pen.circle(place(*point), 4, fill=VAL)
    with whole(path) as partial:
        image.save(partial, format="PNG")
