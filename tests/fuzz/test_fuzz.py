"""Hostile input: 200 inputs of a fixed seed and what was found before; 5,000 new ones in the nightly tests."""

import contextlib
import os
import secrets

import pytest
from fuzz import __main__ as program
from fuzz import corpus, engine, two_hands

from flux_ref.formats import claim

SEED = 15


@pytest.mark.slow  # imports torch anew, and tries 200 inputs
def test_two_hundred_inputs_and_the_corpus():
    """A line of the corpus must still mean the damage that it names."""
    known, wrong = corpus.inputs(), []
    for one, result in engine.tried([*known, *engine.drawn(SEED, 200)]):
        if result.kind not in engine.GOOD:
            wrong.append(f"{result.kind}: {engine.written(one, result.damage)}: {result.detail[-500:]}")
        if result.damage != known.get(one, result.damage):
            wrong.append(f"{engine.written(one, known[one])}, now {result.damage}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_five_thousand_inputs():
    """FUZZ_SEED repeats a night."""
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbits(32)))
    print(f"seed {seed}")
    assert program.run(engine.drawn(seed, 5000)) == 0


@pytest.mark.slow
def test_of_two_hands_one_writes_the_target_whole_and_the_other_says_why(monkeypatch):
    assert two_hands.campaign(20, SEED) == 0
    monkeypatch.setattr(claim, "hold", lambda *_: contextlib.nullcontext())
    assert two_hands.campaign(20, SEED), "without claims a half file is taken for a whole one"


@pytest.mark.nightly
def test_three_hundred_meetings_of_two_hands():
    assert two_hands.campaign(300, int(os.environ.get("FUZZ_SEED", secrets.randbits(32)))) == 0
