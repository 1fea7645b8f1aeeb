"""The golden values that need no data: words, draws, orders, rates, initial weights and rotations, at full size too."""

from dataclasses import replace

import numpy as np
import torch

from flux_ref import model, rng, schedule
from flux_ref.config import Config, OptimConfig
from flux_ref.mlperf_closed import TRAIN_SAMPLES
from tools.golden.files import Values, inputs_of
from tools.golden.training import Replay, drawn_at, named

FULL_SEED = inputs_of("full.sample")["seed"]
TIMES = ("draws.t", "draws.t.shift", "draws.t.logit_normal", "draws.t.logit_normal_shift")
TIME_KEYS = ("timestep_sampling", "logit_mean", "logit_std", "timestep_shift")  # of a config


def draws(run: Replay) -> Values:
    """The host generator's words and numbers, and the draws of the run."""
    cfg = run.cfg
    values: Values = {}
    for number in range(5):
        name = f"draws.words.{number}"
        about = dict(inputs_of(name))
        values[name] = rng.words(start=about.pop("first"), **about)
    values |= {
        "draws.uniform": rng.uniform(values["draws.words.1"]),
        "draws.normal": rng.normal(values["draws.words.1"]).astype(np.float32),
        "draws.name_key": np.array(rng.name_key("img_in.weight"), np.uint64),
    }

    seed = cfg.train.seed
    shape = cfg.model.latent_shape
    about = inputs_of("draws.t")
    epoch = about["epoch"]
    samples = range(about["count"])
    drawn = [rng.train_draw(cfg.train, epoch, i, shape) for i in samples]
    values |= {
        "draws.order.0": rng.order(seed, 0, len(samples)),
        "draws.order.1": rng.order(seed, 1, len(samples)),
        "draws.drop": np.array([draw.drop_caption for draw in drawn]),
    }
    for name in TIMES:
        train = replace(cfg.train, **{key: value for key, value in inputs_of(name).items() if key in TIME_KEYS})
        values[name] = np.array([rng.train_draw(train, epoch, i, shape).t for i in samples], np.float32)

    about = inputs_of("draws.val_noise")
    sample = about["sample"]
    val_eps, val_noise = rng.val_draw(seed, about["evaluation"], sample, shape)
    values |= {
        "draws.latent_eps": drawn[sample].latent_eps,
        "draws.noise": drawn[sample].noise,
        "draws.val_latent_eps": val_eps,
        "draws.val_noise": val_noise,
    }

    about = inputs_of("schedule.lr")
    optim = OptimConfig(lr=about["peak"], warmup_steps=about["warmup_steps"])
    values["schedule.lr"] = np.array([schedule.lr(number, optim) for number in about["steps"]], np.float32)
    return values


def full_draws(run: Replay) -> Values:
    """Samples, drops and times of the benchmark's training set: a first batch, and where epochs begin."""
    train = replace(Config().train, seed=FULL_SEED)
    rows = drawn_at(run.given["full.positions"].tolist(), TRAIN_SAMPLES, train)
    del rows["epoch"]
    return named("full", rows)


def full_net(_: Replay) -> Values:
    """Of FLUX.1-schnell: the rotations of some tokens, their sums over all, and some initial elements of a weight."""
    with torch.device("meta"):
        net = model.Flux(Config().model)
    table = net.make_rope()
    about = inputs_of("full.init.piece")
    name = about["name"]
    kind, width = model.init_spec(name, tuple(net.get_parameter(name).shape))
    return {
        "full.rope": table[inputs_of("full.rope")["tokens"]].numpy(),
        "full.rope.sums": table.double().sum(0).float().numpy(),
        "full.init.piece": rng.init_values(FULL_SEED, name, kind, width, about["first"], about["count"]),
    }
