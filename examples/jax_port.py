"""A port of flux_ref to JAX, as small as it goes: it makes the golden values again. Written from PORTING.md alone.

    pip install jax safetensors
    python examples/jax_port.py tests/golden dump.safetensors blocks
    python -m tools.golden check --from dump.safetensors

It reads config.toml, the values that index.json calls given (start weights, data set, operands) and the input that
bf16.rms_norm asks for. It computes all others but full.init.norms, which takes long: draws, initial weights, latents,
the network in fp32 and bf16, gradients, six steps, two ranks, a validation, FP8. With the word blocks it also computes
two blocks of full width.

Axes, as config.toml counts them: B batch, C channels, Y X latent, N image tokens, P their features, T text tokens,
S = T + N, D hidden, H heads, K of a head, R = K / 2 rotations, M inner features of the MLP.
"""

import functools
import hashlib
import json
import math
import pathlib
import sys
import tomllib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

jax.config.update("jax_default_matmul_precision", "highest")  # or a TPU multiplies fp32 in bf16
f32, bf16, u64 = np.float32, ml_dtypes.bfloat16, np.uint64

# Draws (docs/draws.md), on the host

ORDER, SCALARS, LATENT, NOISE, VAL_LATENT, VAL_NOISE, INIT = range(7)


def multiply(a, b):
    """High and low 64 bits of a * b."""
    low, half = u64(0xFFFFFFFF), u64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    carry = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (carry >> half), a * b


