"""Every figure of one machine in one call: variants of a step, each in a process of its own, the most important first.

    python -m bench.sweep --minutes 9 --json bench/results/NAME.json
    python -m bench.sweep --minutes 9 --json bench/results/NAME.json --continue      what the last call had no time for
    python -m bench.sweep --small                                                    the micro model, for the CPU
    python -m bench.sweep --list | --only NAME[,NAME]

Each variant shows its figures as it ends, with the time that --counts FILE.json of bench.static predicts.
A variant that is refused, such as one whose key this checkout does not know, stands in the table with the reason.
--continue keeps a record only if the sources are those that the record was made from; others stay in the file, apart.
--section.key=value overrides the config of every variant but the tests.
Exit codes: 0 the table is whole or the time was up, 2 refused, 3 a variant broke or a test failed.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from bench import common
from bench.sources import FIGURES, ROOT, TESTS, sources
from bench.static.__main__ import read
from bench.static.predicted import Counts
from bench.sweep_table import table
from flux_ref.errors import Fault, Refusal
from flux_ref.run import cli
from flux_ref.run.options import Options, between, listed
from tools.shared import json_option

LEAST_S = 60.0  # a variant is not begun with less time left
AGAIN = ("failed", "refused", "out of time")  # what runs again, after all others
ABORT_S = 3.0  # for writing down where it was
PACKAGES = ("torch", "triton", "diffusers", "torchtitan", "numpy", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
FULL, MICRO = "configs/schnell_gbs512.toml", "tests/micro.toml"
COUNTS = ROOT / "bench" / "results" / "static_counts.json"
TESTS_OF = {"graphs": ("test_gpu_graph",), "devices": ("test_gpu", "test_fp8", "test_native")}  # files in tests/speed/


@dataclass(frozen=True)
class Variant:
    """One row: a module of bench and its arguments, and the seconds it may take."""

    name: str
    module: str
    args: tuple[str, ...]
    limit_s: float = 240.0

    @property
    def sources(self) -> str:
        """The hash of what the variant runs."""
        return sources(TESTS if self.module == "bench.device_tests" else FIGURES)

    @property
    def words(self) -> list[str]:
        """The command after `python`."""
        return ["-m", self.module, *self.args]


def variants(small: bool, outcomes: Path) -> list[Variant]:
    """All variants in the order of what they decide: graphs, ceiling, parts, the whole model, kernels, the rest.

    part: a real step on one rank of 4 double and 8 single blocks of full width; whole: all blocks, by bench.whole.
    outcomes: of bench.device_tests.
    """
    config = ("--config", MICRO if small else FULL)
    cut = () if small else ("--model.double_blocks=4", "--model.single_blocks=8")
    pair = ("--model.double_blocks=1", "--model.single_blocks=1")
    times = ("--steps", "2", "--warmup", "1") if small else ("--steps", "10", "--warmup", "3")
    usual, others = (4, (2,)) if small else (32, (4, 8, 16, 64))
    few, more, larger, evals = ("2", "4", "4", "8") if small else ("8", "16", "16,32", "32,64")
    plain = ("--parallel.compile=false", "--parallel.activation_budget=1.0")  # whatever the config says
    compiled, half = "--parallel.compile=true", "--parallel.activation_budget=0.5"
    eager, graph = "--graph.enabled=off", "--graph.enabled=on"
    dynamic, delayed = "--precision.preset=fp8", ("--precision.preset=fp8_delayed", "--precision.dynamic_steps=0")

    def tests(name: str, limit_s: float) -> Variant:
        files = [f"tests/speed/{file}.py" for file in TESTS_OF[name]]
        own = ("--outcomes", str(outcomes), *["--stand-in"] * small, *files)
        return Variant(f"tests {name}", "bench.device_tests", own, limit_s)

    def batch(rows: int) -> tuple[str, str]:
        return f"--train.global_batch={rows}", f"--train.micro_batch={rows}"

    def part(name: str, *options: str, rows: int = usual) -> Variant:
        own = (*config, *cut, *times, "--synthetic", *batch(rows), *plain, eager, *options)
        return Variant(f"part {name}", "bench.step", own)

    def whole(name: str, micros: str, *options: str) -> Variant:
        return Variant(f"whole {name}", "bench.whole", (*config, "--micro-batches", micros, *plain, *options))

    def kernels(name: str, *options: str) -> Variant:
        return Variant(f"part {name}", "bench.kernels", (*config, *cut, *batch(usual), *plain, eager, *options))

    return [
        tests("graphs", 170.0),
        Variant("ceiling", "bench.ceiling", (*config, "--micro-batches", f"{few},{more}")),
        part("eager"),
        part("compiled", compiled),
        part("compiled graph", compiled, graph),
        part("compiled graph fp8", compiled, graph, *delayed),
        whole("compiled", few, "--profile", compiled),
        kernels("kernels", compiled),
        tests("devices", 150.0),
        part("compiled fp8 delayed", compiled, *delayed),
        kernels("kernels fp8", compiled, *delayed),
        whole("compiled fp8", few, "--profile", compiled, *delayed),
        whole("compiled larger", more, "--evaluate", evals, compiled),
        Variant("peers compiled", "bench.race", (*config, *pair, *times, *batch(usual), *plain, compiled, "--compile")),
        part("compiled fp8 dynamic", compiled, dynamic),
        part("compiled k=2", compiled, "--parallel.region_blocks=2"),
        part("compiled k=4", compiled, "--parallel.region_blocks=4"),
        whole("compiled budget 0.5", larger, compiled, half),
        part("compiled budget 0.5", compiled, half),
        Variant("peers eager", "bench.race", (*config, *pair, *times, *batch(usual), *plain)),
        whole("eager", few, "--no-ceiling"),
        *(part(f"compiled batch {rows}", compiled, rows=rows) for rows in others),
    ]


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder for compiled code and temporary files; the next sweep empties what a killed one has left.

    All variants share the compiler's files, or most would compile the same graphs again.
    Raises: Refusal if another sweep is at work, since two at once measure each other.
    """
    folder = Path(tempfile.gettempdir()) / f"bench_sweep_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise Refusal(f"{folder} belongs to another user; set TMPDIR to another folder")
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refusal(f"another sweep is at work in {folder}; wait for its end") from None
        for name in ("compiled", "temporary"):
            shutil.rmtree(folder / name, ignore_errors=True)
        yield folder
        shutil.rmtree(folder / "compiled", ignore_errors=True)


