"""Pictures from captions: Euler steps from noise to data, with classifier-free guidance."""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flux_ref import latents, ranks, rng, sharding, shards, toy
from flux_ref.config import Config
from flux_ref.data import Rows
from flux_ref.errors import Refusal
from flux_ref.pictures import autoencoder
from flux_ref.ranks import World

Text = tuple[str, Rows]  # a caption and its encodings, {"t5", "clip"}
Pictures = list[np.ndarray]  # each (3, H, W), about in [-1, 1]

LOOKED_AT = 16  # samples for each different caption that is wanted
# Attention kernels for the autoencoder. The kernels of the net may not support fp32.
IN_FP32 = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def times(steps: int) -> list[float]:
    """The steps + 1 times from 1 (noise) to 0 (data), equally far apart: BFL flux, get_schedule of schnell."""
    return [1 - i / steps for i in range(steps + 1)]


class Artist:
    """Makes pictures from the encodings of captions."""

    def __init__(self, cfg: Config, world: World):
        """Collective. Raises: Refusal for a file of cfg.sample.vae that holds no autoencoder."""
        self.cfg = cfg
        self.world = world
        self.autoencoder = None
        with ranks.agreed():
            if world.rank == 0 and cfg.data.kind != "shapes":
                if not cfg.sample.vae:
                    rule = f"pictures of data.kind={cfg.data.kind} need an autoencoder"
                    raise Refusal(f"{rule}: give --sample.vae=ae.safetensors; {autoencoder.FETCH}")
                self.autoencoder = autoencoder.load(cfg.sample.vae)

    def paint(self, net: nn.Module, texts: list[Text], empty: Rows | None, at: Callable[[str], None]) -> Pictures:
        """A picture for each text; none on ranks other than 0. Collective.

        empty: the encodings of the empty caption; None if cfg.sample.guidance is 1.
        at:    called before each sampling step with its name. It may raise, on all ranks alike.
        """
        pictures = []
        batch = self.cfg.eval.batch
        with sharding.uncompiled(self.cfg.parallel):
            for first in range(0, len(texts), batch):
                rows = [rows for _, rows in texts[first : first + batch]]
                z_BCYX = generate_latents(net, rows, empty, self.cfg, self.world.device, at, first)
                if self.world.rank == 0:
                    pictures += self._decoded(z_BCYX)
        return pictures

    def _decoded(self, z_BCYX: Tensor) -> Pictures:
        """The autoencoder is on the device of the latents only meanwhile."""
        if not self.autoencoder:
            return [toy.decode(z) for z in z_BCYX.cpu().numpy()]
        with torch.no_grad(), sdpa_kernel(IN_FP32):
            self.autoencoder.to(z_BCYX.device)
            pictures = [self.autoencoder.decode(z_CYX[None])[0].cpu().numpy() for z_CYX in z_BCYX]
            self.autoencoder.to("cpu")
            return pictures


def generate_latents(
    net: nn.Module,
    texts: list[Rows],
    empty: Rows | None,
    cfg: Config,
    device: torch.device,
    at: Callable[[str], None] = lambda place: None,
    first: int = 0,
) -> Tensor:
    """One latent per text: (B, C, Y, X) fp32, on the autoencoder's scale. Collective over all ranks.

    texts, empty: {"t5", "clip"} as bf16 bits in uint16, or as fp32. empty is for guidance only.
    first:        number of the first text; text i starts from noise i of cfg.sample.seed.
    """
    model = cfg.model
    sample = cfg.sample
    dtype = sharding.DTYPES[cfg.parallel.dtype]
    text = _stack(texts, device, dtype)
    no_text = _stack([empty] * len(texts), device, dtype) if empty and sample.guidance != 1.0 else None
    numbers = range(first, first + len(texts))
    noise = [rng.normals(sample.seed, rng.SAMPLING, model.latent_shape, sample=i, epoch=0) for i in numbers]
    x_BNP = latents.pack(torch.from_numpy(np.stack(noise)).to(device))
    try:
        with torch.no_grad():
            for step, (t, t_next) in enumerate(pairwise(times(sample.steps))):
                at(f"sampling step {step}")
                t_B = torch.full((len(texts),), t, device=device)
                velocity_BNP = net(x_BNP.to(dtype), *text, t_B).float()
                if no_text:
                    unguided_BNP = net(x_BNP.to(dtype), *no_text, t_B).float()
                    velocity_BNP = unguided_BNP + sample.guidance * (velocity_BNP - unguided_BNP)
                x_BNP = x_BNP + (t_next - t) * velocity_BNP
    finally:
        sharding.reshard(net)  # also after an interruption: training or a checkpoint may follow
    return latents.unscale(latents.unpack(x_BNP, model.latent_height, model.latent_width))


def _stack(texts: list[Rows], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """[t5_BTE, clip_BV]"""
    stacked = [torch.from_numpy(np.stack([text[name] for text in texts])) for name in ("t5", "clip")]
    return [(part.view(torch.bfloat16) if part.dtype == torch.uint16 else part).to(device, dtype) for part in stacked]


def stored_captions(samples: shards.ShardSet, count: int) -> list[Text]:
    """The first `count` different captions of an open data set, damaged samples left out.

    At most LOOKED_AT * count samples are looked at, so there may be fewer.
    """
    encodings: dict[str, Rows] = {}
    for sample in range(min(len(samples), LOOKED_AT * count)):
        if len(encodings) == count:
            break
        rows = samples.layout.rows()
        with suppress(shards.BadSample):  # training and validation name them
            meta = samples.read(sample, rows)
            encodings.setdefault(meta.caption or meta.key, rows)
    return list(encodings.items())
