"""From shards to batches: which sample goes where, and reading ahead.

Position p of a run is sample order(epoch)[p % n] of epoch p // n, where n is the size of the data set. Step k covers
the positions k * global_batch to (k + 1) * global_batch - 1, and rank r takes the r-th slice of them. Nothing else
decides which rank sees which sample. A resumed run starts at position `samples` of its checkpoint.
Threads read samples and draw their random numbers into pinned host buffers, beside the training thread; with
data.prefetch=0 the training thread does it.
"""

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flux_ref import dataset, ranks, rng, schedule
from flux_ref.cli import Refusal
from flux_ref.config import Config, ModelConfig, Shape, empty_dir, rank_batch
from flux_ref.dataset import Arrays

Batch = dict[str, Tensor]
Item = tuple[int, int]
PADDING = -1  # timestep of a row without a sample


def fields(model: ModelConfig) -> dict[str, tuple[Shape, torch.dtype]]:
    """Shape (without the batch axis) and dtype of everything in a batch."""
    stored = dataset.sample_layout(model).shapes
    return {name: (shape, torch.bfloat16) for name, shape in stored.items()} | {
        "latent_eps": (model.latent_shape, torch.float32),
        "noise": (model.latent_shape, torch.float32),
        "t": ((), torch.float32),  # time of the flow, in [0, 1)
        "timestep": ((), torch.int64),  # validation: t = timestep / TIMESTEPS, or PADDING
    }


def allocate(model: ModelConfig, rows: int, device: torch.device | str = "cpu", pin: bool = False) -> Batch:
    """Zeroed buffers for a batch of `rows` samples."""
    return {
        name: torch.zeros((rows, *shape), dtype=dtype, device=device, pin_memory=pin)
        for name, (shape, dtype) in fields(model).items()
    }


class HostBatch:
    """One reusable, pinned buffer. views[i]: row i, each field as a numpy array; of bf16 values the bits, in uint16."""

    def __init__(self, model: ModelConfig, rows: int, pin: bool):
        self.tensors = allocate(model, rows, pin=pin)
        self.views = [{name: _view(tensor[i]) for name, tensor in self.tensors.items()} for i in range(rows)]
        self.wait_for_copy: Callable[[], object] = lambda: None  # until asynchronous copies from the buffer have ended


Feed = Generator[HostBatch, None, None]


