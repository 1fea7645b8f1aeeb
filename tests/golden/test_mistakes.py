"""Single mistakes that ports make, planted into the product's functions one at a time.

    python tests/golden/test_mistakes.py            where each shows first, and the rank of its cause in the list
    python tests/golden/test_mistakes.py --write    write mistakes.json anew: how far each mistake is off there
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_golden import CFG, GIVEN, KEPT, arrays
from torch import nn

from flux_ref import config_file, data, evaluate, flow, latents, model, rng, schedule, step
from flux_ref.files import write_whole
from tools.golden import check, draws, precision, record, training
from tools.golden.files import FOLDER, MISTAKES

Made = dict[str, np.ndarray]


# What is computed with a mistake.


def drawn(world, **keys) -> Made:
    cfg = config_file.replace(CFG, **keys)
    return arrays(draws.draws(cfg) | draws.full_draws(GIVEN) | training.init(cfg, world) | draws.full_net())


def trained(world, **keys) -> Made:
    cfg = config_file.replace(CFG, **keys)
    return arrays(training.clipping(cfg, world, GIVEN) | training.training(cfg, world, GIVEN) | training.far(cfg))


def on_ranks(world) -> Made:
    return arrays(training.on_two_ranks(CFG, world, GIVEN))


def validated(world) -> Made:
    return arrays(training.validation(CFG, world, GIVEN) | training.later_validation(CFG, world, GIVEN))


def in_bf16(world) -> Made:
    batch = {name: torch.from_numpy(KEPT.arrays[f"batch.{name}"].copy()) for name in training.BATCH}
    of_net = precision.bf16(CFG, GIVEN, batch)
    return arrays(precision.operations(CFG, GIVEN) | of_net | training.step_in_bf16(CFG, world, GIVEN))


def in_fp8(world) -> Made:
    return arrays(precision.fp8_edges(GIVEN) | precision.fp8_linear(GIVEN))


# What stands in place of a function.

words, uniform, normal, order, train_draw = rng.words, rng.uniform, rng.normal, rng.order, rng.train_draw
flow_time, pack, interpolate, modulate = rng.flow_time, latents.pack, flow.interpolate, model.modulate
apply_rope, attention, time_waves, rope_table = model.apply_rope, model.attention, model.time_waves, model.rope_table
linear, layer_norm, rms_norm, adamw = F.linear, F.layer_norm, F.rms_norm, torch.optim.AdamW.step
positions, val_draw, start_of, cast = latents.image_positions, rng.val_draw, model.start_of, precision.cast
fill, val_fill, train_step, chunk = data.TrainSet._fill, data.ValSet._fill, step.train_step, torch.Tensor.chunk
scales_of, total_norm = precision.scales_of, torch.nn.utils.get_total_norm
rounded = torch.Tensor.bfloat16


def box_muller(pairs: Callable, sine_first: bool = False) -> Callable:
    """Normals of words; pairs gives the words of the radii and of the angles."""

    def made(word):
        first, second = pairs(word)
        swapped = normal(np.stack((first, second), axis=-1).ravel()).reshape(-1, 2)
        return (swapped[:, ::-1] if sine_first else swapped).ravel()

    return made


def edited(**changes) -> Callable:
    """A training draw with other fields; a change is a function of the draw."""

    def draw(train, epoch, sample, shape):
        real = train_draw(train, epoch, sample, shape)
        return real._replace(**{name: change(real) for name, change in changes.items()})

    return draw


def filled(change: Callable) -> Callable:
    """A row of the training set that is changed after it was filled. change: (row, what it held before, its set)."""

    def fill_row(self, row, item):
        self._read(item[1], row)
        before = {name: values.copy() for name, values in row.items()}
        fill(self, row, item)
        change(row, before, self)

    return fill_row


def keep(name: str) -> Callable:
    """Text that stays though the caption is dropped."""

    def change(row, before, _):
        row[name][...] = before[name]

    return change


def empty(row, before, train_set):
    """Zeros in place of the empty caption."""
    for name in train_set.empty:
        if not np.array_equal(row[name], before[name]):
            row[name][...] = 0


def in_training(draw: Callable) -> SimpleNamespace:
    """The module rng for data.py alone: training draws otherwise, though draws alone are right."""
    return SimpleNamespace(**vars(rng) | {"train_draw": draw})


def by_position(train, epoch, sample, shape):
    return train_draw(train, epoch, int(np.argsort(order(train.seed, epoch, CFG.data.train_count))[sample]), shape)


def half_later(self, row, item):
    val_fill(self, row, item)
    row["t"] += (row["timestep"] >= 0) * np.float32(0.5 / schedule.TIMESTEPS)


def normed(center: bool = True, correction: int = 0, dtype: torch.dtype = torch.float32) -> Callable:
    def norm(x, shape, eps):
        wide = x.to(dtype)
        centred = wide - wide.mean(-1, keepdim=True) * center
        variance = centred.square().sum(-1, keepdim=True) / (x.shape[-1] - correction)
        return (centred / (variance + eps).sqrt()).to(x.dtype)

    return norm


def attended(scale: float = 1.0, dtype=torch.float32, causal: bool = False, merge: tuple = (1, 2), axis: int = -1):
    def attend(q_BSHK, k_BSHK, v_BSHK):
        q, k, v = (x.transpose(1, 2).to(dtype) for x in (q_BSHK, k_BSHK, v_BSHK))
        scores = q @ k.mT * (scale / q.shape[-1] ** 0.5)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        out = (scores.softmax(axis) @ v).transpose(1, 2)  # B S H K
        return (out.mT if merge == (2, 1) else out).flatten(-2).to(q_BSHK.dtype)

    return attend


def halves(x, rope):
    """RoPE on (r, r + K / 2)."""
    pairs = np.arange(x.shape[-1]).reshape(2, -1).T.ravel()
    return apply_rope(x[..., pairs], rope)[..., np.argsort(pairs)]


def turned_values(self, q, k, v, rope):
    q, k, v = qk_norm(self, q, k, v, rope)
    return q, k, apply_rope(v, rope).to(v.dtype)


qk_norm = model.QKNorm.forward


def by_head(self, q, k, v, rope):
    """Features ordered (head, q | k | v)."""
    parts = torch.cat((q, k, v), -1).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
    return qk_norm(self, *(part.flatten(-2) for part in parts), rope)


def rounded_first(self, q, k, v, rope):
    """Queries and keys are rounded before RoPE, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "apply_rope", lambda x, rope: apply_rope(rounded(x).float(), rope))
        return qk_norm(self, q, k, v, rope)


