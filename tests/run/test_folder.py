"""Whose a run's folder is, and from where a run in it goes on."""

import dataclasses
import errno
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MICRO
from precision_ranks import SIZES

from flux_ref import config, config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import claim, files
from flux_ref.formats.claim import take
from flux_ref.formats.jsonl import ENDED, REACHED
from flux_ref.run import folder as run_folder
from flux_ref.run import resuming


def contents(folder: Path) -> dict[str, bytes] | None:
    """Every visible file below a folder; None if there is no folder."""
    if not folder.exists():
        return None
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def cfg(tmp_path) -> Config:
    """A config whose run has a folder of its own."""
    own = f"--run.dir={tmp_path / 'run'}", "--checkpoint.every_samples=24", "--train.max_samples=48"
    return config_file.load(MICRO, own)


def put(cfg: Config, state: str) -> Path:
    """Bring the folder of a config into a state."""
    folder = config.run_dir(cfg)
    if state != "absent":
        folder.mkdir()
    if state == "foreign":
        (folder / "notes.txt").write_text("of somebody else")
    if state in ("begun", "saved", "finished"):
        (folder / "config.toml").write_text(config_file.dump(cfg))
        (folder / "metrics.jsonl").write_text('{"samples": 12}\n')
        (folder / "result_0.txt").write_text("a log\n")
    if state in ("saved", "finished"):
        for name in ("step_000000002", "step_000000004", ".step_000000006.0a1b2c3d"):
            (folder / "checkpoints" / name).mkdir(parents=True)
    if state == "finished":
        end = {"outcome": ENDED, "samples": 48, "val_loss": 0.5}
        (folder / "outcome.json").write_text(json.dumps(end))
    return folder


def outcome(cfg: Config, restarted: bool = False) -> str:
    """What becomes of a claim: anew, from nothing, from a checkpoint, or the reason of its refusal."""
    try:
        with run_folder.claim(cfg, restarted) as start:
            if start.checkpoint:
                return f"from {start.checkpoint.name}"
            return "anew" if start.is_new else "from nothing"
    except Refusal as refusal:
        assert "\n" not in str(refusal) and str(config.run_dir(cfg)) in str(refusal)
        return str(refusal)


NO_RUN, A_RUN, FINISHED = "holds no run to continue", "already holds a run", "already holds a finished run"
FOREIGN, UNSAVED = "holds notes.txt but no run", "holds no checkpoint to continue from"
OUTCOMES = {  # of run.resume = auto, must and never
    "absent": ("anew", NO_RUN, "anew"),
    "empty": ("anew", NO_RUN, "anew"),
    "begun": ("from nothing", UNSAVED, A_RUN),
    "saved": ("from step_000000004", "from step_000000004", A_RUN),
    "finished": (FINISHED, FINISHED, A_RUN),
    "foreign": (FOREIGN, FOREIGN, FOREIGN),
}
RESUMES = ("auto", "must", "never")


def folders(cfg: Config) -> Iterator[tuple[Config, str, str]]:
    """A config with a folder of its own for every state of it and every value of run.resume."""
    for state, resume in itertools.product(OUTCOMES, RESUMES):
        yield config_file.replace(cfg, run__dir=f"{cfg.run.dir}_{state}_{resume}", run__resume=resume), state, resume


def test_what_becomes_of_a_folder(cfg):
    for own, state, resume in folders(cfg):
        folder = put(config_file.replace(own, run__resume="auto"), state)
        before = contents(folder)
        found = outcome(own)
        assert OUTCOMES[state][RESUMES.index(resume)] in found, (state, resume)
        if found not in ("anew", "from nothing", "from step_000000004"):
            assert contents(folder) == before, "a refusal changes nothing"
        else:
            assert not list(folder.glob("checkpoints/.*")), "what a broken save has left is cleaned up"
            stored = config_file.load(folder / "config.toml")
            assert (stored.run.resume, stored.run.overwrite) == ("auto", False)


