"""Golden values: what a small run computes at every place, for ports to compare themselves with.

    python -m tools.golden check                          this code against tests/golden
    python -m tools.golden check --from dump.safetensors  a port's values, under the same names; any part of them
    python -m tools.golden write                          record tests/golden anew, after a change that is meant

--long takes the norms of the 776 initial tensors of FLUX.1-schnell in; drawing them took 70 seconds on a server CPU.
golden.safetensors holds the values. index.json lists them in order of computation, says what each is and how far a
port may be off. `check` tells what the first value that differs is instead and which mistakes are known there, and
lists the others. `check --from` needs Python and numpy only. Exit codes: 0 all given values agree, 1 some differ, 2
nothing could be compared, 3 with --complete: names are missing or unknown.
"""

import tempfile
from argparse import Namespace
from fnmatch import fnmatchcase
from pathlib import Path

from flux_ref import config_file, errors
from flux_ref.errors import Refusal
from flux_ref.run.options import Options
from tools.golden import places
from tools.golden.compare import report
from tools.golden.files import CONFIG, FOLDER, INDEX, VALUES, Golden
from tools.golden.tensor_file import TensorFile


def check(args: Namespace) -> int:
    """Compare a dump, or what this code computes. Returns the exit code. Raises: Refusal."""
    golden = Golden(args.golden)
    index = args.golden / INDEX
    asked = [value.name for value in golden.values if fnmatchcase(value.name, args.only)]
    if not asked:
        raise Refusal(f"--only={args.only!r} matches no name in {index}; give a pattern such as 'step1.*'")
    if args.dump:
        file = TensorFile(args.dump)
        if not any(name in file.entries for name in asked):
            raise Refusal(f"{args.dump}: none of its {len(file.entries)} names is in {index}; see there")
        differ, missing, unknown = report(golden, file, args.only, args.all)
        return 1 if differ else 3 if args.complete and (missing or unknown) else 0
    from safetensors.numpy import save  # check --from needs numpy only, neither safetensors nor torch

    from tools.golden import full_size, record

    recorded = record.record(config_file.load(golden.folder / CONFIG), golden.given())
    if args.long:
        recorded[places.LONG] = record.plain(full_size.initial_norms())
    golden.values = [value for value in golden.values if args.long or value.name != places.LONG]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / VALUES
        path.write_bytes(save({name: value.array for name, value in recorded.items()}))
        return 1 if any(report(golden, TensorFile(path), args.only, args.all)) else 0


def main(argv: list[str]) -> int:
    return errors.run("golden", run, argv)


def run(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.golden", __doc__)
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("--long", action="store_true", help="also the initial norms of FLUX.1-schnell")
    parser.add_argument("--from", dest="dump", type=Path, help="a port's values as a safetensors file")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="check: compare these names, such as 'grad.*'")
    parser.add_argument("--complete", action="store_true", help="check: exit with 3 if names are missing or unknown")
    parser.add_argument("--all", action="store_true", help="check: cut no list of names")
    parser.add_argument("--golden", type=Path, default=FOLDER, metavar="DIR", help="folder of the golden values")
    args = parser.parse_args(argv)
    if args.command == "check":
        return check(args)
    if args.complete or args.all or args.only != "*":
        raise Refusal("--only, --complete and --all are for check; leave them out")
    if args.dump:
        raise Refusal("--from is for check; write records this code's own values")
    from tools.golden.write import write  # brings torch

    return write(args.golden, args.long)
