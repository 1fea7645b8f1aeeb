"""Recording the golden values anew: golden.safetensors, index.json and the small data set beside them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.formats.files import whole, write_whole
from flux_ref.model import parameter_table
from tools.golden import places, record
from tools.golden.files import CONFIG, DATA, FOLDER, INDEX, VALUES, Golden, Value, checksum
from tools.golden.full_size import initial_norms
from tools.golden.inputs import inputs, write_data
from tools.golden.instead import differs


def write(folder: Path, is_long: bool) -> int:
    """Record all values of DIR/config.toml, the given ones too. Returns the exit code. Raises: Refusal.

    What does not depend on the config is taken from FOLDER: operands, and without is_long the value of places.LONG.
    A value that agrees with FOLDER's within its tolerance keeps FOLDER's bits.
    """
    cfg = config_file.load(folder / CONFIG)
    kept = Golden(FOLDER)
    given = inputs(cfg, kept.given())
    recorded = record.record(cfg, given)
    recorded[places.LONG] = record.plain(initial_norms() if is_long else kept.file.read(places.LONG))
    by_config = of_config(cfg)
    entries = []
    arrays = {}
    for name, (dtype, array) in recorded.items():
        place = places.place(name)
        arrays[name] = array = _steady(array, name, kept, *place.kind.tolerances(array, cfg.optim.lr))
        about = (place.meaning, *place.kind.tolerances(array, cfg.optim.lr), place.kind.why)
        sources = {key: by_config.get(str(source), source) for key, source in places.inputs_of(name).items()}
        entries.append(asdict(Value(name, list(array.shape), dtype, name in given, *about, sources)))
    with whole(folder / VALUES) as partial:
        partial.write_bytes(save(arrays))
    head = {"sha256": checksum(folder / VALUES), "parameters": list(parameter_table(cfg.model))}
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    write_whole(folder / INDEX, json.dumps(head)[:-1] + f', "values": [\n{lines}\n]}}\n')
    shutil.rmtree(folder / DATA, ignore_errors=True)
    with whole(folder / DATA) as partial:
        write_data(partial, given)
    print(f"{folder}: {len(entries)} values")
    return 0


def _steady(array: np.ndarray, name: str, kept: Golden, atol: float, rtol: float) -> np.ndarray:
    """The recorded array if the new one agrees with it: another kind of CPU rounds otherwise."""
    if name not in kept.file.entries:
        return array
    old = kept.file.read(name)
    is_same = old.shape == array.shape and old.dtype == array.dtype and not differs(array, old, atol, rtol).any()
    return old if is_same else array


def of_config(cfg: Config) -> dict[str, object]:
    """What stands in the table of inputs for "$NAME"."""
    names = list(parameter_table(Config().model))
    return {
        "$seed": cfg.train.seed,
        "$rate": cfg.train.caption_drop,
        "$shape": list(cfg.model.latent_shape),
        "$schnell": names,
        "$double": [name.removeprefix("double_blocks.0.") for name in names if name.startswith("double_blocks.0.")],
        "$single": [name.removeprefix("single_blocks.0.") for name in names if name.startswith("single_blocks.0.")],
    }
