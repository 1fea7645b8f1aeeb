"""A port of flux_ref to JAX, as small as it goes: it makes the golden values again. Written from PORTING.md alone.

    pip install jax safetensors
    python examples/jax_port.py tests/golden dump.safetensors
    python -m flux_ref.golden check --from dump.safetensors

It reads config.toml, the values that index.json calls given (start weights, data set, operands of FP8), the times of
the validation samples and the input that bf16.rms_norm asks for. It computes all others: draws, initial weights,
latents, the network in fp32 and bf16, gradients, three steps, a validation, FP8.

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


def normal(w):
    """Box-Muller; w has an even number of words."""
    a, b = (w.reshape(-1, 2) >> u64(11)).astype(np.float64).T
    radius, angle = np.sqrt(-2 * np.log((a + 1) * 2**-53)), 2 * np.pi * b * 2**-53
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1).astype(f32)


def normals(seed, stream, sample, epoch, shape):
    count = math.prod(shape)
    return normal(words(seed, stream, sample, epoch, count + count % 2))[:count].reshape(shape)


def order(seed, epoch, count):
    return np.argsort(words(seed, ORDER, 0, epoch, count), kind="stable")


def scalars(seed, sample, epoch, rate=0.1):
    """Whether the caption is dropped, and t."""
    drop, t = uniform(words(seed, SCALARS, sample, epoch, 2))
    return drop < rate, t


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


def train_batch(cfg, golden, step):
    """The batch of a step, counted from 0; a batch may run over into the next epoch."""
    seed, count, size = cfg["train"]["seed"], cfg["data"]["train_count"], cfg["train"]["global_batch"]
    draws = []
    for position in range(step * size, (step + 1) * size):
        epoch = position // count
        i = order(seed, epoch, count)[position % count]
        drop, t = scalars(seed, i, epoch)
        draws.append((i, epoch, t, drop))
    return make_batch(golden, seed, "train", draws)


def val_batch(cfg, golden, seen=0):
    """All validation samples, after that many training samples."""
    draws = [(i, seen, golden["val.t"][i], False) for i in range(cfg["data"]["val_count"])]
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


def three_steps(cfg, golden, gradient, start, out):
    p, m, v = start, {k: jnp.zeros_like(x) for k, x in start.items()}, {k: jnp.zeros_like(x) for k, x in start.items()}
    for step in (1, 2, 3):
        (loss, _), g = gradient(p, train_batch(cfg, golden, step - 1))
        norm = jnp.sqrt(sum((x * x).sum() for x in g.values()))
        coefficient = jnp.minimum(1, 1 / (norm + 1e-6))
        lr = cfg["optim"]["lr"] * min(1, step / cfg["optim"]["warmup_steps"])
        for k in p:
            p[k], m[k], v[k] = adamw(p[k], m[k], v[k], coefficient * g[k], lr, step)
        values = {"loss": loss, "grad_norm": norm, "clip_coefficient": coefficient, "lr": f32(lr)}
        out |= {f"step{step}.{k}": x for k, x in values.items()}
        for kind, tensors in dict(exp_avg=m, exp_avg_sq=v, weights=p).items():
            out |= {f"step{step}.{kind}.{k}": x for k, x in tensors.items()}
            out[f"step{step}.{kind}.norms"] = norms(tensors.values())
        out[f"step{step}.update_norms"] = norms(p[k] - golden[f"weights.{k}"] for k in p)


# FP8

FORMATS = {  # of x and weight; of the gradient
    "": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ".fnuz": (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
}


def largest(dtype):
    return f32(ml_dtypes.finfo(dtype).max)


def quantise(x, dtype):
    scale = largest(dtype) / np.abs(x).max()
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
    scales = [delayed(x, largest(d)) for x, d in zip(golden["fp8.delayed.amax"].T, FORMATS[""])]
    out["fp8.delayed.scale"] = np.stack(scales, 1)


def delayed(amax, top, history=3, margin=1):
    """The scale after each step, from the largest of the last magnitudes; a 0 is not one of them."""
    seen, scales = [], []
    for x in amax:
        seen = ([*seen, x] if x else seen)[-history:]
        scales.append(min(top / max(seen) / f32(2**margin), f32(2**44)))
    return np.array(scales, f32)


# The golden values


PLACES = (  # of draws.words: seed, stream, sample, epoch, first word
    (0, 0, 0, 0, 0),
    (25952, 3, 1099775, 23, 0),
    (2**63 - 1, 1, 5, 2**40, 0),
    (7, 6, 16600177376939802456, 0, 2**34),
    (1, 5, 29695, 25165824, 400),
)


def draws(seed, shape, out):
    for i, (*place, first) in enumerate(PLACES):
        out[f"draws.words.{i}"] = words(*place, 8, first)
    out |= {"draws.uniform": uniform(out["draws.words.1"]), "draws.normal": normal(out["draws.words.1"])}
    out |= {f"draws.order.{epoch}": order(seed, epoch, 50) for epoch in (0, 1)}
    drops, times = zip(*(scalars(seed, i, 1) for i in range(50)))
    out |= {"draws.drop": np.array(drops), "draws.t": np.array(times), "draws.name_key": u64(name_key("img_in.weight"))}
    for name, stream in dict(latent_eps=LATENT, noise=NOISE, val_latent_eps=VAL_LATENT, val_noise=VAL_NOISE).items():
        out[f"draws.{name}"] = normals(seed, stream, 3, 262144 if name.startswith("val") else 1, shape)


def main(folder, dump):
    folder = pathlib.Path(folder)
    cfg = tomllib.loads((folder / "config.toml").read_text())
    index = json.loads((folder / "index.json").read_text())
    given = {v["name"] for v in index["values"] if v["given"]} | {"bf16.rms_norm.input", "val.t"}
    golden = load_file(folder / "golden.safetensors")
    golden = {k: golden[k] for k in given}  # the rest is not looked at
    model, seed = cfg["model"], cfg["train"]["seed"]
    start = {k: jnp.asarray(golden[f"weights.{k}"]) for k in index["parameters"]}

    out = {}
    draws(seed, (model["latent_channels"], model["latent_height"], model["latent_width"]), out)
    initial = {k: initial_weight(seed, k, x.shape) for k, x in start.items()}
    out |= {f"init.{k}": x[:4] for k, x in initial.items()} | {"init.norms": norms(initial.values())}
    batch = train_batch(cfg, golden, 0)
    out |= {f"batch.{k}": x for k, x in batch.items()}

    losses_in = {d: functools.partial(objective, model, d) for d in (f32, bf16)}
    gradient = {d: jax.jit(jax.value_and_grad(task, has_aux=True)) for d, task in losses_in.items()}
    (_, values), grad = gradient[f32](start, batch)
    out |= values | {f"grad.{k}": x for k, x in grad.items()} | {"grad.norms": norms(grad[k] for k in start)}
    (_, values), grad = gradient[bf16](start, batch)
    out |= {f"bf16.{k}": x for k, x in values.items()} | {"bf16.grad.norms": norms(grad[k] for k in start)}
    out["bf16.rms_norm.input"] = values["double_blocks.0.img_attn.norm.query_norm.input"]
    scale = golden["weights.double_blocks.0.img_attn.norm.query_norm.scale"].astype(bf16)
    out["bf16.rms_norm"] = rms_norm(jnp.asarray(golden["bf16.rms_norm.input"]), jnp.asarray(scale))

    batch = val_batch(cfg, golden)
    losses = np.asarray(objective(model, f32, start, batch)[1]["losses"])
    per_timestep = np.array([losses[batch["t"] == k / 8].mean() for k in range(8)])
    out |= {"val.t": batch["t"], "val.losses": losses, "val.loss": per_timestep.mean()}
    out["val.loss_per_timestep"] = per_timestep
    three_steps(cfg, golden, gradient[f32], dict(start), out)
    fp8(golden, out)

    wanted = [v["name"] for v in index["values"] if v["name"] not in given or v["name"] in out]
    print("not computed:", [k for k in wanted if k not in out])
    arrays = {k: np.asarray(out[k]) for k in wanted if k in out}
    save_file({k: np.array(x, f32 if x.dtype == bf16 else None, order="C") for k, x in arrays.items()}, dump)


if __name__ == "__main__":
    main(*sys.argv[1:])
