"""A run for TensorBoard, in RUN/tensorboard: figures over training samples, pictures and the config."""

import contextlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path

from flux_ref.formats import jsonl, outside
from flux_ref.formats.files import append
from flux_ref.run.options import package
from flux_ref.schedule import TIMESTEPS

package("tensorboard", "run.tensorboard=true")
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: E402
from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: E402
from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: E402
from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: E402

TRAIN = ("loss", "grad_norm", "lr", "samples_per_s", "data_wait", "peak_memory_gb", "skipped")
VALIDATION = {"validation/loss": "val_loss", "validation/stderr": "stderr"}
TAGS = {"metrics.jsonl": {f"train/{key}": key for key in TRAIN}, "eval.jsonl": VALIDATION}
MOST_SAMPLES = 2**63 - 1  # TensorBoard counts with 64 bits


class Board:
    """Writes the folder that TensorBoard reads. A record can be seen as soon as `add` returns."""

    def __init__(self, run: Path, spare: Callable = contextlib.nullcontext):
        """spare: a context that may swallow an OSError of its block. After an OSError nothing more is written."""
        self.run = run
        self.spare = spare
        self.path = None
        self.samples = 0.0  # of the newest record
        self.pictures: set[Path] = set()  # that are shown

    def begin(self, samples: float = MOST_SAMPLES) -> str:
        """Write the folder anew from the run's files, up to `samples`: a resumed run repeats what comes later.

        Returns the command that shows it. Raises: Refusal for damaged files.
        """
        found = [(name, record) for name in TAGS for record in jsonl.records(self.run / name, samples)]
        text = outside.read_text(self.run / "config.toml", "config")
        folder = self.run / "tensorboard"
        with self.spare("charts for TensorBoard"):
            folder.mkdir(exist_ok=True)
            for old in folder.glob("events.out.tfevents.*"):
                # A TensorBoard goes on to the next file only while it finds the one that it reads.
                os.truncate(old, 0) if old.stat().st_size else old.unlink()
            self.path = folder / f"events.out.tfevents.{time.time_ns()}"  # the last by name
        self._write(file_version="brain.Event:2")
        self._write(session_log=SessionLog(status=SessionLog.START))  # forget what earlier files held
        self._write(summary=text_pb("config", f"```\n{text}\n```"))
        for name, record in found:
            self.add(name, record)
        return f"tensorboard --logdir {self.run} ({len(found):,} records)"

    def add(self, name: str, record: dict) -> None:
        """Show a record of the file with this name, and the pictures that are new."""
        figures = {tag: record.get(key) for tag, key in TAGS[name].items()}
        losses = record.get("val_loss_per_timestep")
        for k, loss in enumerate(losses if isinstance(losses, list) else ()):
            figures[f"validation by t/t={k / TIMESTEPS:.3f}"] = loss
        summary = Summary()
        for tag, figure in figures.items():
            if jsonl.is_number(figure):
                summary.value.add(tag=tag, simple_value=figure)
        self._write(step=int(record["samples"]), summary=summary)
        self.samples = max(self.samples, record["samples"])
        self.add_pictures()

    def add_pictures(self) -> None:
        """Show the grids samples/COUNT.png that are not shown yet, up to the newest record's samples."""
        for path in sorted({*self.run.glob("samples/*.png")} - self.pictures):
            count = outside.whole_number(path.stem, 0, MOST_SAMPLES)
            if count is not None and count <= self.samples and path.is_file():
                self.pictures.add(path)
                with self.spare(f"{path.name} for TensorBoard"):
                    summary = Summary()
                    summary.value.add(tag="pictures").image.encoded_image_string = path.read_bytes()
                    self._write(step=count, summary=summary)

    def _write(self, **content: object) -> None:
        path = self.path
        self.path = None
        if path:
            buffer = io.BytesIO()
            RecordWriter(buffer).write(Event(wall_time=time.time(), **content).SerializeToString())
            with self.spare("charts for TensorBoard"):
                append(path, buffer.getvalue())
                self.path = path
