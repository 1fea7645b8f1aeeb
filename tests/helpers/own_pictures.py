"""A folder of captioned pictures as a user may have it: two signs of named colours, one beside or above the other."""

import itertools
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"crimson": (200, 20, 60), "golden": (250, 150, 20), "teal": (0, 130, 130), "navy": (20, 30, 120)}
SIGNS = ("ring", "cross", "bar", "diamond")
WAYS = {"beside": ((18, 32), (46, 32)), "above": ((32, 18), (32, 46))}  # centres of the first and the second
SIDE = 64


def sign(pen: ImageDraw.ImageDraw, kind: str, colour: tuple[int, int, int], x: int, y: int):
    half = 12
    box = (x - half, y - half, x + half, y + half)
    if kind == "ring":
        pen.ellipse(box, outline=colour, width=5)
    elif kind == "cross":
        pen.line(box, colour, 6)
        pen.line((x - half, y + half, x + half, y - half), colour, 6)
    elif kind == "bar":
        pen.rectangle((x - half, y - 4, x + half, y + 4), colour)
    else:
        pen.polygon([(x, y - half), (x + half, y), (x, y + half), (x - half, y)], colour)


def draw(folder: Path) -> int:
    """Write 480 pictures with metadata.jsonl: each pair of different things, either way. Returns their number."""
    folder.mkdir(parents=True)
    things = [*itertools.product(COLOURS, SIGNS)]
    lines = []
    for (first, second), way in itertools.product(itertools.permutations(things, 2), WAYS):
        image = Image.new("RGB", (SIDE, SIDE), (235, 235, 225))
        pen = ImageDraw.Draw(image)
        for (colour, kind), centre in zip((first, second), WAYS[way]):
            sign(pen, kind, COLOURS[colour], *centre)
        name = f"{len(lines):03}.png"
        image.save(folder / name)
        caption = f"a {' '.join(first)} {way} a {' '.join(second)}"
        lines.append(json.dumps({"file_name": name, "text": caption}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))
    return len(lines)


def pictures(folder: Path) -> tuple[list[str], np.ndarray]:
    """The captions of a folder, and its pictures: (n, 3, 64, 64) in [-1, 1]."""
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    read = [np.asarray(Image.open(folder / row["file_name"]), np.float32) for row in rows]
    return [row["text"] for row in rows], np.stack(read).transpose(0, 3, 1, 2) / 127.5 - 1