def run(variant: Variant, timeout_s: float, folder: Path) -> dict:
    """Run a variant in a process group of its own; its record: status, seconds, and the report or a line that says why.

    status: done, refused, failed or "out of time". folder: of `workplace`.
    """
    record = {"name": variant.name, "module": variant.module, "command": command_of(variant)}
    record |= {"sources": variant.sources, "machine": common.machine()}
    begin, temporary = time.monotonic(), folder / "temporary"
    temporary.mkdir(exist_ok=True)
    path = temporary / "report.json"
    output_to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled", "TRITON_CACHE_DIR": f"{folder}/compiled/triton"}
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "TMPDIR": str(temporary)} | compiled
    command = [sys.executable, *variant.words, f"--json={path}"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=common.end_with_parent, **output_to)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # each process says where it is
        time.sleep(ABORT_S)
        end_group(process)
        is_whole = timeout_s >= variant.limit_s
        late = {"status": "out of time" if is_whole else "not run", "seconds": timeout_s}
        late["line"] = f"ended after {timeout_s:.0f} s, " + ("its limit" if is_whole else "as the call's time was up")
        return record | late | {"output": tail(process.communicate()[0])}
    else:
        record["seconds"] = time.monotonic() - begin
        if process.returncode == 0 and path.exists():
            return record | {"status": "done", "report": json.loads(path.read_text())}
    finally:
        end_group(process)  # compilers work in children, and tests start programs
        shutil.rmtree(temporary, ignore_errors=True)
    lines = tail(output)
    own = [line for line in lines if line.startswith(f"{variant.module}: ")]  # a backend may write after it
    status = "refused" if process.returncode == Refusal.exit_code else "failed"
    line = (own or lines or [f"exit code {process.returncode}"])[-1]
    return record | {"status": status, "line": line, "output": lines}


def command_of(variant: Variant) -> str:
    """What to type for a variant."""
    return shlex.join(["python", *variant.words])


def end_group(process: subprocess.Popen) -> None:
    """End what is left of a variant."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(output: str) -> list[str]:
    """The last lines; a compiler gives its reason far above its end."""
    return [line for line in output.splitlines() if line.strip()][-300:]


def sweep(wanted: list[Variant], minutes: float, folder: Path, done: Callable[[dict], None]) -> None:
    """Run variants until the time is up and hand over each one's record; the rest have the status "not run"."""
    deadline = time.monotonic() + 60 * minutes
    for variant in wanted:
        left = deadline - time.monotonic()
        if left >= LEAST_S:
            done(run(variant, min(left, variant.limit_s), folder))
        else:
            done({"name": variant.name, "module": variant.module, "status": "not run", "line": "the time was up"})


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter and are installed."""
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and overrides for every variant. Raises: Refusal."""
    parser = Options("python -m bench.sweep", __doc__)
    parser.add_argument("--minutes", type=between(0.01, 1e6, float), default=9.0)
    json_option.json_option(parser)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--continue", action="store_true", dest="goes_on")
    parser.add_argument("--only", type=listed(), default=[])
    parser.add_argument("--counts", type=Path, default=COUNTS)
    args, overrides = parser.parse_known_args(argv)
    if args.goes_on and args.json in (None, json_option.STDOUT):
        raise Refusal("--continue needs --json=FILE.json, the report that is to be completed")
    names = [variant.name for variant in variants(args.small, Path())]
    unknown = [name for name in args.only if name not in names]
    if unknown:
        raise Refusal(f"unknown variant {unknown[0]!r}; known are {', '.join(names)}")
    odd = [text for text in overrides if not (text.startswith("--") and "=" in text)]
    if odd:
        raise Refusal(f"argument {odd[0]!r} is not of the form --section.key=value")
    return args, overrides