def test_overwriting_moves_the_old_run_alone_and_a_refusal_brings_it_back(cfg):
    for own, state, resume in folders(cfg):
        if state in ("absent", "empty", "foreign"):
            continue
        folder = put(own, state)
        for name in ("notes.txt", "samples/my.png"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("of somebody else")
        new = config_file.replace(own, run__overwrite=True)
        before = contents(folder)
        saved = {path.name for path in folder.glob("checkpoints/step_*")}
        with pytest.raises(Refusal, match="a wrong file"), run_folder.claim(new, restarted=False):
            raise Refusal("a wrong file")
        assert contents(folder) == before, (state, resume)
        assert {path.name for path in folder.glob("checkpoints/step_*")} == saved
        assert outcome(new) == "anew", (state, resume)
        foreign = {"notes.txt", "samples/my.png"}
        assert set(contents(folder)) == {"config.toml"} | foreign | {
            f"overwritten_1/{name}" for name in before.keys() - foreign
        }
        assert {path.name for path in folder.glob("overwritten_1/checkpoints/step_*")} == saved
        assert outcome(new) == "anew"
        assert {path.name for path in folder.glob("overwritten_*")} == {"overwritten_1", "overwritten_2"}
    put(config_file.replace(cfg, run__dir=f"{cfg.run.dir}_foreign"), "foreign")
    assert FOREIGN in outcome(config_file.replace(cfg, run__dir=f"{cfg.run.dir}_foreign", run__overwrite=True))


def test_what_a_refused_start_writes_beside_a_run_goes_with_it(cfg):
    folder = put(cfg, "saved")
    log, environment = folder / run_folder.LOG, folder / run_folder.ENVIRONMENT
    for held in ((), (log,), (environment,), (log, environment)):
        for path in (log, environment):
            path.unlink(missing_ok=True)
            if path in held:
                path.write_text('{"key": "run_start"}\n')  # of an earlier start
        before = contents(folder)
        with pytest.raises(Refusal, match="a wrong file"), run_folder.claim(cfg, restarted=False):
            files.append(log, "a greeting\n")
            files.write_whole(environment, '{"ranks": 7}\n')
            raise Refusal("a wrong file")
        assert contents(folder) == before, held


def test_what_a_start_has_written_since_its_clock_started_stays(cfg):
    folder = put(cfg, "saved")
    with pytest.raises(KeyboardInterrupt), run_folder.claim(cfg, restarted=False):
        files.append(folder / run_folder.LOG, '{"key": "run_start"}\n{"key": "run_stop"}\n')
        raise KeyboardInterrupt  # as in the pictures at the end
    assert (folder / run_folder.LOG).read_text() == 'a log\n{"key": "run_start"}\n{"key": "run_stop"}\n'


def test_overwriting_needs_a_run_and_spares_the_weights_that_it_starts_from(cfg):
    folder = put(cfg, "finished")
    before = contents(folder)
    weights = str(folder / "checkpoints" / "step_000000004")
    found = outcome(config_file.replace(cfg, run__overwrite=True, init__weights=weights))
    assert f"init.weights={weights} is of the run that run.overwrite=true replaces" in found
    assert contents(folder) == before
    (folder / "config.toml").write_text("train.seed = 1\n")
    assert "that a run wrote" in outcome(config_file.replace(cfg, run__overwrite=True))


def test_what_torchrun_restarts_goes_on_whatever_the_command_asked_for(cfg):
    put(cfg, "saved")
    for values in ({}, {"run__overwrite": True}, *({"run__resume": name} for name in RESUMES)):
        assert outcome(config_file.replace(cfg, **values), restarted=True) == "from step_000000004"


def test_a_full_disk_is_refused_with_the_key_and_leaves_nothing(cfg, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder.files, "write_whole", full)
    folder = config.run_dir(cfg)
    line = rf"run.dir={folder} cannot be made or written: No space left on device; set run.dir"
    with pytest.raises(Refusal, match=line), run_folder.claim(cfg, restarted=False):
        pass
    assert not folder.exists()


def changed(key: str, value: object) -> object:
    """Another value for a key."""
    if choices := config.KEYS[key].choices:
        return next(choice for choice in reversed(choices) if choice != value)
    if isinstance(value, bool):
        return not value
    if key == resuming.SWITCH:
        return ((12, "fp8"),)
    if isinstance(value, tuple):
        return (2, 4, 2) if config.KEYS[key].type == tuple[int, ...] else ("a red square",)
    return f"{value}_other" if isinstance(value, str) else value * 2 + 1 if isinstance(value, int) else value / 2 + 0.1


def with_changed(cfg: Config, *keys: str) -> Config:
    """A copy with other values, unchecked: some make no sense together."""
    for key in (*keys, *(["parallel.compile"] if "parallel.activation_budget" in keys else [])):  # which it needs
        section, name = key.split(".")
        own = getattr(cfg, section)
        own = dataclasses.replace(own, **{name: changed(key, getattr(own, name))})
        cfg = dataclasses.replace(cfg, **{section: own})
    return cfg


def test_what_decides_samples_weights_or_losses_may_not_change_and_is_named(cfg):
    folder = put(cfg, "saved")
    before, replies = contents(folder), {}
    fixed = {key for key, known in config.KEYS.items() if not known.resume}
    for key in fixed:
        other = with_changed(cfg, key)
        values = f"{key}={config.flat(other)[key]!r}, there {config.flat(cfg)[key]!r}"
        replies[f"holds a run of another config: {values};"] = outcome(other)
    assert [want for want, found in replies.items() if want not in found] == []
    found = outcome(with_changed(cfg, "train.seed", "optim.lr", "model.hidden", "eval.batch"))
    assert all(f"{key}=" in found for key in ("train.seed", "optim.lr", "model.hidden")) and "eval.batch=" not in found
    assert found.endswith("; of precision.switch only what begins after 48 samples may change")
    assert contents(folder) == before
    assert fixed == {
        *(
            key
            for key in config.KEYS
            if key.split(".")[0] in ("model", "optim", "init", "precision")
            and key not in ("precision.gather", "precision.native")
        ),
        *("train.seed", "train.global_batch", "train.caption_drop", "train.timestep"),
        *("train.timestep_mean", "train.timestep_width", "train.timestep_shift"),
        *("eval.every_samples", "eval.at_start", "eval.noise"),
        *("data.kind", "data.train_count", "data.val_count", "parallel.dtype", "parallel.reduce_dtype"),
    }


def test_of_a_switch_only_what_begins_after_the_checkpoint_may_change(cfg):
    """By the switches of the run, whose checkpoint has 48 samples, and those given: whether the run goes on."""
    past, later = (24, "fp8"), (60, "bf16")
    cases = [
        ((), ((49, "fp8"),), True),
        ((), ((37, "fp8"),), False),  # begins at 48 samples, and an evaluation there was in the preset before
        ((past,), (past, later), True),
        ((past, later), (past, (72, "nvfp4")), True),
        ((past, later), (later,), False),
        ((past,), ((24, "fp8_delayed"),), False),
    ]
    own = config_file.replace(cfg, **SIZES, parallel__dtype="bf16", train__max_samples=96)
    folder = put(own, "saved")
    offenders = []
    for there, given, goes_on in cases:
        (folder / "config.toml").write_text(config_file.dump(config_file.replace(own, precision__switch=there)))
        found = outcome(config_file.replace(own, precision__switch=given))
        want = "from step_000000004" if goes_on else f"precision.switch={given!r}, there {there!r}"
        offenders += [(there, given, found)] if want not in found else []
    assert offenders == []


def test_what_decides_nothing_may_change_and_is_written_down(cfg):
    offenders = []
    put(cfg, "saved")
    for key in (key for key, known in config.KEYS.items() if known.resume and not key.startswith("run.")):
        # sample.vae is of no use for shapes
        needed = {"sample.vae": {"data__kind": "embeddings"}, "sample.every_samples": {"sample__count": 1}}
        own = config_file.replace(cfg, **needed.get(key, {}))
        folder = config.run_dir(own)
        (folder / "config.toml").write_text(config_file.dump(own))
        other = with_changed(own, key)
        found = outcome(other)
        before = config.flat(config_file.load(folder / "config.toml"))[key]
        run_folder.write_config(other)  # as training begins
        stored = config.flat(config_file.load(folder / "config.toml"))[key]
        if found != "from step_000000004" or before != config.flat(own)[key] or stored != config.flat(other)[key]:
            offenders.append((key, found, before, stored))
    assert offenders == []


def test_a_run_is_extended_only_by_what_lets_it_train_on(cfg):
    """By state of the folder, how it ended, train.max_samples and eval.target: what becomes of it, or words of that."""
    further, finished = "from step_000000004", "already holds a finished run; to train longer give"
    done, reached, short = {}, {"outcome": REACHED}, "train.max_samples=36 must not be less"
    cases = [
        ("saved", done, 36, 0.0, f"has trained on 48 samples; {short}"),
        ("saved", done, 37, 0.0, further),  # 48 samples are whole steps
        ("saved", done, 96, 0.6, further),
        ("begun", done, 12, 0.0, "from nothing"),
        ("finished", done, 48, 0.0, f"{finished} train.max_samples above 48; or set run.dir"),
        ("finished", done, 49, 0.0, further),
        ("finished", done, 36, 0.0, short),
        ("finished", {"samples": 60}, 60, 0.0, f"{finished} train.max_samples above 60;"),  # a checkpoint is gone
        ("finished", reached, 96, 0.5, f"{finished} eval.target below 0.5 or 0;"),
        ("finished", reached, 48, 0.6, f"{finished} train.max_samples above 48 and eval.target below 0.5 or 0;"),
        ("finished", reached, 96, 0.4, further),
        ("finished", {"val_loss": None}, 96, 0.0, further),
        ("finished", {"samples": "many"}, 96, 0.0, finished),
        ("finished", {"outcome": 1}, 96, 0.0, "outcome.json is damaged"),
    ]
    offenders = []
    for number, (state, end, most, target, want) in enumerate(cases):
        own = config_file.replace(cfg, run__dir=f"{cfg.run.dir}_{number}")
        folder = put(own, state)
        if end:
            path = folder / "outcome.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | end))
        found = outcome(config_file.replace(own, train__max_samples=most, eval__target=target))
        offenders += [(state, end, most, target, found)] if want not in found else []
    unsaved = config_file.replace(cfg, run__dir=f"{cfg.run.dir}_unsaved", train__max_samples=96)
    for name in ("step_000000002", "step_000000004"):
        (put(unsaved, "finished") if name.endswith("2") else config.run_dir(unsaved)).joinpath(
            "checkpoints", name
        ).rmdir()
    assert offenders == [] and f"{finished} a checkpoint, which it lacks;" in outcome(unsaved)


def test_ctrl_c_before_training_leaves_no_folder(cfg):
    """Otherwise the next command, with the mistake mended, would find a run of another config."""
    with pytest.raises(KeyboardInterrupt), run_folder.claim(cfg, restarted=False):
        raise KeyboardInterrupt
    assert not config.run_dir(cfg).exists()


# Two jobs in one folder


def test_a_job_waits_for_one_that_is_just_ending_and_is_refused_if_it_goes_on(cfg, monkeypatch):
    folder = put(cfg, "saved")
    before = contents(folder)
    other_job = take(folder / run_folder.CLAIM)
    monkeypatch.setattr(run_folder, "CLAIM_WAIT_S", 0.3)
    for own in (cfg, config_file.replace(cfg, run__overwrite=True)):
        assert f"{folder} is in use by another job (process {os.getpid()} on {os.uname().nodename} since" in outcome(
            own
        )
    assert contents(folder) == before
    monkeypatch.setattr(claim.time, "sleep", lambda seconds: other_job.close())
    assert outcome(cfg) == "from step_000000004"
    assert A_RUN in outcome(config_file.replace(cfg, run__resume="never"))
    assert outcome(cfg) == "from step_000000004", "a job that has ended or was refused frees the folder"
