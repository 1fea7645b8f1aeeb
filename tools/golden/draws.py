"""The golden values that need no network: words, draws, orders, rates and clip coefficients, at full size too."""

import numpy as np

from flux_ref import rng
from flux_ref.benchmark.facts import TRAIN_SAMPLES
from flux_ref.config import Config
from tools.golden import places

FULL_SEED = places.inputs_of("full.sample")["seed"]


def draws(values: dict, cfg: Config) -> None:
    """The host generator's words and numbers, and the draws of the run."""
    for number in range(5):
        name = f"draws.words.{number}"
        seed, stream, sample, epoch, start, count = places.inputs_of(name).values()
        values[name] = rng.words(seed, stream, count, sample=sample, epoch=epoch, start=start)
    values["draws.uniform"] = rng.uniform(values["draws.words.1"])
    values["draws.normal"] = rng.normal(values["draws.words.1"])
    values["draws.name_key"] = np.array(rng.name_key("img_in.weight"), np.uint64)
    about = places.inputs_of("draws.t") | places.inputs_of("draws.noise") | places.inputs_of("draws.val_noise")
    seed = cfg.train.seed
    sample = about["sample"]
    shape = cfg.model.latent_shape
    for epoch in range(2):
        values[f"draws.order.{epoch}"] = rng.order(seed, epoch, about["count"])
    drawn = []
    for other in range(about["count"]):
        drawn.append(rng.train_draw(seed, about["epoch"], other, shape, cfg.train.caption_drop))
    drops_and_times(values, "draws", drawn)
    for name in ("draws.t.shift", "draws.t.logit_normal", "draws.t.logit_normal_shift"):
        _, epoch, count, *of = places.inputs_of(name).values()
        distribution = rng.TimeDistribution(*of)
        t = [rng.train_draw(seed, epoch, other, (2,), 0.0, distribution).t for other in range(count)]
        values[name] = np.array(t, np.float32)
    values["draws.latent_eps"] = drawn[sample].latent_eps
    values["draws.noise"] = drawn[sample].noise
    latent_eps, noise = rng.val_draw(seed, about["evaluation"], sample, shape)
    values["draws.val_latent_eps"] = latent_eps
    values["draws.val_noise"] = noise


def full_draws(values: dict, given: dict[str, np.ndarray]) -> None:
    """Samples, drops and times of the benchmark's training set: a first batch, and where epochs begin."""
    orders = [rng.order(FULL_SEED, epoch, TRAIN_SAMPLES) for epoch in range(3)]
    samples = []
    drawn = []
    for position in given["full.positions"].tolist():
        epoch, i = divmod(position, TRAIN_SAMPLES)
        samples.append(int(orders[epoch][i]))
        drawn.append(rng.train_draw(FULL_SEED, epoch, samples[-1], (2,), Config().train.caption_drop))
    values["full.sample"] = np.array(samples)
    drops_and_times(values, "full", drawn)


def drops_and_times(values: dict, place: str, drawn: list[rng.Draw]) -> None:
    """Which captions are dropped, and t."""
    values[f"{place}.drop"] = np.array([draw.drop_caption for draw in drawn])
    values[f"{place}.t"] = np.array([draw.t for draw in drawn], np.float32)
