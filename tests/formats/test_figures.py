"""Figures that commands give with --json."""

import argparse
import json

from tools import figures


def test_figures_go_to_a_file_whole_and_null_stands_for_what_is_not_finite(capsys, tmp_path):
    parser = argparse.ArgumentParser()
    figures.json_option(parser)
    path = tmp_path / "new" / "figures.json"
    found = {"loss": 0.5, "none": float("nan"), "list": [float("inf"), 1, "nan"]}
    for argv in ([], [f"--json={path}"]):
        figures.show("a table", found, parser.parse_args(argv).json)
    assert capsys.readouterr() == ("a table\na table\n", "")
    assert json.loads(path.read_text()) == {"loss": 0.5, "none": None, "list": [None, 1, "nan"]}
    assert list(path.parent.iterdir()) == [path]
