"""Figures that commands give with --json."""

import argparse
import json
from pathlib import Path

import pytest

from flux_ref import records

FIGURES = {"loss": 0.5, "none": float("nan"), "list": [float("inf"), 1, "nan"]}
PLAIN = {"loss": 0.5, "none": None, "list": [None, 1, "nan"]}


def parsed(*argv: str) -> Path | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("paths", nargs="*")
    records.json_option(parser)
    return parser.parse_args(argv).json


def test_without_the_option_there_is_only_text(capsys):
    records.show("a table", FIGURES, parsed("in"))
    assert capsys.readouterr() == ("a table\n", "")


def test_a_bare_option_has_stdout_for_itself(capsys):
    records.show("a table", FIGURES, parsed("in", "--json"))
    out, err = capsys.readouterr()
    assert json.loads(out) == PLAIN and "NaN" not in out and err == "a table\n"


def test_a_file_is_written_beside_the_text(capsys, tmp_path):
    path = tmp_path / "new" / "figures.json"
    records.show("a table", FIGURES, parsed("in", f"--json={path}"))
    assert capsys.readouterr() == ("a table\n", "")
    assert json.loads(path.read_text()) == PLAIN
    assert list(path.parent.iterdir()) == [path]


def test_an_input_is_never_taken_for_the_file():
    with pytest.raises(argparse.ArgumentError, match=r"does not end in \.json; put --json last"):
        parsed("--json", "result_0.txt", "result_1.txt")
