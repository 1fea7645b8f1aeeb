"""What generated pictures show: each is compared with all drawings of the toy data set, whose captions are known."""

import functools

import numpy as np

from flux_ref import toy


@functools.cache
def _drawings(rows: int, columns: int) -> tuple[list[str], np.ndarray]:
    """The caption of every drawing, and each as the codec keeps it: (180, 3, rows, columns)."""
    known = toy.all_drawings()
    pictures = [toy.decode(toy.encode(toy.render(drawing, rows, columns))) for drawing in known]
    return [drawing.caption for drawing in known], np.stack(pictures)


def nearest(picture: np.ndarray, candidates: np.ndarray) -> int:
    """Which of some (3, H, W) pictures differs least from a picture: by the mean squared difference of a value."""
    return int(np.square(candidates - picture).mean(axis=(1, 2, 3)).argmin())


def wrong(pictures: list[np.ndarray], captions: list[str]) -> dict[str, str]:
    """{caption: what its picture shows} of the pictures that do not show their caption."""
    found = {}
    for picture, caption in zip(pictures, captions):
        names, drawings = _drawings(*picture.shape[1:])
        found[caption] = names[nearest(picture, drawings)]
    return {caption: shown for caption, shown in found.items() if shown != caption}
