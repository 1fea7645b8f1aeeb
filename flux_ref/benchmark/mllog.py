"""The benchmark's log, valid for the rulesets 5.1.0, 6.0.0 and 6.1.0 of mlperf-logging's checker.

Lines go to the run's result file. This file alone knows the keys, their order and what each ruleset asks of them.
A line is written when the event that it reports happens.
"""

import logging
import threading
import time
from pathlib import Path

from mlperf_logging.mllog import constants, mllog

from flux_ref import schedule
from flux_ref.config import Config, micro_batch
from flux_ref.formats import files

CLOCK_JUMP_S, CLOCK_DRIFT = 0.5, 5e-4  # seconds that a clock may be off its rate; NTP slews by at most 5e-4
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "fp32"}  # in the log


class LogFile(logging.Handler):
    """Appends lines to a file. Nothing follows a line that failed; the main thread gets this OSError each time."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.failure = path, None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.failure is None:
                files.append(self.path, self.format(record) + "\n")
        except OSError as error:
            self.failure = error
        if self.failure is not None and threading.current_thread() is threading.main_thread():
            raise self.failure


class BenchmarkLog:
    """Writes result_N.txt on rank 0; on other ranks, whose path is None, every call does nothing."""

    def __init__(self, path: Path | None):
        self.in_block, self.flaw, self.begin = False, "", (0.0, 0.0)
        self.logger = logging.getLogger(f"flux_ref.{path}")
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        self.handler = LogFile(path) if path else logging.NullHandler()
        self.logger.addHandler(self.handler)
        self.mllogger = mllog.MLLogger(logger=self.logger)

    def text(self, line: str) -> None:
        """Add a line of the run's output. spec: result files hold the whole framework log."""
        self.logger.info(line)

    def cache_clear(self) -> None:
        self.mllogger.event(constants.CACHE_CLEAR, True)

    def init_start(self) -> None:
        self.mllogger.start(constants.INIT_START)

    def describe(self, cfg: Config, world_size: int, train_count: int, val_count: int) -> None:
        """Log submission, data, batch and optimizer. train_count, val_count: samples in the data sets."""
        micro = micro_batch(cfg, world_size)
        interval = cfg.eval.every_samples
        if cfg.mllog.ruleset == "6.1.0":  # spec: from 6.1.0 on, rounded up to whole steps
            interval = schedule.steps_for(interval, cfg.train.global_batch) * cfg.train.global_batch
        entries = {
            "submission_benchmark": "flux1",
            "submission_org": cfg.mllog.submission_org,
            "submission_division": cfg.mllog.submission_division,
            "submission_status": cfg.mllog.submission_status,
            "submission_platform": cfg.mllog.submission_platform,
            "seed": cfg.train.seed,
            "target_accuracy": cfg.eval.target,
            "global_batch_size": cfg.train.global_batch,  # spec: before evaluation_frequency
            "gradient_accumulation_steps": cfg.train.global_batch // (world_size * micro),
            "train_samples": train_count,
            "eval_samples": val_count,
            "evaluation_frequency": interval,
            "opt_name": "adamw",
            "opt_base_learning_rate": cfg.optim.lr,
            "opt_learning_rate_warmup_steps": cfg.optim.warmup_steps,
            "opt_adamw_beta_1": cfg.optim.beta1,
            "opt_adamw_beta_2": cfg.optim.beta2,
            "opt_adamw_epsilon": cfg.optim.eps,
            "opt_adamw_weight_decay": cfg.optim.weight_decay,
            "opt_gradient_clip_norm": cfg.optim.clip_norm,
        }
        if cfg.mllog.ruleset != "5.1.0":
            entries |= _disclosure(cfg, micro)
        for key, value in entries.items():
            self.mllogger.event(key, value)

    def run_start(self) -> None:
        """The clock starts; the first byte of training and validation data is read after this."""
        self.mllogger.end(constants.INIT_STOP)
        self.begin = time.time(), steady_s()
        self.mllogger.start(constants.RUN_START)

    def block_start(self, samples: int) -> None:
        """Training goes on. Starts a block unless one has begun; the next evaluation ends the block."""
        if not self.in_block:
            self.in_block = True
            self.mllogger.start(constants.BLOCK_START, metadata={"samples_count": samples})

    def eval_start(self, samples: int) -> None:
        """samples: training samples so far."""
        if self.in_block:
            self.mllogger.end(constants.BLOCK_STOP, metadata={"samples_count": samples})
            self.in_block = False
        self.mllogger.start(constants.EVAL_START, metadata={"samples_count": samples})

    def eval_stop(self, samples: int, loss: float) -> None:
        """loss: the validation loss after this number of training samples."""
        self.mllogger.event(constants.EVAL_ACCURACY, loss, metadata={"samples_count": samples})
        self.mllogger.end(constants.EVAL_STOP, metadata={"samples_count": samples})

    def disqualify(self, key: str, value: object, why: str) -> None:
        """Log why this run's time is no benchmark result: the event as key and value, and the reason in words."""
        self.flaw = why
        self.mllogger.event(key, value)

    def run_stop(self, samples: int, success: bool, reason: str) -> None:
        """The clock stops. reason: why, in words."""
        wall_s, true_s = time.time() - self.begin[0], steady_s() - self.begin[1]
        if abs(wall_s - true_s) > CLOCK_JUMP_S + CLOCK_DRIFT * true_s:  # the log's times are those of the wall clock
            why = f"the clock was set by {wall_s - true_s:+.1f} s in the run"
            self.disqualify("clock_set_s", wall_s - true_s, f"{self.flaw}; {why}" if self.flaw else why)
        if self.flaw:  # spec: one run on one clock, from random weights
            success, reason = False, f"{reason}; {self.flaw}, so not a valid timed result"
        status = constants.SUCCESS if success else constants.ABORTED
        metadata = {"status": status, "samples_count": samples, "reason": reason}
        self.mllogger.end(constants.RUN_STOP, metadata=metadata)

    def close(self) -> None:
        self.logger.removeHandler(self.handler)
        self.handler.close()


def steady_s() -> float:
    """Seconds of a clock that nobody sets. It counts while the machine sleeps, as the wall clock does (Linux)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _disclosure(cfg: Config, micro: int) -> dict[str, object]:
    """Precision and parallelism: optional in 6.0.0, required from 6.1.0 on."""
    compute, reduce = DTYPE_NAMES[cfg.parallel.dtype], DTYPE_NAMES[cfg.parallel.reduce_dtype]
    return {
        "lowest_numerical_precision_in_linear": compute if cfg.fp8.recipe == "off" else "fp8",
        "lowest_numerical_precision_in_attn": compute,
        "lowest_numerical_precision_in_comm": "bfloat16" if "bfloat16" in (compute, reduce) else "fp32",
        **{f"{kind}_parallelism": 1 for kind in ("tensor", "pipeline", "context", "expert")},
        "micro_batch_size": micro,
        "config_filename": f"{cfg.name}.toml",
    }
