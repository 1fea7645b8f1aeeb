"""Whole runs, started as a user starts them, and what they leave in their folder."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, called, data_overrides, micro_run, require_identical, script, trained
from killing import LONG
from run_files import column, event, events, lines, require_equal_runs

from flux_ref import config, config_file, schedule
from flux_ref.errors import Refusal
from flux_ref.formats.files import partial_of
from flux_ref.model import parameter_table
from flux_ref.run import reporter
from flux_ref.sampling import euler
from flux_ref.toy import make, shapes

FILES = [
    *(".lock", "checkpoints", "config.toml", "environment.json", "eval.jsonl", "loss.png"),
    *("metrics.jsonl", "outcome.json", "result_0.txt"),
]


@pytest.fixture(scope="module")
def runs(shapes_dir) -> Path:
    """The folder of all runs of this file."""
    folder = shapes_dir.parent / "runs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def by_python(runs, shapes_dir, one_thread):
    """A run of this process."""
    assert called("train.py", *micro_run(shapes_dir, runs / "by_python")) == 0
    return runs / "by_python"


@pytest.fixture(scope="module")
def many_steps(runs, shapes_dir, one_thread):
    """The run of `two_ranks`, by this process."""
    assert called("train.py", *micro_run(shapes_dir, runs / "many_steps", *LONG, "--run.hang_s=0")) == 0
    return runs / "many_steps"


@pytest.fixture
def run(tmp_path, shapes_dir):
    """Runs train.py with overrides inside this process and returns the run's folder."""

    def start(name: str = "run", *overrides: str, data: Path = shapes_dir, code: int = 0) -> Path:
        assert called("train.py", *micro_run(data, tmp_path / name, *overrides)) == code
        return tmp_path / name

    return start


# The same run, however it is started


@pytest.mark.slow
def test_plain_python_and_torchrun_give_bit_identical_runs(by_python, runs, shapes_dir):
    process = script("train.py", *micro_run(shapes_dir, runs / "by_torchrun"), ranks=1)
    assert process.returncode == 0, process.stderr[-4000:]
    require_equal_runs(runs / "by_torchrun", by_python)


def test_two_ranks_give_the_same_run_up_to_rounding(many_steps, two_ranks):
    """test_sharding.py compares other numbers of ranks."""
    found, want = two_ranks / "run", many_steps
    assert column(found, "samples") == column(want, "samples") == list(range(12, 289, 12))
    for name, keys in (("metrics.jsonl", ("loss", "grad_norm")), ("eval.jsonl", ("val_loss", "val_loss_per_timestep"))):
        for key in keys:
            np.testing.assert_allclose(column(found, key, name), column(want, key, name), rtol=1e-3)
    assert column(found, "count", "eval.jsonl") == [45] * 3


def test_two_runs_of_a_seed_are_identical_and_another_seed_differs(run, by_python):
    again, other = run("again"), run("other", "--train.seed=1")
    assert column(by_python, "loss") == column(again, "loss")
    require_identical(trained(by_python, ""), trained(again, ""))
    assert not set(column(by_python, "loss")) & set(column(other, "loss"))
    assert event(other, "seed")["value"] == 1


def test_evaluations_and_warm_up_steps_do_not_change_training(run, by_python):
    often = run("often", "--eval.every_samples=12", "--eval.at_start=true")
    rarely = run("rarely", "--eval.every_samples=600", "--train.synthetic_steps=0")
    assert column(often, "samples", "eval.jsonl") == [0, 12, 24, 36, 48, 60]
    assert column(rarely, "samples", "eval.jsonl") == [60]
    assert column(often, "loss") == column(rarely, "loss") == column(by_python, "loss")
    assert column(often, "val_loss", "eval.jsonl")[-1] == column(rarely, "val_loss", "eval.jsonl")[-1]


# What a run leaves


def test_the_folder_holds_everything_and_nothing_unfinished(by_python, two_ranks):
    for folder, last in ((by_python, 5), (two_ranks / "run", 24)):
        assert sorted(path.name for path in folder.iterdir()) == FILES
        assert f"step_{last:09d}" in [path.name for path in (folder / "checkpoints").iterdir()]
        assert all(path.name.startswith("step_") for path in (folder / "checkpoints").iterdir())


def test_the_stored_config_loads_back_equal(by_python, shapes_dir):
    started = config_file.load(MICRO, [f"--run.dir={by_python}", *data_overrides(shapes_dir)])
    assert config.flat(config_file.load(by_python / "config.toml")) == config.flat(started)


