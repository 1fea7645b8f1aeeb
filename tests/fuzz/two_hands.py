"""Two processes write one target. Each is stopped at a chosen moment, and then goes on or is killed.

A moment is a call that opens, makes, renames or removes something in the folder (Python's audit events). At the end the
target is missing or as one of the two writes it alone, whoever did not write it has said why, and a third process can
write it and leaves nothing else.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz.targets_weights import CFG, MODEL, drawn
from made_logs import MadeLog
from safetensors.torch import save_file

from flux_ref import config, config_file
from flux_ref.formats import files
from flux_ref.model import parameter_table
from flux_ref.run import folder as run_folder
from flux_ref.run.attempt import attempt
from flux_ref.toy import make
from tools.prepare import commands as prepare
from tools.report import commands as report
from tools.weights import commands as weights

MOMENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree", "shutil.move"}
SORRY = re.compile(r"is being written by another job|is in use by another job|is being made by another job|exists")
WAIT_S = 5.0  # for a process that neither stops nor ends, because it waits for the other one
ENDS_S = 60.0


@dataclass(frozen=True)
class Writer:
    """A command. write: makes the target "out" from the input "a" or "b", as its __main__.py does; returns the code."""

    write: Callable[[str], int]
    is_new: bool  # the command refuses a target that exists


def weights_of(which: str, *options: str) -> int:
    command = ["import", f"{which}.safetensors"] if not options else ["export", f"{which}.safetensors"]
    return weights.main([*command, "out", *options, "--config=one.toml"])


def shapes_of(which: str) -> int:
    return attempt("shapes", lambda: make.make_shapes(Path("out"), MODEL, 3 if which == "a" else 4, 2) or 0)


def ensured(which: str) -> int:
    """A first start of train.py makes the data set, or waits for it."""
    data = {"train": "out/train", "val": "out/val", "train_count": 3, "val_count": 2}
    cfg = config_file.replace(CFG, **{f"data__{key}": value for key, value in data.items()})
    return attempt("train.py", lambda: make.ensure(cfg) or 0)


def reported(which: str) -> int:
    code = report.main([f"logs_{which}", "--json=out.json"])
    return 0 if code == report.INVALID else code  # the logs are no valid results


def verified(which: str) -> int:
    return prepare.main(["verify", "set", "--config=one.toml"])


def claimed(which: str) -> int:
    """A run replaces the run in a folder, by the claim of train.py."""
    cfg = config_file.replace(CFG, run__dir="out", run__overwrite=True, train__seed=1 if which == "a" else 2)

    def task() -> int:
        with run_folder.claim(cfg, restarted=False):
            (config.run_dir(cfg) / "metrics.jsonl").write_text("")
        return 0

    return attempt("train.py", task)


WRITERS = {
    "export as BFL": Writer(lambda which: weights_of(which, "--format=bfl"), True),
    "export for diffusers": Writer(lambda which: weights_of(which, "--format=diffusers"), True),
    "import": Writer(weights_of, True),
    "make the toy set": Writer(shapes_of, True),
    "first start": Writer(ensured, False),
    "report as JSON": Writer(reported, False),
    "verify": Writer(verified, False),
    "overwrite a run": Writer(claimed, False),
}

TARGETS = {"verify": "set/manifest.sha256", "overwrite a run": "out/config.toml", "report as JSON": "out.json"}


def prepared(folder: Path) -> None:
    """The inputs of all writers."""
    one = config_file.replace(
        CFG, model__double_blocks=1, model__single_blocks=1, data__train_count=3, data__val_count=8
    )
    (folder / "one.toml").write_text(config_file.dump(one))
    for seed, which in enumerate("ab"):
        save_file(drawn(parameter_table(MODEL), seed), folder / f"{which}.safetensors")
        (folder / f"logs_{which}").mkdir()
        MadeLog(seed + 1, evaluations=3).write(folder / f"logs_{which}" / "result_0.txt")
    make.make_shapes(folder / "set", MODEL, 3, 8)


def content(name: str) -> object:
    """What the target of a writer holds; None if there is none. A run's folder counts by its config."""
    target = Path(TARGETS.get(name, "out"))
    if target.is_file():
        return zlib.crc32(target.read_bytes())
    files = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else []
    return [(str(path), zlib.crc32(path.read_bytes())) for path in files] or None


