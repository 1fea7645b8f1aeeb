"""The captioned sheet of generated pictures, and the strip that shows its first row over a run."""

import re
import textwrap
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from flux_ref.formats.files import whole
from flux_ref.formats.outside import printable

INK = (40, 40, 40)
GAP, CAPTION_HEIGHT, HEIGHT = 6, 36, 160  # pixels; pictures of fewer rows than HEIGHT are enlarged
STRIP_LEFT, STRIP_ROWS = 90, 12  # pixels beside the pictures of a strip; its most rows
SHEET = re.compile(r"\d{9,}\.png")  # of training, named by training samples


def save(pictures: list[np.ndarray], captions: list[str], path: Path, columns: int = 6) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each over its caption."""
    from PIL import Image  # not needed for training, so not at the top

    rows, columns_of_pixels = pictures[0].shape[1:]
    scale = max(1.0, HEIGHT / rows)
    width = round(columns_of_pixels * scale)
    height = round(rows * scale)
    step_x = width + GAP
    step_y = height + CAPTION_HEIGHT + GAP
    columns = min(columns, len(pictures))
    lines = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (GAP + columns * step_x, GAP + lines * step_y), "white")
    for number, (picture, caption) in enumerate(zip(pictures, captions)):
        line, column = divmod(number, columns)
        left = GAP + column * step_x
        top = GAP + line * step_y
        pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
        sheet.paste(Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST), (left, top))
        _write(sheet, caption, (left + 4, top + height + 3), width)
    path.parent.mkdir(exist_ok=True)
    with whole(path) as partial:
        sheet.save(partial, format="PNG")


def save_new(pictures: list[np.ndarray], captions: list[str], folder: Path, stem: str) -> Path:
    """`save` under the first free name of STEM_1.png, STEM_2.png, ... Returns the path."""
    folder.mkdir(exist_ok=True)
    for number in count(1):
        path = folder / f"{stem}_{number}.png"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)  # the name is taken, also for another process
            break
    try:
        save(pictures, captions, path)
    except BaseException:
        path.unlink()  # no empty file is taken for a drawing
        raise
    return path


def strip(folder: Path, height: int, samples: int) -> None:
    """Rewrite strip.png from the sheets in a folder: the first row of each, the newest at the bottom.

    height:  of the pictures, in rows.
    samples: of the newest sheet. A resumed run makes later ones again.
    """
    from PIL import Image

    paths = [path for path in folder.iterdir() if SHEET.fullmatch(path.name) and int(path.stem) <= samples]
    paths.sort(key=lambda path: int(path.stem))
    every = -(-len(paths) // STRIP_ROWS)
    paths = paths[::-every][::-1]  # always with the newest
    step = max(height, HEIGHT) + GAP
    with Image.open(paths[-1]) as newest:
        image = Image.new("RGB", (STRIP_LEFT + newest.width, len(paths) * step + CAPTION_HEIGHT + GAP), "white")
    for row, path in enumerate(paths):
        top = row * step
        with Image.open(path) as sheet:  # the next row covers the captions of this one
            image.paste(sheet.crop((0, 0, sheet.width, step + CAPTION_HEIGHT)), (STRIP_LEFT, top))
        _write(image, f"{int(path.stem):,}", (GAP, top + GAP), STRIP_LEFT)
    with whole(folder / "strip.png") as partial:
        image.save(partial, format="PNG")


def _write(image, text: str, place: tuple[int, int], width: int) -> None:
    """Write at most two lines of text of a width in pixels."""
    from PIL import ImageDraw, ImageFont

    wrapped = "\n".join(textwrap.wrap(printable(text) or "(empty caption)", width // 6)[:2])
    font = ImageFont.load_default(size=12)
    ImageDraw.Draw(image).multiline_text(place, wrapped, fill=INK, font=font, spacing=2)
