"""The chart of the losses, and the axes of all charts: the range of the losses, and round numbers along it."""

import math
from itertools import pairwise
from pathlib import Path

from flux_ref.files import whole

INK = (40, 40, 40)
PALE = (215, 215, 215)
TRAIN = (110, 150, 205)
VAL = (200, 70, 40)
GOAL = (60, 140, 70)
LEFT, TOP, RIGHT, BOTTOM = 80, 50, 860, 460  # pixels
EARLY = 0.1  # this share of a run has losses so high that they would hide all others

Curve = list[tuple[float, float]]  # training samples, loss


def span(curves: list[Curve], target: float = 0.0) -> tuple[float, float]:
    """The range that a chart shows: the target (0: none) and all losses but the high ones at the start of each run."""
    losses = [target] if target > 0 else []
    late = [target]
    for curve in curves:
        for samples, loss in curve:
            losses.append(loss)
            if samples >= EARLY * curve[-1][0]:
                late.append(loss)
    low = min(losses, default=0.0)
    high = max(late)
    margin = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float, most: int) -> dict[float, str]:
    """Round numbers from low to high, each with its text, at most `most` + 1: 1, 2, 2.5 or 5 times 10 ** n apart."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step for factor in (1, 2, 2.5, 5, 10, 20) if (step := power * factor) >= least)
    decimals = len(f"{step:.9f}".rstrip("0").partition(".")[2])
    return {i * step: f"{i * step:,.{decimals}f}" for i in range(math.ceil(low / step), math.floor(high / step) + 1)}


def chart(train: Curve, val: Curve, target: float, path: Path) -> None:
    """Save losses over training samples as a PNG. target: 0 for none.

    The chart leaves out training losses above it. For validation losses an arrow with the loss lies on its upper edge.
    """
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (900, 520), "white")
    pen = ImageDraw.Draw(image)
    pen.font = ImageFont.load_default(size=15)
    most_x = max([samples for samples, _ in (*train, *val)], default=0) or 1
    low, high = span([curve for curve in (train, val) if curve], target)

    def place(samples: float, loss: float) -> tuple[float, float]:
        height = (min(loss, high) - low) / (high - low) * (BOTTOM - TOP)
        return LEFT + samples / most_x * (RIGHT - LEFT), BOTTOM - height

    for loss, text in ticks(low, high, 8).items():
        pen.line([place(0, loss), place(most_x, loss)], fill=PALE)
        pen.text((LEFT - 8, place(0, loss)[1]), text, fill=INK, anchor="rm")
    for samples, text in ticks(0, most_x, 8).items():
        pen.text((place(samples, 0)[0], BOTTOM + 8), text, fill=INK, anchor="mt")
    pen.text(((LEFT + RIGHT) / 2, BOTTOM + 32), "training samples", fill=INK, anchor="mt")

    lines = {f"target {target:g}": (GOAL, [(0, target), (most_x, target)] if target else [])}
    lines |= {"training loss": (TRAIN, train), "validation loss": (VAL, val)}
    x = LEFT
    for name, (colour, curve) in lines.items():
        if curve:
            for start, end in pairwise(curve):
                if min(start[1], end[1]) <= high:
                    pen.line([place(*start), place(*end)], fill=colour, width=2)
            pen.text((x, 12), name, fill=colour)
            x += pen.textlength(name) + 30
    for samples, loss in val:
        x, y = place(samples, loss)
        if loss <= high:
            pen.circle((x, y), 4, fill=VAL)
        else:
            pen.regular_polygon((x, y, 6), 3, fill=VAL)
            pen.text((x + 10, y), f"{loss:.3g}", fill=VAL, anchor="lb")
    with whole(path) as partial:
        image.save(partial, format="PNG")
