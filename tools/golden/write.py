"""Recording the golden values anew: golden.safetensors, index.json and the small data set beside them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from safetensors.numpy import save

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats.files import whole, write_whole
from flux_ref.model import parameter_table
from tools.golden import places, record
from tools.golden.files import CONFIG, DATA, FOLDER, INDEX, VALUES, Golden, Value, checksum
from tools.golden.full_size import initial_norms
from tools.golden.inputs import inputs, write_data


def write(folder: Path, is_long: bool) -> int:
    """Record all values of DIR/config.toml, the given ones too. Returns the exit code. Raises: Refusal.

    is_long: also that of places.LONG; else it stays as the folder has it.
    """
    cfg = config_file.load(folder / CONFIG)
    given = inputs(cfg, Golden(FOLDER).given())
    recorded = record.record(cfg, given) | long_value(folder, is_long)
    by_config = of_config(cfg)
    entries = []
    for name, (dtype, array) in recorded.items():
        place = places.place(name)
        about = (place.meaning, *place.kind.tolerances(array, cfg.optim.lr), place.kind.why)
        sources = {key: by_config.get(str(source), source) for key, source in places.inputs_of(name).items()}
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


def long_value(folder: Path, is_long: bool) -> dict[str, record.Recorded]:
    """The value of places.LONG: computed, or what the folder holds. {} if it holds none."""
    if is_long:
        return {places.LONG: record.plain(initial_norms())}
    try:
        file = Golden(folder).file
    except Refusal:
        print(f"{places.LONG} is left out: only golden write --long computes it")
        return {}
    return {name: record.plain(file.read(name)) for name in file.entries if name == places.LONG}
