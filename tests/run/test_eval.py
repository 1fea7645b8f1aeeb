"""eval.py finds the very numbers that training logged, of a run, its checkpoints and its exports; pictures; options."""

import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO, called, data_overrides, micro_run, refusal, script
from peer_vae import SMALL
from PIL import Image, ImageColor
from run_files import lines
from safetensors.torch import load_file, save_file
from small_encoders import save_ae

import eval as eval_script
from flux_ref import checkpoint, config_file, loss_chart
from flux_ref.pictures import artist, autoencoder, sheet
from tools import export

STEPS = (2, 4, 5)  # of the checkpoints
OFTEN = ["--eval.every_samples=24", "--checkpoint.every_samples=24", "--checkpoint.keep=9"]  # a loss for each of them
FIGURES = ("samples", "val_loss", "val_loss_per_timestep", "count", "stderr", "stderr_per_timestep")
CAPTION = "a small red circle at the middle"


def figures(record: dict) -> dict:
    return {key: record[key] for key in FIGURES}


def logged(run: Path) -> list[dict]:
    """What training found at each evaluation."""
    return [figures(record) for record in lines(run, "eval.jsonl")]


@pytest.fixture(scope="module")
def run(shapes_dir, tmp_path_factory) -> Path:
    """A finished run of this process; tests only add pictures and charts to it."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    assert called("train.py", *micro_run(shapes_dir, folder, *OFTEN)) == 0
    return folder


@pytest.fixture
def evaluate(attempt, monkeypatch, tmp_path):
    """evaluate(*argv) runs eval.py in an empty folder; returns what it prints, and of --json the object."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*argv: object, code: int = 0) -> str | dict:
        found, out, line = attempt(*argv, name="eval.py")
        assert found == code, line
        if code:
            assert out == ""
            return line
        return json.loads(out) if "--json" in argv else out

    return call


# The number that training logged


def test_each_checkpoint_gives_what_training_logged_then_and_all_give_the_curve(run, evaluate):
    found = evaluate(run, "--all", "--json")
    assert [figures(record) for record in found["checkpoints"]] == logged(run)
    assert found["chart"] == str(run / "eval_all.png")
    with Image.open(found["chart"]) as image:
        assert image.format == "PNG"
        dots = (np.asarray(image.convert("RGB")) == ImageColor.getrgb(loss_chart.VAL)).all(-1)
    assert dots.sum() > 3 * 40  # a dot for each, and lines between
    assert evaluate(run, "--checkpoint=4", "--json") == found["checkpoints"][1]
    record = evaluate(run, "--json")  # of the newest
    assert evaluate(record["weights"], "--json") == record == found["checkpoints"][2]
    assert record["weights"] == str(run / "checkpoints" / "step_000000005")


def test_the_curve_has_the_evaluations_whose_checkpoints_are_gone(run, evaluate, tmp_path, monkeypatch):
    """Fault F7: a run that keeps one checkpoint showed a curve of one point."""
    copy, curves = Path(shutil.copytree(run, tmp_path / "run")), []
    for folder in checkpoint.list_checkpoints(copy)[:2]:
        shutil.rmtree(folder)
    monkeypatch.setattr(loss_chart, "chart", lambda train, val, target, path: curves.append(val))
    evaluate(copy, "--all")
    evaluate(copy, "--all", "--eval.noise=fixed")  # other numbers than the logged
    assert curves[0] == [(record["samples"], record["val_loss"]) for record in logged(run)]
    assert [samples for samples, _ in curves[1]] == [60]


def test_the_command_that_a_run_of_two_copies_prints_works_as_printed(shapes_dir, tmp_path, attempt, capsys):
    """Fault M6: at one rank, and in a folder with a space."""
    assert called("train.py", *micro_run(shapes_dir, tmp_path / "my run")) == 0
    python, name, *argv = shlex.split(capsys.readouterr().out.rpartition("  weights   ")[2])
    assert (python, name, argv) == ("python", "eval.py", [str(tmp_path / "my run")])
    copies = config_file.replace(config_file.load(tmp_path / "my run" / "config.toml"), parallel__replicate=2)
    (tmp_path / "copies.toml").write_text(config_file.dump(copies))
    assert attempt(*argv, f"--config={tmp_path}/copies.toml", name="eval.py")[0] == 0


