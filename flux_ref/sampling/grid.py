"""The captioned grid of drawn pictures."""

from pathlib import Path

import numpy as np

from flux_ref.formats.files import whole

INK = (40, 40, 40)


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
    with whole(path) as partial:
        save_image(make_grid(torch.stack(tiles), nrow=columns, padding=6, pad_value=1.0), partial, format="PNG")


def _wrap(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width and lines[-1]:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(lines[:2])
