"""The bar of long work, and how long a run takes. No torch."""

import shutil
import sys

from tqdm import tqdm

from flux_ref import schedule
from flux_ref.config import Config
from flux_ref.errors import Terminal


def progress(iterable=None, **options: object) -> tqdm:
    """tqdm, lively on a terminal and with a line every ten seconds in a log file; options are tqdm's."""
    if not sys.stderr.isatty():
        # No work ends because its bar cannot be shown.
        options |= {"file": Terminal(sys.stderr), "mininterval": 10.0, "bar_format": "{l_bar}{bar}{r_bar}\n"}
    columns, lines = shutil.get_terminal_size()  # where a terminal says 0, tqdm would show nothing
    return tqdm(iterable, **{"ncols": columns, "nrows": lines, "mininterval": 0.2} | options)


def forecast(cfg: Config, ranks: int, samples: int, val_count: int, warm_s: float) -> str:
    """How long a run takes from `samples` to train.max_samples, in one line.

    val_count: validation samples. warm_s: seconds of a training step and a validation batch together, in the warm-up.
    """
    batch = cfg.train.global_batch
    work = 3 * batch / ranks  # in forwards of a sample; a backward takes about as long as two
    step_s = warm_s * work / (work + cfg.eval.batch)
    val_s = (warm_s - step_s) * schedule.steps_for(val_count, ranks * cfg.eval.batch)
    left = range(samples, cfg.train.max_samples, batch)
    count = sum(schedule.evaluates(clock, cfg) for clock in (*left, left.stop))
    parts = (
        f"{len(left):,} steps of {step_s:.2f} s and {count} evaluations of {val_s:.1f} s, as measured in the warm-up"
    )
    return f"about {duration(len(left) * step_s + count * val_s)} to train.max_samples: {parts}"


def duration(seconds: float) -> str:
    """Seconds in words: 58 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
