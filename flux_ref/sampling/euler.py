"""Pictures from captions: Euler steps from noise to data, with classifier-free guidance."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flux_ref import latents, ranks, rng, sharding
from flux_ref.config import Config
from flux_ref.data import Rows, ValSet
from flux_ref.errors import Refusal
from flux_ref.formats import shards
from flux_ref.ranks import World
from flux_ref.sampling import grid, vae
from flux_ref.speed import regions
from flux_ref.toy import shapes

Decoder = Callable[[Tensor], list[np.ndarray]]

# Attention kernels for the autoencoder. The kernels of the net may not support fp32.
IN_FP32 = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def times(steps: int, image_tokens: int, shift: bool) -> list[float]:
    """The steps + 1 times from 1 to 0. shift: more of them lie near 1 (noise) the more tokens there are.

    Source: BFL flux, sampling.get_schedule; mu is linear through (256, 0.5) and (4096, 1.15).
    """
    mu = 0.5 + (image_tokens - 256) * (1.15 - 0.5) / (4096 - 256)
    even = [1 - i / steps for i in range(steps + 1)]
    if not shift:
        return even
    return [math.exp(mu) / (math.exp(mu) + (1 / t - 1)) if t > 0 else 0.0 for t in even]


class Artist:
    """Makes pictures from captions and saves them as a grid. Collective; rank 0 writes."""

    def __init__(self, cfg: Config, world: World):
        """Raises: Refusal for a file of cfg.sample.vae that holds no autoencoder."""
        self.cfg, self.world = cfg, world
        with ranks.agreed():
            self.decode = decoder(cfg) if world.rank == 0 else None

    def paint(
        self, net: nn.Module, val_set: ValSet, empty: Rows, path: Path, report_place: Callable[[str], None]
    ) -> str:
        """Paint cfg.sample.captions, or the first cfg.sample.count captions of the validation set. Returns a message.

        empty:        the encodings of the empty caption, for guidance.
        report_place: called before each sampling step with its name.
        """
        cfg = self.cfg
        given = encode_captions(cfg.sample.captions, cfg)
        texts = given or stored_captions(val_set, cfg.sample.count)
        with regions.uncompiled(cfg.parallel):
            z_BCYX = generate_latents(net, [rows for _, rows in texts], empty, cfg, self.world.device, report_place)
        if self.world.rank == 0:
            grid.save(self.decode(z_BCYX), [caption for caption, _ in texts], path)
        return f"pictures: {path}"


def decoder(cfg: Config) -> Decoder:
    """A function from latents (B, C, Y, X) to pictures (3, H, W) in [-1, 1].

    The autoencoder moves to the device of the first latents. Raises: Refusal for a bad cfg.sample.vae.
    """
    if cfg.data.kind == "shapes":
        return lambda z_BCYX: [shapes.decode(z) for z in z_BCYX.cpu().numpy()]
    if not cfg.sample.vae:
        raise Refusal(f"pictures of data.kind={cfg.data.kind} need an autoencoder: give --sample.vae=ae.safetensors")
    autoencoder = vae.load(Path(cfg.sample.vae))

    def decode(z_BCYX: Tensor) -> list[np.ndarray]:
        with torch.no_grad(), sdpa_kernel(IN_FP32):
            autoencoder.to(z_BCYX.device)
            return [autoencoder.decode(z_CYX[None])[0].cpu().numpy() for z_CYX in z_BCYX]

    return decode


def generate_latents(
    net: nn.Module,
    texts: list[Rows],
    empty: Rows,
    cfg: Config,
    device: torch.device,
    report_place: Callable[[str], None] = lambda place: None,
) -> Tensor:
    """One latent per text: (B, C, Y, X) fp32, on the autoencoder's scale. Collective over all ranks.

    texts, empty: {"t5", "clip"} as bf16 bits in uint16.
    """
    model = cfg.model
    t5_BTE, clip_BV = _stack(texts, device)
    no_t5_BTE, no_clip_BV = _stack([empty] * len(texts), device)
    noise = [
        rng.normals(cfg.train.seed, rng.SAMPLING, model.latent_shape, sample=i, epoch=0) for i in range(len(texts))
    ]
    x_BNP = latents.pack(torch.from_numpy(np.stack(noise)).to(device))
    schedule = times(cfg.sample.steps, model.image_tokens, cfg.sample.shift)
    with torch.no_grad():
        for step, (t, t_next) in enumerate(pairwise(schedule)):
            report_place(f"sampling step {step}")
            velocity_BNP = _velocity(net, x_BNP, t5_BTE, clip_BV, t, cfg)
            if cfg.sample.guidance != 1.0:
                unguided_BNP = _velocity(net, x_BNP, no_t5_BTE, no_clip_BV, t, cfg)
                velocity_BNP = unguided_BNP + cfg.sample.guidance * (velocity_BNP - unguided_BNP)
            x_BNP = x_BNP + (t_next - t) * velocity_BNP
    sharding.reshard(net)
    return latents.unscale(latents.unpack(x_BNP, model.latent_height, model.latent_width))


def _stack(texts: list[Rows], device: torch.device) -> list[Tensor]:
    """[t5_BTE, clip_BV]"""
    stacked = (np.stack([text[name] for text in texts]) for name in ("t5", "clip"))
    return [torch.from_numpy(bits).view(torch.bfloat16).to(device) for bits in stacked]


def _velocity(net: nn.Module, x_BNP: Tensor, t5_BTE: Tensor, clip_BV: Tensor, t: float, cfg: Config) -> Tensor:
    dtype = sharding.DTYPES[cfg.parallel.dtype]
    t_B = torch.full((len(x_BNP),), t, device=x_BNP.device)
    return net(x_BNP.to(dtype), t5_BTE.to(dtype), clip_BV.to(dtype), t_B).float()


def encode_captions(captions: tuple[str, ...], cfg: Config) -> list[tuple[str, Rows]]:
    """(caption, its encodings) by the stand-in encoders of the shapes data set, as bf16 bits in uint16."""
    texts, model = [], cfg.model
    for caption in captions:
        t5, clip = shapes.encode_caption(caption, model.text_tokens, model.t5_dim, model.clip_dim)
        texts.append((caption, {"t5": shards.to_bf16_bits(t5), "clip": shards.to_bf16_bits(clip)}))
    return texts


def stored_captions(val_set: ValSet, count: int) -> list[tuple[str, Rows]]:
    """The first `count` different captions, with their T5 and CLIP encodings as bf16 bits in uint16."""
    encodings: dict[str, Rows] = {}
    for sample in range(len(val_set.shards)):
        if len(encodings) == count:
            break
        rows = {name: np.empty(val_set.shards.layout.shapes[name], np.uint16) for name in shards.MEMBERS}
        meta = val_set.shards.read(sample, rows)
        encodings.setdefault(meta.caption or meta.key, rows)
    return list(encodings.items())
