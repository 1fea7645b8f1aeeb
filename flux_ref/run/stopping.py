"""Stops all ranks after the same step when any rank receives a signal."""

import signal

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what torchrun passes on, and what Slurm sends ahead of a time limit


class Stopping:
    """Catches SIGTERM and SIGUSR1 from the moment it is made. `check` acts on them."""

    def __init__(self, timeout_s: float = 0.0):
        """Collective. timeout_s: the limit of waiting for the other ranks; 0 for the backend's default."""
        self.signal = 0
        self.group = ranks.host_group("stop", timeout_s)
        self.asked: tuple[torch.Tensor, dist.Work] | None = None
        for number in SIGNALS:
            signal.signal(number, self._take)

    def _take(self, number: int, frame: object) -> None:
        self.signal = number

    def check(self) -> None:
        """Call this after each step and each validation batch, on every rank.

        The ranks exchange their signals at one call and read the result at the next call, so that no rank waits.
        Raises: Interrupted, on every rank at the same call.
        """
        if self.asked is not None:
            word, work = self.asked
            work.wait()
            if word.item():
                raise Interrupted(word.item())
        word = torch.tensor([self.signal])
        self.asked = word, dist.all_reduce(word, dist.ReduceOp.MAX, group=self.group, async_op=True)
