"""Which sample goes where, what is drawn for it, the shards on disk and reading ahead."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import shard_damage
import torch
from conftest import refusal

from flux_ref import config_file, dataset, rng
from flux_ref.dataloader import PADDING, HostBatch, TrainSet, ValSet, allocate, copy_next, read_ahead

COUNT, BATCH = 50, 12  # an epoch ends inside the fifth batch
TIMESTEPS = [(5 * i + i // 8) % 8 for i in range(45)]  # of validation, not by position


def write_set(cfg, folder, train, val):
    """Samples whose every value is their index (bf16 holds 0 to 256 exactly); their captions are 300 and 400.

    Returns the config with its data there.
    """
    shapes = dataset.sample_layout(cfg.model).shapes
    for split, timesteps in (("train", [None] * train), ("val", val)):
        samples = []
        for i, timestep in enumerate(timesteps):
            bits = {name: dataset.to_bf16_bits(np.full(shape, i)) for name, shape in shapes.items()}
            samples.append((dataset.Meta(dataset.key_of(split, i), timestep), bits))
        shard_damage.write(folder / split, samples, 20)
    empty = {name: np.full(shapes[name], value, np.float32) for name, value in (("t5", 300), ("clip", 400))}
    dataset.write_empty(folder / "empty_encodings", empty)
    places = {"data__train": folder / "train", "data__val": folder / "val"}
    values = {"data__kind": "embeddings", "data__expected_train_samples": 0, "data__expected_val_samples": 0}
    return config_file.replace(cfg, **values, **{key: str(path) for key, path in places.items()})


@pytest.fixture(scope="module")
def cfg(micro, tmp_path_factory):
    return write_set(micro, tmp_path_factory.mktemp("numbered"), COUNT, TIMESTEPS)


def rows_of(kind, cfg, start, size=1, batches=None):
    """The next batches of each rank, one after the other."""
    ranks = []
    for rank in range(size):
        samples = kind(cfg, rank, size, False)
        samples.open()
        feed = samples.feed(start)
        taken = [{name: t.clone() for name, t in host.tensors.items()} for host in itertools.islice(feed, batches)]
        feed.close()
        ranks.append({name: torch.stack([batch[name] for batch in taken]) for name in taken[0]})
    return ranks


def train_rows(cfg, batches, samples=0, size=1):
    """The rows of some steps in global order."""
    ranks = rows_of(TrainSet, cfg, samples, size, batches)
    return {name: torch.cat([rank[name] for rank in ranks], dim=1).flatten(0, 1) for name in ranks[0]}


def val_rows(cfg, noise_epoch=0, size=1):
    """The rows of one evaluation that count, in the order of the samples."""
    ranks = rows_of(ValSet, cfg, noise_epoch, size)
    rows = {name: torch.cat([rank[name].flatten(0, 1) for rank in ranks]) for name in ranks[0]}
    order = [i for i in numbers(rows).argsort(stable=True).tolist() if rows["timestep"][i] != PADDING]
    return {name: tensor[order] for name, tensor in rows.items()}


def numbers(rows, name="mean"):
    """Which sample each row holds, told by its content."""
    values = rows[name].flatten(1)
    assert (values == values[:, :1]).all(), f"a row's {name} is of several samples"
    return values[:, 0].long()


def different(found, want):
    return {name for name in want if not torch.equal(found[name], want[name])}


# Training


def test_epochs_are_permutations_and_draws_belong_to_sample_and_epoch(cfg):
    rows = train_rows(cfg, 9)
    order = numbers(rows)[: 2 * COUNT].view(2, COUNT)
    assert [sorted(epoch) for epoch in order.tolist()] == [list(range(COUNT))] * 2
    assert len(torch.cat((order, torch.arange(COUNT)[None])).unique(dim=0)) == 3
    assert len(torch.cat((rows["noise"], rows["latent_eps"])).flatten(1).unique(dim=0)) == 2 * len(rows["t"])
    for position in (3, COUNT + 3):
        draw = rng.train_draw(cfg.train, position // COUNT, int(numbers(rows)[position]), cfg.model.latent_shape)
        assert rows["t"][position] == draw.t
        assert np.array_equal(rows["noise"][position].numpy(), draw.noise)
        assert np.array_equal(rows["latent_eps"][position].numpy(), draw.latent_eps)


def test_samples_and_draws_are_the_same_at_every_world_size_and_from_every_start(cfg):
    whole = train_rows(cfg, 6)
    for size, step in ((2, 0), (3, 0), (4, 1), (1, 5)):
        tail = train_rows(cfg, 6 - step, step * BATCH, size)
        assert not different(tail, {name: tensor[step * BATCH :] for name, tensor in whole.items()})


def test_the_distribution_of_t_changes_t_in_training_and_nothing_else(cfg):
    values = {"timestep_sampling": "logit_normal", "logit_mean": -0.5, "logit_std": 1.5, "timestep_shift": 3.0}
    moved = config_file.replace(cfg, **{f"train__{key}": value for key, value in values.items()})
    rows = train_rows(moved, 2)
    want = [rng.train_draw(moved.train, 0, sample, (2,)).t for sample in numbers(rows).tolist()]
    assert torch.equal(rows["t"], torch.tensor(want))
    assert different(rows, train_rows(cfg, 2)) == {"t"} and not different(val_rows(moved), val_rows(cfg))


def test_a_dropped_caption_is_replaced_in_both_encodings_and_nothing_else_changes(cfg):
    kept, some = (train_rows(config_file.replace(cfg, train__caption_drop=drop), 8) for drop in (0.0, 0.5))
    dropped = numbers(some, "t5") == 300
    assert 30 < dropped.sum() < 66 and different(some, kept) == {"t5", "clip"}
    for name, value in (("t5", 300), ("clip", 400)):
        assert torch.equal(numbers(some, name), numbers(kept).where(~dropped, value))


# Validation


def test_the_plan_of_validation_is_exact():
    """For the benchmark's 29,696 samples, and for any count of samples and ranks. No data are needed."""
    cases = [(29_696, size, batch) for size in (1, 72, 200, 368, 512) for batch in (4, 32)]
    cases += np.random.default_rng(0).integers(1, (2000, 40, 70), (40, 3)).tolist()
    for count, size, batch in cases:
        starts = []
        for rank in range(size):
            val = ValSet.__new__(ValSet)
            val.count, val.cfg = count, SimpleNamespace(eval=SimpleNamespace(batch=batch))
            val.rank, val.size = rank, size
            plan = list(val._plan(0))
            assert len(plan) == val.batches, "ranks would run different numbers of batches"
            assert all(len(part) == batch for part in plan)
            starts += [part[0][1] for part in plan]
        assert sorted(starts) == list(range(0, len(starts) * batch, batch)), "batches overlap or leave gaps"
        assert count <= len(starts) * batch < count + size * batch, "samples missing, or only padding on every rank"


