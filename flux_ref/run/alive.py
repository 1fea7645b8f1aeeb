"""What a run does between two units of work: it shows progress to the hang watch and acts on signals."""

import contextlib
import os
import signal
import time

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.config import Config
from flux_ref.errors import Interrupted
from flux_ref.ranks import World
from flux_ref.run.hang_watch import HangWatch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # of torchrun; of Slurm ahead of a time limit; of Ctrl-C
ONE_PRESS_S = 0.5  # some launchers pass on a Ctrl-C that the terminal has sent to their children, too
NOTICE = b"\nCtrl-C: the run ends after one more step; a second Ctrl-C ends it at once\n"


def received() -> int:
    """The signal that an `Alive` of this process has caught; 0 for none."""
    owner = getattr(signal.getsignal(SIGNALS[0]), "__self__", None)
    return owner.signal if isinstance(owner, Alive) else 0


class Alive:
    """Watches for hanging ranks and catches signals. Before the first `at`, Ctrl-C raises KeyboardInterrupt."""

    def __init__(self, name: str, cfg: Config, world: World):
        """Collective. name: of the script, for messages."""
        self.signal = 0
        self.since = 0.0
        self.speaks = world.rank == 0
        self.group = ranks.host_group("stop", 2 * cfg.run.hang_s)  # twice: the hang watch reports first
        self.sent: tuple[torch.Tensor, dist.Work] | None = None
        for number in SIGNALS[:2]:
            signal.signal(number, self._take)
        self.watch = HangWatch(name, world, [*ranks.groups(world), self.group], cfg.run.hang_s)

    def _take(self, number: int, frame: object) -> None:
        if self.signal != signal.SIGINT:
            self.signal = number
            self.since = time.monotonic()
            if number == signal.SIGINT and self.speaks:
                with contextlib.suppress(OSError):  # the same Ctrl-C has ended `tee`
                    os.write(2, NOTICE)  # print() might interrupt itself
        elif number == signal.SIGTERM or ("TORCHELASTIC_RUN_ID" not in os.environ and number == signal.SIGINT):
            if time.monotonic() - self.since > ONE_PRESS_S:
                os._exit(128 + signal.SIGINT)  # torchrun repeats the first Ctrl-C, and makes SIGTERM of a second one

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
        elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores Ctrl-C
            signal.signal(signal.SIGINT, self._take)
        largest = torch.tensor([self.signal])
        self.sent = largest, dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def let_go(self) -> None:
        """All is saved, so Ctrl-C may end this rank at once from now on."""
        if signal.getsignal(signal.SIGINT) == self._take:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def close(self) -> None:
        self.watch.close()
