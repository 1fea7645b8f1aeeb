"""Our model against other implementations of it, step by step in turn; bench/README.md explains every figure.

    python -m bench.race                                    configs/tiny.toml against diffusers and torchtitan, eager
    python -m bench.race --compile                          the blocks of both sides compiled
    python -m bench.race --pair --parallel.dtype=fp32       one double and one single block of schnell's width
    python -m bench.race --config FILE --peers NAME[,NAME] --json bench/results/NAME.json

--steps N (20) timed after --warmup N (3); --section.key=value overrides the config as in train.py. A peer that cannot
take part is reported with the reason; the exit code is 2 if none could. Neither side is sharded: this compares models,
not training systems. A package is imported only when its peer is asked for.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench import common
from bench.common import END, Clock, quartiles
from flux_ref import config, flow, sharding
from flux_ref.config import Config
from flux_ref.data import Batch, allocate, synthetic
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import diffusers_names
from flux_ref.latents import image_positions
from flux_ref.model import Flux
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.run.options import listed
from flux_ref.speed import regions

PAIR = "configs/schnell_gbs512.toml"
PAIR_OVERRIDES = ("model.double_blocks=1", "model.single_blocks=1", "train.global_batch=1", "train.micro_batch=1")
PHASES = ("forward_backward", "step")


class Peer(nn.Module):
    """A model of another package, with the positions of its tokens."""

    def materialised(self, device: torch.device) -> None:
        """Make what `to_empty` left without a value."""
        self.image_ids = image_positions(self.model.latent_height, self.model.latent_width).float().to(device)
        self.text_ids = torch.zeros(self.model.text_tokens, 3, device=device)


class DiffusersFlux(Peer):
    """diffusers.FluxTransformer2DModel of a config's shapes, called as our Flux is."""

    def __init__(self, cfg: Config):
        super().__init__()
        from diffusers import FluxTransformer2DModel

        self.net = FluxTransformer2DModel.from_config(diffusers_names.diffusers_config(cfg.model))
        self.model = cfg.model
        self.double_blocks, self.single_blocks = self.net.transformer_blocks, self.net.single_transformer_blocks

    def forward(self, img_BNP: Tensor, txt_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        batch = {"hidden_states": img_BNP, "encoder_hidden_states": txt_BTE, "pooled_projections": clip_BV}
        ids = {"img_ids": self.image_ids, "txt_ids": self.text_ids}
        return self.net(**batch, **ids, timestep=t_B, return_dict=False)[0]


class TorchtitanFlux(Peer):
    """torchtitan's Flux of a config's shapes (0.3.0 and later), called as our Flux is."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.net = torchtitan_config(cfg).build()
        self.model = cfg.model
        self.double_blocks, self.single_blocks = self.net.double_blocks, self.net.single_blocks

    def forward(self, img_BNP: Tensor, txt_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        return self.net(
            img=img_BNP,
            img_ids=self.image_ids.expand(len(img_BNP), -1, -1),
            txt=txt_BTE,
            txt_ids=self.text_ids.expand(len(img_BNP), -1, -1),
            timesteps=t_B.to(img_BNP.dtype),  # as torchtitan's FSDP casts its inputs
            y=clip_BV,
        )


def torchtitan_config(cfg: Config):
    """torchtitan's schnell brought to a config's shapes: every layer has a config of its own there.

    Raises: Refusal of a version that is built in another way.
    """
    from torchtitan.models import flux

    model = cfg.model
    try:
        found = flux.flux_configs["flux-schnell"]()
        double = flux._make_double_block_config(model.hidden, model.heads, model.mlp_ratio, True)
        single = flux._make_single_block_config(model.hidden, model.heads, model.mlp_ratio)
        linear, adaln = found.final_layer_config.linear, found.final_layer_config.adaln_linear
        embedders = (found.time_in_config, found.vector_in_config)
    except (AttributeError, KeyError, TypeError) as error:
        raise Refusal(f"peer torchtitan is not built as 0.3.0 is ({error}); pip install torchtitan==0.3.0") from None
    found.hidden_size, found.num_heads, found.axes_dim = model.hidden, model.heads, model.rope_axes
    found.double_blocks, found.single_blocks = [double] * model.double_blocks, [single] * model.single_blocks
    found.in_channels = found.out_channels = found.img_in.in_features = linear.out_features = model.packed_channels
    found.context_in_dim = found.txt_in.in_features = model.t5_dim
    found.vec_in_dim = found.vector_in_config.in_dim = found.vector_in_config.in_layer.in_features = model.clip_dim
    found.img_in.out_features = found.txt_in.out_features = linear.in_features = adaln.in_features = model.hidden
    for embedder in embedders:
        embedder.hidden_dim = embedder.in_layer.out_features = model.hidden
        embedder.out_layer.in_features = embedder.out_layer.out_features = model.hidden
    found.final_layer_config.hidden_size, adaln.out_features = model.hidden, 2 * model.hidden
    found.final_layer_config.out_channels = model.packed_channels
    found.pe_config.dim, found.pe_config.axes_dim = model.head_dim, model.rope_axes
    found.theta = found.pe_config.theta = model.rope_theta
    return found


class PlainFlux(Flux):
    """Our model, unsharded."""

    def __init__(self, cfg: Config):
        super().__init__(cfg.model)

    def materialised(self, device: torch.device) -> None:
        self.rope = self.make_rope().to(device)


PEERS: dict[str, tuple[str, Callable[[Config], nn.Module]]] = {  # name -> (module, builder)
    "diffusers": ("diffusers", DiffusersFlux),
    "torchtitan": ("torchtitan.models.flux", TorchtitanFlux),
}


def require(name: str, cfg: Config) -> None:
    """Raises: Refusal unless the peer is known, can be imported and be our config's model."""
    if name not in PEERS:
        raise Refusal(f"unknown peer {name!r}; known peers: {', '.join(PEERS)}")
    module = PEERS[name][0]
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a foreign package raises
        reason = f"torch {torch.__version__}: {' '.join(f'{type(error).__name__}: {error}'.splitlines())}"
        raise Refusal(f"peer {name}: {module} cannot be imported with {reason}") from None
    if cfg.model.mlp_ratio != 4:
        raise Refusal(f"peers have model.mlp_ratio=4, the config has {cfg.model.mlp_ratio}; set it to 4")


class Contender(NamedTuple):
    """A net and its optimizer."""

    net: nn.Module
    opt: torch.optim.Optimizer


def prepare(builder: Callable[[Config], nn.Module], cfg: Config, device: torch.device) -> Contender:
    """Build a net in the compute dtype with random weights and a plain AdamW."""
    with torch.device("meta"):
        net = builder(cfg)
    net.to_empty(device=device)
    torch.manual_seed(cfg.train.seed)
    with torch.no_grad():
        for parameter in net.parameters():
            # numerics: parameters only; Module.to would also cast our fp32 RoPE table.
            parameter.data = parameter.data.normal_(std=0.02).to(sharding.DTYPES[cfg.parallel.dtype])
    net.materialised(device)
    if cfg.parallel.compile:
        # As each side's own trainer compiles.
        options = regions.options(cfg, device) if builder is PlainFlux else None
        for block in (*net.double_blocks, *net.single_blocks):
            block.compile(fullgraph=True, dynamic=False, options=options)
    optim = cfg.optim
    options = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    options["weight_decay"] = optim.weight_decay
    return Contender(net, torch.optim.AdamW(net.parameters(), **options, fused=True))


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
    counts = {side: sum(p.numel() for p in contender.net.parameters()) for side, contender in sides.items()}
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
        "version": importlib.metadata.version(PEERS[name][0].split(".")[0]),
        "compiled": cfg.parallel.compile,
        "batch": rows,
        "parameters": counts["ours"],
        "ratio": {phase: median(values) for phase, values in ratios.items()},
        "ratio_quartiles": {phase: quartiles(values) for phase, values in ratios.items()},
        "ms": {side: {phase: median(times[side][phase]) for phase in PHASES} for side in sides},
    }


