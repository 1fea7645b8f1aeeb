"""The objective: rectified flow matching. The only file with a direction of time.

    x_t = (1 - t) * latent + t * noise        t = 0 is data, t = 1 is noise
    velocity = noise - latent                 what the network predicts
    sampling walks t from 1 to 0

port: other codes run time the other way, or call the noise x_0.

Training and validation call the same `losses`. They differ only in the source of t and of the noise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flux_ref import latents

# B batch  C latent channels  Y, X latent rows and columns  N image tokens  P packed channels


def interpolate(latent_BCYX: Tensor, noise_BCYX: Tensor, t_B: Tensor) -> Tensor:
    """The point at time t on the straight line from data to noise, in fp32."""
    t_B111 = t_B[:, None, None, None]
    return (1.0 - t_B111) * latent_BCYX + t_B111 * noise_BCYX


def losses(net: Callable[..., Tensor], batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Mean squared error of the predicted velocity, one per sample: (B,) fp32.

    batch: the fields of data.fields, on the net's device.
    dtype: of the network's activations.
    """
    latent_BCYX = latents.sample(batch["mean"], batch["logvar"], batch["latent_eps"])
    x_BCYX = interpolate(latent_BCYX, batch["noise"], batch["t"])
    target_BNP = latents.pack(batch["noise"] - latent_BCYX)
    predicted_BNP = net(latents.pack(x_BCYX).to(dtype), batch["t5"].to(dtype), batch["clip"].to(dtype), batch["t"])
    # numerics: the error is computed and averaged in fp32, whatever the dtype of the network.
    return (predicted_BNP.float() - target_BNP).square().mean(dim=(1, 2))
