"""The captioned grid of generated pictures."""

import textwrap
from pathlib import Path

import numpy as np

from flux_ref.formats.files import whole

INK = (40, 40, 40)
GAP, CAPTION_HEIGHT = 6, 36  # pixels


def save(pictures: list[np.ndarray], captions: list[str], path: Path, columns: int = 6) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each over its caption."""
    from PIL import Image, ImageDraw, ImageFont  # not needed for training, so not at the top

    font = ImageFont.load_default(size=12)
    side = max(160, len(pictures[0][0]))  # small pictures are enlarged
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (GAP + columns * (side + GAP), GAP + rows * (side + CAPTION_HEIGHT + GAP)), "white")
    for i, (picture, caption) in enumerate(zip(pictures, captions)):
        left, top = GAP + i % columns * (side + GAP), GAP + i // columns * (side + CAPTION_HEIGHT + GAP)
        pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
        sheet.paste(Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST), (left, top))
        text = "\n".join(textwrap.wrap(caption, side // 6)[:2])
        ImageDraw.Draw(sheet).multiline_text((left + 4, top + side + 3), text, fill=INK, font=font, spacing=2)
    path.parent.mkdir(exist_ok=True)
    with whole(path) as partial:
        sheet.save(partial, format="PNG")
