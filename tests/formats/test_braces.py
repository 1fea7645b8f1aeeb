"""Braces of shards' names against the package braceexpand, which Energon calls."""

from random import Random

import pytest
from braceexpand import braceexpand

from flux_ref.formats.braces import expand


def test_ranges_and_lists_are_those_of_braceexpand():
    """Limits of every width, with leading zeros and without; the last number has more digits than the first, too."""
    patterns = ["{00..100}", "{0..10}", "{000..109}", "{1..010}", "{9..10}", "{0..0}", "{00..00}", "a{b,c}d{01..3}"]
    random = Random(0)
    for _ in range(300):
        first = random.randrange(200)
        last = first + random.randrange(30)
        patterns.append(f"s{{{first:0{random.randrange(1, 5)}}..{last:0{random.randrange(1, 5)}}}}.tar")
    assert [pattern for pattern in patterns if expand([pattern]) != list(braceexpand(pattern))] == []


def test_braces_around_one_name_are_refused():
    """braceexpand leaves them as they are, as a shell does."""
    for pattern in ("{000001}", "a{}b", "{a}"):
        assert list(braceexpand(pattern)) == [pattern]
        with pytest.raises(ValueError, match="is no list and no range"):
            expand([pattern])
