"""Compare configs A and B by runs in pairs: one seed, so equal samples, noise and dropped captions, and
equal times unless the configs draw them from other distributions.

    python -m tools.compare A.toml B.toml [--seeds=3] [--out=runs/compare] [--ranks=1] [--section.key=value ...]

Trains FOLDER/a_0, b_0, a_1 and so on, from train.seed on; overrides hold for both. The same command goes on after a
stop. Other configs need another --out. FOLDER/compare.json and compare.png hold B - A.
Exit codes: 0 done, 1 a run failed or diverged, 2 refused.
"""

import math
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean, median, stdev, variance
from subprocess import Popen

import numpy as np

from flux_ref import config, config_file, config_rules
from flux_ref.errors import Refusal
from flux_ref.formats.files import whole, write_whole
from flux_ref.formats.jsonl import outcome, records
from flux_ref.run import options
from flux_ref.run.progress import progress
from tools.shared import json_option
from tools.shared.naming import naming

SHARED = (  # keys that decide what a run draws and when it records
    *("data.*", "eval.*", "model.text_tokens", "model.*_dim", "model.latent_*"),
    *("train.seed", "train.max_samples", "train.global_batch", "train.log_every_samples"),
)
SHOWN = ("a", "b", "b - a", "stderr", "unpaired stderr", "p", "seeds")  # figures of a line
LABELS = {"seeds": "seeds needed"}


def paired(a: Sequence[float], b: Sequence[float]) -> dict[str, object]:
    """Means of a and b; b - a with a[i] and b[i] of one seed, stderr, p of a t test. None: one pair cannot tell it."""
    n = len(a)
    each = [own - other for own, other in zip(b, a, strict=True)]
    found = {"a": fmean(a), "b": fmean(b), "b - a": fmean(each), "each": each}
    found |= dict.fromkeys(SHOWN[3:])
    if n > 1:
        found["stderr"] = stdev(each) / n**0.5
        found["unpaired stderr"] = ((variance(a) + variance(b)) / n) ** 0.5
        from scipy.special import stdtr  # an optional package

        t = abs(found["b - a"]) / (found["stderr"] or 1e-300)
        found["p"] = 2 * stdtr(n - 1, -t)  # both tails of Student's distribution
        if t:  # 4 of 5 see it: 2.8 = z(0.975) + z(0.8), 1.92 = z(0.975)^2 / 2 (Guenther 1981)
            found["seeds"] = math.ceil(n * (2.8 / t) ** 2 + 1.92)
    return found


def compare(a: list[Path], b: list[Path]) -> tuple[dict[str, dict], str]:
    """What `paired` finds in the runs of a and b, by samples or time, and a verdict. Raises: Refusal."""
    steps = []
    tests = []
    for run in (*a, *b):
        steps.append(records(run / "metrics.jsonl", figures=("loss", "samples_per_s")))
        tests.append({test["samples"]: test for test in records(run / "eval.jsonl", figures=("val_loss",))})
    ends = sorted(set.intersection(*map(set, tests)))
    if not ends or not all(steps):
        raise Refusal(f"{a[0]}, {b[0]} and the others share no evaluation; train all to one train.max_samples")

    def pair(of_runs: Sequence[float]) -> dict[str, object]:
        return paired(of_runs[: len(a)], of_runs[len(a) :])

    rates = [median(step["samples_per_s"] for step in run) for run in steps]
    found = {"samples/s": {"median": pair(rates)}, "training": {}, "validation": {}, "time": {}}
    before = 0
    for end in ends:
        losses = [[step["loss"] for step in run if before < step["samples"] <= end] for run in steps]
        if all(losses):  # an evaluation may come before a step
            found["training"][end] = pair([fmean(own) for own in losses])
        found["validation"][end] = pair([run[end]["val_loss"] for run in tests])
        before = end
    for k, losses in enumerate(zip(*(run[end]["val_loss_per_timestep"] for run in tests))):
        found["time"][f"{k}/8"] = pair(losses)
    return found, verdict_of(found["validation"][end], end)


def verdict_of(last: dict[str, object], samples: int) -> str:
    """A sentence about the last validation losses."""
    if last["p"] is None:
        return "no verdict: one seed has no standard error; give --seeds=2 or more"
    off = last["b - a"]
    size = f"{abs(off):.4g} +- {last['stderr']:.2g} in validation loss after {samples:,} samples"
    if last["p"] < 0.05:
        return f"B is {'worse' if off > 0 else 'better'} than A by {size} (p = {last['p']:.2g})"
    need = "their means are equal"
    if last["seeds"]:
        need = f"it would take about {last['seeds']:,} seeds to see a difference of this size"
    return f"B and A are not distinguishable: {size}; {need}"


