"""Whose a run's folder is, from where a run in it goes on, and what becomes of an older one."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import MICRO
from other_values import with_another
from precision_ranks import SIZES
from run_files import contents

from flux_ref import checkpoint, config, config_file, folder, ranks
from flux_ref.config import KEYS, Config
from flux_ref.errors import Refusal
from flux_ref.ranks import World

COUNTS = {"train_samples": 50, "val_samples": 45}


@pytest.fixture
def world() -> World:
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


@pytest.fixture
def cfg(tmp_path) -> Config:
    """A config whose run has a folder of its own."""
    own = f"--run.dir={tmp_path / 'run'}", "--checkpoint.every_samples=24", "--train.max_samples=48"
    return config_file.load(MICRO, own)


def put_checkpoints(cfg: Config, place: Path) -> None:
    """One more than checkpoint.keep: a kill came between a save and the deletion."""
    for step in (1, 2, 4):
        saved = checkpoint.folder_of(place) / f"step_{step:09d}"
        saved.mkdir(parents=True)
        info = {"step": step, "name": cfg.name, "config": config.flat(cfg)} | COUNTS
        checkpoint.write_manifest(saved, info, {}, [])


def put(cfg: Config, state: str, loss: float | None = 0.5) -> Path:
    """Bring the folder of a config into a state. loss: at the end of a finished run."""
    place = config.run_dir(cfg)
    if state != "absent":
        place.mkdir()
    if state == "foreign":
        (place / "notes.txt").write_text("of somebody else")
    if state in ("begun", "saved", "finished", "unsaved"):
        (place / "config.toml").write_text(config_file.dump(cfg))
    if state in ("saved", "finished"):
        put_checkpoints(cfg, place)
    if state in ("finished", "unsaved"):
        (place / "outcome.json").write_text(json.dumps({"samples": 48, "val_loss": loss}))
    return place


def outcome(cfg: Config, world: World, begins: bool = False, sizes: dict[str, int] = COUNTS) -> str:
    """What becomes of a start: anew, from a checkpoint, or the reason of its refusal."""
    try:
        with ExitStack() as stack:
            saved = stack.enter_context(folder.held(cfg, world, sizes))
            told = folder.begin(cfg, world, saved, stack) if begins else ""
            way = f"from {saved.name}" if saved else "anew"
            return f"{way}; {told}" if told else way
    except Refusal as refusal:
        assert "\n" not in str(refusal)
        return str(refusal)


OUTCOMES = {
    "absent": "anew",
    "empty": "anew",
    "begun": "anew",
    "saved": "from step_000000004",
    "finished": "holds a finished run; raise train.max_samples",
    "unsaved": "holds a finished run; raise",
    "foreign": "holds files but no run; set run.dir to another folder",
}


def test_what_becomes_of_a_folder_and_nothing_changes_before_the_run_begins(cfg, world):
    for state, want in OUTCOMES.items():
        own = config_file.replace(cfg, run__dir=f"{cfg.run.dir}_{state}")
        place = put(own, state)
        before = contents(place)
        assert want in outcome(own, world)
        assert contents(place) == before and place.exists() == (state != "absent")
        if want in ("anew", "from step_000000004"):
            reason = "has no checkpoint to go on from, so this run begins anew; it lies in"
            aside = f"; the run that was in {place} {reason} {place}.1" if state == "begun" else ""
            assert outcome(own, world, begins=True) == want + aside
            kept = sorted(path.name for path in place.glob("checkpoints/*"))
            assert kept == (["step_000000002", "step_000000004"] if state == "saved" else [])
            assert config.flat(config_file.load(place / "config.toml")) == config.flat(own)


def test_overwriting_renames_the_old_run_and_loses_nothing(cfg, world, monkeypatch):
    place = put(cfg, "finished")
    (place / "notes.txt").write_text("of somebody else")
    own = config_file.replace(cfg, run__overwrite=True)
    before = contents(place)
    assert outcome(own, world) == "anew" and contents(place) == before
    for number in (1, 2):
        aside = Path(f"{place}.{number}")
        assert outcome(own, world, begins=True) == f"anew; the run that was in {place} lies in {aside}"
        assert list(contents(place)) == ["config.toml"] and not config_file.load(place / "config.toml").run.overwrite
    assert contents(Path(f"{place}.1")) == before
    put_checkpoints(cfg, place)
    assert outcome(own, world) == "from step_000000004", "a restart by torchrun, whose store knows of the run"


def test_two_jobs_never_share_a_folder_whatever_its_name(cfg, world):
    place = put(cfg, "saved")
    linked = place.with_name("linked")
    linked.symlink_to(place)
    with folder.held(cfg, world, COUNTS):
        for own in (cfg, config_file.replace(cfg, run__overwrite=True), config_file.replace(cfg, run__dir=str(linked))):
            assert f"{place} is in use by another job; wait" in outcome(own, world)
    assert outcome(cfg, world) == "from step_000000004"


def test_what_decides_samples_weights_or_losses_may_not_change_and_is_named(cfg, world):
    put(cfg, "saved")
    for key in KEYS.keys() - {"run.dir", "run.overwrite"}:
        found = outcome(with_another(cfg, key), world)
        words = f"holds a run of another config or data: {key}="
        assert found == "from step_000000004" if KEYS[key].resume else words in found, key
    for key in COUNTS:
        assert f"data: {key}=51, there {COUNTS[key]};" in outcome(cfg, world, sizes=COUNTS | {key: 51})


def test_of_a_switch_only_what_begins_after_the_checkpoint_may_change(cfg, world):
    """By the switches of the run, whose checkpoint has 48 samples, and those given: whether the run goes on."""
    past, later = (24, "fp8"), (60, "bf16")
    cases = [
        ((), ((49, "fp8"),), True),
        ((), ((37, "fp8"),), False),  # begins at 48 samples, and an evaluation there was in the preset before
        ((past, later), (past, (72, "nvfp4")), True),
        ((past, later), (later,), False),
    ]
    for number, (there, given, goes_on) in enumerate(cases):
        values = SIZES | {"parallel__dtype": "bf16", "train__max_samples": 96, "run__dir": f"{cfg.run.dir}_{number}"}
        own = config_file.replace(cfg, **values)
        put(config_file.replace(own, precision__switch=there), "saved")
        found = outcome(config_file.replace(own, precision__switch=given), world)
        assert found == "from step_000000004" if goes_on else "precision.switch=" in found, given


def test_a_run_is_extended_only_by_what_lets_it_train_on(cfg, world):
    """Its last loss, train.max_samples and eval.target: whether it goes on."""
    cases = [
        (0.5, 48, 0.0, False),
        (0.5, 96, 0.5, False),
        (0.5, 49, 0.4, True),
        (None, 49, 0.6, True),
    ]
    for number, (loss, most, target, goes_on) in enumerate(cases):
        own = config_file.replace(cfg, run__dir=f"{cfg.run.dir}_{number}")
        put(own, "finished", loss)
        found = outcome(config_file.replace(own, train__max_samples=most, eval__target=target), world)
        assert found == "from step_000000004" if goes_on else "holds a finished run" in found, (loss, most, target)
