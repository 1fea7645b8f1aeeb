"""The fuzzer finds defects: mended ones are put back one by one, and a hostile input shows each."""

import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from fuzz import engine

from flux_ref.formats import braces, checkpoint_files, checkpoint_reader
from flux_ref.run import weight_files

MOST = 5000  # inputs


def digits_of_any_script(patch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint_files, checkpoint_reader):
        patch.setattr(module, "NAME", re.compile(r"step_(\d{9})"))


def tensors_in_two_files(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(dict):
        def __contains__(self, name: object) -> bool:
            return False

    sound = weight_files.Tensors.__init__

    def forgetful(self: weight_files.Tensors, files: list[Path]) -> None:
        super(weight_files.Tensors, self).__setattr__("shapes", {})
        sound(self, files)

    def setattr_(self: weight_files.Tensors, name: str, value: object) -> None:
        super(weight_files.Tensors, self).__setattr__(name, Forgetful(value) if name == "files" else value)

    patch.setattr(weight_files.Tensors, "__init__", forgetful)
    patch.setattr(weight_files.Tensors, "__setattr__", setattr_, raising=False)


def endless_braces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(braces, "MOST", 10**15)


def any_kind_of_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_reader, "_require_kinds", lambda *parts: None)


DEFECTS: dict[Callable, str] = {  # the target that meets it
    digits_of_any_script: "checkpoints",
    tensors_in_two_files: "unlisted",
    endless_braces: "energon",
    any_kind_of_number: "checkpoints",
}


@pytest.mark.nightly
def test_a_defect_that_is_put_back_is_found(tmp_path, monkeypatch):
    here, targets, missed = os.getcwd(), engine.targets(), []
    for number, (plant, name) in enumerate(DEFECTS.items()):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "output").touch()
        bench = engine.Bench(root, targets)
        try:
            with monkeypatch.context() as patch:
                plant(patch)
                inputs = enumerate(engine.drawn(number, MOST, [name]), 1)
                results = ((count, one, bench.try_input(*one)) for count, one in inputs)
                found = list(islice((r for r in results if r[2].kind not in engine.GOOD), 1))
        finally:
            os.chdir(here)
        for count, one, result in found:
            print(f"{plant.__name__}: {result.kind} by input {count}: {engine.written(one, result.damage)}")
        missed += [] if found else [plant.__name__]
    assert missed == []
