"""eval.py finds the very numbers that training logged, of a run, its checkpoints and its exports; pictures; options."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, called, data_overrides, micro_run, script
from run_files import lines
from safetensors.torch import load_file, save_file

import eval as eval_script
from flux_ref import checkpoint, config_file
from flux_ref.checkpoint import Checkpoint
from flux_ref.pictures import artist
from tools import export

OFTEN = ["--eval.every_samples=24", "--checkpoint.every_samples=24", "--checkpoint.keep=9"]  # a loss for each of them
FIGURES = ("samples", "val_loss", "val_loss_per_timestep", "count")
CAPTION = "a small red circle at the middle"


def figures(record):
    return {key: record[key] for key in FIGURES}


def logged(run):
    """What training found at each evaluation."""
    return [figures(record) for record in lines(run, "eval.jsonl")]


@pytest.fixture(scope="module")
def runs(shapes_dir, tmp_path_factory):
    """A finished run with checkpoints of steps 2, 4, 5, and the same with an average of the weights."""
    folders = tmp_path_factory.mktemp("my runs") / "run", tmp_path_factory.mktemp("averaged") / "run"
    for folder, own in zip(folders, ([], ["--optim.ema_half_life=24"])):
        assert called("train.py", *micro_run(shapes_dir, folder, *OFTEN, *own)) == 0
    return folders


@pytest.fixture(scope="module")
def run(runs):
    """Tests only add pictures to it."""
    return runs[0]


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """The newest weights of both runs in both layouts."""
    folder = tmp_path_factory.mktemp("exported")
    for layout in ("bfl", "diffusers"):
        for source, more in zip(runs, ([], ["--ema"])):
            argv = [str(source), f"{folder}/{layout}{len(more)}", f"--format={layout}", *more]
            assert export.main(argv) == 0
    return sorted(folder.iterdir())


@pytest.fixture
def evaluate(attempt, monkeypatch, tmp_path, shapes_dir):
    """evaluate(weights, *options) runs eval.py in an empty folder; returns what it prints, of --json the objects.

    Other weights than a run's get the micro config and its data.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(path, *options, code=0):
        own = [] if (path / "config.toml").exists() else [f"--config={MICRO}", *data_overrides(shapes_dir)]
        found, out, line = attempt(path, *own, *options, name="eval.py")
        assert found == code and not (code and out), line
        return line if code else [json.loads(text) for text in out.splitlines()] if "--json" in options else out

    return call


def test_each_checkpoint_gives_what_training_logged_then(run, evaluate):
    found = evaluate(run, "--all", "--json")
    assert [figures(record) for record in found] == logged(run)
    assert evaluate(run, "--json") == found[2:]  # of the newest
    assert [record["weights"][-14:] for record in found] == ["step_000000002", "step_000000004", "step_000000005"]
    assert evaluate(Path(found[1]["weights"]), "--json") == found[1:2]
    shown = dict(line.split(maxsplit=1) for line in evaluate(run).splitlines())
    assert shown["samples"] == "60" and shown["val_loss"] == f"{found[2]['val_loss']:.4f}"
    assert len(shown["val_loss_per_timestep"].split()) == 8


def test_the_command_that_a_run_prints_works_as_printed_and_two_copies_at_one_rank(run, tmp_path, attempt):
    """In a folder with a space."""
    line = (run / "result_0.txt").read_text().rpartition("  next    ")[2].splitlines()[0]
    python, name, *argv = shlex.split(line)
    assert (python, name, argv) == ("python", "eval.py", [str(run)]) and " " in argv[0]
    copies = config_file.replace(config_file.load(run / "config.toml"), parallel__replicate=2)
    (tmp_path / "copies.toml").write_text(config_file.dump(copies))
    assert attempt(*argv, f"--config={tmp_path}/copies.toml", name="eval.py")[0] == 0


@pytest.mark.slow
def test_two_ranks_find_what_two_ranks_logged_and_print_each_record_once(shapes_dir, tmp_path):
    assert script("train.py", *micro_run(shapes_dir, tmp_path / "run", *OFTEN), ranks=2).returncode == 0
    process = script("eval.py", tmp_path / "run", "--all", "--json", "--prompt=a cat", "--guidance=2", ranks=2)
    assert process.returncode == 0, process.stderr[-4000:]
    found = [json.loads(line) for line in process.stdout.splitlines()]
    assert [figures(record) for record in found] == logged(tmp_path / "run")
    assert len({record["pictures"] for record in found if Path(record["pictures"]).is_file()}) == 3


def test_exports_give_the_same_number_and_remember_the_clock_and_so_the_noise(run, exported, evaluate, tmp_path):
    for path in exported[::2]:
        (record,) = evaluate(path, "--json")
        assert figures(record) == logged(run)[-1] and record["weights"] == str(path)
    for said in ("many", "-8", "1e3", ""):
        metadata = {"trained_by": "flux_ref", "samples": said}
        save_file(load_file(exported[0]), tmp_path / "said", metadata)
        line = evaluate(tmp_path / "said", code=2)
        assert f"said: samples={said!r} in its metadata is no number of samples; export it again" in line
    save_file(load_file(exported[0]), tmp_path / "bare")
    (fresh,) = evaluate(tmp_path / "bare", "--json")
    fixed = [evaluate(path, "--json", "--eval.noise=fixed")[0] for path in (tmp_path / "bare", run)]
    assert "--eval.noise=fixed" in fresh["note"] and not any("note" in record for record in fixed)
    assert fixed[0]["val_loss"] == fixed[1]["val_loss"]


