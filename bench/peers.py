"""Other implementations of the same model, raced against our plain `Flux` step by step in one process.

Neither side is sharded: this compares models and what eager PyTorch makes of them, not training systems.
A peer is an entry of PEERS; a package is imported only when its peer is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flux_ref import config, flow, parallel
from flux_ref.config import Config
from flux_ref.data import Batch, allocate, synthetic
from flux_ref.errors import Fault, Refusal
from flux_ref.latents import image_positions
from flux_ref.model import Flux

if TYPE_CHECKING:
    from bench.step import Clock

PHASES = ("forward_backward", "step")


class DiffusersFlux(nn.Module):
    """diffusers.FluxTransformer2DModel of a config's shapes, called as our Flux is."""

    def __init__(self, cfg: Config):
        super().__init__()
        from diffusers import FluxTransformer2DModel

        model = cfg.model
        self.net = FluxTransformer2DModel(
            num_layers=model.double_blocks,
            num_single_layers=model.single_blocks,
            attention_head_dim=model.head_dim,
            num_attention_heads=model.heads,
            joint_attention_dim=model.t5_dim,
            pooled_projection_dim=model.clip_dim,
            in_channels=model.packed_channels,
            axes_dims_rope=model.rope_axes,
            guidance_embeds=False,
        )
        self.model = model
        self.double_blocks, self.single_blocks = self.net.transformer_blocks, self.net.single_transformer_blocks

    def materialised(self, device: torch.device) -> None:
        """Make what `to_empty` left without a value."""
        self.image_ids = image_positions(self.model.latent_height, self.model.latent_width).float().to(device)
        self.text_ids = torch.zeros(self.model.text_tokens, 3, device=device)

    def forward(self, img_BNP: Tensor, txt_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        return self.net(
            hidden_states=img_BNP,
            encoder_hidden_states=txt_BTE,
            pooled_projections=clip_BV,
            timestep=t_B,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            return_dict=False,
        )[0]


class PlainFlux(Flux):
    """Our model, unsharded."""

    def __init__(self, cfg: Config):
        super().__init__(cfg.model)

    def materialised(self, device: torch.device) -> None:
        self.rope = self.make_rope().to(device)


PEERS: dict[str, tuple[str, Callable[[Config], nn.Module]]] = {  # name -> (package, builder)
    "diffusers": ("diffusers", DiffusersFlux),
}


def require(names: list[str], cfg: Config) -> None:
    """Raises: Refusal unless every peer is known, installed and able to be our config's model."""
    for name in names:
        if name not in PEERS:
            raise Refusal(f"unknown peer {name!r}; known peers: {', '.join(PEERS)}")
        if importlib.util.find_spec(PEERS[name][0]) is None:
            raise Refusal(f"peer {name} needs the package {PEERS[name][0]}; pip install {PEERS[name][0]}")
    if names and cfg.model.mlp_ratio != 4:
        raise Refusal(f"peers have model.mlp_ratio=4, the config has {cfg.model.mlp_ratio}; set it to 4")


@dataclass
class Contender:
    """A net and its optimizer."""

    net: nn.Module
    opt: torch.optim.Optimizer

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.net.parameters())


def prepare(builder: Callable[[Config], nn.Module], cfg: Config, device: torch.device) -> Contender:
    """Build a net in the compute dtype with random weights and a plain AdamW."""
    with torch.device("meta"):
        net = builder(cfg)
    net.to_empty(device=device)
    torch.manual_seed(cfg.train.seed)
    with torch.no_grad():
        for parameter in net.parameters():
            # numerics: parameters only; Module.to would also cast our fp32 RoPE table.
            parameter.data = parameter.data.normal_(std=0.02).to(parallel.DTYPES[cfg.parallel.dtype])
    net.materialised(device)
    if cfg.parallel.compile:
        for block in (*net.double_blocks, *net.single_blocks):
            block.compile(fullgraph=True, dynamic=False)
    optim = cfg.optim
    betas = (optim.beta1, optim.beta2)
    return Contender(
        net,
        torch.optim.AdamW(
            net.parameters(), lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        ),
    )


def race(name: str, cfg: Config, clock: Clock, steps: int, warmup: int) -> dict:
    """Time a peer and ours in alternation, who goes first too; each ratio is the median over pairs of neighbours.

    Returns ratio (peer's time / ours, so above 1 ours is faster), its quartiles and both sides' median ms.
    """
    if clock.device.type != "cpu":
        torch.accelerator.empty_cache()
    rows = config.micro_batch(cfg, world_size=1)
    batch = allocate(cfg.model, rows, clock.device)
    for key, tensor in synthetic(cfg.model, rows).items():
        batch[key].copy_(tensor)
    sides = {"ours": prepare(PlainFlux, cfg, clock.device), "peer": prepare(PEERS[name][1], cfg, clock.device)}
    counts = {side: contender.parameters for side, contender in sides.items()}
    if len(set(counts.values())) > 1:
        raise Fault(f"{name} is not the same model: {counts['peer']:,} parameters, ours {counts['ours']:,}")
    times = {side: {phase: [] for phase in PHASES} for side in sides}
    for i in range(warmup + steps):
        for side in sorted(sides, reverse=i % 2):
            spent = timed_step(sides[side], batch, cfg, clock)
            if i >= warmup:
                times[side]["forward_backward"].append(spent["forward_backward"])
                times[side]["step"].append(sum(spent.values()))
    ratios = {phase: [p / o for p, o in zip(times["peer"][phase], times["ours"][phase])] for phase in PHASES}
    return {
        "batch": rows,
        "parameters": counts["ours"],
        "ratio": {phase: median(values) for phase, values in ratios.items()},
        "ratio_quartiles": {phase: quartiles(values) for phase, values in ratios.items()},
        "ms": {side: {phase: median(times[side][phase]) for phase in PHASES} for side in sides},
    }


def quartiles(values: list[float]) -> list[float]:
    low, _, high = quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return [low, high]


def timed_step(side: Contender, batch: Batch, cfg: Config, clock: Clock) -> dict[str, float]:
    """Milliseconds of one step's forward and backward, and of clipping and AdamW, begun on an idle device."""
    clock.start()
    clock.mark("forward_backward")
    flow.losses(side.net, batch, parallel.DTYPES[cfg.parallel.dtype]).mean().backward()
    clock.mark("optimizer")
    torch.nn.utils.clip_grad_norm_(side.net.parameters(), cfg.optim.clip_norm)
    side.opt.step()
    side.opt.zero_grad(set_to_none=True)
    clock.mark("end")
    return clock.steps()[0]


def summary(result: dict) -> str:
    """One line for the terminal."""
    parts = []
    for phase in PHASES:
        low, high = result["ratio_quartiles"][phase]
        ours, peer = (result["ms"][side][phase] for side in ("ours", "peer"))
        parts.append(
            f"{phase.replace('_', ' + ')} {result['ratio'][phase]:.2f} times ours"
            f" (quartiles {low:.2f} to {high:.2f}; {peer:.2f} / {ours:.2f} ms)"
        )
    return ", ".join(parts)
