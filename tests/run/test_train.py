"""Whole runs inside this process, and what they leave in their folder."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, called, data_overrides, micro_run, require_identical, trained
from PIL import Image
from run_files import column, event, events, lines

from flux_ref import config, config_file
from flux_ref.cli import Refusal
from flux_ref.model import parameter_table
from flux_ref.pictures import artist

FILES = {
    *(".lock", "checkpoints", "config.toml", "environment.json", "eval.jsonl", "loss.png"),
    *("metrics.jsonl", "outcome.json", "result_0.txt"),
    *(["tensorboard"] if importlib.util.find_spec("tensorboard") else []),
}
PICTURES = {"samples"}


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, shapes_dir):
    """The folder of a run without overrides; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    assert called("train.py", *micro_run(shapes_dir, folder)) == 0
    return folder


@pytest.fixture
def run(tmp_path, shapes_dir):
    """Runs train.py with overrides inside this process and returns the run's folder."""

    def start(*overrides, name="run", data=shapes_dir, code=0):
        assert called("train.py", *micro_run(data, tmp_path / name, *overrides)) == code
        return tmp_path / name

    return start


def test_a_seed_makes_a_run_and_evaluations_and_warm_up_steps_do_not_change_it(run, plain):
    other = run("--train.seed=1", name="other")
    often = run("--eval.every_samples=12", "--eval.at_start=true", name="often")
    rarely = run("--eval.every_samples=600", "--train.synthetic_steps=0", name="rarely")
    assert column(often, "samples", "eval.jsonl") == [0, 12, 24, 36, 48, 60]
    assert column(rarely, "samples", "eval.jsonl") == [60]
    for same in (often, rarely):
        assert column(same, "loss") == column(plain, "loss")
        assert column(same, "val_loss", "eval.jsonl")[-1] == column(plain, "val_loss", "eval.jsonl")[-1]
        require_identical(trained(same, ""), trained(plain, ""))
    assert not set(column(plain, "loss")) & set(column(other, "loss")) and event(other, "seed")["value"] == 1


def test_the_folder_holds_everything_and_nothing_unfinished(plain, shapes_dir, micro):
    assert names(plain) == FILES and names(plain / "checkpoints") == {"step_000000003", "step_000000005"}
    started = config_file.load(MICRO, [f"--run.dir={plain}", *data_overrides(shapes_dir)])
    assert config.flat(config_file.load(plain / "config.toml")) == config.flat(started)
    with Image.open(plain / "loss.png") as image:
        assert image.format == "PNG" and len(image.convert("RGB").getcolors(1 << 20)) > 4
    found = trained(plain)
    table = parameter_table(micro.model)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == table
    assert found["final_layer.linear.weight"].abs().max() > 0, "still as initialised"


def test_metrics_and_evaluations_hold_what_happened(plain):
    assert column(plain, "step") == [1, 2, 3, 4, 5]
    assert column(plain, "lr") == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3, 2e-3])
    for record in lines(plain):
        assert record["samples_per_s"] > 0 and 0 <= record["data_wait"] <= 1 and record["peak_memory_gb"] > 0.05
        assert 0 < record["grad_norm"] < 10
    assert column(plain, "samples", "eval.jsonl") == [36, 60]
    for record in lines(plain, "eval.jsonl"):
        assert record["val_loss"] == pytest.approx(np.mean(record["val_loss_per_timestep"]), rel=1e-12)
        assert record["count"] == 45


def test_the_last_evaluation_comes_at_the_end_and_intervals_are_rounded_up_to_whole_steps(run):
    folder = run("--train.max_samples=60", "--eval.every_samples=20", "--train.log_every_samples=25")
    assert column(folder, "samples", "eval.jsonl") == [24, 48, 60]
    assert column(folder, "samples") == [24, 36, 48, 60]  # before each evaluation the step is checked and logged
    stop = event(folder, "run_stop")["metadata"]
    assert (stop["status"], stop["samples_count"], stop["reason"]) == ("aborted", 60, "train.max_samples reached")


