"""Run the fuzzer, from the repository's root with PYTHONPATH=.:tests:tests/helpers.

    python -m fuzz TARGET DAMAGE SEED                       one input: the damage and the result
    python -m fuzz --count 5000 [--seed N] [--only TARGET]  many; the last lines are a table of the results
    python -m fuzz --corpus                                 what was found before

Exit code: 0 all inputs were refused or read rightly, 1 some were not (each is printed).
"""

import argparse
import secrets
import time
from collections import Counter

from fuzz import corpus, engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="*", metavar="TARGET DAMAGE SEED")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--corpus", action="store_true")
    args = parser.parse_args()
    if args.input:
        name, damage, seed = args.input
        inputs = [(name, damage, int(seed))]
    else:
        inputs = list(corpus.inputs()) if args.corpus else engine.drawn(args.seed, args.count, args.only)
        print(f"{len(inputs)} inputs" + ("" if args.corpus else f" of seed {args.seed}"), flush=True)
    return run(inputs, verbose=bool(args.input))


def run(inputs: list[engine.Input], verbose: bool = False) -> int:
    """Try the inputs, print what goes wrong and how often each target ended in each result. Returns the exit code."""
    counts = Counter()
    begin = time.monotonic()
    for number, (one, result) in enumerate(engine.tried(inputs), 1):
        counts[one[0], result.kind] += 1
        if verbose or result.kind not in engine.GOOD:
            print(f"{result.kind}: {engine.written(one, result.damage)}\n    {result.detail}", flush=True)
        if number % 250 == 0:
            print(f"{number} of {len(inputs)}, {time.monotonic() - begin:.0f} s", flush=True)
    for (name, kind), count in sorted(counts.items()):
        print(f"{name:17} {kind:17} {count:5}")
    bad = sum(count for (_, kind), count in counts.items() if kind in engine.BAD)
    print(f"{len(inputs)} inputs, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