def test_every_validation_sample_comes_once_with_its_own_timestep_and_noise_of_the_evaluation(cfg):
    one = val_rows(config_file.replace(cfg, train__caption_drop=1.0), 36)
    for size, batch in ((1, 45), (1, 64), (3, 8), (7, 1)):
        rows = val_rows(config_file.replace(cfg, eval__batch=batch), 36, size)
        assert not different(rows, one), (size, batch)
    for name in dataset.MEMBERS:
        assert numbers(one, name).tolist() == list(range(45))
    assert one["timestep"].tolist() == TIMESTEPS and one["t"].tolist() == [k / 8 for k in TIMESTEPS]
    other = val_rows(cfg, 72)
    assert different(other, one) == {"noise", "latent_eps"}
    for name in ("noise", "latent_eps"):
        assert len(torch.cat((one[name], other[name])).flatten(1).unique(dim=0)) == 90


def test_rows_of_padding_hold_zeros_whatever_was_in_the_buffer_before(cfg):
    """They do not count, but an FP8 scale of the batch would see them."""
    val_set = ValSet(config_file.replace(cfg, eval__batch=8), 0, 1, False)
    val_set.open()
    for buffer in val_set.buffers:
        for tensor in buffer.tensors.values():
            tensor.fill_(7)
    last = [batch.tensors for batch in val_set.feed(0)][-1]
    assert last["timestep"].tolist() == TIMESTEPS[40:] + [PADDING] * 3
    assert not any(tensor[5:].any() for name, tensor in last.items() if name != "timestep")