def train(configs: dict[str, config.Config], seeds: int, out: Path, ranks: int = 1) -> list[list[Path]]:
    """Train out/NAME_0 and so on, or go on, with logs beside them. Returns the folders. Raises: Refusal, SystemExit."""
    runs = [(name, i) for i in range(seeds) for name in configs]
    folders = {name: [] for name in configs}
    bar = progress(runs, unit=" runs")
    for name, i in bar:
        folder = out / f"{name}_{i}"
        folders[name].append(folder)
        bar.set_description(folder.name)
        cfg = configs[name]
        text = config_file.dump(config_file.replace(cfg, run__dir=str(folder), train__seed=cfg.train.seed + i))
        if not outcome(folder) or config_file.dump(config_file.of_run(folder)) != text:
            write_whole(Path(f"{folder}.toml"), text)
            train_one(folder, ranks)
    return list(folders.values())


def train_one(folder: Path, ranks: int) -> None:
    """Train by the config beside a folder, or go on. Its log is beside it, too. Raises: Refusal, SystemExit."""
    command = [sys.executable, Path(__file__).parents[2] / "train.py", Path(f"{folder}.toml")]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    log = Path(f"{folder}.log")
    with log.open("a") as to:
        begin = to.tell()  # a log keeps what earlier calls wrote
        with Popen(command, stdout=to, stderr=to) as run:
            code = run.wait()
    if code:
        text = log.read_bytes()[begin:].decode(errors="replace")  # torchrun gives the exit code of a rank in words
        said = (re.findall(r"train\.py: .*", text) or [f"exit code {code}"])[-1]
        is_refused = code == 2 or re.search(r"exitcode +: 2\b", text)
        raise (Refusal if is_refused else SystemExit)(f"run {folder} failed: {said}; see {log}")


def require_pairs(a: dict[str, object], differ: dict[str, str]) -> None:
    """Refuse configs that make no pairs. a: the values of A by key. differ: what differs. Raises: Refusal."""
    for key in differ:
        if any(fnmatch(key, name) for name in SHARED):
            raise Refusal(f"{key} is {differ[key]}; pairs share {', '.join(SHARED)}; give --{key}=VALUE for both")
    for key, is_right, value in (("eval.target", not a["eval.target"], "0"), ("data.val", a["data.val"], "a folder")):
        if not is_right:
            raise Refusal(f"{key}={a[key]!r}: compared runs evaluate to the end; set {key} to {value}")


def main(argv: list[str]) -> int:
    """Raises: Refusal, SystemExit."""
    parser = options.Options("python -m tools.compare", __doc__)
    parser.add_argument("configs", nargs=2, metavar="CONFIG")
    parser.add_argument("--seeds", type=options.between(1, 1000), default=3)
    parser.add_argument("--ranks", type=options.between(1, 1024), default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    args, overrides = parser.parse_known_args(argv)
    options.package("matplotlib", "the picture of compare")
    options.package("scipy", "the chances of compare")
    configs = {}
    for side, path in zip("ab", args.configs):
        with naming(path):
            configs[side] = config_file.load(path, overrides)
            config_rules.validate_world(configs[side], args.ranks)
    a, b = map(config.flat, configs.values())
    differ = {key: f"{a[key]!r} in A, {b[key]!r} in B" for key in a if a[key] != b[key]}
    require_pairs(a, differ)
    for key, words in differ.items():
        print(key, "is", words, flush=True)
    if not differ:
        print("no key differs", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    found, verdict = compare(*train(configs, args.seeds, args.out, args.ranks))
    for kind, rows in found.items():
        for at, row in rows.items():
            shown = [f"{LABELS.get(name, name)} {row[name]:.4g}" for name in SHOWN if row[name] is not None]
            print(f"{kind:>10} {at:>9}:", ", ".join(shown))
    draw(found, f"A: {args.configs[0]}, B: {args.configs[1]}", args.out / "compare.png")
    json_option.give({"configs": args.configs, "differ": differ, "verdict": verdict} | found, args.out / "compare.json")
    print(verdict)
    return 0


def draw(found: dict[str, dict], title: str, to: Path) -> None:
    """A picture of the differences over samples, with their standard errors as bands."""
    from matplotlib.figure import Figure  # an optional package

    figure = Figure((8.6, 4.4), layout="constrained")
    axes = figure.add_subplot(xlabel="training samples", ylabel="loss of B - loss of A, standard error", title=title)
    for kind in ("training", "validation"):
        samples = list(found[kind])
        middle = [row["b - a"] for row in found[kind].values()]
        error = [row["stderr"] or 0.0 for row in found[kind].values()]
        axes.plot(samples, middle, ".-", label=kind)
        axes.fill_between(samples, np.subtract(middle, error), np.add(middle, error), alpha=0.25)
    axes.axhline(0.0, color="grey")
    axes.legend()
    with whole(to) as part:
        figure.savefig(part, format="png")
