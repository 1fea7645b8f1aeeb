"""Figures that commands give with --json."""

import argparse
import json
from pathlib import Path

import pytest

from flux_ref import errors
from tools.shared import json_option

FIGURES = {"loss": 0.5, "none": float("nan"), "list": [float("inf"), 1, "nan"]}
PLAIN = {"loss": 0.5, "none": None, "list": [None, 1, "nan"]}


def parsed(*argv: str) -> Path | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("paths", nargs="*")
    json_option.json_option(parser)
    return parser.parse_args(argv).json


def test_figures_go_to_stdout_or_a_file_or_nowhere(capsys, tmp_path):
    json_option.show("a table", FIGURES, parsed("in"))
    assert capsys.readouterr() == ("a table\n", "")
    json_option.show("a table", FIGURES, parsed("in", "--json"))
    out, err = capsys.readouterr()
    assert json.loads(out) == PLAIN and "NaN" not in out and err == "a table\n"
    path = tmp_path / "new" / "figures.json"
    json_option.show("a table", FIGURES, parsed("in", f"--json={path}"))
    assert capsys.readouterr() == ("a table\n", "")
    assert json.loads(path.read_text()) == PLAIN and list(path.parent.iterdir()) == [path]


def test_an_input_is_never_taken_for_the_file():
    with pytest.raises(argparse.ArgumentError, match=r"does not end in \.json; put --json last"):
        parsed("--json", "result_0.txt", "result_1.txt")


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, capsys):
    folder = tmp_path / "figures.json"
    folder.mkdir()
    assert errors.run("plan", lambda _: json_option.give(FIGURES, folder), []) == 2
    err = capsys.readouterr().err
    assert err.startswith("plan: ") and err.count("\n") == 1 and str(folder) in err
    assert list(tmp_path.iterdir()) == [folder]
