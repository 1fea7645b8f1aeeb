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
STREAMS = {"draws.latent_eps": 2, "draws.noise": 3, "draws.val_latent_eps": 4, "draws.val_noise": 5}


def draws(values: dict, cfg: Config) -> None:
    """The host generator's words and numbers, and the draws of the run."""
    for name in (f"draws.words.{number}" for number in range(5)):
        seed, stream, sample, epoch, start, count = places.inputs_of(name).values()
        values[name] = rng.words(seed, stream, count, sample=sample, epoch=epoch, start=start)
    values["draws.uniform"] = rng.uniform(values["draws.words.1"])
    values["draws.normal"] = rng.normal(values["draws.words.1"])
    values["draws.name_key"] = np.array(rng.name_key("img_in.weight"), np.uint64)
    for epoch in range(2):
        values[f"draws.order.{epoch}"] = rng.order(cfg.train.seed, epoch, COUNT)
    shape = cfg.model.latent_shape
    pairs = [(EPOCH, sample) for sample in range(COUNT)]
    drawn = train_draws(values, "draws", cfg.train.seed, pairs, shape, cfg.train.caption_drop)
    values["draws.latent_eps"] = drawn[SAMPLE].latent_eps
    values["draws.noise"] = drawn[SAMPLE].noise
    values["draws.val_latent_eps"], values["draws.val_noise"] = rng.val_draw(cfg.train.seed, SEEN, SAMPLE, shape)


def full_draws(values: dict, given: dict[str, np.ndarray]) -> None:
    """Samples, drops and times of the benchmark's training set: a first batch, and where epochs begin."""
    orders = {}
    pairs = []
    for position in given["full.positions"].tolist():
        epoch, i = divmod(position, TRAIN_SAMPLES)
        if epoch not in orders:
            orders[epoch] = rng.order(FULL_SEED, epoch, TRAIN_SAMPLES)
        pairs.append((epoch, int(orders[epoch][i])))
    values["full.sample"] = np.array([sample for _, sample in pairs])
    train_draws(values, "full", FULL_SEED, pairs, (2,), Config().train.caption_drop)


def train_draws(values: dict, place: str, seed: int, pairs: list, shape: tuple, rate: float) -> list[rng.Draw]:
    """The draws of (epoch, sample) pairs. Records which captions are dropped, and t."""
    drawn = [rng.train_draw(seed, epoch, sample, shape, rate) for epoch, sample in pairs]
    values[f"{place}.drop"] = np.array([draw.drop_caption for draw in drawn])
    values[f"{place}.t"] = np.array([draw.t for draw in drawn], np.float32)
    return drawn


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
    if name not in STREAMS:
        return {}
    clock = {"evaluation": SEEN} if ".val_" in name else {"epoch": EPOCH}
    return {"seed": seed, **clock, "sample": SAMPLE, "shape": list(cfg.model.latent_shape), "stream": STREAMS[name]}
