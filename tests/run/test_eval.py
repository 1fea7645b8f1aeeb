"""eval.py finds the very numbers that training logged, of a run, its checkpoints and its exports; pictures; options."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, called, data_overrides, micro_run, refusal, script
from run_files import lines
from safetensors.torch import load_file, save_file

import eval as eval_script
from flux_ref import config_file
from flux_ref.pictures import sheet
from tools import export

OFTEN = ["--eval.every_samples=24", "--checkpoint.every_samples=24", "--checkpoint.keep=9"]  # a loss for each of them
FIGURES = ("samples", "val_loss", "val_loss_per_timestep", "count", "stderr", "stderr_per_timestep")
CAPTION = "a small red circle at the middle"


def figures(record: dict) -> dict:
    return {key: record[key] for key in FIGURES}


def logged(run: Path) -> list[dict]:
    """What training found at each evaluation."""
    return [figures(record) for record in lines(run, "eval.jsonl")]


def trained(shapes_dir: Path, folder: Path, *overrides: str) -> Path:
    assert called("train.py", *micro_run(shapes_dir, folder, *OFTEN, *overrides)) == 0
    return folder


@pytest.fixture(scope="module")
def run(shapes_dir, tmp_path_factory) -> Path:
    """A finished run with checkpoints of steps 2, 4, 5; tests only add pictures to it."""
    return trained(shapes_dir, tmp_path_factory.mktemp("eval") / "run")


@pytest.fixture(scope="module")
def averaged(shapes_dir, tmp_path_factory) -> Path:
    """The run, with an average of the weights."""
    return trained(shapes_dir, tmp_path_factory.mktemp("averaged") / "run", "--optim.ema=24")


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> dict[str, Path]:
    """The newest checkpoint in other forms."""
    folder = tmp_path_factory.mktemp("exported")
    for layout in ("bfl", "diffusers"):
        for dtype in ("fp32", "bf16"):
            out = folder / f"{layout} {dtype}"
            assert export.main([str(run), str(out), f"--format={layout}", f"--dtype={dtype}"]) == 0
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def evaluate(attempt, monkeypatch, tmp_path, shapes_dir):
    """evaluate(weights, *options) runs eval.py in an empty folder; returns what it prints, of --json the objects.

    Other weights than a run's get the micro config and its data.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(path: Path, *options: object, code: int = 0) -> str | list[dict]:
        is_run = (path / "config.toml").exists() or (path / "manifest.json").exists()
        own = [] if is_run else [f"--config={MICRO}", *data_overrides(shapes_dir)]
        found, out, line = attempt(path, *own, *options, name="eval.py")
        assert found == code, line
        if code:
            assert out == ""
            return line
        return [json.loads(text) for text in out.splitlines()] if "--json" in options else out

    return call


def test_each_checkpoint_gives_what_training_logged_then(run, evaluate):
    found = evaluate(run, "--all", "--json")
    assert [figures(record) for record in found] == logged(run)
    assert evaluate(run, "--checkpoint=4", "--json") == found[1:2]
    assert evaluate(run, "--json") == found[2:]  # of the newest
    assert found[2]["weights"] == str(run / "checkpoints" / "step_000000005")
    assert evaluate(Path(found[2]["weights"]), "--json") == found[2:]
    shown = dict(line.split(maxsplit=1) for line in evaluate(run).splitlines())
    assert shown["samples"] == "60" and shown["val_loss"] == f"{found[2]['val_loss']:.4f}"
    assert len(shown["val_loss_per_timestep"].split()) == 8


def test_the_command_that_a_run_of_two_copies_prints_works_as_printed(shapes_dir, tmp_path, attempt, capsys):
    """At one rank, and in a folder with a space."""
    trained(shapes_dir, tmp_path / "my run")
    python, name, *argv = shlex.split(capsys.readouterr().out.rpartition("  weights   ")[2])
    assert (python, name, argv) == ("python", "eval.py", [str(tmp_path / "my run")])
    copies = config_file.replace(config_file.load(tmp_path / "my run" / "config.toml"), parallel__replicate=2)
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
    for name in ("bfl fp32", "diffusers fp32"):
        (record,) = evaluate(exported[name], "--json")
        assert figures(record) == logged(run)[-1] and record["weights"] == str(exported[name])
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(exported["bfl fp32"]), bare)
    noisy = [(path, more) for path in (bare, exported["bfl fp32"]) for more in ([], ["--eval.noise=fixed"])]
    assert ["compare with --eval.noise=fixed" in evaluate(path, *more) for path, more in noisy] == [True, *[False] * 3]
    losses = [evaluate(path, "--json", "--eval.noise=fixed")[0]["val_loss"] for path in (run, bare)]
    assert losses[0] == losses[1]


def test_in_bf16_a_bf16_export_gives_the_number_of_fp32_weights(exported, evaluate):
    """Both are rounded before they are used; in fp32 the rounding shows."""
    for dtype, same in (("bf16", True), ("fp32", False)):
        options = ["--json", "--eval.noise=fixed", f"--parallel.dtype={dtype}"]
        names = ("bfl fp32", "bfl bf16", "diffusers bf16")
        exact, *rounded = [evaluate(exported[name], *options)[0]["val_loss"] for name in names]
        assert rounded[0] == rounded[1] == pytest.approx(exact, rel=1e-2)
        assert (rounded[0] == exact) == same


