"""Reference convergence points and the band of the public runs."""

import json
import math
from pathlib import Path

import pytest
from conftest import ROOT
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from flux_ref import config_file
from flux_ref.benchmark import convergence
from flux_ref.benchmark.convergence import Point
from flux_ref.errors import Refusal
from flux_ref.report import band


def test_points_and_what_lies_between_are_the_official_checkers():
    for ruleset in ("5.1.0", "6.0.0", "6.1.0"):
        official = RCP_Checker("training", ruleset, "flux1", False)
        assert {p.global_batch: p.mean_samples for p in convergence.points(ruleset)} == {
            record["BS"]: record["RCP Mean"] for record in official.rcp_data.values()
        }
        pruned = {record["BS"]: record for record in official.pruned_rcp_data.values()}
        assert {p.global_batch for p in convergence.prune(convergence.points(ruleset))} == set(pruned)
        for batch in (512, 600, 1024, 1536, 2048, 2304, 3000, 4096):
            low = official._find_top_min_rcp(batch, "pruned_rcps")
            high = official._find_bottom_max_rcp(batch, "pruned_rcps")
            record = pruned.get(batch) or official._create_interp_rcp(batch, low, high)[1]
            assert convergence.samples_to_target(ruleset, batch) == pytest.approx(record["RCP Mean"]), (ruleset, batch)
        assert convergence.samples_to_target(ruleset, 256) == convergence.samples_to_target(ruleset, 512)
        assert convergence.samples_to_target(ruleset, 4097) is None


def test_pruning_leaves_the_lower_edge():
    def point(batch: int, mean: float) -> Point:
        return Point(batch, 1e-4, 0, mean)

    found = [point(1, 9.0), point(2, 5.0), point(3, 6.5), point(4, 7.0), point(5, 9.0)]
    assert [p.global_batch for p in convergence.prune(found)] == [2, 4, 5]
    assert convergence.prune([]) == []


def test_own_points(tmp_path):
    own = tmp_path / "points.json"
    knobs = {"opt_base_learning_rate": 1e-3, "opt_learning_rate_warmup_steps": 5}
    entry = {"Benchmark": "flux1", "BS": 96, "Hyperparams": knobs, "samples to converge": [40, 10, 20, 30]}
    own.write_text(json.dumps({"a": entry}))
    assert convergence.points("6.0.0", own) == [Point(96, 1e-3, 5, 25.0)]
    for text in ("", "[1]", "{", '{"a": {"BS": 96}}', '{"a": 3}', "{}", "[" * 100_000, "\0"):
        own.write_text(text)
        with pytest.raises(Refusal, match=r"points.json is no file of reference convergence points"):
            convergence.points("6.0.0", own)


BAD_VALUES = {
    "Benchmark": (None, "bert", 3),
    "BS": (None, "abc", 0, -512, 512.5, True, 10**400),
    "samples to converge": (None, [], [1, 2], [1, 2, math.nan], [1, 2, math.inf], [0, 1, 2], ["a"] * 3, 3),
    "opt_base_learning_rate": (None, 0, "1e-3", math.nan),
    "opt_learning_rate_warmup_steps": (None, -1, [], math.nan),
}


def test_a_bad_point_is_refused_by_its_key(tmp_path):
    path = tmp_path / "points.json"
    knobs = {"opt_base_learning_rate": 1e-3, "opt_learning_rate_warmup_steps": 5}
    for key, values in BAD_VALUES.items():
        for value in values:
            entry = {"Benchmark": "flux1", "BS": 96, "Hyperparams": dict(knobs), "samples to converge": [10, 20, 30]}
            (entry["Hyperparams"] if key in knobs else entry)[key] = value
            path.write_text(json.dumps({"mine": entry}))
            with pytest.raises(Refusal, match=rf"points.json is no file.*'{key}' of 'mine' must be"):
                convergence.points("6.0.0", path)


def test_bands_of_all_batches_are_ordered_and_fall():
    for batch in (512, 700, 1024, 1536, 2048, 2304, 3000, 4096):
        band = convergence.public_band(batch)
        assert list(band.samples) == sorted(set(band.samples)) and band.samples[0] < 600_000
        assert all(low <= mid <= high for low, mid, high in zip(band.low, band.median, band.high))
        assert min(band.spread) >= 0
        assert band.median[0] > 0.65 and 0.584 < band.median[-1] < 0.588
    assert convergence.public_band(511) is None and convergence.public_band(4097) is None


def test_a_band_between_two_batches_lies_between_them():
    below, own, above = (convergence.public_band(batch) for batch in (1024, 1448, 2048))
    for samples in (1e6, 3e6, 8e6):
        assert below.at(samples, "median") < own.at(samples, "median") < above.at(samples, "median")


