"""The golden values: this code computes them, planted mistakes show at the right place, files are written whole."""

import numpy as np
import pytest
from checking import checked
from conftest import script

from flux_ref import config_file
from tools.golden import files, record, training
from tools.golden.check import main
from tools.golden.files import FOLDER, Golden

KEPT = Golden(FOLDER)
read = KEPT.arrays.__getitem__


@pytest.fixture
def agree(tmp_path, capsys):
    """agree(dump): all values of a dump agree with the golden ones."""

    def require(dump: dict[str, np.ndarray]) -> None:
        result = checked(dump, tmp_path, capsys)
        assert result.code == 0 and result.text.startswith(f"{len(dump)} values compared, 0 differ, "), result.text

    return require


def test_replay_agrees_in_every_place(agree):
    """From the data set beside the values, in the order of the index."""
    ours = record.arrays()
    assert list(ours) == [value.name for value in KEPT.values], "type python -m tools.golden.record --write"
    agree(ours)


@pytest.mark.slow
def test_two_real_ranks_agree(tmp_path, capsys):
    """Over gloo, with FSDP2's own mean."""
    done = script("tests/helpers/golden_ranks.py", str(FOLDER), str(tmp_path / "dump"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert main([str(tmp_path / "dump")]) == 0
    assert capsys.readouterr().out.startswith("7 values compared, 0 differ, ")


def test_the_run_shows_what_it_should():
    """A dropped caption, clipped and unclipped steps, epochs that begin in a step, values that are not 0."""
    assert [np.array_equal(text, read("data.empty.t5")) for text in read("batch.t5")] == [False, True]
    clips = [read(f"step{number}.clip_coefficient").item() for number in range(1, training.STEPS + 1)]
    assert min(clips) < 0.9 and clips.count(1) > 1, clips
    assert read("step3.epoch").tolist() == [0, 1] and read("ranks.epoch").tolist() == [[0, 1], [1, 1]]
    zeros = [value.name for value in KEPT.values if not read(value.name).any()]
    assert [name for name in zeros if not name.endswith((".drop", ".epoch"))] == []


def test_every_place_is_used_and_every_value_has_one():
    used = {id(files.row("places", value.name)) for value in KEPT.values}
    assert used == {id(row) for row in files.TABLES["places"].values()}
    assert config_file.load(FOLDER / files.CONFIG).optim.lr == files.RATE
    for value in KEPT.values:
        assert value == files.entry(value.name, value.dtype, read(value.name), value.given)
        assert not any(hint.isupper() for hint in files.hints(value.name))


def test_write_keeps_bits_that_agree_and_takes_those_that_do_not(tmp_path, monkeypatch, capsys):
    factors = {"step1.loss": np.float32(1 + 1e-6), "step2.loss": np.float32(1.5)}

    def recorded():
        found = {}
        for value in KEPT.values:
            array = read(value.name)
            found[value.name] = value.dtype, np.asarray(array * factors.get(value.name, array.dtype.type(1)))
        return found

    monkeypatch.setattr(record, "record", recorded)
    record.write(tmp_path)
    again = Golden(tmp_path)
    assert [name for name in KEPT.arrays if not np.array_equal(again.arrays[name], read(name))] == ["step2.loss"]
    capsys.readouterr()
    assert record.main([]) == 1
    out = capsys.readouterr().out
    assert f"{len(KEPT.values)} values compared, 1 differ, 0 missing, 0 unknown" in out and "step2.loss" in out
