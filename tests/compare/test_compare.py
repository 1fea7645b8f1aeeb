"""Paired comparisons: the statistics by hand, and the table."""

import json

import pytest
from conftest import MICRO, refusal

from flux_ref import config_file
from tools import compare

FIGURES = [  # losses of A and of B, and B - A, its standard error and p by hand
    ([1, 2, 4], [1.5, 2.5, 5.5], (5 / 6, 1 / 3, 1 - 2.5 / 8.25**0.5)),  # variance 1/3, t = 2.5
    ([1, 3, 9], [1.5, 3.5, 9.5], (0.5, 0, 0)),
]


def test_figures_are_those_by_hand():
    for a, b, want in FIGURES:
        row = compare.paired(a, b)
        assert row == pytest.approx((sum(a) / len(a), sum(b) / len(b), *want), rel=1e-4, abs=1e-9), want


@pytest.fixture
def runs(tmp_path):
    """runs(name, {seed: {samples: loss}}) makes the folders of runs."""

    def make(name, curves, **values):
        for seed, curve in curves.items():
            folder = tmp_path / f"{name}_{seed}"
            folder.mkdir()
            cfg = config_file.replace(config_file.load(MICRO), run__dir=str(folder), train__seed=seed, **values)
            (folder / "config.toml").write_text(config_file.dump(cfg))
            lines = [json.dumps({"samples": at, "val_loss": loss}) + "\n" for at, loss in curve.items()]
            (folder / "eval.jsonl").write_text("".join(lines))
        return [str(tmp_path / f"{name}_{seed}") for seed in curves]

    return make


def test_the_table_pairs_runs_by_their_seeds_at_the_evaluations_that_all_have(runs, capsys):
    """Given in any order; one run has gone further."""
    a = runs("a", {0: {24: 5.0, 36: 1.0}, 7: {24: 6.0, 36: 2.0}, 3: {24: 5.0, 36: 4.0, 48: 9.0}})
    b = runs("b", {7: {24: 5.0, 36: 2.5}, 3: {24: 4.0, 36: 5.5}, 0: {24: 4.5, 36: 1.5}}, optim__lr=1e-5)
    assert compare.main(["--a", *a, "--b", *b]) == 0
    differs, _, *rows = capsys.readouterr().out.splitlines()
    assert differs == "optim.lr is 0.002 in A, 1e-05 in B"
    assert [row.split()[:4] for row in rows] == [
        ["24", "5.33333", "4.50000", "-0.83333"],
        ["36", "2.33333", "3.16667", "+0.83333"],
    ]
    assert rows[1].split()[4:] == ["0.33", "0.13"]


def test_what_makes_no_pairs_is_refused(runs, tmp_path):
    a = runs("a", {0: {24: 1.0}, 1: {24: 1.0}})
    b = runs("b", {0: {24: 1.0}, 1: {36: 1.0}})
    broken = runs("broken", {0: {24: 1.0}, 1: {24: None}})
    for (left, right), words in (
        ((a, b[:1]), "give each a run of each seed"),
        ((a[:1], b[:1]), "at least two"),
        (([*a, a[0]], [*b, b[0]]), "two runs have one train.seed"),
        ((a, b), "share no evaluation"),
        ((broken, b), "eval.jsonl, line 1 is no record with the numbers samples and val_loss; mend it"),
        (([str(tmp_path)], b), "config.toml is no file"),
    ):
        assert words in refusal(compare.main, ["--a", *left, "--b", *right]), words
