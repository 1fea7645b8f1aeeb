"""Prompts at a model in the layout of FLUX.1-schnell's repository, beside diffusers' FluxPipeline; wrong files."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO, ROOT, the_line
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from peer_net import diffusers_twin, random_net
from peer_vae import SMALL, bfl_tensors, lively_net
from PIL import Image
from safetensors.torch import save_file
from small_encoders import save_clip, save_t5
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from flux_ref import config_file, latents, rng
from flux_ref.pictures import artist, autoencoder, sheet
from tools import export
from tools.prepare import commands as prepare

MODEL = config_file.load(MICRO).model
PROMPTS = ["a small red cat sits on the grass", "", "photo of two dogs"]


def save_repository(folder: Path) -> Path:
    """Random small weights in the layout of FLUX.1-schnell's repository."""
    t5, clip, net = save_t5(folder / "t5"), save_clip(folder / "clip"), lively_net()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=net,
        text_encoder=CLIPTextModel.from_pretrained(clip),
        tokenizer=AutoTokenizer.from_pretrained(folder / "clip" / "tokenizer", model_max_length=77),
        text_encoder_2=T5EncoderModel.from_pretrained(t5),
        tokenizer_2=AutoTokenizer.from_pretrained(t5),
        transformer=diffusers_twin(random_net(MODEL))[0],
    )
    pipeline.save_pretrained(folder / "public")
    save_file(bfl_tensors(net), folder / "public" / "ae.safetensors")
    return folder / "public"


@pytest.fixture(scope="module")
def public(tmp_path_factory) -> Path:
    return save_repository(tmp_path_factory.mktemp("drawing"))


@pytest.fixture
def draw(monkeypatch, tmp_path, attempt):
    """draw(*argv) runs eval.py --draw-only in an empty folder; returns its --json record, or the refusal."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(autoencoder, "load", partial(autoencoder.load, config=SMALL))

    def call(*argv: object, code: int = 0):
        options = (f"--config={MICRO}", "--data.kind=embeddings", "--draw-only", "--steps=4", "--json")
        found, out, line = attempt(*argv, *options, name="eval.py")
        assert found == code, line
        return line if code else json.loads(out)

    return call


def test_prompts_give_the_latents_and_pictures_of_diffusers_flux_pipeline(public, draw, monkeypatch):
    made, generate = [], artist.generate_latents
    monkeypatch.setattr(artist, "generate_latents", lambda *a: made.append(generate(*a)) or made[-1])
    record = draw(public, *(f"--prompt={prompt}" for prompt in PROMPTS), "--seed=7")
    with Image.open(record["pictures"]) as image:
        drawn = np.asarray(image.convert("RGB")).astype(int)
    pipeline = FluxPipeline.from_pretrained(public)
    pipeline.set_progress_bar_config(disable=True)
    shape, sides = MODEL.latent_shape, (8 * MODEL.latent_height, 8 * MODEL.latent_width)
    noise = [rng.normals(7, rng.SAMPLING, shape, sample=i, epoch=0) for i in range(len(PROMPTS))]
    options = {"num_inference_steps": 4, "max_sequence_length": MODEL.text_tokens, "height": sides[0]}
    options |= {"width": sides[1], "latents": latents.pack(torch.from_numpy(np.stack(noise)))}
    theirs = pipeline(PROMPTS, output_type="latent", **options).images
    ours = latents.pack(latents.SCALE * (made[0] - latents.SHIFT))
    print((ours - theirs).abs().max(), theirs.std(), theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    pictures = pipeline(PROMPTS, output_type="np", **options).images
    size = (round(sides[1] * sheet.HEIGHT / sides[0]), sheet.HEIGHT)
    for number, picture in enumerate(pictures):
        left, top = sheet.GAP + number * (size[0] + sheet.GAP), sheet.GAP
        want = Image.fromarray((picture * 255).round().astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
        cut = drawn[top : top + size[1], left : left + size[0]]
        assert abs(cut - np.asarray(want).astype(int)).max() <= 1
        assert cut.std() > 20


@pytest.mark.slow
def test_encoders_are_found_with_the_model_and_given_as_folders(public, draw, tmp_path):
    """In the repository, in its transformer/, beside a single file, and by options (fault F4: diffusers' vae/)."""
    bare = tmp_path / "own.safetensors"
    shutil.copy(public / "transformer" / "diffusion_pytorch_model.safetensors", bare)
    given = {"t5": public / "text_encoder_2", "clip": public / "text_encoder", "vae": public / "vae"}
    ways = [[public / "transformer"], [bare, f"--vae={public}"], [bare, f"--vae={public}/ae.safetensors"]]
    ways += [[bare, *(f"--{name}={path}" for name, path in given.items())]]
    files = [Path(draw(*way, "--prompt=a cat", "--guidance=2")["pictures"]).read_bytes() for way in ways]
    assert files == files[:1] * len(files)
    single = tmp_path / "single"
    shutil.copytree(public, single, ignore=lambda folder, names: {"transformer", "vae"})
    shutil.copy(bare, single / "flux1-schnell.safetensors")
    for model in (single, single / "flux1-schnell.safetensors"):
        assert Path(draw(model, "--prompt=a cat", "--guidance=2")["pictures"]).read_bytes() == files[0]


def test_missing_swapped_and_foreign_encoders_are_refused_with_the_file_to_fetch(public, draw, tmp_path):
    bare, empty, other = tmp_path / "own.safetensors", tmp_path / "empty", tmp_path / "other"
    shutil.copy(public / "transformer" / "diffusion_pytorch_model.safetensors", bare)
    empty.mkdir()
    shutil.copytree(public / "vae", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.18215}))
    t5, clip = public / "text_encoder_2", public / "text_encoder"
    alone = shutil.copy(public / "ae.safetensors", empty / "alone")
    cases = [
        ([], ["need an autoencoder", "--sample.vae=ae.safetensors", "hf download"]),
        (
            [f"--vae={empty}"],
            [f"autoencoder {empty} is no file and has no ae.safetensors", "hf download black-forest-labs"],
        ),
        ([f"--vae={t5}"], [f"autoencoder {t5} is no file"]),
        ([f"--vae={other}"], ["config.json is another model's: scaling_factor=0.18215, want 0.3611"]),
        (
            [f"--vae={alone}"],
            ["--prompt needs --t5=DIR", "text_encoder_2", "hf download"],
        ),
        (
            [f"--vae={public}", f"--t5={clip}"],
            [f"--t5 {clip} holds a 'clip_text_model'; give FLUX.1-schnell's text_encoder_2"],
        ),
        ([f"--vae={public}", f"--clip={t5}"], [f"--clip {t5} holds a 't5'; give FLUX.1-schnell's text_encoder"]),
        ([f"--vae={public}", f"--t5={empty}"], [f"{empty}/config.json is missing", "text_encoder_2", "hf download"]),
        ([f"--vae={public}", "--model.t5_dim=36"], ["misshaped"]),
        ([f"--vae={public}", f"--prompt={'a cat ' * 30}"], [f"tokens; T5 reads {MODEL.text_tokens}; shorten it"]),
    ]
    replies = {str(argv): draw(bare, "--prompt=a cat", *argv, code=2) for argv, _ in cases}
    wrong = {text for (_, words), text in zip(cases, replies.values()) if not all(word in text for word in words)}
    assert not wrong
    assert not list(Path().iterdir())  # no picture


