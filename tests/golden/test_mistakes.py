"""Single mistakes that ports make: each is an edit of a line of the product.

python tests/golden/test_mistakes.py            where each shows first, and the rank of its cause in the check's list
python tests/golden/test_mistakes.py --write    write mistakes.json anew: how far each mistake is off there
"""

import ast
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from test_golden import KEPT

from flux_ref import dataloader, evaluate, flow, model, optim, rng, schedule, trainer
from flux_ref.files import write_whole
from flux_ref.precision import casts, fp8, recipe
from tools.golden import check, draws, precision, record, training
from tools.golden.files import FOLDER, MISTAKES

DRAWN = draws.draws, draws.full_draws, training.init, draws.full_net
TRAINED = training.clipping, training.training, training.far
ON_RANKS = (training.on_two_ranks,)
VALIDATED = (training.validation,)
IN_BF16 = precision.operations, precision.bf16, training.step_in_bf16
IN_FP8 = precision.fp8_edges, precision.fp8_linear, precision.delayed_scales
SDPA = "F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK)"
LAYER_NORM = "F.layer_norm(x_BSD, x_BSD.shape[-1:], eps=NORM_EPS)"
NOISE = "noise=normals(train.seed, NOISE, shape, sample=sample, epoch=epoch)"
WAVES = "torch.cat((angle.cos(), angle.sin()), dim=-1)"
DRAW = "rng.train_draw(self.cfg.train, epoch, sample, self.cfg.model.latent_shape)"
U = "float(rng.uniform(rng.words(self.cfg.train.seed, 1, 1, sample=sample, epoch=epoch))[0])"
QK = "return q_BSHK, apply_rope(self.key_norm(k_BSHK), rope_SR2).to(k_BSHK.dtype), v_BSHK"
HEADS = "[x_BSD.unflatten(-1, (-1, self.head_dim)) for x_BSD in (q_BSD, k_BSD, v_BSD)]"
SQUARES = "(predicted_BNP.float() - target_BNP).square().mean(dim=(1, 2))"
DOUBLE = "img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 ="
TANH = 'nn.GELU(approximate="tanh")'
MLP = f"nn.Sequential(nn.Linear(cfg.hidden, inner), {TANH}"
ORDER = "np.argsort(words(seed, ORDER, count, epoch=epoch)"
RMS = "F.rms_norm(x.float(), self.scale.shape, self.scale.float(), eps=NORM_EPS)"
CHANNEL_LAST = f"noise=np.moveaxis({NOISE[6:].replace('shape', '(*shape[1:], shape[0])')}, -1, 0)"
REDUCED = (
    "    for weight in net.parameters():\n        weight.grad.copy_(weight.grad.bfloat16())\n    grad_norm = opt.step()"
)
LINEAR = 'nn.functional.linear(x["linear.x"], x["linear.weight"])'
PIECES = 'sum(one @ other.t() for one, other in zip(*(x[f"linear.{side}"].split(64, 1) for side in ("x", "weight"))))'
MOMENTS = (
    "self.adamw.step()\n"
    "        for kind in ('exp_avg', 'exp_avg_sq'):\n"
    "            for moment in self.states()[kind]:\n"
    "                moment.copy_(moment.bfloat16())"
)
CENTRED = "(x_BSD - x_BSD.mean(-1, True))"
CLIP = "((norm + CLIP_EPS) / self.clip_norm).clamp(min=1.0)"
ROWS = (  # the parts of `record` that are computed, the module, its mistakes: cause, the right words, the wrong words
    (
        DRAWN,
        rng,
        (
            ("the key's words are swapped; it is (seed, stream)", "np.array([seed, stream]", "np.array([stream, seed]"),
            ("sample and epoch are swapped in the counter", "[block, sample, epoch, 0]", "[block, epoch, sample, 0]"),
            ("the counter's first word begins at 2; it is word // 4 + 1", "[block, sample", "[block + 1, sample"),
            (
                "a half is added: (word + 0.5) * 2^-24",
                "((word >> 40) * 2.0**-24)",
                "((word >> 40) * 2.0**-24 + 2.0**-25)",
            ),
            (
                "32 bits of a word make a uniform; (word >> 40) * 2^-24",
                "(word >> 40) * 2.0**-24",
                "(word >> 32) * 2.0**-32",
            ),
            (
                "the sine comes first in a pair of normals; it is the cosine",
                "(radius * np.cos(angle), radius * np.sin(angle))",
                "(radius * np.sin(angle), radius * np.cos(angle))",
            ),
            (
                "cosines of all pairs come first; the two numbers of a pair are neighbours",
                "axis=-1).ravel()",
                "axis=0).ravel()",
            ),
            (
                "the key of a name is read most significant byte first",
                'digest()[:8], "little")',
                'digest()[:8], "big")',
            ),
            ("stream INIT is another one, such as 7; it is 6", "INIT = 6", "INIT = 7"),
            ("streams of latent and diffusion noise are swapped: LATENT is 2, NOISE is 3", "LATENT = 2", "LATENT = 3"),
            ("validation draws from the streams of training; VAL_NOISE is 5", "VAL_NOISE = 5", "VAL_NOISE = 3"),
            (
                "the order is sorted the other way: its inverse",
                'epoch=epoch), kind="stable")',
                "epoch=epoch)).argsort()",
            ),
            (
                "each epoch has the order of epoch 0",
                "words(seed, ORDER, count, epoch=epoch)",
                "words(seed, ORDER, count)",
            ),
            (
                "words are compared as signed integers; they are unsigned",
                "ORDER, count, epoch=epoch)",
                "ORDER, count, epoch=epoch).view(np.int64)",
            ),
            (
                "the order is that of 24-bit uniforms; it is that of whole words",
                ORDER,
                ORDER.replace("words", "uniform(words").replace("epoch)", "epoch))"),
            ),
            ("epochs count from 1; they count from 0", "sample=sample, epoch=epoch", "sample=sample, epoch=epoch + 1"),
            ("1 - u stands for u in t", "t = float(uniform(word)[1])", "t = 1 - float(uniform(word)[1])"),
            (
                "the caption is dropped where u is above 1 - rate; u < rate",
                "[0] < train.caption_drop",
                "[0] > 1 - train.caption_drop",
            ),
            ("word 0 is t and word 1 the drop; it is the other way round", "uniform(word)[1]", "uniform(word)[0]"),
            ("the shift is missing", "shifted = train.timestep_shift * t", "shifted = t"),
            (
                "width is taken for the variance; it is the standard deviation of the logit",
                "train.logit_std *",
                "train.logit_std**0.5 *",
            ),
        ),
    ),
    (
        DRAWN,
        model,
        (
            (
                "Xavier-uniform is (2 u - 1) / sqrt(in); it is sqrt(6 / (in + out))",
                "sqrt(6.0 / (shape[0] + shape[1]))",
                "sqrt(1.0 / shape[1])",
            ),
            (
                "Xavier's width of q, k and v apart; it is of the joined weight",
                "shape[0] + shape[1])",
                "shape[0] // (3 if 'qkv' in name else 1) + shape[1])",
            ),
            (
                "embedders of t and CLIP start like the other weights; they are normal with 0.02",
                '"time_in.*": "normal"',
                '"time_in.*": "uniform"',
            ),
            (
                "rows and columns of positions are swapped",
                "positions_S3[:, axis, None]",
                "positions_S3[:, -axis, None]",
            ),
            (
                "angles of RoPE are rounded to bf16; they are fp64",
                "angle_SR = torch.cat(angles, dim=1)",
                "angle_SR = torch.cat(angles, dim=1).bfloat16().double()",
            ),
            ("the exponent of RoPE's frequencies is 2 i / head dim; it is 2 i / axis", "/ features)", "/ sum(axes))"),
        ),
    ),
    (
        DRAWN,
        schedule,
        (
            ("lr off by one step: the first step has peak / warmup_steps, not 0", "(step + 1) / max(1", "step / max(1"),
            (
                "min is missing: the rate grows after warm-up",
                "min(1.0, (step + 1) / max(1, optim.warmup_steps))",
                "(step + 1) / max(1, optim.warmup_steps)",
            ),
        ),
    ),
    (
        TRAINED,
        rng,
        (
            (
                "no order is drawn: samples in the order of the data set",
                'np.argsort(words(seed, ORDER, count, epoch=epoch), kind="stable")',
                "np.arange(count)",
            ),
            ("latent_eps and noise are the same draw", NOISE, NOISE.replace("NOISE", "LATENT")),
            ("the noise is that of epoch 0 in every epoch", NOISE, NOISE.replace("epoch=epoch", "epoch=0")),
            ("noise is numbered row, column, channel; it is channel, row, column", NOISE, CHANNEL_LAST),
            ("all samples have the same noise", NOISE, NOISE.replace("sample=sample", "sample=0")),
        ),
    ),
    (
        TRAINED,
        dataloader,
        (
            (
                "draws by position in the epoch; they are by the sample's index in the data set",
                DRAW,
                DRAW.replace(" sample,", " int(rng.order(self.cfg.train.seed, epoch, self.count).argsort()[sample]),"),
            ),
            (
                "caption drop of CLIP only; T5 and CLIP become empty together",
                "in self.empty.items()",
                'in [("clip", self.empty["clip"])]',
            ),
            (
                "caption drop of T5 only; T5 and CLIP become empty together",
                "in self.empty.items()",
                'in [("t5", self.empty["t5"])]',
            ),
            (
                "a dropped caption becomes zeros; it becomes the empty caption's encodings",
                "row[name][...] = encoding",
                "row[name][...] = 0",
            ),
            ("no caption is dropped", "if draw.drop_caption:", "if False:"),
            ("the rate of caption drop in training is 0.11; it is 0.1", "if draw.drop_caption:", f"if {U} < 0.11:"),
            (
                "t of training is another draw than rng's, such as its double's half",
                'row["t"][...] = draw.t',
                'row["t"][...] = draw.t / 2',
            ),
        ),
    ),
    (
        TRAINED,
        flow,
        (
            (
                "latent scale before shift: first subtract the shift, then scale",
                "SCALE * (z_BCYX - SHIFT)",
                "SCALE * z_BCYX - SHIFT",
            ),
            ("the deviation is exp(logvar), the variance; it is exp(logvar / 2)", "torch.exp(0.5 * ", "torch.exp("),
            ("the mean alone, without eps", "* eps_BCYX", "* 0 * eps_BCYX"),
            ("the shift's sign: z - shift; here it is added", "(z_BCYX - SHIFT)", "(z_BCYX + SHIFT)"),
            (
                "logvar is clamped, as some autoencoders do",
                "logvar_BCYX.float())",
                "logvar_BCYX.float().clamp(-30, 0))",
            ),
            (
                "mean and logvar are exchanged",
                "mean_BCYX.float() + torch.exp(0.5 * logvar_BCYX.float())",
                "logvar_BCYX.float() + torch.exp(0.5 * mean_BCYX.float())",
            ),
            (
                "the latent is computed in bf16; it is fp32",
                "return SCALE * (z_BCYX - SHIFT)",
                "return SCALE * (z_BCYX.bfloat16() - SHIFT).float()",
            ),
            ("the latent is divided by the scale", "SCALE * (z_BCYX - SHIFT)", "(z_BCYX - SHIFT) / SCALE"),
            (
                "tokens run column by column",
                "F.pixel_unshuffle(latent_BCYX, 2)",
                "F.pixel_unshuffle(latent_BCYX.mT, 2)",
            ),
            (
                "patch feature order: (dy, dx, C); it is (C, dy, dx)",
                ".flatten(2).mT.contiguous()",
                ".flatten(2).unflatten(1, (-1, 4)).transpose(1, 2).flatten(1, 2).mT.contiguous()",
            ),
        ),
    ),
    (
        TRAINED,
        flow,
        (
            (
                "x_t direction: t = 0 is data, t = 1 is noise",
                "(1.0 - t_B111) * latent_BCYX + t_B111 * noise_BCYX",
                "t_B111 * latent_BCYX + (1.0 - t_B111) * noise_BCYX",
            ),
            ("half of the mean squared error", SQUARES, f"{SQUARES} / 2"),
            ("the mean absolute error; it is squared", SQUARES, SQUARES.replace("square", "abs")),
            (
                "a sum over features; it is the mean over tokens and features",
                SQUARES,
                SQUARES.replace("mean(dim=(1, 2))", "sum(-1).mean(-1)"),
            ),
            (
                "the velocity's sign: the target is noise - latent",
                'pack(batch["noise"] - latent_BCYX)',
                'pack(latent_BCYX - batch["noise"])',
            ),
        ),
    ),
    (
        TRAINED,
        model,
        (
            ("cos/sin order: 128 cosines, then 128 sines", WAVES, "torch.cat((angle.sin(), angle.cos()), dim=-1)"),
            (
                "cosines and sines alternate; all cosines come first",
                WAVES,
                "torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(1)",
            ),
            ("frequencies: i / 127; they are i / 128", "/ (TIME_WAVES // 2))", "/ (TIME_WAVES // 2 - 1))"),
            ("t scaling: the factor 1000 is missing", "1000.0 * t_B", "1.0 * t_B"),
            ("GELU by erf stands for SiLU", "F.silu(self.in_layer(x))", "F.gelu(self.in_layer(x))"),
            ("GELU by erf; it is the tanh form", 'nn.GELU(approximate="tanh")', "nn.GELU()"),
            (
                "GELU by erf in single blocks; it is the tanh form",
                'F.gelu(inner_BSM, approximate="tanh")',
                "F.gelu(inner_BSM)",
            ),
            ("epsilon of layer norm: 1e-5; it is 1e-6", LAYER_NORM, LAYER_NORM.replace("NORM_EPS", "1e-5")),
            (
                "layer norm divides by n - 1; it is the variance by n",
                LAYER_NORM,
                f"({LAYER_NORM} * (1 - 1 / x_BSD.shape[-1]) ** 0.5)",
            ),
            ("it is an RMS norm, without the mean's subtraction", LAYER_NORM, LAYER_NORM.replace("layer", "rms")),
            ("the 1 is missing: it is (1 + scale) * norm(x) + shift", "(1 + scale_B1D)", "scale_B1D"),
            (
                "scale and shift swapped: shift is the first part, scale the second",
                f"(1 + scale_B1D) * {LAYER_NORM} + shift_B1D",
                f"(1 + shift_B1D) * {LAYER_NORM} + scale_B1D",
            ),
            ("epsilon of RMSNorm: the smallest step of fp32; it is 1e-6", RMS, RMS.replace("NORM_EPS", "1.2e-7")),
            (
                "epsilon of RMSNorm is added to the root; it is under the root",
                RMS,
                "x.float() / (x.float().square().mean(-1, True).sqrt() + NORM_EPS) * self.scale.float()",
            ),
            (
                "rows and columns of RoPE's positions are swapped",
                "positions_S3[:, axis, None]",
                "positions_S3[:, -axis, None]",
            ),
            (
                "positions of image tokens begin at 1; they begin at 0",
                "image_N3 = image_positions(",
                "image_N3 = 1 + image_positions(",
            ),
            (
                "epsilon of RMSNorm: 1e-5; it is 1e-6",
                "self.scale.float(), eps=NORM_EPS",
                "self.scale.float(), eps=1e-5",
            ),
            ("the scale of RMSNorm is missing", "self.scale.float(), eps", "self.scale.float() * 0 + 1, eps"),
            (
                "head order: features of q, k and v are (dim, head); heads are outermost",
                HEADS,
                HEADS.replace("(-1, self.head_dim))", "(self.head_dim, -1)).mT"),
            ),
            (
                "rope pair layout: halves (r, r + K/2); neighbours turn together",
                "repeat_interleave(2, dim=-1)",
                "repeat(1, 1, 2)",
            ),
            (
                "rope direction: (c a - s b, s a + c b); the sine's sign is positive",
                "(-sin_S1R, sin_S1R)",
                "(sin_S1R, -sin_S1R)",
            ),
            (
                "values are rotated as queries and keys are",
                QK,
                QK.replace("v_BSHK", "apply_rope(v_BSHK, rope_SR2).to(v_BSHK.dtype)"),
            ),
            (
                "query and key are swapped",
                QK,
                "return apply_rope(self.key_norm(k_BSHK), rope_SR2).to(q_BSHK.dtype), q_BSHK, v_BSHK",
            ),
            ("attention: scores are not divided by sqrt(K)", SDPA, SDPA.replace(")", ", scale=1.0)")),
            ("a causal mask; there is none", SDPA, SDPA.replace(")", ", is_causal=True)")),
            (
                "softmax over the queries; it is over the keys",
                SDPA,
                "(q_BHSK @ k_BHSK.mT / q_BHSK.shape[-1] ** 0.5).softmax(-2) @ v_BHSK",
            ),
            (
                "order of the modulation's parts: scale, shift, gate",
                DOUBLE,
                DOUBLE.replace("img_shift1, img_scale1", "img_scale1, img_shift1"),
            ),
            (
                "the MLP's gate and attention's are swapped",
                DOUBLE,
                "img_shift1, img_scale1, img_gate2, img_shift2, img_scale2, img_gate1 =",
            ),
            (
                "text/image order: image first; text comes first in the joint sequence",
                "for parts in zip(txt_parts, img_parts)]",
                "for parts in zip(img_parts, txt_parts)]",
            ),
            (
                "the MLP comes first in linear2; attention is first",
                '(attended_BSD, F.gelu(inner_BSM, approximate="tanh"))',
                '(F.gelu(inner_BSM, approximate="tanh"), attended_BSD)',
            ),
            ("the residual is missing", "return x_BSD + gate_B1D * out_BSD", "return gate_B1D * out_BSD"),
            (
                "the last layer's scale comes first, as in diffusers' files",
                "shift_B1D, scale_B1D = self.adaLN",
                "scale_B1D, shift_B1D = self.adaLN",
            ),
        ),
    ),
    (
        TRAINED,
        optim,
        (
            ("beta1 is 0.95; it is 0.9", "betas=(optim.beta1,", "betas=(0.95,"),
            ("beta2 is 0.999; it is 0.95", "optim.beta2)", "0.999)"),
            ("decay is 0.01; it is 0.1", "weight_decay=optim.weight_decay", "weight_decay=0.01"),
            ("decay coupled: Adam with L2, decay joins the gradient", "torch.optim.AdamW(", "torch.optim.Adam("),
            ("bias correction is missing", "tensor.zero_()", "tensor.zero_() if tensor.ndim else tensor.fill_(1e6)"),
            ("epsilon of AdamW is 1e-6; it is 1e-8", "eps=optim.eps", "eps=1e-6"),
            (
                "each parameter is clipped by its own norm; the norm is over all parameters",
                CLIP,
                "[((grad.norm() + CLIP_EPS) / self.clip_norm).clamp(min=1.0) for grad in grads]",
            ),
            ("clip_norm is the benchmark's 1; the golden run has 4.5", "self.clip_norm).clamp", "1.0).clamp"),
            ("moments are kept in bf16; they are fp32", "self.adamw.step()", MOMENTS),
            ("nothing is clipped", CLIP, "torch.ones(())"),
            ("min is missing: gradients below clip_norm grow to it", ".clamp(min=1.0)", ""),
        ),
    ),
    (
        ON_RANKS,
        dataloader,
        (
            (
                "rank r takes every R-th row; it takes a run of neighbours",
                "return range(first, first + rows)",
                "return range(step * cfg.train.global_batch + rank, (step + 1) * cfg.train.global_batch, size)",
            ),
        ),
    ),
    (
        ON_RANKS,
        trainer,
        (
            ("a sum over micro-batches; it is the mean", ".sum() / rows", ".mean()"),
            ("gradients are summed over ranks in bf16; they are fp32", "    grad_norm = opt.step()", REDUCED),
            ("a sum over rows; it is the mean", ".sum() / rows", ".sum()"),
        ),
    ),
    (
        VALIDATED,
        dataloader,
        (
            (
                "validation t = (timestep + 0.5) / 8; it is timestep / 8",
                "meta.timestep / schedule",
                "(meta.timestep + 0.5) / schedule",
            ),
            ("padding counts as samples", 'row["timestep"][...] = PADDING', 'row["timestep"][...] = 0'),
            (
                "validation draws by the row of the batch; they are by the sample's index",
                "noise_epoch, sample, self.cfg.model",
                "noise_epoch, sample % 4, self.cfg.model",
            ),
            (
                "all validation samples have the same noise",
                "noise_epoch, sample, self.cfg.model",
                "noise_epoch, 0, self.cfg.model",
            ),
        ),
    ),
    (
        VALIDATED,
        evaluate,
        (
            (
                "the mean over samples; it is the mean of the eight means",
                "sum(losses) / len(losses)",
                "sum(totals) / sum(counts)",
            ),
            (
                "validation ignores the number of training samples: the noise is that of evaluation 0",
                'val.feed(samples if steps.cfg.eval.noise == "fresh" else 0)',
                "val.feed(0)",
            ),
        ),
    ),
    (
        IN_BF16,
        flow,
        (
            (
                "the target is rounded to bf16; it is fp32",
                SQUARES,
                SQUARES.replace("target_BNP", "target_BNP.to(dtype)"),
            ),
            (
                "the loss is computed in bf16; the error is formed and averaged in fp32",
                SQUARES,
                "(predicted_BNP - target_BNP.to(dtype)).square().mean(dim=(1, 2)).float()",
            ),
        ),
    ),
    (
        IN_BF16,
        model,
        (
            (
                "scores and softmax in bf16; they are fp32",
                SDPA,
                "(q_BHSK @ k_BHSK.mT / q_BHSK.shape[-1] ** 0.5).softmax(-1) @ v_BHSK",
            ),
            (
                "RMSNorm computed in bf16; it is fp32",
                "F.rms_norm(x.float(), self.scale.shape, self.scale.float(), eps=NORM_EPS)",
                "F.rms_norm(x, self.scale.shape, self.scale, eps=NORM_EPS).float()",
            ),
            (
                "queries and keys are rounded before RoPE, too",
                "apply_rope(self.query_norm(q_BSHK), rope_SR2)",
                "apply_rope(self.query_norm(q_BSHK).bfloat16().float(), rope_SR2)",
            ),
            (
                "layer norm computed in bf16: mean and variance are fp32 sums",
                LAYER_NORM,
                f"({CENTRED} / ({CENTRED}.square().mean(-1, True) + NORM_EPS).sqrt())",
            ),
            (
                "cosines and sines of RoPE are rounded to bf16; they are fp32",
                "rope_SR2[:, None].unbind(-1)",
                "rope_SR2[:, None].bfloat16().float().unbind(-1)",
            ),
            ("1000 * t and the angles are rounded to bf16", "1000.0 * t_B", "(1000.0 * t_B).bfloat16()"),
            (
                "tanh of GELU in bf16: 1 + tanh cancels",
                f"return {MLP}",
                "gelu = nn.Tanh()\n"
                "    gelu.forward = lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))\n"
                f"    return {MLP.replace(TANH, 'gelu')}",
            ),
        ),
    ),
    (
        IN_BF16,
        precision,
        (
            ("a linear adds pieces of its sum in bf16; the sum is fp32", LINEAR, PIECES),
            ("the scale of RMSNorm is not rounded to bf16; it is a weight", "scaled.bfloat16()(", "scaled("),
        ),
    ),
    (
        IN_BF16,
        trainer,
        (
            (
                "gradients of micro-batches are added, averaged or reduced in bf16; that is fp32",
                "    grad_norm = opt.step()",
                REDUCED,
            ),
        ),
    ),
    (
        IN_BF16,
        optim,
        (
            (
                "master weights are kept in bf16; they are fp32",
                "self.adamw.step()",
                "self.adamw.step()\n"
                "        torch._foreach_copy_(self.shards, [shard.bfloat16() for shard in self.shards])",
            ),
        ),
    ),
    (
        IN_FP8,
        fp8,
        (
            (
                "values beyond the largest become infinity or NaN; clamp before the cast",
                ".clamp(-largest, largest)",
                "",
            ),
            ("the gradient's format is e4m3; it is e5m2", "kind = ctx.support.gradient", "kind = ctx.support.forward"),
            (
                "the weight's gradient takes the gradient of y before its cast; it takes the codes",
                "scaled_mm(g8_NM, kept[0].t(), grad_inverse, input_inverse)",
                "torch.cat(grads, dim=1).t() @ (kept[0].float().t() * input_inverse).bfloat16()",
            ),
            (
                "the cast rounds towards zero; it rounds to nearest even",
                "(x.float() * scale)",
                "(x.float() * scale * (1 - 2.0**-5))",
            ),
            ("amax is the largest value; it is the largest magnitude", "x.abs().amax(dim)", "x.amax(dim)"),
            (
                "x * scale is rounded to bf16 before the cast; it is fp32",
                "(x.float() * scale)",
                "(x.float() * scale).bfloat16().float()",
            ),
            (
                "the scale is a power of two; it is largest / amax",
                "scale_of_magnitude(largest.float(), torch.finfo(dtype).max)",
                "scale_of_magnitude(largest.float(), torch.finfo(dtype).max).log2().floor().exp2()",
            ),
            (
                "the gradient of the bias is summed from the cast gradient; it is the uncast one",
                "torch.cat([grad.sum(0) for grad in grads])",
                "(g8_MN.float().sum(0) * grad_inverse).bfloat16()",
            ),
        ),
    ),
    (
        IN_FP8,
        recipe,
        (
            ("the scale is that of the last step alone; it is of the history's largest", ".amax(1)", "[:, 0]"),
            ("a magnitude of 0 or infinity joins the history", "torch.where(usable, rolled, self.history)", "rolled"),
        ),
    ),
    (
        IN_FP8,
        casts,
        (
            ("scale inverted: it is largest / amax", "(largest / amax)", "(amax / largest)"),
            ("amax 0 has the scale 1; it has 2^44", "(largest / amax)", "(largest / amax).where(amax > 0, 1.0)"),
            ("the scale has no cap; it is at most 2^44", ".clamp(max=LARGEST_SCALE)", ""),
        ),
    ),
)
PLANTED = [(parts, module, *mistake) for parts, module, mistakes in ROWS for mistake in mistakes]