@pytest.mark.slow
def test_two_ranks_find_what_two_ranks_logged_and_print_one_json_object(shapes_dir, tmp_path):
    assert script("train.py", *micro_run(shapes_dir, tmp_path / "run", *OFTEN), ranks=2).returncode == 0
    process = script("eval.py", tmp_path / "run", "--all", "--json", "--prompt=a cat", "--guidance=2", ranks=2)
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stdout.count("\n") == 1
    found = json.loads(process.stdout)
    assert [figures(record) for record in found["checkpoints"]] == logged(tmp_path / "run")
    assert len({record["pictures"] for record in found["checkpoints"]}) == 3
    assert all(Path(record["pictures"]).is_file() for record in found["checkpoints"])


# What was exported from the run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> dict[str, Path]:
    """The newest checkpoint in other forms."""
    folder = tmp_path_factory.mktemp("exported")
    for layout in ("bfl", "diffusers"):
        for dtype in ("fp32", "bf16"):
            out = folder / f"{layout} {dtype}"
            assert export.main([str(run), str(out), f"--format={layout}", f"--dtype={dtype}"]) == 0
    return {path.name: path for path in folder.iterdir()}


def test_exports_give_the_same_number_and_remember_the_clock_and_so_the_noise(run, exported, evaluate, shapes_dir):
    options = ["--json", f"--config={MICRO}", *data_overrides(shapes_dir)]
    want = evaluate(run, "--json", "--eval.noise=fixed")["val_loss"]
    for name in ("bfl fp32", "diffusers fp32"):
        record = evaluate(exported[name], *options, "--eval.noise=fixed")
        assert (record["val_loss"], record["weights"]) == (want, str(exported[name]))
        assert figures(evaluate(exported[name], *options)) == logged(run)[-1]


def test_weights_that_lost_their_clock_say_whose_noise_they_get(run, exported, evaluate, shapes_dir, tmp_path):
    """Fault F6: the loss is another, and only the noise is the reason."""
    save_file(load_file(exported["bfl fp32"]), tmp_path / "bare.safetensors")
    options = [f"--config={MICRO}", *data_overrides(shapes_dir)]
    texts = [evaluate(path, *options) for path in (tmp_path / "bare.safetensors", exported["bfl fp32"])]
    assert ["--eval.noise=fixed" in text for text in texts] == [True, False]
    assert "--eval.noise=fixed" not in evaluate(tmp_path / "bare.safetensors", *options, "--eval.noise=fixed")


def test_in_bf16_a_bf16_export_gives_the_number_of_fp32_weights(exported, evaluate, shapes_dir):
    """Both are rounded before they are used; in fp32 the rounding shows."""
    options = ["--json", "--eval.noise=fixed", f"--config={MICRO}", *data_overrides(shapes_dir)]
    for dtype, same in (("bf16", True), ("fp32", False)):
        names = ("bfl fp32", "bfl bf16", "diffusers bf16")
        exact, *rounded = [
            evaluate(exported[name], *options, f"--parallel.dtype={dtype}")["val_loss"] for name in names
        ]
        assert rounded[0] == rounded[1] == pytest.approx(exact, rel=1e-2)
        assert (rounded[0] == exact) == same


# The average of the weights


