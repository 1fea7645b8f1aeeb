"""What generated pictures show: each is compared with all drawings of the toy data set, whose captions are known."""

import functools
import itertools

import numpy as np

from flux_ref import toy

SHIFTS = (-2 / 3 * toy.JITTER, 0.0, 2 / 3 * toy.JITTER)  # of a drawing's centre: none of the data set is far from these


@functools.cache
def _drawings(rows: int, columns: int) -> tuple[list[str], np.ndarray]:
    """Every drawing at every shift: the captions, and the pictures, (n, 3, rows, columns)."""
    known = [*itertools.product(toy.all_drawings(), SHIFTS, SHIFTS)]
    pictures = [toy.render(drawing, rows, columns, dx, dy) for drawing, dx, dy in known]
    return [drawing.caption for drawing, _, _ in known], np.stack(pictures)


def nearest(picture: np.ndarray, candidates: np.ndarray) -> int:
    """Which of some (3, H, W) pictures differs least from a picture: by the mean squared difference of a value."""
    return int(np.square(candidates - picture).mean(axis=(1, 2, 3)).argmin())


def wrong(pictures: list[np.ndarray], captions: list[str]) -> dict[str, str]:
    """{caption: what its picture shows} of the pictures that do not show their caption. They are compared at half size.

    pictures: (3, H, W) in [-1, 1], H and W even.
    """
    found = {}
    for picture, caption in zip(pictures, captions):
        _, height, width = picture.shape
        half = picture.reshape(3, height // 2, 2, width // 2, 2).mean(axis=(2, 4))
        names, drawings = _drawings(*half.shape[1:])
        found[caption] = names[nearest(half, drawings)]
    return {caption: shown for caption, shown in found.items() if shown != caption}