def test_the_average_is_evaluated_where_asked_for_and_so_is_what_was_exported(runs, exported, evaluate):
    """Training itself is the same, and so is what it logs."""
    run, averaged = runs
    assert logged(averaged) == logged(run)
    found = evaluate(averaged, "--all", "--ema", "--json")
    assert all(record["ema"] == 24 and figures(record) not in logged(run) for record in found)
    assert "ema" not in evaluate(averaged, "--json")[0]
    (record,) = evaluate(averaged, "--ema", "--prompt=a black cat", "--draw-only", "--steps=2", "--json")
    assert record["pictures"] == f"{averaged}/samples/eval_step_000000005_ema_1.png"
    for path in exported[1::2]:
        assert evaluate(path, "--json")[0] | {"weights": ""} == found[-1] | {"weights": ""}
    for path in (run, exported[1]):
        line = evaluate(path, "--ema", "--data.val=nowhere", code=2)
        assert "hold no average of weights; --ema needs a checkpoint of a run with optim.ema_half_life above 0" in line


def test_each_drawing_is_a_new_file_in_its_run_or_here(run, exported, evaluate, tmp_path):
    """No drawing replaces another. --draw-only needs no data set."""
    (tmp_path / "list.txt").write_text(CAPTION)
    drawing = ["--prompt", "", f"--prompts={tmp_path}/list.txt", "--steps=2", "--draw-only", "--data.val=nowhere"]
    records = [evaluate(run, *drawing, "--json", *more)[0] for more in ([], [], ["--seed=1"])]
    first, second, other = (Path(record["pictures"]) for record in records)
    assert records[0].keys() == {"weights", "name", "samples", "pictures"}
    assert re.fullmatch(rf"{run}/samples/eval_step_000000005_\d+\.png", str(first)) and first != second
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    here = f"{tmp_path}/here/eval_diffusers0_1.png"
    assert evaluate(exported[2], *drawing).endswith(f" {here}\n")
    assert Path(here).read_bytes() == first.read_bytes()  # of the same weights


def test_a_prompt_draws_as_its_stored_caption_and_guidance_takes_the_empty_one(run, evaluate, monkeypatch):
    drawn = []
    monkeypatch.setattr(artist, "save", lambda pictures, captions, path: drawn.append((captions, np.stack(pictures))))
    for guidance in ("1", "30"):
        evaluate(run, "--pictures.count=3", "--steps=2", f"--guidance={guidance}")
        captions, stored = drawn[-1]
        evaluate(run, *(f"--prompt={caption}" for caption in captions), "--steps=2", f"--guidance={guidance}")
        assert drawn[-1][0] == captions and len(set(captions)) == 3
        np.testing.assert_allclose(drawn[-1][1], stored, rtol=0, atol=1e-5)
    assert abs(drawn[0][1] - stored).max() > 1e-3


REFUSED = {  # words of the line -> options
    "/here/none.toml is no file": ["--config=none.toml"],
    "autoencoder none.safetensors is no file": [
        "--data.kind=embeddings",
        "--pictures.count=1",
        "--vae=none.safetensors",
    ],
    "has no ae.safetensors; fetch it: hf download": ["--data.kind=embeddings", "--prompt=x"],
    r"--prompt: invalid utf8 value: 'caf\udce9'": ["--prompt=caf\udce9"],
    "/here/none.txt is no file": ["--prompts=none.txt"],
    "data.val is empty; give --data.val=DIR, or --prompt=TEXT with --draw-only": ["--data.val="],
    "--draw-only has nothing to draw": ["--draw-only", "--pictures.count=0"],
    "eval.batch=0": ["--eval.batch=0"],
    "argument 'runs/other' is not --section.key=value": ["runs/other"],
}


def test_what_means_nothing_is_refused_in_one_line_before_any_evaluation(run, evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_script, "validation_loss", None)
    for words, options in REFUSED.items():
        line = evaluate(run, *options, code=2)
        assert words in line, (options, line)
    (tmp_path / "notes.txt").write_text("not weights")  # named before data that is not there
    line = evaluate(tmp_path / "notes.txt", "--data.val=nowhere/val", code=2)
    assert f"{tmp_path}/notes.txt cannot be read as safetensors" in line


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_replaced_by_the_newest(run, evaluate, monkeypatch, tmp_path):
    """One that was named has no replacement."""
    want = [figures(record) for record in evaluate(run, "--all", "--json")]
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    real = Checkpoint._rows

    def strike(self, *args):
        shutil.rmtree(newest, ignore_errors=True)
        return real(self, *args)

    monkeypatch.setattr(Checkpoint, "_rows", strike)
    *_, newest = checkpoint.list_checkpoints(copy)
    (found,) = evaluate(copy, "--json")
    assert figures(found) == want[1] and found["weights"].endswith("step_000000004")
    _, newest = checkpoint.list_checkpoints(copy)
    assert "is missing or damaged" in evaluate(newest, code=2)
