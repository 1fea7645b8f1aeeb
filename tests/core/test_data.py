"""Which sample goes where, what is drawn for it, the shards on disk and reading ahead."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import refusal

from flux_ref import config_file, rng, shards, toy
from flux_ref.config import Config, ModelConfig
from flux_ref.data import PADDING, HostBatch, TrainSet, ValSet, allocate, copy_next, read_ahead
from flux_ref.shards import MEMBERS, Layout, Sample

COUNT, BATCH = 50, 12  # an epoch ends inside the fifth batch
VAL_TIMESTEPS = [(5 * i + i // 8) % 8 for i in range(45)]  # not by position


def numbered(layout: Layout, count: int, timesteps: list[int | None]) -> list[Sample]:
    """Samples whose every value is their index (bf16 holds 0 to 256 exactly), so that contents tell who is who."""
    return [
        Sample(
            {name: shards.to_bf16_bits(np.full(layout.shapes[name], i)) for name in MEMBERS}, timesteps[i], f"no {i}"
        )
        for i in range(count)
    ]


def write_set(folder: Path, model: ModelConfig, train: int, val: list[int | None], per_shard: int = 20) -> None:
    layout = shards.layout(model)
    shards.write(folder / "train", numbered(layout, train, [None] * train), "train", per_shard)
    shards.write(folder / "val", numbered(layout, len(val), val), "val", per_shard)
    (folder / "empty_encodings").mkdir()
    for name, value in (("t5", 300.0), ("clip", 400.0)):
        np.save(folder / "empty_encodings" / f"{name}_empty.npy", np.full(layout.shapes[name], value, np.float32))


@pytest.fixture(scope="module")
def folder(micro, tmp_path_factory) -> Path:
    """A numbered data set; tests must not change it."""
    folder = tmp_path_factory.mktemp("numbered")
    write_set(folder, micro.model, COUNT, VAL_TIMESTEPS)
    return folder


def pointed(cfg: Config, folder: Path, **values: object) -> Config:
    """The config with its data in a folder."""
    places = {"data__train": "train", "data__val": "val", "data__empty": "empty_encodings"}
    own = {key: str(folder / name) for key, name in places.items()}
    own |= {"data__kind": "embeddings", "data__train_count": 0, "data__val_count": 0}
    return config_file.replace(cfg, **(own | values))


@pytest.fixture
def cfg(micro, folder) -> Config:
    return pointed(micro, folder)


def opened(cls: type, cfg: Config, rank: int = 0, size: int = 1):
    data_set = cls(cfg, rank, size, False)
    data_set.open()
    return data_set


def take(feed: Iterator[HostBatch], batches: int) -> dict[str, torch.Tensor]:
    """The rows of the next batches, one after the other."""
    taken = []
    for host in itertools.islice(feed, batches):
        taken.append({name: tensor.clone() for name, tensor in host.tensors.items()})
    feed.close()
    return {name: torch.cat([batch[name] for batch in taken]) for name in taken[0]}


def train_rows(cfg: Config, batches: int, samples: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
    """The rows of some steps in global order, from the feeds of all ranks."""
    ranks = [take(opened(TrainSet, cfg, rank, size).feed(samples), batches) for rank in range(size)]
    return {
        name: torch.cat([of_rank[name].unflatten(0, (batches, -1)) for of_rank in ranks], dim=1).flatten(0, 1)
        for name in ranks[0]
    }


def val_rows(cfg: Config, evaluation: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
    """The rows of one evaluation that count, from the feeds of all ranks, in the order of the samples."""
    sets = [opened(ValSet, cfg, rank, size) for rank in range(size)]
    ranks = [take(val.feed(evaluation), val.batches) for val in sets]
    rows = {name: torch.cat([of_rank[name] for of_rank in ranks]) for name in ranks[0]}
    counted = rows["timestep"] != PADDING
    order = numbers(rows)[counted].argsort(stable=True)
    return {name: tensor[counted][order] for name, tensor in rows.items()}


def numbers(rows: dict[str, torch.Tensor], name: str = "mean") -> torch.Tensor:
    """Which sample each row holds, told by its content."""
    values = rows[name].flatten(1)
    assert (values == values[:, :1]).all(), f"a row's {name} is of several samples"
    return values[:, 0].long()


def require_equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


# Order


def test_epochs_are_permutations_and_draws_belong_to_the_sample_and_change_with_the_epoch(cfg):
    rows = train_rows(cfg, 9)
    epochs = [numbers(rows)[start : start + COUNT] for start in (0, COUNT)]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [list(range(COUNT))] * 2
    assert len({tuple(epoch.tolist()) for epoch in (*epochs, torch.arange(COUNT))}) == 3
    first, second = (epoch.argsort() + start for epoch, start in zip(epochs, (0, COUNT)))
    assert (rows["t"][first] != rows["t"][second]).all()
    assert len(torch.cat((rows["noise"], rows["latent_eps"])).flatten(1).unique(dim=0)) == 2 * len(rows["t"])
    draw = rng.train_draw(0, 0, 7, cfg.model.latent_shape, 0.1)
    assert rows["t"][first[7]] == draw.t
    assert np.array_equal(rows["noise"][first[7]].numpy(), draw.noise)
    assert np.array_equal(rows["latent_eps"][first[7]].numpy(), draw.latent_eps)


def test_samples_and_draws_are_the_same_at_every_world_size_and_from_every_start(cfg):
    moved = config_file.replace(
        cfg, train__timestep="logit_normal", train__timestep_mean=-0.5, train__timestep_shift=3.0
    )
    for own in (cfg, moved):
        whole = train_rows(own, 6)
        for size, step in ((2, 0), (3, 0), (4, 1), (1, 4), (1, 5)):
            tail = train_rows(own, 6 - step, samples=step * BATCH, size=size)
            require_equal(tail, {name: tensor[step * BATCH :] for name, tensor in whole.items()})


def test_the_distribution_of_t_changes_t_and_nothing_else(cfg):
    """Each key reaches the batch. Validation keeps its times."""
    values = {"train__timestep": "logit_normal", "train__timestep_mean": -0.5, "train__timestep_width": 1.5}
    values["train__timestep_shift"] = 3.0
    before = plain = train_rows(cfg, 2)
    for count in range(1, 5):
        own = config_file.replace(cfg, **dict(itertools.islice(values.items(), count)))
        rows = train_rows(own, 2)
        assert (rows["t"] != before["t"]).all(), list(values)[count - 1]
        require_equal({**rows, "t": plain["t"]}, plain)
        before = rows
    times = rng.TimeDistribution("logit_normal", -0.5, 1.5, 3.0)
    assert rows["t"][0] == rng.train_draw(0, 0, int(numbers(rows)[0]), cfg.model.latent_shape, 0.1, times).t
    require_equal(val_rows(own, 36), val_rows(cfg, 36))


def test_a_feed_from_far_away_reads_only_what_it_hands_out(cfg, monkeypatch):
    reads = []
    train_set = opened(TrainSet, cfg)
    monkeypatch.setattr(train_set.shards, "read", lambda index, rows: reads.append(index))
    take(train_set.feed(BATCH * 10**9), 1)
    assert len(reads) <= BATCH * (1 + cfg.data.prefetch)


# Captions and times of training


def test_a_dropped_caption_is_replaced_in_both_encodings_and_nothing_else_changes(cfg):
    kept, some = (train_rows(config_file.replace(cfg, train__caption_drop=drop), 8) for drop in (0.0, 0.5))
    t5, clip = numbers(some, "t5"), numbers(some, "clip")
    dropped = t5 == 300
    assert torch.equal(dropped, clip == 400)
    assert 30 < dropped.sum() < 66
    assert torch.equal(t5[~dropped], numbers(kept)[~dropped]) and torch.equal(clip[~dropped], numbers(kept)[~dropped])
    require_equal({**some, "t5": kept["t5"], "clip": kept["clip"]}, kept)


# Validation


def test_the_plan_of_validation_is_exact():
    """For the benchmark's 29,696 samples, and for any count of samples and ranks. No data are needed."""
    sizes = (1, 3, 24, 72, 168, 176, 200, 224, 264, 336, 368, 384, 408, 512)
    cases = [(29_696, size, batch) for size in sizes for batch in (4, 8, 16, 32)]
    cases += np.random.default_rng(0).integers(1, (2000, 40, 70), (60, 3)).tolist()
    for count, size, batch in cases:
        starts = []
        for rank in range(size):
            val = ValSet.__new__(ValSet)
            val.shards, val.cfg = range(count), SimpleNamespace(eval=SimpleNamespace(batch=batch))
            val.rank, val.size = rank, size
            plan = list(val._plan(0))
            assert len(plan) == val.batches, "ranks would run different numbers of batches"
            assert all(len(part) == batch for part in plan)
            starts += [part[0][1] for part in plan]
        assert sorted(starts) == list(range(0, len(starts) * batch, batch)), "batches overlap or leave gaps"
        assert count <= len(starts) * batch < count + size * batch, "samples missing, or only padding on every rank"


