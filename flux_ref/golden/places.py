"""What the golden values mean, how far a port may be off, and what is known to go wrong at each place.

A value differs where |yours - golden| > atol + rtol * |golden|. The golden values were computed again with other
numbers of threads, in other versions of torch and in fp64. The tolerances were set from the differences seen.
"""

import re
from dataclasses import dataclass

import numpy as np

from flux_ref import rng

WORDS = (  # seed, stream, sample, epoch, first word
    (0, rng.ORDER, 0, 0, 0),
    (25952, rng.NOISE, 1_099_775, 23, 0),
    (2**63 - 1, rng.SCALARS, 5, 2**40, 0),
    (7, rng.INIT, rng.name_key("img_in.weight"), 0, 4 * 2**32),
    (1, rng.VAL_NOISE, 29_695, 25_165_824, 400),
)


@dataclass(frozen=True)
class Kind:
    """How far a value may be off: `tolerance` times the largest magnitude of its elements."""

    tolerance: float
    why: str
    each: bool = False  # `tolerance` times each element instead
    absolute: bool = False  # `tolerance` itself instead

    def tolerances(self, golden: np.ndarray) -> tuple[float, float]:
        """(atol, rtol) of a value."""
        if self.each or self.tolerance == 0:
            return 0.0, self.tolerance
        largest = 1.0 if self.absolute else np.abs(golden.astype(np.float64)).max()
        return float(f"{self.tolerance * largest:.1e}"), 0.0


EXACT = Kind(0.0, "no rounding is involved, or each is fixed")
ROUNDED = Kind(1e-6, "a few roundings in fp32, and the last bits of exp, log, cos; 2e-7 seen between fp32 and fp64")
WAVES = Kind(2e-4, "angles up to 1000 are rounded to fp32 before cos and sin; 5e-5 seen between fp32 and fp64")
SUMS = Kind(3e-5, "fp32 sums in any order, after angles rounded to fp32; 9e-6 seen between fp32 and fp64")
GRADIENTS = Kind(5e-5, "fp32 sums in any order; 2e-5 seen between fp32 and fp64")
SQUARES = Kind(1e-4, "squares of gradients; 3e-5 seen between fp32 and fp64")
NORMS = Kind(8e-5, "of each parameter's norm; 2e-5 seen between fp32 and fp64", each=True)
UPDATES = Kind(5e-4, "elements with hardly a gradient move by its rounding; 1e-4 seen between fp32 and fp64", each=True)
WEIGHTS = Kind(2e-6, "0.4 % of the first rate; 6e-7 seen between fp32 and fp64, where gradients vanish", absolute=True)
LOSS = Kind(5e-6, "a mean in fp32; 8e-7 seen between fp32 and fp64", each=True)
BF16 = Kind(3e-2, "bf16 keeps 8 bits and roundings differ by fusion; 1.2e-2 seen between bf16 and fp32")
BF16_LOSS = Kind(3e-3, "a mean over values in bf16; 8e-4 seen between bf16 and fp32", each=True)
BF16_NORMS = Kind(6e-2, "gradients in bf16; 2.2e-2 seen between bf16 and fp32", each=True)
SCALE = Kind(1e-6, "one division in fp32", each=True)
PRODUCT = Kind(2.0**-7, "fp32 sums in any order, rounded to bf16; two steps of the largest magnitude")


@dataclass(frozen=True)
class Place:
    """What values are, how exact they are, and what a port may have done wrong where they differ."""

    meaning: str
    kind: Kind
    causes: tuple[str, ...] = ()


