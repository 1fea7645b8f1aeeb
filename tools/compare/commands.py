"""Compare configs A and B by runs in pairs: one seed, so equal samples, noise, times and dropped captions.

    python -m tools.compare A.toml B.toml [--seeds=3] [--out=runs/compare] [--ranks=1] [--section.key=value ...]

Trains FOLDER/a_0, b_0, a_1 and so on, from train.seed on; overrides hold for both. The same command goes on after a
stop. Other configs need another --out. FOLDER/compare.json and compare.png hold B - A.
Exit codes: 0 done, 1 a run failed or diverged, 2 refused.
"""

import math
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean, median, stdev, variance
from subprocess import Popen

from flux_ref import config, config_file, config_rules
from flux_ref.errors import Refusal
from flux_ref.formats.files import whole, write_whole
from flux_ref.formats.jsonl import outcome, records
from flux_ref.run import options
from flux_ref.run.progress import progress
from tools.shared import json_option

SHARED = (  # keys that decide what a run draws and when it records
    *("data.*", "eval.*", "model.text_tokens", "model.*_dim", "model.latent_*"),
    *("train.seed", "train.max_samples", "train.global_batch", "train.log_every_samples"),
)
PARTS = 4096  # of an integral


def within(t: float, freedom: int) -> float:
    """The chance that Student's t lies within +-t = freedom^0.5 * tan(x); the density of x is as cos(x)^(freedom-1)."""
    ends = math.atan(t / freedom**0.5), math.pi / 2
    areas = [end * sum(math.cos(end * (i + 0.5) / PARTS) ** (freedom - 1) for i in range(PARTS)) for end in ends]
    return areas[0] / areas[1]


def paired(a: list[float], b: list[float]) -> dict[str, object]:
    """Means of a and b; b - a with a[i] and b[i] of one seed, stderr, p of a t test. None: one pair cannot tell it."""
    n = len(a)
    each = [own - other for own, other in zip(b, a, strict=True)]
    found = {"a": fmean(a), "b": fmean(b), "b - a": fmean(each), "each": each}
    if n == 1:
        return found | dict.fromkeys(("stderr", "unpaired stderr", "p", "seeds"))
    error = stdev(each) / n**0.5
    unpaired = ((variance(a) + variance(b)) / n) ** 0.5
    t = abs(found["b - a"]) / (error or 1e-300)
    # 4 of 5 see it: 2.8 = z(0.975) + z(0.8), 1.92 = z(0.975)^2 / 2 (Guenther 1981)
    seeds = math.ceil(n * (2.8 / t) ** 2 + 1.92) if t else None
    return found | {"stderr": error, "unpaired stderr": unpaired, "p": 1 - within(t, n - 1), "seeds": seeds}


def compare(a: list[Path], b: list[Path]) -> tuple[dict[str, dict], str]:
    """What `paired` finds in the runs of a and b, by samples or time, and a verdict. Raises: Refusal."""
    keys = {"metrics.jsonl": ("loss", "samples_per_s"), "eval.jsonl": ("val_loss",)}
    steps, tests = ([records(run / name, figures=keys[name]) for run in (*a, *b)] for name in keys)
    ends = sorted(set.intersection(*({test["samples"] for test in run} for run in tests)))
    if not ends or not all(steps):
        raise Refusal(f"{a[0]}, {b[0]} and the others share no evaluation; train all to one train.max_samples")
    rates = [median(step["samples_per_s"] for step in run) for run in steps]
    found = {"samples/s": {"median": rates}, "training": {}, "validation": {}}
    for before, end in zip([0, *ends], ends):
        last = [next(test for test in run if test["samples"] == end) for run in tests]
        losses = [[step["loss"] for step in run if before < step["samples"] <= end] for run in steps]
        found["training"] |= {end: [fmean(own) for own in losses]} if all(losses) else {}  # none before a step
        found["validation"][end] = [test["val_loss"] for test in last]
    found["time"] = {f"{k}/8": at_k for k, at_k in enumerate(zip(*(test["val_loss_per_timestep"] for test in last)))}
    found = {kind: {at: paired(v[: len(a)], v[len(a) :]) for at, v in ats.items()} for kind, ats in found.items()}
    last = found["validation"][ends[-1]]
    if last["p"] is None:
        return found, "no verdict: one seed has no standard error; give --seeds=2 or more"
    size = f"{abs(last['b - a']):.4g} +- {last['stderr']:.2g} in validation loss after {ends[-1]:,} samples"
    if last["p"] < 0.05:
        return found, f"B is {'worse' if last['b - a'] > 0 else 'better'} than A by {size} (p = {last['p']:.2g})"
    need = f"it would take about {last['seeds']:,} seeds to see a difference of this size" if last["seeds"] else ""
    return found, f"B and A are not distinguishable: {size}; {need or 'their means are equal'}"


