"""Scalars and pictures for TensorBoard, over training samples, where the package tensorboard is installed."""

from pathlib import Path

import numpy as np
from PIL import Image

from flux_ref.schedule import TIMESTEPS

FOLDER = "tensorboard"  # in a run's folder
FIGURES = ("loss", "grad_norm", "lr", "samples_per_s", "data_wait", "peak_memory_gb")  # of a record of metrics.jsonl


class Board:
    """Writes what a run records as it is recorded."""

    def __init__(self, run: Path, samples: int):
        """samples: trained so far. TensorBoard leaves out what an interrupted run has written after them."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer = None
            return
        self.writer = SummaryWriter(str(run / FOLDER), purge_step=samples + 1)

    def step(self, record: dict) -> None:
        """A record of metrics.jsonl."""
        if self.writer:
            for name in FIGURES:
                self.writer.add_scalar(f"train/{name}", record[name], record["samples"])

    def evaluation(self, record: dict) -> None:
        """A record of eval.jsonl."""
        if self.writer:
            samples = record["samples"]
            self.writer.add_scalar("validation/loss", record["val_loss"], samples)
            for k, loss in enumerate(record["val_loss_per_timestep"]):
                self.writer.add_scalar(f"validation by t/t={k}_{TIMESTEPS}", loss, samples)
            self.writer.flush()

    def picture(self, path: Path, samples: int) -> None:
        """A sheet of pictures."""
        if self.writer:
            with Image.open(path) as sheet:
                self.writer.add_image("pictures", np.asarray(sheet.convert("RGB")), samples, dataformats="HWC")
            self.writer.flush()

    def close(self) -> None:
        if self.writer:
            self.writer.close()
