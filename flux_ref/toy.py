"""Fixed stand-ins for FLUX.1's three frozen encoders, and a toy data set of captioned drawings.

A block DCT stands in for the autoencoder: it maps (3, H, W) to mean and logvar of (16, H/8, W/8) and decodes back.
Fixed random word vectors stand in for T5 and CLIP. They take any picture and any caption.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux_ref import dataset, files, rng, schedule
from flux_ref.cli import progress
from flux_ref.config import Config, ModelConfig
from flux_ref.dataset import Meta, Sample

COLOURS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.15),
    "blue": (0.10, 0.20, 0.90),
    "yellow": (0.95, 0.85, 0.05),
    "purple": (0.60, 0.10, 0.75),
    "black": (0.05, 0.05, 0.05),
}
SHAPES = ("circle", "square", "triangle")
PLACES = {  # centre (x, y) of the drawing, in parts of the image
    "top left": (0.27, 0.27),
    "top right": (0.73, 0.27),
    "middle": (0.50, 0.50),
    "bottom left": (0.27, 0.73),
    "bottom right": (0.73, 0.73),
}
SIZES = {"small": 0.14, "large": 0.23}  # half of the width
BACKGROUND = 0.92
JITTER = 0.03  # a drawing's centre moves by up to this much, in parts of the image
LOGVAR = -8.0  # logvar of every latent value, about as small as a trained autoencoder's


class Drawing(NamedTuple):
    """What a picture shows, in the words of its caption."""

    size: str
    colour: str
    shape: str
    place: str

    @property
    def caption(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} at the {self.place}"


def all_drawings() -> list[Drawing]:
    """Every combination there is, in a fixed order."""
    return [Drawing(*parts) for parts in itertools.product(SIZES, COLOURS, SHAPES, PLACES)]


def held_out() -> list[Drawing]:
    """One drawing of every colour and shape, at varying places and sizes; training never shows them."""
    places = list(PLACES)
    sizes = list(SIZES)
    return [
        Drawing(sizes[(row + column) % 2], colour, shape, places[(row + 2 * column) % len(places)])
        for row, colour in enumerate(COLOURS)
        for column, shape in enumerate(SHAPES)
    ]


def render(drawing: Drawing, height: int, width: int, dx: float = 0.0, dy: float = 0.0) -> np.ndarray:
    """The picture: (3, height, width) float32 in [-1, 1]. dx, dy: move the drawing by parts of the image."""
    fine = 4  # edges are smoothed by drawing at 4 x the resolution
    y, x = ((np.arange(side * fine) + 0.5) / (side * fine) for side in (height, width))
    centre_x, centre_y = PLACES[drawing.place]
    half = SIZES[drawing.size]
    u = (x - centre_x - dx) / half
    v = (y[:, None] - centre_y - dy) / half
    if drawing.shape == "circle":
        inside = u**2 + v**2 <= 1
    elif drawing.shape == "square":
        inside = np.maximum(abs(u), abs(v)) <= 0.9
    else:
        inside = (v <= 1) & (abs(u) * 2 <= v + 1)
    cover = inside.reshape(height, fine, width, fine).mean(axis=(1, 3))
    colour = np.array(COLOURS[drawing.colour])[:, None, None]
    return ((BACKGROUND + cover * (colour - BACKGROUND)) * 2 - 1).astype(np.float32)


# The 8-point DCT-II as an orthonormal matrix, frequency first.
BASIS = np.cos(np.pi * (np.arange(8) + 0.5) * np.arange(8)[:, None] / 8) * 0.5
BASIS[0] *= 0.5**0.5
# The 16 latent channels, (colour channel, row frequency, column frequency) of each: 8 of luma, 4 + 4 of chroma.
LOW = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1)]
CHANNEL, ROW, COLUMN = np.array([(0, *uv) for uv in LOW] + [(i, *uv) for i in (1, 2) for uv in LOW[:4]]).T
# Luma and two colour differences, orthonormal.
LUMA = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3], [2], [6]])
# With these, FLUX.1's latent scale (flow.SCALE) gives this set about zero mean and unit variance.
LUMA_CENTRE = 10.2
GAIN = 2.1


def encode(picture: np.ndarray) -> np.ndarray:
    """Encode a (3, H, W) picture in [-1, 1] as the mean of its latent, (16, H/8, W/8) float32."""
    _, height, width = picture.shape
    planes = (LUMA @ picture.reshape(3, -1)).reshape(3, height // 8, 8, width // 8, 8)
    frequencies = BASIS @ planes.transpose(0, 1, 3, 2, 4) @ BASIS.T
    mean = frequencies[CHANNEL, :, :, ROW, COLUMN]
    mean[0] -= LUMA_CENTRE
    return (GAIN * mean).astype(np.float32)


def decode(mean: np.ndarray) -> np.ndarray:
    """Decode a (16, H/8, W/8) latent to a (3, H, W) picture in [-1, 1]; what encode dropped is lost."""
    _, rows, columns = mean.shape
    frequencies = np.zeros((3, rows, columns, 8, 8))
    frequencies[CHANNEL, :, :, ROW, COLUMN] = mean / GAIN
    frequencies[0, :, :, 0, 0] += LUMA_CENTRE
    planes = (BASIS.T @ frequencies @ BASIS).transpose(0, 1, 3, 2, 4).reshape(3, -1)
    return (LUMA.T @ planes).reshape(3, rows * 8, columns * 8).clip(-1, 1).astype(np.float32)


def encode_caption(caption: str, model: ModelConfig, own: bool = False) -> dict[str, np.ndarray]:
    """Encode a caption as T5's states and CLIP's pooled vector: {"t5": (T, E), "clip": (V,)}, float32.

    Each state is one word's vector; the empty word pads the caption to model.text_tokens. own: a caption of own
    pictures. Then a word's vector tells its letters, too, and a state the word's place, as T5's do. FLUX.1 itself sees
    no order of words. Captions of drawings need neither.
    """
    tokens = model.text_tokens
    vector = _spelled_vector if own else _word_vector
    padded = (re.findall(r"\w+", caption.lower()) + [""] * tokens)[:tokens]
    states = np.stack([vector(word, model.t5_dim) for word in padded])
    if own:
        states += 0.5 * np.stack([_word_vector(f"place {i}", model.t5_dim) for i in range(tokens)])
    pooled = np.mean([vector(word, model.clip_dim) for word in padded], axis=0) * np.sqrt(tokens)
    return {"t5": states.astype(np.float32), "clip": pooled.astype(np.float32)}


@functools.cache
def _word_vector(word: str, dim: int) -> np.ndarray:
    return rng.normals(0, rng.TOY_TEXT, (dim,), sample=rng.name_key(word), epoch=dim)


@functools.cache
def _spelled_vector(word: str, dim: int) -> np.ndarray:
    """A word's vector and those of its trigrams, so "cats" is near "cat". Source: fastText (arXiv 1607.04606)."""
    whole = _word_vector(word, dim)
    if not word:
        return whole
    letters = f"<{word}>"
    trigrams = [_word_vector(f"letters {letters[i : i + 3]}", dim) for i in range(len(word))]
    return (whole + sum(trigrams) / np.sqrt(len(word))) / np.sqrt(2)


