"""A port of flux_ref to JAX. It makes the golden values again: fp32 and bf16, not FP8 and not the formats of blocks.

    pip install jax safetensors
    python examples/jax_port tests/golden dump.safetensors
    python -m tools.golden.check dump.safetensors

It reads config.toml, index.json and the values that the index calls given: start weights and the data set.
draws.py, network.py and training.py are the port. This file calls them, from the first draw to the validation loss.
"""

import functools
import json
import pathlib
import sys
import tomllib

import draws
import jax
import jax.numpy as jnp
import ml_dtypes
import network
import numpy as np
import training
from safetensors.numpy import load_file, save_file

jax.config.update("jax_default_matmul_precision", "highest")  # else a TPU multiplies fp32 in bf16
BF16 = ml_dtypes.bfloat16


def named(prefix, values):
    return {f"{prefix}.{name}": value for name, value in values.items()}


def norms(tensors):
    """The norm of each tensor, in fp32."""
    found = [np.linalg.norm(np.asarray(tensor, np.float64)) for tensor in tensors]
    return np.array(found, np.float32)


def drawn(cfg, about):
    """The generator's words, and draws of the run. about: the field `inputs` of each value in the index."""
    seed = cfg["train"]["seed"]
    model = cfg["model"]
    latent = model["latent_channels"], model["latent_height"], model["latent_width"]
    values = {}

    for number in range(5):
        given = about[f"draws.words.{number}"]
        place = given["seed"], given["stream"], given["sample"], given["epoch"]
        values[f"words.{number}"] = draws.words(*place, given["count"], given["first"])

    values["uniform"] = draws.uniform(values["words.1"])
    values["normal"] = draws.normal(values["words.1"])
    values["name_key"] = np.uint64(draws.name_key("img_in.weight"))
    values["order.0"] = draws.order(seed, 0, 50)
    values["order.1"] = draws.order(seed, 1, 50)
    samples = range(50)
    values["drop"] = np.array([draws.is_dropped(seed, sample, 1, 0.1) for sample in samples])
    values["t"] = np.array([draws.time(seed, sample, 1) for sample in samples])

    for name in ("t.shift", "t.logit_normal", "t.logit_normal_shift"):
        given = about[f"draws.{name}"]
        keys = {key: given[key] for key in ("timestep_sampling", "logit_mean", "logit_std", "timestep_shift")}
        times = [draws.time(seed, sample, 1, **keys) for sample in samples]
        values[name] = np.array(times)

    values["latent_eps"] = draws.normals(seed, draws.LATENT, 3, 1, latent)
    values["noise"] = draws.normals(seed, draws.NOISE, 3, 1, latent)
    values["val_latent_eps"] = draws.normals(seed, draws.VAL_LATENT, 3, 262_144, latent)
    values["val_noise"] = draws.normals(seed, draws.VAL_NOISE, 3, 262_144, latent)

    return values


def full_size(golden, about):
    """Draws and rotations of the benchmark's size."""
    seed = about["full.sample"]["seed"]
    count = about["full.sample"]["count"]
    rows = draws.rows_at(seed, count, 0.1, golden["full.positions"].tolist())
    samples, _, times, dropped = zip(*rows)
    rope = network.rope_table(256, 16, 16, (16, 56, 56))
    piece = about["full.init.piece"]
    key = draws.name_key(piece["name"])
    words = draws.words(seed, draws.INIT, key, 0, piece["count"], piece["first"])

    return {
        "sample": np.array(samples),
        "t": np.array(times),
        "drop": np.array(dropped),
        "rope": rope[about["full.rope"]["tokens"]],
        "rope.sums": rope.astype(np.float64).sum(0).astype(np.float32),
        "init.piece": draws.xavier(words, 3 * 3072, 3072),
    }


def initial(seed, weights):
    """First rows of the weights from which a run starts by its seed, and the norms of all."""
    whole = {name: draws.initial_weight(seed, name, weight.shape) for name, weight in weights.items()}
    values = {name: weight[:4] for name, weight in whole.items()}
    values["norms"] = norms(whole.values())
    return values


def schedules(about, weights):
    """Learning rates and clipping on both sides of their corners. The weights serve as gradients here."""
    given = about["schedule.lr"]
    peak = given["peak"]
    rates = [training.rate(peak, given["warmup_steps"], step + 1) for step in given["steps"]]
    scale = weights["single_blocks.1.norm.query_norm.scale"]
    coefficient = training.clip_coefficient(training.total_norm(weights), 1)
    _, first, _ = training.adamw(scale, 0, 0, coefficient * scale, lr=0, step=1)
    return {"schedule.lr": np.array(rates), "clip.clipped": first}


def steps(cfg, golden, gradient_of, weights):
    """Six steps of training."""
    values = {}
    taken = training.train(cfg, golden, gradient_of, weights, steps=6)

    for number, (about, state) in enumerate(taken, start=1):
        for kind, tensors in state.items():
            about |= named(kind, tensors)
            about[f"{kind}.norms"] = norms(tensors.values())
        moved = [state["weights"][name] - weights[name] for name in weights]
        about["update_norms"] = norms(moved)
        values |= named(f"step{number}", about)

    return values