def test_sets_of_another_number_and_validation_that_lacks_a_timestep_are_refused(micro, cfg, tmp_path):
    for key, kind, count in (("expected_train_samples", TrainSet, 50), ("expected_val_samples", ValSet, 45)):
        text = refusal(kind, config_file.replace(cfg, **{f"data__{key}": 44}), 0, 1, False)
        assert f"holds {count} samples, data.{key}=44 asks for 44; set it to {count} or to 0" in text
    of_training = config_file.replace(cfg, data__val=cfg.data.train)
    without = write_set(micro, tmp_path, 1, [k for k in TIMESTEPS if k != 5])
    for one, lacks in ((of_training, set(range(8))), (without, {5})):
        assert f"has no sample of the timesteps {lacks}; validation needs" in refusal(ValSet(one, 0, 1, False).open)
        ValSet(one, 1, 2, False).open()  # only rank 0 looks


# Reading ahead


class Source:
    """A plan and a fill that count what they are asked for. broken: the item that cannot be read."""

    def __init__(self, micro, buffers=3, broken=-1, seconds=0.0):
        self.broken = broken
        self.seconds = seconds  # that each row takes
        self.filled = 0
        self.buffers = [HostBatch(micro.model, BATCH, False) for _ in range(buffers)]

    def feed(self):
        plan = (range(step * BATCH, (step + 1) * BATCH) for step in itertools.count())
        return read_ahead(plan, self.fill, self.buffers, workers=3)

    def fill(self, row, item):
        time.sleep(self.seconds)
        if item == self.broken:
            raise KeyError("broken")
        row["t"][...] = item
        self.filled += 1


def test_all_buffers_but_the_one_in_use_are_filled_ahead_in_order(micro):
    source = Source(micro)
    used = set()
    for step, batch in zip(range(9), source.feed()):
        used.add(id(batch))
        if step < 2:
            time.sleep(0.2)
            assert source.filled == (3 + step) * BATCH, "a buffer was refilled while in use"
        assert batch.tensors["t"].tolist() == list(range(step * BATCH, (step + 1) * BATCH))
    assert len(used) == 3


def test_a_single_buffer_is_filled_by_the_callers_thread_once_its_copy_has_ended(micro, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    source = Source(micro, buffers=1)
    ended = []
    for step, batch in zip(range(3), source.feed()):
        assert source.filled == (step + 1) * BATCH
        assert batch.tensors["t"].tolist() == list(range(step * BATCH, (step + 1) * BATCH))
        batch.wait_for_copy = lambda: ended.append(source.filled)
    assert ended == [*range(BATCH, 3 * BATCH)], "before each row of its next batch"


def test_an_error_of_a_thread_is_raised_at_its_batch_and_a_closed_feed_leaves_no_thread(micro):
    before = set(threading.enumerate())
    feed = Source(micro, broken=BATCH + 5).feed()
    assert next(feed).tensors["t"].tolist() == list(range(BATCH))
    with pytest.raises(KeyError, match="broken"):
        next(feed)
    feed = Source(micro, seconds=0.01).feed()
    next(feed)
    feed.close()
    time.sleep(0.3)
    assert set(threading.enumerate()) <= before


def test_closing_a_feed_does_not_wait_for_its_threads(micro):
    """A lost rank may keep the device in a collective for ever, and a thread waits for the device."""
    source, held = Source(micro, buffers=2), threading.Event()
    source.fill = lambda row, item: held.wait() if item >= BATCH else None
    feed = source.feed()
    next(feed)
    timer = threading.Timer(2, held.set)
    timer.start()
    feed.close()
    assert not held.is_set()
    held.set()
    timer.cancel()


def test_waiting_for_data_counts_while_the_device_is_idle(micro, monkeypatch):
    """On the CPU it always is."""
    static = allocate(micro.model, BATCH)
    source = Source(micro, seconds=0.02)
    assert 0.04 < copy_next(source.feed(), static) < 1.0  # four rows for each of three workers
    assert static["t"].tolist() == list(range(BATCH))
    busy = {name: SimpleNamespace(device=torch.device("cuda"), copy_=lambda *_, **__: None) for name in static}
    monkeypatch.setattr("flux_ref.dataloader.ranks.make_copy_waiter", lambda device: int)
    for done in (False, True):
        event = SimpleNamespace(record=lambda: None, query=lambda done=done: done)
        monkeypatch.setattr(torch, "Event", lambda kind, event=event: event)
        assert (copy_next(source.feed(), busy) > 0) == done