def make_shapes(folder: Path, cfg: Config) -> None:
    """Write folder/train, folder/val and folder/empty_encodings. The folder appears once it is whole.

    Validation shows the drawings that training never shows, at the eight timesteps in turn.
    Raises: Refusal if the folder exists.
    """
    with files.whole(folder, is_new=True) as partial:
        for split in ("train", "val"):
            dataset.write(dataset.shard_path(partial / split, 0), _samples(cfg, split))
        write_empty(partial, cfg.model)


def _samples(cfg: Config, split: str) -> Iterator[Sample]:
    model = cfg.model
    drawings = held_out()
    if split == "train":
        drawings = [drawing for drawing in all_drawings() if drawing not in drawings]
    for i in progress(
        range(getattr(cfg.data, f"expected_{split}_samples")), desc=f"making {split} shapes", leave=False
    ):
        drawing = drawings[i // schedule.TIMESTEPS % len(drawings)]
        draw = rng.words(0, rng.TOY_SHAPES, 2, sample=i, epoch=int(split == "val"))
        shift = JITTER * (2 * rng.uniform(draw) - 1)
        picture = render(drawing, model.latent_height * 8, model.latent_width * 8, *shift)
        yield make_sample(split, i, picture, drawing.caption, model)


def make_sample(
    split: str, index: int, picture: np.ndarray, caption: str, model: ModelConfig, own: bool = False
) -> Sample:
    """Sample `index` of train or val. In validation the timesteps take turns.

    picture: as for `encode`. own: as for `encode_caption`.
    """
    mean = encode(picture)
    members = encode_caption(caption, model, own) | {"mean": mean, "logvar": np.full(mean.shape, LOGVAR)}
    bits = {name: dataset.to_bf16_bits(values) for name, values in members.items()}
    return Meta(dataset.key_of(split, index), index % schedule.TIMESTEPS if split == "val" else None, caption), bits


def write_empty(folder: Path, model: ModelConfig, own: bool = False) -> None:
    """Write folder/empty_encodings: in float16 with a batch axis, as the public encodings are."""
    empty = {name: values[None].astype(np.float16) for name, values in encode_caption("", model, own).items()}
    dataset.write_empty(folder / "empty_encodings", empty)


def ensure(cfg: Config) -> None:
    """Make the drawings of a config with data.kind=toy, if the folder above data.train is not there.

    Raises: Refusal, OSError.
    """
    folder = Path(cfg.data.train).parent
    if cfg.data.kind == "toy":
        make_once(folder, lambda: make_shapes(folder, cfg))


def make_once(folder: Path, make: Callable[[], None]) -> None:
    """Call what makes a folder whole, unless the folder is there. Of several jobs one makes it, and the others wait.

    What killed jobs left of it is removed. Raises: Refusal, OSError.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.lock(folder.with_name(f".{folder.name}.lock"), str(folder), waits=True):
        files.remove_partial_files(folder.parent, folder.name)
        if not folder.exists():
            make()
