"""FLUX.1 and its objective as pure functions of the weights. The page docs/numerics.md defines both.

Axes: B batch, C channels, Y X of the latent, N image tokens, P features of a packed token, T text tokens, S = T + N,
D hidden, H heads, K features of a head, R = K / 2 rotations.
Weights are (outputs, inputs), under the names of Black Forest Labs. A JAX model of its own would stack the blocks of a
kind and scan over them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

F32 = jnp.float32


class Scope:
    """The weights below a prefix, and the record of what passes there, under the names of the golden values."""

    def __init__(self, weights, seen, prefix=""):
        self.weights = weights
        self.seen = seen
        self.prefix = prefix

    def at(self, prefix):
        return Scope(self.weights, self.seen, self.prefix + prefix)

    def weight(self, name):
        return self.weights[self.prefix + name]

    def keep(self, name, value):
        self.seen[self.prefix + name] = value
        return value

    def linear(self, name, x, keep_as=""):
        """x w^T + b, summed in fp32."""
        self.keep(name + ".input", x)
        weight = self.weight(name + ".weight")
        bias = self.weight(name + ".bias").astype(F32)
        y = jnp.matmul(x, weight.T, preferred_element_type=F32) + bias
        return self.keep(keep_as or name, y.astype(x.dtype))


# Parts of the network


def rope_table(text_tokens, height, width, axes, theta=10_000):
    """(cos, sin) of each token's rotations: (S, R, 2). Text comes first, at position 0. Made in fp64."""
    y, x = np.divmod(np.arange(height * width), width)
    image = np.stack([np.zeros_like(y), y, x], axis=1)
    text = np.zeros((text_tokens, 3))
    positions = np.concatenate([text, image])
    angles = []

    for axis, features in enumerate(axes):
        frequencies = theta ** (-np.arange(0, features, 2) / features)
        angles.append(positions[:, [axis]] * frequencies)

    angle = np.concatenate(angles, axis=1)

    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def apply_rope(x, rope):
    """Turn each pair of neighbours (2r, 2r + 1) by its angle. x: (..., S, K)."""
    even = x[..., 0::2]
    odd = x[..., 1::2]
    cos = rope[..., 0]
    sin = rope[..., 1]
    first = cos * even - sin * odd
    second = sin * even + cos * odd
    return jnp.stack([first, second], axis=-1).reshape(x.shape)


