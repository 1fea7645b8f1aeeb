"""The golden values that need no data: words, draws, orders, rates, initial weights and rotations, at full size too."""

import numpy as np
import torch

from flux_ref import model, rng, schedule
from flux_ref.benchmark.closed import TRAIN_SAMPLES
from flux_ref.config import Config
from tools.golden import places
from tools.golden.files import Values

FULL_SEED = places.inputs_of("full.sample")["seed"]


def draws(cfg: Config) -> Values:
    """The host generator's words and numbers, and the draws of the run."""
    values: Values = {}
    for number in range(5):
        name = f"draws.words.{number}"
        seed, stream, sample, epoch, start, count = places.inputs_of(name).values()
        values[name] = rng.words(seed, stream, count, sample=sample, epoch=epoch, start=start)
    values["draws.uniform"] = rng.uniform(values["draws.words.1"])
    values["draws.normal"] = rng.normal(values["draws.words.1"])
    values["draws.name_key"] = np.array(rng.name_key("img_in.weight"), np.uint64)
    seed = cfg.train.seed
    shape = cfg.model.latent_shape
    _, epoch, count, *_ = places.inputs_of("draws.t").values()
    for other in range(2):
        values[f"draws.order.{other}"] = rng.order(seed, other, count)
    drawn = [rng.train_draw(seed, epoch, i, shape, cfg.train.caption_drop) for i in range(count)]
    values |= drops_and_times("draws", drawn)
    for name in ("draws.t.shift", "draws.t.logit_normal", "draws.t.logit_normal_shift"):
        distribution = rng.TimeDistribution(*list(places.inputs_of(name).values())[3:])
        t = [rng.train_draw(seed, epoch, i, (2,), 0.0, distribution).t for i in range(count)]
        values[name] = np.array(t, np.float32)
    _, evaluation, sample, _ = places.inputs_of("draws.val_noise").values()
    values |= {"draws.latent_eps": drawn[sample].latent_eps, "draws.noise": drawn[sample].noise}
    values["draws.val_latent_eps"], values["draws.val_noise"] = rng.val_draw(seed, evaluation, sample, shape)
    about = places.inputs_of("schedule.lr")
    rates = [schedule.lr(number, about["peak"], about["warmup_steps"]) for number in about["steps"]]
    return values | {"schedule.lr": np.array(rates, np.float32)}


def full_draws(given: Values) -> Values:
    """Samples, drops and times of the benchmark's training set: a first batch, and where epochs begin."""
    orders = [rng.order(FULL_SEED, epoch, TRAIN_SAMPLES) for epoch in range(3)]
    samples = []
    drawn = []
    for position in given["full.positions"].tolist():
        epoch, i = divmod(position, TRAIN_SAMPLES)
        samples.append(int(orders[epoch][i]))
        drawn.append(rng.train_draw(FULL_SEED, epoch, samples[-1], (2,), Config().train.caption_drop))
    return {"full.sample": np.array(samples)} | drops_and_times("full", drawn)


def drops_and_times(place: str, drawn: list[rng.Draw]) -> Values:
    """Which captions are dropped, and t."""
    return {
        f"{place}.drop": np.array([draw.drop_caption for draw in drawn]),
        f"{place}.t": np.array([draw.t for draw in drawn], np.float32),
    }


def full_net() -> Values:
    """Of FLUX.1-schnell: the rotations of some tokens, their sums over all, and some initial elements of a weight."""
    with torch.device("meta"):
        net = model.Flux(Config().model)
    table = net.make_rope()
    about = places.inputs_of("full.init.piece")
    name, first, count = about["name"], about["first"], about["count"]
    kind, width = model.initial(name, tuple(net.get_parameter(name).shape))
    return {
        "full.rope": table[places.inputs_of("full.rope")["tokens"]].numpy(),
        "full.rope.sums": table.double().sum(0).float().numpy(),
        "full.init.piece": rng.initial(FULL_SEED, name, kind, width, first, count),
    }
