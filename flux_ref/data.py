"""From shards to batches: which sample goes where, and reading ahead.

Position p of a run is sample order(epoch)[p % n] of epoch p // n, where n is the size of the data set. Step k covers
the positions k * global_batch to (k + 1) * global_batch - 1, and rank r takes the r-th slice of them. Nothing else
decides which rank sees which sample. A resumed run starts at position `samples` of its checkpoint.
Threads read samples and draw their random numbers into pinned host buffers, beside the training thread.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flux_ref import ranks, rng, schedule, shards
from flux_ref.config import Config, ModelConfig, empty_dir, rank_batch
from flux_ref.errors import Fault, Refusal

Batch = dict[str, Tensor]
Rows = dict[str, np.ndarray]
Item = tuple[int, int]
PADDING = -1  # timestep of a row without a sample


def fields(model: ModelConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape (without the batch axis) and dtype of everything in a batch."""
    stored = shards.layout(model).shapes
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
    """One reusable, pinned buffer. Its `rows` are the same memory for numpy: bf16 values as their bits in uint16."""

    def __init__(self, model: ModelConfig, rows: int, pin: bool):
        self.tensors = allocate(model, rows, pin=pin)
        self.rows: Rows = {
            name: (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in self.tensors.items()
        }
        self.work: list[Future] = []  # of the threads that fill it
        self.wait_for_copy: Callable[[], object] = lambda: None  # until asynchronous copies from the buffer have ended


def read_ahead(
    plan: Iterator[Sequence], fill: Callable[[Rows, int, Any], None], buffers: list[HostBatch], workers: int
) -> Generator[HostBatch, None, None]:
    """The batches of a plan in its order. Threads fill all buffers but the one that was given out last.

    plan: per batch, one item per row. fill: fill(rows, i, item) puts an item into row i.
    Closing the generator ends the reading and waits for nobody: after an error a thread may wait for a device that
    waits for a lost rank. Raises: the error of a reading thread.
    """

    def fill_row(batch: HostBatch, i: int, item: Any) -> None:
        batch.wait_for_copy()
        fill(batch.rows, i, item)

    pool = ThreadPoolExecutor(workers)
    free = deque(buffers)
    ahead: deque[HostBatch] = deque()
    try:
        while True:
            while free and (items := next(plan, None)) is not None:
                batch = free.popleft()
                wait([part for part in batch.work if not part.cancelled()])  # a feed that was closed may still fill it
                batch.work = [pool.submit(fill_row, batch, i, item) for i, item in enumerate(items)]
                ahead.append(batch)
            if not ahead:
                return
            batch = ahead.popleft()
            for part in batch.work:
                part.result()
            yield batch
            free.append(batch)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def copy_next(feed: Iterator[HostBatch], static: Batch) -> float:
    """Copy the next batch into static buffers. On an accelerator the copy is enqueued and the host goes on.

    Returns the seconds that the device waited for data: 0 if it still had work when the batch was there.
    """
    device = static["t"].device
    earlier = None if device.type == "cpu" else torch.Event(device.type)
    if earlier is not None:
        earlier.record()
    begin = time.perf_counter()
    host = next(feed)
    waited = time.perf_counter() - begin
    if earlier is not None and not earlier.query():
        waited = 0.0
    for name, tensor in static.items():
        tensor.copy_(host.tensors[name], non_blocking=True)
    host.wait_for_copy = ranks.end_of_copies(device)
    return waited


def rank_slice(cfg: Config, step: int, rank: int, size: int) -> range:
    """The positions of the run that a rank trains on in a step."""
    rows = rank_batch(cfg, size)
    first = step * cfg.train.global_batch + rank * rows
    return range(first, first + rows)


class SampleSet:
    """The samples of data.train or data.val that one rank reads. A row's item is (epoch or evaluation, sample)."""

    split: str

    def __init__(self, cfg: Config, rank: int, size: int, pin: bool):
        """Look at the sizes of the shards alone. Raises: Refusal."""
        split = self.split
        self.cfg = cfg
        self.rank = rank
        self.size = size
        folder = cfg.data.val if split == "val" else cfg.data.train or "."
        wanted = getattr(cfg.data, f"{split}_count")
        self.shards = shards.ShardSet(folder, shards.layout(cfg.model))
        if folder and wanted not in (0, len(self.shards)):
            raise Refusal(
                f"{folder} holds {len(self.shards)} samples, data.{split}_count={wanted} asks for {wanted}; set it to"
                f" {len(self.shards)} or to 0 for any number, or make the set again (remove a set of drawings)"
            )
        rows = rank_batch(cfg, size) if split == "train" else cfg.eval.batch
        # One is in use while data.prefetch are filled.
        self.buffers = [HostBatch(cfg.model, rows, pin) for _ in range(cfg.data.prefetch + 1)]

    def open(self) -> None:
        """Read the first bytes. Raises: Refusal."""
        self.shards.open(self.rank, self.size)

    def feed(self, start: int) -> Generator[HostBatch, None, None]:
        """The batches from `start` on: see the subclasses' plans."""
        return read_ahead(self._plan(start), self._fill, self.buffers, self.cfg.data.workers)

    def _plan(self, start: int) -> Iterator[list[Item]]:
        """The items of each of this rank's batches."""
        raise NotImplementedError

    def _fill(self, rows: Rows, i: int, item: Item) -> None:
        """Put an item into row i. Raises: Fault."""
        raise NotImplementedError

    def _read(self, sample: int, rows: Rows, i: int) -> shards.Meta:
        """Read a sample into row i. Raises: Fault."""
        try:
            return self.shards.read(sample, {name: rows[name][i] for name in shards.MEMBERS})
        except shards.BadSample as error:
            raise self._bad(str(error)) from None

    def _bad(self, reason: str) -> Fault:
        remedy = "remove the data set and give the command of tools.prepare again that made it"
        if self.cfg.data.kind == "shapes":
            remedy = f"remove {self.shards.paths[0].parent.parent} and start again"
        return Fault(f"bad {self.split} sample: {reason}; {remedy}, which writes as many samples anew", alone=True)


class TrainSet(SampleSet):
    """The training samples of one rank, in the order of the run. A feed starts at that many samples and has no end."""

    split = "train"

    def open(self) -> None:
        """Read the first bytes, those of the empty caption included. Raises: Refusal."""
        super().open()
        self.empty = shards.read_empty(empty_dir(self.cfg), self.shards.layout)
        train = self.cfg.train
        self.times = rng.TimeDistribution(
            train.timestep, train.timestep_mean, train.timestep_width, train.timestep_shift
        )

    def _plan(self, start: int) -> Iterator[list[Item]]:
        """(epoch, sample) of each row. The order of an epoch is drawn once."""
        count = len(self.shards)
        drawn = -1
        for step in itertools.count(start // self.cfg.train.global_batch):
            items = []
            for position in rank_slice(self.cfg, step, self.rank, self.size):
                epoch, i = divmod(position, count)
                if epoch != drawn:
                    order = rng.order(self.cfg.train.seed, epoch, count)
                    drawn = epoch
                items.append((epoch, int(order[i])))
            yield items

    def _fill(self, rows: Rows, i: int, item: Item) -> None:
        epoch, sample = item
        self._read(sample, rows, i)
        train = self.cfg.train
        draw = rng.train_draw(train.seed, epoch, sample, self.cfg.model.latent_shape, train.caption_drop, self.times)
        if draw.drop_caption:  # spec: T5 and CLIP together
            rows["t5"][i] = self.empty["t5"]
            rows["clip"][i] = self.empty["clip"]
        rows["t"][i] = draw.t
        rows["latent_eps"][i] = draw.latent_eps
        rows["noise"][i] = draw.noise


class ValSet(SampleSet):
    """The validation samples of one rank. spec: all ranks together see each sample once; padding rows do not count.

    A feed gives all batches of one evaluation. Its number names the noise, see rng.val_draw.
    """

    split = "val"

    def open(self) -> None:
        """Read the first bytes, and as many samples as it takes to see each timestep. Raises: Refusal, Fault."""
        super().open()
        if not len(self.shards) or self.rank > 0:
            return
        missing = set(range(schedule.TIMESTEPS))
        for sample in range(len(self.shards)):
            missing.discard(self._read(sample, self.buffers[0].rows, 0).timestep)
            if not missing:
                return
        raise Refusal(
            f"data.val={self.cfg.data.val} has no sample of timestep {min(missing)}; validation needs each of 0 to"
            f" {schedule.TIMESTEPS - 1}; prepare the set again, or give --data.val= for a run without validation"
        )

    @property
    def batches(self) -> int:
        """Batches of one evaluation, the same on every rank."""
        return schedule.steps_for(len(self.shards), self.size * self.cfg.eval.batch)

    def _plan(self, start: int) -> Iterator[list[Item]]:
        """(evaluation, sample) of each row. Padding has numbers beyond the last sample."""
        rows = self.cfg.eval.batch
        for k in range(self.batches):
            first = (k * self.size + self.rank) * rows
            yield [(start, sample) for sample in range(first, first + rows)]

    def _fill(self, rows: Rows, i: int, item: Item) -> None:
        evaluation, sample = item
        if sample >= len(self.shards):
            for values in rows.values():  # all fields: stale values would move the FP8 scale of the batch
                values[i] = 0
            rows["timestep"][i] = PADDING
            return
        meta = self._read(sample, rows, i)
        if meta.timestep is None or meta.timestep not in range(schedule.TIMESTEPS):
            raise self._bad(f"{meta.key} has timestep {meta.timestep}, want 0 to {schedule.TIMESTEPS - 1}")
        latent_eps, noise = rng.val_draw(self.cfg.train.seed, evaluation, sample, self.cfg.model.latent_shape)
        rows["timestep"][i] = meta.timestep
        rows["t"][i] = schedule.validation_time(meta.timestep)
        rows["latent_eps"][i] = latent_eps
        rows["noise"][i] = noise


def synthetic(model: ModelConfig, rows: int) -> Batch:
    """A batch of plausible random values on the host, for warm-up and benchmarks."""
    batch = allocate(model, rows)
    for number, tensor in enumerate(batch.values()):
        tensor.copy_(torch.from_numpy(rng.normals(0, rng.SYNTHETIC, tensor.shape, sample=number, epoch=0)))
    batch["t"].copy_(torch.linspace(0, 1, rows + 1)[:-1])
    batch["timestep"].copy_(torch.arange(rows) % schedule.TIMESTEPS)
    return batch