def timestep_embedding(t):
    """128 cosines, then 128 sines of 1000 t: (B, 256) in fp32."""
    frequencies = np.exp(-math.log(10_000) * np.arange(128) / 128).astype(np.float32)
    angles = 1000 * t.astype(F32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def layer_norm(x):
    """Without weights. fp32 out of any input."""
    wide = x.astype(F32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-6)


def modulate(x, shift, scale):
    """Rounded once. The product is fp32, so gradients of shift and scale are summed over tokens in fp32."""
    return ((1 + scale) * layer_norm(x) + shift).astype(x.dtype)


def add_gated(x, gate, y):
    """x + gate * y, rounded once. fp32 for the gradient of the gate, as in modulate."""
    return (x + gate.astype(F32) * y).astype(x.dtype)


def rms_norm(x, scale):
    """fp32 out of any input."""
    wide = x.astype(F32)
    square = jnp.square(wide).mean(-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(square + 1e-6)
    return normed * scale.astype(F32)


def gelu(x):
    """The tanh form, in fp32 and rounded once: small results are lost in bf16."""
    return jax.nn.gelu(x.astype(F32), approximate=True).astype(x.dtype)


def embed(scope, name, x):
    """Linear, SiLU, linear."""
    inner = scope.linear(name + ".in_layer", x)
    return scope.linear(name + ".out_layer", jax.nn.silu(inner), keep_as=name)


def modulation(scope, name, vec, parts):
    """shift, scale, gate, and in double blocks the same three again for the MLP: (B, 1, D) each."""
    features = scope.linear(name, jax.nn.silu(vec))
    return jnp.split(features[:, None], parts, axis=-1)


def heads(norm, qkv, count):
    """Normed q and k, and v: (B, H, S, K) each. The features of qkv are ordered (q | k | v, head, dim)."""
    batch, tokens, _ = qkv.shape
    parts = qkv.reshape(batch, tokens, 3, count, -1)
    q, k, v = parts.transpose(2, 0, 3, 1, 4)
    q = norm.keep("query_norm", rms_norm(q, norm.weight("query_norm.scale")))
    k = norm.keep("key_norm", rms_norm(k, norm.weight("key_norm.scale")))
    return q, k, v


def attention(q, k, v):
    """Full attention, without a mask: (B, H, S, K) to (B, S, D). Scores and softmax are fp32."""
    scores = jnp.einsum("bhsk,bhtk->bhst", q, k, preferred_element_type=F32)
    shares = jax.nn.softmax(scores / math.sqrt(q.shape[-1]))
    mixed = jnp.einsum("bhst,bhtk->bshk", shares, v.astype(F32))
    return mixed.reshape(*mixed.shape[:2], -1).astype(v.dtype)


def turned(q, k, rope, dtype):
    """Queries and keys after RoPE, which are rounded here and only here."""
    return apply_rope(jnp.stack([q, k]), rope).astype(dtype)


def attend(block, q, k, v, rope):
    q, k = turned(q, k, rope, v.dtype)
    block.keep("attention.q", q)
    block.keep("attention.k", k)
    block.keep("attention.v", v)
    return block.keep("attention", attention(q, k, v))


# Blocks


def double_block(block, img, txt, vec, rope, count):
    """count: of heads."""
    img_qkv, img_parts = before_attention(block.at("img_"), img, vec, count)
    txt_qkv, txt_parts = before_attention(block.at("txt_"), txt, vec, count)
    joint = [jnp.concatenate(pair, axis=2) for pair in zip(txt_qkv, img_qkv)]  # text first
    attended = attend(block, *joint, rope)
    txt_attended, img_attended = jnp.split(attended, [txt.shape[1]], axis=1)
    img = after_attention(block.at("img_"), img, img_attended, img_parts)
    txt = after_attention(block.at("txt_"), txt, txt_attended, txt_parts)
    block.keep("img", img)
    block.keep("txt", txt)

    return img, txt


def before_attention(stream, x, vec, count):
    """q, k and v of a stream, and the parts of the modulation that follow attention."""
    shift, scale, *parts = modulation(stream, "mod.lin", vec, 6)
    qkv = stream.linear("attn.qkv", modulate(x, shift, scale))
    return heads(stream.at("attn.norm."), qkv, count), parts


def after_attention(stream, x, attended, parts):
    gate1, shift, scale, gate2 = parts
    x = add_gated(x, gate1, stream.linear("attn.proj", attended))
    inner = stream.linear("mlp.0", modulate(x, shift, scale))
    inner = stream.keep("mlp.1", gelu(inner))
    return add_gated(x, gate2, stream.linear("mlp.2", inner))


def single_block(block, x, vec, rope, count):
    """One joint stream. linear1 gives (q | k | v, MLP), linear2 takes (attention, MLP)."""
    shift, scale, gate = modulation(block, "modulation.lin", vec, 3)
    both = block.linear("linear1", modulate(x, shift, scale))
    qkv, inner = jnp.split(both, [3 * x.shape[-1]], axis=-1)
    q, k, v = heads(block.at("norm."), qkv, count)
    attended = attend(block, q, k, v, rope)
    both = jnp.concatenate([attended, gelu(inner)], axis=-1)
    return add_gated(x, gate, block.linear("linear2", both))


def flux(net, model, img, txt, clip, t):
    """The velocity (B, N, P). Activations have the dtype of img; t is fp32. model: the section of config.toml."""
    height = model["latent_height"] // 2
    width = model["latent_width"] // 2
    text = model["text_tokens"]
    count = model["heads"]
    rope = net.keep("rope", rope_table(text, height, width, model["rope_axes"]))
    waves = net.keep("timestep_embedding", timestep_embedding(t))
    of_time = embed(net, "time_in", waves.astype(img.dtype))
    vec = net.keep("vec", of_time + embed(net, "vector_in", clip))
    img = net.linear("img_in", img)
    txt = net.linear("txt_in", txt)

    for i in range(model["double_blocks"]):
        img, txt = double_block(net.at(f"double_blocks.{i}."), img, txt, vec, rope, count)

    x = jnp.concatenate([txt, img], axis=1)

    for i in range(model["single_blocks"]):
        x = single_block(net.at(f"single_blocks.{i}."), x, vec, rope, count)
        net.keep(f"single_blocks.{i}", x)

    shift, scale = modulation(net, "final_layer.adaLN_modulation.1", vec, 2)
    img = modulate(x[:, text:], shift, scale)

    return net.linear("final_layer.linear", img, keep_as="prediction")


# The objective


def pack(latent):
    """(B, C, Y, X) to (B, N, P): tokens row by row, features (C, dy, dx)."""
    b, c, y, x = latent.shape
    patches = latent.reshape(b, c, y // 2, 2, x // 2, 2)
    tokens = patches.transpose(0, 2, 4, 1, 3, 5)
    return tokens.reshape(b, y * x // 4, 4 * c)


def squared_errors(prediction, target):
    """The loss of each sample, in fp32: (B,)."""
    error = prediction.astype(F32) - target
    return jnp.square(error).mean((1, 2))


def objective(model, dtype, weights, batch):
    """The mean loss of a batch, and all values on the way. dtype: of the network; the rest is fp32."""
    weights = {name: weight.astype(dtype) for name, weight in weights.items()}
    net = Scope(weights, seen={})
    mean = batch["mean"].astype(F32)
    deviation = jnp.exp(batch["logvar"].astype(F32) / 2)
    noise = batch["noise"]
    t = batch["t"][:, None, None, None]
    sample = mean + deviation * batch["latent_eps"]
    latent = net.keep("latent", 0.3611 * (sample - 0.1159))
    x_t = net.keep("x_t", (1 - t) * latent + t * noise)  # t = 0 is data, t = 1 is noise
    target = net.keep("target", pack(noise - latent))
    img = net.keep("img", pack(x_t))
    txt = batch["t5"].astype(dtype)
    clip = batch["clip"].astype(dtype)
    prediction = flux(net, model, img.astype(dtype), txt, clip, batch["t"])
    losses = net.keep("losses", squared_errors(prediction, target))
    net.keep("loss", losses.mean())

    return losses.mean(), net.seen
