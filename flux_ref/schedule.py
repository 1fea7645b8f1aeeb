"""The schedule of a run: learning rate, what is due when. No state, no torch.

The benchmark's clock is `samples`, the training samples that all ranks have consumed. One step adds one global batch.
"""

from math import ceil

from flux_ref.config import Config, OptimConfig

TIMESTEPS = 8  # spec: validation walks t = 0/8 .. 7/8 (mlcommons/training, text_to_image)


def steps_for(samples: int, global_batch: int) -> int:
    """Steps until at least `samples` are consumed. spec: the interval rounds up to whole steps."""
    return ceil(samples / global_batch)


def due(samples: int, every_samples: int, global_batch: int) -> bool:
    """Whether something that comes every `every_samples` is due now. 0 means never."""
    return samples > 0 and every_samples > 0 and samples % (steps_for(every_samples, global_batch) * global_batch) == 0


def evaluates(samples: int, cfg: Config) -> bool:
    """Whether an evaluation is due: every eval.every_samples, at the end and, with eval.at_start, before any step."""
    is_periodic = due(samples, cfg.eval.every_samples, cfg.train.global_batch)
    is_first = cfg.eval.at_start and samples == 0
    return cfg.data.val != "" and (is_periodic or is_first or samples >= cfg.train.max_samples)


def saves(samples: int, cfg: Config) -> bool:
    """Whether a checkpoint is due before the next step or evaluation.

    Without an interval it comes before each evaluation, so that an evaluation that fails loses no step.
    """
    every = cfg.checkpoint.every_samples
    return due(samples, every, cfg.train.global_batch) if every else evaluates(samples, cfg)


def logs(samples: int, cfg: Config) -> bool:
    """Whether the training step that ended at `samples` has a record: at intervals, before evaluations, the last."""
    is_due = due(samples, cfg.train.log_every_samples, cfg.train.global_batch)
    return is_due or evaluates(samples, cfg) or samples >= cfg.train.max_samples


def lr(step: int, optim: OptimConfig) -> float:
    """Learning rate of step `step` (the first is 0): linear to the peak over warmup_steps, then constant.

    With decay_end_step it also falls linearly, to a tenth at that step, and is constant from there.
    spec: the first step has peak / warmup_steps, not 0.
    """
    fallen = 0.9 * min(1.0, step / optim.decay_end_step) if optim.decay_end_step else 0.0
    return optim.lr * min(1.0, (step + 1) / max(1, optim.warmup_steps)) * (1.0 - fallen)
