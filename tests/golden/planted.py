"""Mistakes that ports make, planted in this code by editing the source of a function while a test runs."""

import importlib
import inspect
import textwrap
from operator import attrgetter
from typing import NamedTuple

import torch

# First line: the golden value that must be named first | words of the known cause | the function with the mistake.
# Lines below it: what the source says => what the mistaken source says.
TABLE = r"""
draws.words.0 | begins at 1 | rng.words
    start // 4, sample => start // 4 + 1, sample
draws.uniform | can round to 1 | rng.uniform
    40)) * 2.0**-24 => 32)) * 2.0**-32
draws.normal | the cosine comes first | rng.normal
    0] = radius * np.cos => 0] = radius * np.sin
    1] = radius * np.sin => 1] = radius * np.cos
draws.order.0 | not its inverse | rng.order
    "stable") => "stable").argsort()
draws.latent_eps | LATENT is 2 | rng.train_draw
    seed, LATENT => seed, NOISE
batch.t5 | not zeros | data.TrainSet._fill
    self.empty["t5"], self.empty["clip"] => 0, 0
init.img_in.weight | Xavier-uniform | sharding.initialiser
    6.0 / => 3.0 /
latent | scale/shift order | latents.sample
    (z_BCYX - SHIFT) => z_BCYX - SHIFT
latent | exp(logvar) the variance | latents.sample
    0.5 * logvar => logvar
x_t | x_t direction | flow.interpolate
    (1.0 - t_B111) * latent_BCYX + t_B111 * noise => t_B111 * latent_BCYX + (1.0 - t_B111) * noise
target | velocity sign | flow.losses
    batch["noise"] - latent_BCYX => latent_BCYX - batch["noise"]
target | patch feature order | latents.pack
    1, 3, 5) => 3, 5, 1)
rope | the cosine is first | model.rope_table
    angle_SR.cos(), angle_SR.sin() => angle_SR.sin(), angle_SR.cos()
time_waves | 128 cosines | model.time_waves
    (angle.cos(), angle.sin()) => (angle.sin(), angle.cos())
time_waves | steps of 4 | model.time_waves
    1000.0 * t_B.float() => (1000.0 * t_B).bfloat16().float()
time_waves | 1000 is missing | model.time_waves
    1000.0 * => 1.0 *
double_blocks.0.img_mod.lin | SiLU comes before | model.Modulation.forward
    F.silu(vec_BD) => vec_BD
double_blocks.0.img_attn.qkv.input | scale and shift swapped | model.modulate
    shift_B1D: Tensor, scale => scale_B1D: Tensor, shift
double_blocks.0.img_attn.qkv.input | 1e-6, not 1e-5 | model.modulate
    eps=NORM_EPS => eps=1e-5
double_blocks.0.img_attn.norm.query_norm | qkv order | model.SelfAttention.project
    .chunk(3, dim=-1) => .unflatten(-1, (self.heads, 3, -1)).movedim(3, 0).flatten(-2)
double_blocks.0.img_attn.norm.query_norm | head order | model.split_heads
    (heads, -1)) => (-1, heads)).mT.contiguous()
double_blocks.0.img_attn.norm.query_norm | epsilon of RMSNorm | model.RMSNorm.forward
    eps=NORM_EPS => eps=None
double_blocks.0.img_attn.norm.query_norm | RMSNorm computed in bf16 | model.RMSNorm.forward
    x.float() => x.bfloat16()
    scale.float(), eps=NORM_EPS) => scale.bfloat16(), eps=NORM_EPS).float()
double_blocks.0.attention.q | interleaved | model.apply_rope
    (-1, 2)) => (2, -1)).transpose(-1, -2).contiguous()
    rope_S1R2)).flatten => rope_S1R2)).mT.flatten
double_blocks.0.attention.v | text comes first | model.DoubleBlock.forward
    zip(txt_qkv, img_qkv) => zip(img_qkv, txt_qkv)
    txt_out_BTD, img_out_BND = => img_out_BND, txt_out_BTD =
    split(lengths, dim=1) => split(lengths[::-1], dim=1)
double_blocks.0.attention | sqrt(K) | model.attention
    k_BSHK, v_BSHK))) => k_BSHK, v_BSHK)), scale=1.0)
double_blocks.0.img_mlp.1 | tanh form | model.mlp
    "tanh" => "none"
double_blocks.0.img | gate is missing | model.DoubleBlock.forward
    img_gate2 * => 1.0 *
losses | mean reduction | flow.losses
    .mean(dim=(1, 2)) => .sum(dim=2).mean(dim=1)
step1.clip_coefficient | clip: | optim.Optimizer.step
    (norm + CLIP_EPS) => (norm * 0)
step1.clip_coefficient | clip: | optim.Optimizer.__init__
    cfg.clip_norm => 2 * cfg.clip_norm
step1.lr | lr off by one | schedule.lr
    step + 1 => step
step1.exp_avg.img_in.weight | decay coupled | optim.Optimizer.__init__
    torch.optim.AdamW => torch.optim.Adam
step1.weights.img_in.weight | bias correction | optim.Optimizer.step
    self.adamw.step() => self.set_steps(10**6); self.adamw.step()
step1.weights.img_in.weight | decay: w | optim.Optimizer.__init__
    cfg.weight_decay => 0.0
step1.weights.img_in.weight | eps outside the root | optim.Optimizer.step
    self.adamw.step() => self.adamw.step(); __import__("planted").move_eps_inside(self)
grad.final_layer.linear.weight | a sum over samples | step.train_step
    part["weight"]).sum() / rows => part["weight"]).sum()
val.t | (timestep + 0.5) / 8 | schedule.validation_time
    timestep / => (timestep + 0.5) /
val.loss | each counted once | evaluate.summarise
    sum(losses) / len(losses) => sum(sums[1]) / sum(sums[0])
val.losses | caption drop in validation | data.ValSet._fill
    rows["timestep"][i], => __import__("planted").drop(rows, i, sample); rows["timestep"][i],
val.losses | VAL_NOISE | rng.val_draw
    VAL_ =>
schedule.lr | min is missing | schedule.lr
    min(1.0, (step + 1) / max(1, warmup_steps)) => (step + 1) / max(1, warmup_steps)
clip.coefficient | min is missing | optim.Optimizer.step
    .clamp(min=1.0) =>
clip.coefficient | epsilon 1e-6 is missing | optim.Optimizer.step
    norm + CLIP_EPS => norm
full.sample | not its inverse | rng.order
    "stable") => "stable").argsort()
ranks.position | rank r takes | data.rank_slice
    range(start, start + rank_batch) => range(step * global_batch + rank, (step + 1) * global_batch, size)
ranks.loss | its share | step.train_step
    .sum() / rows => .sum() / micro
bf16.only.modulate | layer norm computed in bf16 | model.modulate
    F.layer_norm(x_BSD, x_BSD.shape[-1:], eps=NORM_EPS) => __import__("planted").narrow_norm(x_BSD)
bf16.only.rope | rounded once | model.apply_rope
    x_BSHK.unflatten => x_BSHK.bfloat16().float().unflatten
bf16.only.attention | scores and softmax | model.attention
    F.scaled_dot_product_attention => __import__("planted").narrow_attention
bf16.only.gelu | tanh form | model.mlp
    "tanh" => "none"
bf16.only.losses | target is not rounded | flow.losses
    - target_BNP => - target_BNP.bfloat16()
fp8.edge.e4m3fn.bits | not flushed | speed.fp8_product.cast
    (x.float() * scale) => __import__("planted").flushed(x.float() * scale, dtype)
fp8.order.scale | over its micro-batches | speed.fp8_product.scales_of
    torch.maximum(amax, found => (found
    amax(1))) => amax(1)))
fp8.order.scale | present magnitude | speed.fp8_product.magnitudes
    x.abs() => x.abs().clamp(max=0.25)
bf16.rms_norm | RMSNorm computed in bf16 | model.RMSNorm.forward
    x.float() => x
    scale.float(), eps=NORM_EPS) => scale.bfloat16(), eps=NORM_EPS).float()
bf16.time_waves | steps of 4 | model.time_waves
    1000.0 * t_B.float() => (1000.0 * t_B).bfloat16().float()
fp8.x.scale | e4m3 max | speed.fp8_product.scale_of_magnitude
    largest / => torch.as_tensor(largest).clamp(max=240) /
fp8.x.scale | power of 2 | speed.fp8_product.scale_of_magnitude
    (largest / amax) => (largest / amax).log2().floor().exp2()
fp8.delayed.scale | margin | speed.fp8.Fp8State.__init__
    / 2**cfg.margin => * 1.0
fp8.delayed.scale | at most 2^44 | speed.fp8.Fp8State.set_scales
    self.cfg.max_scale_exponent => 126
"""