def test_every_validation_sample_comes_once_with_its_own_timestep(cfg):
    for size, batch in ((1, 8), (1, 45), (1, 64), (2, 5), (3, 8), (3, 15), (4, 32), (7, 1)):
        rows = val_rows(config_file.replace(cfg, eval__batch=batch), size=size)
        for name in ("mean", "logvar", "t5", "clip"):
            assert numbers(rows, name).tolist() == list(range(45)), (size, batch)
        assert rows["timestep"].tolist() == VAL_TIMESTEPS
        assert rows["t"].tolist() == [k / 8 for k in VAL_TIMESTEPS]


def test_rows_of_padding_hold_zeros_whatever_was_in_the_buffer_before(cfg):
    """They do not count, but an FP8 scale of the batch would see them."""
    val_set = opened(ValSet, config_file.replace(cfg, eval__batch=8))
    for buffer in val_set.buffers:
        for tensor in buffer.tensors.values():
            tensor.fill_(7)
    last = [batch.tensors for batch in val_set.feed(0)][-1]
    assert last["timestep"].tolist() == VAL_TIMESTEPS[40:] + [PADDING] * 3
    assert not any(tensor[5:].any() for name, tensor in last.items() if name != "timestep")


def test_each_evaluation_has_its_own_noise_and_repeats_it_at_any_number_of_ranks_and_any_caption_drop(cfg):
    one, other = val_rows(cfg, 36), val_rows(cfg, 72)
    require_equal(val_rows(config_file.replace(cfg, eval__batch=5, train__caption_drop=1.0), 36, size=3), one)
    for name in ("noise", "latent_eps"):
        assert len(torch.cat((one[name], other[name])).flatten(1).unique(dim=0)) == 90
    require_equal({**other, "noise": one["noise"], "latent_eps": one["latent_eps"]}, one)