def test_metrics_hold_one_line_per_step_with_what_happened(by_python):
    records = lines(by_python)
    assert column(by_python, "step") == [1, 2, 3, 4, 5]
    assert column(by_python, "lr") == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3, 2e-3])
    for record in records:
        assert record["samples_per_s"] > 0 and 0 <= record["data_wait"] <= 1 and record["peak_memory_gb"] > 0.05
        assert record["skipped"] == 0 and 0 < record["grad_norm"] < 10


def test_evaluations_hold_eight_losses_their_mean_and_count(by_python):
    assert column(by_python, "samples", "eval.jsonl") == [36, 60]
    for record in lines(by_python, "eval.jsonl"):
        assert len(record["val_loss_per_timestep"]) == len(record["stderr_per_timestep"]) == schedule.TIMESTEPS
        assert record["val_loss"] == pytest.approx(np.mean(record["val_loss_per_timestep"]), rel=1e-12)
        assert record["count"] == 45 and 0 < record["stderr"] < 1


def test_the_chart_is_a_png(by_python):
    from PIL import Image

    with Image.open(by_python / "loss.png") as image:
        assert image.format == "PNG" and len(image.convert("RGB").getcolors(1 << 20)) > 4


def test_weights_are_whole_and_trained(by_python, micro):
    found = trained(by_python)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == parameter_table(micro.model)
    assert found["final_layer.linear.weight"].abs().max() > 0, "still as initialised"


# eval.py


def test_eval_by_plain_python_prints_what_two_ranks_logged_last(two_ranks, attempt):
    run = two_ranks / "run"
    code, out, _ = attempt(run, name="eval.py")
    last = lines(run, "eval.jsonl")[-1]
    pairs = zip(last["val_loss_per_timestep"], last["stderr_per_timestep"])
    assert code == 0 and out.splitlines() == [
        f"{run}/checkpoints/step_000000024 after 288 training samples",
        *(f"t = {k}/8   {loss:.4f} +- {error:.4f}" for k, (loss, error) in enumerate(pairs)),
        f"mean      {last['val_loss']:.4f} +- {last['stderr']:.4f}  over 45 samples",
    ]


def test_eval_computes_the_very_number_that_training_logged_with_fixed_noise(run, monkeypatch):
    """test_eval.py does so with fresh noise."""
    results = []
    folder = run("run", "--eval.noise=fixed")
    monkeypatch.setattr(reporter, "table", lambda result: results.append(result) or "")
    assert called("eval.py", folder) == 0
    last = lines(folder, "eval.jsonl")[-1]
    assert [(result.loss, result.losses) for result in results] == [(last["val_loss"], last["val_loss_per_timestep"])]


# When a run ends


def test_the_last_evaluation_comes_at_the_end_whatever_the_interval(run):
    for limit, samples, evaluated in ((40, 48, [36, 48]), (12, 12, [12])):
        folder = run(f"{limit}", f"--train.max_samples={limit}", "--train.log_every_samples=24")
        assert column(folder, "samples")[-1] == samples
        assert column(folder, "samples", "eval.jsonl") == evaluated
        stop = event(folder, "run_stop")["metadata"]
        assert (stop["status"], stop["samples_count"]) == ("aborted", samples)
        assert stop["reason"] == "train.max_samples reached"


def test_an_interval_is_rounded_up_to_whole_steps(run):
    folder = run("run", "--eval.every_samples=20", "--train.log_every_samples=25")
    assert column(folder, "samples", "eval.jsonl") == [24, 48, 60]
    assert column(folder, "samples") == [24, 36, 48, 60]  # before each evaluation the step is checked and logged


def test_reaching_the_target_stops_early_with_success(run, capsys):
    folder = run("run", "--eval.target=1000")
    assert column(folder, "samples") == [12, 24, 36]
    assert column(folder, "samples", "eval.jsonl") == [36]
    stop = event(folder, "run_stop")["metadata"]
    assert (stop["status"], stop["samples_count"], stop["reason"]) == ("success", 36, "target reached")
    assert called("eval.py", folder) == 0
    assert "after 36 training samples" in capsys.readouterr().out


def test_a_target_just_below_the_loss_is_not_reached(run, by_python):
    losses = column(by_python, "val_loss", "eval.jsonl")
    folder = run("bound", f"--eval.target={min(losses) * (1 - 1e-9)!r}")
    assert event(folder, "run_stop")["metadata"]["status"] == "aborted"
    folder = run("reached", f"--eval.target={losses[0]!r}")
    assert column(folder, "samples", "eval.jsonl") == [36]


