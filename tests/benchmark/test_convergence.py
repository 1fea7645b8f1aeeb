"""The band of the public runs and of your own."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, refusal

from flux_ref import config_file
from flux_ref.benchmark import convergence
from tools.report import band


def test_bands_of_all_batches_are_ordered_and_fall():
    for batch in (512, 700, 1024, 1536, 2048, 2304, 3000, 4096):
        band = convergence.public_band(batch)
        assert list(band.samples) == sorted(set(band.samples)) and band.samples[0] < 600_000
        assert all(low <= mid <= high for low, mid, high in zip(band.low, band.median, band.high))
        assert min(band.spread) >= 0
        assert band.median[0] > 0.65 and 0.584 < band.median[-1] < 0.588
    assert convergence.public_band(511) is None and convergence.public_band(4097) is None


def test_a_batch_predicted_from_its_neighbours_is_what_was_measured(tmp_path):
    """2304's 60 runs, left out, against what 2048 and 4096 say of them."""
    rows = convergence.PUBLIC.read_text().splitlines()
    others = tmp_path / "others.csv"
    others.write_text("\n".join(row for row in rows if not row.startswith("2304")) + "\n")
    guessed, measured = convergence.band(others, 2304, ""), convergence.public_band(2304)
    for samples, loss in zip(measured.samples[3:45], measured.median[3:45]):
        assert guessed.at(samples, "median") == pytest.approx(loss, abs=0.004)


def test_files_that_hold_no_band(tmp_path):
    for name, text in (("a.csv", "global_batch,samples\n1,2\n"), ("b.csv", "\0\0\n1")):
        (tmp_path / name).write_text(text)
    said = [refusal(convergence.band, tmp_path / name, 512, "") for name in ("a.csv", "b.csv", "absent.csv")]
    assert [words for words in said if "band" not in words] == []
    for text in ("", ",".join(convergence.HEADER)):
        (tmp_path / "c.csv").write_text(text)
        cfg = config_file.load(ROOT / "configs/tiny.toml", [f"--eval.band={tmp_path}/c.csv"])
        assert "has no runs of batch 60" in refusal(convergence.of_config, cfg)


@pytest.fixture
def put(tmp_path):
    """put(name, ...) makes the folder of a tiny run that has ended at train.max_samples."""

    def make(name: str, outcome: str = "train.max_samples reached", losses: str = "0.5", overrides=()) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        cfg = config_file.load(ROOT / "configs/tiny.toml", list(overrides))
        (folder / "config.toml").write_text(config_file.dump(cfg))
        records = ('{"samples": 0, "val_loss": 1.0}', f'{{"samples": 60, "val_loss": {losses}}}', "")
        (folder / "eval.jsonl").write_text("\n".join(records))
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


def test_runs_that_make_no_band(put, tmp_path, capsys):
    """Each refusal is one line, and nothing is printed."""
    good, bare = put("good"), put("bare")
    (bare / "config.toml").write_text("")
    (silent := put("silent") / "eval.jsonl").unlink()
    cases = [
        ([put("cut off", outcome="")], "has not reached train.max_samples; leave it out"),
        ([put("missed", overrides=TARGET)], "has not reached its target; leave it out"),
        ([put("stopped", "stopped by SIGTERM")], "outcome.json is damaged"),
        ([put("nan", losses="NaN")], "eval.jsonl line 2 is damaged (val_loss"),
        ([silent.parent], "silent has no eval.jsonl with an evaluation"),
        ([f"{good}/../good"], "is given twice; a run counts once"),
        ([put("shifted", overrides=("--train.timestep_shift=3",))], "good in train.timestep_shift=3.0; make a band of"),
        ([bare], "that a run wrote"),
        ([tmp_path], "holds no run"),
        (["--out"], "unrecognized arguments: --out"),
    ]
    for more, expected in cases:
        assert band.main([str(good), *map(str, more)]) == 2, expected
        out, err = capsys.readouterr()
        assert out == "" and expected in err and err.count("\n") == 1, expected
