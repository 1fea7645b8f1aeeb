"""Every random number of a run, as a pure function of (seed, stream, epoch, sample).

No rank has a seed of its own, and nothing keeps the state of a generator. Any process can draw the numbers of any
sample at any time. So a run sees the same numbers at every world size, micro-batch and restart.

The generator is Philox4x64-10 (Salmon et al., SC'11). Word w of a stream is word w % 4 of the block with
    key     = (seed, stream)
    counter = (w // 4 + 1, sample, epoch, 0)           # least significant word first
and every other draw is arithmetic on those 64-bit words.
"""

import hashlib
from math import prod
from typing import NamedTuple

import numpy as np

from flux_ref.config import Shape, TrainConfig

# port: the streams' numbers are part of the definition of a run.
ORDER = 0  # the order of an epoch
# Of a training sample: word 0 drops the caption, word 1 is t, words 2 and 3 make the normal number of a logit-normal t.
SCALARS = 1
LATENT = 2  # the latent of a training sample, drawn from its mean and variance
NOISE = 3  # the noise of a training sample
VAL_LATENT = 4  # the same of a validation sample
VAL_NOISE = 5
INIT = 6  # initial weights
SYNTHETIC = 7  # batches for warming up
SAMPLING = 8  # the noise from which a picture is drawn
TOY_TEXT = 9  # captions of drawings
TOY_SHAPES = 10  # places of drawings
ROUNDING = 11  # stochastic rounding


def words(seed: int, stream: int, count: int, *, sample: int = 0, epoch: int = 0, start: int = 0) -> np.ndarray:
    """count words of one stream, from the word `start` on: (count,) uint64."""
    block, lead = divmod(start, 4)
    counter = np.array([block, sample, epoch, 0], np.uint64)  # numpy counts up before its first block
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=counter)
    return generator.random_raw(lead + count)[lead:]


def uniform(word: np.ndarray) -> np.ndarray:
    """uint64 words to [0, 1) as float32. The values lie on a grid of 2**-24, so rounding never gives 1."""
    return ((word >> 40) * 2.0**-24).astype(np.float32)


def normal(word: np.ndarray) -> np.ndarray:
    """An even number of words to N(0, 1) in float64: Box-Muller on each pair."""
    # numerics: u in (0, 1] keeps the logarithm finite.
    u = ((word[0::2] >> 11) + 1) * 2.0**-53
    angle = (word[1::2] >> 11) * (2.0 * np.pi * 2.0**-53)
    radius = np.sqrt(-2.0 * np.log(u))
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1).ravel()


def normals(seed: int, stream: int, shape: Shape, *, sample: int, epoch: int = 0, start: int = 0) -> np.ndarray:
    """N(0, 1) of a shape in float32: numbers start, start + 1, ... of a stream."""
    count = prod(shape)
    lead = start % 2  # they are made in pairs
    drawn = lead + count + (lead + count) % 2
    word = words(seed, stream, drawn, sample=sample, epoch=epoch, start=start - lead)
    return normal(word)[lead : lead + count].astype(np.float32).reshape(shape)


def init_values(seed: int, name: str, kind: str, width: float, start: int, count: int) -> np.ndarray:
    """count initial values of a parameter, from the element `start` on: (count,) float32.

    kind: zeros, ones, normal (standard deviation width), or uniform (from -width to width), as model.init_spec tells.
    """
    if kind in ("zeros", "ones"):
        return np.full(count, kind == "ones", np.float32)
    key = name_key(name)
    if kind == "normal":
        values = normals(seed, INIT, (count,), sample=key, start=start)
    else:
        values = uniform(words(seed, INIT, count, sample=key, start=start)) * 2 - 1
    return values * np.float32(width)  # numerics: width is rounded first


def name_key(name: str) -> int:
    """A name as a 64-bit counter word. Python's own hash would differ from process to process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of 0 .. count - 1 in which an epoch visits the training set, as (count,) int64."""
    return np.argsort(words(seed, ORDER, count, epoch=epoch), kind="stable")


def flow_time(word: np.ndarray, train: TrainConfig) -> float:
    """The four words of SCALARS to t in [0, 1), a float32 number; computed in float64.

    logit_normal: the logit of t is normal with logit_mean and logit_std (Esser et al., arXiv 2403.03206,
    section 3.1). The shift then moves either distribution (section 5.3.2; BFL flux, sampling.time_shift with
    shift = exp(mu)).
    """
    t = float(uniform(word)[1])
    if train.timestep_sampling == "logit_normal":
        logit = train.logit_mean + train.logit_std * normal(word[2:])[0]
        t = 1.0 / (1.0 + np.exp(-logit))
    shifted = train.timestep_shift * t
    t = shifted / (shifted + (1.0 - t))  # with shift 1 this returns t unchanged, bit for bit
    # numerics: t may be closer to 1 than float32 can tell; 1 - 2**-24 is the largest float32 below 1.
    return float(np.float32(min(t, 1.0 - 2.0**-24)))


class Draw(NamedTuple):
    """The random numbers of one training sample. noise and latent_eps have the latent's shape, fp32."""

    drop_caption: bool
    t: float  # [0, 1)
    latent_eps: np.ndarray
    noise: np.ndarray


def train_draw(train: TrainConfig, epoch: int, sample: int, shape: Shape) -> Draw:
    """The draws of one training sample in one epoch. sample: its index in the data set. spec: t is uniform."""
    word = words(train.seed, SCALARS, 4, sample=sample, epoch=epoch)
    return Draw(
        drop_caption=bool(uniform(word)[0] < train.caption_drop),
        t=flow_time(word, train),
        latent_eps=normals(train.seed, LATENT, shape, sample=sample, epoch=epoch),
        noise=normals(train.seed, NOISE, shape, sample=sample, epoch=epoch),
    )


def val_draw(seed: int, noise_epoch: int, sample: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(latent_eps, noise) of one validation sample. Validation has streams of its own.

    noise_epoch: training samples so far, for fresh noise at each evaluation; 0 for fixed noise.
    """
    return (
        normals(seed, VAL_LATENT, shape, sample=sample, epoch=noise_epoch),
        normals(seed, VAL_NOISE, shape, sample=sample, epoch=noise_epoch),
    )
