"""Mistakes planted in this code. The check names the first wrong value, and the mistake among those known there."""

import re

import numpy as np
import pytest
from checking import checked
from planted import Mistake, mistakes

from flux_ref import config_file
from tools.golden import record, training
from tools.golden.files import CONFIG, FOLDER, Golden

CFG = config_file.load(FOLDER / CONFIG)
GIVEN = Golden(FOLDER).given()
FIRST = 2  # whoever looks for a mistake reads the first sentences
SHARE = 0.75  # of all planted mistakes stand among the first sentences
SECTIONS = {  # the longest beginning of a value's name -> the part of record.py that computes the value
    "draws": "draws",
    "full": "full_draws",
    "clip": "schedules",
    "schedule": "schedules",
    "init": "init",
    "ranks": "on_two_ranks",
    "val": "validation",
    "bf16.only": "operations",
    "bf16": "bf16",
    "fp8.edge": "fp8_edges",
    "fp8.scales": "fp8_edges",
    "fp8.order": "fp8_order",
    "fp8": "fp8_linear",
    "formats.linear": "presets",
    "formats": "formats",
    "": "training",
}
FEW = 16  # one in this many is planted in the default suite


def dump_of(mistake: Mistake) -> dict[str, np.ndarray]:
    """What a port with this mistake computes in one section, up to the step. The section bf16 needs the batch."""
    section = next(section for beginning, section in SECTIONS.items() if mistake.place.startswith(beginning))
    needed = (section, "training") if section == "bf16" else (section,)
    step = re.match(r"step(\d)", mistake.place)
    with pytest.MonkeyPatch.context() as patch:
        for other in {*SECTIONS.values(), "rope", "blocks"}.difference(needed):
            patch.setattr(record, other, lambda *args: None)
        patch.setattr(training, "STEPS", int(step[1]) if step else 1)
        mistake.plant(patch)
        recorded = record.record(CFG, GIVEN)
    prefix = "" if section == "training" else mistake.place.partition(".")[0]
    return {name: value.array for name, value in recorded.items() if name.startswith(prefix)}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("is_few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_planted_mistakes_are_found_where_they_are(is_few, tmp_path, capsys):
    planted = [mistake for number, mistake in enumerate(mistakes()) if (number % FEW == 0) == is_few]
    complaints = []
    among_first = 0
    for mistake in planted:
        result = checked(dump_of(mistake), tmp_path, capsys)
        known = re.findall(r"^    - (.*)$", result.text, re.M)
        is_known = any(mistake.cause in words for words in known)
        if (result.code, result.first, is_known) != (1, mistake.place, True):
            complaints.append(f"{mistake}\n{result.text[:1500]}\n")
        among_first += any(mistake.cause in words for words in known[:FIRST])
    assert planted and not complaints, f"{len(complaints)} of {len(planted)}\n" + "\n".join(complaints)
    assert among_first >= SHARE * len(planted)


def test_decay_after_the_update_is_accepted(tmp_path, capsys):
    """Both orders differ by less than rounding in another order may."""
    change = ("self.adamw.step()", '__import__("planted").decay_after(self)')
    after = Mistake(f"step{training.STEPS}.weights", "", "optim.ShardedAdamW.step", [change])
    result = checked(dump_of(after), tmp_path, capsys)
    assert result.code == 0, result.text
