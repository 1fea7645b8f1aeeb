"""What keeps a job from hanging: it notes progress, acts on signals, and ends when a rank hangs or torchrun dies.

A thread on every rank writes the progress of its rank into the store that torchrun keeps. If no rank has moved for
run.hang_s seconds, the job ends with the names of the ranks that fell behind. torchrun --max-restarts then starts the
job again from its last checkpoint. If the watching thread cannot run because another thread holds the GIL, a C-level
timer ends the process after DEAD_MAN * run.hang_s seconds.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.config import Config
from flux_ref.errors import Fault, Interrupted
from flux_ref.formats import safetensors_io
from flux_ref.ranks import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # of torchrun; of Slurm ahead of a time limit; of Ctrl-C
ONE_PRESS_S = 0.5  # some launchers pass on a Ctrl-C that the terminal has sent to their children, too
NOTICE = b"\nCtrl-C: the run ends after one more step; a second Ctrl-C ends it at once\n"
LINGER_S = 3.0  # the other ranks wait at least so long, so that the message of one rank comes first
DEAD_MAN = 3  # the store may take twice run.hang_s to fail
# What a rank tells the others. This is the record of a rank that is still starting.
SILENT = {"beat": 0, "still": 0.0, "collectives": 0, "last": "", "place": "start-up", "captured": False}


def follow_launcher(name: str) -> None:
    """End this rank when torchrun dies. A rank that goes on would keep memory, devices and the run's folder."""
    launcher = os.getppid()
    program = b"python"
    with contextlib.suppress(OSError):
        program = Path("/proc/1/cmdline").read_bytes().split(b"\0")[0]
    # A rank that lost torchrun while it started has process 1 as parent. In a container torchrun may be process 1.
    orphaned = launcher == 1 and not re.search(rb"python|torchrun", program)
    while os.getppid() == launcher and not orphaned:
        time.sleep(1.0)
    print(f"{name}: torchrun has died; rank {os.environ.get('RANK')} ends", file=sys.stderr, flush=True)
    os._exit(Fault.exit_code)


class HangWatch:
    """Watches this rank and all other ranks from the moment it is made."""

    def __init__(self, name: str, world: World, groups: list[dist.ProcessGroup], limit_s: float):
        """groups: whose collectives count as progress. limit_s: seconds without progress; 0 watches nothing."""
        self.name = name
        self.world = world
        self.groups = groups
        self.limit_s = limit_s
        self.period = min(5.0, limit_s / 20)
        self.linger_s = max(LINGER_S, 2 * self.period)  # two ranks may reach their verdicts so many seconds apart
        self.store = dist.PrefixStore("watch", ranks.store_clone())
        self.record = dict(SILENT)
        self.captured = False  # whether steps are replayed; the flight recorder misses replays
        self.marks = 0
        self.moved = None
        self.since = time.monotonic()
        self.closed = threading.Event()
        if limit_s:
            threading.Thread(target=self._run, daemon=True).start()

    def at(self, place: str) -> None:
        """Note the place of this rank. Each call counts as progress."""
        self.record["place"] = place
        self.marks += 1

    def close(self) -> None:
        self.closed.set()

    def _run(self) -> None:
        try:
            while not self.closed.wait(self.period):
                faulthandler.dump_traceback_later(DEAD_MAN * self.limit_s, exit=True, file=sys.__stderr__)
                if self._tell() > self.limit_s:
                    self._judge()
        except (RuntimeError, OSError):  # the store lives in torchrun
            where = f"{self.name}: rank {self.world.rank} on {os.uname().nodename}"
            first = os.environ.get("LOCAL_RANK", "0") == "0"  # one line for each node
            if not self.closed.is_set():  # at the end of a run the groups and the store go while this thread works
                self._leave(f"{where} no longer reaches the launcher's store, which is on the first node", speaks=first)
        faulthandler.cancel_dump_traceback_later()

    def _tell(self) -> float:
        """Write the progress of this rank into the store. Returns the seconds since its last progress."""
        record = self.record
        record["collectives"] = sum(ranks.collectives(group) for group in self.groups)
        moved = self.marks, record["collectives"], safetensors_io.Moved.total
        if moved != self.moved:
            self.moved = moved
            self.since = time.monotonic()
        record["beat"] += 1
        record["still"] = time.monotonic() - self.since
        record["captured"] = self.captured
        # A call of the flight recorder may disturb a capture, so it is made only when nothing moves.
        record["last"] = ranks.last_collective() if record["still"] > self.limit_s / 2 else ""
        self.store.set(str(self.world.rank), json.dumps(record))
        return record["still"]

    def _records(self) -> list[dict]:
        """The newest record of each rank. A rank without a record is still starting; nobody waits for it."""
        names = map(str, range(self.world.size))
        return [json.loads(self.store.get(name)) if self.store.check([name]) else SILENT for name in names]

    def _judge(self) -> None:
        """Name the ranks that are behind and end the job, unless some rank still moves."""
        before = self._records()
        for _ in range(5):  # every living rank writes again in this time
            time.sleep(self.period)
            self._tell()
        verdict = judge(before, self._records(), self.limit_s)
        if verdict is not None:
            blamed, message = verdict
            innocent = [rank for rank in range(self.world.size) if rank not in blamed] or [0]
            self._leave(f"{self.name}: {message}", speaks=self.world.rank == innocent[0])

    def _leave(self, message: str, speaks: bool) -> None:
        # The timer ends the process even if another thread holds the GIL.
        faulthandler.dump_traceback_later(2 * self.linger_s, exit=True, file=sys.__stderr__)
        if speaks:
            print(message, file=sys.stderr, flush=True)
        else:
            time.sleep(self.linger_s)
        os._exit(Fault.exit_code)


def judge(before: list[dict], after: list[dict], limit_s: float) -> tuple[list[int], str] | None:
    """(ranks at fault, message) from two records of every rank. None while any rank moves."""
    frozen = [rank for rank, record in enumerate(after) if record["beat"] == before[rank]["beat"]]
    if any(record["still"] < limit_s for rank, record in enumerate(after) if rank not in frozen):
        return None
    furthest = max(after, key=lambda record: record["collectives"])
    seen = furthest["last"] or "not recorded"
    if furthest["captured"]:
        seen += "; replays of captured steps record none of their collectives"
    waits = f"collective {furthest['collectives']} ({seen}) at {furthest['place']}"
    behind = [rank for rank, record in enumerate(after) if record["collectives"] < furthest["collectives"]]
    blamed = frozen or behind
    if not blamed:
        return [], f"all ranks have waited {limit_s:g} s in {waits}; the network or a device hangs"
    one = after[blamed[0]]
    names = f"rank {blamed[0]} hangs" if len(blamed) == 1 else f"ranks {', '.join(map(str, blamed))} hang"
    how = "frozen or gone" if frozen else f"nothing has moved for {limit_s:g} s"
    last = f" ({one['last']})" if one["last"] else ""
    seen = f"last seen at {one['place']} after collective {one['collectives']}{last}"
    return blamed, f"{names}: {how}, {seen}; the others wait in {waits}"


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
