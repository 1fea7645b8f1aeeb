"""A fuzzer that knows what it hurts: it damages a sound input, lets flux_ref read it, and judges the result.

An input is (target, damage, seed): the damage of this name, drawn from this seed alone. New damages and targets
do not change what an old input means. Each input is read in a worker process, which the engine replaces if it dies.
"""

import contextlib
import importlib
import io
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from flux_ref.errors import Fault, Refusal
from flux_ref.formats.outside import one_line

REFUSED, SAME, AS_READ = "refusal", "same outcome", "as read"  # the good results
TRACEBACK, HANG, MEMORY = "traceback", "hang", "memory"
WRONG, LEFTOVER, UNCLEAR = "wrong acceptance", "leftover", "unclear"  # unclear: several lines, control characters
GOOD = (REFUSED, SAME, AS_READ)
BAD = (TRACEBACK, HANG, MEMORY, WRONG, LEFTOVER, UNCLEAR)
RESULTS = GOOD + BAD
MEMORY_BYTES = 9 * 2**28  # an input may take so much memory; Python reserves 2 GiB to read a list of our own
LIMIT_S = 10.0
FIRST_S = 100.0  # for the sound input of a target, whose modules may have to be imported
CHECKED_BYTES = 16 * 2**20  # of a larger file only the size is compared
LONGEST_LINE = 2000  # a refusal with more characters is not clear

Damage = Callable[[Path, Random], str]
Input = tuple[str, str, int]


@dataclass(frozen=True)
class Target:
    """Something that flux_ref reads, and how it is hurt. Every function works in `folder`, the current folder."""

    name: str
    make: Callable[[Path], None]  # writes a sound input into the empty folder; once per process
    damages: dict[str, Damage]  # each changes files in the folder, and says how in one line without paths
    run: Callable[[Path], object]  # reads the input; what it found, or a Said. Raises: Refusal, Fault, OSError
    # What a reader of its own says that `run` must find in the hurt input. Raises: ValueError for a bad input.
    reading: Callable[[Path], object] | None = None
    # Where that is not enough: what is wrong with an outcome that differs from the sound input's; "" if it is right.
    judge: Callable[[Path, object], str] | None = None
    writes: tuple[str, ...] = ()  # patterns of the files that `run` may write if it accepts


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Result:
    kind: str
    damage: str
    detail: str = ""


def command(main: Callable[[list[str]], int], argv: list[str], encoding: str = "utf-8") -> Said:
    """Call a command as its __main__.py does; the terminal has this encoding. An exit counts as a return."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Said(code or 0, *(stream.buffer.getvalue().decode(encoding, "surrogateescape") for stream in streams))


# One input, in the worker


class Bench:
    """The folders in which a worker hurts and reads inputs."""

    of_worker: "Bench"

    def __init__(self, root: Path, targets: dict[str, Target]):
        self.root, self.targets = root, targets
        self.sound: dict[str, str] = {}  # what each target finds in the sound input
        self.environment = dict(os.environ)
        self.output = root / "output"  # what libraries write past Python

    def try_input(self, name: str, damage: str, seed: int) -> Result:
        """Hurt a sound input, read it, and judge."""
        target = self.targets[name]
        self._prepare(target)
        folder = self._fresh(target)
        said = target.damages[damage](folder, Random(f"{damage}/{seed}"))
        before = _listing(folder)
        kind, detail, outcome = self._read(target, folder, LIMIT_S)
        if not (written := self.output.read_text("utf-8", "replace")).replace("\n", "").replace("\t", "").isprintable():
            kind, detail = UNCLEAR, f"control characters: {ascii(written)[:LONGEST_LINE]}"
        if kind == SAME and repr(outcome) != self.sound[name]:
            kind, detail = self._judge(target, folder, outcome)
        is_broken = isinstance(outcome, Said) and outcome.code == Fault.exit_code  # the command had begun
        allowed = target.writes if kind in (SAME, AS_READ) or is_broken else ()
        changed = [
            path for path in _listing(folder) ^ before if not any(fnmatch(path[0], pattern) for pattern in allowed)
        ]
        if changed and kind in GOOD:
            kind, detail = LEFTOVER, ", ".join(sorted({path[0] for path in changed}))[:LONGEST_LINE]
        return Result(kind, said, detail)

    def _prepare(self, target: Target) -> None:
        """Make the sound input once, and see that it is accepted."""
        if target.name in self.sound:
            return
        place = self.root / "sound" / target.name
        place.mkdir(parents=True)
        os.chdir(place)
        target.make(place)
        kind, detail, outcome = self._read(target, self._fresh(target), FIRST_S)
        assert kind == SAME, f"the sound input of {target.name} ends in {kind}: {detail}"
        self.sound[target.name] = repr(outcome)

    def _fresh(self, target: Target) -> Path:
        folder = self.root / "input"
        os.truncate(self.output, 0)
        os.chdir(self.root)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root / "sound" / target.name, folder, symlinks=True)
        os.chdir(folder)
        return folder

    def _read(self, target: Target, folder: Path, limit_s: float) -> tuple[str, str, object]:
        """(kind, detail, outcome); SAME stands for accepted."""
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
        signal.signal(signal.SIGALRM, _raise_hang)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            outcome = target.run(folder)
        except (Refusal, Fault, OSError) as error:  # commands make one line of each
            return REFUSED if _is_clear(one_line(error)) else UNCLEAR, one_line(error), None
        except _Hang:
            return HANG, traceback.format_exc(), None
        except MemoryError:
            return MEMORY, traceback.format_exc(), None
        except BaseException:
            return TRACEBACK, traceback.format_exc(), None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            os.environ.clear()
            os.environ.update(self.environment)
        return (*_of_command(outcome), outcome) if isinstance(outcome, Said) else (SAME, "", outcome)

    def _judge(self, target: Target, folder: Path, outcome: object) -> tuple[str, str]:
        """Whether an outcome that differs from the sound input's is what a reader of its own finds."""
        found, want = repr(outcome), "no other reading"
        try:
            if target.judge:
                wrong = target.judge(folder, outcome)
                return (WRONG, f"{wrong}; found {found[:700]}") if wrong else (AS_READ, "")
            if target.reading:
                want = repr(target.reading(folder))
        except ValueError as error:
            want = f"a refusal: {error}"
        return (AS_READ, "") if want == found else (WRONG, f"found {found[:700]}, want {want[:700]}")


