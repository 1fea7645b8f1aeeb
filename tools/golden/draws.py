"""The golden values that need no data: words, draws, orders, rates, initial weights and rotations, at full size too."""

from dataclasses import replace

import numpy as np
import torch

from flux_ref import model, rng, schedule
from flux_ref.config import Config, OptimConfig
from flux_ref.mlperf_closed import TRAIN_SAMPLES
from tools.golden import files
from tools.golden.files import Values
from tools.golden.training import Replay, drawn_at

FULL_SEED = files.inputs_of("full.sample")["seed"]


def draws(run: Replay) -> Values:
    """The host generator's words and numbers, and the draws of the run."""
    cfg = run.cfg
    values: Values = {}
    for number in range(5):
        name = f"draws.words.{number}"
        about = dict(files.inputs_of(name))
        values[name] = rng.words(start=about.pop("first"), **about)
    values |= {
        "draws.uniform": rng.uniform(values["draws.words.1"]),
        "draws.normal": rng.normal(values["draws.words.1"]).astype(np.float32),
        "draws.name_key": np.array(rng.name_key("img_in.weight"), np.uint64),
    }

    seed = cfg.train.seed
    shape = cfg.model.latent_shape
    about = files.inputs_of("draws.t")
    epoch = about["epoch"]
    samples = range(about["count"])
    drawn = [rng.train_draw(cfg.train, epoch, i, shape) for i in samples]
    values |= {
        "draws.order.0": rng.order(seed, 0, len(samples)),
        "draws.order.1": rng.order(seed, 1, len(samples)),
        "draws.drop": np.array([draw.drop_caption for draw in drawn]),
        "draws.t": np.array([draw.t for draw in drawn], np.float32),
    }
    for name in ("draws.t.shift", "draws.t.logit_normal", "draws.t.logit_normal_shift"):
        about = files.inputs_of(name)
        keys = "timestep_sampling", "logit_mean", "logit_std", "timestep_shift"
        train = replace(cfg.train, **{key: about[key] for key in keys})
        other = [rng.train_draw(train, epoch, i, (2,)) for i in samples]
        values[name] = np.array([draw.t for draw in other], np.float32)

    about = files.inputs_of("draws.val_noise")
    sample = about["sample"]
    val_eps, val_noise = rng.val_draw(seed, about["evaluation"], sample, shape)
    values |= {
        "draws.latent_eps": drawn[sample].latent_eps,
        "draws.noise": drawn[sample].noise,
        "draws.val_latent_eps": val_eps,
        "draws.val_noise": val_noise,
    }

    about = files.inputs_of("schedule.lr")
    optim = OptimConfig(lr=about["peak"], warmup_steps=about["warmup_steps"])
    rates = [schedule.lr(number, optim) for number in about["steps"]]
    values["schedule.lr"] = np.array(rates, np.float32)
    return values


def full_draws(run: Replay) -> Values:
    """Samples, drops and times of the benchmark's training set: a first batch, and where epochs begin."""
    train = replace(Config().train, seed=FULL_SEED)
    rows = drawn_at(run.given["full.positions"].tolist(), TRAIN_SAMPLES, train)
    return {f"full.{name}": rows[name] for name in ("sample", "drop", "t")}


def full_net(_: Replay) -> Values:
    """Of FLUX.1-schnell: the rotations of some tokens, their sums over all, and some initial elements of a weight."""
    with torch.device("meta"):
        net = model.Flux(Config().model)
    table = net.make_rope()
    tokens = files.inputs_of("full.rope")["tokens"]
    about = files.inputs_of("full.init.piece")
    name = about["name"]
    kind, width = model.init_spec(name, tuple(net.get_parameter(name).shape))
    return {
        "full.rope": table[tokens].numpy(),
        "full.rope.sums": table.double().sum(0).float().numpy(),
        "full.init.piece": rng.init_values(FULL_SEED, name, kind, width, about["first"], about["count"]),
    }
