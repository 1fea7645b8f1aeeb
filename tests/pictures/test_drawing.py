"""Prompts at a model in the layout of FLUX.1-schnell's repository, beside diffusers' FluxPipeline; wrong files."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO, ROOT
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from lively_nets import plain_net
from peer_net import diffusers_twin
from peer_vae import SMALL, bfl_tensors, lively_net
from PIL import Image
from safetensors.torch import save_file
from small_encoders import save_clip, save_t5
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from flux_ref import config_file, latents, rng
from flux_ref.pictures import artist, autoencoder, sheet
from tools import export

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
        transformer=diffusers_twin(plain_net(config_file.load(MICRO)))[0],
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
def test_encoders_are_those_beside_the_autoencoder_or_the_model_or_as_given(public, draw, tmp_path):
    bare = tmp_path / "own.safetensors"
    shutil.copy(public / "transformer" / "diffusion_pytorch_model.safetensors", bare)
    given = [f"--t5={public}/text_encoder_2", f"--clip={public}/text_encoder", f"--vae={public}/vae"]
    ways = [[public], [bare, f"--vae={public}"], [bare, f"--vae={public}/ae.safetensors"], [bare, *given]]
    files = [Path(draw(*way, "--prompt=a cat", "--guidance=2")["pictures"]).read_bytes() for way in ways]
    assert files == files[:1] * len(files)


def test_missing_swapped_and_foreign_encoders_are_refused_with_the_file_to_fetch(public, draw, tmp_path):
    bare = shutil.copy(public / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / "own.safetensors")
    alone = shutil.copy(public / "ae.safetensors", tmp_path / "alone")
    vae, t5, clip = f"--vae={public}", public / "text_encoder_2", public / "text_encoder"
    cases = {
        "need an autoencoder: give --sample.vae=ae.safetensors; fetch it: hf download black-forest-labs": [],
        f"autoencoder {t5} is no file and has no ae.safetensors": [f"--vae={t5}"],
        f"--t5 {tmp_path}/text_encoder_2: [Errno 2] No such file": [f"--vae={alone}"],
        "give FLUX.1-schnell's text_encoder_2; fetch it: hf download": [vae, f"--t5={clip}"],
        "give FLUX.1-schnell's text_encoder; fetch it: hf download": [vae, f"--clip={t5}"],
        "misshaped": [vae, "--model.t5_dim=36"],
        f"has more than {MODEL.text_tokens} tokens of T5; shorten it": [vae, f"--prompt={'a cat ' * 30}"],
    }
    replies = {words: draw(bare, "--prompt=a cat", *argv, code=2) for words, argv in cases.items()}
    assert [text for words, text in replies.items() if words not in text] == []
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
def test_the_program_of_the_page_on_own_pictures_draws_by_diffusers(public, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FLUX.1-schnell").symlink_to(public)
    assert "--format=diffusers" in PAGE
    assert export.main(["FLUX.1-schnell", "own_transformer", "--format=diffusers", f"--config={MICRO}"]) == 0
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    for theirs, ours in SMALLER.items():
        assert theirs in program
        program = program.replace(theirs, ours)
    exec(program, {})
    with Image.open("cat.png") as picture:
        assert picture.size == (8 * MODEL.latent_width, 8 * MODEL.latent_height)