def _view(tensor: Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def read_ahead(
    plan: Iterator[Sequence], fill: Callable[[Arrays, Any], None], buffers: list[HostBatch], workers: int
) -> Feed:
    """The batches of a plan in its order. Threads fill all buffers but the one that was given out last.

    A single buffer is filled by the caller's thread. Small samples take longer to hand over than to read.
    plan: per batch, one item per row. fill: fill(row, item) puts an item into a row.
    Closing the generator ends the reading and waits for nobody: after an error a thread may wait for a device that
    waits for a lost rank. So threads may still fill the buffers: after an early close, make a new set.
    Raises: the error of a reading thread.
    """

    def fill_row(batch: HostBatch, row: Arrays, item: Any) -> None:
        batch.wait_for_copy()
        fill(row, item)

    if len(buffers) == 1:
        for planned in plan:
            for row, item in zip(buffers[0].views, planned):
                fill_row(buffers[0], row, item)
            yield buffers[0]
        return
    pool = ThreadPoolExecutor(workers)
    free = deque(buffers)
    ahead: deque[tuple[HostBatch, list[Future]]] = deque()
    try:
        while True:
            while free and (items := next(plan, None)) is not None:
                batch = free.popleft()
                work = [pool.submit(fill_row, batch, row, item) for row, item in zip(batch.views, items)]
                ahead.append((batch, work))
            if not ahead:
                return
            batch, work = ahead.popleft()
            for part in work:
                part.result()
            yield batch
            free.append(batch)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def copy_next(feed: Feed, batch: Batch) -> float:
    """Copy the next batch into `batch`. On an accelerator the copy is enqueued and the host goes on.

    Returns the seconds that the device waited for data: 0 if it still had work when the data were there.
    """
    device = batch["t"].device
    pending_work = None if device.type == "cpu" else torch.Event(device.type)
    if pending_work:
        pending_work.record()
    begin = time.perf_counter()
    host = next(feed)
    waited = time.perf_counter() - begin
    if pending_work and not pending_work.query():
        waited = 0.0
    for name, tensor in batch.items():
        tensor.copy_(host.tensors[name], non_blocking=True)
    host.wait_for_copy = ranks.make_copy_waiter(device)
    return waited


def rank_slice(cfg: Config, step: int, rank: int, size: int) -> range:
    """The positions of the run that a rank trains on in a step."""
    rows = rank_batch(cfg, size)
    first = step * cfg.train.global_batch + rank * rows
    return range(first, first + rows)


class SampleSet:
    """The samples of data.train or data.val that one rank reads. A batch is planned as (epoch, sample) of each row."""

    split: str

    def __init__(self, cfg: Config, rank: int, size: int, pin: bool):
        """Look at the sizes of the shards alone. Raises: Refusal."""
        self.cfg = cfg
        self.rank = rank
        self.size = size
        folder = cfg.data.val if self.split == "val" else cfg.data.train or "."
        paths = dataset.paths_of(Path(folder)) if folder else []
        self.shards = dataset.ShardSet(paths, dataset.sample_layout(cfg.model))
        self.count = len(self.shards)  # samples
        expected = {"train": cfg.data.expected_train_samples, "val": cfg.data.expected_val_samples}
        wanted = expected[self.split]
        if folder and wanted not in (0, self.count):
            raise Refusal(
                f"{folder} holds {self.count} samples, data.expected_{self.split}_samples={wanted} asks for {wanted};"
                f" set it to {self.count} or to 0 for any number, or give another --data.{self.split}=DIR/{self.split}"
            )
        rows = rank_batch(cfg, size) if self.split == "train" else cfg.eval.batch
        # One is in use while data.prefetch are filled.
        self.buffers = [HostBatch(cfg.model, rows, pin) for _ in range(cfg.data.prefetch + 1)]

    def open(self) -> None:
        """Open the shards. Raises: Refusal, OSError."""
        self.shards.open()


class TrainSet(SampleSet):
    """The training samples of one rank, in the order of the run."""

    split = "train"

    def open(self) -> None:
        """Read the empty caption, too. Raises: Refusal, OSError."""
        super().open()
        self.empty = dataset.read_empty(empty_dir(self.cfg), self.shards.layout)

    def feed(self, samples: int) -> Feed:
        """The batches after the run's first `samples`, a multiple of the global batch; they have no end."""
        return read_ahead(self._plan(samples), self._fill, self.buffers, self.cfg.data.workers)

    def _plan(self, samples: int) -> Iterator[list[Item]]:
        seed = self.cfg.train.seed
        order = functools.lru_cache(1)(rng.order)  # drawn once per epoch
        for step in itertools.count(samples // self.cfg.train.global_batch):
            places = [divmod(position, self.count) for position in rank_slice(self.cfg, step, self.rank, self.size)]
            yield [(epoch, int(order(seed, epoch, self.count)[i])) for epoch, i in places]

    def _fill(self, row: Arrays, item: Item) -> None:
        epoch, sample = item
        self.shards.read(sample, row)
        draw = rng.train_draw(self.cfg.train, epoch, sample, self.cfg.model.latent_shape)
        if draw.drop_caption:  # spec: T5 and CLIP together
            for name, encoding in self.empty.items():
                row[name][...] = encoding
        row["t"][...] = draw.t
        row["latent_eps"][...] = draw.latent_eps
        row["noise"][...] = draw.noise


class ValSet(SampleSet):
    """The validation samples of one rank. spec: all ranks together see each sample once; padding rows do not count."""

    split = "val"

    def open(self) -> None:
        """On rank 0 read samples until each timestep was seen. Raises: Refusal, Fault, OSError."""
        super().open()
        if self.rank or not self.count:
            return
        missing = set(range(schedule.TIMESTEPS))
        for sample in map(int, rng.order(0, 0, self.count)):  # a set may be sorted by its timesteps
            missing -= {self.shards.read(sample, self.buffers[0].views[0]).timestep}
            if not missing:
                return
        raise Refusal(
            f"data.val={self.cfg.data.val} has no sample of the timesteps {missing}; validation needs each of 0 to"
            f" {schedule.TIMESTEPS - 1}; give another set, or --data.val= for a run without validation"
        )

    @property
    def batches(self) -> int:
        """Batches of one evaluation, the same on every rank."""
        return schedule.steps_for(self.count, self.size * self.cfg.eval.batch)

    def feed(self, noise_epoch: int) -> Feed:
        """The batches of one evaluation. noise_epoch: see rng.val_draw."""
        return read_ahead(self._plan(noise_epoch), self._fill, self.buffers, self.cfg.data.workers)

    def _plan(self, noise_epoch: int) -> Iterator[list[Item]]:
        """Padding has numbers beyond the last sample."""
        rows = self.cfg.eval.batch
        for k in range(self.batches):
            first = (k * self.size + self.rank) * rows
            yield [(noise_epoch, sample) for sample in range(first, first + rows)]

    def _fill(self, row: Arrays, item: Item) -> None:
        noise_epoch, sample = item
        if sample >= self.count:
            for values in row.values():  # all fields: stale values would move the FP8 scale of the batch
                values[...] = 0
            row["timestep"][...] = PADDING
            return
        meta = self.shards.read(sample, row)
        if meta.timestep is None or meta.timestep not in range(schedule.TIMESTEPS):
            want = f"want 0 to {schedule.TIMESTEPS - 1}"
            raise dataset.BadSample(f"{self.cfg.data.val}: {meta.key} has timestep {meta.timestep}, {want}")
        latent_eps, noise = rng.val_draw(self.cfg.train.seed, noise_epoch, sample, self.cfg.model.latent_shape)
        row["timestep"][...] = meta.timestep
        row["t"][...] = meta.timestep / schedule.TIMESTEPS  # spec: k / 8, not (k + 0.5) / 8
        row["latent_eps"][...] = latent_eps
        row["noise"][...] = noise


def synthetic(model: ModelConfig, rows: int) -> Batch:
    """A batch of plausible random values on the host, for warm-up and benchmarks."""
    batch = allocate(model, rows)
    for number, tensor in enumerate(batch.values()):
        tensor.copy_(torch.from_numpy(rng.normals(0, rng.SYNTHETIC, tensor.shape, sample=number)))
    batch["t"].copy_(torch.linspace(0, 1, rows + 1)[:-1])
    batch["timestep"].copy_(torch.arange(rows) % schedule.TIMESTEPS)
    return batch
