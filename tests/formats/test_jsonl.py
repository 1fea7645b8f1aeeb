"""Figures that commands give with --json."""

import argparse
import json
from pathlib import Path

import pytest

from flux_ref import errors
from flux_ref.errors import Refusal
from flux_ref.formats import jsonl
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


DAMAGED = [
    *((bad, "no record of a run") for bad in (b'{"samples": 1, "loss"', b"[" * 100_000, b"\xff\xfe", b"[1]", b"{}")),
    (b'{"loss": 1}', "samples is no finite number"),
    (b'{"samples": -1, "loss": 1}', "no record of a run"),
    (b'{"samples": true, "loss": 1}', "samples is no finite number"),
    (b'{"samples": 1}', "loss is no finite number"),
    *((b'{"samples": 1, "loss": %s}' % bad, "loss is no finite number") for bad in (b"null", b'"0.5"', b"NaN")),
    *((b'{"samples": 1, "loss": %s}' % bad, "loss is no finite number") for bad in (b"-Infinity", b"1" * 400)),
]


def test_a_damaged_line_is_refused_unless_it_is_the_last(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", {"samples": 8, "loss": 0.5}
    before = json.dumps(whole).encode() + b"\n"
    for line, why in DAMAGED:
        path.write_bytes(before + line)
        assert jsonl.records(path, figures=("loss",)) == [whole], line[:40]
        path.write_bytes(before + line + b"\n" + before)
        with pytest.raises(Refusal, match=rf"metrics.jsonl line 2 is damaged \(.*{why}"):
            jsonl.records(path, figures=("loss",))


def test_a_folder_in_place_of_the_file_is_no_empty_file(tmp_path):
    with pytest.raises(Refusal, match=str(tmp_path)):
        jsonl.records(tmp_path)


def test_records_that_are_not_those_of_a_checkpoint_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"samples": 12}\n')
    stamps = jsonl.stamps(tmp_path)
    path.write_text('{"samples": 12}\n{"samples": 24}\n')  # the run went on
    assert jsonl.strangers(tmp_path, stamps) == []
    for content in ("", '{"samples": 13}\n{"samples": 24}\n'):
        path.write_text(content)
        assert jsonl.strangers(tmp_path, stamps) == ["metrics.jsonl"]
    path.unlink()
    assert jsonl.strangers(tmp_path, stamps) == ["metrics.jsonl"]


def test_an_outcome_is_one_of_two(tmp_path):
    assert jsonl.outcome(tmp_path) == ""
    (tmp_path / "outcome.json").write_text('{"outcome": "target reached"}')
    assert jsonl.outcome(tmp_path) == "target reached"
    for text in ('["x"]', "3", "{}", '{"outcome": ""}', '{"outcome": "run.hang_s"}', '{"outcome": null}', "\0"):
        (tmp_path / "outcome.json").write_text(text)
        with pytest.raises(Refusal, match=r"outcome.json is damaged"):
            jsonl.outcome(tmp_path)


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, capsys):
    folder = tmp_path / "figures.json"
    folder.mkdir()
    assert errors.run("plan", lambda _: json_option.give(FIGURES, folder), []) == 2
    err = capsys.readouterr().err
    assert err.startswith("plan: ") and err.count("\n") == 1 and str(folder) in err
    assert list(tmp_path.iterdir()) == [folder]
