"""Ends a job that hangs and names the rank at fault.

A thread on every rank writes the progress of its rank into the store that torchrun keeps. If no rank has moved for
run.hang_s seconds, the job ends with the names of the ranks that fell behind. torchrun --max-restarts then starts the
job again from its last checkpoint. If the watching thread cannot run because another thread holds the GIL, a C-level
timer ends the process after DEAD_MAN * run.hang_s seconds.
"""

import faulthandler
import json
import os
import sys
import threading
import time

import torch.distributed as dist

from flux_ref import ranks
from flux_ref.errors import Fault
from flux_ref.formats import safetensors_io
from flux_ref.ranks import World

LINGER_S = 3.0  # the other ranks wait at least so long, so that the message of one rank comes first
SILENT = {"beat": 0, "still": 0.0, "collectives": 0, "last": "", "place": "start-up", "captured": False}
DEAD_MAN = 3  # the store may take twice run.hang_s to fail


class HangWatch:
    """Watches this rank and all other ranks from the moment it is made."""

    def __init__(self, name: str, world: World, groups: list[dist.ProcessGroup], limit_s: float):
        """groups: whose collectives count as progress. limit_s: seconds without progress; 0 watches nothing."""
        self.name = name
        self.world = world
        self.limit_s = limit_s
        self.period = min(5.0, limit_s / 20)
        self.linger_s = max(LINGER_S, 2 * self.period)  # two ranks judge at most so far apart
        self.store = dist.PrefixStore("watch", ranks.store_clone())
        self.groups, self.captured = groups, False  # whether steps are replayed; the flight recorder misses replays
        self.place = "start-up"
        self.marks = 0
        self.beat = 0
        self.moved = None
        self.since = time.monotonic()
        self.closed = threading.Event()
        if limit_s:
            threading.Thread(target=self._run, daemon=True).start()

    def at(self, place: str) -> None:
        """Note the place of this rank. Each call counts as progress."""
        self.place = place
        self.marks = self.marks + 1

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
            first = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank per node: no other message may reach it
            if not self.closed.is_set():  # at the end of a run the groups and the store go while this thread works
                self._leave(f"{where} no longer reaches the launcher's store, which is on the first node", speaks=first)
        faulthandler.cancel_dump_traceback_later()

    def _tell(self) -> float:
        """Write the progress of this rank into the store. Returns the seconds since its last progress."""
        collectives = sum(ranks.collectives(group) for group in self.groups)
        moved = (self.marks, collectives, safetensors_io.Moved.total)
        if moved != self.moved:
            self.moved = moved
            self.since = time.monotonic()
        self.beat = self.beat + 1
        still = time.monotonic() - self.since
        # A call of the flight recorder may disturb a capture, so it is made only when nothing moves.
        last = ranks.last_collective() if still > self.limit_s / 2 else ""
        record = {"beat": self.beat, "still": still, "collectives": collectives, "last": last, "place": self.place}
        self.store.set(str(self.world.rank), json.dumps(record | {"captured": self.captured}))
        return still

    def _heard(self) -> list[dict]:
        """The newest record of each rank. A rank without a record is still starting; nobody waits for it."""
        names = map(str, range(self.world.size))
        return [json.loads(self.store.get(name)) if self.store.check([name]) else dict(SILENT) for name in names]

    def _judge(self) -> None:
        """Name the ranks that are behind and end the job, unless some rank still moves."""
        before = self._heard()
        deadline = time.monotonic() + 4 * self.period
        while time.monotonic() < deadline:  # every living rank writes again in this time
            time.sleep(self.period)
            self._tell()
        verdict = judge(before, self._heard(), self.limit_s)
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
    frozen = [rank for rank, (old, new) in enumerate(zip(before, after)) if old["beat"] == new["beat"]]
    alive = [rank for rank in range(len(after)) if rank not in frozen]
    if any(after[rank]["still"] < limit_s for rank in alive):
        return None
    furthest = max(after, key=lambda record: record["collectives"])
    behind = [rank for rank, record in enumerate(after) if record["collectives"] < furthest["collectives"]]
    blamed = frozen or behind
    seen = furthest["last"] or "not recorded"
    if furthest["captured"]:
        seen += "; replays of captured steps record none of their collectives"
    waits = f"collective {furthest['collectives']} ({seen}) at {furthest['place']}"
    if not blamed:
        return [], f"all ranks have waited {limit_s:g} s in {waits}; the network or a device hangs"
    one = after[blamed[0]]
    names = f"rank {blamed[0]} hangs" if len(blamed) == 1 else f"ranks {', '.join(map(str, blamed))} hang"
    how = "frozen or gone" if frozen else f"nothing has moved for {limit_s:g} s"
    last = f" ({one['last']})" if one["last"] else ""
    return blamed, (
        f"{names}: {how}, last seen at {one['place']} after collective {one['collectives']}{last};"
        f" the others wait in {waits}"
    )
