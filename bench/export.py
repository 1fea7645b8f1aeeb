"""What it takes to bring weights from one form into another: memory, seconds, bytes; bench/README.md explains them.

    python -m bench.export                                          a run of 4 GB of weights
    python -m bench.export --gigabytes 24 --folder /scratch --json bench/results/NAME.json

Blocks of schnell's width are added up to --gigabytes G (4) of fp32 weights. A checkpoint of them is exported, and what
came out is imported, each by python -m tools.weights in a process of its own. --folder DIR (the system's folder for
temporary files) needs room for three times G. Linux only.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from math import prod
from pathlib import Path

import torch

from bench import common
from bench.sources import ROOT
from flux_ref import config_file
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Fault
from flux_ref.formats import safetensors_io
from flux_ref.model import parameter_table
from flux_ref.run import cli
from flux_ref.run.options import Options, between
from tools.shared import json_option

PIECE_BYTES = 64 << 20  # of random values at a time
EXPORTS = (("bfl", "fp32"), ("bfl", "bf16"), ("diffusers", "bf16"))
# Runs argv[1] in a process that then says how long it took and how much memory was resident at most.
CHILD = """
import json, re, sys, time
begin = time.perf_counter()
exec(sys.argv.pop(1))
seconds = time.perf_counter() - begin
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(json.dumps({"seconds": seconds, "peak_memory_gb": peak * 1024 / 1e9}))
"""
IMPORT_TORCH, IMPORT_WEIGHTS = "import torch", "from tools.weights import commands"
COMMAND = f"{IMPORT_WEIGHTS}; begin = time.perf_counter(); assert commands.main(sys.argv[1:]) == 0"


def main(argv: list[str]) -> int:
    parser = Options("python -m bench.export", __doc__)
    parser.add_argument("--gigabytes", type=between(1e-9, 1e6, float), default=4.0)
    parser.add_argument("--folder", type=Path)
    json_option.json_option(parser)
    args = parser.parse_args(argv)
    model = model_of(args.gigabytes * 1e9)
    report = common.head("bench.export", argv) | {"parameters": size_of(model) // 4, "fp32_gb": size_of(model) / 1e9}
    report |= {"blocks": [model.double_blocks, model.single_blocks], "safetensors": version("safetensors")}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report |= measure(model, Path(folder))
    common.give(report, args.json)
    return 0


def size_of(model: ModelConfig) -> int:
    """Bytes of its weights in fp32."""
    return 4 * sum(prod(shape) for shape in parameter_table(model).values())


def model_of(total: float) -> ModelConfig:
    """Blocks of schnell's width, one double to two single ones as there, until the weights in fp32 fill `total`."""
    blocks = [1, 1]
    while size_of(model := ModelConfig(double_blocks=blocks[0], single_blocks=blocks[1])) < total:
        blocks[blocks[1] < 2 * blocks[0]] += 1
    return model


def measure(model: ModelConfig, folder: Path) -> dict:
    """Import a file of random weights as a checkpoint, export the checkpoint in every way and import each result."""
    config = folder / "config.toml"
    config.write_text(config_file.dump(Config(name="export", model=model)))
    first, saved, out, back = (folder / name for name in ("first.safetensors", "saved", "out", "back"))
    write_random(first, model)
    baselines = {name: child(name)["peak_memory_gb"] for name in (IMPORT_TORCH, IMPORT_WEIGHTS)}
    step(first, saved, "import", f"--config={config}")
    first.unlink()
    steps = {}
    for layout, dtype in EXPORTS:
        name = f"{layout} {dtype}"
        steps[f"export {name}"] = step(saved, out, "export", f"--format={layout}", f"--dtype={dtype}")
        steps[f"import {name}"] = step(out, back, "import", f"--config={config}")
        for path in (out, back):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for figures in steps.values():
        figures["above_torch_gb"] = figures["peak_memory_gb"] - baselines[IMPORT_TORCH]
    return {"baseline_memory_gb": baselines, "steps": steps}


def write_random(path: Path, model: ModelConfig) -> None:
    """Random weights in BFL's layout, written a few rows at a time."""
    table = parameter_table(model)

    def pieces() -> Iterator[torch.Tensor]:
        for rows, *rest in table.values():
            many = max(1, PIECE_BYTES // (4 * prod(rest)))
            for row in range(0, rows, many):
                yield torch.rand(min(many, rows - row), *rest)

    safetensors_io.write(path, {name: ("F32", shape) for name, shape in table.items()}, {"format": "pt"}, pieces())


def step(source: Path, out: Path, name: str, *options: str) -> dict:
    """One command and what it took."""
    figures = child(COMMAND, name, str(source), str(out), *options)
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else [out]
    written_gb = sum(path.stat().st_size for path in files) / 1e9
    return figures | {"written_gb": written_gb, "gb_per_s": written_gb / figures["seconds"]}


def child(code: str, *argv: str) -> dict:
    """Run code in a new process: {"seconds", "peak_memory_gb"}. Raises: Fault."""
    command = [sys.executable, "-c", CHILD, code, *argv]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Fault(f"{code} {shlex.join(argv)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    cli.leave(cli.run("bench.export", __doc__, main, sys.argv[1:]))
