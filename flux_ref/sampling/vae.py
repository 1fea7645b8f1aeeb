"""FLUX.1's autoencoder: from pictures to the posterior of their latents, and from latents to pictures.

Parameters keep the names of Black Forest Labs' ae.safetensors; `diffusers_table` has the names of diffusers' vae/.
Latents here are on the autoencoder's scale; latents.py samples them and brings them to the transformer's scale.

numerics: the public weights are fp32, and so is everything here unless a caller casts the module.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref import latents
from flux_ref.errors import Refusal
from flux_ref.formats import fit
from flux_ref.formats.diffusers_names import require_config
from flux_ref.run.weight_files import Tensors

# B batch  H, W pixel rows and columns (256)  C latent channels (16)  Y, X latent rows and columns (H / 8, W / 8)
# K feature maps of the middle (512)  L = Y * X positions there; tensors of other layers go without a suffix
GROUPS = 32
NORM_EPS = 1e-6
DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"
FILES = 'ae.safetensors "text_encoder*/*" "tokenizer*/*"'
FETCH = f"fetch it: hf download black-forest-labs/FLUX.1-schnell {FILES} --local-dir DIR"
DIFFUSERS_CONFIG = {"scaling_factor": latents.SCALE, "shift_factor": latents.SHIFT, "norm_num_groups": GROUPS}
# Parts of diffusers' names; the rest is ours.
THEIRS = {"down": "down_blocks", "up": "up_blocks", "mid": "mid_block", "block": "resnets", "block_1": "resnets.0"}
THEIRS |= {"block_2": "resnets.1", "attn_1": "attentions.0", "norm": "group_norm", "nin_shortcut": "conv_shortcut"}
THEIRS |= {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0", "norm_out": "conv_norm_out"}
THEIRS |= {"downsample": "downsamplers.0", "upsample": "upsamplers.0"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the network. The defaults are FLUX.1's. base is a multiple of 32, the number of groups of every norm."""

    base: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4)  # feature maps of each level / base, from pixels to latents
    blocks: int = 2  # residual blocks per level; the decoder has one more
    latent_channels: int = 16


FLUX = Sizes()


def norm(maps: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, maps, eps=NORM_EPS)


def conv3(maps_in: int, maps: int) -> nn.Conv2d:
    """A 3 x 3 convolution that keeps the size of the picture."""
    return nn.Conv2d(maps_in, maps, 3, padding=1)


class ResBlock(nn.Module):
    """Norm, SiLU and convolution, twice, plus a shortcut."""

    def __init__(self, maps_in: int, maps: int):
        super().__init__()
        self.norm1 = norm(maps_in)
        self.conv1 = conv3(maps_in, maps)
        self.norm2 = norm(maps)
        self.conv2 = conv3(maps, maps)
        self.nin_shortcut = nn.Identity() if maps_in == maps else nn.Conv2d(maps_in, maps, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(inner)))


class Attention(nn.Module):
    """One head over all positions of the picture, residual."""

    def __init__(self, maps: int):
        super().__init__()
        self.norm = norm(maps)
        self.q = nn.Conv2d(maps, maps, 1)
        self.k = nn.Conv2d(maps, maps, 1)
        self.v = nn.Conv2d(maps, maps, 1)
        self.proj_out = nn.Conv2d(maps, maps, 1)

    def forward(self, x_BKYX: Tensor) -> Tensor:
        normed_BKYX = self.norm(x_BKYX)
        q_B1LK, k_B1LK, v_B1LK = (
            project(normed_BKYX).flatten(2).transpose(1, 2)[:, None] for project in (self.q, self.k, self.v)
        )
        out_B1LK = F.scaled_dot_product_attention(q_B1LK, k_B1LK, v_B1LK)
        return x_BKYX + self.proj_out(out_B1LK[:, 0].transpose(1, 2).reshape(x_BKYX.shape))


