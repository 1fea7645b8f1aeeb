"""Two real ranks take the step of the golden values ranks.*. Rank 0 writes what they computed."""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from flux_ref import cli, config_file, ranks, trainer
from flux_ref.trainer import Health
from tools.golden import training
from tools.golden.files import CONFIG, DATA, Golden
from tools.golden.training import Replay


def main(golden, out):
    """golden: the folder of the golden values, whose data set is read. out: the file to write."""
    folder = Path(golden)
    places = {"data__train": f"{folder / DATA}/train", "data__val": f"{folder / DATA}/val"}
    cfg = config_file.replace(config_file.load(folder / CONFIG), **training.PARTS, **places)
    world = ranks.start(cfg.parallel)
    state = Replay(cfg, world, Golden(folder).given()).start()
    own, batch = training.batch_of(cfg, training.RANKS_STEP, world.rank, training.RANKS)
    loss, norm = trainer.train_step(state.net, state.opt, batch, Health(world.device), cfg)
    rows = ranks.gather_objects({name: value.tolist() for name, value in own.items()} | {"loss": loss.item()})
    if world.rank == 0:
        values = {f"ranks.{name}": np.array([row[name] for row in rows]) for name in rows[0]}
        values["ranks.mean_loss"] = values["ranks.loss"].mean()
        values["ranks.grad_norm"] = norm.numpy()
        kept = Golden(folder).arrays
        save_file({name: np.asarray(value, kept[name].dtype) for name, value in values.items()}, out)
    return 0


if __name__ == "__main__":  # under torchrun, on devices
    cli.exit_now(main(*sys.argv[1:]))