def train(configs: dict[str, config.Config], seeds: int, out: Path, ranks: int = 1) -> list[list[Path]]:
    """Train out/NAME_0 and so on, or go on, with logs beside them. Returns the folders. Raises: Refusal, SystemExit."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    runs = {out / f"{name}_{i}": (cfg, i) for i in range(seeds) for name, cfg in configs.items()}
    for folder, (cfg, i) in (bar := progress(list(runs.items()), unit=" runs")):
        bar.set_description(folder.name)
        text = config_file.dump(config_file.replace(cfg, run__dir=str(folder), train__seed=cfg.train.seed + i))
        if outcome(folder) and config_file.dump(config_file.of_run(folder)) == text:
            continue
        log = Path(f"{folder}.log")
        toml = Path(f"{folder}.toml")
        write_whole(toml, text)
        command = [sys.executable, *launcher, Path(__file__).parents[2] / "train.py", toml]
        begin = log.stat().st_size if log.exists() else 0  # a log keeps what earlier calls wrote
        with log.open("a") as to, Popen(command, stdout=to, stderr=to) as run:
            code = run.wait()
        if code:
            text = log.read_bytes()[begin:].decode(errors="replace")  # torchrun gives the exit code of a rank in words
            said = (re.findall(r"train\.py: .*", text) or [f"exit code {code}"])[-1]
            is_refused = code == 2 or re.search(r"exitcode +: 2\b", text)
            raise (Refusal if is_refused else SystemExit)(f"run {folder} failed: {said}; see {log}")
    return [[out / f"{name}_{i}" for i in range(seeds)] for name in configs]


def main(argv: list[str]) -> int:
    """Raises: Refusal, SystemExit."""
    parser = options.Options("python -m tools.compare", __doc__)
    parser.add_argument("configs", nargs=2)
    parser.add_argument("--seeds", type=options.between(1, 1000), default=3)
    parser.add_argument("--ranks", type=options.between(1, 1024), default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    args, overrides = parser.parse_known_args(argv)
    options.package("matplotlib", "the picture of compare")
    from matplotlib.figure import Figure

    configs = {side: config_file.load(path, overrides) for side, path in zip("ab", args.configs)}
    a, b = map(config.flat, configs.values())
    differ = {key: f"{a[key]!r} in A, {b[key]!r} in B" for key in a if a[key] != b[key]}
    for key in (key for key in differ if any(fnmatch(key, name) for name in SHARED)):
        raise Refusal(f"{key} is {differ[key]}; pairs share {', '.join(SHARED)}; give --{key}=VALUE for both")
    for key, is_wrong, want in (("eval.target", a["eval.target"], "0"), ("data.val", not a["data.val"], "a folder")):
        if is_wrong:
            raise Refusal(f"{key}={a[key]!r}: compared runs evaluate to the end; set {key} to {want}")
    for cfg in configs.values():
        config_rules.validate_world(cfg, args.ranks)
    print("\n".join(f"{key} is {values}" for key, values in differ.items()) or "no key differs", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    found, verdict = compare(*train(configs, args.seeds, args.out, args.ranks))
    figure = Figure((8.6, 4.4), layout="constrained")
    axes = figure.add_subplot(xlabel="training samples", ylabel="loss of B - loss of A, standard error")
    axes.set_title(f"A: {args.configs[0]}, B: {args.configs[1]}")
    for kind, rows in found.items():
        for at, row in rows.items():
            shown = (f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, int | float))
            print(f"{kind:>10} {at:>9}: {', '.join(shown)}")
        if kind in ("training", "validation"):
            x, middle, error = zip(*((at, row["b - a"], row["stderr"] or 0.0) for at, row in rows.items()))
            axes.plot(x, middle, ".-", label=kind)
            axes.fill_between(x, *([m + sign * e for m, e in zip(middle, error)] for sign in (-1, 1)), alpha=0.25)
    axes.axhline(0.0, color="grey")
    axes.legend()
    with whole(args.out / "compare.png") as part:
        figure.savefig(part, format="png")
    json_option.give({"configs": args.configs, "differ": differ, "verdict": verdict} | found, args.out / "compare.json")
    print(verdict)
    return 0