# The benchmark's clock


def test_events_come_in_the_benchmarks_order(run):
    folder = run("run", "--data.evict=true", "--train.max_samples=72")
    keys = [line["key"] for line in events(folder)]
    block = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert keys[:2] == ["cache_clear", "init_start"]
    assert keys[keys.index("init_stop") :] == ["init_stop", "run_start", *block, *block, "run_stop"]
    assert [line["metadata"]["samples_count"] for line in events(folder)[-11:]] == [0] + [36] * 5 + [72] * 5
    times = [line["time_ms"] for line in events(folder)]
    assert times == sorted(times)


def test_the_log_claims_no_clearing_without_eviction_and_counts_real_samples(by_python, two_ranks):
    assert events(by_python)[0]["key"] == "init_start"
    assert event(two_ranks / "run", "eval_samples")["value"] == 45
    assert event(two_ranks / "run", "train_samples")["value"] == 50


def test_no_data_is_opened_before_run_start(run, shapes_dir, tmp_path):
    """Also not through a path that a later version may take: every opening of a file is audited."""
    opened, watching = {}, [True]

    def watch(event: str, args: tuple) -> None:
        if not watching or event != "open" or not isinstance(args[0], (str, Path)):
            return
        if str(args[0]).startswith(str(shapes_dir)):
            log = (tmp_path / "run" / "result_0.txt").read_text()
            opened.setdefault(Path(args[0]).name, '"run_start"' in log)

    sys.addaudithook(watch)
    run("run")
    watching.clear()
    assert opened == {"shard_000000.tar": True, "t5_empty.npy": True, "clip_empty.npy": True}


# Data made on first use


def test_missing_data_is_made_whole_on_first_use(two_ranks, shapes_dir):
    made = two_ranks / "data"
    files = sorted(path.relative_to(shapes_dir) for path in shapes_dir.rglob("*") if path.is_file())
    assert sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file()) == files and len(files) == 4
    for path in files:
        assert (made / path).read_bytes() == (shapes_dir / path).read_bytes()


def test_an_interrupted_making_is_not_taken_for_whole(run, tmp_path, shapes_dir, monkeypatch):
    data, partial = tmp_path / "data", partial_of(tmp_path / "data")
    monkeypatch.setattr(shapes, "encode", lambda picture: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make.make_shapes(data, config_file.load(MICRO).model, 50, 45)
    monkeypatch.undo()
    assert not data.exists()
    (partial / "train").mkdir(parents=True, exist_ok=True)  # as a killed process leaves it
    (partial / "train" / "stray.tar").write_bytes(b"left over")
    run("run", "--train.max_samples=12", data=data)
    assert not partial.exists()
    assert [path.name for path in (data / "train").iterdir()] == ["shard_000000.tar"]
    assert (data / "val/shard_000000.tar").read_bytes() == (shapes_dir / "val/shard_000000.tar").read_bytes()


# Refusals and faults at the command line


def test_a_refusal_leaves_no_folder(run, capsys):
    assert not run("run", "--data.kind=embeddings", "--data.val_count=46", code=2).exists()
    assert "holds 45 samples, data.val_count=46 asks for 46" in capsys.readouterr().err


def test_what_pictures_need_is_looked_at_before_training(run, capsys):
    options = ("--data.kind=embeddings", "--data.train_count=0", "--data.val_count=0", "--sample.count=1")
    assert not run("run", *options, "--sample.vae=none.safetensors", code=2).exists()
    assert "autoencoder none.safetensors: " in capsys.readouterr().err


def test_what_fails_after_training_does_not_take_the_run_with_it(tmp_path, shapes_dir, monkeypatch):
    def refuse(*_):
        raise Refusal("the empty encodings are gone")

    monkeypatch.setattr(euler.Artist, "paint", refuse)
    folder = tmp_path / "run"
    assert called("train.py", *micro_run(shapes_dir, folder, "--sample.count=1")) != 0
    assert sorted(path.name for path in folder.iterdir()) == [name for name in FILES if name != "outcome.json"]
    assert event(folder, "run_stop")["metadata"]["samples_count"] == 60 and trained(folder)
    monkeypatch.undo()
    assert called("train.py", *micro_run(shapes_dir, folder, "--sample.count=1")) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "samples"])
