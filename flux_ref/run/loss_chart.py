"""The chart of the losses."""

from pathlib import Path

from flux_ref.formats.files import whole

INK, PALE, TRAIN, VAL = (40, 40, 40), (215, 215, 215), (150, 180, 220), (200, 70, 40)


def chart(train: list[tuple[int, float]], val: list[tuple[int, float]], target: float, path: Path) -> None:
    """Save losses over training samples as a PNG: training as a line, validation as dots, the target dashed."""
    from PIL import Image, ImageDraw, ImageFont

    width, height, left, bottom, top = 900, 520, 80, 460, 50
    image = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=15)
    most_x = max([x for x, _ in train + val] + [1])
    most_y = max([y for _, y in train + val] + [1e-9]) * 1.05

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / most_x * (width - left - 40), bottom - y / most_y * (bottom - top)

    for i in range(6):
        x, y = most_x * i / 5, most_y * i / 5
        pen.line([place(0, y), place(most_x, y)], fill=PALE)
        pen.text((left - 8, place(0, y)[1]), f"{y:.2f}", fill=INK, font=font, anchor="rm")
        pen.text((place(x, 0)[0], bottom + 8), f"{x:,.0f}", fill=INK, font=font, anchor="mt")
    pen.text(((left + width - 40) / 2, bottom + 32), "training samples", fill=INK, font=font, anchor="mt")
    if 0 < target < most_y:
        for i in range(0, 100, 2):
            pen.line([place(most_x * i / 100, target), place(most_x * (i + 1) / 100, target)], fill=VAL)
    pen.line([place(*point) for point in train], fill=TRAIN, width=2)
    pen.line([place(*point) for point in val], fill=VAL, width=2)
    for point in val:
        x, y = place(*point)
        pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=VAL)
    pen.text((left + 10, 16), "training loss", fill=TRAIN, font=font)
    pen.text((left + 130, 16), "validation loss" + (f"   - - target {target:g}" if target else ""), fill=VAL, font=font)
    with whole(path) as partial:
        image.save(partial, format="PNG")
