"""What keeps a run from hanging: a timer on every rank, signals, and the end of the launcher.

The timer counts the time in which this process ran, so a pause (Ctrl-Z, docker pause) is no hang. Progress of any rank
counts for all ranks: a rank that waits for a slower one does not hang. Without progress for run.watchdog_s seconds
the rank prints where it is and ends. torchrun then ends the other ranks, and with --max-restarts it starts the job
again from its last checkpoint. hang_rank_RANK.json in the run's folder says what torch's flight recorder knows of the
rank's collectives.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.cli import Fault, Interrupted, ProgressCount

# They save a checkpoint and end the run: torchrun, job schedulers ahead of a limit (the next three), a closed terminal,
# Ctrl-\.
SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGINT,
)
NOTICE = "Ctrl-C: the run ends after one more step; a second Ctrl-C ends it at once"
TICK_S = 1.0
RECORD_S = 10.0  # most for a record of a hang
LAUNCHED = "TORCHELASTIC_RUN_ID"  # torchrun sets it


class Watchdog:
    """Ends this rank if it makes no progress for limit_s seconds (0: never), or if torchrun has died.

    From the first `stop_point` on it also acts on signals. Before it there is nothing to save.
    """

    folder: Path | None = None  # of the run
    store: dist.Store | None = None  # for the progress of all ranks
    told = 0  # this rank's progress that the store has

    def __init__(self, name: str, limit_s: float, folder: Path | None = None):
        """name: of the script, for messages. folder: of the run, where it may be absent."""
        self.name = name
        self.folder = folder
        self.limit_s = limit_s
        self.place = "the start"
        self.marks = 0
        self.launcher = os.getppid() if LAUNCHED in os.environ else None
        self.closed = threading.Event()
        self.signal = 0
        self.group: dist.ProcessGroup | None = None
        self.largest = torch.zeros(1, dtype=torch.int64)  # of the signals of all ranks
        self.sent: dist.Work | None = None
        self.before: dict[int, Any] = {}  # the handlers of signals that it replaces
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.closed.set()
        self.release_signals()
        if self.signal == signal.SIGTERM and isinstance(error, RuntimeError):
            signal.raise_signal(
                signal.SIGTERM
            )  # torchrun ends this rank because another one broke, and that one speaks

    def share(self, store: dist.Store) -> None:
        """From now on the progress of any rank counts. Collective.

        store: World.store, whose calls wait for no other call.
        """
        store.set_timeout(timedelta(seconds=5 * TICK_S))
        self.store = store
        self.group = ranks.host_group("stop")  # now, as it takes its time on many ranks

    def mark(self, place: str) -> None:
        """Note the place of this rank. Each call counts as progress, as do bytes of weights that move."""
        self.place = place
        self.marks += 1

    def _run(self) -> None:
        idle_s = 0.0
        now = time.monotonic()
        seen = 0
        while not self.closed.wait(TICK_S):
            before = now
            now = time.monotonic()
            idle_s += min(now - before, 2 * TICK_S)  # this thread was late by more: the process was stopped
            if self.launcher not in (None, os.getppid()):  # this rank would hold memory, devices and the run's folder
                self._end("torchrun has died")
            progress = self._progress()
            if progress != seen:
                seen = progress
                idle_s = 0.0
            if self.limit_s and idle_s > self.limit_s:
                if self.folder:
                    self._record_collectives(self.folder)
                faulthandler.dump_traceback(2)  # into standard error
                self._end(self.stuck())

    def _progress(self) -> int:
        """A number that changes with each progress of any rank. Without the store it is this rank's."""
        own = self.marks + ProgressCount.total
        if self.store:
            try:
                total = self.store.add("progress", own - self.told)
                self.told = own
                return total
            except RuntimeError:  # the node of the store is down
                self.store = None
        return own

    def stuck(self) -> str:
        """Where this rank stands, in words."""
        return (
            f"no progress for {self.limit_s:g} s since {self.place};"
            " this rank, another one, the network or a device hangs."
            " If torch still compiles, set a greater run.watchdog_s"
        )

    def _record_collectives(self, folder: Path) -> None:
        """Write torch's flight record into a folder. A record that hangs, too, does not keep the rank."""
        threading.Timer(RECORD_S, self._end, [self.stuck()]).start()
        c10d: Any = torch._C._distributed_c10d  # its functions that dump are private; a torch may lack one
        with contextlib.suppress(AttributeError, TypeError, OSError, RuntimeError, ValueError):
            dump = c10d._dump_nccl_trace_json if dist.get_backend() == "nccl" else c10d._dump_fr_trace_json
            (folder / f"hang_rank_{dist.get_rank()}.json").write_bytes(dump())

    def _end(self, reason: str) -> None:
        tell(f"{self.name}: rank {os.environ.get('RANK', 0)} on {os.uname().nodename}: {reason}")
        os._exit(Fault.exit_code)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signal != signal.SIGINT:
            self.signal = number
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                tell(NOTICE)
        elif number == (signal.SIGTERM if LAUNCHED in os.environ else signal.SIGINT):
            os._exit(128 + signal.SIGINT)  # torchrun repeats the first Ctrl-C, and makes SIGTERM of a second one

    def stop_point(self, place: str) -> None:
        """Note the place of this rank after each step and each validation batch. Collective.

        The ranks exchange their signals at one call and read the result at the next call, so that no rank waits.
        Raises: Interrupted, on every rank at the same call, if any rank has received a signal.
        """
        self.mark(place)
        if self.sent:
            self.sent.wait()
            if number := int(self.largest):
                raise Interrupted(number)
        else:
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, a job in the background Ctrl-C
                    self.before[number] = signal.signal(number, self._take)
        self.largest.fill_(self.signal)
        self.sent = dist.all_reduce(self.largest, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def release_signals(self) -> None:
        """All is saved, so a signal may end this rank at once from now on."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


def tell(line: str) -> None:
    """Write a line to standard error, below the bar of a terminal. print() might interrupt itself."""
    with contextlib.suppress(OSError):  # the same Ctrl-C has ended `tee`
        os.write(2, ("\n" * os.isatty(2) + f"{line}\n").encode())
