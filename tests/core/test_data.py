"""Which sample goes where, what is drawn for it, the shards on disk and reading ahead."""

import io
import itertools
import json
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import refusal

from flux_ref import config_file, rng
from flux_ref.config import Config, ModelConfig
from flux_ref.data import Feed, HostBatch, TrainSet, ValSet
from flux_ref.errors import Refusal
from flux_ref.formats import shard_writer, shards
from flux_ref.formats.shard_writer import Sample
from flux_ref.formats.shards import MEMBERS, Layout, ShardSet

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
    shard_writer.write(folder / "train", numbered(layout, train, [None] * train), "train", per_shard)
    shard_writer.write(folder / "val", numbered(layout, len(val), val), "val", per_shard)
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


def take(feed: Feed, batches: int) -> dict[str, torch.Tensor]:
    """The rows of the next batches, one after the other."""
    taken = []
    for _ in range(batches):
        host = feed.take()
        taken.append({name: tensor.clone() for name, tensor in host.tensors.items()})
        feed.give_back(host)
    feed.close()
    return {name: torch.cat([batch[name] for batch in taken]) for name in taken[0]}


def train_rows(cfg: Config, batches: int, samples: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
    """The rows of some steps in global order, from the feeds of all ranks."""
    ranks = [take(opened(TrainSet, cfg, rank, size).feed(samples), batches) for rank in range(size)]
    return {
        name: torch.cat([of_rank[name].unflatten(0, (batches, -1)) for of_rank in ranks], dim=1).flatten(0, 1)
        for name in ranks[0]
    }


def val_rows(cfg: Config, evaluation: int = 0, size: int = 1, permute: bool = False) -> dict[str, torch.Tensor]:
    """The rows of one evaluation that count, from the feeds of all ranks, in the order of the samples."""
    sets = [opened(ValSet, cfg, rank, size) for rank in range(size)]
    ranks = [take(val.feed(evaluation, permute), val.batches) for val in sets]
    rows = {name: torch.cat([of_rank[name] for of_rank in ranks]) for name in ranks[0]}
    counted = rows["weight"] == 1
    assert (rows["weight"][~counted] == 0).all()
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
    assert BATCH <= len(reads) <= BATCH * (1 + cfg.data.prefetch)


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
    """Their weight is 0, but an FP8 scale of the batch would see them."""
    val_set = opened(ValSet, config_file.replace(cfg, eval__batch=8))
    for buffer in val_set.buffers:
        for tensor in buffer.tensors.values():
            tensor.fill_(7)
    feed = val_set.feed(0)
    for _ in range(val_set.batches):
        batch = feed.take()
        last = {name: tensor.clone() for name, tensor in batch.tensors.items()}
        feed.give_back(batch)
    feed.close()
    assert last["weight"].tolist() == [1] * 5 + [0] * 3  # 45 samples
    assert not any(tensor[5:].any() for tensor in last.values())


def test_each_evaluation_has_its_own_noise_and_repeats_it_at_any_number_of_ranks_and_any_caption_drop(cfg):
    one, other = val_rows(cfg, 36), val_rows(cfg, 72)
    require_equal(val_rows(config_file.replace(cfg, eval__batch=5, train__caption_drop=1.0), 36, size=3), one)
    for name in ("noise", "latent_eps"):
        assert len(torch.cat((one[name], other[name])).flatten(1).unique(dim=0)) == 90
    require_equal({**other, "noise": one["noise"], "latent_eps": one["latent_eps"]}, one)


def test_permuted_captions_are_a_permutation_and_the_rest_stays(cfg):
    plain, permuted = val_rows(cfg, 36), val_rows(cfg, 36, permute=True)
    texts = numbers(permuted, "t5").tolist()
    assert texts == numbers(permuted, "clip").tolist()
    assert sorted(texts) == list(range(45)) and sum(i == text for i, text in enumerate(texts)) < 10
    require_equal({**permuted, "t5": plain["t5"], "clip": plain["clip"]}, plain)


def test_a_wrong_number_of_samples_is_refused_before_any_is_read(cfg):
    text = refusal(TrainSet, config_file.replace(cfg, data__train_count=51), 0, 1, False)
    assert "holds 50 samples, data.train_count=51 asks for 51; set it to 0 for any number" in text
    text = refusal(ValSet, config_file.replace(cfg, data__val_count=44), 0, 1, False)
    assert "holds 45 samples, data.val_count=44 asks for 44" in text
    text = refusal(
        TrainSet, config_file.replace(cfg, data__kind="shapes", data__train_count=51, data__val_count=45), 0, 1, False
    )
    assert f"asks for 51; set it to 50, or remove {Path(cfg.data.train).parent} and it is made again" in text


# Reading ahead


class Source:
    """A plan and a fill for a feed that note what they are asked for. broken: the item that cannot be read."""

    def __init__(self, broken: int = -1, seconds: float = 0.0):
        self.broken = broken
        self.seconds = seconds  # that each row takes
        self.filled = []

    def plan(self):
        for step in itertools.count():
            yield range(step * BATCH, (step + 1) * BATCH)

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


def feed_of(source: Source, micro: Config, prefetch: int = 2) -> Feed:
    buffers = [HostBatch(micro.model, BATCH, False) for _ in range(prefetch)]
    feed = Feed(source.plan(), source.fill, buffers, workers=3)
    feed.start()
    return feed


@pytest.mark.parametrize("prefetch", [1, 3])
def test_read_ahead_is_bounded_by_the_buffers_and_reuses_them(micro, prefetch):
    source = Source()
    feed = feed_of(source, micro, prefetch)
    assert source.settled() == prefetch * BATCH
    held = feed.take()
    assert source.settled() == prefetch * BATCH, "a buffer was refilled while in use"
    assert held.tensors["t"].tolist() == list(range(BATCH))
    feed.give_back(held)
    assert source.settled() == (prefetch + 1) * BATCH
    used = {id(held)}
    for step in range(1, 3 * prefetch):
        buffer = feed.take()
        assert buffer.tensors["t"].tolist() == list(range(step * BATCH, (step + 1) * BATCH))
        used.add(id(buffer))
        feed.give_back(buffer)
    feed.close()
    assert len(used) == prefetch


def test_a_feed_that_is_closed_or_broken_leaves_no_thread(micro):
    before = set(threading.enumerate())
    for held in (0, 1, 2):
        feed = feed_of(Source(seconds=0.01), micro)
        for _ in range(held):
            feed.take()
        begin = time.perf_counter()
        feed.close()
        assert time.perf_counter() - begin < 1.0
        assert set(threading.enumerate()) <= before
    feed = feed_of(Source(broken=BATCH + 5), micro)
    assert feed.take().tensors["t"].tolist() == list(range(BATCH))
    with pytest.raises(KeyError, match="broken"):
        feed.take()
    feed.close()
    assert set(threading.enumerate()) <= before


def test_a_buffer_is_filled_only_once_its_copy_has_ended(micro):
    source = Source()
    feed = feed_of(source, micro, prefetch=1)
    held = feed.take()
    ended = threading.Event()
    held.copied = SimpleNamespace(synchronize=ended.wait)
    feed.give_back(held)
    assert source.settled() == BATCH
    ended.set()
    assert feed.take().tensors["t"][0] == BATCH
    feed.close()


def test_an_error_ends_a_feed_whose_threads_wait_for_the_device(micro):
    """A lost rank may keep the device in a collective for ever."""
    source = Source()
    ended = threading.Event()
    with pytest.raises(KeyError, match="lost"), feed_of(source, micro, prefetch=1) as feed:
        held = feed.take()
        held.copied = SimpleNamespace(synchronize=ended.wait)
        feed.give_back(held)
        raise KeyError("lost")
    ended.set()


def test_waiting_is_timed_and_counts_only_once_the_device_is_idle(micro):
    """A host that runs ahead of a busy device does not wait for data."""
    released, asked = threading.Event(), []

    def idle() -> bool:
        asked.append(True)
        if len(asked) == 3:
            released.set()  # the data come while the device is still busy
        return False

    def fill(rows, i, item) -> None:
        released.wait(timeout=10)

    feed = Feed(iter([[0]]), fill, [HostBatch(micro.model, 1, pin=False)], workers=1)
    feed.start()
    feed.take(idle)
    feed.close()
    assert len(asked) >= 3 and feed.wait_s < 0.01
    feed = feed_of(Source(seconds=0.02), micro)
    feed.take()
    feed.close()
    assert 0.04 < feed.wait_s < 1.0  # four rows for each of three workers


# Shards on disk


def blob(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_written_shards_are_what_tarfile_webdataset_and_shard_set_read(micro, tmp_path):
    import webdataset

    layout = shards.layout(micro.model)
    samples = numbered(layout, 7, [None, *range(6)])
    shard_writer.write(tmp_path / "set", samples, "some", per_shard=3)
    paths = sorted((tmp_path / "set").iterdir())
    entries = {}
    for path in paths:
        with tarfile.open(path) as archive:
            entries |= {entry.name: archive.extractfile(entry).read() for entry in archive}
    by_webdataset = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False))
    stored = ShardSet(tmp_path / "set", layout)
    stored.open()
    assert (len(paths), len(entries), len(by_webdataset), len(stored)) == (3, 5 * 7, 7, 7)
    for i in (6, 0, 3, 2, 5, 1, 4):
        key, sample = f"some_{i:08d}", samples[i]
        description = {"key": key, "timestep": sample.timestep, "caption": sample.caption}
        if sample.timestep is None:
            del description["timestep"]  # NVIDIA's reader takes no null
        assert json.loads(entries[f"{key}.json"]) == json.loads(by_webdataset[i]["json"]) == description
        rows = {name: np.zeros(shape, np.uint16) for name, shape in layout.shapes.items()}
        meta = stored.read(i, rows)
        assert (meta.key, meta.timestep, meta.caption) == (key, sample.timestep, sample.caption)
        for name in MEMBERS:
            content = blob(sample.members[name])
            assert entries[f"{key}.{name}.bytes"] == by_webdataset[i][f"{name}.bytes"] == content
            assert np.array_equal(rows[name], sample.members[name])


