"""Small autoencoders of FLUX's kind, and their weights under the names of Black Forest Labs."""

import math
import re

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from flux_ref.pictures import autoencoder

SMALL = autoencoder.FLUX | {"block_out_channels": (32, 64, 128, 128)}
# Parts of the names: diffusers', Black Forest Labs'.
PARTS = {
    "conv_shortcut": "nin_shortcut",
    "conv_norm_out": "norm_out",
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0.group_norm": "mid.attn_1.norm",
    "mid_block.attentions.0.to_q": "mid.attn_1.q",
    "mid_block.attentions.0.to_k": "mid.attn_1.k",
    "mid_block.attentions.0.to_v": "mid.attn_1.v",
    "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    ".resnets.": ".block.",
}


def bfl_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Weights as ae.safetensors has them: the decoder's levels from the pixels, attention as 1 x 1 convolutions."""
    tensors = {}
    for name, tensor in net.state_dict().items():
        for theirs, ours in PARTS.items():
            name = name.replace(theirs, ours)
        name = re.sub(r"down_blocks\.(\d)", r"down.\1", name)
        name = re.sub(r"up_blocks\.(\d)", lambda match: f"up.{3 - int(match[1])}", name)
        is_linear = ".attn_1." in name and tensor.ndim == 2
        tensors[name] = tensor[:, :, None, None].contiguous() if is_linear else tensor
    return tensors


def lively_net(config: dict = SMALL, seed: int = 0) -> AutoencoderKL:
    """A net in which no weight is zero or one and activations stay near unit variance."""
    net = AutoencoderKL(**config, **autoencoder.SCALES).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        width = math.sqrt(3 / parameter[0].numel()) if parameter.ndim > 1 else 0.3
        parameter.uniform_(-width, width, generator=generator)
        if "norm" in name.split(".")[-2] and name.endswith("weight"):
            parameter.add_(1.0)
    return net.eval()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and theirs.std() > 0.05, "the outputs must say something"
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
