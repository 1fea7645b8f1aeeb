"""The golden values that need no network: words, draws, orders, rates and clip coefficients, at full size too."""

import numpy as np

from flux_ref import rng
from flux_ref.benchmark.facts import TRAIN_SAMPLES
from flux_ref.config import Config
from tools.golden import places

COUNT = 50
EPOCH = 1
SAMPLE = 3
SEEN = 262_144
FULL_SEED = 25952


def draws(values: dict, cfg: Config) -> None:
    """The host generator's words and numbers, and the draws of the run."""
    for name in (f"draws.words.{number}" for number in range(5)):
        seed, stream, sample, epoch, start, count = places.inputs_of(name).values()
        values[name] = rng.words(seed, stream, count, sample=sample, epoch=epoch, start=start)
    values["draws.uniform"] = rng.uniform(values["draws.words.1"])
    values["draws.normal"] = rng.normal(values["draws.words.1"])
    values["draws.name_key"] = np.array(rng.name_key("img_in.weight"), np.uint64)
    seed = cfg.train.seed
    shape = cfg.model.latent_shape
    for epoch in range(2):
        values[f"draws.order.{epoch}"] = rng.order(seed, epoch, COUNT)
    drawn = [rng.train_draw(seed, EPOCH, sample, shape, cfg.train.caption_drop) for sample in range(COUNT)]
    values["draws.drop"] = np.array([draw.drop_caption for draw in drawn])
    values["draws.t"] = np.array([draw.t for draw in drawn], np.float32)
    values["draws.latent_eps"], values["draws.noise"] = drawn[SAMPLE].latent_eps, drawn[SAMPLE].noise
    values["draws.val_latent_eps"], values["draws.val_noise"] = rng.val_draw(seed, SEEN, SAMPLE, shape)


def full_draws(values: dict, given: dict[str, np.ndarray]) -> None:
    """Samples, drops and times of the benchmark's training set: a first batch, and where epochs begin."""
    places = [divmod(position, TRAIN_SAMPLES) for position in given["full.positions"].tolist()]
    orders = {epoch: rng.order(FULL_SEED, epoch, TRAIN_SAMPLES) for epoch in {epoch for epoch, _ in places}}
    samples = [(epoch, int(orders[epoch][i])) for epoch, i in places]
    drawn = [rng.train_draw(FULL_SEED, epoch, sample, (2,), Config().train.caption_drop) for epoch, sample in samples]
    values["full.sample"] = np.array([sample for _, sample in samples])
    values["full.drop"] = np.array([draw.drop_caption for draw in drawn])
    values["full.t"] = np.array([draw.t for draw in drawn], np.float32)


def inputs_of(name: str, cfg: Config) -> dict:
    """What a value is computed from, for machines; places.toml tells more."""
    seed = cfg.train.seed
    rate = cfg.train.caption_drop
    if name.startswith("draws.order."):
        return {"seed": seed, "epoch": int(name.rpartition(".")[2]), "count": COUNT}
    if name in ("draws.drop", "draws.t"):
        return {"seed": seed, "epoch": EPOCH, "count": COUNT, "rate": rate}
    if name in ("full.sample", "full.drop", "full.t"):
        return {"seed": FULL_SEED, "count": TRAIN_SAMPLES, "rate": rate}
    streams = {"draws.latent_eps": 2, "draws.noise": 3, "draws.val_latent_eps": 4, "draws.val_noise": 5}
    if name not in streams:
        return {}
    clock = {"evaluation": SEEN} if ".val_" in name else {"epoch": EPOCH}
    return {"seed": seed, **clock, "sample": SAMPLE, "shape": list(cfg.model.latent_shape), "stream": streams[name]}
