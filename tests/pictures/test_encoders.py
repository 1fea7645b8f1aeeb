"""Encoders from files, and prompts at a model in the layout of FLUX.1-schnell's repository, beside FluxPipeline."""

import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO, ROOT, refusal, require_identical
from diffusers import AutoencoderKL, FluxPipeline
from payload import Payload
from peer_net import relative_error
from PIL import Image
from safetensors.torch import load_file, save_file

from flux_ref import config_file, dataset, flow, rng
from flux_ref.cli import Refusal
from flux_ref.pictures import artist
from flux_ref.pictures.encoders import load_autoencoder
from tools import export
from tools.prepare.images import Encoders

MODEL = config_file.load(MICRO).model
CPU = torch.device("cpu")
PIXELS = (8 * MODEL.latent_height, 8 * MODEL.latent_width)


def build(nets, *overrides, dtype=torch.float32):
    return Encoders(nets, config_file.load(MICRO, overrides).model, CPU, dtype)


def values_of(bits):
    return torch.from_numpy(dataset.from_bf16_bits(bits))


# The autoencoder


def test_a_file_by_either_names_gives_diffusers_net_and_samples_hold_its_moments(nets, tmp_path):
    """The log of a variance as it is, where diffusers clamps it at -30."""
    theirs = AutoencoderKL.from_pretrained(nets / "vae")
    home = tmp_path / "diffusers"
    shutil.copytree(nets / "vae", home / "vae")
    for path in (nets, nets / "ae.safetensors", home):
        net = load_autoencoder(path, CPU)
        assert {(p.dtype, p.requires_grad) for p in net.parameters()} == {(torch.float32, False)}
        require_identical(net.state_dict(), theirs.state_dict())
    both = build(nets)
    both.autoencoder.encoder.conv_out.bias[16:] -= 100
    pixels_B3HW = torch.randint(256, (2, 3, *PIXELS), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    found = both.encode(pixels_B3HW, ["a cat", "a dog"])
    mean = theirs.encode(pixels_B3HW / 127.5 - 1).latent_dist.mean
    assert relative_error(values_of(found["mean"]), mean) < 5e-3 and values_of(found["logvar"]).max() < -50


def test_files_that_are_no_autoencoder_of_flux_are_refused(nets, tmp_path):
    path = tmp_path / "ae.safetensors"
    save_file(load_file(nets / "ae.safetensors") | {"encoder.conv_in.bias": torch.zeros(3)}, path)
    line = refusal(load_autoencoder, path, CPU)
    assert line.startswith(f"autoencoder {path} does not fit: ") and "encoder.conv_in.bias" in line
    assert "is no file and has no ae.safetensors; fetch it:" in refusal(load_autoencoder, tmp_path / "x", CPU)


# Text encoders


def test_text_encoders_that_do_not_fit_are_refused_and_no_code_of_theirs_is_run(nets, tmp_path):
    assert "it has 28 features, the model wants 36" in refusal(build, nets, "--model.t5_dim=36")
    home = Path(shutil.copytree(nets, tmp_path / "nets"))
    folder = home / "text_encoder_2"
    mark = tmp_path / "it ran"
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.block.1.layer.0.SelfAttention.q.weight"]  # transformers would put random values there
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"encoder {folder}: 1 tensors are missing" in refusal(build, home)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    assert "no file named model.safetensors" in refusal(build, home)
    for path in (folder / "config.json", home / "tokenizer_2" / "tokenizer_config.json"):
        (path.parent / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).mkdir()\nclass Own: pass\n")
        own = {"auto_map": {"AutoTokenizer": ["own.Own", None], "AutoModel": "own.Own"}, "tokenizer_class": "Own"}
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
        with pytest.raises(Refusal):
            build(home)
    assert not mark.exists()
    shutil.rmtree(home / "tokenizer_2")
    assert "fetch it: hf download" in refusal(build, home)


# Prompts


@pytest.fixture
def draw(nets, monkeypatch, tmp_path, attempt):
    """draw(*argv) runs eval.py --draw-only in an empty folder; returns the path of the sheet, or the refusal."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*argv, code=0):
        options = (f"--config={MICRO}", "--data.kind=embeddings", "--draw-only", "--steps=4", "--json")
        found, out, line = attempt(*argv, *options, name="eval.py")
        assert found == code, line
        return line if code else json.loads(out)["pictures"]

    return call


def test_prompts_give_the_pictures_of_diffusers_flux_pipeline(nets, draw, monkeypatch):
    """Of encodings that are rounded to bf16, as in a data set."""
    prompts = ["a small red cat sits on the grass", "", "photo of two dogs " * 40]  # cut to the encoders' lengths
    drawn = []
    monkeypatch.setattr(artist, "save", lambda pictures, captions, path: drawn.extend(pictures))
    draw(nets, *(f"--prompt={prompt}" for prompt in prompts), "--seed=7")
    pipeline = FluxPipeline.from_pretrained(nets)
    pipeline.set_progress_bar_config(disable=True)
    noise = [rng.normals(7, rng.SAMPLING, MODEL.latent_shape, sample=i, epoch=0) for i in range(len(prompts))]
    t5, clip, _ = pipeline.encode_prompt(prompts, None, max_sequence_length=MODEL.text_tokens)
    theirs = pipeline(
        prompt_embeds=t5.bfloat16().float(),
        pooled_prompt_embeds=clip.bfloat16().float(),
        num_inference_steps=4,
        height=PIXELS[0],
        width=PIXELS[1],
        latents=flow.pack(torch.from_numpy(np.stack(noise))),
        output_type="np",
    ).images
    ours = (np.stack(drawn).transpose(0, 2, 3, 1) / 2 + 0.5).clip(0, 1)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert theirs.std(axis=(1, 2, 3)).min() > 0.02 and abs(theirs[0] - theirs[2]).max() > 0.02


def test_encoders_lie_in_the_folder_of_the_autoencoder_or_of_the_model(nets, draw, tmp_path):
    bare = shutil.copy(nets / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / "own.safetensors")
    ways = [[nets], [bare, f"--vae={nets}"], [bare, f"--vae={nets}/ae.safetensors"]]
    files = [Path(draw(*way, "--prompt=a cat", "--guidance=2")).read_bytes() for way in ways]
    assert files == files[:1] * len(files)
    line = draw(bare, "--prompt=a cat", code=2)
    assert f"autoencoder {tmp_path} is no file and has no ae.safetensors; fetch it: hf download" in line


PAGE = (ROOT / "docs" / "own_pictures.md").read_text()
SMALLER = {  # in the page's program, for the small model on a CPU
    '"cuda"': '"cpu"',
    "bfloat16": "float32",
    "height=256, width=256": f"height={PIXELS[0]}, width={PIXELS[1]}",
    '"max_sequence_length": 256': f'"max_sequence_length": {MODEL.text_tokens}',
    "num_inference_steps=20": "num_inference_steps=2",
}


@pytest.mark.slow
def test_the_program_of_the_page_on_own_pictures_draws_by_diffusers(nets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FLUX.1-schnell").symlink_to(nets)
    assert "--format=diffusers" in PAGE
    assert export.main(["FLUX.1-schnell", "own_transformer", "--format=diffusers", f"--config={MICRO}"]) == 0
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    for theirs, ours in SMALLER.items():
        assert theirs in program
        program = program.replace(theirs, ours)
    exec(program, {})
    with Image.open("cat.png") as picture:
        assert picture.size == PIXELS[::-1]