def words(seed, stream, sample, epoch, count, first=0):
    """Words first .. first + count - 1: Philox4x64-10."""
    begin, mask = first // 4, (1 << 64) - 1
    c0 = u64(begin + 1) + np.arange((first + count + 3) // 4 - begin, dtype=u64)
    c1, c2, c3 = (np.full_like(c0, u64(x)) for x in (sample, epoch, 0))
    k0, k1 = seed, stream
    for _ in range(10):
        hi0, lo0 = multiply(u64(0xD2E7470EE14C6C93), c0)
        hi1, lo1 = multiply(u64(0xCA5A826395121157), c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ u64(k0), lo1, hi0 ^ c3 ^ u64(k1), lo0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return np.stack([c0, c1, c2, c3], 1).reshape(-1)[first - 4 * begin :][:count]


def uniform(w):
    return (w >> u64(40)).astype(f32) * f32(2**-24)


def normal(w, dtype=f32):
    """Box-Muller; w has an even number of words."""
    a, b = (w.reshape(-1, 2) >> u64(11)).astype(np.float64).T
    radius, angle = np.sqrt(-2 * np.log((a + 1) * 2**-53)), 2 * np.pi * b * 2**-53
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1).astype(dtype)


def normals(seed, stream, sample, epoch, shape):
    count = math.prod(shape)
    return normal(words(seed, stream, sample, epoch, count + count % 2))[:count].reshape(shape)


def order(seed, epoch, count):
    return np.argsort(words(seed, ORDER, 0, epoch, count), kind="stable")


def scalars(seed, sample, epoch, rate=0.1, timestep="uniform", mean=0, width=1, shift=1):
    """Whether the caption is dropped, and t. t is made in fp64."""
    w = words(seed, SCALARS, sample, epoch, 4)
    t = float(uniform(w)[1])
    if timestep == "logit_normal":
        t = 1 / (1 + math.exp(-mean - width * normal(w, np.float64)[2]))
    return uniform(w)[0] < rate, f32(min(shift * t / (1 + (shift - 1) * t), 1 - 2**-24))


def name_key(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def initial_weight(seed, name, shape):
    if name.endswith(".scale"):
        return np.ones(shape, f32)
    if name.endswith(".bias") or ".lin." in name or name.startswith("final_layer."):
        return np.zeros(shape, f32)
    if name.startswith(("time_in.", "vector_in.")):
        return normals(seed, INIT, name_key(name), 0, shape) * f32(0.02)
    w = words(seed, INIT, name_key(name), 0, math.prod(shape))
    return ((2 * uniform(w) - 1) * f32(math.sqrt(6 / sum(shape)))).reshape(shape)


# Data


def make_batch(golden, seed, split, draws):
    """draws: sample, epoch, t and whether the caption is dropped, of each row. What the shards hold is in bf16."""
    latent, noise = (LATENT, NOISE) if split == "train" else (VAL_LATENT, VAL_NOISE)
    stored, rows = ("t5", "clip", "mean", "logvar"), []
    for i, epoch, t, drop in draws:
        row = {k: golden[f"data.{split}.{k}"][i] for k in stored} | {"t": t}
        if drop:
            row |= {k: golden[f"data.empty.{k}"] for k in ("t5", "clip")}
        row["latent_eps"] = normals(seed, latent, i, epoch, row["mean"].shape)
        row["noise"] = normals(seed, noise, i, epoch, row["mean"].shape)
        rows.append(row)
    batch = {k: np.stack([row[k] for row in rows]) for k in rows[0]}
    return {k: v.astype(bf16 if k in stored else f32) for k, v in batch.items()}


def rows_of(seed, count, positions):
    """Sample, epoch, t and dropped caption at positions of a run; a batch may run over into the next epoch."""
    orders = {epoch: order(seed, epoch, count) for epoch in {p // count for p in positions}}
    pairs = [(orders[p // count][p % count], p // count) for p in positions]
    drawn = [scalars(seed, *pair) for pair in pairs]
    return [(*pair, t, drop) for pair, (drop, t) in zip(pairs, drawn)]


def train_batch(cfg, golden, positions, place, out):
    """The batch at these positions of the run."""
    seed = cfg["train"]["seed"]
    rows = rows_of(seed, cfg["data"]["train_count"], positions)
    sample, epoch, t, drop = (np.array(column) for column in zip(*rows))
    named = {"position": np.array(positions), "epoch": epoch, "sample": sample, "drop": drop, "t": t.astype(f32)}
    out |= {f"{place}.{k}": x for k, x in named.items()}
    return make_batch(golden, seed, "train", rows)


def val_batch(cfg, golden, seen=0):
    """All validation samples, after that many training samples."""
    draws = [(i, seen, golden["data.val.timestep"][i] / 8, False) for i in range(cfg["data"]["val_count"])]
    return make_batch(golden, cfg["train"]["seed"], "val", draws)


# Network


def rope_table(text_tokens, height, width, axes, theta=10000):
    """(cos, sin) of each token's rotations, text first at position 0; made in fp64, of shape (S, R, 2)."""
    y, x = np.divmod(np.arange(height * width), width)
    positions = np.concatenate([np.zeros((text_tokens, 3)), np.stack([0 * y, y, x], 1)])
    angles = [positions[:, [a]] * theta ** (-np.arange(0, k, 2) / k) for a, k in enumerate(axes)]
    angles = np.concatenate(angles, 1)
    return np.stack([np.cos(angles), np.sin(angles)], -1).astype(f32)


def time_waves(t):
    frequency = np.exp(-math.log(10000) * np.arange(128) / 128).astype(f32)
    angle = 1000 * t.astype(f32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)


def pack(x):
    """(B, C, Y, X) -> (B, N, P): tokens row by row, features (C, dy, dx)."""
    b, c, h, w = x.shape
    return x.reshape(b, c, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def layer_norm(x):
    """In fp32, without weights, back in x's dtype."""
    y = x.astype(f32)
    y = y - y.mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rms_norm(x, scale):
    """fp32 out of any input."""
    x = x.astype(f32)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale.astype(f32)


def apply_rope(x, rope):
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], rope[..., 0], rope[..., 1]
    return jnp.stack([cos * even - sin * odd, sin * even + cos * odd], -1).reshape(x.shape)


class Net:
    """The network as a function of weights p; `values` keeps what passes, under the golden names."""

    def __init__(self, model, p):
        self.model, self.p, self.values = model, p, {}
        height, width = model["latent_height"] // 2, model["latent_width"] // 2
        self.rope = self.keep("rope", rope_table(model["text_tokens"], height, width, model["rope_axes"]))

    def keep(self, name, x):
        self.values[name] = x
        return x

    def linear(self, name, x, keep=None):
        self.keep(f"{name}.input", x)
        w = self.p[f"{name}.weight"]
        y = jnp.matmul(x, w.T, preferred_element_type=f32) + self.p[f"{name}.bias"].astype(f32)
        return self.keep(keep or name, y.astype(x.dtype))

    def embed(self, name, x):
        return self.linear(f"{name}.out_layer", jax.nn.silu(self.linear(f"{name}.in_layer", x)), keep=name)

    def modulation(self, name, vec, parts):
        """shift, scale, gate, and in double blocks again for the MLP; each (B, 1, D)."""
        return jnp.split(self.linear(name, jax.nn.silu(vec))[:, None], parts, -1)

    def heads(self, name, qkv):
        """Features (q|k|v, head, dim) into normed q, k and plain v, each (B, H, S, K)."""
        b, s, _ = qkv.shape
        q, k, v = qkv.reshape(b, s, 3, self.model["heads"], -1).transpose(2, 0, 3, 1, 4)
        self.keep(f"{name}.query_norm.input", q)
        q = self.keep(f"{name}.query_norm", rms_norm(q, self.p[f"{name}.query_norm.scale"]))
        return q, self.keep(f"{name}.key_norm", rms_norm(k, self.p[f"{name}.key_norm.scale"])), v

    def attention(self, name, q, k, v):
        q, k = (apply_rope(x, self.rope).astype(v.dtype) for x in (q, k))
        for x, part in zip((q, k, v), "qkv"):
            self.keep(f"{name}.attention.{part}", x)
        scores = jnp.einsum("bhsk,bhtk->bhst", q, k, preferred_element_type=f32) / math.sqrt(q.shape[-1])
        x = jnp.einsum("bhst,bhtk->bshk", jax.nn.softmax(scores), v.astype(f32)).astype(v.dtype)
        return self.keep(f"{name}.attention", x.reshape(*x.shape[:2], -1))

    def double_block(self, name, img, txt, vec):
        streams, mods, parts = {"img": img, "txt": txt}, {}, {}
        for s in streams:
            mods[s] = self.modulation(f"{name}.{s}_mod.lin", vec, 6)
            shift, scale = mods[s][:2]
            qkv = self.linear(f"{name}.{s}_attn.qkv", (1 + scale) * layer_norm(streams[s]) + shift)
            parts[s] = self.heads(f"{name}.{s}_attn.norm", qkv)
        joint = [jnp.concatenate(pair, 2) for pair in zip(parts["txt"], parts["img"])]  # text first
        txt_out, img_out = jnp.split(self.attention(name, *joint), [txt.shape[1]], 1)
        for s, out in (("img", img_out), ("txt", txt_out)):
            gate, shift2, scale2, gate2 = mods[s][2:]
            x = streams[s] + gate * self.linear(f"{name}.{s}_attn.proj", out)
            inner = self.linear(f"{name}.{s}_mlp.0", (1 + scale2) * layer_norm(x) + shift2)
            inner = self.keep(f"{name}.{s}_mlp.1", jax.nn.gelu(inner, approximate=True))
            streams[s] = self.keep(f"{name}.{s}", x + gate2 * self.linear(f"{name}.{s}_mlp.2", inner))
        return streams["img"], streams["txt"]

    def single_block(self, name, x, vec):
        shift, scale, gate = self.modulation(f"{name}.modulation.lin", vec, 3)
        both = self.linear(f"{name}.linear1", (1 + scale) * layer_norm(x) + shift)
        qkv, inner = jnp.split(both, [3 * x.shape[-1]], -1)
        attended = self.attention(name, *self.heads(f"{name}.norm", qkv))
        both = jnp.concatenate([attended, jax.nn.gelu(inner, approximate=True)], -1)
        return self.keep(name, x + gate * self.linear(f"{name}.linear2", both))

    def __call__(self, img, txt, clip, t):
        """The velocity (B, N, P); activations have the dtype of img."""
        text = txt.shape[1]
        waves = self.keep("time_waves", time_waves(t)).astype(img.dtype)
        img, txt = self.linear("img_in", img), self.linear("txt_in", txt)
        vec = self.keep("vec", self.embed("time_in", waves) + self.embed("vector_in", clip))
        for i in range(self.model["double_blocks"]):
            img, txt = self.double_block(f"double_blocks.{i}", img, txt, vec)
        x = jnp.concatenate([txt, img], 1)
        for i in range(self.model["single_blocks"]):
            x = self.single_block(f"single_blocks.{i}", x, vec)
        shift, scale = self.modulation("final_layer.adaLN_modulation.1", vec, 2)
        return self.linear("final_layer.linear", (1 + scale) * layer_norm(x[:, text:]) + shift, keep="prediction")


# Objective


def objective(model, dtype, p, batch):
    """The mean loss, and all values on the way; the error is formed in fp32 whatever the network computes in."""
    net = Net(model, {k: v.astype(dtype) for k, v in p.items()})
    mean, logvar = batch["mean"].astype(f32), batch["logvar"].astype(f32)
    t = batch["t"][:, None, None, None]
    latent = net.keep("latent", 0.3611 * (mean + jnp.exp(logvar / 2) * batch["latent_eps"] - 0.1159))
    x_t = net.keep("x_t", (1 - t) * latent + t * batch["noise"])
    target = net.keep("target", pack(batch["noise"] - latent))
    img = net.keep("img", pack(x_t))
    prediction = net(img.astype(dtype), batch["t5"].astype(dtype), batch["clip"].astype(dtype), batch["t"])
    losses = net.keep("losses", ((prediction.astype(f32) - target) ** 2).mean((1, 2)))
    return net.keep("loss", losses.mean()), net.values


# Optimizer


def adamw(p, m, v, g, lr, step, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1):
    """One step, counted from 1, of torch's AdamW: decay on every parameter, epsilon outside of the root."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    update = m / (1 - beta1**step) / (jnp.sqrt(v / (1 - beta2**step)) + eps)
    return p * (1 - lr * decay) - lr * update, m, v


def norms(tensors):
    return np.array([np.linalg.norm(np.asarray(x, np.float64)) for x in tensors], f32)


def rate(peak, warmup, step):
    """step: counted from 1."""
    return f32(peak * min(1, step / warmup))


def clip(norm, clip_norm):
    return jnp.minimum(1, clip_norm / (norm + 1e-6))


def total(g):
    return jnp.sqrt(sum((x * x).sum() for x in g.values()))


def some_steps(cfg, golden, gradient, start, out, count=6):
    p, m, v = start, {k: jnp.zeros_like(x) for k, x in start.items()}, {k: jnp.zeros_like(x) for k, x in start.items()}
    size, optim = cfg["train"]["global_batch"], cfg["optim"]
    for step in range(1, count + 1):
        batch = train_batch(cfg, golden, range((step - 1) * size, step * size), f"step{step}", out)
        (loss, inner), g = gradient(p, batch)
        norm, lr = total(g), rate(optim["lr"], optim["warmup_steps"], step)
        coefficient = clip(norm, optim["clip_norm"])
        for k in p:
            p[k], m[k], v[k] = adamw(p[k], m[k], v[k], coefficient * g[k], lr, step)
        values = {"loss": loss, "losses": inner["losses"], "grad_norm": norm, "clip_coefficient": coefficient, "lr": lr}
        out |= {f"step{step}.{k}": x for k, x in values.items()}
        for kind, tensors in dict(exp_avg=m, exp_avg_sq=v, weights=p).items():
            out |= {f"step{step}.{kind}.{k}": x for k, x in tensors.items()}
            out[f"step{step}.{kind}.norms"] = norms(tensors.values())
        out[f"step{step}.update_norms"] = norms(p[k] - golden[f"weights.{k}"] for k in p)


def step_in_bf16(cfg, start, times, out, name="img_in.weight"):
    """A step in bf16 with given gradients of two micro-batches. They add up in fp32; weights and moments are fp32."""
    g = {k: times[0] * x / 2 + times[1] * x / 2 for k, x in start.items()}
    norm = clip(total(g), cfg["optim"]["clip_norm"])
    found = adamw(start[name], 0, 0, norm * g[name], f32(cfg["optim"]["lr"]), 1)
    out |= {f"bf16.step1.{k}.{name}": x for k, x in zip(("weights", "exp_avg", "exp_avg_sq"), found)}
    out[f"bf16.step1.grad.{name}"] = g[name]


def two_ranks(cfg, golden, gradient, start, out, batch=4, ranks=2):
    """Positions 4 to 7 on two ranks: each rank takes the mean over its rows, then the ranks take theirs."""
    part, each = batch // ranks, []
    for rank in range(ranks):
        first, own = batch + rank * part, {}
        (loss, inner), g = gradient(start, train_batch(cfg, golden, range(first, first + part), "ranks", own))
        each.append(
            own | {"ranks.losses": inner["losses"], "ranks.loss": loss, "ranks.grad_norm_of_rank": total(g), "g": g}
        )
    mean = {k: sum(rank["g"][k] for rank in each) / ranks for k in start}
    for k in ("img_in.weight", "vector_in.in_layer.weight"):  # the first rows of rank 1's shard
        rows = initial_weight(cfg["train"]["seed"], k, start[k].shape)
        out[f"ranks.init.{k}"] = rows[-(-len(rows) // ranks) :][:4]
    out |= {k: np.stack([rank[k] for rank in each]) for k in each[0] if k != "g"}
    out |= {"ranks.mean_loss": out["ranks.loss"].mean(), "ranks.grad_norm": total(mean)}
    out["ranks.grad.norms"] = norms(mean.values())


# FP8

FORMATS = {  # of x and weight; of the gradient
    "": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ".fnuz": (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
}


def largest(dtype):
    return f32(ml_dtypes.finfo(dtype).max)


def scale_of(amax, top):
    with np.errstate(divide="ignore", over="ignore"):
        return np.minimum(top / f32(amax), f32(2**44))


def quantise(x, dtype):
    scale = scale_of(np.abs(x).max(), largest(dtype))
    return scale, np.clip(x * scale, -largest(dtype), largest(dtype)).astype(dtype)


def fp8(golden, out):
    cast = {}
    for kind, (forward, backward) in FORMATS.items():
        for name in ("x", "weight", "grad"):
            scale, q = quantise(golden[f"fp8.{name}"], backward if name == "grad" else forward)
            out |= {f"fp8{kind}.{name}.scale": scale, f"fp8{kind}.{name}.bits": q.view(np.uint8)}
            cast[kind, name] = q.astype(f32) / scale
    x, w, g = (cast["", name] for name in ("x", "weight", "grad"))
    products = {"y": x @ w.T + golden["fp8.bias"], "grad_x": g @ w, "grad_weight": g.T @ x}
    products["grad_bias"] = golden["fp8.grad"].sum(0)
    out |= {f"fp8.{k}": y.astype(bf16) for k, y in products.items()}
    scale, q = quantise(-np.abs(golden["fp8.x"]), FORMATS[""][0])
    out |= {"fp8.negative.scale": scale, "fp8.negative.bits": q.view(np.uint8)}
    amax = golden["fp8.delayed.amax"]
    for name, columns, algorithm in (("delayed", amax.T, max), ("recent", (amax * (1, 0)).T, lambda seen: seen[-1])):
        found = [delayed(x, largest(d), algorithm) for x, d in zip(columns, FORMATS[""])]
        scales, history = (np.stack(parts, 1) for parts in zip(*found))
        out |= {f"fp8.{name}.scale": scales[name == "delayed" :], f"fp8.{name}.history": history}
    for dtype in (d for pair in FORMATS.values() for d in pair):
        kind = dtype.__name__.removeprefix("float8_")
        bits = np.clip(golden[f"fp8.edge.{kind}.x"], -largest(dtype), largest(dtype)).astype(dtype)
        out |= {f"fp8.edge.{kind}.bits": bits.view(np.uint8), f"fp8.edge.{kind}.decoded": bits.astype(f32)}
        out[f"fp8.scales.{kind}"] = scale_of(golden["fp8.scales.amax"], largest(dtype))
    fp8_order(golden, out)


def fp8_order(golden, out):
    """Which scales four steps cast with: inputs and gradients remember two steps, weights nothing."""
    (forward, backward), factors, seen, casts = FORMATS[""], golden["fp8.order.factors"], {"x": [], "grad": []}, []
    magnitude = {name: np.abs(golden[f"fp8.{name}"]).max() for name in ("x", "weight", "grad")}
    for step, row in enumerate(factors):
        weight = scale_of(magnitude["weight"] * f32(2**step), largest(forward))
        for factor in row:  # a micro-batch; the first step is dynamic
            now = {k: max(seen[k][-2:]) if step else magnitude[k] * factor for k in seen}
            casts.append((scale_of(now["x"], largest(forward)), weight, scale_of(now["grad"], largest(backward))))
        seen = {k: [*seen[k], magnitude[k] * row.max()] for k in seen}
    out["fp8.order.scale"] = np.array(casts, f32).reshape(*factors.shape, 3)
    weight = magnitude["weight"] * f32(2 ** len(factors))
    out["fp8.order.val_scale"] = scale_of(np.array([magnitude["x"], weight]), largest(forward))  # always dynamic


def delayed(amax, top, algorithm=max, history=3, margin=1):
    """The scale before the first step and after each, 1 without a magnitude; the last magnitudes, newest first.

    A 0 is no magnitude.
    """
    seen, scales, histories = [], [1], []
    for x in amax:
        seen = ([*seen, x] if x else seen)[-history:]
        scales.append(min(top / algorithm(seen) / f32(2**margin), f32(2**44)) if seen else 1)
        histories.append((seen[::-1] + [0] * history)[:history])
    return np.array(scales, f32), np.array(histories, f32)


# The golden values


def operations(golden, out):
    """Single operations in bf16: rounded once at the end, or not at all where the result is fp32."""
    fed = {k.removeprefix("bf16.fed."): x for k, x in golden.items() if k.startswith("bf16.fed.")}
    narrow = {k: jnp.asarray(x, bf16) for k, x in fed.items()}
    wide = {k: jnp.asarray(x) for k, x in fed.items()}
    x = layer_norm(narrow["modulate.x"])
    rope = rope_table(1, 2, 3, (4, 4, 8))[:, None]
    turned = apply_rope(rms_norm(narrow["rope.x"], narrow["rope.norm"]), rope)
    gelu = jax.nn.gelu(wide["gelu.x"], approximate=True).astype(bf16)
    q, k, v = (wide[f"attention.{part}"] for part in "qkv")
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / math.sqrt(q.shape[-1])
    attended = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v)
    found = {
        "modulate": (1 + narrow["modulate.scale"]) * x + narrow["modulate.shift"],
        "rope": turned,
        "qk": jnp.stack([turned, turned]).astype(bf16),
        "attention": attended.reshape(*attended.shape[:2], -1).astype(bf16),
        "gelu": gelu,
        "gelu_single": gelu[:96],
        "linear": (wide["linear.x"] @ wide["linear.weight"].T + wide["linear.bias"]).astype(bf16),
        "gate": (wide["gate.x"] + wide["gate.gate"] * wide["gate.y"]).astype(bf16),
        "losses": ((wide["loss.prediction"] - wide["loss.target"]) ** 2).mean((1, 2)),
    }
    out |= {f"bf16.only.{k}": x for k, x in found.items()}


FULL = {"hidden": 3072, "heads": 24, "text_tokens": 4, "latent_height": 4, "latent_width": 8, "rope_axes": (16, 56, 56)}


def drawn(name, shape, width=1.0):
    """As the given values are drawn; a weight of full width repeats every 131,071 numbers."""
    u = uniform(words(0, INIT, name_key(name), 0, min(131_071, math.prod(shape))))
    return np.resize((2 * u - 1) * f32(width) + name.endswith(".scale"), shape)


def full_block(kind, streams, index, out):
    """A block of width 3072 on a few tokens, forward and backward."""
    names = index[f"full.{kind}.grad.norms"]["names"]
    parameters = {}
    for name in names:
        d, module = FULL["hidden"], name.rpartition(".")[0]
        outs = {"linear1": 7, "mlp.0": 4, "modulation.lin": 3, "mod.lin": 6, "qkv": 3}
        rows = next((n for end, n in outs.items() if module.endswith(end)), 1) * d
        columns = {"linear2": 5, "img_mlp.2": 4, "txt_mlp.2": 4}.get(module, 1) * d
        shape = (128,) if name.endswith(".scale") else (rows,) if name.endswith(".bias") else (rows, columns)
        width = 2.0 ** -round(math.log2(columns) / 2) if len(shape) == 2 else 0.25
        width = 2.0**-6 if ".qkv." in name else width
        parameters[f"b.{name}"] = drawn(f"full.{kind}.{name}", shape, width)
    tokens = {k: drawn(f"full.{kind}.{k}", (1, n, FULL["hidden"])) for k, n in streams.items()}
    tokens["vec"] = drawn(f"full.{kind}.vec", (1, FULL["hidden"]))
    weights = [drawn(f"full.{kind}.{k}.grad", tokens[k].shape) for k in streams]

    def task(p, tokens):
        net = Net(FULL, p)
        block = net.double_block if kind == "double" else net.single_block
        result = block("b", *(tokens[k] for k in (*streams, "vec")))
        result = result if kind == "double" else (result,)
        return sum((x * w).sum() for x, w in zip(result, weights)), result

    (_, result), (g, inputs) = jax.value_and_grad(task, (0, 1), has_aux=True)(parameters, tokens)
    shown = dict(zip(streams, result)) | {f"grad.{k}": x for k, x in inputs.items()}
    for k, x in shown.items():
        rows = np.asarray(x).reshape(-1, FULL["hidden"])
        out |= {f"full.{kind}.{k}": rows[:, :8], f"full.{kind}.{k}.size": norms(rows)}
    out[f"full.{kind}.grad.norms"] = norms(g[f"b.{name}"] for name in names)


def full_size(golden, index, out):
    seed, count = index["full.sample"]["seed"], index["full.sample"]["count"]
    sample, _, t, drop = zip(*rows_of(seed, count, golden["full.positions"].tolist()))
    out |= {"full.sample": np.array(sample), "full.t": np.array(t, f32), "full.drop": np.array(drop)}
    rope = rope_table(256, 16, 16, FULL["rope_axes"])
    place = index["full.init.piece"]
    w = words(place["seed"], INIT, name_key(place["name"]), 0, place["count"], place["first"])
    width = f32(math.sqrt(6 / (4 * FULL["hidden"])))
    out |= {
        "full.init.piece": (2 * uniform(w) - 1) * width,
        "full.rope": rope[index["full.rope"]["tokens"]],
        "full.rope.sums": rope.astype(np.float64).sum(0).astype(f32),
    }


def draws(seed, shape, index, out):
    for name in (name for name in index if name.startswith("draws.words.")):
        place = index[name]
        out[name] = words(*(place[k] for k in ("seed", "stream", "sample", "epoch", "count", "first")))
    out |= {"draws.uniform": uniform(out["draws.words.1"]), "draws.normal": normal(out["draws.words.1"])}
    out |= {f"draws.order.{epoch}": order(seed, epoch, 50) for epoch in (0, 1)}
    drops, times = zip(*(scalars(seed, i, 1) for i in range(50)))
    out |= {"draws.drop": np.array(drops), "draws.t": np.array(times), "draws.name_key": u64(name_key("img_in.weight"))}
    for name in ("draws.t.shift", "draws.t.logit_normal", "draws.t.logit_normal_shift"):
        of = {k: index[name][k] for k in ("timestep", "mean", "width", "shift")}
        out[name] = np.array([scalars(seed, i, index[name]["epoch"], **of)[1] for i in range(index[name]["count"])])
    for name, stream in dict(latent_eps=LATENT, noise=NOISE, val_latent_eps=VAL_LATENT, val_noise=VAL_NOISE).items():
        out[f"draws.{name}"] = normals(seed, stream, 3, 262144 if name.startswith("val") else 1, shape)


def main(folder, dump, *wanted):
    folder = pathlib.Path(folder)
    cfg = tomllib.loads((folder / "config.toml").read_text())
    index = json.loads((folder / "index.json").read_text())
    given = {v["name"] for v in index["values"] if v["given"]} | {"bf16.rms_norm.input"}
    golden = load_file(folder / "golden.safetensors")
    golden = {k: golden[k] for k in given}  # the rest is not looked at
    model, seed = cfg["model"], cfg["train"]["seed"]
    start = {k: jnp.asarray(golden[f"weights.{k}"]) for k in index["parameters"]}

    out = {}
    inputs = {v["name"]: v["inputs"] for v in index["values"]}
    draws(seed, (model["latent_channels"], model["latent_height"], model["latent_width"]), inputs, out)
    lr = inputs["schedule.lr"]
    out["schedule.lr"] = np.array([rate(lr["peak"], lr["warmup_steps"], step + 1) for step in lr["steps"]])
    out["clip.coefficient"] = clip(golden["clip.norms"], inputs["clip.coefficient"]["clip_norm"])
    scale = start["single_blocks.1.norm.query_norm.scale"]  # the weights serve as gradients
    out["clip.clipped"] = adamw(scale, 0, 0, clip(total(start), 1) * scale, 0, 1)[1]
    initial = {k: initial_weight(seed, k, x.shape) for k, x in start.items()}
    out |= {f"init.{k}": x[:4] for k, x in initial.items()} | {"init.norms": norms(initial.values())}
    batch = train_batch(cfg, golden, range(cfg["train"]["global_batch"]), "step1", out)
    out |= {f"batch.{k}": x for k, x in batch.items()}

    losses_in = {d: functools.partial(objective, model, d) for d in (f32, bf16)}
    gradient = {d: jax.jit(jax.value_and_grad(task, has_aux=True)) for d, task in losses_in.items()}
    (_, values), grad = gradient[f32](start, batch)
    out |= values | {f"grad.{k}": x for k, x in grad.items()} | {"grad.norms": norms(grad[k] for k in start)}
    (_, values), grad = gradient[bf16](start, batch)
    out |= {f"bf16.{k}": x for k, x in values.items()} | {"bf16.grad.norms": norms(grad[k] for k in start)}
    out["bf16.rms_norm.input"] = values["double_blocks.0.img_attn.norm.query_norm.input"]
    scale = golden["weights.double_blocks.0.img_attn.norm.query_norm.scale"].astype(bf16)
    step_in_bf16(cfg, start, batch["t"], out)
    out["bf16.rms_norm"] = rms_norm(jnp.asarray(golden["bf16.rms_norm.input"]), jnp.asarray(scale))

    batch = val_batch(cfg, golden)
    losses = np.asarray(objective(model, f32, start, batch)[1]["losses"])
    per_timestep = np.array([losses[batch["t"] == k / 8].mean() for k in range(8)])
    out |= {f"val.{k}": batch[k] for k in ("t", "latent_eps", "noise")}
    out["val.count"] = np.array([(batch["t"] == k / 8).sum() for k in range(8)], f32)
    out |= {"val.losses": losses, "val.loss": per_timestep.mean()}
    out["val.loss_per_timestep"] = per_timestep
    some_steps(cfg, golden, gradient[f32], dict(start), out)
    two_ranks(cfg, golden, gradient[f32], dict(start), out)
    operations(golden, out)
    fp8(golden, out)
    full_size(golden, inputs, out)
    if "blocks" in wanted:  # of full width: a minute, and 6 GB of memory
        full_block("double", {"img": 8, "txt": 4}, inputs, out)
        full_block("single", {"x": 12}, inputs, out)

    wanted = [v["name"] for v in index["values"] if v["name"] not in given or v["name"] in out]
    print("not computed:", [k for k in wanted if k not in out])
    arrays = {k: np.asarray(out[k]) for k in wanted if k in out}
    save_file({k: np.array(x, f32 if x.dtype == bf16 else None, order="C") for k, x in arrays.items()}, dump)


if __name__ == "__main__":
    main(*sys.argv[1:])