LAYOUT = "weight transposed: a linear's weight is (out, in)"
HEADS = "head order: features of q, k and v are (head, dim), heads outermost"
QKV = "qkv order: the 3 D features are (q | k | v, head, dim); some code has (head, q | k | v, dim)"
TEXT_FIRST = "text/image order: text comes first in the joint sequence"
PARTS = "order of the modulation: (shift, scale, gate), twice in double blocks; diffusers' last layer has scale first"
SCALE_SHIFT = "scale and shift swapped: shift is the first part, scale the second"
NORM_EPS = "epsilon of layer norm: 1e-6, not 1e-5"
ONE_PLUS = "(1 + scale) * norm(x) + shift: the 1 is missing, or the norm has weights"
RMS_EPS = "epsilon of RMSNorm: 1e-6 under the root; a framework's default may be the dtype's smallest step"
RMS_BF16 = "RMSNorm computed in bf16: it is fp32 whatever its input, and so is its result"
GATE = "the gate is missing, belongs to the other branch, or multiplies the residual too"
GELU = "GELU: the tanh form, not erf"
SCALED = "attention: softmax(q k^T / sqrt(K)) v without a mask; padding of the text takes part"
ROPE_PAIRS = "rope pair layout: neighbours (2r, 2r + 1) turn together (interleaved), not halves (r, r + K/2)"
ROPE_SIGN = "rope direction: (c a - s b, s a + c b)"
T_BF16 = "t scaling: 1000 * t and the angles are fp32; rounded to bf16, 1000 * t counts in steps of 4 near 700"
CLIPPING = "clip: g * min(1, 1 / (norm + 1e-6)) with the norm over all parameters, before AdamW sees it"
COUPLED = "decay coupled: decay belongs to the weights (AdamW), not into the gradient and its moments (Adam with L2)"
PATCHES = "patch feature order: (C, dy, dx), tokens row by row"
BY_ORDER = "order of the samples: position p of a run is order(seed, epoch)[p % count] of epoch p // count"
STREAMS = "stream number: the key's second word; LATENT is 2, NOISE 3, VAL_LATENT 4, VAL_NOISE 5"
COUNTER = (
    "counter (word // 4 + 1, sample, epoch, 0): sample is the index in the data set, not the position in the epoch"
)
OF_UPDATE = (
    "bias correction: moments are divided by 1 - beta^step, step counted from 1",
    "eps outside the root: sqrt(v) + 1e-8, not sqrt(v + 1e-8)",
    "decay: w * (1 - lr * 0.1) on every parameter, biases and norms too, before the update",
    "lr off by one step: the first step has peak / warmup_steps",
    CLIPPING,
)

