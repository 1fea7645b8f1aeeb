"""Every random number of a run, against a second implementation of its definition; and the run's schedule."""

import hashlib
import itertools
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT

from flux_ref import rng, schedule
from flux_ref.config import OptimConfig, TrainConfig
from flux_ref.precision.blocks import philox
from tools.golden.files import FOLDER, Golden

SHAPE = (2, 4, 6)
MASK = 2**64 - 1


def test_the_numbers_of_the_streams_are_those_of_the_page():
    page = re.findall(r"^ ?(\d+) ([A-Z_]+)  ", (ROOT / "docs" / "draws.md").read_text(), re.MULTILINE)
    assert len(page) == 12 and {name: int(number) for number, name in page} == {
        name: vars(rng)[name] for _, name in page
    }


# docs/draws.md written down a second time, without flux_ref.rng, for many samples at once. The words come from the
# generator that a device has.

ORDER, SCALARS, LATENT, NOISE, VAL_LATENT, VAL_NOISE, INIT = range(7)


def signed(value):
    """Unsigned 64-bit numbers as torch has them."""
    return torch.from_numpy(np.atleast_1d(np.array(value, np.uint64)).view(np.int64))


def words_of(seed, stream, sample, epoch, count, start=0):
    """Words start .. start + count of each sample: (..., count). start is a multiple of 4."""
    blocks = range(start // 4 + 1, (start + count + 3) // 4 + 1)
    counter = [signed(blocks), signed(np.asarray(sample)[..., None]), signed(epoch), signed(0)]
    found = torch.stack(torch.broadcast_tensors(*philox(counter, [signed(seed), signed(stream)])), dim=-1)
    return found.flatten(-2)[..., :count].numpy().view(np.uint64)


def uniform_of(word):
    return np.float32((word // 2**40).astype(np.float64) / 2**24)


def normal_of(word):
    a, b = ((word[..., i::2] // 2**11).astype(np.float64) for i in (0, 1))
    radius, angle = np.sqrt(-2 * np.log((a + 1) / 2**53)), 2 * np.pi * (b / 2**53)
    pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1)
    return pairs.reshape(*word.shape).astype(np.float32)


def normals_of(seed, stream, sample, epoch, count):
    return normal_of(words_of(seed, stream, sample, epoch, count + count % 2))[..., :count]


def times_of(words, kind, mean, width, shift):
    """t of words 0 to 3 of SCALARS, (n, 4), with the shift as log(shift) on the logit (arXiv 2403.03206, 5.3.2)."""
    u = uniform_of(words[:, 1]).astype(np.float64)
    a, b = ((words[:, i] // 2**11).astype(np.float64) / 2**53 for i in (2, 3))
    normal = np.sqrt(-2 * np.log(a + 2.0**-53)) * np.cos(2 * np.pi * b)
    odds = np.exp(mean + width * normal) if kind == "logit_normal" else u / (1 - u)
    return (shift * odds / (1 + shift * odds)).astype(np.float32)


def order_of(seed, epoch, count):
    return np.lexsort((np.arange(count), words_of(seed, ORDER, 0, epoch, count)))


def key_of(name):
    return sum(byte << 8 * i for i, byte in enumerate(hashlib.sha256(name.encode()).digest()[:8]))


# Words and the distributions made of them


def test_second_philox_gives_the_papers_known_answers():
    """Test vectors of the authors' Random123 (kat_vectors, philox4x64 10)."""
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    for word, want in ((0, zeros), (MASK, ones)):
        assert torch.cat(philox([signed(word)] * 4, [signed(word)] * 2)).numpy().view(np.uint64).tolist() == want


def config(kind, mean, width, shift, seed=0):
    return TrainConfig(
        seed=seed, timestep_sampling=kind, logit_mean=mean, logit_std=width, timestep_shift=shift, caption_drop=0.1
    )


TIMES = [  # kind, mean and width of the logit, shift
    ("uniform", 0.0, 1.0, 1.0),
    ("uniform", 0.0, 1.0, 3.0),
    ("uniform", 0.0, 1.0, 0.4),
    ("logit_normal", 0.0, 1.0, 1.0),
    ("logit_normal", -0.5, 1.5, 1.0),
    ("logit_normal", 1.0, 0.6, 1.0),
    ("logit_normal", 0.0, 1.0, 3.0),
]


def test_t_of_each_distribution_follows_the_page_and_is_drawn_from_words_1_to_3():
    words = words_of(3, SCALARS, np.arange(500), 2, 4)
    for about in TIMES:
        drawn = [rng.train_draw(config(*about, seed=3), 2, i, (1, 1, 2)) for i in range(500)]
        assert [draw.t for draw in drawn] == pytest.approx(times_of(words, *about), rel=1e-6), about
        assert [draw.drop_caption for draw in drawn] == (uniform_of(words[:, 0]) < 0.1).tolist()
    assert [rng.flow_time(word, config(*TIMES[0])) for word in words] == uniform_of(words[:, 1]).tolist(), (
        "word 1 itself"
    )


def test_numbers_are_finite_and_t_is_below_1_at_the_ends_of_words_and_of_what_config_allows():
    ends = np.array([(0, *rest) for rest in itertools.product((0, 2**63, MASK), repeat=3)], np.uint64)
    assert rng.normal(ends.ravel()).max() == pytest.approx(math.sqrt(2 * 53 * math.log(2)))
    kinds = ("uniform", "logit_normal")
    for about in itertools.product(kinds, (-16.0, 0.0, 16.0), (1e-9, 16.0), (1e-300, 1.0, 1000.0)):
        times = [rng.flow_time(word, config(*about)) for word in ends]
        assert all(0 <= t < 1 and t == np.float32(t) for t in times), about
    assert max(times) == rng.uniform(ends).max() == np.float32(1 - 2**-24), "the largest fp32 below 1"


def test_a_part_of_the_initial_values_is_the_same_whoever_draws_it():
    for kind in ("normal", "uniform", "ones"):
        whole = rng.init_values(3, "some", kind, 0.3, 0, 50)
        for start, count in ((0, 7), (1, 1), (3, 8), (6, 5), (49, 1)):
            assert np.array_equal(rng.init_values(3, "some", kind, 0.3, start, count), whole[start : start + count])


def test_lr_is_linear_then_constant_or_falls_to_a_tenth():
    for warmup in (0, 1600):
        want = np.array([2e-4 * min(1, (step + 1) / max(1, warmup)) for step in range(2000)])
        assert [schedule.lr(step, OptimConfig(2e-4, warmup)) for step in range(2000)] == pytest.approx(want)
        falling = OptimConfig(2e-4, warmup, decay_end_step=1000)
        want *= np.interp(range(2000), (0, 1000), (1, 0.1))
        assert [schedule.lr(step, falling) for step in range(2000)] == pytest.approx(want)


def test_evaluations_are_due_every_ceil_steps():
    """262,144 samples, rounded up to whole steps; never at the start."""
    for batch, steps in ((512, 512), (2304, 114), (1000, 263)):
        due = [step for step in range(3 * steps) if schedule.due(step * batch, 262_144, batch)]
        assert due == [steps, 2 * steps] and schedule.steps_for(262_144, batch) == steps
    assert [schedule.due(step * 512, 100, 512) for step in range(4)] == [False, True, True, True]


# The page


WORDS = [  # seed, stream, sample, epoch, first word
    (0, ORDER, 0, 0, 0),
    (25952, NOISE, 1_099_775, 23, 0),
    (2**63 - 1, SCALARS, 5, 2**40, 0),
    (7, INIT, key_of("img_in.weight"), 0, 4 * 2**32),
    (1, VAL_NOISE, 29_695, 25_165_824, 400),
]


def test_golden_draws_follow_the_page():
    """What ports are given to compare themselves with, from the second implementation alone."""
    read = Golden(FOLDER).arrays.__getitem__
    same = np.testing.assert_array_equal
    for i, (seed, stream, sample, epoch, start) in enumerate(WORDS):
        same(read(f"draws.words.{i}"), words_of(seed, stream, sample, epoch, 8, start))
        same(rng.words(seed, stream, 8, sample=sample, epoch=epoch, start=start), read(f"draws.words.{i}"))
    same(read("draws.uniform"), uniform_of(read("draws.words.1")))
    same(read("draws.normal"), normal_of(read("draws.words.1")))
    assert read("draws.name_key") == key_of("img_in.weight")
    seed, shape = 25969, (7, 6, 10)
    for epoch in range(2):
        same(read(f"draws.order.{epoch}"), order_of(seed, epoch, 50))
    drop, t = uniform_of(words_of(seed, SCALARS, np.arange(50), 1, 2)).T
    same(read("draws.drop"), drop < 0.1)
    same(read("draws.t"), t)
    for name, *about in (
        ("shift", "uniform", 0.0, 1.0, 3.0),
        ("logit_normal", "logit_normal", 0.0, 1.0, 1.0),
        ("logit_normal_shift", "logit_normal", -0.5, 1.5, 0.6),
    ):
        found = times_of(words_of(seed, SCALARS, np.arange(50), 1, 4), *about)
        np.testing.assert_allclose(read(f"draws.t.{name}"), found, rtol=1e-6, err_msg=name)
    for name, stream, epoch in (
        *(("latent_eps", LATENT, 1), ("noise", NOISE, 1)),
        *(("val_latent_eps", VAL_LATENT, 262_144), ("val_noise", VAL_NOISE, 262_144)),
    ):
        same(read(f"draws.{name}"), normals_of(seed, stream, 3, epoch, 420).reshape(shape))
    u = uniform_of(words_of(seed, INIT, key_of("img_in.weight"), 0, 112))
    same(read("init.img_in.weight").ravel(), (2 * u - 1) * np.float32(math.sqrt(6 / (28 + 24))))
    drawn = normals_of(seed, INIT, key_of("time_in.in_layer.weight"), 0, 1024)
    same(read("init.time_in.in_layer.weight").ravel(), drawn * np.float32(0.02))
    u = uniform_of(words_of(0, INIT, key_of("weights.img_in.weight"), 0, 24 * 28))
    same(read("weights.img_in.weight").ravel(), (2 * u - 1) / 32)
