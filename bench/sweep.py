"""Every figure of one machine in one call: variants of a step, each in a process of its own, the most important first.

    python -m bench.sweep --minutes 9 --json bench/results/NAME.json
    python -m bench.sweep --minutes 9 --json bench/results/NAME.json --continue      what the last call had no time for
    python -m bench.sweep --small                                                    the micro model, for the CPU
    python -m bench.sweep --list | --only NAME[,NAME]

A variant that is refused, such as one whose key this checkout does not know, stands in the table with the reason.
--section.key=value overrides every variant's config.
Exit codes: 0 the table is whole or the time was up, 2 refused, 3 a variant broke.
"""

import argparse
import ctypes
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from bench import common
from bench.common import ROOT
from flux_ref.errors import Fault, Refusal
from flux_ref.run import cli, json_option
from flux_ref.run.options import Options, between, listed

LEAST_S = 15.0  # a variant is not begun with less time left
PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h
ABORT_S = 3.0  # for writing down where it was
PACKAGES = ("torch", "triton", "diffusers", "torchtitan", "numpy", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
FULL, MICRO = "configs/schnell_gbs512.toml", "tests/micro.toml"
COLUMNS = {"samples/s": ".2f", "ms": ".2f", "TFLOP/s": ".4g", "of ceiling": ".1%", "GB": ".1f"}  # name: format


@dataclass(frozen=True)
class Variant:
    """One row: a module of bench and its arguments, and the seconds it may take."""

    name: str
    module: str
    args: tuple[str, ...]
    limit_s: float = 240.0

    @property
    def words(self) -> list[str]:
        """The command after `python`."""
        return ["-m", self.module, *self.args]


def variants(small: bool) -> list[Variant]:
    """All variants in the order of their importance: ceiling, whole model, graphs, kernels, peers, the rest.

    part: a real step on one rank of 4 double and 8 single blocks of full width; whole: all blocks, by bench.whole.
    """
    config = ("--config", MICRO if small else FULL)
    cut = () if small else ("--model.double_blocks=4", "--model.single_blocks=8")
    pair = ("--model.double_blocks=1", "--model.single_blocks=1")
    times = ("--steps", "2", "--warmup", "1") if small else ("--steps", "10", "--warmup", "3")
    usual, others = (4, (2,)) if small else (32, (4, 8, 16, 64))
    micros, larger, evals = ("2,4", "4", "8") if small else ("8,16", "16,32", "32,64")
    plain = ("--parallel.compile=false", "--parallel.activation_budget=1.0")  # whatever the config says
    compiled, half = "--parallel.compile=true", "--parallel.activation_budget=0.5"
    eager, graph = "--graph.enabled=off", "--graph.enabled=on"
    dynamic, delayed = "--precision.preset=fp8", ("--precision.preset=fp8_delayed", "--precision.dynamic_steps=0")

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
        Variant("ceiling", "bench.ceiling", (*config, "--micro-batches", micros)),
        whole("compiled", micros, "--evaluate", evals, "--profile", compiled),
        whole("compiled fp8", micros, "--profile", compiled, *delayed),
        part("compiled", compiled),
        part("compiled graph", compiled, graph),
        part("compiled fp8 delayed", compiled, *delayed),
        part("compiled graph fp8", compiled, graph, *delayed),
        kernels("kernels", compiled),
        kernels("kernels fp8", compiled, *delayed),
        Variant("peers compiled", "bench.race", (*config, *pair, *times, *batch(usual), *plain, compiled, "--compile")),
        part("eager"),
        part("compiled fp8 dynamic", compiled, dynamic),
        part("compiled k=2", compiled, "--parallel.region_blocks=2"),
        part("compiled k=4", compiled, "--parallel.region_blocks=4"),
        whole("compiled budget 0.5", larger, compiled, half),
        part("compiled budget 0.5", compiled, half),
        Variant("peers eager", "bench.race", (*config, *pair, *times, *batch(usual), *plain)),
        whole("eager", micros.split(",")[0], "--no-ceiling"),
        *(part(f"compiled batch {rows}", compiled, rows=rows) for rows in others),
    ]


