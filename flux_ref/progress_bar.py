"""The bar of long work, and how long a run takes. No torch."""

import sys

from tqdm import tqdm

from flux_ref import schedule
from flux_ref.config import Config


def progress(iterable=None, **options: object) -> tqdm:
    """tqdm, with a line every ten seconds in a log file; options are tqdm's."""
    if not sys.stderr.isatty():
        options |= {"mininterval": 10.0, "bar_format": "{l_bar}{bar}{r_bar}\n"}
    return tqdm(iterable, **options)


def forecast(cfg: Config, ranks: int, samples: int, val_count: int, warm_s: float) -> str:
    """How long a run takes from `samples` to train.max_samples, in one line.

    val_count: validation samples. warm_s: seconds of a training step and a validation batch together, in the warm-up.
    """
    batch = cfg.train.global_batch
    work = 3 * batch / ranks  # in forwards of a sample; a backward takes about as long as two
    step_s = warm_s * work / (work + cfg.eval.batch)
    val_s = (warm_s - step_s) * schedule.steps_for(val_count, ranks * cfg.eval.batch)
    clock = range(samples, cfg.train.max_samples + batch, batch)
    steps = len(clock) - 1
    count = sum(schedule.evaluates(samples, cfg) for samples in clock)
    total = duration(steps * step_s + count * val_s)
    return f"about {total}: {steps:,} steps of {step_s:.2f} s and {count} evaluations of {val_s:.1f} s"


def duration(seconds: float) -> str:
    """Seconds in words: 58 s, 12 min, 3.1 h."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
