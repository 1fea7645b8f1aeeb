"""The captioned sheet of generated pictures, and the strip that shows the first row of each sheet of a run."""

import re
import textwrap
from itertools import count
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.utils import make_grid

from flux_ref.errors import printable
from flux_ref.files import whole

INK = (40, 40, 40)
GAP, CAPTION_HEIGHT, HEIGHT = 6, 36, 160  # pixels; pictures of fewer rows than HEIGHT are enlarged
COLUMNS = 6
STRIP_LEFT, STRIP_ROWS = 90, 12  # pixels beside the pictures of a strip; its most rows
SHEET = re.compile(r"\d{9,}\.png")  # of training, named by training samples


def save(pictures: list[np.ndarray], captions: list[str], path: Path) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each above its caption."""
    tiles = [_tile(picture, caption) for picture, caption in zip(pictures, captions)]
    columns = min(COLUMNS, len(tiles))
    blank = [torch.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    sheet = make_grid(torch.stack(tiles + blank), nrow=columns, padding=GAP, pad_value=255)
    path.parent.mkdir(exist_ok=True)
    _save(Image.fromarray(sheet.permute(1, 2, 0).numpy()), path)


def save_new(pictures: list[np.ndarray], captions: list[str], folder: Path, stem: str) -> Path:
    """`save` under the first free name of STEM_1.png, STEM_2.png, ... Returns the path."""
    path = next(path for number in count(1) if not (path := folder / f"{stem}_{number}.png").exists())
    save(pictures, captions, path)
    return path


def strip(folder: Path, rows: int, samples: int) -> None:
    """Rewrite strip.png from the sheets in a folder: the first row of each, the newest at the bottom.

    rows:    of pixels of a picture.
    samples: of the newest sheet. A resumed run makes later ones again.
    """
    paths = [path for path in folder.iterdir() if SHEET.fullmatch(path.name) and int(path.stem) <= samples]
    paths.sort(key=lambda path: int(path.stem))
    every = -(-len(paths) // STRIP_ROWS)
    paths = paths[::-every][::-1]  # always with the newest
    sheets = [Image.open(path).convert("RGB") for path in paths]
    step = max(rows, HEIGHT) + GAP
    size = STRIP_LEFT + sheets[-1].width, len(paths) * step + CAPTION_HEIGHT + GAP
    image = Image.new("RGB", size, "white")
    for row, (path, sheet) in enumerate(zip(paths, sheets)):
        # The next row covers the captions of this one.
        image.paste(sheet.crop((0, 0, sheet.width, step + CAPTION_HEIGHT)), (STRIP_LEFT, row * step))
        _write(image, f"{int(path.stem):,}", (GAP, row * step + GAP), STRIP_LEFT)
    _save(image, folder / "strip.png")


def _tile(picture: np.ndarray, caption: str) -> torch.Tensor:
    """A picture and its caption below, (3, rows, columns) uint8."""
    rows, columns = picture.shape[1:]
    scale = max(1.0, HEIGHT / rows)
    size = round(columns * scale), round(rows * scale)
    pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
    tile = Image.new("RGB", (size[0], size[1] + CAPTION_HEIGHT), "white")
    tile.paste(Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST))
    _write(tile, caption, (4, size[1] + 3), size[0])
    return torch.from_numpy(np.array(tile)).permute(2, 0, 1)


def _write(image: Image.Image, text: str, place: tuple[int, int], width: int) -> None:
    """Write at most two lines of text of a width in pixels."""
    lines = textwrap.wrap(printable(text) or "(empty caption)", width // 6)[:2]
    font = ImageFont.load_default(size=12)
    ImageDraw.Draw(image).multiline_text(place, "\n".join(lines), fill=INK, font=font, spacing=2)


def _save(image: Image.Image, path: Path) -> None:
    with whole(path) as partial:
        image.save(partial, format="PNG")