def test_a_batch_predicted_from_its_neighbours_is_what_was_measured(tmp_path):
    """2304's 60 runs, left out, against what 2048 and 4096 say of them."""
    rows = convergence.PUBLIC.read_text().splitlines()
    others = tmp_path / "others.csv"
    others.write_text("\n".join(row for row in rows if not row.startswith("2304")) + "\n")
    guessed, measured = convergence.band(others, 2304, ""), convergence.public_band(2304)
    for samples, loss in zip(measured.samples[3:45], measured.median[3:45]):
        assert guessed.at(samples, "median") == pytest.approx(loss, abs=0.004)


def test_bands_that_are_none(tmp_path):
    for name, text in (("a.csv", "global_batch,samples\n1,2\n"), ("b.csv", "\0\0\n1"), ("absent.csv", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(Refusal, match=r"is no band"):
            convergence.band(tmp_path / name, 512, "")


def test_what_is_unlike_the_reference_is_said():
    bare = [(path.stem, [], None) for path in sorted((ROOT / "configs").glob("*.toml"))]
    cases = [
        *bare,
        ("schnell_gbs512", ["--optim.lr=8e-4"], "optim.lr=0.0008"),
        ("schnell_gbs512", ["--optim.lr=2e-5"], "optim.lr=2e-05"),
        ("schnell_gbs4096", ["--optim.warmup_steps=0"], "optim.warmup_steps=0"),
        ("schnell_gbs4096", ["--optim.warmup_steps=0", "--optim.lr=1.85e-4"], None),  # as in the public runs
        ("schnell_gbs512", ["--optim.warmup_steps=16000"], "optim.warmup_steps=16000"),
        ("schnell_gbs2048", ["--train.global_batch=8192", "--train.micro_batch=0"], "largest reference"),
        ("schnell_gbs2048", ["--train.global_batch=2304", "--train.micro_batch=0"], "nearest 2048"),
        ("tiny", ["--optim.lr=1"], None),  # another model: nothing is known of it
    ]
    wrong = []
    for name, overrides, expected in cases:
        complaints = convergence.unlike_reference(config_file.load(ROOT / "configs" / f"{name}.toml", overrides))
        if expected not in complaints[0] if complaints and expected else bool(complaints) != bool(expected):
            wrong.append((name, overrides, complaints))
    assert not wrong and len(bare) > 3


@pytest.fixture
def put(tmp_path):
    """put(name, ...) makes the folder of a tiny run that has ended at train.max_samples."""

    def make(name: str, outcome: str = "train.max_samples reached", losses: str = "0.5", overrides=()) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text(
            config_file.dump(config_file.load(ROOT / "configs/tiny.toml", list(overrides)))
        )
        (folder / "eval.jsonl").write_text(
            f'{{"samples": 0, "val_loss": 1.0}}\n{{"samples": 60, "val_loss": {losses}}}\n'
        )
        if outcome:
            (folder / "outcome.json").write_text(json.dumps({"outcome": outcome}))
        return folder

    return make


TARGET = ("--eval.target=0.6",)


def test_runs_that_came_to_their_end_make_a_band(put, tmp_path, capsys):
    runs = [str(put("one")), str(put("two", losses="0.7"))]
    assert band.main(runs) == 0
    (tmp_path / "own.csv").write_text(capsys.readouterr().out)
    made = convergence.band(tmp_path / "own.csv", 60, "own")
    assert (made.samples, made.low, made.median, made.high) == ((0, 60), (1.0, 0.5), (1.0, 0.6), (1.0, 0.7))
    assert band.main([str(put("three", "target reached", overrides=TARGET))]) == 0


def test_runs_that_make_no_band(put, capsys):
    good = str(put("good"))
    cases = [
        ({"outcome": ""}, "has not reached train.max_samples; a band is made of runs that reached their target or"),
        ({"outcome": "", "overrides": TARGET}, "has not reached its target; a band"),
        ({"overrides": TARGET}, "has not reached its target; a band"),  # it ended at train.max_samples
        ({"outcome": "stopped by SIGTERM"}, "outcome.json is damaged"),
        *(({"losses": bad}, "eval.jsonl line 2 is damaged (val_loss") for bad in ("NaN", '"low"', "null", "Infinity")),
    ]
    for i, (make, expected) in enumerate(cases):
        assert band.main([good, str(put(f"bad_{i}", **make))]) == 2, make
        out, err = capsys.readouterr()
        assert out == "" and expected in err and err.count("\n") == 1, make


def test_what_is_no_run_is_refused(put, capsys, monkeypatch):
    run = put("run")
    monkeypatch.chdir(run)  # where an empty name would be one
    bare = put("bare")
    (bare / "config.toml").write_text("")
    for argv, said in (
        ([], "give run folders, such as runs/tiny"),
        ([""], "an empty name is no run"),
        (["--out", "x", str(run)], "--out holds no run"),
        ([str(run), f"{run}/../run"], "is given twice; a run counts once"),
        ([str(bare)], "config.toml lacks"),
    ):
        assert band.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and err.count("\n") == 1
    assert band.main(["--help"]) == 0 and "RUN [RUN ...]" in capsys.readouterr().out