class Hand:
    """A process that writes, and stops itself at a moment. moment: the number of the call, from 0."""

    def __init__(self, write: Callable[[str], int], which: str, moment: int):
        self.log = Path(f"{which}.said").resolve()
        self.code: int | None = None  # once it has ended
        self.pid = os.fork()
        if self.pid == 0:
            self._run(write, which, moment)

    def _run(self, write: Callable[[str], int], which: str, moment: int) -> None:
        sys.stdout = sys.stderr = self.log.open("w")
        root = os.getcwd()
        calls = itertools.count()

        def stop(event: str, args: tuple) -> None:
            if event in MOMENTS and isinstance(args[0], (str, Path)) and os.path.abspath(args[0]).startswith(root):
                if next(calls) == moment:
                    os.kill(os.getpid(), signal.SIGSTOP)

        sys.addaudithook(stop)
        code = 99
        try:
            code = write(which)
        except BaseException:
            traceback.print_exc()
        print(f"\n{next(calls)} calls", flush=True)
        os._exit(code)

    def wait(self, limit_s: float) -> bool:
        """Wait until it has stopped or ended. Returns whether it has ended."""
        end = time.monotonic() + limit_s
        while self.code is None and time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return False
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return self.code is not None

    def send(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def fresh(sound: Path) -> Iterator[None]:
    """A copy of the inputs as the current folder."""
    with tempfile.TemporaryDirectory(prefix="two_hands_") as folder:
        os.chdir(folder)
        shutil.copytree(sound, folder, dirs_exist_ok=True)
        try:
            yield
        finally:
            os.chdir("/")


def alone(writer: Writer, which: str) -> int:
    """Write without anybody else. Returns the number of moments."""
    hand = Hand(writer.write, which, -1)
    assert hand.wait(ENDS_S) and hand.code == 0, hand.said()
    return int(re.search(r"(\d+) calls", hand.said())[1])


def pair(name: str, sound: Path, random: Random, lone: dict, moments: int) -> tuple[str, str]:
    """Let two hands meet. Returns what happened and what is wrong, "" if nothing is."""
    writer = WRITERS[name]
    with fresh(sound):
        hands = []
        for which in "ab":
            hands.append(Hand(writer.write, which, random.randrange(moments + moments // 4)))
            hands[-1].wait(WAIT_S)
        told = []
        for hand in random.sample(hands, 2):
            number = random.choice((signal.SIGCONT, signal.SIGCONT, signal.SIGKILL))
            told.append(number.name if hand.code is None else "ended")
            hand.send(number)
            hand.wait(WAIT_S)
        for hand in hands:
            hand.send(signal.SIGCONT)
        if not all(hand.wait(ENDS_S) for hand in hands):
            return "hangs", " ".join(told)
        codes = [hand.code for hand in hands]
        found = content(name)
        wrong = []
        for hand in hands:
            is_sorry = hand.code == 2 and SORRY.search(hand.said()) and "Traceback" not in hand.said()
            if hand.code not in (0, -signal.SIGKILL) and not is_sorry:
                wrong.append(f"ended with {hand.code}: {hand.said()[-600:]}")
        if found not in (None, *lone.values()):
            wrong.append("the target is neither of the two")
        if found is None and 0 in codes and not Path("out/overwritten_1").exists():
            wrong.append("a writer ended well and the target is missing")
        if writer.is_new and codes.count(0) > 1:
            wrong.append("one target was lost without a word")
        if sorted(codes) == [0, 2] and found != lone["ab"[codes.index(0)]]:
            wrong.append("the target is the refused one's")
        return f"codes {codes}", "; ".join([*wrong, *_after(name, writer, lone)])


def _after(name: str, writer: Writer, lone: dict) -> list[str]:
    """What is wrong if one more process writes."""
    if name != "overwrite a run":
        files.remove(Path(TARGETS.get(name, "out")))
    third = Hand(writer.write, "a", -2)
    if not third.wait(ENDS_S) or third.code != 0 or content(name) != lone["a"]:
        return [f"a third process ended with {third.code}: {third.said()[-600:]}"]
    left = [str(path) for path in Path().rglob(".*") if path.name not in (".stage",)]
    return [f"left over: {left}"] if left else []


def campaign(count: int, seed: int) -> int:
    """Print what goes wrong and a table. Returns the number of pairs that went wrong."""
    random = Random(seed)
    counts = Counter()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="two_hands_") as folder:
        sound = Path(folder)
        prepared(sound)
        known = {}
        for name, writer in WRITERS.items():
            lone = {}
            for which in "ab":
                with fresh(sound):
                    moments = alone(writer, which)
                    lone[which] = content(name)
            known[name] = lone, moments
        for number in range(count):
            name = random.choice(sorted(WRITERS))
            happened, wrong = pair(name, sound, random, *known[name])
            counts[name, happened] += 1
            if wrong:
                bad += 1
                print(f"pair {number}, {name}, {happened}: {wrong}", flush=True)
    for (name, happened), times in sorted(counts.items()):
        print(f"{name:22} {happened:18} {times:5}")
    print(f"{count} pairs of seed {seed}, {bad} bad")
    return bad


if __name__ == "__main__":
    raise SystemExit(campaign(int(sys.argv[1]), int(sys.argv[2])) > 0)