class Mistake(NamedTuple):
    """place: the first value that differs then. cause: words of the known cause. function: module.name in flux_ref."""

    place: str
    cause: str
    function: str
    changes: list[tuple[str, str]]

    def plant(self, monkeypatch) -> None:
        """Change what the function's source says."""
        module, _, path = self.function.removeprefix("speed.").partition(".")
        folder = "flux_ref.speed" if self.function.startswith("speed.") else "flux_ref"
        owner_path, _, name = path.rpartition(".")
        owner = importlib.import_module(f"{folder}.{module}")
        owner = attrgetter(owner_path)(owner) if owner_path else owner
        function = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.changes:
            assert old in source, f"{self.function} does not say {old!r} any more"
            source = source.replace(old, new)
        scope = {}
        exec(source, function.__globals__, scope)
        monkeypatch.setattr(owner, name, scope[name])


def mistakes() -> list[Mistake]:
    """The rows of the table."""
    planted = []
    for line in TABLE.strip().splitlines():
        if line.startswith("    "):
            old, _, new = line.partition(" =>")
            planted[-1].changes.append((old.strip(), new.strip()))
        else:
            planted.append(Mistake(*line.split(" | "), []))
    return planted


def move_eps_inside(optimizer) -> None:
    """Redo the update of a step with epsilon inside the root."""
    optimizer.number = getattr(optimizer, "number", 0) + 1
    for shard in optimizer.shards:
        state, c1, c2 = optimizer.adamw.state[shard], 1 - 0.9**optimizer.number, 1 - 0.95**optimizer.number
        m, v = state["exp_avg"] / c1, state["exp_avg_sq"] / c2
        shard.data += optimizer.lr * (m / (v.sqrt() + 1e-8) - m / (v + 1e-8).sqrt())


def decay_after(optimizer) -> None:
    """A step of AdamW that shrinks the weights after the update."""
    (group,) = optimizer.adamw.param_groups
    decay, group["weight_decay"] = group["weight_decay"], 0.0
    optimizer.adamw.step()
    group["weight_decay"] = decay
    for shard in optimizer.shards:
        shard.data *= 1 - optimizer.lr * decay


def narrow_norm(x):
    """Layer norm in the dtype of x."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def narrow_attention(q, k, v):
    """Attention whose scores are rounded to the dtype of the operands."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def flushed(x, dtype):
    """x with the subnormals of an FP8 format at zero."""
    return x * (x.abs() >= torch.finfo(dtype).smallest_normal)


def drop(rows: dict, i: int, sample: int) -> None:
    """Drop captions of some validation samples."""
    if sample % 3 == 1:
        rows["t5"][i] = rows["clip"][i] = 0