class Downsample(nn.Module):
    """Halve rows and columns. Zeros pad below and to the right only: released weights depend on it."""

    def __init__(self, maps: int):
        super().__init__()
        self.conv = nn.Conv2d(maps, maps, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Double rows and columns by repeating each pixel, then a convolution."""

    def __init__(self, maps: int):
        super().__init__()
        self.conv = conv3(maps, maps)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def level(maps_in: int, maps: int, blocks: int) -> nn.Sequential:
    """Residual blocks at one resolution. The caller adds the step to the next one under a name of its own."""
    widths = [maps_in] + [maps] * blocks
    return nn.Sequential(OrderedDict(block=nn.Sequential(*(ResBlock(*pair) for pair in pairwise(widths)))))


def middle(maps: int) -> nn.Sequential:
    """The blocks at the latent's resolution, the same in both halves."""
    parts = OrderedDict(block_1=ResBlock(maps, maps), attn_1=Attention(maps), block_2=ResBlock(maps, maps))
    return nn.Sequential(parts)


class Encoder(nn.Module):
    """Pixels to mean and log variance, in this order along the channels: (B, 2 * C, Y, X)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        maps = [sizes.base * multiplier for multiplier in sizes.multipliers]
        self.conv_in = conv3(3, sizes.base)
        self.down = nn.Sequential(*(level(*pair, sizes.blocks) for pair in pairwise([sizes.base, *maps])))
        for step, width in zip(self.down[:-1], maps):
            step.add_module("downsample", Downsample(width))
        self.mid = middle(maps[-1])
        self.norm_out = norm(maps[-1])
        self.conv_out = conv3(maps[-1], 2 * sizes.latent_channels)

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """Pixels in [-1, 1] to mean and logarithm of the variance: (B, 2 * C, H / 8, W / 8)."""
        x_BKYX = self.mid(self.down(self.conv_in(pixels_B3HW)))
        return self.conv_out(F.silu(self.norm_out(x_BKYX)))


class Decoder(nn.Module):
    """Latents to pixels: (B, 3, H, W). Levels count from the pixels, as in the encoder, and run backwards."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        maps = [sizes.base * multiplier for multiplier in sizes.multipliers]
        self.conv_in = conv3(sizes.latent_channels, maps[-1])
        self.mid = middle(maps[-1])
        widths_in = [*maps[1:], maps[-1]]
        self.up = nn.ModuleList(level(*pair, sizes.blocks + 1) for pair in zip(widths_in, maps))
        for step, width in zip(self.up[1:], maps[1:]):
            step.add_module("upsample", Upsample(width))
        self.norm_out = norm(maps[0])
        self.conv_out = conv3(maps[0], 3)

    def forward(self, z_BCYX: Tensor) -> Tensor:
        """Latents on the autoencoder's scale to pixels about [-1, 1]: (B, 3, 8 * Y, 8 * X)."""
        x = self.mid(self.conv_in(z_BCYX))
        for step in reversed(self.up):
            x = step(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Autoencoder(nn.Module):
    """Both halves: 244 tensors, 83,819,683 parameters.

    Source: BFL flux, modules/autoencoder.py.
    """

    def __init__(self, sizes: Sizes = FLUX):
        super().__init__()
        self.patch = 2 ** (len(sizes.multipliers) - 1)  # pixels per latent row: 8
        self.encoder = Encoder(sizes)
        self.decoder = Decoder(sizes)

    def encode(self, pixels_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, each (B, C, Y, X). Pixels are in [-1, 1].

        Raises: ValueError if H or W is not a multiple of 8.
        """
        H, W = pixels_B3HW.shape[-2:]
        if H % self.patch or W % self.patch:
            raise ValueError(f"a picture of {H} x {W} pixels; rows and columns must be multiples of {self.patch}")
        mean_BCYX, logvar_BCYX = self.encoder(pixels_B3HW).chunk(2, dim=1)
        return mean_BCYX, logvar_BCYX

    def decode(self, z_BCYX: Tensor) -> Tensor:
        """The picture of a latent: (B, 3, H, W), about in [-1, 1] and not clamped."""
        return self.decoder(z_BCYX)


def diffusers_table(net: Autoencoder) -> dict[str, tuple[int, ...]]:
    """diffusers' name -> shape of every parameter, in our order. Source: diffusers, AutoencoderKL.

    Attention projects with linears there, and the decoder's levels count from the latent.
    """
    table = {}
    for name, parameter in net.named_parameters():
        parts = name.split(".")
        if parts[1] == "up":
            parts[2] = str(len(net.decoder.up) - 1 - int(parts[2]))
        theirs = ".".join(THEIRS.get(part, part) for part in parts)
        table[theirs] = tuple(parameter.shape[: 2 if "attn_1" in parts else None])
    return table


def find(path: Path) -> Path:
    """The file that a user means: itself, that of diffusers' vae/, or that of FLUX.1-schnell's repository.

    Raises: Refusal for a path without such a file.
    """
    names = ("ae.safetensors", DIFFUSERS_FILE, f"vae/{DIFFUSERS_FILE}")
    found = next((file for file in (path, *(path / name for name in names)) if file.is_file()), None)
    if not found:
        raise Refusal(f"autoencoder {path} is no file and has no ae.safetensors or {DIFFUSERS_FILE}; {FETCH}")
    return found


def load(given: Path | str, device: torch.device | str = "cpu", sizes: Sizes = FLUX) -> Autoencoder:
    """The autoencoder at a path, by BFL's names or diffusers', in fp32 and without gradients.

    Tensors are read one by one, so memory never holds the weights twice.
    Raises: Refusal if the file is not the autoencoder's, is damaged or holds a number that is not finite.
    """
    with torch.device("meta"):
        net = Autoencoder(sizes).requires_grad_(False)
    want = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    path = find(Path(given))
    tensors = Tensors([path])
    where = f"autoencoder {path}"
    if any(".down_blocks." in name for name in tensors.shapes):
        require_config(path.with_name("config.json"), DIFFUSERS_CONFIG, "give FLUX.1-schnell's vae/")
        want = diffusers_table(net)
    fit.require_fit(tensors.shapes, want, where)
    net.to_empty(device=device)
    for name, parameter in zip(want, net.parameters()):
        values = fit.finite(tensors.read(name, 0, len(parameter)), name, where)
        parameter.copy_(values.view(parameter.shape))
    return net
