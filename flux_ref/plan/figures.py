"""What the parts of a plan hand to each other. Sizes in bytes and times in seconds, unless a name says otherwise."""

from dataclasses import dataclass
from typing import NamedTuple


class Product(NamedTuple):
    """A matrix product or attention."""

    flop: float
    moved: float  # bytes that it reads and writes
    is_fp8: bool


@dataclass(frozen=True)
class Work:
    """What one pass computes: its products, and the bytes that everything else reads and writes."""

    moved: float
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Footprint:
    """What one region, or the ends of the net, needs for one micro-batch."""

    saved: float  # stays from forward until backward; includes the output
    forward: float  # most memory in forward, above the inputs
    backward: float  # most memory in backward, above all that is saved; includes gradients of unsharded weights
    evaluate: float  # most memory without gradients, above the inputs
    forward_work: Work
    backward_work: Work


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment, by part."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Times:
    """Times of one optimizer step, and what a rank sends in it."""

    step: float
    compute: float  # forward, backward and the optimizer, if nothing waited for communication
    optimizer: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    sent: dict[str, float]  # by all_gather, reduce_scatter, all_reduce

    @property
    def communication(self) -> float:
        return self.all_gather + self.reduce_scatter + self.all_reduce

    @property
    def exposed(self) -> float:
        """The part of the step in which compute waits for communication."""
        return self.step - self.compute


@dataclass(frozen=True)
class Plan:
    """Everything that is printed."""

    config: str
    gpu: str
    gpus: int
    rows: int  # micro-batch
    shards: int
    replicas: int
    moment: Moment
    total: float  # on a card: tensors, the assumed margin and what lies outside of tensors
    card: float
    in_graph: float
    largest_rows: int  # the largest micro-batch that fits
    times: Times
    samples_per_s: float
    mfu: float
    evaluation: float
    evaluations: int | None
    samples: float | None  # to the target; None if no reference point is like the config
    train: float | None
    cost: float | None
    disk: float
    read_per_node: float  # bytes per second
    checkpoint: float
    checkpoint_copy: float
    checkpoint_write: float
    init: float
    warnings: list[str]
