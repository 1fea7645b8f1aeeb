"""Every figure of one machine in one call: variants of a step, each in a process of its own, the most important first.

    python -m bench.sweep --minutes 9 --json bench/results/NAME.json
    python -m bench.sweep --small --json /tmp/sweep.json                    the micro model, for the CPU
    python -m bench.sweep --list | --only NAME[,NAME]

Each variant shows its figures as it ends, with the time that results/static_counts.json predicts. A variant that is
refused, such as one whose key this checkout does not know, stands in the table with the reason.
A call goes on with the report that it finds. It keeps a record if sources, machine and command are those that the
record was made with; others stay in the file, apart.
Exit codes: 0 the table is whole or the time was up, 2 refused, 3 a variant broke or a test failed.
"""

import argparse
import contextlib
import fcntl
import importlib
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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from bench import common
from bench.sources import FIGURES, ROOT, TESTS, sources
from bench.static.predicted import Counts
from bench.sweep_table import table
from flux_ref.errors import Fault, Refusal
from flux_ref.run import cli
from flux_ref.run.options import Options, between, listed
from tools.shared import json_option

LEAST_S = 60.0  # a variant is not begun with less time left
TESTS_S = 300.0  # for a row of tests of a device, which compile; a test that hangs ends before, after LIMIT_S
AGAIN = ("failed", "refused", "too large", "out of time")  # what runs again, after all others
ABORT_S = 3.0  # for writing down where it was
KEPT_LINES = 300  # of its output; a compiler gives its reason far above its end
MAY_LACK = {"mlperf_logging": "tests that start train.py", "diffusers": "the race against it"}
PACKAGES = ("torch", "triton", "diffusers", "numpy", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
FULL, MICRO = "configs/schnell_gbs512.toml", "tests/micro.toml"
COUNTS = ROOT / "bench" / "results" / "static_counts.json"
DEVICE_TESTS = "bench.device_tests"
TESTS_OF = {"graphs": ("test_gpu_graph",), "devices": ("test_gpu", "test_fp8", "test_native")}  # files in tests/speed/


@dataclass(frozen=True)
class Variant:
    """One row: a module of bench and its arguments, and the seconds it may take."""

    name: str
    module: str
    args: tuple[str, ...]
    limit_s: float = 240.0

    @property
    def command(self) -> str:
        """What to type for it."""
        return shlex.join(["python", "-m", self.module, *self.args])

    def key(self) -> dict[str, str]:
        """What a figure depends on. A record with another key is outdated."""
        own = sources(TESTS if self.module == DEVICE_TESTS else FIGURES)
        return {"command": self.command, "sources": own, "machine": common.machine()}


def variants(small: bool) -> list[Variant]:
    """All variants in the order of what they decide: graphs, ceiling, parts, the whole model, the rest.

    part: a real step on one rank of 4 double and 8 single blocks of full width; whole: all blocks, by bench.whole.
    """
    config = ("--config", MICRO if small else FULL)
    cut = () if small else ("--model.double_blocks=4", "--model.single_blocks=8")
    times = ("--steps", "2", "--warmup", "1") if small else ("--steps", "10", "--warmup", "3")
    usual, others = (4, (2,)) if small else (32, (4, 8, 16, 64))
    few, more, larger, evals = ("2", "4", "4", "8") if small else ("8", "16", "16,32", "32,64")
    pair = ("--model.double_blocks=1", "--model.single_blocks=1")
    plain = ("--parallel.compile=false", "--parallel.activation_budget=1.0")  # whatever the config says
    compiled, half = "--parallel.compile=true", "--parallel.activation_budget=0.5"
    flash = f"--parallel.attention={'auto' if small else 'flash'}"  # which knows no fp32
    eager, graph = "--graph.enabled=off", "--graph.enabled=on"
    dynamic, delayed = "--precision.preset=fp8", ("--precision.preset=fp8_delayed", "--precision.dynamic_steps=0")

    def tests(name: str) -> Variant:
        files = [f"tests/speed/{file}.py" for file in TESTS_OF[name]]
        stand_in = ["--stand-in"] if small else []
        return Variant(f"tests {name}", DEVICE_TESTS, (*stand_in, *files), TESTS_S)

    def part(name: str, *options: str, rows: int = usual) -> Variant:
        batch = (f"--train.global_batch={rows}", f"--train.micro_batch={rows}")
        own = (*config, *cut, *times, "--synthetic", *batch, *plain, eager, *options)
        return Variant(f"part {name}", "bench.step", own)

    def whole(name: str, micros: str, *options: str) -> Variant:
        return Variant(f"whole {name}", "bench.whole", (*config, "--micro-batches", micros, *plain, *options))

    def peer(name: str, *options: str) -> Variant:
        batch = (f"--train.global_batch={usual}", f"--train.micro_batch={usual}")
        return Variant(f"peer {name}", "bench.race", (*config, *pair, *times, *batch, *plain, *options))

    return [
        tests("graphs"),
        Variant("ceiling", "bench.ceiling", (*config, "--micro-batches", f"{few},{more}")),
        part("eager"),
        part("compiled", compiled),
        part("compiled graph", compiled, graph),
        part("compiled graph fp8", compiled, graph, *delayed),
        whole("compiled", few, compiled),
        part("kernels", compiled, "--profile"),
        tests("devices"),
        part("compiled fp8 delayed", compiled, *delayed),
        part("kernels fp8", compiled, *delayed, "--profile"),
        whole("compiled fp8", few, compiled, *delayed),
        whole("compiled larger", more, "--evaluate", evals, compiled),
        peer("compiled", compiled),
        part("compiled fp8 dynamic", compiled, dynamic),
        part("compiled flash", compiled, flash),
        part("compiled k=2", compiled, "--parallel.region_blocks=2"),
        part("compiled k=4", compiled, "--parallel.region_blocks=4"),
        whole("compiled budget 0.5", larger, compiled, half),
        part("compiled budget 0.5", compiled, half),
        peer("eager"),
        whole("eager", few),
        *(part(f"compiled batch {rows}", compiled, rows=rows) for rows in others),
    ]


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder for compiled code and temporary files.

    All variants and later calls share the compiler's files, or most would compile the same graphs again.
    Raises: Refusal if another sweep is at work, since two at once measure each other.
    """
    folder = Path(tempfile.gettempdir()) / f"bench_sweep_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refusal(f"another sweep is at work in {folder}; wait for its end") from None
        yield folder
        shutil.rmtree(folder / "temporary", ignore_errors=True)


def run(variant: Variant, timeout_s: float, folder: Path, outcomes: Path) -> dict:
    """Run a variant in a process group of its own; its record: status, seconds, and the report or a line that says why.

    status: done, refused, failed, "too large" for the device, "out of time" or, where only this call's time was up,
    "not run".
    folder: of `workplace`. outcomes: the file of bench.device_tests.
    """
    temporary = folder / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(exist_ok=True)  # a dying child may have written into it meanwhile
    path = temporary / "report.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", variant.module, *variant.args]
    command += [f"--outcomes={outcomes}"] if variant.module == DEVICE_TESTS else []
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled", "TRITON_CACHE_DIR": f"{folder}/compiled/triton"}
    record = {"name": variant.name, "module": variant.module} | variant.key()
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, f"--json={path}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONFAULTHANDLER": "1", "TMPDIR": str(temporary)} | compiled,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=common.end_with_parent,
    )
    is_late = False
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        is_late = True
        os.killpg(process.pid, signal.SIGABRT)  # each process says where it is
        time.sleep(ABORT_S)
        end_group(process)
        output, _ = process.communicate()
    finally:
        end_group(process)  # compilers work in children, and tests start programs
    record["seconds"] = time.monotonic() - begin
    if not is_late and process.returncode == 0 and path.exists():
        return record | {"status": "done", "report": json.loads(path.read_text())}
    lines = [line for line in output.splitlines() if line.strip()][-KEPT_LINES:]
    if not is_late:
        own = [line for line in lines if line.startswith(f"{variant.module}: ")]  # a backend may write after it
        status = "refused" if process.returncode == Refusal.exit_code else "failed"
        reason = (own or lines or [f"exit code {process.returncode}"])[-1]
        if "out of memory" in reason:
            status = "too large"
    elif timeout_s >= variant.limit_s:
        status, reason = "out of time", f"ended after {timeout_s:.0f} s, its limit"
    else:
        status, reason = "not run", f"ended after {timeout_s:.0f} s, as the call's time was up"
    return record | {"status": status, "line": reason, "output": lines}


def end_group(process: subprocess.Popen) -> None:
    """End what is left of a variant."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def sweep(wanted: list[Variant], minutes: float, folder: Path, outcomes: Path, done: Callable[[dict], None]) -> None:
    """Run variants until the time is up and hand over each one's record; the rest have the status "not run"."""
    deadline = time.monotonic() + 60 * minutes
    for variant in wanted:
        left = deadline - time.monotonic()
        if left >= LEAST_S:
            done(run(variant, min(left, variant.limit_s), folder, outcomes))
        else:
            done({"name": variant.name, "module": variant.module, "status": "not run", "line": "the time was up"})


def missing_packages() -> list[str]:
    """A line for each package of MAY_LACK that is missing: what it costs, and what brings it without a registry."""
    lines = []
    for module, cost in MAY_LACK.items():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            name = module.replace("_", "-")
            how = f"pip install --no-deps --target FOLDER {name} and PYTHONPATH=FOLDER bring it"
            lines.append(f"{name} is missing, so {cost} will be left out; {how}")
    return lines


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter and are installed."""
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[Variant]]:
    """The options, and the variants that they name. Raises: Refusal."""
    parser = Options("python -m bench.sweep", __doc__)
    parser.add_argument("--minutes", type=between(0.01, 1e6, float), default=9.0)
    json_option.json_option(parser)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", type=listed(), default=[])
    args = parser.parse_args(argv)
    found = variants(args.small)
    names = [variant.name for variant in found]
    for name in args.only:
        if name not in names:
            raise Refusal(f"unknown variant --only={name}; known are {', '.join(names)}")
    if not args.list and args.json in (None, json_option.STDOUT):
        raise Refusal("bench.sweep needs --json=FILE.json: the report, with which the next call goes on")
    return args, [variant for variant in found if not args.only or variant.name in args.only]


def earlier(path: Path, small: bool) -> tuple[dict[str, dict], list[dict]]:
    """The records of a report by name. Apart, without what they printed, are those with another key."""
    if not path.exists():
        return {}, []
    report = json.loads(path.read_text())
    keys = {variant.name: variant.key() for variant in variants(small)}
    known, outdated = {}, report["outdated"]
    for record in report["runs"]:
        key = keys.get(record["name"])
        if record["status"] == "not run":
            continue
        if key and key.items() <= record.items():
            known[record["name"]] = record
        else:
            outdated.append({name: value for name, value in record.items() if name != "output"})
    return known, outdated


def has_failed(record: dict) -> bool:
    """Whether a variant broke, or one of its tests did."""
    counts = record.get("report", {}).get("counts", {})
    return record["status"] == "failed" or "failed" in counts or "died" in counts


def main(argv: list[str]) -> int:
    args, wanted = parse(argv)
    if args.list:
        for variant in wanted:
            print(f"{variant.name:<28} {variant.command}")
        return 0
    if not args.small and not torch.accelerator.is_available():
        raise Refusal("torch finds no accelerator here; --small runs the micro model and the tests on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no variant outlives us
    known, outdated = earlier(args.json, args.small)
    counts = Counts(json.loads(COUNTS.read_text()))
    report = common.head("bench.sweep", argv) | {"versions": versions(), "runs": [], "outdated": outdated}

    def done(record: dict) -> None:
        if record["status"] != "not run" or record["name"] not in known:
            known[record["name"]] = record
        report["runs"] = [*known.values()]
        devices = [one["report"]["device"] for one in report["runs"] if "report" in one]
        report["device"] = (devices or [report["device"]])[0]
        json_option.give(report, args.json)  # a call that is cut short keeps what it has
        print(f"{record['name']}: {record['status']}", flush=True)
        show([record], counts)

    status = {name: record["status"] for name, record in known.items()}
    left = [variant for variant in wanted if status.get(variant.name) != "done"]
    left.sort(key=lambda one: one.module != DEVICE_TESTS and status.get(one.name) in AGAIN)  # those last
    for line in missing_packages():
        print(line, flush=True)
    with workplace() as folder:
        sweep(left, args.minutes, folder, args.json.absolute().with_name("gpu_tests.jsonl"), done)
    print(f"{report['command']}  commit {report['commit'] or 'unknown'}, sources {sources()}, {report['device']}")
    show([*known.values()], counts)
    broken = [name for name, record in known.items() if has_failed(record)]
    if broken:
        raise Fault(f"failed: {', '.join(broken)}; the report holds what they printed last", alone=True)
    return 0


def show(records: list[dict], counts: Counts) -> None:
    """Print the lines of records. A fault in them costs a table, and no figures."""
    try:
        print(table(records, counts), flush=True)
    except Exception as error:
        print(f"  the lines cannot be shown: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    cli.leave(cli.run("bench.sweep", __doc__, main, sys.argv[1:]))