class _Hang(BaseException):
    """The time is over. No handler of flux_ref's catches this."""


def _raise_hang(number: int, frame: object) -> None:
    raise _Hang


def _of_command(said: Said) -> tuple[str, str]:
    if "Traceback (most recent" in said.err:
        return TRACEBACK, said.err[-LONGEST_LINE:]
    raw = [line for line in (said.out + said.err).splitlines() if not line.isprintable()]
    if raw:
        return UNCLEAR, f"control characters: {ascii(raw[0])[:LONGEST_LINE]}"
    if said.code not in (2, 3):
        return SAME, ""
    is_clear = _is_clear(said.err.removesuffix("\n"))
    return (REFUSED if is_clear else UNCLEAR), said.err[: 2 * LONGEST_LINE]


def _is_clear(line: str) -> bool:
    return 8 < len(line) <= LONGEST_LINE and len(line.splitlines()) == 1


def _listing(folder: Path) -> set[tuple]:
    """What lies in a folder tree: names, kinds, sizes, checksums."""
    found = set()
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *names)):
            about = path.lstat()
            is_file = stat.S_ISREG(about.st_mode)
            checksum = zlib.crc32(path.read_bytes()) if is_file and about.st_size < CHECKED_BYTES else 0
            found.add((str(path.relative_to(folder)), about.st_mode, about.st_size if is_file else 0, checksum))
    return found


# Many inputs


def targets() -> dict[str, Target]:
    """All targets: the list TARGETS of each file targets_*.py beside this one."""
    files = sorted(Path(__file__).parent.glob("targets_*.py"))
    lists = [importlib.import_module(f"fuzz.{file.stem}").TARGETS for file in files]
    return {target.name: target for several in lists for target in several}


def drawn(seed: int, count: int, only: Iterable[str] = ()) -> list[Input]:
    """`count` inputs that follow from a seed."""
    known = [target for target in targets().values() if not only or target.name in only]
    random = Random(seed)
    chosen = random.choices(known, k=count)
    return [(target.name, random.choice(sorted(target.damages)), random.getrandbits(32)) for target in chosen]


def tried(inputs: Iterable[Input]) -> Iterator[tuple[Input, Result]]:
    """The result of each input, one after another. A worker that dies or does not answer is replaced."""
    with contextlib.ExitStack() as stack:
        worker = None
        for one in inputs:
            worker = worker or stack.enter_context(_worker())
            pool, root = worker
            try:
                result = pool.submit(_try, one).result(2 * FIRST_S)
            except TimeoutError:
                result = Result(HANG, "", "the worker does not answer")
            except BrokenProcessPool:
                last = (root / "output").read_text("utf-8", "replace")[-LONGEST_LINE:]
                result = Result(TRACEBACK, "", f"the worker died: {last}")
            if result.kind in (HANG, MEMORY) or (result.kind == TRACEBACK and not result.damage):
                stack.close()
                worker = None
            yield one, result


@contextlib.contextmanager
def _worker() -> Iterator[tuple[ProcessPoolExecutor, Path]]:
    """A process that tries inputs, and the folder in which it does so. It is killed at the end."""
    context = multiprocessing.get_context("spawn")  # no thread of this process's torch
    with tempfile.TemporaryDirectory(prefix="fuzz_") as root:
        pool = ProcessPoolExecutor(1, context, _begin, (Path(root).resolve(),))
        pid = pool.submit(os.getpid).result()
        try:
            yield pool, Path(root)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pool.shutdown(cancel_futures=True)


def _begin(root: Path) -> None:
    """Make the worker's bench."""
    output = os.open(root / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    Bench.of_worker = Bench(root, targets())


def _try(one: Input) -> Result:
    return Bench.of_worker.try_input(*one)


def written(one: Input, damage: str) -> str:
    """An input as a line of the corpus."""
    return f"{one[0]} {one[1]} {one[2]}: {damage}"