def test_a_wrong_number_of_samples_is_refused_before_any_is_read(cfg):
    text = refusal(TrainSet, config_file.replace(cfg, data__train_count=51), 0, 1, False)
    assert "holds 50 samples, data.train_count=51 asks for 51; set it to 0 for any number" in text
    text = refusal(ValSet, config_file.replace(cfg, data__val_count=44), 0, 1, False)
    assert "holds 45 samples, data.val_count=44 asks for 44" in text
    text = refusal(
        TrainSet, config_file.replace(cfg, data__kind="shapes", data__train_count=51, data__val_count=45), 0, 1, False
    )
    assert f"asks for 51; set it to 50, or remove {Path(cfg.data.train).parent} and it is made again" in text


def test_a_validation_set_that_lacks_a_timestep_is_refused_before_training(micro, tmp_path):
    write_set(tmp_path / "few", micro.model, 1, list(range(7)))
    assert "holds 7 samples; validation needs one of each" in refusal(
        ValSet, pointed(micro, tmp_path / "few"), 0, 1, False
    )
    write_set(tmp_path / "same", micro.model, 1, [3] * 9)
    text = refusal(opened, ValSet, pointed(micro, tmp_path / "same"))
    assert "has no sample of timestep 0; validation needs each of 0 to 7" in text and "--data.val=" in text
    opened(ValSet, pointed(micro, tmp_path / "same", data__val=""))


