"""Benchmark logs, made up: as foreign submitters write them, and as a run of ours writes them."""

import json
import random
import time

import yaml

from flux_ref.config import Config
from flux_ref.mlperf_closed import TRAIN_SAMPLES, VAL_SAMPLES, log_entries
from flux_ref.mlperf_log import BenchmarkLog
from flux_ref.schedule import steps_for

# mlperf-logging reads its rules anew for every log. libyaml takes a tenth of the time.
yaml.BaseLoader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
INTERVAL = 262_144
SIZES = {"train_samples": TRAIN_SAMPLES, "val_samples": VAL_SAMPLES}  # of the benchmark's data
EVALUATIONS = (33, 31, 34, 33, 34, 34, 34, 35, 34, 34)  # of ten runs that are a valid result under every ruleset


def lines(seed=100, batch=1024, evaluations=33, rate=1600.0, **values):
    """The log of a submitter's run. values: entries before init_stop that differ from those of the closed division."""
    noise = random.Random(seed)
    clock = 1_760_000_000_000 + seed * 10_000_000
    made = []

    def add(key, value=None, kind="POINT_IN_TIME", after_ms=0, **metadata):
        nonlocal clock
        clock += after_ms
        metadata |= {"file": "/workspace/train.py", "lineno": 7}
        entry = {"key": key, "value": value, "metadata": metadata, "event_type": kind, "time_ms": clock}
        made.append(f" 0: :::MLLOG {json.dumps(entry)}")

    add("cache_clear", True)
    add("init_start")
    cfg = Config()
    entries = log_entries(cfg, 8, SIZES)
    entries |= {"global_batch_size": batch, "evaluation_frequency": INTERVAL, "seed": seed, "submission_org": "SOME"}
    for key, value in (entries | values).items():
        if "." not in key:  # those are our own
            add(key, value)
    add("init_stop", after_ms=300_000)
    add("run_start", after_ms=1)
    for k in range(evaluations):
        add("block_start", samples_count=k * INTERVAL)
        samples = (k + 1) * INTERVAL
        add("block_stop", after_ms=round(INTERVAL / rate * 1000 * noise.uniform(0.99, 1.01)), samples_count=samples)
        add("eval_start", samples_count=samples)
        loss = 0.5855 if k == evaluations - 1 else 0.59 + 0.1 / (k + 1) ** 0.8
        add("eval_accuracy", loss, after_ms=6_400, samples_count=samples)
        add("eval_stop", samples_count=samples)
    add("run_stop", after_ms=9, samples_count=evaluations * INTERVAL, status="success")
    return made


def write(path, made):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["+ srun train", *made, "done"]) + "\n")
    return path


def system(folder, count=10, **values):
    """Runs of a submitter in a folder."""
    for i, evaluations in enumerate(EVALUATIONS[:count]):
        write(folder / f"result_{i}.txt", lines(**({"seed": 100 + i, "evaluations": evaluations} | values)))
    return folder


def ours(
    path,
    cfg,
    losses=(0.58,),
    sizes=SIZES,
    success=True,
):
    """The log of a run with these evaluations. Returns what outcome.json would hold. sizes: of the data sets."""
    log = BenchmarkLog()
    log.write_to(path)
    if cfg.data.drop_page_cache:
        log.cache_clear()
    log.init_start()
    log.describe(cfg, 8, sizes)
    log.run_start()
    samples = 0
    batch = cfg.train.global_batch
    interval = steps_for(cfg.eval.every_samples, batch) * batch
    for loss in losses:
        log.block_start(samples)
        log.block_start(samples + 1)  # as at each step
        time.sleep(0.002)  # the log counts in milliseconds
        samples += interval
        log.eval_start(samples)
        log.eval_stop(samples, loss)
    log.run_stop(samples, success, "target reached")
    return log.flaw