def chunked(order_of_parts: dict[int, tuple[int, ...]]) -> Callable:
    """Parts of a modulation in another order, by their number."""

    def chunk_parts(x, parts, dim=0):
        made = chunk(x, parts, dim)
        return tuple(made[i] for i in order_of_parts.get(parts, range(parts)))

    return chunk_parts


def mlp_first(tensors, dim=0):
    is_inner = len(tensors) == 2 and tensors[1].shape[-1] == 4 * tensors[0].shape[-1]
    return cat(tensors[::-1] if is_inner else tensors, dim)


cat = torch.cat


def waves(factor: float = 1000.0, last: int = 128, order_of_parts: tuple = (0, 1), dtype=torch.float32) -> Callable:
    def made(t):
        frequency = torch.exp(-np.log(10000.0) * torch.arange(128, dtype=torch.float32) / last)
        angle = ((factor * t).to(dtype).float()[:, None] * frequency).to(dtype).float()
        both = angle.cos(), angle.sin()
        return torch.cat([both[i] for i in order_of_parts], dim=-1)

    return made


def losses(error: Callable) -> Callable:
    """The objective with another error. error: (prediction, target, the dtype of the net)."""

    def of_batch(net, batch, dtype):
        latent = latents.sample(batch["mean"], batch["logvar"], batch["latent_eps"])
        x = flow.interpolate(latent, batch["noise"], batch["t"])
        found = net(latents.pack(x).to(dtype), batch["t5"].to(dtype), batch["clip"].to(dtype), batch["t"])
        return error(found, latents.pack(batch["noise"] - latent), dtype).float()

    return of_batch


def squares(found, target):
    return (found - target).square().mean(dim=(1, 2))


def posterior(deviation: Callable, finish: Callable) -> Callable:
    return lambda mean, logvar, eps: finish(mean.float() + deviation(logvar.float()) * eps)


