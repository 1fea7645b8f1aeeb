"""The captioned sheet of generated pictures, and the strip that shows the first row of each sheet of a run."""

import textwrap
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torchvision.utils import make_grid

from flux_ref.errors import printable
from flux_ref.files import matching, write_png

# Pixels
GAP = 6
CAPTION_HEIGHT = 36
HEIGHT = 160  # pictures of fewer rows are enlarged
STRIP_LEFT = 90  # beside the pictures of a strip

COLUMNS = 6


def save(pictures: list[np.ndarray], captions: list[str], path: Path) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each above its caption."""
    tiles = [_tile(picture, caption) for picture, caption in zip(pictures, captions)]
    sheet = make_grid(tiles, nrow=COLUMNS, padding=GAP, pad_value=255)
    path.parent.mkdir(exist_ok=True)
    write_png(path, Image.fromarray(sheet.permute(1, 2, 0).numpy()))


def strip(folder: Path, rows: int) -> None:
    """Rewrite strip.png from the sheets in a folder: the first row of each, the newest at the bottom.

    rows: of pixels of a picture.
    """
    paths = [path for path in matching(folder, "*.png") if path.stem.isdecimal()]  # people put others there
    step = max(rows, HEIGHT) + GAP
    width = STRIP_LEFT + Image.open(paths[-1]).width
    image = Image.new("RGB", (width, len(paths) * step + CAPTION_HEIGHT + GAP), "white")
    pen = ImageDraw.Draw(image)
    for row, path in enumerate(paths):
        image.paste(Image.open(path), (STRIP_LEFT, row * step))  # the next row covers all but its first
        pen.text((GAP, row * step + GAP), f"{int(path.stem):,}", "black")
    write_png(folder / "strip.png", image)


def _tile(picture: np.ndarray, caption: str) -> torch.Tensor:
    """A picture above at most two lines of its caption, (3, rows, columns) uint8."""
    pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255)
    image = Image.fromarray(pixels.astype(np.uint8))
    image = ImageOps.scale(image, max(1.0, HEIGHT / image.height))
    tile = Image.new("RGB", (image.width, image.height + CAPTION_HEIGHT), "white")
    tile.paste(image)
    text = textwrap.fill(printable(caption), image.width // 6, max_lines=2)
    ImageDraw.Draw(tile).text((4, image.height + 3), text, "black")
    return torch.from_numpy(np.array(tile)).permute(2, 0, 1)
