"""FLUX.1: 19 blocks with separate image and text streams, then 38 blocks with one joint stream.

Parameters keep the names of Black Forest Labs' code, so public weights load without a map. The module is plain: no
device, no mesh, no dtype policy. sharding.py splits the net over ranks from outside. What the words spec, numerics,
port and sync mean in comments: PORTING.md.

numerics: activations have the dtype of `img`. RoPE's table is computed in fp64 and stored in fp32. The time's
embedding is computed in fp32, then cast to the dtype of the activations, in which time_in works. RMS norms compute and
return fp32, but in a sharded net every parameter, their scale too, arrives rounded to compute.dtype. Layer norms
reduce in fp32 and return the dtype of the activations.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref.config import ModelConfig, Shape, Shapes
from flux_ref.flow import image_positions

# B batch  N image tokens (256)  T text tokens (256)  S tokens of a sequence: N, T or T + N (joint, text first)
# D hidden (3072) = H heads (24) x K head dim (128)  R = K / 2 rotated pairs  M = mlp_ratio * D
# P packed latent channels (64)  E T5 features (4096)  V CLIP features (768)  W wave features (256)
TIME_WAVES = 256
NORM_EPS = 1e-6  # numerics: in all norms, under the root; libraries have other defaults


def rope_table(positions_S3: Tensor, axes: tuple[int, ...], theta: int) -> Tensor:
    """Cosine and sine of every rotation: (S, R, 2) fp32.

    positions: (0, row, column) of each token, float64. axes: features of a head per position axis.
    Source: BFL flux, math.rope, with angles in fp64.
    """
    angles = []
    for axis, features in enumerate(axes):
        omega = theta ** -(torch.arange(0, features, 2, dtype=torch.float64, device=positions_S3.device) / features)
        angles.append(positions_S3[:, axis, None] * omega)
    angle_SR = torch.cat(angles, dim=1)
    return torch.stack((angle_SR.cos(), angle_SR.sin()), dim=-1).float()


def apply_rope(x_BSHK: Tensor, rope_SR2: Tensor) -> Tensor:
    """Rotate each pair of features: (a, b) becomes (a cos - b sin, a sin + b cos). fp32 in and out.

    port: neighbours (2r, 2r + 1) form a pair. Other models pair r with r + K / 2.
    """
    cos_S1R, sin_S1R = rope_SR2[:, None].unbind(-1)
    cos_S1K = cos_S1R.repeat_interleave(2, dim=-1)
    sin_S1K = torch.stack((-sin_S1R, sin_S1R), dim=-1).flatten(-2)
    swapped_BSHK = x_BSHK.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x_BSHK * cos_S1K + swapped_BSHK * sin_S1K


def attention(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
    """Full attention: (B, S, D). spec: no mask, so padding of the text takes part.

    q, k: after norm and RoPE. All three have the dtype of the activations.
    """
    q_BHSK, k_BHSK, v_BHSK = [x_BSHK.transpose(1, 2) for x_BSHK in (q_BSHK, k_BSHK, v_BSHK)]
    out_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK)
    return out_BHSK.transpose(1, 2).flatten(2)


def timestep_embedding(t_B: Tensor) -> Tensor:
    """BFL flux's timestep_embedding, with its time_factor of 1000: (B, W) fp32, of t in [0, 1].

    port: all cosines first, then all sines.
    """
    t_B = 1000.0 * t_B  # numerics: t must be fp32; near 700, bf16 counts in steps of 4
    frequency = torch.exp(-math.log(10_000) * torch.arange(TIME_WAVES // 2, device=t_B.device) / (TIME_WAVES // 2))
    angle = t_B[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def modulated_norm(x_BSD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
    """Layer norm without weights, then the adaptive scale and shift."""
    # numerics: layer_norm reduces in fp32 for every input dtype.
    return (1 + scale_B1D) * F.layer_norm(x_BSD, x_BSD.shape[-1:], eps=NORM_EPS) + shift_B1D


class RMSNorm(nn.Module):
    """x / rms(x) * scale. The parameter is called `scale` as in BFL's files. numerics: computes and returns fp32."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.scale.shape, self.scale.float(), eps=NORM_EPS)


class QKNormRope(nn.Module):
    """Splits queries, keys and values into heads. Queries and keys get RMS norms over each head, then RoPE."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.query_norm = RMSNorm(head_dim)
        self.key_norm = RMSNorm(head_dim)

    def forward(self, q_BSD: Tensor, k_BSD: Tensor, v_BSD: Tensor, rope_SR2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Three of (B, S, D) -> three of (B, S, H, K). port: the features of a head are neighbours.

        numerics: norms and RoPE compute in fp32; the results have the dtype of q and k.
        """
        q_BSHK, k_BSHK, v_BSHK = [x_BSD.unflatten(-1, (-1, self.head_dim)) for x_BSD in (q_BSD, k_BSD, v_BSD)]
        q_BSHK = apply_rope(self.query_norm(q_BSHK), rope_SR2).to(q_BSHK.dtype)
        return q_BSHK, apply_rope(self.key_norm(k_BSHK), rope_SR2).to(k_BSHK.dtype), v_BSHK


