"""The chart of the losses, and the axes of all charts: the range of the losses, and round numbers along it."""

import math
from pathlib import Path

from flux_ref.formats.files import whole

INK = (40, 40, 40)
PALE = (215, 215, 215)
TRAIN = (110, 150, 205)
VAL = (200, 70, 40)
EARLY = 0.1  # this share of a run has losses so high that they would hide all others

Curve = list[tuple[float, float]]  # training samples, loss


def span(curves: list[Curve], target: float = 0.0) -> tuple[float, float]:
    """The range that a chart shows: the target (0: none) and all losses but the high ones at the start of each run."""
    late = [loss for curve in curves for samples, loss in curve if samples >= EARLY * curve[-1][0]]
    low = min([loss for curve in curves for _, loss in curve] + [target] * (target > 0), default=0.0)
    high = max([*late, target])
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
    """Save losses over training samples as a PNG. An arrow with a number is a validation loss above the chart."""
    from PIL import Image, ImageDraw, ImageFont

    width = 900
    height = 520
    left = 80
    right = 860
    bottom = 460
    top = 50
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=15)
    most_x = max([x for x, _ in train + val] + [1])
    low, high = span([curve for curve in (train, val) if curve], target)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / most_x * (right - left), bottom - (y - low) / (high - low) * (bottom - top)

    losses = ticks(low, high, 8)
    for y in losses:
        pen.line([place(0, y), place(most_x, y)], fill=PALE)
    for x in range(left, right, 16) if target > 0 else ():
        pen.line([(x, place(0, target)[1]), (x + 8, place(0, target)[1])], fill=VAL)
    pen.line([place(*point) for point in train], fill=TRAIN, width=2)
    pen.line([place(*point) for point in val], fill=VAL, width=2)
    pen.rectangle((0, 0, width, top - 1), fill="white")  # over what is above the chart
    for y, text in losses.items():
        pen.text((left - 8, place(0, y)[1]), text, fill=INK, font=font, anchor="rm")
    for x, text in ticks(0, most_x, 8).items():
        pen.text((place(x, 0)[0], bottom + 8), text, fill=INK, font=font, anchor="mt")
    pen.text(((left + right) / 2, bottom + 32), "training samples", fill=INK, font=font, anchor="mt")
    for point in val:
        x, y = place(*point)
        if y >= top:
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=VAL)
        else:
            pen.polygon([(x - 5, top + 7), (x + 5, top + 7), (x, top - 3)], fill=VAL)
            pen.text((x + 9, top + 2), f"{point[1]:.3g} (off the chart)", fill=VAL, font=font, anchor="lm")
    x = left
    lines = (("training loss", TRAIN, train), ("validation loss", VAL, val), (f"- - target {target:g}", VAL, target))
    for text, colour, is_there in lines:
        if is_there:
            pen.text((x, 12), text, fill=colour, font=font)
            x += pen.textlength(text, font) + 30
    with whole(path) as partial:
        image.save(partial, format="PNG")