def timed_step(side: Contender, batch: Batch, cfg: Config, clock: Clock) -> dict[str, float]:
    """Milliseconds of one step's forward and backward, and of clipping and AdamW, begun on an idle device."""
    clock.start()
    clock.mark("forward_backward")
    flow.losses(side.net, batch, sharding.DTYPES[cfg.parallel.dtype]).mean().backward()
    clock.mark("optimizer")
    torch.nn.utils.clip_grad_norm_(side.net.parameters(), cfg.optim.clip_norm)
    side.opt.step()
    side.opt.zero_grad(set_to_none=True)
    clock.mark(END)
    return clock.steps()[0]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = common.options("bench.race", __doc__, steps=20, warmup=3)
    parser.add_argument("--peers", type=listed(), default=list(PEERS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pair", action="store_true")
    args, overrides = parser.parse_known_args(argv)
    overrides = ["--parallel.activation_budget=1.0", f"--parallel.compile={str(args.compile).lower()}", *overrides]
    if args.pair:
        args.config = PAIR
        overrides = [f"--{text}" for text in PAIR_OVERRIDES] + overrides
    return args, overrides


def measure(cfg: Config, world: World, args: argparse.Namespace) -> dict:
    """Race every peer that can take part. Raises: Refusal."""
    if world.size > 1:
        raise Refusal(f"bench.race compares unsharded models in one process; this is one of {world.size}")
    raced, refused = {}, {}
    for name in args.peers:
        try:
            require(name, cfg)
            raced[name] = race(name, cfg, Clock(world.device), args.steps, args.warmup)
        except (Refusal, Fault) as error:
            refused[name] = str(error)
    if not raced:
        raise Refusal("; ".join(refused.values()))
    return {"peers": raced, "refused": refused}


def main(argv: list[str]) -> int:
    return common.run("bench.race", argv, parse, measure)


if __name__ == "__main__":
    cli.leave(cli.run("bench.race", __doc__, main, sys.argv[1:]))
