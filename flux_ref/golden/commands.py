"""Golden values: what a small run computes at every place, for ports to compare themselves with.

    python -m flux_ref.golden check                          this code against tests/golden
    python -m flux_ref.golden check --from dump.safetensors  a port's values, under the same names; any part of them
    python -m flux_ref.golden write                          record tests/golden anew, after a change that is meant

golden.safetensors holds the values. index.json lists them in order of computation, says what each is and how far a
port may be off. `check` names the first value that differs. Exit codes: 0 all agree, 1 some differ, 2 nothing could be
compared.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from safetensors.numpy import save

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.formats.files import whole, write_whole
from flux_ref.golden import places
from flux_ref.golden.compare import report
from flux_ref.golden.files import CONFIG, INDEX, VALUES, Golden, TensorFile, Value, checksum
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options

FOLDER = Path(__file__).parents[2] / "tests" / "golden"


def check(folder: Path, dump: Path | None) -> int:
    """Compare a dump, or what this code computes. Returns the exit code. Raises: Refusal."""
    golden = Golden(folder)
    if dump:
        file = TensorFile(dump)
        if not file.entries.keys() & {value.name for value in golden.values}:
            raise Refusal(f"{dump}: none of its {len(file.entries)} names is in {folder / INDEX}; see there")
        differ, _, _ = report(golden, file)
        return 1 if differ else 0
    from flux_ref.golden import record  # brings the whole training code

    recorded = record.record(config_file.load(folder / CONFIG), golden.given())
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / VALUES
        path.write_bytes(save({name: value.array for name, value in recorded.items()}))
        return 1 if any(report(golden, TensorFile(path))) else 0


def write(folder: Path) -> int:
    """Record all values anew, the given ones too. Returns the exit code. Raises: Refusal."""
    from flux_ref.golden import record

    cfg = config_file.load(folder / CONFIG)
    recorded = record.record(cfg, record.inputs(cfg))
    entries = []
    for name, (dtype, array) in recorded.items():
        kind = places.place(name).kind
        about = (places.meaning(name), *kind.tolerances(array), kind.why)
        entries.append(asdict(Value(name, list(array.shape), dtype, places.is_given(name), *about)))
    with whole(folder / VALUES) as partial:
        partial.write_bytes(save({name: value.array for name, value in recorded.items()}))
    parameters = [name.removeprefix("weights.") for name in recorded if name.startswith("weights.")]
    head = {"sha256": checksum(folder / VALUES), "parameters": parameters}
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    write_whole(folder / INDEX, json.dumps(head)[:-1] + f', "values": [\n{lines}\n]}}\n')
    print(f"{folder}: {len(entries)} values, {(folder / VALUES).stat().st_size / 1e3:.0f} kB")
    return 0


def main(argv: list[str]) -> int:
    return attempt("golden", lambda: run(argv))


def run(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m flux_ref.golden", __doc__)
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("--from", dest="dump", type=Path, help="a port's values as a safetensors file")
    parser.add_argument("--golden", type=Path, default=FOLDER, metavar="DIR", help="folder of the golden values")
    args = parser.parse_args(argv)
    if args.command == "check":
        return check(args.golden, args.dump)
    if args.dump:
        raise Refusal("--from is for check; write records this code's own values")
    return write(args.golden)
