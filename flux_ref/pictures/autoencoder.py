"""FLUX.1's autoencoder: diffusers' AutoencoderKL with the public weights, read from local files only.

Latents here are on the autoencoder's scale; latents.py samples them and brings them to the transformer's scale.

numerics: the public weights are fp32, and so is everything here. On NVIDIA torch lets convolutions round their factors
to TF32, by up to 2**-11; samples are stored in bf16, which rounds more.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flux_ref import latents
from flux_ref.errors import Refusal, package
from flux_ref.weights import require_config

FILES = 'ae.safetensors "text_encoder*/*" "tokenizer*/*"'
FETCH = f"fetch it: hf download black-forest-labs/FLUX.1-schnell {FILES} --local-dir DIR"
DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"
SCALES = {"scaling_factor": latents.SCALE, "shift_factor": latents.SHIFT}
# Source: vae/config.json of black-forest-labs/FLUX.1-schnell.
FLUX = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


class Autoencoder(nn.Module):
    """Pictures to moments of latents, and latents to pictures. 244 tensors, 83,819,683 parameters."""

    def __init__(self, config: dict = FLUX, device: str = "meta"):
        """With random weights; on the meta device none, for `load`. Raises: Refusal if diffusers is not installed."""
        super().__init__()
        package("diffusers", "the autoencoder")
        from diffusers import AutoencoderKL

        with torch.device(device):
            self.net = AutoencoderKL(**config, **SCALES).requires_grad_(False)

    def encode(self, pixels_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, each (B, C, H / 8, W / 8). Pixels are in [-1, 1]."""
        mean_BCYX, logvar_BCYX = self.net.encode(pixels_B3HW).latent_dist.parameters.chunk(2, dim=1)
        return mean_BCYX, logvar_BCYX

    def decode(self, z_BCYX: Tensor) -> Tensor:
        """The picture of a latent: (B, 3, H, W), about in [-1, 1] and not clamped."""
        return self.net.decode(z_BCYX).sample


def find(path: Path) -> Path:
    """The file that a user means: itself, that of diffusers' vae/, or that of FLUX.1-schnell's repository.

    Raises: Refusal for a path without such a file.
    """
    names = ("ae.safetensors", DIFFUSERS_FILE, f"vae/{DIFFUSERS_FILE}")
    found = next((file for file in (path, *(path / name for name in names)) if file.is_file()), None)
    if not found:
        raise Refusal(f"autoencoder {path} is no file and has no ae.safetensors or {DIFFUSERS_FILE}; {FETCH}")
    return found


def load(given: Path | str, device: torch.device | str = "cpu", config: dict = FLUX) -> Autoencoder:
    """The autoencoder at a path, by the names of Black Forest Labs or diffusers, in fp32 and without gradients.

    Raises: Refusal if the file is not the autoencoder's, is damaged or holds a number that is not finite.
    """
    autoencoder = Autoencoder(config)
    path = find(Path(given))
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise Refusal(f"autoencoder {path} is damaged or no safetensors file: {error}") from None
    if any(".down_blocks." in name for name in tensors):
        require_config(path.with_name("config.json"), SCALES)
    else:
        tensors = _diffusers_names(tensors, config, path)
    want = autoencoder.net.state_dict()
    wrong = [name for name in want if name not in tensors or tensors[name].shape != want[name].shape]
    if wrong or len(tensors) != len(want):
        why = f"{wrong[0]} is missing or misshaped" if wrong else f"{len(tensors) - len(want)} tensors too many"
        raise Refusal(f"autoencoder {path} does not fit: {why}; {FETCH}")
    for name, values in tensors.items():
        if not values.is_floating_point() or not values.float().isfinite().all():
            raise Refusal(f"autoencoder {path}: {name} holds NaN, infinite values or no numbers; {FETCH}")
    autoencoder.net.load_state_dict({name: values.float() for name, values in tensors.items()}, assign=True)
    return autoencoder.to(device).eval().requires_grad_(False)


def _diffusers_names(tensors: dict[str, Tensor], config: dict, path: Path) -> dict[str, Tensor]:
    """Tensors of ae.safetensors under diffusers' names. Raises: Refusal for those of another net."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    try:
        return convert_ldm_vae_checkpoint(tensors, config)
    except (KeyError, IndexError, ValueError) as error:
        raise Refusal(f"autoencoder {path} does not fit: {error}; {FETCH}") from None
