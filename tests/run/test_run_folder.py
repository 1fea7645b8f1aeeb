"""Whose a run's folder is, from where a run in it goes on, and what becomes of an older one."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest
from conftest import MICRO, PYTHONPATH, called, micro_run
from other_values import with_another
from run_files import contents, flip, left_in, saved_steps

from flux_ref import checkpoint, config, config_file, files, ranks, run_folder
from flux_ref.cli import Refusal
from flux_ref.config import KEYS
from flux_ref.report import Reporter

COUNTS = {"train_samples": 50, "val_samples": 45}


@pytest.fixture
def world():
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


@pytest.fixture
def cfg(tmp_path):
    """A config whose run has a folder of its own."""
    own = f"--run.dir={tmp_path / 'run'}", "--checkpoint.every_samples=24", "--train.max_samples=48"
    return config_file.load(MICRO, own)


def put_checkpoints(cfg, place):
    """One more than checkpoint.keep: a kill came between a save and the deletion."""
    for step in (1, 2, 4):
        saved = checkpoint.folder_of(place) / f"step_{step:09d}"
        saved.mkdir(parents=True)
        info = {"step": step, "name": cfg.name, "config": config.flat(cfg)} | COUNTS
        content = {"format": checkpoint.FORMAT, "info": info, "shapes": {}, "files": {}}
        (saved / checkpoint.MANIFEST).write_text(json.dumps(content | {"crc32": checkpoint._checksum(content)}))


def put(cfg, state, loss=0.5):
    """Bring the folder of a config into a state of LIFE. loss: at the end of a finished run."""
    place = config.run_dir(cfg)
    if state == "absent":
        return place
    place.mkdir()
    if state == "foreign":
        (place / "notes.txt").write_text("of somebody else")
    if state in ("empty", "foreign"):
        return place
    own = config_file.replace(cfg, train__seed=int(state == "of another seed"))
    if state != "without its config":
        (place / "config.toml").write_text(config_file.dump(own))
    if state not in ("begun", "unsaved"):
        put_checkpoints(own, place)
    if state in ("finished", "unsaved"):
        (place / "outcome.json").write_text(json.dumps({"samples": 48, "val_loss": loss}))
    if state == "of a cut outcome":
        (place / "outcome.json").write_text('{"samples": 48')
    if state == "damaged":
        flip(place / NEWEST, 30)
    if state == "of older code":
        (place / NEWEST).write_text('{"info": {}, "tensors": {}, "crc32": 1}')
    return place


def outcome(cfg, world, begins=False, sizes=COUNTS):
    """What becomes of a start: anew, from a checkpoint, or the reason of its refusal."""
    try:
        with ExitStack() as stack:
            saved = stack.enter_context(run_folder.held(cfg, world, sizes))
            told = run_folder.begin(cfg, world, saved, stack) if begins else ""
            way = f"from {saved.name}" if saved else "anew"
            return f"{way}; {told}" if told else way
    except Refusal as refusal:
        assert "\n" not in str(refusal)
        return str(refusal)


NEWEST = f"checkpoints/step_000000004/{checkpoint.MANIFEST}"
ASIDE = "anew; the run that was in"
LIFE = {  # by state: what the same command does, and with run.start_fresh=true
    "absent": ("anew", "anew"),
    "empty": ("anew", "anew"),
    "foreign": ("holds files but no run; set run.dir", "holds files but no run; set run.dir"),
    "begun": (ASIDE, ASIDE),
    "saved": ("from step_000000004", ASIDE),
    "finished": ("holds a finished run; raise train.max_samples", ASIDE),
    "unsaved": ("holds a finished run; raise", ASIDE),
    "of another seed": ("another config or data: train.seed=0, there 1", ASIDE),
    "damaged": ("is missing or damaged", ASIDE),
    "of a cut outcome": ("outcome.json is damaged: ", ASIDE),
    "without its config": ("from step_000000004", ASIDE),
    "of older code": ("has format None, not 3; continue its run with the code", ASIDE),
    "in use": ("in use by another job", "in use by another job"),
}


def test_the_life_of_a_folder_is_the_table_of_its_module(cfg, world):
    """What is refused is unchanged, as is what another start only looks at. What is moved aside is whole."""
    wrong = []
    for number, (state, fresh) in enumerate(product(LIFE, (False, True))):
        own = config_file.replace(cfg, run__dir=f"{cfg.run.dir}_{number}", run__start_fresh=fresh)
        place = put(own, state)
        aside, before, want = Path(f"{place}.1"), contents(place), LIFE[state][fresh]
        with ExitStack() as stack:
            if state == "in use":
                stack.enter_context(files.lock(place / run_folder.LOCK, "by another job"))
            outcome(own, world)
            right = [contents(place) == before]
            if want in ("from step_000000004", ASIDE):  # what a kill has left
                (place / f".x.png.2{files.PARTIAL}").touch()
            found = outcome(own, world, begins=True)
        right += [want in found, aside.exists() == (want == ASIDE), not left_in(place) + left_in(aside)]
        if want in ("anew", "from step_000000004", ASIDE):
            right.append(config_file.load(place / "config.toml").train.seed == cfg.train.seed)
            right.append(saved_steps(place) == ([2, 4] if want.startswith("from") else []))
            right.append(want != ASIDE or contents(aside) == before)
            right.append(("no checkpoint to go on from" in found) == (state == "begun" and not fresh))
        else:
            right.append(contents(place) == before)
        if not all(right):
            wrong.append((state, fresh, found, right))
    assert wrong == []


def test_overwriting_renames_the_old_run_and_loses_nothing(cfg, world, monkeypatch):
    place = put(cfg, "finished")
    (place / "notes.txt").write_text("of somebody else")
    own = config_file.replace(cfg, run__start_fresh=True)
    before = contents(place)
    for number in (1, 2):
        assert outcome(own, world, begins=True).endswith(f" lies in {place}.{number}")
    assert contents(Path(f"{place}.1")) == before
    put_checkpoints(cfg, place)
    assert outcome(own, world) == "from step_000000004", "a restart by torchrun, whose store knows of the run"


def test_two_jobs_never_share_a_folder_whatever_its_name(cfg, world):
    place = put(cfg, "saved")
    linked = place.with_name("linked")
    linked.symlink_to(place)
    with run_folder.held(cfg, world, COUNTS):
        for own in (
            cfg,
            config_file.replace(cfg, run__start_fresh=True),
            config_file.replace(cfg, run__dir=str(linked)),
        ):
            assert f"{place} is in use by another job; wait" in outcome(own, world)
    assert outcome(cfg, world) == "from step_000000004"


def test_what_decides_samples_weights_or_losses_may_not_change_and_is_named(cfg, world):
    put(cfg, "saved")
    for key in KEYS.keys() - {"run.dir", "run.start_fresh"}:
        found = outcome(with_another(cfg, key), world)
        words = f"holds a run of another config or data: {key}="
        assert found == "from step_000000004" if KEYS[key].resume else words in found, key
    for key in COUNTS:
        assert f"data: {key}=51, there {COUNTS[key]};" in outcome(cfg, world, sizes=COUNTS | {key: 51})


def test_a_damaged_record_is_refused_before_a_record_goes(cfg, world):
    place = put(cfg, "saved")
    (place / "metrics.jsonl").write_text('{"samples": 48, "loss": 1}\n{"samples": 60, "loss": 1}\n')
    (place / "eval.jsonl").write_text("half of\n")
    before = contents(place)
    with pytest.raises(Refusal, match=r"eval\.jsonl, line 1 is no record"):
        Reporter(cfg, world, print).resume({"step": 4, "samples": 48})
    assert contents(place) == before


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


# Whole runs: 5 steps, checkpoints after steps 3 and 5


@pytest.fixture(scope="module")
def whole(shapes_dir, tmp_path_factory):
    """A finished run; tests must not change it."""
    place = tmp_path_factory.mktemp("whole") / "run"
    assert called("train.py", *micro_run(shapes_dir, place)) == 0
    return place


@pytest.mark.slow
def test_a_config_in_a_run_is_for_this_run_only(whole, shapes_dir, tmp_path, attempt):
    """Of a copy, a moved run and a linked one: by its config.toml, and with the --run.dir that the message gives."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    assert attempt(*micro_run(shapes_dir, run))[0] == 0
    shutil.copytree(run, copy)
    before = contents(run), contents(copy)
    longer = "--train.max_samples=72"
    code, _, line = attempt(copy / "config.toml", longer)
    assert code == 2 and line.endswith(f"its run.dir is {run}; give --run.dir={copy}"), line
    assert (contents(run), contents(copy)) == before
    assert attempt(copy / "config.toml", longer, f"--run.dir={copy}")[0] == 0 and contents(run) == before[0]
    assert attempt(copy / "config.toml", "--train.max_samples=84")[0] == 0, "it names this folder from then on"
    (tmp_path / "link").symlink_to(run)
    assert attempt(tmp_path / "link" / "config.toml", longer)[0] == 0
    assert attempt(*micro_run(shapes_dir, tmp_path / "link"), "--run.start_fresh=true")[0] == 0
    assert (tmp_path / "link").is_symlink() and saved_steps(Path(f"{run}.1")) == [5, 6] and saved_steps(run) == [3, 5]


MOUNTED = """
set -e
mount -t tmpfs tmpfs "$1"; mkdir "$1/a" "$1/b"; mkdir "$1/a/run" "$1/b/run" "$1/volume"
mount --bind "$1/a/run" "$1/b/run"
shift; exec "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() or not shutil.which("unshare"), reason="mounts need root"
)
def test_a_mounted_folder_has_one_owner_is_overwritten_in_place_and_may_fill_up(whole, shapes_dir, tmp_path):
    """Two containers mount one folder as their own; then a run in it has no checkpoint, and its folder cannot move."""
    work = "import sys; sys.path[:0] = sys.argv[1].split(':'); import mounted_runs; mounted_runs.main(*sys.argv[2:])"
    own = [sys.executable, "-c", work, PYTHONPATH, str(tmp_path), str(shapes_dir), str(whole)]
    done = subprocess.run(["unshare", "-m", "bash", "-c", MOUNTED, "-", str(tmp_path), *own], capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-3000:]