@pytest.fixture(scope="module")
def averaged(shapes_dir, tmp_path_factory) -> Path:
    """The run, with an average of the weights."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    assert called("train.py", *micro_run(shapes_dir, folder, *OFTEN, "--optim.ema=24")) == 0
    return folder


def test_the_average_is_evaluated_where_asked_for_and_so_is_what_was_exported(
    run, averaged, evaluate, shapes_dir, tmp_path
):
    """Training itself is the same, and so is what it logs."""
    assert logged(averaged) == logged(run)
    found = evaluate(averaged, "--all", "--ema", "--json")
    assert found["chart"] == str(averaged / "eval_all_ema.png")
    assert all(record["ema"] == 24 and figures(record) not in logged(run) for record in found["checkpoints"])
    assert "ema" not in evaluate(averaged, "--json")
    text = evaluate(averaged, "--ema", "--prompt=a black cat", "--draw-only", "--steps=2")
    assert "after 60 training samples; the average of the weights, with a half-life of 24 samples" in text
    assert f"pictures: {averaged}/samples/eval_step_000000005_ema_1.png" in text
    options = ["--json", f"--config={MICRO}", *data_overrides(shapes_dir)]
    for layout in ("bfl", "diffusers"):
        out = tmp_path / layout
        assert export.main([str(averaged), str(out), "--ema", f"--format={layout}"]) == 0
        assert evaluate(out, *options) | {"weights": ""} == found["checkpoints"][-1] | {"weights": ""}


def test_what_holds_no_average_is_refused(run, averaged, exported, evaluate, tmp_path):
    for path, words in (
        (run, "step_000000005 hold no average of weights; --ema needs"),
        (exported["bfl fp32"], "hold no average of weights; --ema needs a checkpoint"),
        (exported["diffusers fp32"], "hold no average"),
    ):
        line = evaluate(path, "--ema", f"--config={MICRO}", "--data.val=nowhere", code=2)
        assert words in line and str(path) in line, line
        assert words in refusal(export.main, [str(path), str(tmp_path / "out"), "--ema", f"--config={MICRO}"])
        assert not (tmp_path / "out").exists()


# Pictures


def embeddings(run: Path) -> list[str]:
    """The run's data taken for encodings of photographs."""
    return [str(run), "--data.kind=embeddings", "--sample.count=2", "--sample.steps=2"]


def test_with_an_autoencoder_latents_are_decoded(run, evaluate, tmp_path, monkeypatch):
    path = save_ae(tmp_path / "ae.safetensors")
    monkeypatch.setattr(autoencoder, "load", partial(autoencoder.load, config=SMALL))
    grids, latents, draw = [], [], artist.generate_latents
    monkeypatch.setattr(sheet, "save", lambda drawn, captions, path: grids.append(drawn))
    monkeypatch.setattr(artist, "generate_latents", lambda *a: latents.append(draw(*a)) or latents[-1])
    text = evaluate(*embeddings(run), f"--vae={path}")
    assert text.splitlines()[-1] == f"pictures: {run}/samples/eval_step_000000005_1.png"
    with torch.no_grad():
        want = autoencoder.load(path).decode(latents[0])
    np.testing.assert_allclose(np.stack(grids[0]), want, rtol=1e-4, atol=1e-4)
    assert want.std() > 0.01


def test_each_drawing_is_a_new_file_in_its_run_or_here(run, exported, evaluate, shapes_dir, tmp_path):
    """No drawing replaces another (fault F6). --draw-only needs no data set."""
    (tmp_path / "list.txt").write_text(f"\n{CAPTION}\n\n")
    drawing = ["--prompt", "", f"--prompts={tmp_path}/list.txt", "--steps=2", "--draw-only", "--json"]
    before = {path: path.read_bytes() for path in (run / "samples").glob("*")}
    records = [evaluate(run, *drawing, "--data.val=nowhere") for _ in range(2)]
    records.append(evaluate(run, *drawing, "--seed=1"))
    first, second, other = (Path(record["pictures"]) for record in records)
    assert records[0].keys() == {"weights", "name", "samples", "pictures"}
    assert {path.parent for path in (first, second, other)} == {run / "samples"}
    assert re.fullmatch(r"eval_step_000000005_\d+\.png", first.name)
    assert len({*before, first, second, other}) == len(before) + 3
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert all(path.read_bytes() == content for path, content in before.items())
    text = evaluate(exported["diffusers fp32"], f"--config={MICRO}", *drawing[:-1])
    name = f"{tmp_path}/here/eval_diffusers fp32_1.png"
    assert text.splitlines()[-1] == f"pictures: {name}"
    assert Path(name).read_bytes() == first.read_bytes()  # of the same weights


