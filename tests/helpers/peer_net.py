"""diffusers' Flux beside our model: names, weights with which every part has a say, inputs, errors."""

import math
from collections.abc import Callable

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from flux_ref.config import ModelConfig
from flux_ref.diffusers_names import diffusers_config
from flux_ref.model import Flux

INPUTS = ("img", "txt", "clip", "t")

# Module of this model and the modules of diffusers that share its rows, in order; the next pair follows a comma.
ROOT = """img_in x_embedder, txt_in context_embedder, final_layer.linear proj_out,
time_in.in_layer time_text_embed.timestep_embedder.linear_1,
time_in.out_layer time_text_embed.timestep_embedder.linear_2,
vector_in.in_layer time_text_embed.text_embedder.linear_1, vector_in.out_layer time_text_embed.text_embedder.linear_2,
final_layer.adaLN_modulation.1 norm_out.linear"""
DOUBLE = """img_mod.lin norm1.linear, txt_mod.lin norm1_context.linear,
img_attn.qkv attn.to_q attn.to_k attn.to_v, txt_attn.qkv attn.add_q_proj attn.add_k_proj attn.add_v_proj,
img_attn.norm.query_norm attn.norm_q, img_attn.norm.key_norm attn.norm_k,
txt_attn.norm.query_norm attn.norm_added_q, txt_attn.norm.key_norm attn.norm_added_k,
img_attn.proj attn.to_out.0, txt_attn.proj attn.to_add_out, img_mlp.0 ff.net.0.proj, img_mlp.2 ff.net.2,
txt_mlp.0 ff_context.net.0.proj, txt_mlp.2 ff_context.net.2"""
SINGLE = """linear1 attn.to_q attn.to_k attn.to_v proj_mlp, linear2 proj_out, modulation.lin norm.linear,
norm.query_norm attn.norm_q, norm.key_norm attn.norm_k"""


def pairs(text: str) -> dict[str, list[str]]:
    return {ours: theirs for ours, *theirs in map(str.split, text.split(","))}


DIFFUSERS_ROOT, DIFFUSERS_DOUBLE, DIFFUSERS_SINGLE = pairs(ROOT), pairs(DOUBLE), pairs(SINGLE)


def to_diffusers(tensors: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """Weights under diffusers' names and in its layout, sharing memory where it can; maps gradients as well."""
    renamed = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        family, _, rest = module.partition(".")
        if family in ("double_blocks", "single_blocks"):
            number, _, part = rest.partition(".")
            prefix = "transformer_blocks" if family == "double_blocks" else "single_transformer_blocks"
            parts = (DIFFUSERS_DOUBLE if family == "double_blocks" else DIFFUSERS_SINGLE)[part]
            targets = [f"{prefix}.{number}.{target}" for target in parts]
        else:
            targets = DIFFUSERS_ROOT[module]
        if targets == ["norm_out.linear"]:  # (shift, scale) here, (scale, shift) there
            tensor = tensor.roll(hidden, 0)
        q_k_v = [hidden] * 3 if len(targets) > 1 else []
        pieces = tensor.split([*q_k_v, tensor.shape[0] - sum(q_k_v)][: len(targets)])
        for target, piece in zip(targets, pieces, strict=True):
            renamed[f"{target}.{'weight' if kind == 'scale' else kind}"] = piece
    return renamed


def random_net(cfg: ModelConfig, seed: int = 0) -> Flux:
    """A net in which no weight is zero, modulation and head included; activations stay near unit variance."""
    with torch.device("meta"):
        net = Flux(cfg)
    net.to_empty(device="cpu")
    net.rope = net.make_rope()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            width = math.sqrt(3 / parameter.shape[-1]) if parameter.ndim == 2 else 0.3
            parameter.uniform_(-width, width, generator=generator)
            if name.endswith(".scale"):
                parameter.add_(1.0)
    return net


def random_inputs(cfg: ModelConfig, batch: int = 2, seed: int = 1) -> dict[str, Tensor]:
    """The net's arguments by name, in its order."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((cfg.image_tokens, cfg.packed_channels), (cfg.text_tokens, cfg.t5_dim), (cfg.clip_dim,))
    tensors = [torch.randn(batch, *shape, generator=generator) for shape in shapes]
    return dict(zip(INPUTS, [*tensors, torch.rand(batch, generator=generator)], strict=True))


def diffusers_twin(net: Flux) -> tuple[nn.Module, Callable[..., Tensor]]:
    """diffusers' Flux with the weights of net, and its forward as a function of INPUTS."""
    with torch.device("meta"):
        twin = FluxTransformer2DModel.from_config(diffusers_config(net.cfg))
    twin.load_state_dict(to_diffusers(net.state_dict(), net.cfg.hidden), strict=True, assign=True)
    return twin, diffusers_forward(twin, net.cfg)


def diffusers_forward(twin: nn.Module, cfg: ModelConfig) -> Callable[..., Tensor]:
    """The forward of diffusers' Flux as a function of INPUTS."""
    rows, columns = cfg.latent_height // 2, cfg.latent_width // 2
    img_ids = torch.tensor([(0.0, row, column) for row in range(rows) for column in range(columns)])

    def forward(img: Tensor, txt: Tensor, clip: Tensor, t: Tensor) -> Tensor:
        return twin(
            hidden_states=img,
            encoder_hidden_states=txt,
            pooled_projections=clip,
            timestep=t,  # in [0, 1]: diffusers multiplies by 1000 itself
            img_ids=img_ids,
            txt_ids=torch.zeros(cfg.text_tokens, 3),
            return_dict=False,
        )[0]

    return forward


def by_name(net: Flux) -> Callable[..., Tensor]:
    """The net's forward as a function of INPUTS."""
    return lambda img, txt, clip, t: net(img, txt, clip, t)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
