"""Uniform numbers for stochastic rounding, drawn where the rounding happens.

They come from the generator of every other draw (rng.py), keyed by step, product and element. So an element gets
the same number at any number of ranks, and a captured graph holds no state of a generator.
A CPU takes numpy's generator. Other devices compute the same words with torch.
"""

import numpy as np
import torch
from torch import Tensor

from flux_ref import rng

PER_WORD = 4  # each word of 64 bits gives four numbers
GRID = 2.0**-16
ROUNDS = 10
FACTORS = (0xD2E7470EE14C6C93 - 2**64, 0xCA5A826395121157 - 2**64)  # of Philox4x64, as int64 holds them
BUMPS = (0x9E3779B97F4A7C15 - 2**64, 0xBB67AE8584CAA73B - 2**64)
LOW = 0xFFFFFFFF


@torch.library.custom_op("flux_ref::chances", mutates_args=())
def chances(place: Tensor, like: Tensor) -> Tensor:
    """Numbers in [0, 1) on a grid of 2**-16, fp32, of the shape of `like`.

    place: (4,) int64 on the device: the run's seed; the step; a number of layer, product and side; the place of the
           first element among all of the product, over all ranks and micro-batches, which 16 divides.
    port: element e is 16 bits, from bit 16 * (e % 4) on, of word e // 4 of the stream ROUNDING of rng.py, with the
    counter's sample = number and its epoch = step.
    """
    if like.device.type != "cpu":
        return by_torch(place, like)
    seed, step, number, first = place.tolist()
    assert first % 16 == 0, first
    count = -(-like.numel() // PER_WORD)
    words = rng.words(seed, rng.ROUNDING, count, sample=number, epoch=step, start=first // PER_WORD)
    numbers = torch.from_numpy(words.view(np.uint16).astype(np.float32)) * GRID
    return numbers[: like.numel()].view(like.shape)


chances.register_fake(lambda place, like: torch.empty(like.shape, dtype=torch.float32, device=like.device))


def by_torch(place: Tensor, like: Tensor) -> Tensor:
    """`chances` by torch's arithmetic alone. No host reads the place, so a captured graph may hold it."""
    seed, step, number, first = place.unbind()
    block = torch.arange(-(-like.numel() // 16), device=like.device) + first // 16 + 1
    words = philox([block, number, step, torch.zeros_like(seed)], [seed, torch.full_like(seed, rng.ROUNDING)])
    numbers = torch.stack(words, dim=1).flatten().view(torch.int16).int() & 0xFFFF
    return (numbers.float() * GRID)[: like.numel()].view(like.shape)


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """The four words of each block of Philox4x64-10 as int64. Products and sums of int64 wrap, as 64 bits should.

    counter: block, sample, epoch and 0. key: seed and stream. Three rounds give all words the shape of block.
    """
    for _ in range(ROUNDS):
        high0, low0 = _product(counter[0], FACTORS[0])
        high1, low1 = _product(counter[2], FACTORS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [word + bump for word, bump in zip(key, BUMPS)]
    return counter


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 64 bits of a product of unsigned 64-bit numbers, from halves of 32 bits."""
    low = x & LOW
    high = x >> 32 & LOW
    f_low = factor & LOW
    f_high = factor >> 32 & LOW
    carry = high * f_low + (low * f_low >> 32 & LOW)
    middle = low * f_high + (carry & LOW)
    return high * f_high + (carry >> 32 & LOW) + (middle >> 32 & LOW), x * factor