def two_ranks(cfg, golden, gradient_of, weights):
    """Positions 4 to 7 on two ranks: each takes the mean over its rows, then both take the mean over ranks."""
    ranks = []
    gradients = []

    for positions in (range(4, 6), range(6, 8)):
        batch, about = training.train_batch(cfg, golden, positions)
        (loss, seen), gradient = gradient_of(weights, batch)
        norm = training.total_norm(gradient)
        ranks.append(about | {"losses": seen["losses"], "loss": loss, "grad_norm_of_rank": norm})
        gradients.append(gradient)

    values = {name: np.stack([rank[name] for rank in ranks]) for name in ranks[0]}
    mean = jax.tree.map(lambda one, other: (one + other) / 2, *gradients)
    values["mean_loss"] = values["loss"].mean()
    values["grad.norms"] = norms(mean[name] for name in weights)
    values["grad_norm"] = training.total_norm(mean)

    return values


def one_pass(gradient_of, weights, batch):
    """A forward and a backward pass: all values on the way, and the gradients."""
    (_, seen), gradients = gradient_of(weights, batch)
    seen |= named("grad", gradients)
    seen["grad.norms"] = norms(gradients[name] for name in weights)
    return seen


def step_in_bf16(cfg, golden, gradient_of, weights):
    """The mean gradient of two micro-batches of one row, and a weight after the step."""
    batch, _ = training.train_batch(cfg, golden, range(2))
    parts = [gradient_of(weights, {name: rows[row : row + 1] for name, rows in batch.items()})[1] for row in range(2)]
    mean = jax.tree.map(lambda one, other: (one + other) / 2, *parts)
    optim = cfg["optim"]
    coefficient = training.clip_coefficient(training.total_norm(mean), optim["clip_norm"])
    name = "final_layer.linear.weight"
    lr = training.rate(optim["lr"], optim["warmup_steps"], 1)
    weight, *_ = training.adamw(weights[name], 0, 0, coefficient * mean[name], lr, step=1)
    moved = (weight - weights[name]).sum(1)
    return {f"grad.{name}": mean[name], f"weights.{name}": weight, f"moved.{name}": moved}


def operations(golden):
    """Operations of the network alone, in bf16. Heads come after tokens here: (B, S, H, K)."""

    def fed(name):
        return jnp.asarray(golden["bf16.fed." + name], BF16)

    rope = network.rope_table(1, 2, 3, (4, 4, 8))[:, None]
    q = network.rms_norm(fed("rope.x"), fed("rope.norm"))
    operands = [fed(f"attention.{name}").swapaxes(1, 2) for name in "qkv"]

    linear = network.Scope({".weight": fed("linear.weight"), ".bias": jnp.zeros(6)}, {}).linear

    return {
        "linear": linear("", fed("linear.x")),
        "rms_norm": network.rms_norm(fed("rope.x"), fed("rms_norm.scale")),
        "modulate": network.modulate(fed("modulate.x"), fed("modulate.shift"), fed("modulate.scale")),
        "rope": network.apply_rope(q, rope),
        "qk": network.turned(q, q, rope, BF16),
        "attention": network.attention(*operands),
        "gelu": network.gelu(fed("gelu.x")),
        "losses": network.squared_errors(fed("loss.prediction"), golden["bf16.fed.loss.target"]),
    }


def all_values(cfg, golden, about, weights):
    """The golden values by name, and others that pass on the way."""
    seed = cfg["train"]["seed"]
    values = named("draws", drawn(cfg, about))
    values |= named("full", full_size(golden, about))
    values |= named("init", initial(seed, weights))
    values |= schedules(about, weights)

    loss_of = functools.partial(network.objective, cfg["model"], np.float32)
    gradient_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    batch, _ = training.train_batch(cfg, golden, range(cfg["train"]["global_batch"]))
    values |= named("batch", batch)
    values |= one_pass(gradient_of, weights, batch)
    values |= steps(cfg, golden, gradient_of, weights)
    values |= named("ranks", two_ranks(cfg, golden, gradient_of, weights))
    far, rows = training.train_batch(cfg, golden, about["far.t"]["positions"])
    values |= named("far", far | rows)
    for prefix, evaluation in (("val", 0), ("val.later", about["val.later.loss"]["evaluation"])):
        timesteps, all_samples = training.validation_batch(cfg, golden, evaluation)
        _, seen = loss_of(weights, all_samples)
        values |= named(prefix, all_samples | training.validation(timesteps, seen["losses"]))

    loss_in_bf16 = functools.partial(network.objective, cfg["model"], BF16)
    rounding = {"xla_allow_excess_precision": False}  # else XLA leaves out roundings between fused operations
    gradient_in_bf16 = jax.jit(jax.value_and_grad(loss_in_bf16, has_aux=True), compiler_options=rounding)
    values |= named("bf16", one_pass(gradient_in_bf16, weights, batch))
    values |= named("bf16.step", step_in_bf16(cfg, golden, gradient_in_bf16, weights))
    values |= named("bf16.only", operations(golden))

    return values


def main(folder, dump):
    folder = pathlib.Path(folder)
    cfg = tomllib.loads((folder / "config.toml").read_text())
    index = json.loads((folder / "index.json").read_text())
    stored = load_file(folder / "golden.safetensors")
    golden = {}
    about = {}

    for value in index["values"]:
        name = value["name"]
        about[name] = value["inputs"]
        if value["given"]:
            golden[name] = stored[name]

    weights = {name: jnp.asarray(golden[f"weights.{name}"]) for name in index["parameters"]}
    arrays = {}

    for name, value in all_values(cfg, golden, about, weights).items():
        if name in about:
            array = np.asarray(value)
            dtype = np.float32 if array.dtype == BF16 else array.dtype
            arrays[name] = np.array(array, dtype, order="C")

    save_file(arrays, dump)


if __name__ == "__main__":
    main(*sys.argv[1:])