def scaled_latent(z):
    return latents.SCALE * (z - latents.SHIFT)


def optimizer(change: Callable) -> Callable:
    """AdamW with another group. change: (group)."""

    def update(self):
        kept = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        change(self.param_groups[0])
        adamw(self)
        self.param_groups[0].update(kept)

    return update


def coupled(self):
    """Decay joins the gradient."""
    group = self.param_groups[0]
    for weight in group["params"]:
        weight.grad = weight.grad + group["weight_decay"] * weight.detach()
    kept, group["weight_decay"] = group["weight_decay"], 0.0
    adamw(self)
    group["weight_decay"] = kept


def uncorrected(self):
    """Moments are not divided by 1 - beta^step."""
    group = self.param_groups[0]
    beta1, beta2 = group["betas"]
    for weight in group["params"]:
        state = self.state[weight]
        state["step"] += 1
        state["exp_avg"].lerp_(weight.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(weight.grad.square(), 1 - beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


def no_decay_of_vectors(self):
    for weight in self.param_groups[0]["params"]:
        if weight.ndim == 1:
            weight.div_(1 - self.param_groups[0]["lr"] * self.param_groups[0]["weight_decay"])
    adamw(self)


def each_own_norm(grads, *args, **options):
    """Clip each parameter by its own norm; then the norm over all is shown."""
    norm = total_norm(grads)
    for grad in grads:
        grad.mul_((CFG.optim.clip_norm / (grad.norm() + 1e-6)).clamp(max=1.0))
        grad.mul_(((norm + 1e-6) / CFG.optim.clip_norm).clamp(min=1.0))
    return norm


def every_second(cfg, number, rank, size):
    """Rank r takes every R-th row."""
    first = number * cfg.train.global_batch
    return range(first + rank, first + cfg.train.global_batch, size)


def over_samples(sums, samples):
    counts, totals = sums
    return replace(evaluate_result(sums, samples), val_loss=sum(totals) / sum(counts))


evaluate_result = evaluate.summarise


def summed_in_bf16(net, opt, batch, health, cfg):
    """The sum of the micro-batches' gradients is rounded to bf16."""
    update = opt.step

    def late():
        for parameter in opt.parameters:
            parameter.grad.copy_(rounded(parameter.grad))
        return update()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opt, "step", late)
        return train_step(net, opt, batch, health, cfg)


def weights_in_bf16(self):
    adamw(self)
    for weight in self.param_groups[0]["params"]:
        weight.copy_(rounded(weight))


class Mistake(NamedTuple):
    cause: str  # as the check's list names it
    made: Callable[..., Made]
    owner: object = None  # the attribute `name` of it becomes `instead`; or the config's keys become `keys`
    name: str = ""
    instead: object = None
    keys: tuple = ()  # (key, value)


BF16 = torch.bfloat16
ROWS = (
    # generator
    (
        "the key's words are swapped; it is (seed, stream)",
        drawn,
        rng,
        "words",
        lambda seed, stream, count, **more: words(stream, seed, count, **more),
    ),
    (
        "sample and epoch are swapped in the counter",
        drawn,
        rng,
        "words",
        lambda *args, sample=0, epoch=0, **more: words(*args, sample=epoch, epoch=sample, **more),
    ),
    (
        "the counter's first word begins at 0; it is word // 4 + 1",
        drawn,
        rng,
        "words",
        lambda seed, stream, count, start=0, **more: words(seed, stream, count, start=max(start - 4, 0), **more),
    ),
    (
        "a half is added: (word + 0.5) * 2^-24",
        drawn,
        rng,
        "uniform",
        lambda word: (uniform(word) + 2.0**-25).astype(np.float32),
    ),
    (
        "32 bits of a word make a uniform; (word >> 40) * 2^-24",
        drawn,
        rng,
        "uniform",
        lambda word: ((word >> 32) * 2.0**-32).astype(np.float32),
    ),
    (
        "the sine comes first in a pair of normals; it is the cosine",
        drawn,
        rng,
        "normal",
        box_muller(lambda word: (word[0::2], word[1::2]), sine_first=True),
    ),
    (
        "radii from the first half of the words, angles from the second; pairs are neighbours",
        drawn,
        rng,
        "normal",
        box_muller(lambda word: np.split(word, 2)),
    ),
    (
        "the key of a name is read most significant byte first",
        drawn,
        rng,
        "name_key",
        lambda name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"),
    ),
    ("stream INIT is another one, such as 7; it is 6", drawn, rng, "INIT", 7),
    ("streams of latent and diffusion noise are swapped: LATENT is 2, NOISE is 3", drawn, rng, "LATENT", rng.NOISE),
    ("validation draws from the streams of training; VAL_NOISE is 5", drawn, rng, "VAL_NOISE", rng.NOISE),
    ("the order is sorted the other way: its inverse", drawn, rng, "order", lambda *args: np.argsort(order(*args))),
    ("each epoch has the order of epoch 0", drawn, rng, "order", lambda seed, epoch, count: order(seed, 0, count)),
    (
        "words are compared as signed integers; they are unsigned",
        drawn,
        rng,
        "order",
        lambda seed, epoch, count: np.argsort(words(seed, rng.ORDER, count, epoch=epoch).view(np.int64), kind="stable"),
    ),
    (
        "epochs count from 1; they count from 0",
        drawn,
        rng,
        "train_draw",
        lambda train, epoch, sample, shape: train_draw(train, epoch + 1, sample, shape),
    ),
    ("1 - u stands for u in t", drawn, rng, "train_draw", edited(t=lambda real: 1 - real.t)),
    (
        "the caption is dropped where u is above 1 - rate; u < rate",
        drawn,
        rng,
        "train_draw",
        lambda *args: train_draw(*args)._replace(
            drop_caption=not train_draw(replace(args[0], caption_drop=0.9), *args[1:]).drop_caption
        ),
    ),
    (
        "the shift is missing",
        drawn,
        rng,
        "flow_time",
        lambda word, train: flow_time(word, replace(train, timestep_shift=1.0)),
    ),
    (
        "width is taken for the variance; it is the standard deviation of the logit",
        drawn,
        rng,
        "flow_time",
        lambda word, train: flow_time(word, replace(train, timestep_width=train.timestep_width**0.5)),
    ),
    (
        "Xavier-uniform is (2 u - 1) / sqrt(in); it is sqrt(6 / (in + out))",
        drawn,
        model,
        "start_of",
        lambda name, shape: (
            ("uniform", shape[-1] ** -0.5) if start_of(name, shape)[0] == "uniform" else start_of(name, shape)
        ),
    ),
    (
        "lr off by one step: the first step has peak / warmup_steps, not 0",
        drawn,
        schedule,
        "lr",
        lambda number, optim: optim.lr * min(1.0, number / max(1, optim.warmup_steps)),
    ),
    (
        "min is missing: the rate grows after warm-up",
        drawn,
        schedule,
        "lr",
        lambda number, optim: optim.lr * (number + 1) / max(1, optim.warmup_steps),
    ),
    (
        "rows and columns of positions are swapped",
        drawn,
        model,
        "image_positions",
        lambda *sizes: positions(*sizes)[:, [0, 2, 1]],
    ),
    (
        "angles of RoPE are rounded to bf16",
        drawn,
        model,
        "rope_table",
        lambda places, axes, theta: rope_table(places, axes, theta).bfloat16().float(),
    ),
    # data of training
    (
        "no order is drawn: samples in the order of the data set",
        trained,
        rng,
        "order",
        lambda seed, epoch, count: np.arange(count),
    ),
    (
        "draws by position in the epoch; they are by the sample's index in the data set",
        trained,
        data,
        "rng",
        in_training(by_position),
    ),
    (
        "caption drop of CLIP only; T5 and CLIP become empty together",
        trained,
        data.TrainSet,
        "_fill",
        filled(keep("t5")),
    ),
    (
        "caption drop of T5 only; T5 and CLIP become empty together",
        trained,
        data.TrainSet,
        "_fill",
        filled(keep("clip")),
    ),
    (
        "a dropped caption becomes zeros; it becomes the empty caption's encodings",
        trained,
        data.TrainSet,
        "_fill",
        filled(empty),
    ),
    ("latent_eps and noise are the same draw", trained, rng, "train_draw", edited(noise=lambda real: real.latent_eps)),
    (
        "the noise is that of epoch 0 in every epoch",
        trained,
        rng,
        "train_draw",
        lambda train, epoch, *args: train_draw(train, epoch, *args)._replace(noise=train_draw(train, 0, *args).noise),
    ),
    (
        "the rate of caption drop in training is 0.11; it is 0.1",
        trained,
        data,
        "rng",
        in_training(lambda train, *args: train_draw(replace(train, caption_drop=0.11), *args)),
    ),
    # latents and objective
    (
        "latent scale before shift: first subtract the shift, then scale",
        trained,
        latents,
        "sample",
        posterior(lambda v: torch.exp(v / 2), lambda z: latents.SCALE * z - latents.SHIFT),
    ),
    (
        "the deviation is exp(logvar), the variance; it is exp(logvar / 2)",
        trained,
        latents,
        "sample",
        posterior(torch.exp, scaled_latent),
    ),
    ("the mean alone, without eps", trained, latents, "sample", posterior(torch.zeros_like, scaled_latent)),
    (
        "the latent is divided by the scale",
        trained,
        latents,
        "sample",
        posterior(lambda v: torch.exp(v / 2), lambda z: (z - latents.SHIFT) / latents.SCALE),
    ),
    (
        "x_t direction: t = 0 is data, t = 1 is noise",
        trained,
        flow,
        "interpolate",
        lambda x, noise, t: interpolate(noise, x, t),
    ),
    ("tokens run column by column", trained, latents, "pack", lambda x: pack(x.transpose(-1, -2))),
    (
        "patch feature order: (dy, dx, C); it is (C, dy, dx)",
        trained,
        latents,
        "pack",
        lambda x: pack(x).unflatten(-1, (-1, 4)).mT.flatten(-2).contiguous(),
    ),
    # the net
    ("cos/sin order: 128 cosines, then 128 sines", trained, model, "time_waves", waves(order_of_parts=(1, 0))),
    ("frequencies: i / 127; they are i / 128", trained, model, "time_waves", waves(last=127)),
    ("t scaling: the factor 1000 is missing", trained, model, "time_waves", waves(factor=1.0)),
    ("GELU by erf stands for SiLU", trained, F, "silu", lambda x, inplace=False: F.gelu(x)),
    ("GELU by erf; it is the tanh form", trained, nn.GELU, "forward", lambda self, x: F.gelu(x)),
    (
        "epsilon of layer norm: 1e-5; it is 1e-6",
        trained,
        F,
        "layer_norm",
        lambda x, shape, eps: layer_norm(x, shape, eps=1e-5),
    ),
    ("layer norm divides by n - 1; it is the variance by n", trained, F, "layer_norm", normed(correction=1)),
    ("it is an RMS norm, without the mean's subtraction", trained, F, "layer_norm", normed(center=False)),
    (
        "the 1 is missing: it is (1 + scale) * norm(x) + shift",
        trained,
        model,
        "modulate",
        lambda x, shift, scale: modulate(x, shift, scale - 1),
    ),
    (
        "scale and shift swapped: shift is the first part, scale the second",
        trained,
        model,
        "modulate",
        lambda x, shift, scale: modulate(x, scale, shift),
    ),
    (
        "epsilon of RMSNorm: 1e-5; it is 1e-6",
        trained,
        F,
        "rms_norm",
        lambda x, shape, scale, eps: rms_norm(x, shape, scale, eps=1e-5),
    ),
    (
        "the scale of RMSNorm is missing",
        trained,
        F,
        "rms_norm",
        lambda x, shape, scale, eps: rms_norm(x, shape, 0 * scale + 1, eps),
    ),
    ("qkv order: (head, q | k | v); it is (q | k | v, head, dim)", trained, model.QKNorm, "forward", by_head),
    ("rope pair layout: halves (r, r + K/2); neighbours turn together", trained, model, "apply_rope", halves),
    (
        "rope direction: (c a - s b, s a + c b); the sine's sign is positive",
        trained,
        model,
        "apply_rope",
        lambda x, rope: apply_rope(x, rope * torch.tensor([1.0, -1.0])),
    ),
    ("values are rotated as queries and keys are", trained, model.QKNorm, "forward", turned_values),
    ("attention: scores are not divided by sqrt(K)", trained, model, "attention", attended(scale=8**0.5)),
    ("a causal mask; there is none", trained, model, "attention", attended(causal=True)),
    ("head order: the result is merged as (dim, head)", trained, model, "attention", attended(merge=(2, 1))),
    ("softmax over the queries; it is over the keys", trained, model, "attention", attended(axis=-2)),
    (
        "order of the modulation's parts: scale, shift, gate",
        trained,
        torch.Tensor,
        "chunk",
        chunked({6: (1, 0, 2, 4, 3, 5)}),
    ),
    (
        "the last layer's scale comes first, as in diffusers' files",
        trained,
        torch.Tensor,
        "chunk",
        chunked({2: (1, 0)}),
    ),
    ("the MLP's gate and attention's are swapped", trained, torch.Tensor, "chunk", chunked({6: (0, 1, 5, 3, 4, 2)})),
    ("the MLP comes first in linear2; attention is first", trained, torch, "cat", mlp_first),
    (
        "half of the mean squared error",
        trained,
        flow,
        "losses",
        losses(lambda found, target, _: squares(found.float(), target) / 2),
    ),
    (
        "the mean absolute error; it is squared",
        trained,
        flow,
        "losses",
        losses(lambda found, target, _: (found.float() - target).abs().mean(dim=(1, 2))),
    ),
    # optimizer
    ("beta1 is 0.95; it is 0.9", trained, None, "", None, (("optim__beta1", 0.95),)),
    ("beta2 is 0.999; it is 0.95", trained, None, "", None, (("optim__beta2", 0.999),)),
    ("decay is 0.01; it is 0.1", trained, None, "", None, (("optim__weight_decay", 0.01),)),
    ("decay coupled: Adam with L2, decay joins the gradient", trained, torch.optim.AdamW, "step", coupled),
    ("bias correction is missing", trained, torch.optim.AdamW, "step", uncorrected),
    ("biases and norms do not decay; all parameters do", trained, torch.optim.AdamW, "step", no_decay_of_vectors),
    (
        "epsilon of AdamW is 1e-6; it is 1e-8",
        trained,
        torch.optim.AdamW,
        "step",
        optimizer(lambda group: group.update(eps=1e-6)),
    ),
    (
        "each parameter is clipped by its own norm; the norm is over all parameters",
        trained,
        torch.nn.utils,
        "get_total_norm",
        each_own_norm,
    ),
    ("nothing is clipped", trained, None, "", None, (("optim__clip_norm", 1e9),)),
    # ranks
    ("rank r takes every R-th row; it takes a run of neighbours", on_ranks, data, "rank_slice", every_second),
    (
        "a sum over micro-batches; it is the mean",
        on_ranks,
        step,
        "train_step",
        lambda *args: tuple(2 * x for x in train_step(*args)),
    ),
    # validation
    ("validation t = (timestep + 0.5) / 8; it is timestep / 8", validated, data.ValSet, "_fill", half_later),
    ("the mean over samples; it is the mean of the eight means", validated, evaluate, "summarise", over_samples),
    (
        "validation ignores the number of training samples: the noise is that of evaluation 0",
        validated,
        rng,
        "val_draw",
        lambda seed, evaluation, sample, shape: val_draw(seed, 0, sample, shape),
    ),
    (
        "the same validation noise for all samples",
        validated,
        rng,
        "val_draw",
        lambda seed, evaluation, sample, shape: val_draw(seed, evaluation, 0, shape),
    ),
    # bf16
    (
        "the target is rounded to bf16; it is fp32",
        in_bf16,
        flow,
        "losses",
        losses(lambda found, target, dtype: squares(found.float(), target.to(dtype).float())),
    ),
    (
        "the loss is computed in bf16; the error is formed and averaged in fp32",
        in_bf16,
        flow,
        "losses",
        losses(lambda found, target, dtype: squares(found, target.to(dtype))),
    ),
    ("scores and softmax in bf16; they are fp32", in_bf16, model, "attention", attended(dtype=BF16)),
    ("the scale of RMSNorm is not rounded to bf16; it is a weight", in_bf16, nn.Module, "bfloat16", lambda self: self),
    (
        "RMSNorm computed in bf16; it is fp32",
        in_bf16,
        F,
        "rms_norm",
        lambda x, shape, scale, eps: rms_norm(rounded(x), shape, rounded(scale), eps=eps).float(),
    ),
    ("queries and keys are rounded before RoPE, too", in_bf16, model.QKNorm, "forward", rounded_first),
    ("layer norm computed in bf16: mean and variance are fp32 sums", in_bf16, F, "layer_norm", normed(dtype=BF16)),
    (
        "tanh of GELU in bf16: 1 + tanh cancels",
        in_bf16,
        F,
        "gelu",
        lambda x, approximate: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x * x * x))),
    ),
    ("1000 * t and the angles are rounded to bf16", in_bf16, model, "time_waves", waves(dtype=BF16)),
    (
        "gradients of micro-batches are added, averaged or reduced in bf16; that is fp32",
        in_bf16,
        step,
        "train_step",
        summed_in_bf16,
    ),
    ("master weights are kept in bf16; they are fp32", in_bf16, torch.optim.AdamW, "step", weights_in_bf16),
    # FP8
    (
        "values beyond the largest become infinity or NaN; clamp before the cast",
        in_fp8,
        precision,
        "cast",
        lambda x, scale, dtype: (x.float() * scale).to(dtype) if dtype == torch.float8_e5m2 else cast(x, scale, dtype),
    ),
    (
        "the cast rounds towards zero; it rounds to nearest even",
        in_fp8,
        precision,
        "cast",
        lambda x, scale, dtype: cast(x * (1 - 2.0**-6), scale, dtype),
    ),
    ("amax is the largest value; it is the largest magnitude", in_fp8, precision, "magnitudes", lambda x: x.amax(-1)),
    (
        "x * scale is rounded to bf16 before the cast; it is fp32",
        in_fp8,
        precision,
        "cast",
        lambda x, scale, dtype: cast(rounded(x.float() * scale), torch.tensor(1.0), dtype),
    ),
    (
        "the scale has no cap; it is at most 2^44",
        in_fp8,
        precision,
        "scale_of_magnitude",
        lambda amax, largest: largest / amax,
    ),
    (
        "the scale is a power of two; it is largest / amax",
        in_fp8,
        precision,
        "scales_of",
        lambda found, dtype: tuple(torch.exp2(torch.log2(x).floor()) for x in scales_of(found, dtype)),
    ),
)
PLANTED = [Mistake(*row) for row in ROWS]


