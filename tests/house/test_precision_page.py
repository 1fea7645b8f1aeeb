"""docs/precision.md: its rules are accepted, and its tables list every side and preset."""

import re

from conftest import ROOT

from flux_ref.config import ModelConfig
from flux_ref.speed import policy
from flux_ref.speed.sides import SIDES

PAGE = (ROOT / "docs" / "precision.md").read_text()


def test_its_examples_decide_and_its_tables_are_whole():
    model, found = ModelConfig(), 0
    for preset, rule in re.findall(r'precision\.preset = "(\w+)"\nprecision\.rules = \["(.*)"\]', PAGE):
        before = policy.pairs([policy.parse(text) for text in policy.PRESETS[preset]], model)
        after = policy.pairs([policy.parse(text) for text in (*policy.PRESETS[preset], rule)], model)
        found += before != after
    assert found == 3
    bases, presets = (
        re.findall(r"(?m)^\| ([a-z0-9_, ]+) \|", part) for part in re.split("## (?:Presets|Public)", PAGE)[:2]
    )
    assert set(", ".join(bases).split(", ")) >= SIDES.keys()
    assert presets == ["preset", *policy.PRESETS]
