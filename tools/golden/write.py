"""Recording the golden values anew: golden.safetensors, index.json and the small data set beside them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.formats.files import whole, write_whole
from flux_ref.model import parameter_table
from tools.golden import draws, full_size, places, record
from tools.golden.files import CONFIG, DATA, INDEX, VALUES, Golden, Value, checksum
from tools.golden.inputs import inputs, write_data


def write(folder: Path, is_long: bool) -> int:
    """Record all values of DIR/config.toml, the given ones too. Returns the exit code. Raises: Refusal.

    is_long: also those of places.LONG; else they stay as the folder has them.
    """
    cfg = config_file.load(folder / CONFIG)
    given = inputs(cfg)
    recorded = record.record(cfg, given)
    recorded |= {name: record.plain(array) for name, array in long_values(folder, is_long).items()}
    entries = []
    for name, (dtype, array) in recorded.items():
        place = places.place(name)
        about = (place.meaning, *place.kind.tolerances(array, cfg.optim.lr), place.kind.why)
        sources = draws.inputs_of(name, cfg) | full_size.inputs_of(name) | places.inputs_of(name)
        entries.append(asdict(Value(name, list(array.shape), dtype, name in given, *about, sources)))
    with whole(folder / VALUES) as partial:
        partial.write_bytes(save({name: value.array for name, value in recorded.items()}))
    head = {"sha256": checksum(folder / VALUES), "parameters": list(parameter_table(cfg.model))}
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    write_whole(folder / INDEX, json.dumps(head)[:-1] + f', "values": [\n{lines}\n]}}\n')
    shutil.rmtree(folder / DATA, ignore_errors=True)
    with whole(folder / DATA) as partial:
        write_data(partial, given)
    print(f"{folder}: {len(entries)} values, {(folder / VALUES).stat().st_size / 1e3:.0f} kB")
    return 0


def long_values(folder: Path, is_long: bool) -> dict[str, np.ndarray]:
    """The values of places.LONG: computed, or those that the folder holds. {} if it holds none."""
    if is_long:
        return {"full.init.norms": full_size.initial_norms()}
    try:
        golden = Golden(folder)
    except Refusal:
        print("full.init.norms is left out: only golden write --long computes it")
        return {}
    return {value.name: golden.file.read(value.name) for value in golden.values if value.name in places.LONG}
