"""The records and pictures of a run for TensorBoard, in RUN/tensorboard."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

from flux_ref import config_file
from flux_ref.formats import jsonl, outside
from flux_ref.run.options import package
from flux_ref.schedule import TIMESTEPS

package("tensorboard", "--tensorboard")
from torch.utils.tensorboard import SummaryWriter  # noqa: E402

TRAIN = ("loss", "grad_norm", "lr", "samples_per_s", "data_wait", "peak_memory_gb", "skipped")
TAGS = {
    "metrics.jsonl": {key: f"train/{key}" for key in TRAIN},
    "eval.jsonl": {"val_loss": "validation/loss", "stderr": "validation/stderr"},
}
PICTURES = "pictures"
MOST_SAMPLES = 2**63 - 1  # TensorBoard counts with 64 bits

Item = tuple[str, int, object]  # tag, training samples, and a number or the path of a picture


def items(run: Path) -> list[Item]:
    """All that a run's folder holds for TensorBoard. Raises: Refusal for damaged records."""
    found = []
    for name, tags in TAGS.items():
        for record in jsonl.records(run / name, MOST_SAMPLES):
            figures = {tag: record.get(key) for key, tag in tags.items()}
            losses = record.get("val_loss_per_timestep")
            for k, loss in enumerate(losses if isinstance(losses, list) else ()):
                figures[f"validation by t/t={k / TIMESTEPS:.3f}"] = loss
            for tag, figure in figures.items():
                if jsonl.is_number(figure):
                    found.append((tag, int(record["samples"]), figure))
    for path in sorted(run.glob("samples/*.png")):
        samples = outside.whole_number(path.stem, 0, MOST_SAMPLES)
        if samples is not None and path.is_file():
            found.append((PICTURES, samples, path))
    return found


class Board:
    """Keeps RUN/tensorboard as the run's folder is."""

    def __init__(self, run: Path):
        """Raises: Refusal for a folder without a run."""
        self.run = run
        self.config = config_file.dump(config_file.of_run(run))
        self.writer: SummaryWriter | None = None
        self.shown: set[Item] = set()

    def update(self) -> bool:
        """Write what is new. Returns whether the run has ended. Raises: Refusal for damaged records.

        A run that was resumed has lost what came after its checkpoint: then all is written anew.
        """
        has_ended = bool(jsonl.outcome(self.run))  # asked first: a run that has ended writes nothing more
        found = items(self.run)
        if self.writer is None or not self.shown <= set(found):
            self._begin()
        for item in found:
            if item not in self.shown:
                self._add(*item)
                self.shown.add(item)
        self.writer.flush()
        return has_ended

    def _begin(self) -> None:
        folder = self.run / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            # A TensorBoard goes on to the next file only while it finds the one that it reads.
            os.truncate(old, 0) if old.stat().st_size else old.unlink()
        self.writer = SummaryWriter(str(folder), purge_step=0)  # forget what earlier files held
        self.writer.add_text("config", f"```\n{self.config}\n```")
        self.shown = set()

    def _add(self, tag: str, samples: int, value: object) -> None:
        if tag == PICTURES:
            with Image.open(value) as picture:
                self.writer.add_image(tag, np.asarray(picture.convert("RGB")), samples, dataformats="HWC")
        else:
            self.writer.add_scalar(tag, value, samples)
