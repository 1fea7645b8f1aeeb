"""How long the rest of a run takes, from its warm-up."""

from flux_ref import schedule
from flux_ref.config import Config


def forecast(
    cfg: Config, ranks: int, samples: int, is_evaluated: bool, val_count: int, warm_s: float, is_captured: bool
) -> str:
    """One line.

    samples:      trained so far. is_evaluated: a resumed run has this evaluation already.
    warm_s:       seconds of a training step and a validation batch together.
    is_captured:  whether steps are replayed, which is faster than the steps of the warm-up.
    """
    batch = cfg.train.global_batch
    rows = batch / ranks
    left = range(samples, cfg.train.max_samples, batch)
    step_s = warm_s * 3 * rows / (3 * rows + cfg.eval.batch)  # a backward takes about as long as two forwards
    val_s = (warm_s - step_s) * schedule.steps_for(val_count, ranks * cfg.eval.batch)
    due = [clock for clock in (*left, left.stop) if schedule.evaluates(clock, cfg)]
    count = len(due) - (is_evaluated and samples in due)
    is_most = cfg.eval.target or is_captured
    about = f"{'at most ' if is_most else ''}about {duration(len(left) * step_s + count * val_s)}"
    parts = f"{len(left):,} steps of {step_s:.2f} s and {count} evaluations of {val_s:.1f} s"
    drawings = "; without the drawings" if cfg.sample.count else ""
    return f"{about}: {parts}, as measured in the warm-up{drawings}"


def duration(seconds: float) -> str:
    """Seconds in words: 58 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
