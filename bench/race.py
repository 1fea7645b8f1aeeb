"""Our model against diffusers' FLUX, step by step in turn; bench/README.md explains every figure.

    python -m bench.race --compute.compile=true            configs/tiny.toml, the blocks of both sides compiled
    python -m bench.race --config configs/schnell_gbs512.toml --model.double_blocks=1 --model.single_blocks=1 \\
        --train.global_batch=1 --train.micro_batch=1 --compute.dtype=fp32          a pair of full width

--steps N (20) timed after --warmup N (3); --section.key=value overrides the config as in train.py. Neither side is
sharded: this compares models, not training systems.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import sys
from argparse import Namespace
from importlib.metadata import version
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from bench import common
from bench.common import END, Clock
from flux_ref import cli, config, flow, sharding
from flux_ref.cli import Fault, Refusal
from flux_ref.config import Config, ModelConfig
from flux_ref.dataloader import Batch, synthetic
from flux_ref.flow import image_positions
from flux_ref.model import Flux
from flux_ref.precision.recipe import DTYPES
from flux_ref.ranks import World
from tools.export import diffusers_config


class OurFlux(Flux):
    """Our model, unsharded."""

    def materialise(self, device: torch.device) -> None:
        """Make what `to_empty` left without a value."""
        self.rope = self.make_rope().to(device)


class DiffusersFlux(nn.Module):
    """diffusers.FluxTransformer2DModel of a config's shapes, called as our Flux is."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        import diffusers

        self.net = diffusers.FluxTransformer2DModel.from_config(diffusers_config(model))
        self.model = model
        self.double_blocks = self.net.transformer_blocks
        self.single_blocks = self.net.single_transformer_blocks

    def materialise(self, device: torch.device) -> None:
        """Make what `to_empty` left without a value: the positions of tokens."""
        self.image_ids = image_positions(self.model.latent_height, self.model.latent_width).float().to(device)
        self.text_ids = torch.zeros(self.model.text_tokens, 3, device=device)

    def forward(self, img_BNP: Tensor, txt_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        result = self.net(
            hidden_states=img_BNP,
            encoder_hidden_states=txt_BTE,
            pooled_projections=clip_BV,
            timestep=t_B,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            return_dict=False,
        )
        return result[0]


Side = tuple[nn.Module, torch.optim.Optimizer]


def prepare(kind: type[OurFlux] | type[DiffusersFlux], cfg: Config, device: torch.device) -> Side:
    """A net in the compute dtype with random weights, and a plain AdamW. Raises: Refusal."""
    with torch.device("meta"):
        net = kind(cfg.model)
    net.to_empty(device=device)
    torch.manual_seed(cfg.train.seed)
    with torch.no_grad():
        for parameter in net.parameters():
            # numerics: parameters only; Module.to would also cast our fp32 RoPE table.
            parameter.data = parameter.data.normal_(std=0.02).to(DTYPES[cfg.compute.dtype])
    net.materialise(device)
    if cfg.compute.compile:
        blocks = [*net.double_blocks, *net.single_blocks]
        if kind is OurFlux:  # each side as its own trainer compiles
            sharding.compile_all(blocks, cfg, device, {})
        else:
            for block in blocks:
                block.compile(fullgraph=True, dynamic=False)
    optim = cfg.optim
    return net, torch.optim.AdamW(
        net.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def timed_step(net: nn.Module, opt: torch.optim.Optimizer, batch: Batch, cfg: Config, clock: Clock) -> float:
    """Milliseconds of one step with clipping and AdamW, begun on an idle device."""
    clock.start()
    clock.mark("step")
    flow.losses(net, batch, DTYPES[cfg.compute.dtype]).mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), cfg.optim.clip_norm)
    opt.step()
    opt.zero_grad(set_to_none=True)
    clock.mark(END)
    return clock.steps()[0]["step"]


def measure(cfg: Config, world: World, args: Namespace) -> dict:
    """Both sides' steps in alternation, and who goes first alternates, too.

    ratio: of neighbouring steps the peer's time by ours, the median; above 1 ours is faster. Raises: Refusal, Fault.
    """
    if world.size > 1:
        raise Refusal(f"bench.race compares unsharded models in one process; this is one of {world.size}")
    rows = config.micro_batch(cfg, world.size)
    batch = {name: tensor.to(world.device) for name, tensor in synthetic(cfg.model, rows).items()}
    sides = {"ours": prepare(OurFlux, cfg, world.device), "diffusers": prepare(DiffusersFlux, cfg, world.device)}
    counts = {name: sum(part.numel() for part in net.parameters()) for name, (net, _) in sides.items()}
    if len(set(counts.values())) > 1:
        raise Fault(f"these are not the same model: they have {counts} parameters")
    clock = Clock(world.device)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(args.warmup + args.steps):
        for name in sorted(sides, reverse=bool(i % 2)):
            spent = timed_step(*sides[name], batch, cfg, clock)
            if i >= args.warmup:
                times[name].append(spent)
    ratios = [peer / ours for peer, ours in zip(times["diffusers"], times["ours"])]
    low, ratio, high = np.percentile(ratios, (25, 50, 75)).tolist()
    return {
        "version": version("diffusers"),
        "batch": rows,
        "ratio": ratio,
        "ratio_quartiles": [low, high],
        "ms": {name: median(values) for name, values in times.items()},
    }


def main(argv: list[str]) -> int:
    return common.run(common.step_options("bench.race", __doc__), argv, measure)


if __name__ == "__main__":
    cli.exit_now(cli.run("bench.race", main, sys.argv[1:]))