def test_reaching_the_target_stops_early_with_success(run, plain):
    losses = column(plain, "val_loss", "eval.jsonl")
    folder = run(f"--eval.target={losses[0]!r}")
    assert column(folder, "samples") == [12, 24, 36] and column(folder, "samples", "eval.jsonl") == [36]
    stop = event(folder, "run_stop")["metadata"]
    assert (stop["status"], stop["samples_count"], stop["reason"]) == ("success", 36, "target reached")
    just_below = run(f"--eval.target={min(losses) * (1 - 1e-9)!r}", name="just below")
    assert event(just_below, "run_stop")["metadata"]["status"] == "aborted"


def test_a_run_without_a_validation_set_trains_alike_and_draws_captions_of_its_training_set(run, plain, capsys):
    folder = run("--data.val=", "--train.log_every_samples=48", "--pictures.count=1")
    assert names(folder) == FILES - {"eval.jsonl"} | PICTURES
    assert column(folder, "samples") == [48, 60] and column(folder, "loss") == column(plain, "loss")[3:]
    require_identical(trained(folder, ""), trained(plain, ""))
    out = capsys.readouterr().out
    assert "  weights drawn from train.seed=0\n  data    " in out and " (50 samples); validation: none (0)\n" in out
    assert json.loads((folder / "outcome.json").read_text())["val_loss"] is None
    assert event(folder, "eval_samples")["value"] == 0
    assert not [line for line in events(folder) if line["key"].startswith("eval_a")]


def test_events_come_in_the_benchmarks_order(run, plain):
    found = events(run("--data.drop_page_cache=true", "--train.max_samples=72"))
    keys = [line["key"] for line in found]
    block = ["block_start", "block_stop", "eval_start", "eval_accuracy", "averaged_validation_loss", "eval_stop"]
    assert keys[:2] == ["cache_clear", "init_start"]
    assert keys[keys.index("init_stop") :] == ["init_stop", "run_start", *block, *block, "run_stop"]
    assert [line["metadata"]["samples_count"] for line in found[-13:]] == [0] + [36] * 6 + [72] * 6
    times = [line["time_ms"] for line in found]
    assert times == sorted(times)
    assert events(plain)[0]["key"] == "init_start", "nothing was evicted"


def test_no_data_is_opened_before_run_start(run, shapes_dir, tmp_path):
    """Also not through a path that a later version may take: every opening of a file is audited."""
    opened, watching = {}, [True]

    def watch(event, args):
        if watching and event == "open" and str(args[0]).startswith(str(shapes_dir)):
            log = (tmp_path / "run" / "result_0.txt").read_text()
            opened.setdefault(Path(args[0]).name, '"run_start"' in log)

    sys.addaudithook(watch)
    run("--train.max_samples=12")
    watching.clear()
    assert opened == {"shard_000000.tar": True, "t5_empty.npy": True, "clip_empty.npy": True}


def test_a_refusal_leaves_no_folder(run, capsys):
    pictures = ("--data.expected_train_samples=0", "--pictures.count=1", "--pictures.vae=none.safetensors")
    for options, words in (
        (("--data.expected_val_samples=46",), "holds 45 samples, data.expected_val_samples=46 asks for 46"),
        (("--compute.cuda_graphs=on",), "compute.cuda_graphs=on cannot be honoured: a device of type cpu"),
        (
            ("--data.expected_val_samples=0", *pictures),
            "autoencoder none.safetensors is no file",
        ),  # looked at before training
    ):
        assert not run("--data.kind=embeddings", *options, code=2).exists()
        assert words in capsys.readouterr().err


def test_what_fails_after_training_does_not_take_the_run_with_it(run, monkeypatch):
    def refuse(*_):
        raise Refusal("the empty encodings are gone")

    with monkeypatch.context() as patch:
        patch.setattr(artist.Artist, "paint", refuse)
        folder = run("--pictures.count=1", code=2)
    assert names(folder) == FILES - {"outcome.json"} and trained(folder)
    assert event(folder, "run_stop")["metadata"]["samples_count"] == 60
    assert names(run("--pictures.count=1")) == FILES | PICTURES