def test_a_prompt_draws_as_its_stored_caption_and_guidance_takes_the_empty_one(run, evaluate, monkeypatch):
    drawn = []
    monkeypatch.setattr(sheet, "save", lambda pictures, captions, path: drawn.append((captions, pictures)))
    for guidance in ("1", "30"):
        evaluate(run, "--sample.count=3", "--steps=2", f"--guidance={guidance}")
        evaluate(run, *(f"--prompt={caption}" for caption in drawn[-1][0]), "--steps=2", f"--guidance={guidance}")
    for (names, stored), (prompts, own) in (drawn[:2], drawn[2:]):
        assert names == prompts and len(set(names)) == 3
        np.testing.assert_allclose(stored, own, rtol=0, atol=1e-5)
    assert abs(np.stack(drawn[0][1]) - np.stack(drawn[2][1])).max() > 1e-3


def test_words_that_no_caption_of_the_toy_has_are_named(run, capsys):
    words = {"": "", "a small red circle at the Middle": "", "a large fox at the moon": " fox, moon\n"}
    for prompt, unknown in words.items():
        assert called("eval.py", run, f"--prompt={prompt}", "--steps=1", "--draw-only") == 0
        assert capsys.readouterr().err.rpartition("the words")[2] == unknown


# Refused


REFUSED = [
    (["--checkpoint=3"], ["holds no checkpoint of step 3; it has 2, 4, 5"]),
    (["--checkpoint=last"], ["--checkpoint", "'last'"]),
    (["--all", "--checkpoint=4"], ["--all and --checkpoint exclude each other"]),
    (["--config=none.toml"], ["config none.toml: No such file"]),
    (["--data.kind=embeddings", "--sample.count=1", "--vae=none.safetensors", "--json"], ["autoencoder none"]),
    (["--data.kind=embeddings", "--sample.count=1"], ["need an autoencoder", "--sample.vae=ae.safetensors"]),
    (["--data.kind=embeddings", "--prompt=x"], ["need an autoencoder", "hf download"]),
    (["--prompt=x", "--t5=nets"], ["--t5", "data.kind=shapes has its own"]),
    (["--prompt=caf\udce9"], ["--prompt", "is not UTF-8"]),
    (["--prompts=none.txt"], ["list of prompts none.txt: No such file"]),
    (["--data.val="], ["data.val is empty", "--prompt=TEXT with --draw-only"]),
    (["--draw-only", "--sample.count=0"], ["--draw-only has nothing to draw"]),
    (["--eval.batch=0"], ["eval.batch=0"]),
    (["runs/other"], ["'runs/other'", "comes first"]),
]


def test_what_means_nothing_is_refused_in_one_line_before_any_evaluation(run, evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_script, "validation_loss", None)
    for options, words in REFUSED:
        line = evaluate(run, *options, code=2)
        assert all(word in line for word in words), (options, line)
    (tmp_path / "notes.txt").write_text("not weights")  # named before data that is not there
    line = evaluate(tmp_path / "notes.txt", f"--config={MICRO}", "--data.val=nowhere/val", code=2)
    assert "weights " in line and "notes.txt" in line


def test_only_a_run_has_checkpoints_to_choose_from(exported, evaluate):
    for option, words in (("--all", "is not a run"), ("--checkpoint=5", "holds no checkpoint of step 5")):
        assert words in evaluate(exported["bfl fp32"], option, f"--config={MICRO}", code=2)