# Pattern of names -> place. The first pattern that matches a name counts.
PLACES = {
    r"draws\.words\.\d": Place(
        "words of the host generator",
        EXACT,
        (
            "the first counter word begins at 1, not 0: word // 4 + 1",
            "Philox4x64 with 10 rounds, key (seed, stream); not Philox4x32, not hashed by a seeding function",
            "order of the words: word % 4 of a block, least significant counter word first",
        ),
    ),
    r"draws\.uniform": Place("uniform of draws.words.1", EXACT, ("(word >> 40) * 2^-24; more bits can round to 1",)),
    r"draws\.normal": Place(
        "Box-Muller of draws.words.1",
        ROUNDED,
        (
            "pairs are neighbouring words: radius from the first, angle from the second; the cosine comes first",
            "u = ((word >> 11) + 1) * 2^-53, angle = 2 pi (word >> 11) * 2^-53, in fp64 until the end",
        ),
    ),
    r"draws\.name_key": Place(
        "counter word of a name", EXACT, ("first 8 bytes of SHA-256, least significant byte first",)
    ),
    r"draws\.order\.\d": Place(
        "order of 50 samples in an epoch",
        EXACT,
        ("stable argsort of the epoch's words as unsigned integers, not its inverse", "the epoch is counter word 2"),
    ),
    r"draws\.(drop|t)": Place(
        "of samples 0 .. 49 in epoch 1: whether the caption is dropped, and t",
        EXACT,
        ("stream SCALARS: word 0 is the drop (u < caption_drop), word 1 is t", COUNTER),
    ),
    r"draws\.(latent_eps|noise)": Place("normals of sample 3 in epoch 1", ROUNDED, (STREAMS, COUNTER)),
    r"draws\.val_(latent_eps|noise)": Place(
        "normals of validation sample 3 in the evaluation after 262144 samples",
        ROUNDED,
        (STREAMS, "the evaluation (training samples seen; 0 with eval.noise=fixed) takes the epoch's place"),
    ),
    r"weights\..*": Place("parameter to start from", EXACT, (LAYOUT, "cast to bf16: master weights are fp32")),
    r"data\..*": Place("the data set, and the empty caption; all on the grid of bf16", EXACT),
    r"fp8\.(weight|x|bias|grad)": Place("operand of a linear y = x w^T + b and the gradient of y, in bf16", EXACT),
    r"init\.norms": Place(
        "norm of each parameter of a run that starts from its seed",
        NORMS,
        (
            "modulation, head and biases start at 0, norms' scales at 1",
            "embedders of t and CLIP: normal with 0.02; the other weights: Xavier-uniform",
        ),
    ),
    r"init\..*": Place(
        "first four rows of a parameter of a run that starts from its seed",
        ROUNDED,
        (
            "element e is word e of stream INIT with the name's key as sample, row by row of the (out, in) weight",
            "Xavier-uniform: (2 u - 1) * sqrt(6 / (in + out)); embedders of t and CLIP: normal * 0.02",
        ),
    ),
    r"batch\.(t5|clip)": Place(
        "text of the first step's batch",
        EXACT,
        (BY_ORDER, "caption drop: T5 and CLIP together become the empty caption's encodings, not zeros"),
    ),
    r"batch\.(mean|logvar)": Place("of the first step's batch", EXACT, (BY_ORDER,)),
    r"batch\.t": Place(
        "time of each sample of the batch", EXACT, ("uniform in [0, 1), word 1 of SCALARS; no logit-normal",)
    ),
    r"batch\.(latent_eps|noise)": Place("normals of the batch", ROUNDED, (STREAMS, COUNTER)),
    r"rope": Place(
        "(cos, sin) of each token's rotations, text first",
        ROUNDED,
        (
            "cos/sin order: the cosine is first",
            "positions (0, row, column); text is at (0, 0, 0); rows and columns swapped, or the axes' order",
            TEXT_FIRST,
            "frequencies theta^-(2 i / axis), per axis of [2, 4, 2] features, in fp64; angles in bf16 are too coarse",
        ),
    ),
    r"latent": Place(
        "the latent: 0.3611 * (z - 0.1159), z = mean + exp(logvar / 2) * eps",
        ROUNDED,
        (
            "latent scale/shift order: first subtract the shift, then multiply by the scale",
            "exp(logvar / 2) is the deviation; exp(logvar) the variance",
            "the mean alone, without eps",
            "computed in bf16; it is fp32",
        ),
    ),
    r"x_t": Place(
        "(1 - t) * latent + t * noise",
        ROUNDED,
        ("x_t direction: t = 0 is data, t = 1 is noise", "t broadcast along another axis, or rounded to bf16"),
    ),
    r"target": Place("velocity noise - latent, packed", ROUNDED, ("velocity sign: noise - data", PATCHES)),
    r"img": Place("x_t packed into tokens", ROUNDED, (PATCHES,)),
    r"time_waves": Place(
        "cos, then sin of 1000 * t * exp(-ln(10000) i / 128)",
        WAVES,
        (
            "cos/sin order: 128 cosines, then 128 sines",
            T_BF16,
            "t scaling: the factor 1000 is missing",
            "frequencies: i / 128, not i / 127",
        ),
    ),
    r"(time|vector)_in": Place("linear, SiLU, linear", SUMS, ("SiLU, not GELU", LAYOUT)),
    r"vec": Place("time_in + vector_in", SUMS, ("both embeddings are added; neither is normed",)),
    r".*(img_mod|txt_mod|modulation)\.lin|.*adaLN_modulation\.1": Place(
        "SiLU of vec, then a linear: shift, scale, gate, ...", SUMS, ("SiLU comes before the linear", LAYOUT, PARTS)
    ),
    r".*(attn\.qkv|mlp\.0|linear1|final_layer\.linear)\.input": Place(
        "(1 + scale) * layer_norm(x) + shift",
        SUMS,
        (SCALE_SHIFT, PARTS, NORM_EPS, ONE_PLUS, "img and txt modulation swapped"),
    ),
    r".*norm\.(query|key)_norm": Place(
        "RMS norm over each head, (B, H, S, K)",
        SUMS,
        (QKV, HEADS, RMS_EPS, RMS_BF16, "query and key swapped", "normed over all heads together"),
    ),
    r".*attention\.v": Place("values, (B, H, S, K)", SUMS, (QKV, HEADS, TEXT_FIRST)),
    r".*attention\.[qk]": Place(
        "after the norm and rope, (B, H, S, K)",
        SUMS,
        (ROPE_PAIRS, ROPE_SIGN, TEXT_FIRST, HEADS, "cos/sin order in the rotation"),
    ),
    r".*attention": Place("result of attention over the joint sequence, (B, S, D)", SUMS, (SCALED, HEADS, TEXT_FIRST)),
    r".*attn\.proj": Place("projection of one stream's part", SUMS, (LAYOUT, TEXT_FIRST)),
    r".*linear1": Place(
        "q, k, v and the inner MLP features side by side",
        SUMS,
        (LAYOUT, "the first 3 D features are qkv, the rest the MLP"),
    ),
    r".*mlp\.1": Place("GELU of it", SUMS, (GELU,)),
    r".*(attn\.qkv|mlp\.[02]|linear2|_in\.in_layer|(img|txt)_in)": Place("a linear: x w^T + b", SUMS, (LAYOUT,)),
    r".*linear2\.input": Place(
        "result of attention, then GELU of the inner features", SUMS, (GELU, "attention is first")
    ),
    r"double_blocks\.\d\.(img|txt)": Place("a stream after the block", SUMS, (GATE, "order of the blocks")),
    r"single_blocks\.\d": Place("the joint stream after the block", SUMS, (GATE, "order of the blocks", TEXT_FIRST)),
    r"prediction": Place("the predicted velocity", SUMS, (LAYOUT, "the image tokens are the last of the sequence")),
    r"losses": Place(
        "mean squared error of each sample",
        LOSS,
        ("mean reduction over all elements of a sample: tokens and features", "the target's sign or order"),
    ),
    r"(step\d\.)?loss": Place("mean over the samples", LOSS, ("mean reduction over samples, not a sum",)),
    r"grad\.norms": Place(
        "norm of each parameter's gradient, in the order of the index",
        NORMS,
        ("clip before or after: gradients are shown before clipping", "mean reduction over which elements"),
    ),
    r"grad\..*": Place(
        "gradient of the loss",
        GRADIENTS,
        (
            "mean reduction over which elements: a sum over samples, or over ranks, scales all gradients",
            "clip before or after: gradients are shown before clipping",
            LAYOUT,
        ),
    ),
    r"step\d\.grad_norm": Place(
        "norm over all gradients, before clipping",
        LOSS,
        ("norm over all parameters at once, before clipping", "sum over ranks where a mean is due"),
    ),
    r"step\d\.clip_coefficient": Place("what gradients are multiplied with", LOSS, (CLIPPING,)),
    r"step\d\.lr": Place(
        "rate of the step: 2e-3 * min(1, number / 4)",
        ROUNDED,
        ("lr off by one step: the first step has peak / warmup_steps, not 0",),
    ),
    r"step\d\.exp_avg\.norms": Place("norms of the first moments", NORMS, (CLIPPING, COUPLED, "beta1: 0.9")),
    r"step\d\.exp_avg_sq\.norms": Place("norms of the second moments", NORMS, (CLIPPING, COUPLED, "beta2: 0.95")),
    r"step\d\.exp_avg\..*": Place("first moment, not corrected", GRADIENTS, (CLIPPING, COUPLED, "beta1: 0.9")),
    r"step\d\.exp_avg_sq\..*": Place("second moment, not corrected", SQUARES, (CLIPPING, COUPLED, "beta2: 0.95")),
    r"step\d\.weights\..*": Place("the weight after the step", WEIGHTS, OF_UPDATE),
    r"step\d\.update_norms": Place("norm of each parameter's change since the start", UPDATES, OF_UPDATE),
    r"val\.t": Place(
        "time of each validation sample",
        EXACT,
        ("validation t = timestep / 8, not (timestep + 0.5) / 8", "timestep belongs to the sample, not to the batch"),
    ),
    r"val\.losses": Place(
        "loss of each validation sample, with the weights to start from",
        LOSS,
        (
            "caption drop in validation: there is none",
            "noise and eps of streams VAL_NOISE and VAL_LATENT, evaluation 0",
            "latent from eps as in training, not the mean alone",
        ),
    ),
    r"val\.loss_per_timestep": Place(
        "mean over the samples of each timestep", LOSS, ("timestep of the sample, not of its place",)
    ),
    r"val\.loss": Place(
        "mean of the eight means",
        LOSS,
        ("mean over timesteps, each counted once, not over samples", "padding takes part"),
    ),
    r"fp8\.(fnuz\.)?(x|weight|grad)\.scale": Place(
        "largest value of the format / largest magnitude",
        SCALE,
        ("e4m3 max: 448, of fnuz 240; e5m2 57344 in both", "the scale is not rounded to a power of 2"),
    ),
    r"fp8\.(fnuz\.)?(x|weight|grad)\.bits": Place(
        "bytes of x * scale, rounded to nearest even, clamped to the format's range; e4m3, of the gradient e5m2",
        EXACT,
        ("x * scale in fp32, not bf16", "fnuz formats have another bias of the exponent", "round to nearest even"),
    ),
    r"fp8\.(y|grad_(x|weight|bias))": Place(
        "products of the casts / scales; sum of the gradient of y", PRODUCT, ("fp16 sums",)
    ),
    r"fp8\.delayed\.amax": Place("largest magnitudes of input and gradient in six steps", EXACT),
    r"fp8\.delayed\.scale": Place(
        "scales after each: e4m3 and e5m2, history 3, max, margin 1",
        SCALE,
        (
            "margin: largest / 2 / amax",
            "history: the largest of the last 3 steps; a step with magnitude 0 leaves it as it was",
            "scale's power: at most 2^44",
        ),
    ),
}
OF_BF16 = {
    r"rms_norm\.input": Place("input of the first query norm, bf16", BF16),
    r"rms_norm": Place("RMS norm of bf16.rms_norm.input: feed it that", ROUNDED, (RMS_BF16, RMS_EPS)),
    r"time_waves": Place("as in fp32", WAVES, (T_BF16,)),
    r"rope": Place("as in fp32", ROUNDED, ("positions or angles rounded to bf16",)),
    r"grad\.norms": Place("norm of each parameter's gradient", BF16_NORMS, ("gradients are reduced in fp32",)),
    r"loss(es)?": Place("loss", BF16_LOSS, ("the error is formed and averaged in fp32",)),
    r".*": Place("as in fp32, with weights and activations in bf16", BF16, (RMS_BF16, T_BF16, "softmax in bf16")),
}


def place(name: str) -> Place:
    """The place of a value. Raises: KeyError for a name without a place."""
    table, rest = (OF_BF16, name.removeprefix("bf16.")) if name.startswith("bf16.") else (PLACES, name)
    for pattern, known in table.items():
        if re.fullmatch(pattern, rest):
            return known
    raise KeyError(name)


def meaning(name: str) -> str:
    """One line about a value."""
    if name.startswith("draws.words."):
        seed, stream, sample, epoch, start = WORDS[int(name.rpartition(".")[2])]
        return f"words {start} .. {start + 7} of seed {seed}, stream {stream}, sample {sample}, epoch {epoch}"
    return place(name).meaning


def is_given(name: str) -> bool:
    """Whether a port takes this value from the file rather than computing it."""
    return re.fullmatch(r"weights\..*|data\..*|fp8\.(x|weight|bias|grad)|fp8\.delayed\.amax", name) is not None
