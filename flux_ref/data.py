"""From shards to batches: which sample goes where, and reading ahead.

Position p of a run is sample order(epoch)[p % n] of epoch p // n, where n is the size of the data set. Step k covers
the positions k * global_batch to (k + 1) * global_batch - 1, and rank r takes the r-th slice of them. Nothing else
decides which rank sees which sample. A resumed run starts at position `samples` of its checkpoint.
Threads read samples and draw their random numbers into pinned host buffers, beside the training thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
        "timestep": ((), torch.int64),  # validation: t = timestep / 8
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
        self.in_use = None  # of an asynchronous copy; its `synchronize` returns once the buffer may be overwritten


@dataclass
class Feed:
    """Fills host batches in the order of a plan, ahead of their use, and gives them out one by one.

    plan:   per batch, one item per row.
    expect: expect(items) is called before a batch is read, to start reading ahead.
    fill:   fill(rows, i, item) puts an item into row i.
    """

    plan: Iterator[Sequence]
    expect: Callable[[Sequence], None]
    fill: Callable[[Rows, int, object], None]
    buffers: list[HostBatch]
    workers: int
    wait_s: float = 0.0  # seconds that `take` has waited for data while the device was idle
    _free: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _ready: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _stopped: bool = False

    def __post_init__(self):
        for buffer in self.buffers:
            self._free.put(buffer)
        self._thread = threading.Thread(target=self._produce, daemon=True)
        self._thread.start()

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
        host.in_use = ranks.record_copy_event(device)
        self.give_back(host)

    def take(self, idle: Callable[[], bool] = lambda: True) -> HostBatch:
        """The next batch. Give it back once its content is copied or the copy is enqueued.

        idle:   whether the device has no work left. Waiting counts only then.
        Raises: the error of a reading thread.
        """
        while self._ready.empty() and not idle():
            time.sleep(2e-4)
        begin = time.perf_counter()
        item = self._ready.get()
        self.wait_s += time.perf_counter() - begin
        if isinstance(item, BaseException):
            self._ready.put(item)  # for the next call
            raise item
        return item

    def give_back(self, buffer: HostBatch) -> None:
        self._free.put(buffer)

    def close(self) -> None:
        """Stop reading. Returns when no thread touches the buffers any more."""
        self._stopped = True
        self._free.put(None)
        self._thread.join()

    def _produce(self) -> None:
        try:
            with ThreadPoolExecutor(self.workers) as pool:
                for items in self.plan:
                    self.expect(items)
                    buffer = self._free.get()
                    if self._stopped:
                        return
                    if buffer.in_use is not None:
                        buffer.in_use.synchronize()
                    workers = min(self.workers, len(items))
                    shares = [range(w, len(items), workers) for w in range(workers)]
                    list(pool.map(partial(self._fill_share, buffer, items), shares))
                    self._ready.put(buffer)
        except BaseException as error:  # the training thread raises it
            self._ready.put(error)

    def _fill_share(self, buffer: HostBatch, items: Sequence, share: range) -> None:
        for i in share:
            if self._stopped:
                return
            self.fill(buffer.rows, i, items[i])


def rank_slice(step: int, rank: int, size: int, global_batch: int) -> range:
    """The positions of the run that a rank trains on in a step."""
    rows = global_batch // size
    start = step * global_batch + rank * rows
    return range(start, start + rows)


class TrainSet:
    """The training samples of one rank, in the order of the run."""

    def __init__(self, cfg: Config, rank: int, size: int, pin: bool):
        self.cfg = cfg
        self.rank = rank
        self.size = size
        self.shards = open_set(cfg, "train")
        self.buffers = [HostBatch(cfg.model, rank_batch(cfg, size), pin) for _ in range(cfg.data.prefetch)]
        self.skipped: dict[int, str] = {}  # damaged samples that this rank left out, with the reason
        self.may_skip = cfg.data.skip_bad > 0  # the same on every rank
        self._lock = threading.Lock()

    def open(self) -> None:
        """Read the first bytes, those of the empty caption included. Raises: Refusal."""
        self.shards.open(self.rank, self.size)
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
        plan = self._plan(samples // self.cfg.train.global_batch)
        return Feed(plan, self._expect, self._fill, self.buffers, self.cfg.data.workers)

    def _expect(self, items: list[tuple[int, int]]) -> None:
        self.shards.expect(sample for _, sample in items)

    def _plan(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """(epoch, sample) of each row of this rank's batches. The order of an epoch is drawn once."""
        orders: dict[int, np.ndarray] = {}
        while True:
            items = []
            for position in rank_slice(step, self.rank, self.size, self.cfg.train.global_batch):
                epoch, i = divmod(position, len(self.shards))
                if epoch not in orders:
                    orders = {epoch: rng.order(self.cfg.train.seed, epoch, len(self.shards))}
                items.append((epoch, int(orders[epoch][i])))
            yield items
            step += 1

    def _fill(self, rows: Rows, i: int, item: tuple[int, int]) -> None:
        epoch, sample = item
        cfg = self.cfg
        rows["weight"][i] = 1.0
        try:
            self.shards.read(sample, {name: rows[name][i] for name in shards.MEMBERS})
        except shards.BadSample as error:
            self._skip(rows, i, sample, error)
        draw = rng.train_draw(cfg.train.seed, epoch, sample, cfg.model.latent_shape, cfg.train.caption_drop)
        if draw.drop_caption:  # spec: T5 and CLIP together
            rows["t5"][i], rows["clip"][i] = self.empty["t5"], self.empty["clip"]
        rows["t"][i], rows["latent_eps"][i], rows["noise"][i] = draw.t, draw.latent_eps, draw.noise

    def _skip(self, rows: Rows, i: int, sample: int, error: shards.BadSample) -> None:
        """Give a damaged sample weight 0 if the config allows one more."""
        with self._lock:
            if sample not in self.skipped and len(self.skipped) == self.cfg.data.skip_bad:
                raise Fault(
                    f"bad training sample: {error}; data.skip_bad={self.cfg.data.skip_bad} allows no more", alone=True
                )
            self.skipped[sample] = str(error)
        for name in shards.MEMBERS:
            rows[name][i] = 0
        rows["weight"][i] = 0.0


