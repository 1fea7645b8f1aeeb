"""From shards to batches: which sample goes where, and reading ahead.

Position p of a run is sample order(epoch)[p % n] of epoch p // n, where n is the size of the data set. Step k covers
the positions k * global_batch to (k + 1) * global_batch - 1, and rank r takes the r-th slice of them. Nothing else
decides which rank sees which sample. A resumed run starts at position `samples` of its checkpoint.
Threads read samples and draw their random numbers into pinned host buffers, beside the training thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flux_ref import ranks, rng, schedule
from flux_ref.config import Config, ModelConfig, empty_dir, rank_batch
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import shards

Batch = dict[str, Tensor]
Rows = dict[str, np.ndarray]


def fields(model: ModelConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape (without the batch axis) and dtype of everything in a batch."""
    latent = model.latent_shape
    return {
        "t5": ((model.text_tokens, model.t5_dim), torch.bfloat16),
        "clip": ((model.clip_dim,), torch.bfloat16),
        "mean": (latent, torch.bfloat16),
        "logvar": (latent, torch.bfloat16),
        "latent_eps": (latent, torch.float32),
        "noise": (latent, torch.float32),
        "t": ((), torch.float32),  # time of the flow, in [0, 1)
        "weight": ((), torch.float32),  # 1, or 0 for padding and skipped samples
        "timestep": ((), torch.int64),  # validation: t = timestep / TIMESTEPS
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
        self.copied = None  # the end of an asynchronous copy from the buffer, which `synchronize` waits for


class Feed:
    """Fills host batches in the order of a plan, ahead of their use, and gives them out one by one.

    plan: per batch, one item per row.
    fill: fill(rows, i, item) puts an item into row i.
    """

    def __init__(
        self,
        plan: Iterator[Sequence],
        fill: Callable[[Rows, int, object], None],
        buffers: list[HostBatch],
        workers: int,
    ):
        self.plan = plan
        self.fill = fill
        self.buffers = buffers
        self.wait_s = 0.0  # seconds that `take` has waited for data while the device was idle
        self._pool = ThreadPoolExecutor(workers)
        self._begun: deque[tuple[HostBatch, list[Future]]] = deque()  # batches in their order, and the work on each

    def start(self) -> None:
        """Begin to fill all buffers."""
        for buffer in self.buffers:
            self.give_back(buffer)

    def copy_into(self, static: Batch) -> None:
        """Copy the next batch into static buffers. On an accelerator the copy is enqueued and the host goes on."""
        device = static["t"].device
        if device.type == "cpu":
            host = self.take()
        else:
            work = torch.Event(device.type)
            work.record()  # while the device still computes earlier steps, waiting for data costs nothing
            host = self.take(idle=work.query)
        for name, tensor in static.items():
            tensor.copy_(host.tensors[name], non_blocking=True)
        host.copied = ranks.record_copy_event(device)
        self.give_back(host)

    def take(self, idle: Callable[[], bool] = lambda: True) -> HostBatch:
        """The next batch. Give it back once its content is copied or the copy is enqueued.

        idle:   whether the device has no work left. `wait_s` grows only while this is so.
        Raises: the error of a reading thread.
        """
        batch, work = self._begun.popleft()
        while not idle() and wait(work, timeout=2e-4).not_done:
            pass
        begin = time.perf_counter()
        for part in work:
            part.result()
        self.wait_s += time.perf_counter() - begin
        return batch

    def give_back(self, buffer: HostBatch) -> None:
        """Begin to fill a buffer with the next batch of the plan, if there is one."""
        items = next(self.plan, None)
        if items is None:
            return
        work = [self._pool.submit(self._fill_row, buffer, i, item) for i, item in enumerate(items)]
        self._begun.append((buffer, work))

    def close(self) -> None:
        """Stop reading. Returns when no thread touches the buffers any more."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        """Stop reading. After an error a thread may wait for a device that waits for a lost rank: nobody waits then."""
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def _fill_row(self, buffer: HostBatch, i: int, item: object) -> None:
        if buffer.copied is not None:
            buffer.copied.synchronize()
        self.fill(buffer.rows, i, item)


def rank_slice(cfg: Config, step: int, rank: int, size: int) -> range:
    """The positions of the run that a rank trains on in a step."""
    rows = rank_batch(cfg, size)
    first = step * cfg.train.global_batch + rank * rows
    return range(first, first + rows)


class SampleSet:
    """The samples of data.train or data.val that one rank reads. A row's item is (epoch or evaluation, sample)."""

    def __init__(self, cfg: Config, split: str, rows: int, rank: int, size: int, pin: bool):
        """rows: of a batch. Raises: Refusal."""
        self.cfg = cfg
        self.rank = rank
        self.size = size
        self.shards = open_set(cfg, split)
        self.buffers = [HostBatch(cfg.model, rows, pin) for _ in range(cfg.data.prefetch)]

    def open(self) -> None:
        """Read the first bytes. Raises: Refusal."""
        self.shards.open(self.rank, self.size)

    def _start(self, plan: Iterator[Sequence], fill: Callable[[Rows, int, object], None]) -> Feed:
        feed = Feed(plan, fill, self.buffers, self.cfg.data.workers)
        feed.start()
        return feed


class TrainSet(SampleSet):
    """The training samples of one rank, in the order of the run."""

    def __init__(self, cfg: Config, rank: int, size: int, pin: bool):
        super().__init__(cfg, "train", rank_batch(cfg, size), rank, size, pin)
        self.skipped: dict[int, str] = {}  # damaged samples that this rank left out, with the reason
        self.may_skip = cfg.data.skip_bad > 0  # the same on every rank
        self._lock = threading.Lock()

    def open(self) -> None:
        """Read the first bytes, those of the empty caption included. Raises: Refusal."""
        super().open()
        self.empty = shards.read_empty(empty_dir(self.cfg), self.shards.layout)

    def restore_skipped(self, skipped: dict[str, str]) -> None:
        """Remember the damaged samples that an interrupted run left out. Rank 0 remembers them for all ranks."""
        self.may_skip |= bool(skipped)
        if self.rank == 0:
            self.skipped = {int(sample): reason for sample, reason in skipped.items()}

    def skipped_everywhere(self) -> dict[int, str]:
        """The damaged samples that any rank has left out so far, with the reasons. Collective."""
        every_rank = ranks.gather_objects(self.skipped) if self.may_skip else []  # the host waits only if it must
        return {int(sample): reason for skipped in every_rank for sample, reason in skipped.items()}

    def feed(self, samples: int) -> Feed:
        """Batches from position `samples` of the run on, without end."""
        return self._start(self._plan(samples // self.cfg.train.global_batch), self._fill)

    def _plan(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """(epoch, sample) of each row of this rank's batches. The order of an epoch is drawn once."""
        orders: dict[int, np.ndarray] = {}
        while True:
            items = []
            for position in rank_slice(self.cfg, step, self.rank, self.size):
                epoch, i = divmod(position, len(self.shards))
                if epoch not in orders:
                    orders = {epoch: rng.order(self.cfg.train.seed, epoch, len(self.shards))}
                items.append((epoch, int(orders[epoch][i])))
            yield items
            step += 1

    def draw(self, epoch: int, sample: int) -> rng.Draw:
        """The random numbers of a sample in an epoch."""
        train = self.cfg.train
        times = rng.TimeDistribution(train.timestep, train.timestep_mean, train.timestep_width, train.timestep_shift)
        return rng.train_draw(train.seed, epoch, sample, self.cfg.model.latent_shape, train.caption_drop, times)

    def _fill(self, rows: Rows, i: int, item: tuple[int, int]) -> None:
        epoch, sample = item
        rows["weight"][i] = 1.0
        try:
            self.shards.read(sample, {name: rows[name][i] for name in shards.MEMBERS})
        except shards.BadSample as error:
            self._skip(rows, i, sample, error)
        draw = self.draw(epoch, sample)
        if draw.drop_caption:  # spec: T5 and CLIP together
            rows["t5"][i] = self.empty["t5"]
            rows["clip"][i] = self.empty["clip"]
        rows["t"][i] = draw.t
        rows["latent_eps"][i] = draw.latent_eps
        rows["noise"][i] = draw.noise

    def _skip(self, rows: Rows, i: int, sample: int, error: shards.BadSample) -> None:
        """Give a damaged sample weight 0 if the config allows one more."""
        most = self.cfg.data.skip_bad
        with self._lock:
            if sample not in self.skipped and len(self.skipped) == most:
                raise Fault(f"bad training sample: {error}; data.skip_bad={most} allows no more", alone=True)
            self.skipped[sample] = str(error)
        for name in (*shards.MEMBERS, "weight"):
            rows[name][i] = 0


class ValSet(SampleSet):
    """The validation samples of one rank. spec: all ranks together see each sample once; padding rows have weight 0."""

    def __init__(self, cfg: Config, rank: int, size: int, pin: bool):
        super().__init__(cfg, "val", cfg.eval.batch, rank, size, pin)

    @property
    def batches(self) -> int:
        """Batches of one evaluation, the same on every rank."""
        return schedule.steps_for(len(self.shards), self.size * self.cfg.eval.batch)

    def feed(self, evaluation: int, permute_captions: bool = False) -> Feed:
        """All batches of one evaluation. evaluation: the number that names the noise, see rng.val_draw."""
        count = len(self.shards)
        texts = rng.order(self.cfg.train.seed, 0, count) if permute_captions else range(count)
        return self._start(self._plan(evaluation), partial(self._fill, texts))

    def _plan(self, evaluation: int) -> Iterator[list[tuple[int, int]]]:
        """(evaluation, sample) of each row of this rank's batches. Padding has numbers beyond the last sample."""
        rows = self.cfg.eval.batch
        for k in range(self.batches):
            first = (k * self.size + self.rank) * rows
            yield [(evaluation, sample) for sample in range(first, first + rows)]

    def _fill(self, texts: Sequence[int], rows: Rows, i: int, item: tuple[int, int]) -> None:
        evaluation, sample = item
        if sample >= len(self.shards):
            for values in rows.values():  # all fields: stale values would move the FP8 scale of the batch
                values[i] = 0
            return
        text = int(texts[sample])
        members = {name: rows[name][i] for name in shards.MEMBERS}
        try:
            if text != sample:
                self.shards.read(text, members)
                members |= {name: np.empty_like(members[name]) for name in ("t5", "clip")}
            meta = self.shards.read(sample, members)
        except shards.BadSample as error:
            raise Fault(f"bad validation sample: {error}", alone=True) from None
        if meta.timestep not in range(schedule.TIMESTEPS):
            raise Fault(
                f"validation sample {meta.key} in {self.cfg.data.val} has timestep {meta.timestep};"
                f" want 0 to {schedule.TIMESTEPS - 1}",
                alone=True,
            )
        latent_eps, noise = rng.val_draw(self.cfg.train.seed, evaluation, sample, self.cfg.model.latent_shape)
        rows["weight"][i] = 1.0
        rows["timestep"][i] = meta.timestep
        rows["t"][i] = schedule.validation_time(meta.timestep)
        rows["latent_eps"][i] = latent_eps
        rows["noise"][i] = noise


def open_set(cfg: Config, split: str) -> shards.ShardSet:
    """The shards of data.train or data.val, checked by their sizes alone. Raises: Refusal."""
    folder = getattr(cfg.data, split)
    wanted = getattr(cfg.data, f"{split}_count")
    found = shards.ShardSet(folder, shards.layout(cfg.model), split)
    if folder and wanted not in (0, len(found)):
        remedy = "0 for any number"
        if cfg.data.kind == "shapes":
            remedy = f"{len(found)}, or remove {Path(folder).parent} and it is made again"
        raise Refusal(
            f"{folder} holds {len(found)} samples, data.{split}_count={wanted} asks for {wanted}; set it to {remedy}"
        )
    return found


def synthetic(model: ModelConfig, rows: int) -> Batch:
    """A batch of plausible random values on the host, for warm-up and benchmarks."""
    batch = allocate(model, rows)
    for number, tensor in enumerate(batch.values()):
        tensor.copy_(torch.from_numpy(rng.normals(0, rng.SYNTHETIC, tensor.shape, sample=number, epoch=0)))
    batch["t"].copy_(torch.linspace(0, 1, rows + 1)[:-1])
    batch["weight"].fill_(1)
    batch["timestep"].copy_(torch.arange(rows) % schedule.TIMESTEPS)
    return batch