def test_the_average_is_evaluated_where_asked_for_and_so_is_what_was_exported(
    run, averaged, exported, evaluate, tmp_path
):
    """Training itself is the same, and so is what it logs."""
    assert logged(averaged) == logged(run)
    found = evaluate(averaged, "--all", "--ema", "--json")
    assert all(record["ema"] == 24 and figures(record) not in logged(run) for record in found)
    assert "ema" not in evaluate(averaged, "--json")[0]
    (record,) = evaluate(averaged, "--ema", "--prompt=a black cat", "--draw-only", "--steps=2", "--json")
    assert record["pictures"] == f"{averaged}/samples/eval_step_000000005_ema_1.png"
    for layout in ("bfl", "diffusers"):
        out = tmp_path / layout
        assert export.main([str(averaged), str(out), "--ema", f"--format={layout}"]) == 0
        assert evaluate(out, "--json")[0] | {"weights": ""} == found[-1] | {"weights": ""}
    for path in (run, exported["bfl fp32"], exported["diffusers fp32"]):
        line = evaluate(path, "--ema", "--data.val=nowhere", code=2)
        assert "hold no average of weights; --ema needs a checkpoint of a run with optim.ema above 0" in line
        assert "hold no average" in refusal(export.main, [str(path), str(tmp_path / "x"), "--ema", f"--config={MICRO}"])


def test_each_drawing_is_a_new_file_in_its_run_or_here(run, exported, evaluate, tmp_path):
    """No drawing replaces another. --draw-only needs no data set."""
    (tmp_path / "list.txt").write_bytes(f"\r\n{CAPTION}\u2028\r\n\r\n".encode())
    drawing = ["--prompt", "", f"--prompts={tmp_path}/list.txt", "--steps=2", "--draw-only", "--data.val=nowhere"]
    records = [evaluate(run, *drawing, "--json", *more)[0] for more in ([], [], ["--seed=1"])]
    first, second, other = (Path(record["pictures"]) for record in records)
    assert records[0].keys() == {"weights", "name", "samples", "pictures"}
    assert re.fullmatch(rf"{run}/samples/eval_step_000000005_\d+\.png", str(first)) and first != second
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    here = f"{tmp_path}/here/eval_diffusers fp32_1.png"
    assert evaluate(exported["diffusers fp32"], *drawing).endswith(f" {here}\n")
    assert Path(here).read_bytes() == first.read_bytes()  # of the same weights


def test_a_prompt_draws_as_its_stored_caption_and_guidance_takes_the_empty_one(run, evaluate, monkeypatch):
    drawn = []
    monkeypatch.setattr(sheet, "save", lambda pictures, captions, path: drawn.append((captions, np.stack(pictures))))
    for guidance in ("1", "30"):
        evaluate(run, "--sample.count=3", "--steps=2", f"--guidance={guidance}")
        captions, stored = drawn[-1]
        evaluate(run, *(f"--prompt={caption}" for caption in captions), "--steps=2", f"--guidance={guidance}")
        assert drawn[-1][0] == captions and len(set(captions)) == 3
        np.testing.assert_allclose(drawn[-1][1], stored, rtol=0, atol=1e-5)
    assert abs(drawn[0][1] - stored).max() > 1e-3


REFUSED = {  # words of the line -> options
    "holds no checkpoint of step 3; it has 2, 4, 5": ["--checkpoint=3"],
    "invalid int value: 'last'": ["--checkpoint=last"],
    "config none.toml: No such file": ["--config=none.toml"],
    "autoencoder none.safetensors is no file": [
        "--data.kind=embeddings",
        "--sample.count=1",
        "--vae=none.safetensors",
    ],
    "has no ae.safetensors; fetch it: hf download": ["--data.kind=embeddings", "--prompt=x"],
    r"--prompt: invalid utf8 value: 'caf\udce9'": ["--prompt=caf\udce9"],
    "list of prompts none.txt: No such file": ["--prompts=none.txt"],
    "data.val is empty; give --data.val=DIR, or --prompt=TEXT with --draw-only": ["--data.val="],
    "--draw-only has nothing to draw": ["--draw-only", "--sample.count=0"],
    "eval.batch=0": ["--eval.batch=0"],
    "argument 'runs/other' is not of the form": ["runs/other"],
}


def test_what_means_nothing_is_refused_in_one_line_before_any_evaluation(run, evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_script, "validation_loss", None)
    for words, options in REFUSED.items():
        line = evaluate(run, *options, code=2)
        assert words in line, (options, line)
    (tmp_path / "notes.txt").write_text("not weights")  # named before data that is not there
    line = evaluate(tmp_path / "notes.txt", "--data.val=nowhere/val", code=2)
    assert f"weights {tmp_path}/notes.txt cannot be read as safetensors" in line
