"""diffusers' AutoencoderKL beside our autoencoder: names, weights with which every part has a say, errors."""

import math

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from flux_ref.sampling.vae import Autoencoder, Sizes

# What diffusers calls the parts of a name; levels are renamed by diffusers_name.
DIFFUSERS = {
    "nin_shortcut": "conv_shortcut",
    "norm_out": "conv_norm_out",
    "mid.block_1": "mid_block.resnets.0",
    "mid.block_2": "mid_block.resnets.1",
    "mid.attn_1.norm": "mid_block.attentions.0.group_norm",
    "mid.attn_1.q": "mid_block.attentions.0.to_q",
    "mid.attn_1.k": "mid_block.attentions.0.to_k",
    "mid.attn_1.v": "mid_block.attentions.0.to_v",
    "mid.attn_1.proj_out": "mid_block.attentions.0.to_out.0",
    "downsample.conv": "downsamplers.0.conv",
    "upsample.conv": "upsamplers.0.conv",
    ".block.": ".resnets.",
}


def diffusers_name(name: str, levels: int) -> str:
    """diffusers counts the decoder's levels from the latent."""
    for ours, theirs in DIFFUSERS.items():
        name = name.replace(ours, theirs)
    for number in range(levels):
        name = name.replace(f"encoder.down.{number}.", f"encoder.down_blocks.{number}.")
        name = name.replace(f"decoder.up.{number}.", f"decoder.up_blocks.{levels - 1 - number}.")
    return name


def to_diffusers(tensors: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Weights under diffusers' names, sharing memory; attention projects with linears there."""
    linear = (".q.weight", ".k.weight", ".v.weight", ".proj_out.weight")
    return {
        diffusers_name(name, len(sizes.multipliers)): tensor[:, :, 0, 0] if name.endswith(linear) else tensor
        for name, tensor in tensors.items()
    }


def diffusers_net(sizes: Sizes, **config: float) -> nn.Module:
    """On the meta device."""
    levels = len(sizes.multipliers)
    with torch.device("meta"):
        return AutoencoderKL(
            block_out_channels=tuple(sizes.base * multiplier for multiplier in sizes.multipliers),
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            layers_per_block=sizes.blocks,
            latent_channels=sizes.latent_channels,
            use_quant_conv=False,
            use_post_quant_conv=False,
            **config,
        )


def lively_net(sizes: Sizes, seed: int = 0) -> Autoencoder:
    """A net in which no weight is zero or one and activations stay near unit variance."""
    with torch.device("meta"):
        net = Autoencoder(sizes).requires_grad_(False)
    net.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        width = math.sqrt(3 / parameter[0].numel()) if parameter.ndim == 4 else 0.3
        parameter.uniform_(-width, width, generator=generator)
    for name, module in net.named_modules():
        if "norm" in name.rpartition(".")[2]:
            module.weight.add_(1.0)
    return net


def twins(sizes: Sizes) -> tuple[Autoencoder, nn.Module]:
    """Ours, and diffusers' with the same memory as weights."""
    net, twin = lively_net(sizes), diffusers_net(sizes)
    twin.load_state_dict(to_diffusers(net.state_dict(), sizes), strict=True, assign=True)
    return net, twin.eval()


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and theirs.std() > 0.05, "the outputs must say something"
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
