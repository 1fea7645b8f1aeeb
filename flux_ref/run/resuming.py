"""Continuing a run from a checkpoint: the weights first, and after the warm-up moments, FP8 history and counters."""

from pathlib import Path

import torch

from flux_ref import ranks
from flux_ref.checkpoint import rows_of
from flux_ref.errors import Refusal
from flux_ref.formats import fit
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.step import State


def load_weights(path: Path, state: State, data_sizes: dict[str, int]) -> Checkpoint:
    """Fill the weights from a checkpoint of the same run. Collective. Raises: Refusal.

    `load_progress` fills the rest after the warm-up, which clears moments and FP8 history.
    """
    with ranks.agreed():
        saved = open_for(path, state, data_sizes)
        _load(saved, state, "model.")
    return saved


def open_for(path: Path, state: State, data_sizes: dict[str, int]) -> Checkpoint:
    """A checkpoint from which a state can go on. data_sizes: as for `Saver`. Raises: Refusal."""
    saved = Checkpoint(path)
    shapes = {key: tuple(entry.shape) for key, entry in saved.tensors.items()}
    if not any(key.startswith("optimizer.") for key in shapes):
        raise Refusal(f"checkpoint {path} holds weights only; start a new run from it with --init.weights={path}")
    wanted = {key: tuple(rows.shape) for key, rows in rows_of(state).items()}
    fit.require_fit(shapes, wanted, f"checkpoint {path}")
    for key, value in data_sizes.items():
        if (had := saved.info.get(key)) != value:
            raise Refusal(
                f"checkpoint {path} comes from a data set of {had} {key.replace('_', ' ')}, this one has"
                f" {value}: order and noise would change; give the data set of the run"
            )
    return saved


def load_progress(saved: Checkpoint, state: State) -> None:
    """Fill the moments and the FP8 history, and set the counters. Collective. Raises: Refusal."""
    with ranks.agreed():
        _load(saved, state, "optimizer.")
        _load(saved, state, "fp8.")
    state.fp8.set_scales()
    state.step, state.samples = saved.info["step"], saved.info["samples"]
    state.opt.set_steps(state.step)


def _load(saved: Checkpoint, state: State, prefix: str) -> None:
    """Each rank reads only its own rows."""
    with torch.no_grad():
        for key, rows in rows_of(state).items():
            if key.startswith(prefix):
                values = saved.read(key, rows.first, len(rows.local))
                rows.local.copy_(fit.finite(values, key, saved.folder))
