"""Every random number of a run, on the host. The page docs/draws.md defines them."""

import hashlib
import math

import numpy as np

ORDER, SCALARS, LATENT, NOISE, VAL_LATENT, VAL_NOISE, INIT = range(7)  # the streams


def words(seed, stream, sample, epoch, count, first=0):
    """Words first .. first + count - 1 of a stream, as uint64. first is a multiple of 4."""
    key = np.array([seed, stream], np.uint64)
    counter = np.array([first // 4, sample, epoch, 0], np.uint64)  # numpy counts up before its first block
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def uniform(w):
    """Words to [0, 1) as fp32."""
    return (w >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def normal(w, dtype=np.float32):
    """An even number of words to normal numbers: Box-Muller on each pair, in fp64 until the end."""
    bits = (w >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((bits[0::2] + 1) * 2**-53))
    angle = 2 * np.pi * bits[1::2] * 2**-53
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(-1).astype(dtype)


def normals(seed, stream, sample, epoch, shape):
    """Normal numbers of a shape. An odd size leaves the last number of a pair unused."""
    count = math.prod(shape)
    w = words(seed, stream, sample, epoch, count + count % 2)
    return normal(w)[:count].reshape(shape)


def order(seed, epoch, count):
    """The order in which an epoch visits the samples."""
    return np.argsort(words(seed, ORDER, 0, epoch, count), kind="stable")


def is_dropped(seed, sample, epoch, rate):
    """Whether a sample loses its caption."""
    return uniform(words(seed, SCALARS, sample, epoch, 1))[0] < rate


def time(seed, sample, epoch, timestep_sampling="uniform", logit_mean=0.0, logit_std=1.0, timestep_shift=1.0):
    """The time t of a training sample, made in fp64."""
    w = words(seed, SCALARS, sample, epoch, 4)
    t = float(uniform(w)[1])
    if timestep_sampling == "logit_normal":
        t = 1 / (1 + math.exp(-logit_mean - logit_std * normal(w, np.float64)[2]))
    t = timestep_shift * t / (1 + (timestep_shift - 1) * t)
    return np.float32(min(t, 1 - 2**-24))


def rows_at(seed, count, rate, positions):
    """(sample, epoch, t, whether the caption is dropped) at some positions of a run over `count` samples."""
    orders = {}
    rows = []

    for position in positions:
        epoch, place = divmod(position, count)
        if epoch not in orders:
            orders[epoch] = order(seed, epoch, count)
        sample = int(orders[epoch][place])
        rows.append((sample, epoch, time(seed, sample, epoch), is_dropped(seed, sample, epoch, rate)))

    return rows


def name_key(name):
    """The number that stands for a parameter in the place of a sample."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def initial_weight(seed, name, shape):
    """The weight from which a run starts."""
    if name.endswith(".scale"):
        return np.ones(shape, np.float32)
    if name.endswith(".bias") or ".lin." in name or name.startswith("final_layer."):
        return np.zeros(shape, np.float32)
    key = name_key(name)
    if name.startswith(("time_in.", "vector_in.")):
        return normals(seed, INIT, key, 0, shape) * np.float32(0.02)

    return xavier(words(seed, INIT, key, 0, math.prod(shape)), *shape).reshape(shape)


def xavier(w, rows, columns):
    """Words to uniform numbers of Xavier's width for a weight of rows x columns."""
    return (2 * uniform(w) - 1) * np.float32(math.sqrt(6 / (rows + columns)))
