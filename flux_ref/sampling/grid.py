"""The captioned sheet of generated pictures, and the strip that shows the first captions over a run."""

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
STRIP_ROWS, STRIP_COLUMNS, STRIP_LEFT, STRIP_HEIGHT = 6, 24, 150, 96
SHEET = re.compile(r"\d{9,}\.png")  # of training, named by training samples


def layout(number: int, size: tuple[int, int], columns: int = 6) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """The size of a sheet of pictures of a size, and (left, top) of each picture. Sizes are (width, height)."""
    step_x, step_y, columns = size[0] + GAP, size[1] + CAPTION_HEIGHT + GAP, min(columns, number)
    places = [(GAP + i % columns * step_x, GAP + i // columns * step_y) for i in range(number)]
    return (GAP + columns * step_x, GAP + -(-number // columns) * step_y), places


def shown_size(height: int, width: int) -> tuple[int, int]:
    """(width, height) with which a picture stands in a sheet."""
    scale = max(1.0, HEIGHT / height)
    return round(width * scale), round(height * scale)


def save(pictures: list[np.ndarray], captions: list[str], path: Path, columns: int = 6) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each over its caption."""
    from PIL import Image  # not needed for training, so not at the top

    size = shown_size(*pictures[0].shape[1:])
    whole_size, places = layout(len(pictures), size, columns)
    sheet = Image.new("RGB", whole_size, "white")
    for picture, caption, (left, top) in zip(pictures, captions, places):
        pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
        sheet.paste(Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST), (left, top))
        _write(sheet, caption, (left + 4, top + size[1] + 3), size[0], 2)
    _save(sheet, path)


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
        path.unlink()
        raise
    return path


def strip(folder: Path, captions: list[str], shape: tuple[int, int], samples: int) -> None:
    """Rewrite strip.png from the sheets in a folder: a row for each of the first captions, a column for each sheet.

    captions, shape: of the pictures of a sheet, and their rows and columns. Sheets of other sizes are left out, such
                     as those from before a change of sample.count.
    samples:         of the newest sheet. A resumed run makes later ones again.
    """
    from PIL import Image

    width, height = shown_size(*shape)
    whole_size, places = layout(len(captions), (width, height))
    sheets = {int(path.stem): path for path in folder.iterdir() if SHEET.fullmatch(path.name)}
    chosen = sorted((number for number in sheets if number <= samples), reverse=True)
    columns, captions, small = [], captions[:STRIP_ROWS], (round(width * STRIP_HEIGHT / height), STRIP_HEIGHT)
    for number in chosen[:: -(-len(chosen) // STRIP_COLUMNS)][::-1]:  # always with the newest
        with Image.open(sheets[number]) as sheet:
            if sheet.size == whole_size:
                cut = [sheet.crop((x, y, x + width, y + height)).resize(small) for x, y in places[: len(captions)]]
                columns.append((number, cut))
    step_x, step_y, top = small[0] + GAP, small[1] + GAP, 24
    image = Image.new("RGB", (STRIP_LEFT + len(columns) * step_x, top + len(captions) * step_y), "white")
    for row, caption in enumerate(captions):
        _write(image, caption, (GAP, top + row * step_y), STRIP_LEFT - 2 * GAP, 6)
    for left, (number, cut) in zip(range(STRIP_LEFT, image.width, step_x), columns):
        _write(image, f"{number:,}", (left, GAP), 10 * small[0], 1)
        for row, picture in enumerate(cut):
            image.paste(picture, (left, top + row * step_y))
    _save(image, folder / "strip.png")


def _write(image, text: str, place: tuple[int, int], width: int, lines: int) -> None:
    """Write text of so many lines of a width in pixels."""
    from PIL import ImageDraw, ImageFont

    wrapped = "\n".join(textwrap.wrap(printable(text) or "(empty caption)", width // 6)[:lines])
    font = ImageFont.load_default(size=12)
    ImageDraw.Draw(image).multiline_text(place, wrapped, fill=INK, font=font, spacing=2)


def _save(image, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with whole(path) as partial:
        image.save(partial, format="PNG")
