"""Benchmark logs, made up: as foreign submitters write them, and as a run of ours writes them."""

import json
import random
import time
from pathlib import Path

from flux_ref.benchmark import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.benchmark.mllog import BenchmarkLog
from flux_ref.config import Config

START_MS = 1_760_000_000_000
INTERVAL = 262_144


class MadeLog:
    """The lines of one run. entries: (key, value, metadata, event type); changes are made before `write`."""

    def __init__(self, seed: int = 1, batch: int = 1024, evaluations: int = 33, rate: float = 1600.0, **values):
        noise = random.Random(seed)
        self.entries: list[list] = []
        self.clock = START_MS + seed * 10_000_000
        logged = {"submission_benchmark": "flux1", "submission_org": "SUBMISSION_ORG_PLACEHOLDER"}
        logged |= {"submission_division": "closed", "submission_status": "onprem", "submission_platform": "4xMADE_UP"}
        logged |= {"target_accuracy": 0.586, "global_batch_size": batch, "train_samples": 1_099_776}
        logged |= {"eval_samples": 29_696, "evaluation_frequency": INTERVAL, "gradient_accumulation_steps": 1}
        logged |= {"opt_name": "adamw", "opt_learning_rate_warmup_steps": 0, "opt_adamw_beta_1": 0.9}
        logged |= {"opt_adamw_beta_2": 0.95, "opt_adamw_epsilon": 1e-08, "opt_adamw_weight_decay": 0.1}
        logged |= {"opt_base_learning_rate": 0.0002, "opt_gradient_clip_norm": 1.0, "seed": seed}
        logged |= {f"lowest_numerical_precision_in_{part}": "fp8" for part in ("linear", "attn", "comm")}
        logged |= {f"{kind}_parallelism": 1 for kind in ("tensor", "pipeline", "context", "expert")}
        logged |= {"micro_batch_size": 8, "config_filename": "config.sh"}
        self.add("cache_clear", True)
        self.add("init_start", kind="INTERVAL_START")
        for key, value in (logged | values).items():
            self.add(key, value)
        self.add("init_stop", kind="INTERVAL_END", after_ms=300_000)
        self.add("run_start", kind="INTERVAL_START", after_ms=1)
        samples = 0
        for k in range(evaluations):
            self.add("block_start", kind="INTERVAL_START", samples_count=samples)
            block_ms = round(INTERVAL / rate * 1000 * noise.uniform(0.99, 1.01))
            self.add("tracked_stats", {"train_loss": 0.5 + 1 / (k + 1)}, after_ms=block_ms // 2, samples_count=samples)
            samples += INTERVAL
            self.add("block_stop", kind="INTERVAL_END", after_ms=block_ms - block_ms // 2, samples_count=samples)
            self.add("eval_start", kind="INTERVAL_START", samples_count=samples)
            last = k == evaluations - 1
            loss = 0.5855 if last else 0.59 + 0.1 / (k + 1) ** 0.8 * noise.uniform(0.95, 1.05)
            self.add("eval_accuracy", loss, after_ms=6_400, samples_count=samples)
            self.add("eval_stop", kind="INTERVAL_END", samples_count=samples)
        self.add("run_stop", kind="INTERVAL_END", after_ms=9, samples_count=samples, status="success")

    def add(self, key, value=None, kind="POINT_IN_TIME", after_ms=0, **metadata) -> None:
        self.clock += after_ms
        self.entries.append([key, value, {"file": "/workspace/train.py", "lineno": 7} | metadata, kind, self.clock])

    def change(self, key: str, value: object = None, which: int = 0, **metadata) -> "MadeLog":
        entry = [entry for entry in self.entries if entry[0] == key][which]
        entry[1] = value
        entry[2] |= metadata
        return self

    def lines(self, prefix: str = " 0: ") -> list[str]:
        names = ("key", "value", "metadata", "event_type", "time_ms")
        return [f"{prefix}:::MLLOG {json.dumps(dict(zip(names, entry)))}" for entry in self.entries]

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["+ srun train", *self.lines(), "done"]) + "\n")
        return path


EVALUATIONS = (33, 31, 34, 33, 34, 34, 34, 35, 34, 34)


def system(folder: Path, count: int = 10, rate: float = 1600.0, batch: int = 1024, **values) -> list[MadeLog]:
    """Runs written to a folder; ten are a valid result under every ruleset."""
    logs = [MadeLog(seed, batch, steps, rate, **values) for seed, steps in enumerate(EVALUATIONS[:count], 100)]
    for i, log in enumerate(logs):
        log.write(folder / f"result_{i}.txt")
    return logs


def ours(
    path: Path,
    cfg: Config,
    losses: tuple[float, ...] = (0.58,),
    counts: tuple[int, int] = (TRAIN_SAMPLES, VAL_SAMPLES),
    success: bool = True,
    text: str = "",
) -> str:
    """The log of a run with these evaluations. Returns what outcome.json would hold. counts: samples of the sets."""
    log = BenchmarkLog(path)
    log.text(text)
    if cfg.data.evict:
        log.cache_clear()
    log.init_start()
    log.describe(cfg, 8, *counts)
    log.run_start()
    samples = 0
    for loss in losses:
        log.block_start(samples)
        time.sleep(0.002)  # the log counts in milliseconds
        samples += 262_656
        log.eval_start(samples)
        log.eval_stop(samples, loss)
    log.run_stop(samples, success, "target reached")
    log.close()
    return log.flaw
