"""Every random number of a run, against a second implementation of its definition; and the run's arithmetic."""

import itertools
import math

import numpy as np
import pytest

from flux_ref import draws, schedule

SHAPE = (2, 4, 6)
MASK = 2**64 - 1
PUBLIC_SEEDS = (25952, 25953, 25954)  # adjacent, as in published benchmark runs


def philox_4x64_10(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """One block of four words, from the paper (Salmon et al., SC'11, section 3.3)."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


def test_second_philox_gives_the_papers_known_answers():
    """Test vectors of the authors' Random123 (kat_vectors, philox4x64 10)."""
    assert philox_4x64_10((0, 0), (0, 0, 0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox_4x64_10((MASK, MASK), (MASK, MASK, MASK, MASK)) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@pytest.mark.parametrize(
    "seed,stream,sample,epoch,start,count",
    [
        (0, draws.ORDER, 0, 0, 0, 9),
        (25952, draws.NOISE, 1_099_775, 23, 0, 8),
        (2**63 - 1, draws.SCALARS, 5, 2**40, 0, 2),
        (7, draws.INIT, draws.name_key("img_in.weight"), 0, 4 * 2**32, 6),
        (1, draws.WORDS, MASK, 4096, 400, 4),
    ],
)
def test_words_are_philox_blocks_under_the_documented_counter(seed, stream, sample, epoch, start, count):
    expected = [
        philox_4x64_10((seed, stream), (w // 4 + 1, sample, epoch, 0))[w % 4] for w in range(start, start + count)
    ]
    got = draws.words(seed, stream, count, sample=sample, epoch=epoch, start=start)
    assert got.dtype == np.uint64
    assert got.tolist() == expected


def test_words_from_a_start_continue_the_stream():
    whole = draws.words(3, draws.INIT, 64, sample=9)
    assert np.array_equal(draws.words(3, draws.INIT, 24, sample=9, start=40), whole[40:])


def test_no_two_seeds_streams_samples_or_epochs_share_words():
    """Adjacent ones above all: with seed + rank such runs would repeat each other's numbers."""
    streams = (draws.SCALARS, draws.LATENT, draws.NOISE, draws.VAL_LATENT, draws.VAL_NOISE, draws.SAMPLING)
    keys = itertools.product(PUBLIC_SEEDS, streams, range(3), range(3))
    drawn = np.concatenate([draws.words(seed, stream, 64, sample=s, epoch=e) for seed, stream, s, e in keys])
    assert len(np.unique(drawn)) == len(drawn) == 3 * 6 * 3 * 3 * 64


def test_streams_keep_their_numbers():
    """They are part of the definition of a run."""
    streams = (
        draws.ORDER,
        draws.SCALARS,
        draws.LATENT,
        draws.NOISE,
        draws.VAL_LATENT,
        draws.VAL_NOISE,
        draws.INIT,
        draws.SYNTHETIC,
        draws.SAMPLING,
        draws.WORDS,
        draws.JITTER,
    )
    assert streams == tuple(range(len(streams)))


def test_uniform_never_reaches_1():
    words = np.array([0, 2**40 - 1, 2**40, 2**63, MASK], np.uint64)
    assert draws.uniform(words).dtype == np.float32
    assert draws.uniform(words).tolist() == [0.0, 0.0, 2.0**-24, 0.5, 1 - 2.0**-24]


def test_uniform_is_flat_and_fine():
    """200,000 draws: mean, 64 bins, and a grid of 2**-24 that is used (bf16 would leave some 30,000 values)."""
    t = draws.uniform(draws.words(0, draws.SCALARS, 200_000)).astype(np.float64)
    assert t.min() >= 0 and t.max() < 1
    assert abs(t.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(t))
    counts, _ = np.histogram(t, bins=64, range=(0, 1))
    chi_squared = ((counts - len(t) / 64) ** 2 / (len(t) / 64)).sum()
    assert chi_squared < 63 + 4 * math.sqrt(2 * 63)
    assert np.array_equal(t * 2**24, np.round(t * 2**24))
    assert len(np.unique(t)) > 0.99 * len(t)


def test_t_of_samples_and_epochs_is_uniform():
    """One t per (sample, epoch), each from a block of its own."""
    drawn = [draws.train_draw(0, epoch, sample, (1, 1, 2), 0.1) for epoch in range(4) for sample in range(5000)]
    t = np.array([draw.t for draw in drawn])
    assert t.min() >= 0 and t.max() < 1
    assert abs(t.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(t))
    assert abs(np.mean(t**2) - 1 / 3) < 4 * math.sqrt(4 / 45 / len(t))
    assert abs(np.corrcoef(t[:-1], t[1:])[0, 1]) < 4 / math.sqrt(len(t))
    dropped = np.array([draw.drop_caption for draw in drawn])
    assert abs(dropped.mean() - 0.1) < 4 * math.sqrt(0.1 * 0.9 / len(t))
    assert abs(np.corrcoef(t, dropped)[0, 1]) < 4 / math.sqrt(len(t))


def test_normal_is_box_muller_on_pairs():
    words = draws.words(5, draws.NOISE, 64)
    for first, second, pair in zip(words[0::2].tolist(), words[1::2].tolist(), draws.normal(words).reshape(-1, 2)):
        radius = math.sqrt(-2 * math.log((first // 2**11 + 1) / 2**53))
        angle = 2 * math.pi * (second // 2**11) / 2**53
        assert pair.tolist() == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)], rel=1e-6, abs=1e-7)


def test_normal_is_finite_at_the_extreme_words():
    words = np.array([0, 0, MASK, MASK, 0, MASK, MASK, 0], np.uint64)
    assert np.isfinite(draws.normal(words)).all()
    assert draws.normal(words).max() == pytest.approx(math.sqrt(2 * 53 * math.log(2)))


def test_normal_has_the_moments_of_a_gaussian():
    x = draws.normals(0, draws.NOISE, (400, 500), sample=1, epoch=2).astype(np.float64)
    assert x.shape == (400, 500)
    x = x.ravel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(x**power) - moment) < 4 * math.sqrt(variance / len(x)), power
    assert abs(np.mean(x[0::2] * x[1::2])) < 4 / math.sqrt(len(x) / 2)
    assert np.mean(abs(x) > 3) == pytest.approx(math.erfc(3 / math.sqrt(2)), rel=0.2)


def test_normals_begin_with_the_same_numbers_at_every_size():
    small = draws.normals(0, draws.NOISE, (2, 3), sample=4, epoch=5)
    large = draws.normals(0, draws.NOISE, (4, 3), sample=4, epoch=5)
    assert np.array_equal(small, large[:2])


@pytest.mark.parametrize("count", [1, 2, 7, 50, 4099])
def test_order_is_a_permutation_in_every_epoch(count):
    """Each sample once per epoch, none repeated."""
    for epoch in range(3):
        assert sorted(draws.order(25952, epoch, count).tolist()) == list(range(count))


def test_order_is_new_in_every_epoch_and_seed_and_the_same_every_time():
    orders = [tuple(draws.order(seed, epoch, 1000)) for seed in PUBLIC_SEEDS for epoch in range(4)]
    assert len(set(orders)) == 12
    assert orders == [tuple(draws.order(seed, epoch, 1000)) for seed in PUBLIC_SEEDS for epoch in range(4)]


def test_order_is_shuffled():
    """About one sample stays in place, and neighbours part."""
    order = draws.order(0, 0, 10_000)
    assert (order == np.arange(10_000)).sum() < 8
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def arrays_of(draw: draws.Draw) -> list:
    return [draw.drop_caption, draw.t, draw.latent_eps.tolist(), draw.noise.tolist()]


def test_train_draw_is_a_function_of_its_arguments_alone():
    """Not of numpy's or Python's global generator, nor of what was drawn before."""
    np.random.seed(1)
    first = draws.train_draw(3, 2, 41, SHAPE, 0.1)
    state = np.random.get_state()[1].tolist()
    np.random.seed(2)
    draws.train_draw(3, 2, 40, SHAPE, 0.1)
    draws.val_draw(3, 0, 41, SHAPE)
    assert arrays_of(draws.train_draw(3, 2, 41, SHAPE, 0.1)) == arrays_of(first)
    np.random.seed(1)
    assert np.random.get_state()[1].tolist() == state, "a draw moved numpy's global generator"


@pytest.mark.parametrize("changed", [(4, 2, 41), (3, 3, 41), (3, 2, 42)])
def test_train_draw_depends_on_seed_epoch_and_sample(changed):
    first, second = draws.train_draw(3, 2, 41, SHAPE, 0.1), draws.train_draw(*changed, SHAPE, 0.1)
    assert first.t != second.t
    assert (first.noise != second.noise).all() and (first.latent_eps != second.latent_eps).all()


def test_train_draw_has_the_latents_shape_and_two_different_noises():
    draw = draws.train_draw(3, 2, 41, SHAPE, 0.1)
    assert draw.noise.shape == draw.latent_eps.shape == SHAPE
    assert draw.noise.dtype == draw.latent_eps.dtype == np.float32
    assert (draw.noise != draw.latent_eps).all()
    assert type(draw.t) is float and type(draw.drop_caption) is bool


def test_captions_are_dropped_never_or_always_at_the_ends():
    for sample in range(300):
        never, always = (draws.train_draw(0, 0, sample, (1, 1, 2), p) for p in (0.0, 1.0))
        assert (never.drop_caption, always.drop_caption) == (False, True)
        assert arrays_of(never)[1:] == arrays_of(always)[1:], "the drop rate must not change the other draws"


def test_validation_draws_are_apart_from_trainings():
    """Even where its seed, epoch and sample are training's; noise is new at each evaluation and sample."""
    latent_eps, noise = draws.val_draw(3, 2, 41, SHAPE)
    train = draws.train_draw(3, 2, 41, SHAPE, 0.1)
    others = [train.latent_eps, train.noise, *draws.val_draw(3, 3, 41, SHAPE), *draws.val_draw(3, 2, 42, SHAPE)]
    everything = np.concatenate([array.ravel() for array in (latent_eps, noise, *others)])
    assert len(np.unique(everything)) == len(everything)
    again = draws.val_draw(3, 2, 41, SHAPE)
    assert np.array_equal(again[0], latent_eps) and np.array_equal(again[1], noise)


def test_name_key_is_a_fixed_hash():
    """The first eight bytes of SHA-256, least significant first: e3b0c442 98fc1c14 for the empty name."""
    assert draws.name_key("") == 0x141CFC9842C4B0E3
    assert len({draws.name_key(f"single_blocks.{i}.linear1.weight") for i in range(38)}) == 38


def test_lr_is_linear_then_constant():
    rates = [schedule.lr(step, 2e-4, 1600) for step in range(2000)]
    assert rates[0] == pytest.approx(2e-4 / 1600)
    assert rates[799] == pytest.approx(1e-4)
    assert rates[1598] < rates[1599] == 2e-4
    assert set(rates[1599:]) == {2e-4}
    assert np.diff(rates[:1600]) == pytest.approx(2e-4 / 1600)
    assert schedule.lr(0, 2e-4, 0) == 2e-4


@pytest.mark.parametrize(
    "global_batch,steps", [(512, 512), (1024, 256), (2048, 128), (2304, 114), (1000, 263), (96, 2731)]
)
def test_evaluations_are_due_every_ceil_steps(global_batch, steps):
    """262,144 samples, rounded up to whole steps; never at the start."""
    due = [step for step in range(4 * steps) if schedule.due(step * global_batch, 262_144, global_batch)]
    assert due == [steps, 2 * steps, 3 * steps]
    assert schedule.steps_for(262_144, global_batch) == steps


def test_an_interval_below_one_batch_is_due_at_every_step_but_not_at_the_start():
    assert all(schedule.due(step * 512, 100, 512) for step in range(1, 10))
    assert not schedule.due(0, 100, 512)


def test_validation_times_are_k_eighths():
    assert [schedule.validation_time(k) for k in range(schedule.TIMESTEPS)] == [
        0.0,
        0.125,
        0.25,
        0.375,
        0.5,
        0.625,
        0.75,
        0.875,
    ]
