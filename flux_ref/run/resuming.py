"""Continuing a run: what may change, and loading a checkpoint.

The weights are loaded before the warm-up; moments, FP8 history and counters after it, since the warm-up clears them.
"""

import math
from pathlib import Path

import torch

from flux_ref import config, config_file, ranks, schedule
from flux_ref.checkpoint import HISTORY, rows_of
from flux_ref.config import KEYS, Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, fit, jsonl
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.speed import policy
from flux_ref.step import State

SWITCH = "precision.switch"  # its entries that begin after the checkpoint may change


def require_continues(cfg: Config, folder: Path, saved: list[Path]) -> None:
    """Raises: Refusal if a config neither continues nor extends the run in a folder. saved: the run's checkpoints."""
    batch = cfg.train.global_batch
    step = checkpoint_files.step_of(saved[-1]) if saved else 0
    samples = step * batch
    if differ := _differences(cfg, config_file.load(folder / "config.toml"), step):
        raise Refusal(
            f"{folder} holds a run of another config: {'; '.join(differ)}; give the same values, another run.dir or"
            f" run.overwrite=true; of {SWITCH} only what begins after {samples} samples may change"
        )
    most = cfg.train.max_samples
    if samples > schedule.steps_for(most, batch) * batch:
        raise Refusal(
            f"{folder} has trained on {samples} samples; train.max_samples={most} must not be less; give"
            f" more than {samples}, set run.dir to another folder, or run.overwrite=true"
        )
    if not jsonl.outcome(folder):
        return
    end = jsonl.json_object(folder / "outcome.json")
    samples, loss = (end[key] if jsonl.is_number(end.get(key)) else math.inf for key in ("samples", "val_loss"))
    wants = [] if saved else ["a checkpoint, which it lacks"]
    if saved and samples >= most:
        wants.append(f"train.max_samples above {samples}")
    if saved and loss <= cfg.eval.target:
        wants.append(f"eval.target below {loss} or 0")
    if wants:
        raise Refusal(
            f"{folder} already holds a finished run; to train longer give {' and '.join(wants)};"
            " or set run.dir to another folder, or run.overwrite=true"
        )


def _differences(cfg: Config, there: Config, step: int) -> list[str]:
    """The keys that may not change and have another value there, in words. step: from which the run goes on."""
    ran = config.flat(there)
    differ = []
    for key, value in config.flat(cfg).items():
        may_change = KEYS[key].resume or (key == SWITCH and _switched(cfg, step) == _switched(there, step))
        if value != ran[key] and not may_change:
            differ.append(f"{key}={value!r}, there {ran[key]!r}")
    return differ


def _switched(cfg: Config, step: int) -> list[tuple[int, str]]:
    """The entries of precision.switch that begin at a step or before. An evaluation at the step is in their preset."""
    batch = cfg.train.global_batch
    return [entry for entry in cfg.precision.switch if schedule.steps_for(entry[0], batch) <= step]


def load_weights(path: Path, state: State, cfg: Config, facts: dict[str, object]) -> Checkpoint:
    """Fill the weights from a checkpoint of the same run. facts: as for `Saver`. Collective. Raises: Refusal.

    `load_progress` fills the rest after the warm-up, which clears moments and FP8 history.
    """
    with ranks.agreed():
        saved = open_for(path, state, cfg, facts)
        _load(saved, state, "model.")
    return saved


def open_for(path: Path, state: State, cfg: Config, facts: dict[str, object]) -> Checkpoint:
    """A checkpoint from which a state can go on. facts: as for `Saver`. Raises: Refusal."""
    saved = Checkpoint(path)
    shapes = {key: tuple(entry.shape) for key, entry in saved.tensors.items()}
    wanted = {key: tuple(rows.shape) for key, rows in rows_of(state).items() if key != HISTORY}
    if had := policy.layers_with_delayed_scales(_config_of(saved)):  # other layers may have delayed scales from now on
        wanted[HISTORY] = (2 * len(had), cfg.precision.history)
    fit.require_fit(shapes, wanted, f"checkpoint {path}")
    _require_same_run(saved, cfg, str(facts["run"]))
    for key in ("train_samples", "val_samples"):
        value = facts[key]
        if (had := saved.info.get(key)) != value:
            raise Refusal(
                f"checkpoint {path} comes from a data set of {had} {key.replace('_', ' ')}, this one has"
                f" {value}: order and noise would change; give the data set of the run"
            )
    return saved


def _config_of(saved: Checkpoint) -> Config:
    """The config that a checkpoint was saved with. Raises: Refusal."""
    return config_file.from_flat(saved.info["name"], saved.info["config"])


def _require_same_run(saved: Checkpoint, cfg: Config, identity: str) -> None:
    """Raises: Refusal for a checkpoint of another run. Checkpoints of earlier versions name no run."""
    info = saved.info
    differ = _differences(cfg, _config_of(saved), info["step"])
    if info.get("run", identity) != identity or differ:
        which = f"run {info.get('run', 'without an identity')} ({info['name']}), this is run {identity} ({cfg.name})"
        keys = f": {'; '.join(differ)}" if differ else ""
        raise Refusal(
            f"checkpoint {saved.folder} belongs to {which}{keys}; move it out of the folder, or start a new run from"
            f" it with --init.weights={saved.folder}"
        )


def load_progress(saved: Checkpoint, state: State) -> None:
    """Fill the moments and the FP8 history, and set the counters. Collective. Raises: Refusal."""
    with ranks.agreed():
        _load(saved, state, "optimizer.")
        _load_history(saved, state)
    state.precision.set_scales()
    state.set_clock(saved.info["step"], saved.info["samples"])
    state.opt.set_steps(state.step)


def _load(saved: Checkpoint, state: State, prefix: str) -> None:
    """Each rank reads only its own rows."""
    with torch.no_grad():
        for key, rows in rows_of(state).items():
            if key.startswith(prefix):
                values = saved.read(key, rows.first, len(rows.local))
                rows.local.copy_(fit.finite(values, key, saved.folder))


def _load_history(saved: Checkpoint, state: State) -> None:
    """By layer. A layer that the checkpoint does not know has no history: no stage up to here has delayed sides there.

    So the run equals one that knew all stages from the start.
    """
    state.precision.history.zero_()
    if had := policy.layers_with_delayed_scales(_config_of(saved)):
        values = fit.finite(saved.read(HISTORY), HISTORY, saved.folder)
        own = dict(zip(state.precision.remembering, state.precision.history.split(2)))
        for layer, rows in zip(had, values.split(2)):
            if layer in own:
                own[layer].copy_(rows)
