"""Every random number of a run, as a pure function of (seed, stream, epoch, sample).

No rank has a seed of its own, and nothing keeps the state of a generator. Any process can draw the numbers of any
sample at any time. So a run sees the same numbers at every world size, micro-batch and restart.

The generator is Philox4x64-10 (Salmon et al., SC'11). Word w of a stream is word w % 4 of the block with
    key     = (seed, stream)
    counter = (w // 4 + 1, sample, epoch, 0)           # least significant word first
and every other draw is arithmetic on those 64-bit words.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

# port: the streams' numbers are part of the definition of a run.
ORDER = 0  # the order of an epoch
SCALARS = 1  # of a training sample: word 0 decides whether the caption is dropped, 1 is t, 2 and 3 are a normal t
LATENT = 2  # the latent of a training sample, drawn from its mean and variance
NOISE = 3  # the noise of a training sample
VAL_LATENT = 4  # the same of a validation sample
VAL_NOISE = 5
INIT = 6  # initial weights
SYNTHETIC = 7  # batches for warming up
SAMPLING = 8  # the noise from which a picture is drawn
WORDS = 9  # captions of drawings
JITTER = 10  # shapes of drawings
ROUNDING = 11  # stochastic rounding


def words(seed: int, stream: int, count: int, *, sample: int = 0, epoch: int = 0, start: int = 0) -> np.ndarray:
    """Words start .. start + count of one stream, as (count,) uint64."""
    block, lead = divmod(start, 4)
    counter = np.array([block, sample, epoch, 0], np.uint64)  # numpy counts up before its first block
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=counter)
    return generator.random_raw(lead + count)[lead:]


def uniform(word: np.ndarray) -> np.ndarray:
    """uint64 words to [0, 1) as float32. The values lie on a grid of 2**-24, so rounding never gives 1."""
    return ((word >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def normal(word: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """An even number of words to N(0, 1) in a dtype: Box-Muller on each pair, in float64 until the end."""
    # numerics: u in (0, 1] keeps the logarithm finite.
    u = ((word[0::2] >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    angle = (word[1::2] >> np.uint64(11)) * (2.0 * np.pi * 2.0**-53)
    radius = np.sqrt(-2.0 * np.log(u))
    pairs: np.ndarray = np.empty((len(u), 2), dtype)
    pairs[:, 0] = radius * np.cos(angle)
    pairs[:, 1] = radius * np.sin(angle)
    return pairs.reshape(-1)


def normals(seed: int, stream: int, shape: tuple[int, ...], *, sample: int, epoch: int) -> np.ndarray:
    """N(0, 1) of a shape, as float32. An odd size leaves the last value of a pair unused."""
    count = int(np.prod(shape))
    return normal(words(seed, stream, count + count % 2, sample=sample, epoch=epoch))[:count].reshape(shape)


def start_values(seed: int, name: str, kind: str, width: float, start: int, count: int) -> np.ndarray:
    """Elements start .. start + count of the initial values of a parameter, (count,) float32.

    kind: zeros, ones, normal (standard deviation width), or uniform (from -width to width), as model.start_of tells.
    """
    if kind in ("zeros", "ones"):
        return np.full(count, 1.0 if kind == "ones" else 0.0, np.float32)
    lead = start % 2  # normal numbers take words in pairs
    drawn = lead + count + (lead + count) % 2
    word = words(seed, INIT, drawn, sample=name_key(name), start=start - lead)
    values = normal(word) if kind == "normal" else uniform(word) * 2 - 1
    return (values[lead : lead + count] * width).astype(np.float32)


def name_key(name: str) -> int:
    """A name as a 64-bit counter word. Python's own hash would differ from process to process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of 0 .. count - 1 in which an epoch visits the training set, as (count,) int64."""
    return np.argsort(words(seed, ORDER, count, epoch=epoch), kind="stable")


@dataclass(frozen=True)
class TimeDistribution:
    """The distribution of the time t in training; the default is the benchmark's.

    logit_normal: the logit of t is normal with this mean and standard deviation (Esser et al., arXiv 2403.03206,
    section 3.1). The shift then moves either distribution (section 5.3.2; BFL flux, sampling.time_shift with
    shift = exp(mu)).
    """

    kind: str = "uniform"  # or logit_normal
    mean: float = 0.0
    width: float = 1.0
    shift: float = 1.0


def times(word: np.ndarray, distribution: TimeDistribution) -> np.ndarray:
    """Words 0 to 3 of SCALARS of n samples, (4 n,), to their t in [0, 1), (n,) float32; in float64 until the end."""
    scalars = word.reshape(-1, 4)
    t = uniform(scalars[:, 1]).astype(np.float64)
    if distribution.kind == "logit_normal":
        x = normal(scalars[:, 2:].ravel(), np.float64)[0::2]  # the first normal number of each pair of words
        t = 1.0 / (1.0 + np.exp(-distribution.mean - distribution.width * x))
    shifted = distribution.shift * t
    t = shifted / (shifted + (1.0 - t))  # exact with shift 1, also of a uniform t
    # numerics: t may be closer to 1 than float32 can tell; 1 - 2**-24 is the largest float32 below 1.
    return np.minimum(t, 1.0 - 2.0**-24).astype(np.float32)


@dataclass(frozen=True)
class Draw:
    """The random numbers of one sample. noise and latent_eps have the latent's shape, fp32."""

    drop_caption: bool
    t: float  # [0, 1)
    latent_eps: np.ndarray
    noise: np.ndarray


def train_draw(
    seed: int,
    epoch: int,
    sample: int,
    shape: tuple[int, ...],
    caption_drop: float,
    distribution: TimeDistribution = TimeDistribution(),
) -> Draw:
    """The draws of one training sample in one epoch. sample: its index in the data set. distribution: of t.

    spec: t is uniform.
    """
    word = words(seed, SCALARS, 4, sample=sample, epoch=epoch)
    return Draw(
        drop_caption=bool(uniform(word)[0] < caption_drop),
        t=times(word, distribution).item(),
        latent_eps=normals(seed, LATENT, shape, sample=sample, epoch=epoch),
        noise=normals(seed, NOISE, shape, sample=sample, epoch=epoch),
    )


def val_draw(seed: int, evaluation: int, sample: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(latent_eps, noise) of one validation sample. Validation has streams of its own.

    evaluation: training samples so far, for fresh noise at each evaluation; 0 for fixed noise.
    """
    return (
        normals(seed, VAL_LATENT, shape, sample=sample, epoch=evaluation),
        normals(seed, VAL_NOISE, shape, sample=sample, epoch=evaluation),
    )
