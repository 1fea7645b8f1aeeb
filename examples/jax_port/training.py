"""Batches, clipping and AdamW, a run of some steps, and validation. See docs/draws.md and docs/numerics.md."""

import draws
import jax.numpy as jnp
import ml_dtypes
import numpy as np

STORED = ("t5", "clip", "mean", "logvar")  # a data set holds these, in bf16


def make_batch(golden, split, seed, rows):
    """A batch of a data set. rows: (sample, epoch, t, whether the caption is dropped) of each row."""
    eps_stream = draws.LATENT if split == "train" else draws.VAL_LATENT
    noise_stream = draws.NOISE if split == "train" else draws.VAL_NOISE
    filled = []

    for sample, epoch, t, dropped in rows:
        row = {name: golden[f"data.{split}.{name}"][sample] for name in STORED}
        if dropped:
            row["t5"] = golden["data.empty.t5"]
            row["clip"] = golden["data.empty.clip"]
        row = {name: array.astype(ml_dtypes.bfloat16) for name, array in row.items()}
        shape = row["mean"].shape
        row["t"] = np.float32(t)
        row["latent_eps"] = draws.normals(seed, eps_stream, sample, epoch, shape)
        row["noise"] = draws.normals(seed, noise_stream, sample, epoch, shape)
        filled.append(row)

    return {name: np.stack([row[name] for row in filled]) for name in filled[0]}


def train_batch(cfg, golden, positions):
    """The batch at some positions of the run, and what each row is."""
    seed = cfg["train"]["seed"]
    rows = draws.rows_at(seed, cfg["data"]["expected_train_samples"], 0.1, positions)
    samples, epochs, times, dropped = zip(*rows)
    about = {
        "sample": np.array(samples),
        "epoch": np.array(epochs),
        "drop": np.array(dropped),
        "t": np.array(times),
    }

    return make_batch(golden, "train", seed, rows), about


def total_norm(gradients):
    """The norm over all gradients."""
    squares = [jnp.square(gradient).sum() for gradient in gradients.values()]
    return jnp.sqrt(sum(squares))


def clip_coefficient(norm, clip_norm):
    return jnp.minimum(1, clip_norm / (norm + 1e-6))


def rate(peak, warmup_steps, step):
    """The learning rate of a step, counted from 1."""
    return np.float32(peak * min(1, step / warmup_steps))


def adamw(weight, first, second, gradient, lr, step):
    """A weight and its two moments after a step, counted from 1. Epsilon is outside of the root; all weights decay."""
    beta1 = 0.9
    beta2 = 0.95
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * jnp.square(gradient)
    mean = first / (1 - beta1**step)
    square = second / (1 - beta2**step)
    weight = weight * (1 - lr * 0.1)
    weight = weight - lr * mean / (jnp.sqrt(square) + 1e-8)

    return weight, first, second


def train(cfg, golden, gradient_of, weights, steps):
    """Some steps from given weights: yields after each step what is known of it, by name.

    gradient_of: (weights, batch) to ((loss, values on the way), gradients).
    """
    size = cfg["train"]["global_batch"]
    optim = cfg["optim"]
    weights = dict(weights)
    first = {name: jnp.zeros_like(weight) for name, weight in weights.items()}
    second = dict(first)

    for step in range(1, steps + 1):
        batch, about = train_batch(cfg, golden, range((step - 1) * size, step * size))
        (loss, seen), gradients = gradient_of(weights, batch)
        norm = total_norm(gradients)
        coefficient = clip_coefficient(norm, optim["clip_norm"])
        lr = rate(optim["lr"], optim["warmup_steps"], step)
        for name in weights:
            clipped = coefficient * gradients[name]
            new = adamw(weights[name], first[name], second[name], clipped, lr, step)
            weights[name], first[name], second[name] = new
        about["losses"] = seen["losses"]
        about["loss"] = loss
        about["grad_norm"] = norm
        about["clip_coefficient"] = coefficient
        about["lr"] = lr
        state = {"exp_avg": dict(first), "exp_avg_sq": dict(second), "weights": dict(weights)}
        yield about, state


def validation_batch(cfg, golden, evaluation):
    """Every validation sample once: the timestep of each row, and the batch. evaluation: samples of training so far."""
    timesteps = golden["data.val.timestep"]
    rows = [(sample, evaluation, timestep / 8, False) for sample, timestep in enumerate(timesteps)]
    return timesteps, make_batch(golden, "val", cfg["train"]["seed"], rows)


def validation(timesteps, losses):
    """The validation loss is the mean of the means per timestep."""
    losses = np.asarray(losses)
    means = np.array([losses[timesteps == timestep].mean() for timestep in range(8)])
    count = np.bincount(timesteps, minlength=8).astype(np.float32)
    return {"losses": losses, "count": count, "loss_per_timestep": means, "loss": means.mean()}