class MLPEmbedder(nn.Module):
    """Linear, SiLU, linear: maps a conditioning vector to the hidden size."""

    def __init__(self, in_dim: int, hidden: int):
        super().__init__()
        self.in_layer = nn.Linear(in_dim, hidden)
        self.out_layer = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_dim) -> (B, D)."""
        return self.out_layer(F.silu(self.in_layer(x)))


class Modulation(nn.Module):
    """From the conditioning vector to `parts` vectors of (B, 1, D): shift, scale, gate, ..."""

    def __init__(self, hidden: int, parts: int):
        super().__init__()
        self.parts = parts
        self.lin = nn.Linear(hidden, parts * hidden)

    def forward(self, vec_BD: Tensor) -> tuple[Tensor, ...]:
        """(B, D) -> parts. A double block has six: shift, scale, gate of attention, then the same of the MLP."""
        return self.lin(F.silu(vec_BD))[:, None, :].chunk(self.parts, dim=-1)


class SelfAttention(nn.Module):
    """The projections of one stream of a double block. Attention itself runs over both streams."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.qkv = nn.Linear(cfg.hidden, 3 * cfg.hidden)
        self.norm = QKNormRope(cfg.head_dim)
        self.proj = nn.Linear(cfg.hidden, cfg.hidden)

    def project(self, x_BSD: Tensor, rope_SR2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys after norm and RoPE, and values, each (B, S, H, K)."""
        return self.norm(*self.qkv(x_BSD).chunk(3, dim=-1), rope_SR2)


def mlp(cfg: ModelConfig) -> nn.Sequential:
    """(B, S, D) -> (B, S, D) through M features. port: GELU by its tanh formula, here and in single blocks."""
    inner = cfg.mlp_ratio * cfg.hidden
    return nn.Sequential(nn.Linear(cfg.hidden, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, cfg.hidden))


class DoubleStreamBlock(nn.Module):
    """Image and text have their own weights each. They meet in attention."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.img_mod = Modulation(cfg.hidden, 6)
        self.img_attn = SelfAttention(cfg)
        self.img_mlp = mlp(cfg)
        self.txt_mod = Modulation(cfg.hidden, 6)
        self.txt_attn = SelfAttention(cfg)
        self.txt_mlp = mlp(cfg)

    def forward(self, img_BND: Tensor, txt_BTD: Tensor, vec_BD: Tensor, rope_SR2: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both streams, image first. rope: fp32, text tokens first."""
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(vec_BD)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(vec_BD)

        lengths = (txt_BTD.shape[1], img_BND.shape[1])  # port: text comes first in the joint sequence
        txt_rope_TR2, img_rope_NR2 = rope_SR2.split(lengths)
        img_parts = self.img_attn.project(modulated_norm(img_BND, img_shift1, img_scale1), img_rope_NR2)
        txt_parts = self.txt_attn.project(modulated_norm(txt_BTD, txt_shift1, txt_scale1), txt_rope_TR2)
        joint = [torch.cat(parts, dim=1) for parts in zip(txt_parts, img_parts)]  # queries, keys and values
        txt_out_BTD, img_out_BND = attention(*joint).split(lengths, dim=1)

        img_BND = img_BND + img_gate1 * self.img_attn.proj(img_out_BND)
        img_BND = img_BND + img_gate2 * self.img_mlp(modulated_norm(img_BND, img_shift2, img_scale2))
        txt_BTD = txt_BTD + txt_gate1 * self.txt_attn.proj(txt_out_BTD)
        txt_BTD = txt_BTD + txt_gate2 * self.txt_mlp(modulated_norm(txt_BTD, txt_shift2, txt_scale2))
        return img_BND, txt_BTD


class PartsLinear(nn.Linear):
    """A linear that takes and gives parts along the features.

    A compiler then casts each part to FP8 where the part is computed (precision/linear.py). It would write and read a
    joined tensor once more: 20 % of the bytes of a step of schnell in FP8 on an H200, counted.
    """

    def forward(self, *parts: Tensor) -> Tensor:
        """(..., K) -> (..., N). parts: of the input, which join along K."""
        (out,) = self.in_parts(parts, (self.out_features,))
        return out

    def in_parts(self, parts: tuple[Tensor, ...], widths: Sequence[int]) -> Sequence[Tensor]:
        """The same with the result in parts: (..., n) for each n of widths, whose sum is N."""
        joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        return F.linear(joined, self.weight, self.bias).split(widths, dim=-1)


class SingleStreamBlock(nn.Module):
    """One joint stream. Attention and MLP run side by side and share the first and the last linear.

    port: linear1's outputs are ordered (q|k|v, MLP). linear2's inputs are ordered (attention, MLP).
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        inner = cfg.mlp_ratio * cfg.hidden
        self.widths = (cfg.hidden, cfg.hidden, cfg.hidden, inner)  # of linear1's outputs
        self.linear1 = PartsLinear(cfg.hidden, 3 * cfg.hidden + inner)
        self.linear2 = PartsLinear(cfg.hidden + inner, cfg.hidden)
        self.norm = QKNormRope(cfg.head_dim)
        self.modulation = Modulation(cfg.hidden, 3)

    def forward(self, x_BSD: Tensor, vec_BD: Tensor, rope_SR2: Tensor) -> Tensor:
        """x: (B, S, D), text first. Returns the same shape. rope: fp32."""
        shift_B1D, scale_B1D, gate_B1D = self.modulation(vec_BD)
        normed_BSD = modulated_norm(x_BSD, shift_B1D, scale_B1D)
        *qkv, inner_BSM = self.linear1.in_parts((normed_BSD,), self.widths)
        attended_BSD = attention(*self.norm(*qkv, rope_SR2))
        out_BSD = self.linear2(attended_BSD, F.gelu(inner_BSM, approximate="tanh"))
        return x_BSD + gate_B1D * out_BSD


class LastLayer(nn.Module):
    """The head: an adaptive norm, then one linear to the packed latent."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(cfg.hidden, cfg.packed_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(cfg.hidden, 2 * cfg.hidden))

    def forward(self, img_BND: Tensor, vec_BD: Tensor) -> Tensor:
        """The velocity of the image tokens: (B, N, P). port: shift comes first; diffusers' files have scale first."""
        shift_B1D, scale_B1D = self.adaLN_modulation(vec_BD)[:, None, :].chunk(2, dim=-1)
        return self.linear(modulated_norm(img_BND, shift_B1D, scale_B1D))


class Flux(nn.Module):
    """FLUX.1-schnell (no guidance) for one fixed image size. Source: BFL flux, model.py and modules/layers.py."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.img_in = nn.Linear(cfg.packed_channels, cfg.hidden)
        self.time_in = MLPEmbedder(TIME_WAVES, cfg.hidden)
        self.vector_in = MLPEmbedder(cfg.clip_dim, cfg.hidden)
        self.txt_in = nn.Linear(cfg.t5_dim, cfg.hidden)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(cfg) for _ in range(cfg.double_blocks))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(cfg) for _ in range(cfg.single_blocks))
        self.final_layer = LastLayer(cfg)
        self.register_buffer("rope", self.make_rope(), persistent=False)

    def make_rope(self) -> Tensor:
        """The rotations of all tokens: (S, R, 2) fp32, on the default device."""
        text_T3 = torch.zeros(self.cfg.text_tokens, 3, dtype=torch.float64)
        image_N3 = image_positions(self.cfg.latent_height, self.cfg.latent_width)
        return rope_table(torch.cat((text_T3, image_N3)), self.cfg.rope_axes, self.cfg.rope_theta)

    def forward(self, img_BNP: Tensor, txt_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        """The velocity at (x_t, t): (B, N, P) in the dtype of img.

        img: packed x_t. txt: T5 states. clip: pooled CLIP vector. These three have the compute dtype.
        t:   in [0, 1], fp32.
        """
        img_BND = self.img_in(img_BNP)
        txt_BTD = self.txt_in(txt_BTE)
        vec_BD = self.time_in(timestep_embedding(t_B).to(img_BNP.dtype)) + self.vector_in(clip_BV)

        for block in self.double_blocks:  # port: blocks of a kind have the same shapes; scan over their stacked weights
            img_BND, txt_BTD = block(img_BND, txt_BTD, vec_BD, self.rope)
        x_BSD = torch.cat((txt_BTD, img_BND), dim=1)
        for block in self.single_blocks:
            x_BSD = block(x_BSD, vec_BD, self.rope)
        return self.final_layer(x_BSD[:, txt_BTD.shape[1] :], vec_BD)


# How parameters start: the first pattern of their names (fnmatch) that fits. At first each block passes its input on,
# and the output is 0. rng.init_values draws. spec: MLPerf reference, torchtitan experiments/flux, init_weights.
START = {
    "*.scale": "ones",
    "*.bias": "zeros",
    "*.lin.weight": "zeros",  # all modulation
    "final_layer.*": "zeros",
    "time_in.*": "normal",
    "vector_in.*": "normal",
    "*": "uniform",
}


def init_spec(name: str, shape: Shape) -> tuple[str, float]:
    """How a parameter starts, by START: its distribution (zeros, ones, normal or uniform) and its width.

    The width is a standard deviation or, if uniform, a half-width: sqrt(6 / (inputs + outputs)).
    port: inputs and outputs are those of the joined weights qkv and linear1, not of their parts.
    """
    kind = next(START[pattern] for pattern in START if fnmatchcase(name, pattern))
    if kind == "uniform":
        return kind, math.sqrt(6.0 / (shape[0] + shape[1]))
    return kind, 0.02 if kind == "normal" else 0.0


def parameter_table(cfg: ModelConfig) -> Shapes:
    """BFL name -> shape of every parameter, without allocating any."""
    with torch.device("meta"):
        net = Flux(cfg)
    return {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