def test_drawings_are_made_for_a_run_without_validation_too(micro, tmp_path):
    toy.ensure(config_file.replace(micro, data__train=str(tmp_path / "new" / "train"), data__val=""))
    assert len(shards.ShardSet(tmp_path / "new" / "train", shards.layout(micro.model))) == micro.data.train_count


# Reading ahead


class Source:
    """A plan and a fill that note what they are asked for. broken: the item that cannot be read."""

    def __init__(self, micro: Config, buffers: int = 3, broken: int = -1, seconds: float = 0.0):
        self.broken = broken
        self.seconds = seconds  # that each row takes
        self.filled: list[int] = []
        self.buffers = [HostBatch(micro.model, BATCH, False) for _ in range(buffers)]

    def feed(self) -> Iterator[HostBatch]:
        plan = (range(step * BATCH, (step + 1) * BATCH) for step in itertools.count())
        return read_ahead(plan, self.fill, self.buffers, workers=3)

    def fill(self, rows, i, item):
        time.sleep(self.seconds)
        if item == self.broken:
            raise KeyError("broken")
        rows["t"][i] = item
        self.filled.append(item)

    def settled(self) -> int:
        """Rows filled once nothing more happens."""
        before = -1
        while len(self.filled) > before:
            before = len(self.filled)
            time.sleep(0.1)
        return before


def test_all_buffers_but_the_one_in_use_are_filled_ahead_in_order(micro):
    for buffers in (2, 4):
        source = Source(micro, buffers)
        feed = source.feed()
        used = set()
        for step in range(3 * buffers):
            batch = next(feed)
            used.add(id(batch))
            if step < 2:
                assert source.settled() == (buffers + step) * BATCH, "a buffer was refilled while in use"
            assert batch.tensors["t"].tolist() == list(range(step * BATCH, (step + 1) * BATCH))
        feed.close()
        assert len(used) == buffers


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


def test_a_buffer_is_filled_only_once_its_copy_has_ended_and_closing_does_not_wait_for_it(micro):
    """A lost rank may keep the device in a collective for ever."""
    for ends in (True, False):
        source, ended = Source(micro, buffers=1), threading.Event()
        feed = source.feed()
        next(feed).copied = SimpleNamespace(synchronize=ended.wait)
        if ends:
            threading.Timer(0.1, ended.set).start()
            begin = time.perf_counter()
            assert next(feed).tensors["t"][0] == BATCH and time.perf_counter() - begin > 0.09
        feed.close()
        ended.set()


def test_a_feed_waits_for_what_a_closed_one_still_fills(micro):
    source, held = Source(micro, buffers=2), threading.Event()
    source.fill = lambda rows, i, item: held.wait() if item >= BATCH else None
    feed = source.feed()
    next(feed)
    feed.close()  # its threads fill the second buffer
    threading.Timer(0.2, held.set).start()
    begin = time.perf_counter()
    next(source.feed())
    assert time.perf_counter() - begin > 0.15


def test_waiting_for_data_counts_while_the_device_is_idle(micro, monkeypatch):
    """On the CPU it always is."""
    static = allocate(micro.model, BATCH)
    source = Source(micro, seconds=0.02)
    assert 0.04 < copy_next(source.feed(), static) < 1.0  # four rows for each of three workers
    assert static["t"].tolist() == list(range(BATCH))
    busy = {name: SimpleNamespace(device=torch.device("cuda"), copy_=lambda *_, **__: None) for name in static}
    monkeypatch.setattr("flux_ref.data.ranks.record_copy_event", lambda device: None)
    for done, most in ((False, 0.0), (True, 1.0)):
        event = SimpleNamespace(record=lambda: None, query=lambda done=done: done)
        monkeypatch.setattr(torch, "Event", lambda kind, event=event: event)
        assert (copy_next(source.feed(), busy) > 0) == done, most