def run(variant: Variant, timeout_s: float) -> dict:
    """Run a variant in a process group of its own; its record: status, seconds, and the report or a line that says why.

    status: done, refused, failed or "out of time".
    """
    record = {"name": variant.name, "module": variant.module, "command": shlex.join(["python", *variant.words])}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench_sweep_") as folder:
        path = Path(folder) / "report.json"
        output_to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, *variant.words, "--json", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=end_with_parent, **output_to)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it says where it is
            time.sleep(ABORT_S)
            os.killpg(process.pid, signal.SIGKILL)
            late = {"status": "out of time", "seconds": timeout_s, "line": f"ended after {timeout_s:.0f} s"}
            return record | late | {"output": tail(process.communicate()[0])}
        finally:
            if process.poll() is None:  # when we are told to stop; compilers work in children
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        record["seconds"] = time.monotonic() - begin
        if process.returncode == 0 and path.exists():
            return record | {"status": "done", "report": json.loads(path.read_text())}
    lines = tail(output)
    own = [line for line in lines if line.startswith(f"{variant.module}: ")]  # a backend may write after it
    status = "refused" if process.returncode == Refusal.exit_code else "failed"
    line = (own or lines or [f"exit code {process.returncode}"])[-1]
    return record | {"status": status, "line": line, "output": lines}


def end_with_parent() -> None:
    """In a variant: end when the sweep is killed, or the next call would measure beside this variant."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tail(output: str) -> list[str]:
    """The last lines; a compiler gives its reason far above its end."""
    return [line for line in output.splitlines() if line.strip()][-300:]


def sweep(wanted: list[Variant], minutes: float, done: Callable[[dict], None]) -> None:
    """Run variants until the time is up and hand over each one's record; the rest have the status "not run"."""
    deadline = time.monotonic() + 60 * minutes
    for variant in wanted:
        left = deadline - time.monotonic()
        if left >= LEAST_S:
            done(run(variant, min(left, variant.limit_s)))
        else:
            done({"name": variant.name, "module": variant.module, "status": "not run", "line": "the time was up"})


Row = tuple[str, tuple, str]  # name, values of COLUMNS or None, a note


def rows(record: dict) -> list[Row]:
    """The lines of a record in the table."""
    if "report" not in record:
        return [(record["name"], (), f"{record['status']}: {record['line']}")]
    return ROWS[record["module"]](record["name"], record["report"])


def step_rows(name: str, report: dict) -> list[Row]:
    tflop = report["tflop"]
    values = (report["samples_per_s"], report["step_ms"]["median"], tflop["per_s_per_rank"], tflop["share_of_ceiling"])
    return [(name, (*values, report["peak_memory_gb"]), "ceiling: best square")]


def whole_rows(name: str, report: dict) -> list[Row]:
    lines, keys = [], ("samples_per_s", "ms", "tflop_per_s", "share_of_ceiling", "peak_memory_gb")
    for part in report["runs"]:
        note = part.get("failed") or report["optimizer"].get("failed") or f"without {report['left_out']}"
        note += f"; {kernel_shares(part['kernels'])}" if "kernels" in part else ""
        lines.append((f"{name}, batch {part['micro_batch']}", tuple(map(part.get, keys)), note))
    for part in report["evaluation"]:
        lines.append((f"{name}, validation {part['batch']}", tuple(map(part.get, keys)), part.get("failed", "")))
    return lines


def ceiling_rows(name: str, report: dict) -> list[Row]:
    lines = []
    for part in report["ceilings"]:
        for kind, title in (("plain", part["dtype"]), ("fp8", "fp8")):
            values, note = (), part[kind]
            if isinstance(note, dict):
                values = (None, note["ms"], note["tflop_per_s"])
                note = f"best square {note['square_tflop_per_s']:.4g}"
            lines.append((f"{name} {title}, batch {part['micro_batch']}", values, note))
    return lines


def kernel_rows(name: str, report: dict) -> list[Row]:
    return [(name, (None, report["step_ms"]), kernel_shares(report))]


def kernel_shares(report: dict) -> str:
    shares = {kind: part["share"] for kind, part in report["classes"].items()} | {"idle": report["idle"]["share"]}
    return ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items() if share >= 0.001)