def chosen(args: argparse.Namespace, overrides: list[str]) -> list[Variant]:
    """The variants that the options name, with their overrides."""
    beside = args.json if args.json not in (None, json_option.STDOUT) else Path(tempfile.gettempdir()) / "sweep.json"
    found = []
    for variant in variants(args.small, beside.absolute().with_name("gpu_tests.jsonl")):
        own = () if variant.module == "bench.device_tests" else overrides
        if not args.only or variant.name in args.only:
            found.append(replace(variant, args=(*variant.args, *own)))
    return found


def earlier(path: Path, wanted: list[Variant]) -> tuple[dict[str, dict], list[dict]]:
    """The records of a report by name, and apart those of other sources, another machine or other arguments."""
    if not path.exists():
        return {}, []
    report = json.loads(path.read_text())
    now = {variant.name: variant for variant in wanted}
    known = {}
    outdated = report["outdated"]
    for record in report["runs"]:
        variant = now.get(record["name"])
        if variant is None or record.get("sources") is None or is_of(record, variant):
            known[record["name"]] = record
        else:
            outdated.append(record)
    return known, outdated


def is_of(record: dict, variant: Variant) -> bool:
    """Whether a variant would make this record again. Tests keep their outcomes in a file that may lie elsewhere."""
    has_same_words = variant.module == "bench.device_tests" or record["command"] == command_of(variant)
    return has_same_words and (record["sources"], record["machine"]) == (variant.sources, common.machine())


def has_failed(record: dict) -> bool:
    """Whether a variant broke, or one of its tests did."""
    counts = record.get("report", {}).get("counts", {})
    return record["status"] == "failed" or "failed" in counts or "died" in counts


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    wanted, counts = chosen(args, overrides), Counts(read(args.counts))
    if args.list:
        for variant in wanted:
            print(f"{variant.name:<28} {shlex.join(['python', *variant.words])}")
        return 0
    if not args.small and not torch.accelerator.is_available():
        raise Refusal("torch finds no accelerator here; --small runs the micro model and the tests on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no variant outlives us
    known, outdated = earlier(args.json, wanted) if args.goes_on else ({}, [])
    report = common.head("bench.sweep", argv) | {
        "versions": versions(),
        "runs": [*known.values()],
        "outdated": outdated,
    }

    def done(record: dict) -> None:
        if record["status"] != "not run" or record["name"] not in known:
            known[record["name"]] = record
        report["runs"] = [*known.values()]
        if args.json != json_option.STDOUT:  # a call that is cut short keeps what it has
            json_option.give(report, args.json)
        with json_option.text_beside(args.json):
            print(f"{record['name']}: {record['status']}", flush=True)
            show_row(record, counts)

    status = {name: record["status"] for name, record in known.items()}
    left = [variant for variant in wanted if status.get(variant.name) != "done"]
    left.sort(key=lambda one: one.module != "bench.device_tests" and status.get(one.name) in AGAIN)  # those last
    with workplace() as folder, json_option.text_beside(args.json):
        print(lacks(), flush=True)
        sweep(left, args.minutes, folder, done)
    devices = [record["report"]["device"] for record in known.values() if "report" in record]
    report["device"] = next(iter(devices), report["device"])
    head = f"{report['command']}  commit {report['commit'] or 'unknown'}, sources {sources()}, {report['device']}"
    json_option.show(f"{head}\n{table(report['runs'], counts)}", report, args.json)
    broken = [record["name"] for record in report["runs"] if has_failed(record)]
    if broken:
        raise Fault(f"failed: {', '.join(broken)}; the report holds what they printed last", alone=True)
    return 0


def show_row(record: dict, counts: Counts) -> None:
    """Print the lines of a record. A fault in them costs a table, and no figures."""
    try:
        print(table([record], counts), flush=True)
    except Exception as error:
        print(f"  its lines cannot be shown: {type(error).__name__}: {error}", flush=True)


def lacks() -> str:
    """Which packages are missing that variants use, and how to bring them."""
    uses = {"mlperf_logging": ("mlperf-logging", "tests that start train.py"), "diffusers": ("diffusers", "a peer")}
    missing = [use for module, use in uses.items() if importlib.util.find_spec(module) is None]
    lines = [
        f"{package} is missing, so {what} will be left out; pip install --no-deps --target FOLDER {package} and"
        " PYTHONPATH=FOLDER bring it"
        for package, what in missing
    ]
    return "\n".join(lines or ["all packages are here"])


if __name__ == "__main__":
    cli.leave(cli.run("bench.sweep", __doc__, main, sys.argv[1:]))
