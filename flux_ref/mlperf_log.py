"""The benchmark's log, valid for the rulesets 5.1.0, 6.0.0 and 6.1.0 of mlperf-logging's checker.

Lines go to the run's result file. A line is written when the event that it reports happens. mlperf_closed.py
writes the head of the log, and names the keys that it judges; tools/report/score.py names those that it reads.
"""

import logging
from pathlib import Path

from mlperf_logging.mllog import constants, mllog

from flux_ref import files, mlperf_closed
from flux_ref.config import Config, Values

RESUMED = "resumed from step"  # how the disqualification of a run in several parts begins


class BenchmarkLog(logging.Handler):
    """Writes result_0.txt. Keeps lines until `write_to` tells where they go, then appends each to the file.

    failure: the first OSError. mlperf-logging swallows what a handler raises, so train.py asks for it: a log with a gap
    must end the run.
    """

    path: Path | None = None
    failure: OSError | None = None
    kept = ""

    def __init__(self) -> None:
        super().__init__()
        self.in_block = False
        self.loss_keys = [constants.EVAL_ACCURACY]
        self.flaws: list[str] = []  # why this is no benchmark result, in words
        self.rehearsal = ""  # why a run that breaks no rule still is no benchmark result: mlperf_closed.REHEARSAL
        self.logger = logging.Logger("flux_ref", logging.INFO)  # one that no other log shares
        self.logger.addHandler(self)
        self.mllogger = mllog.MLLogger(logger=self.logger)

    def write_to(self, path: Path) -> None:
        """Write the lines so far with the next one, and from then on each line as it comes."""
        self.path = path
        if path.exists():
            self.kept = "\n" + self.kept  # a full disk may have left half a line

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging` with each line."""
        self.kept += self.format(record) + "\n"
        if self.path and not self.failure:  # after a gap nothing follows
            try:
                files.append(self.path, self.kept)
                self.kept = ""
            except OSError as error:
                self.failure = error

    def text(self, line: str) -> None:
        """Add a line of the run's output. spec: result files hold the whole framework log."""
        self.logger.info(line)

    def cache_clear(self) -> None:
        self.mllogger.event(constants.CACHE_CLEAR, True)

    def init_start(self) -> None:
        self.mllogger.start(constants.INIT_START)

    def describe(self, cfg: Config, world_size: int, sizes: Values) -> None:
        """Log what runs, and what the closed division forbids. sizes: {"train_samples", "val_samples"} of the data."""
        self.rehearsal = mlperf_closed.REHEARSAL if cfg.mllog.rehearsal else ""
        if cfg.mllog.submission_division == "open":
            self.loss_keys.append("averaged_validation_loss")  # checker, open_flux1.yaml
        for key, value in mlperf_closed.log_entries(cfg, world_size, sizes).items():
            self.mllogger.event(key, value)
        for departure in mlperf_closed.departures(cfg, sizes):
            self.disqualify(departure)

    def run_start(self) -> None:
        """The clock starts; the first byte of training and validation data is read after this."""
        self.mllogger.end(constants.INIT_STOP)
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
        for key in self.loss_keys:
            self.mllogger.event(key, loss, metadata={"samples_count": samples})
        self.mllogger.end(constants.EVAL_STOP, metadata={"samples_count": samples})

    def disqualify(self, why: str) -> None:
        """Log why this run's time is no benchmark result."""
        self.flaws.append(why)
        self.mllogger.event("disqualified", why)

    @property
    def flaw(self) -> str:
        """Why this is no benchmark result, in words; empty if it is one."""
        return "; ".join(self.flaws) or self.rehearsal

    def run_stop(self, samples: int, success: bool, reason: str) -> None:
        """The clock stops. reason: why, in words."""
        status = constants.SUCCESS if success and not self.flaws else constants.ABORTED
        if self.flaw:
            reason += f"; {self.flaw}"
        self.mllogger.end(constants.RUN_STOP, metadata={"status": status, "samples_count": samples, "reason": reason})