def race_rows(name: str, report: dict) -> list[Row]:
    lines = [(f"{name}, {peer}", (), reason) for peer, reason in report["refused"].items()]
    for peer, part in report["peers"].items():
        note = f"{part['ratio']['step']:.3f} times ours ({part['ms']['ours']['step']:.2f} ms)"
        lines.append((f"{name}, {peer} {part['version']}", (None, part["ms"]["peer"]["step"]), note))
    return lines


ROWS = {
    **{"bench.step": step_rows, "bench.whole": whole_rows, "bench.ceiling": ceiling_rows},
    **{"bench.kernels": kernel_rows, "bench.race": race_rows},
}


def table(report: dict) -> str:
    """The report for the terminal."""
    lines = [row for record in report["runs"] for row in rows(record)]
    width = max(len(name) for name, _, _ in lines)
    head = f"{'variant':<{width}} " + " ".join(f"{column:>10}" for column in COLUMNS)
    shown = [f"{report['command']}  commit {report['commit'] or 'unknown'}, {report['device']}", head]
    for name, values, note in lines:
        texts = ("" if value is None else f"{value:{form}}" for value, form in zip(values, COLUMNS.values()))
        cells = "".join(f"{text:>11}" for text in texts)
        shown.append(f"{name:<{width}}{cells:<{11 * len(COLUMNS)}}  {note}".rstrip())
    return "\n".join(shown)


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
    args, overrides = parser.parse_known_args(argv)
    if args.goes_on and args.json in (None, json_option.STDOUT):
        raise Refusal("--continue needs --json=FILE.json, the report that is to be completed")
    names = [variant.name for variant in variants(args.small)]
    unknown = [name for name in args.only if name not in names]
    if unknown:
        raise Refusal(f"unknown variant {unknown[0]!r}; known are {', '.join(names)}")
    odd = [text for text in overrides if not (text.startswith("--") and "=" in text)]
    if odd:
        raise Refusal(f"argument {odd[0]!r} is not of the form --section.key=value")
    return args, overrides


def earlier(path: Path, commit: str) -> dict[str, dict]:
    """The records of a report, by name. Raises: Refusal if it is of another commit."""
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    if report["commit"].rstrip("+") != commit.rstrip("+"):  # the report itself may be a change
        raise Refusal(f"{path} is of commit {report['commit']}, this is {commit}; delete it or give another --json")
    return {record["name"]: record for record in report["runs"]}


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    wanted = [variant for variant in variants(args.small) if not args.only or variant.name in args.only]
    wanted = [replace(variant, args=(*variant.args, *overrides)) for variant in wanted]
    if args.list:
        for variant in wanted:
            print(f"{variant.name:<28} {shlex.join(['python', *variant.words])}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no variant outlives us
    report = common.head("bench.sweep", argv) | {"versions": versions(), "runs": []}
    known = earlier(args.json, report["commit"]) if args.goes_on else {}

    def add(record: dict) -> None:
        report["runs"].append(record)
        report["device"] = record.get("report", report)["device"]

    def done(record: dict) -> None:
        add(record)
        with json_option.text_beside(args.json):
            print(f"{record['name']}: {record['status']} {record.get('line', '')}".rstrip(), flush=True)
        if args.json != json_option.STDOUT:  # a call that is cut short keeps what it has
            json_option.give(report, args.json)

    left = []
    for variant in wanted:
        is_known = known.get(variant.name, {}).get("status") in ("done", "refused")
        add(known[variant.name]) if is_known else left.append(variant)
    left.sort(key=lambda variant: known.get(variant.name, {}).get("status") in ("failed", "out of time"))  # those last
    sweep(left, args.minutes, done)
    json_option.show(table(report), report, args.json)
    broken = [record["name"] for record in report["runs"] if record["status"] == "failed"]
    if broken:
        raise Fault(f"failed: {', '.join(broken)}; the report holds what they printed last", alone=True)
    return 0


if __name__ == "__main__":
    cli.leave(cli.run("bench.sweep", __doc__, main, sys.argv[1:]))
