"""The autoencoder: its parameter table, parity with diffusers' AutoencoderKL, where it pads, and what it refuses."""

import math
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import refusal, require_identical
from peer_vae import diffusers_net, lively_net, random, relative_error, to_diffusers, twins
from safetensors.torch import save_file
from torch import Tensor

from flux_ref.sampling import vae
from flux_ref.sampling.vae import FLUX, Autoencoder, Sizes

MICRO = Sizes(base=32, latent_channels=5)


def assert_parity(sizes: Sizes, height: int, width: int, batch: int = 2, scale: float = 1.0) -> None:
    """The moments of random pixels, and the pixels of a random latent."""
    net, twin = twins(sizes)
    patch = 2 ** (len(sizes.multipliers) - 1)
    pixels_B3HW = scale * random(batch, 3, height, width).clamp(-1, 1)
    z_BCYX = scale * random(batch, sizes.latent_channels, height // patch, width // patch, seed=2)
    with torch.no_grad():
        theirs = twin.encode(pixels_B3HW).latent_dist
        mean_BCYX, logvar_BCYX = net.encode(pixels_B3HW)
        errors = {
            "mean": relative_error(mean_BCYX, theirs.mean),
            "logvar": relative_error(logvar_BCYX, theirs.logvar),
            "pixels": relative_error(net.decode(z_BCYX), twin.decode(z_BCYX).sample),
        }
    assert mean_BCYX.shape == z_BCYX.shape
    assert not {name: error for name, error in errors.items() if not error < 1e-5}, errors


def test_parameters_are_those_of_the_public_file_and_of_diffusers():
    """At full size: so many, and after the map the same names and shapes as diffusers', nothing left over."""
    with torch.device("meta"):
        net = Autoencoder()
    assert len(list(net.parameters())) == 244 and not list(net.buffers()), "a buffer would be missing from the file"
    assert sum(parameter.numel() for parameter in net.parameters()) == 83_819_683
    theirs = {name: tuple(tensor.shape) for name, tensor in diffusers_net(FLUX).state_dict().items()}
    mapped = {name: tuple(tensor.shape) for name, tensor in to_diffusers(net.state_dict(), FLUX).items()}
    assert mapped == theirs == vae.diffusers_table(net)


def test_small_nets_agree_with_diffusers():
    for sizes in (MICRO, Sizes(32, (1, 2, 4), 3, 8), Sizes(64, (1, 1), 1, 4)):
        for height, width in ((32, 32), (48, 24)):
            assert_parity(sizes, height, width)
    # One feature map per group: the variance of a faint picture at the first norms is near their epsilon.
    assert_parity(MICRO, 32, 32, scale=1e-3)


def test_a_folder_stands_for_its_autoencoder(tmp_path):
    for number, name in enumerate(("ae.safetensors", vae.DIFFUSERS_FILE, f"vae/{vae.DIFFUSERS_FILE}")):
        file = tmp_path / str(number) / name
        file.parent.mkdir(parents=True)
        file.touch()
        assert vae.find(tmp_path / str(number)) == vae.find(file) == file


def test_the_full_net_agrees_with_diffusers():
    """83.8 M parameters and a picture of 32 x 48 pixels."""
    assert_parity(FLUX, 32, 48, batch=1)


def test_pictures_that_do_not_fit_the_latent_are_an_error():
    for height, width in ((32, 36), (36, 32), (7, 8)):
        with pytest.raises(ValueError, match=f"{height} x {width} pixels.* multiples of 8"):
            lively_net(MICRO).encode(torch.zeros(1, 3, height, width))


def test_pictures_of_a_batch_do_not_touch():
    net, pixels_B3HW = lively_net(MICRO), random(3, 3, 16, 24)
    alone = [torch.cat(net.encode(pixels_B3HW[i : i + 1]), dim=1) for i in range(3)]
    assert relative_error(torch.cat(alone), torch.cat(net.encode(pixels_B3HW), dim=1)) < 1e-5


@pytest.fixture(scope="module")
def lively() -> dict[str, Tensor]:
    """Tensors of a file for the micro net; tests take copies of the dict."""
    return dict(lively_net(MICRO).state_dict())


def test_files_load_bit_for_bit_as_fp32(lively, tmp_path):
    path = tmp_path / "ae.safetensors"
    for dtype, as_path in product((torch.float32, torch.bfloat16), (Path, str)):
        save_file({name: tensor.to(dtype) for name, tensor in lively.items()}, path)
        net = vae.load(as_path(path), sizes=MICRO)
        parameters = dict(net.named_parameters())
        assert {(p.dtype, p.requires_grad, p.device.type) for p in net.parameters()} == {(torch.float32, False, "cpu")}
        require_identical(parameters, {name: tensor.to(dtype).float() for name, tensor in lively.items()})


def refused(path: Path) -> str:
    """Why a file is refused, in one line that names its folder."""
    text = refusal(vae.load, path, "cpu", MICRO)
    assert text.startswith(("autoencoder", "weights", "diffusers' config")) and str(path.parent) in text
    return text


MISFITS: dict[str, Callable[[dict], dict]] = {  # words of the refusal -> what the file holds
    "does not fit: 1 missing: decoder.conv_in.weight": lambda t: {k: t[k] for k in t if k != "decoder.conv_in.weight"},
    "config.json: No such file": lambda t: {"encoder.down_blocks.0.resnets.0.conv1.bias": torch.zeros(32)},
    "encoder.conv_in.bias is I8, want F32, BF16, F16": lambda t: t | {"encoder.conv_in.bias": torch.ones(32).char()},
    "conv_out.weight is F8_E4M3, want": lambda t: (
        t | {"decoder.conv_out.weight": t["decoder.conv_out.weight"].to(torch.float8_e4m3fn)}
    ),
    "1 unexpected: quant_conv.bias": lambda t: t | {"quant_conv.bias": torch.zeros(10)},
    "1 misshaped: encoder.conv_in.bias (3,), want (32,)": lambda t: t | {"encoder.conv_in.bias": torch.zeros(3)},
    "244 missing": lambda t: {"img_in.weight": torch.zeros(4)},
    "encoder.conv_in.bias holds NaN or inf": lambda t: t | {"encoder.conv_in.bias": torch.full((32,), math.nan)},
    "encoder.conv_in.bias holds NaN": lambda t: t | {"encoder.conv_in.bias": torch.full((32,), -math.inf).bfloat16()},
}


def test_files_that_do_not_fit_or_are_damaged_or_absent_are_refused(lively, tmp_path):
    wrong = {}
    for reason, change in MISFITS.items():
        path = tmp_path / "ae.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in change(lively).items()}, path)
        if reason not in (text := refused(path)):
            wrong[reason] = text
    assert not wrong
    content = path.read_bytes()
    for keep in (0, 5, 4000, -4):
        path.write_bytes(content[:keep])
        refused(path)
    path.write_bytes(pickle.dumps(lively))
    refused(path)
    refused(tmp_path / "absent.safetensors")
    refused(tmp_path)
