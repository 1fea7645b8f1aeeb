"""What people look at: the captioned grid of drawn pictures and the chart of the losses."""

from pathlib import Path

import numpy as np

INK, PALE, TRAIN, VAL = (40, 40, 40), (215, 215, 215), (150, 180, 220), (200, 70, 40)


def grid(pictures: list[np.ndarray], captions: list[str], path: Path, columns: int = 6) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each over its caption."""
    import torch
    from PIL import Image, ImageDraw, ImageFont
    from torchvision.utils import make_grid, save_image  # not needed for training, so not at the top

    font = ImageFont.load_default(size=12)
    side = max(160, len(pictures[0][0]))  # small pictures are enlarged
    tiles = []
    for picture, caption in zip(pictures, captions):
        pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
        tile = Image.new("RGB", (side, side + 36), "white")
        tile.paste(Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST))
        ImageDraw.Draw(tile).multiline_text((4, side + 3), _wrap(caption, side // 6), fill=INK, font=font, spacing=2)
        tiles.append(torch.from_numpy(np.array(tile)).permute(2, 0, 1).float() / 255)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")
    save_image(make_grid(torch.stack(tiles), nrow=columns, padding=6, pad_value=1.0), partial)
    partial.replace(path)


def _wrap(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width and lines[-1]:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(lines[:2])


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
    partial = path.with_name(f".{path.name}")
    image.save(partial)
    partial.replace(path)
