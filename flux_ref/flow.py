"""The objective, rectified flow matching, and latents as the transformer sees them.

    x_t = (1 - t) * latent + t * noise        t = 0 is data, t = 1 is noise
    velocity = noise - latent                 what the network predicts
    sampling walks t from 1 to 0

port: other codes run time the other way, or call the noise x_0.

Training and validation call the same `losses`. They differ only in the source of t and of the noise.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch  C latent channels (16)  Y, X latent rows and columns (32)
# N image tokens (Y/2 * X/2 = 256)  P packed channels (4 * C = 64)

SCALE = 0.3611  # BFL flux, autoencoder of FLUX.1: latent = SCALE * (z - SHIFT)
SHIFT = 0.1159


def sample_latent(mean_BCYX: Tensor, logvar_BCYX: Tensor, eps_BCYX: Tensor) -> Tensor:
    """Draw the latent from the autoencoder's posterior and scale it to about unit variance: (B, C, Y, X) fp32.

    mean, logvar: output of the encoder, any float dtype. eps: N(0, 1).
    Source:       MLPerf reference, FLUX.1 preprocessed data.
    numerics: fp32. The reference computes in bf16.
    """
    z_BCYX = mean_BCYX.float() + torch.exp(0.5 * logvar_BCYX.float()) * eps_BCYX
    return SCALE * (z_BCYX - SHIFT)


def unscale(latent_BCYX: Tensor) -> Tensor:
    """The latent at the autoencoder's own scale, which its decoder takes."""
    return latent_BCYX / SCALE + SHIFT


def pack(latent_BCYX: Tensor) -> Tensor:
    """Fold each 2 x 2 patch into one token: (B, C, Y, X) -> (B, Y/2 * X/2, 4 * C).

    port: tokens run row by row. Features are ordered (C, dy, dx). Y and X are even.
    Source: BFL flux, sampling.prepare. Released weights depend on this order.
    """
    return F.pixel_unshuffle(latent_BCYX, 2).flatten(2).mT.contiguous()


def unpack(packed_BNP: Tensor, height: int, width: int) -> Tensor:
    """The inverse of pack for a latent of height x width: (B, N, P) -> (B, P/4, height, width)."""
    patches = packed_BNP.mT.unflatten(2, (height // 2, width // 2))
    return F.pixel_shuffle(patches, 2).contiguous()


def image_positions(height: int, width: int) -> Tensor:
    """Position (0, row, column) of each image token, (N, 3) float64. All text tokens have position (0, 0, 0)."""
    return torch.cartesian_prod(torch.arange(1), torch.arange(height // 2), torch.arange(width // 2)).double()


# B batch  C latent channels  Y, X latent rows and columns  N image tokens  P packed channels


def interpolate(latent_BCYX: Tensor, noise_BCYX: Tensor, t_B: Tensor) -> Tensor:
    """The point at time t on the straight line from data to noise, in fp32."""
    t_B111 = t_B[:, None, None, None]
    return (1.0 - t_B111) * latent_BCYX + t_B111 * noise_BCYX


def losses(net: Callable[..., Tensor], batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Mean squared error of the predicted velocity, one per sample: (B,) fp32.

    batch: the fields of dataloader.fields, on the net's device.
    dtype: of the network's activations.
    """
    latent_BCYX = sample_latent(batch["mean"], batch["logvar"], batch["latent_eps"])
    x_BCYX = interpolate(latent_BCYX, batch["noise"], batch["t"])
    target_BNP = pack(batch["noise"] - latent_BCYX)
    predicted_BNP = net(pack(x_BCYX).to(dtype), batch["t5"].to(dtype), batch["clip"].to(dtype), batch["t"])
    # numerics: the error is computed and averaged in fp32, whatever the dtype of the network.
    return (predicted_BNP.float() - target_BNP).square().mean(dim=(1, 2))
