"""The fuzzer sees what it looks for: readers with planted defects, one for each result."""

import os
import time
from pathlib import Path

import pytest
from fuzz import engine
from fuzz.engine import Said, Target

from flux_ref.errors import Refusal


def number(folder: Path) -> int:
    return int((folder / "number").read_text())


def refuses(folder: Path) -> int:
    if number(folder) != 7:
        raise Refusal("the number is not 7; write 7")
    return 7


def leaves_a_file(folder: Path) -> int:
    if number(folder) != 7:
        (folder / "left").touch()
    return refuses(folder)


def allocates(folder: Path) -> int:
    return len(bytearray(10**9 * (number(folder) - 6)))


def sleeps(folder: Path) -> int:
    time.sleep(100 * (number(folder) - 7))
    return 7


def says(folder: Path) -> Said:
    return Said(0, "7\n", "") if number(folder) == 7 else Said(2, "", "first line of two\nsecond line\n")


def rings(folder: Path) -> Said:
    return Said(0, "7\n" if number(folder) == 7 else "\x07\n", "")


READERS = {  # a reader of the number 7, which becomes 9 -> the result
    "refuses": (refuses, engine.REFUSED),
    "always 7": (lambda folder: 7, engine.SAME),
    "reads": (number, engine.AS_READ),
    "reads another": (lambda folder: 2 * number(folder) - 7, engine.WRONG),
    "divides": (lambda folder: 2 // (9 - number(folder)), engine.TRACEBACK),
    "sleeps": (sleeps, engine.HANG),
    "allocates": (allocates, engine.MEMORY),
    "leaves a file": (leaves_a_file, engine.LEFTOVER),
    "two lines": (says, engine.UNCLEAR),
    "control characters": (rings, engine.UNCLEAR),
}


def to_nine(folder: Path, random: object) -> str:
    (folder / "number").write_text("9")
    return "7 becomes 9"


def to_seven(folder: Path) -> None:
    (folder / "number").write_text("7")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "LIMIT_S", 0.1)
    before = os.getcwd()
    (tmp_path / "output").touch()
    targets = {name: Target(name, to_seven, {"nine": to_nine}, reader, number) for name, (reader, _) in READERS.items()}
    yield engine.Bench(tmp_path, targets)
    os.chdir(before)


def test_each_result_is_told_from_all_others(bench):
    found = {name: bench.try_input(name, "nine", 1).kind for name in READERS}
    assert found == {name: want for name, (_, want) in READERS.items()}


def test_inputs_follow_from_the_seed():
    assert engine.drawn(1, 50) == engine.drawn(1, 50) != engine.drawn(2, 50)
    assert {one[0] for one in engine.drawn(1, 20, ["config"])} == {"config"}