PAGE = (ROOT / "docs" / "own_pictures.md").read_text()
SMALLER = {  # in the page's program, for the small model on a CPU
    '"cuda"': '"cpu"',
    "bfloat16": "float32",
    "height=256, width=256": f"height={8 * MODEL.latent_height}, width={8 * MODEL.latent_width}",
    '"max_sequence_length": 256': f'"max_sequence_length": {MODEL.text_tokens}',
    "num_inference_steps=20": "num_inference_steps=2",
}


@pytest.mark.slow
def test_the_page_on_own_pictures_leads_from_a_folder_to_a_drawing_by_diffusers(public, tmp_path, monkeypatch, capsys):
    """Its commands, with small encoders. A folder that lacks an encoder is refused with what to fetch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autoencoder, "load", partial(autoencoder.load, config=SMALL))
    Path("FLUX.1-schnell").symlink_to(public)
    Path("pictures").mkdir()
    rows = [{"file_name": f"{i}.png", "text": "a red cat"} for i in range(40)]
    for i, row in enumerate(rows):
        Image.new("RGB", (64, 64), (6 * i, 100, 0)).save(Path("pictures", row["file_name"]))
    Path("pictures/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    share = ["images", "--input", "pictures", "--output", "data/own", "--val-share", "0.3", f"--config={MICRO}"]
    for model, words in ((["--model", "gone"], "gone is no file"), (["--model", "pictures"], "no ae.safetensors")):
        assert prepare.main([*share, *model]) == 2
        line = the_line(capsys.readouterr().err, "prepare")
        assert words in line and "hf download black-forest-labs/FLUX.1-schnell ae.safetensors" in line
    assert prepare.main(share) == 0
    assert "--val-share" in PAGE and "--format=diffusers" in PAGE
    assert export.main(["FLUX.1-schnell", "own_transformer", "--format=diffusers", f"--config={MICRO}"]) == 0
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    for theirs, ours in SMALLER.items():
        assert theirs in program
        program = program.replace(theirs, ours)
    exec(program, {})
    with Image.open("cat.png") as picture:
        assert picture.size == (8 * MODEL.latent_width, 8 * MODEL.latent_height)