class ValSet:
    """The validation samples of one rank. spec: all ranks together see each sample once; padding rows have weight 0."""

    def __init__(self, cfg: Config, rank: int, size: int, pin: bool):
        self.cfg = cfg
        self.rank = rank
        self.size = size
        self.shards = open_set(cfg, "val")
        self.buffers = [HostBatch(cfg.model, cfg.eval.batch, pin) for _ in range(cfg.data.prefetch)]

    def open(self) -> None:
        """Read the first bytes. Raises: Refusal."""
        self.shards.open(self.rank, self.size)

    @property
    def batches(self) -> int:
        """Batches of one evaluation, the same on every rank."""
        return schedule.steps_for(len(self.shards), self.size * self.cfg.eval.batch)

    def feed(self, evaluation: int, permute_captions: bool = False) -> Feed:
        """All batches of one evaluation. evaluation: the number that names the noise, see rng.val_draw."""
        count = len(self.shards)
        texts = rng.order(self.cfg.train.seed, 0, count) if permute_captions else range(count)
        fill = partial(self._fill, texts, evaluation)
        return Feed(self._plan(), self._expect, fill, self.buffers, self.cfg.data.workers)

    def _expect(self, samples: range) -> None:
        self.shards.expect(sample for sample in samples if sample < len(self.shards))

    def _plan(self) -> Iterator[range]:
        for k in range(self.batches):
            start = (k * self.size + self.rank) * self.cfg.eval.batch
            yield range(start, start + self.cfg.eval.batch)

    def _fill(self, texts: Sequence[int], evaluation: int, rows: Rows, i: int, sample: int) -> None:
        if sample >= len(self.shards):
            for values in rows.values():  # all fields: stale values would move the FP8 scale of the batch
                values[i] = 0
            return
        rows["weight"][i] = 1.0
        text = int(texts[sample])
        members = {name: rows[name][i] for name in shards.MEMBERS}
        try:
            if text != sample:
                self.shards.read(text, members)
                members |= {name: np.empty_like(members[name]) for name in ("t5", "clip")}
            meta = self.shards.read(sample, members)
        except shards.BadSample as error:
            raise Fault(f"bad validation sample: {error}", alone=True) from None
        if meta.timestep is None or not 0 <= meta.timestep < schedule.TIMESTEPS:
            raise Fault(
                f"validation sample {meta.key} in {self.cfg.data.val} has timestep {meta.timestep}; want 0 to 7",
                alone=True,
            )
        rows["timestep"][i], rows["t"][i] = meta.timestep, schedule.validation_time(meta.timestep)
        rows["latent_eps"][i], rows["noise"][i] = rng.val_draw(
            self.cfg.train.seed, evaluation, sample, self.cfg.model.latent_shape
        )


def open_set(cfg: Config, split: str) -> shards.ShardSet:
    """The shards of data.train or data.val, checked by their sizes alone. Raises: Refusal."""
    folder = getattr(cfg.data, split)
    count = getattr(cfg.data, f"{split}_count")
    opened = shards.ShardSet(folder, shards.layout(cfg.model), split)
    if folder and count not in (0, len(opened)):
        made = f"{len(opened)}, or remove {Path(folder).parent} and it is made again"
        raise Refusal(
            f"{folder} holds {len(opened)} samples, data.{split}_count={count} asks for {count};"
            f" set it to {made if cfg.data.kind == 'shapes' else '0 for any number'}"
        )
    return opened


def synthetic(model: ModelConfig, rows: int) -> Batch:
    """A batch of plausible random values on the host, for warm-up and benchmarks."""
    batch = allocate(model, rows)
    for number, tensor in enumerate(batch.values()):
        tensor.copy_(torch.from_numpy(rng.normals(0, rng.SYNTHETIC, tensor.shape, sample=number, epoch=0)))
    batch["t"].copy_(torch.linspace(0, 1, rows + 1)[:-1])
    batch["weight"].fill_(1)
    batch["timestep"].copy_(torch.arange(rows) % schedule.TIMESTEPS)
    return batch