def first_of(mistake: Mistake, world) -> check.Difference | None:
    """How the first value differs that shows a mistake; None if none does."""
    with pytest.MonkeyPatch.context() as patch:
        if mistake.owner:
            patch.setattr(mistake.owner, mistake.name, mistake.instead)
        made = mistake.made(world, **dict(mistake.keys))
    for value in KEPT.values:
        found = check.compare(value, KEPT.arrays[value.name], made[value.name]) if value.name in made else None
        if found:
            return found
    return check.own_losses(KEPT, made)


def rank(mistake: Mistake, found: check.Difference) -> int:
    """The place of a mistake among the causes that the check lists, from 1 on; 0 if it is not among them."""
    listed = [cause.partition(" (this mistake")[0] for cause in check.causes(found)]
    return listed.index(mistake.cause) + 1 if mistake.cause in listed else 0


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_mistake_is_seen_and_named_among_the_first_two(few):
    wrong = []
    with record.one_process() as world:
        for mistake in PLANTED[:: 12 if few else 1]:
            found = first_of(mistake, world)
            if not found or rank(mistake, found) not in (1, 2):
                wrong.append((mistake.cause, found and (found.value.name, found.words, check.causes(found)[:2])))
    assert not wrong


def main(argv: list[str]) -> None:
    known: dict[str, dict[str, float]] = {}
    with record.one_process() as world:
        for number, mistake in enumerate(PLANTED, 1):
            found = first_of(mistake, world)
            if found and np.isfinite(found.rms):
                known.setdefault(found.value.name, {})[mistake.cause] = float(f"{found.rms:.4g}")
            where = f"{rank(mistake, found)}  {found.value.name}: {found.words}" if found else "not seen"
            print(f"{number:3}  {mistake.cause}\n         {where}", flush=True)
    if argv:
        write_whole(FOLDER / MISTAKES, json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