@contextmanager
def planted(module: ModuleType, right: str, wrong: str) -> Iterator[None]:
    """The product with an edited line. All modules see the edited function or class."""
    source = Path(str(module.__file__)).read_text()
    assert right in source, f"{module.__name__} has no more: {right}"
    kept = {ast.dump(node) for node in ast.parse(source).body}
    edited = [node for node in ast.parse(source.replace(right, wrong)).body if ast.dump(node) not in kept]
    before = dict(vars(module))
    exec(compile(ast.Module(edited, []), str(module.__file__), "exec"), vars(module))
    new = {
        id(old): vars(module)[name] for name, old in before.items() if callable(old) and vars(module)[name] is not old
    }
    with pytest.MonkeyPatch.context() as patch:
        for other in [other for name, other in sys.modules.items() if name.startswith(("flux_ref", "tools.golden"))]:
            for name, value in list(vars(other).items()):
                if id(value) in new:
                    patch.setattr(other, name, new[id(value)])
        yield
    vars(module).update(before)


def first_of(parts: tuple[record.Part, ...], module: ModuleType, right: str, wrong: str) -> check.Difference | None:
    """How the first value differs that shows a mistake; None if none does. Parts after it are not computed."""
    values: dict[str, np.ndarray] = {}
    with planted(module, right, wrong):
        for part in parts:
            values |= record.arrays(vars(sys.modules[part.__module__])[part.__name__])  # two mistakes are in the kit
            common = [value for value in KEPT.values if value.name in values]
            found = (check.compare(value, KEPT.arrays[value.name], values[value.name]) for value in common)
            if first := next(filter(None, found), None):
                return first
    return check.own_losses(KEPT, values)


def rank(cause: str, found: check.Difference) -> int:
    """The place of a cause among those that the check lists, from 1 on; 0 if it is not among them."""
    listed = [*chain(*check.causes(found))]
    return listed.index(cause) + 1 if cause in listed else 0


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_mistake_is_seen_and_named_among_the_first_two(few):
    wrong = []
    for parts, module, cause, *edit in PLANTED[:: 24 if few else 1]:
        found = first_of(parts, module, *edit)
        if not found or rank(cause, found) not in (1, 2):
            wrong.append((cause, found and (found.value.name, found.words, [*chain(*check.causes(found))][:2])))
    assert not wrong


def main(argv: list[str]) -> None:
    known: dict[str, dict[str, float]] = {}
    for number, (parts, module, cause, *edit) in enumerate(PLANTED, 1):
        found = first_of(parts, module, *edit)
        if found and np.isfinite(found.rms):
            known.setdefault(found.value.name, {})[cause] = float(f"{found.rms:.4g}")
        where = f"{rank(cause, found)}  {found.value.name}: {found.words}" if found else "not seen"
        print(f"{number:3}  {cause}\n         {where}", flush=True)
    if argv:
        write_whole(FOLDER / MISTAKES, json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