# bf16 bits


def test_to_bf16_bits_rounds_as_torch_does_and_from_bf16_bits_inverts_it():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits[:1000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate((bits, ties)).view(np.float32)
    values = values[np.isfinite(values)]
    want = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(shards.to_bf16_bits(values), want)
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    assert np.array_equal(shards.to_bf16_bits(shards.from_bf16_bits(bits)), bits)


def test_shards_that_tarfile_wrote_are_counted_by_their_size_alone(micro, tmp_path, monkeypatch):
    """Padding to 10,240 bytes may be longer than a small sample. Then the size leaves the count open."""
    layout, ambiguous = shards.layout(micro.model), 0
    assert layout.stride < shards.RECORD
    zeros = {f"{name}.bytes": blob(np.zeros(shape, np.uint16)) for name, shape in layout.shapes.items()}
    for count, record in itertools.product(range(1, 25), (shards.BLOCK, shards.RECORD)):
        path = tmp_path / f"{count}.{record}" / "shard_000000.tar"
        path.parent.mkdir()
        monkeypatch.setattr(tarfile, "RECORDSIZE", record)  # tar's --blocking-factor
        with tarfile.open(path, "w", tarfile.USTAR_FORMAT) as archive:
            for i in range(count):
                for kind, content in ({"json": shard_writer.description(f"{i:08d}", 3, "")} | zeros).items():
                    entry = tarfile.TarInfo(f"{i:08d}.{kind}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        try:
            stored = ShardSet(path.parent, layout)
        except Refusal as refused:
            assert record == shards.RECORD and f"{path} ({path.stat().st_size} bytes)" in str(refused)
            assert "blocking-factor=1" in str(refused)
            ambiguous += 1
            continue
        if len(stored) == count:
            stored.open()
        else:  # the padding has just the length of a sample
            assert record == shards.RECORD and f"sample {len(stored) - 1}: no tar header" in refusal(stored.open)
    assert 0 < ambiguous < 24
