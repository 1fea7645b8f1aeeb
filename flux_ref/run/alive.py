"""What a run does between two units of work: it shows progress to the hang watch and acts on signals."""

import signal

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.config import Config
from flux_ref.errors import Interrupted
from flux_ref.ranks import World
from flux_ref.run.hang_watch import HangWatch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what torchrun passes on, and what Slurm sends ahead of a time limit


def received() -> int:
    """The signal that an `Alive` of this process has caught; 0 for none."""
    owner = getattr(signal.getsignal(SIGNALS[0]), "__self__", None)
    return owner.signal if isinstance(owner, Alive) else 0


class Alive:
    """Watches for hanging ranks and catches SIGTERM and SIGUSR1 from the moment it is made."""

    def __init__(self, name: str, cfg: Config, world: World):
        """Collective. name: of the script, for messages."""
        self.signal = 0
        self.group = ranks.host_group("stop", 2 * cfg.run.hang_s)  # twice: the hang watch reports first
        self.sent: tuple[torch.Tensor, dist.Work] | None = None
        for number in SIGNALS:
            signal.signal(number, self._take)
        self.watch = HangWatch(name, world, [*ranks.groups(world), self.group], cfg.run.hang_s)

    def _take(self, number: int, frame: object) -> None:
        self.signal = number

    def at(self, place: str) -> None:
        """Note the place of this rank after each step and each validation batch. Collective.

        The ranks exchange their signals at one call and read the result at the next call, so that no rank waits.
        Raises: Interrupted, on every rank at the same call, if any rank has received a signal.
        """
        self.watch.at(place)
        if self.sent is not None:
            largest, work = self.sent
            work.wait()
            if largest.item():
                raise Interrupted(largest.item())
        largest = torch.tensor([self.signal])
        self.sent = largest, dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def close(self) -> None:
        self.watch.close()
