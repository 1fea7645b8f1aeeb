"""The autoencoder's files: by both names they give the same net; what does not fit is refused."""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import refusal
from peer_vae import SMALL, bfl_tensors, lively_net
from safetensors.torch import save_file
from torch import Tensor

from flux_ref.pictures import autoencoder

NET = lively_net()
PIXELS_B3HW = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)


def test_the_net_has_the_tensors_of_the_public_file():
    parameters = dict(autoencoder.Autoencoder().net.named_parameters())
    assert len(parameters) == 244 and sum(parameter.numel() for parameter in parameters.values()) == 83_819_683


def test_a_file_by_either_names_gives_the_same_moments_and_pictures(tmp_path):
    (tmp_path / "public" / "vae").mkdir(parents=True)
    (tmp_path / "vae").mkdir()
    save_file(bfl_tensors(NET), tmp_path / "public" / "ae.safetensors")
    save_file({name: part.bfloat16() for name, part in bfl_tensors(NET).items()}, tmp_path / "bf16.safetensors")
    NET.save_pretrained(tmp_path / "vae")
    theirs = NET.encode(PIXELS_B3HW).latent_dist
    found = {}
    for name in ("public", "public/ae.safetensors", "vae", "bf16.safetensors"):
        loaded = autoencoder.load(str(tmp_path / name), config=SMALL)
        assert {(p.dtype, p.requires_grad) for p in loaded.parameters()} == {(torch.float32, False)}
        mean_BCYX, logvar_BCYX = loaded.encode(PIXELS_B3HW)
        assert mean_BCYX.shape == logvar_BCYX.shape == (2, 16, 4, 6)
        found[name] = mean_BCYX, logvar_BCYX, loaded.decode(mean_BCYX)
        assert found[name][2].shape == PIXELS_B3HW.shape
        want = (theirs.mean, theirs.logvar, NET.decode(theirs.mean).sample)
        exact = name != "bf16.safetensors"
        errors = [(ours - own).norm() / own.norm() for ours, own in zip(found[name], want)]
        assert all(error == 0 if exact else 0 < error < 0.1 for error in errors), (name, errors)


def test_the_log_of_a_variance_is_not_clamped(tmp_path):
    """diffusers clamps it from below at -30; samples hold what the net says."""
    tensors = bfl_tensors(NET)
    tensors["encoder.conv_out.bias"] = tensors["encoder.conv_out.bias"] - 100
    save_file(tensors, tmp_path / "ae.safetensors")
    assert autoencoder.load(tmp_path, config=SMALL).encode(PIXELS_B3HW)[1].max() < -50


CONV = "encoder.conv_in.bias"
MISFITS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {  # words of the refusal -> what the file holds
    "decoder.conv_in.weight is missing or misshaped": lambda t: {k: t[k] for k in t if k != "decoder.conv_in.weight"},
    "encoder.conv_in.bias is missing or misshaped": lambda t: t | {CONV: torch.zeros(3)},
    "is missing or misshaped": lambda t: {"img_in.weight": torch.zeros(4)},
    "holds NaN, infinite values or no numbers": lambda t: t | {CONV: torch.full((32,), math.nan)},
    "infinite": lambda t: t | {CONV: torch.full((32,), -math.inf).bfloat16()},
    "or no numbers": lambda t: t | {CONV: torch.ones(32).char()},
}


def refused(path: Path, *words: str) -> None:
    text = refusal(autoencoder.load, path, "cpu", SMALL)
    assert text.startswith("autoencoder") and str(path) in text and all(word in text for word in words), text


def test_files_that_do_not_fit_or_are_damaged_or_absent_are_refused(tmp_path):
    path = tmp_path / "ae.safetensors"
    for reason, change in MISFITS.items():
        save_file(change(bfl_tensors(NET)), path)
        refused(path, reason)
    content = path.read_bytes()
    for keep in (0, 5, 4000, len(content) - 4):
        path.write_bytes(content[:keep])
        refused(path, "is damaged or no safetensors file")
    path.write_bytes(pickle.dumps(bfl_tensors(NET)))
    refused(path, "is damaged or no safetensors file")
    refused(tmp_path / "absent.safetensors", "hf download")
    NET.save_pretrained(tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.18215}))
    assert "scaling_factor=0.18215, want 0.3611" in refusal(autoencoder.load, tmp_path / "vae", "cpu", SMALL)
