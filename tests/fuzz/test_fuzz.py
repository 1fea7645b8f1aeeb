"""Hostile input: 200 inputs of a fixed seed and what was found before; 5,000 new ones in the nightly tests."""

import os
import secrets

import pytest
from fuzz import __main__ as program
from fuzz import corpus, engine

SEED = 15


def offenders(inputs: list[engine.Input]) -> list[str]:
    return [
        f"{result.kind}: {engine.written(one, result.damage)}: {result.detail[-500:]}"
        for one, result in engine.tried(inputs)
        if result.kind not in engine.GOOD
    ]


@pytest.mark.slow  # imports torch anew, and tries 200 inputs
def test_two_hundred_inputs_and_the_corpus():
    """A line of the corpus must still mean the damage that it names."""
    known = corpus.inputs()
    wrong, changed = offenders(engine.drawn(SEED, 200)), []
    for one, result in engine.tried(known):
        if result.kind not in engine.GOOD:
            wrong.append(f"{result.kind}: {engine.written(one, result.damage)}: {result.detail[-500:]}")
        if result.damage != known[one]:
            changed.append(f"{engine.written(one, known[one])}, now {result.damage}")
    assert not wrong and not changed, "\n".join(wrong + changed)


@pytest.mark.nightly
def test_five_thousand_inputs():
    """FUZZ_SEED repeats a night."""
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbits(32)))
    print(f"seed {seed}")
    assert program.run(engine.drawn(seed, 5000)) == 0
