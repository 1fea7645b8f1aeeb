"""The captioned sheet of generated pictures, and the strip that shows the first row of each sheet of a run."""

import textwrap
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torchvision.utils import make_grid

from flux_ref.errors import printable
from flux_ref.files import whole

GAP, CAPTION_HEIGHT, HEIGHT = 6, 36, 160  # pixels; pictures of fewer rows than HEIGHT are enlarged
COLUMNS = 6
STRIP_LEFT, STRIP_ROWS = 90, 12  # pixels beside the pictures of a strip; its most rows


def save(pictures: list[np.ndarray], captions: list[str], path: Path) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each above its caption."""
    tiles = torch.stack([_tile(picture, caption) for picture, caption in zip(pictures, captions)])
    sheet = make_grid(tiles, nrow=COLUMNS, padding=GAP, pad_value=255)
    path.parent.mkdir(exist_ok=True)
    _save(Image.fromarray(sheet.permute(1, 2, 0).numpy()), path)


def strip(folder: Path, rows: int, samples: int) -> None:
    """Rewrite strip.png from the sheets in a folder: the first row of each, the newest at the bottom.

    rows:    of pixels of a picture.
    samples: of the newest sheet. A resumed run makes later ones again.
    """
    paths = [path for path in sorted(folder.glob("*.png")) if path.stem.isdecimal() and int(path.stem) <= samples]
    every = -(-len(paths) // STRIP_ROWS)
    paths = paths[::-every][::-1]  # always with the newest
    step = max(rows, HEIGHT) + GAP
    width = STRIP_LEFT + Image.open(paths[-1]).width
    image = Image.new("RGB", (width, len(paths) * step + CAPTION_HEIGHT + GAP), "white")
    for row, path in enumerate(paths):
        image.paste(Image.open(path), (STRIP_LEFT, row * step))  # the next row covers all but its first
        ImageDraw.Draw(image).text((GAP, row * step + GAP), f"{int(path.stem):,}", fill="black")
    _save(image, folder / "strip.png")


def _tile(picture: np.ndarray, caption: str) -> torch.Tensor:
    """A picture above at most two lines of its caption, (3, rows, columns) uint8."""
    pixels = Image.fromarray(((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255).astype(np.uint8))
    pixels = ImageOps.scale(pixels, max(1.0, HEIGHT / pixels.height), Image.Resampling.NEAREST)
    tile = Image.new("RGB", (pixels.width, pixels.height + CAPTION_HEIGHT), "white")
    tile.paste(pixels)
    lines = textwrap.wrap(printable(caption) or "(empty caption)", pixels.width // 6)
    ImageDraw.Draw(tile).text((4, pixels.height + 3), "\n".join(lines[:2]), fill="black")
    return torch.from_numpy(np.array(tile)).permute(2, 0, 1)


def _save(image: Image.Image, path: Path) -> None:
    with whole(path) as partial:
        image.save(partial, format="PNG")
