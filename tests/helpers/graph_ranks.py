"""Trains with evaluations in between, eagerly and by graphs, for test_graphs and test_gpu_graph.

    torchrun --nproc-per-node 2 tests/helpers/graph_ranks.py DATA OUT [--section.key=value ...]

On the CPU stand-ins take the place of graphs (stand_in.py).
"""

import contextlib
import os
import sys
from pathlib import Path

import stand_in
import torch
from conftest import MICRO, data_overrides, open_sets, require_identical

from flux_ref import cli, config_file, graphs, ranks, sharding
from flux_ref.evaluate import validation_loss
from flux_ref.pictures.artist import Artist
from flux_ref.trainer import TrainState

STEPS, EVALUATE_EVERY = 8, 2


def everything(state):
    """A copy of this rank's weights, moments and step counts."""
    opt, kept = state.opt, {}
    for name, shard in zip(opt.names, opt.shards):
        kept[name] = shard.detach().clone()
        kept |= {f"{name} {part}": tensor.clone() for part, tensor in opt.adamw.state[shard].items()}
    return kept


def history(cfg, world):
    """STEPS steps from fresh weights with evaluations in between; one more evaluation after the graphs are gone.

    With pictures.every_samples pictures are drawn after each evaluation.

    Nothing is read from the device before the end, so that the host runs ahead as far as it can.
    """
    train_set, val_set = open_sets(cfg, world)
    state = TrainState(sharding.build(cfg, world, seed=3), cfg, world)
    steps = graphs.make_trainer(state, cfg, world)
    steps.warm_up()
    artist = Artist(cfg, world, Path())
    texts = [torch.zeros(train_set.shards.layout.shapes[name]) for name in ("t5", "clip")]
    artist.captions = [""] * cfg.pictures.count
    artist.encoded = [texts] * cfg.pictures.count
    artist.empty = texts
    steps.capture()
    steps.health.restart(0)
    results, validations, pictures = [], [], []
    with contextlib.closing(train_set.feed(0)) as feed:
        for _ in range(STEPS):
            steps.step(feed)
            results.append(torch.stack((steps.health.loss, steps.health.grad_norm)))
            if state.step % EVALUATE_EVERY:
                continue
            validations.append(validation_loss(steps, val_set, state.samples).val_loss_per_timestep)
            if cfg.pictures.every_samples:
                pictures += artist.paint(state.net, lambda place: None)
    steps.close()
    return {
        "results": torch.stack(results).tolist(),
        "validations": validations,
        "afterwards": validation_loss(steps, val_set, state.samples).val_loss_per_timestep,
        "flags": [float(steps.health.step), *steps.health.first_bad.tolist()],
        "state": everything(state),
        "captured": isinstance(steps, graphs.CapturedTrainer),
        "pictures": [latent.cpu().numpy().tobytes() for latent in pictures],
    }


def require_same_history(found, want):
    """Of a captured and an eager one: the same bits."""
    assert found["captured"] and not want["captured"]
    for key in ("results", "validations", "afterwards", "flags", "pictures"):
        assert found[key] == want[key], key
    require_identical(found["state"], want["state"])


def main(data, out, *overrides):
    cfg = config_file.load(
        MICRO, [*data_overrides(Path(data)), *overrides, "--eval.batch=24", "--optim.ema_half_life=60"]
    )
    world = ranks.start(cfg.parallel)
    cfg = config_file.replace(cfg, train__micro_batch=cfg.train.global_batch // world.size // 2 or 1)
    if world.device.type == "cpu":
        stand_in.install()
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    modes = {"eager": "off", "captured": "on"}
    found = {name: history(config_file.replace(cfg, compute__cuda_graphs=mode), world) for name, mode in modes.items()}
    torch.save(found, Path(out) / f"rank_{world.rank}.pt")
    ranks.stop()
    return 0


if __name__ == "__main__":
    cli.exit_now(main(*sys.argv[1:]))
