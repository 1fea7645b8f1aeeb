"""Making the shapes data set, as `python -m flux_ref.prepare shapes` does."""

from collections import Counter

import numpy as np
import pytest
from conftest import MICRO

from flux_ref import config_file
from flux_ref.formats import shards
from flux_ref.prepare import commands as prepare
from flux_ref.toy import shapes

ARGS = ["shapes", "--config", str(MICRO), "--train", "40", "--val", "32"]


def metas(folder):
    """What the json of every sample says."""
    found = shards.ShardSet(folder, shards.layout(config_file.load(MICRO).model))
    found.open()
    rows = {name: np.empty(shape, np.uint16) for name, shape in found.layout.shapes.items()}
    return [found.read(i, rows) for i in range(len(found))]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "set"
    assert prepare.main([*ARGS, "--out", str(folder)]) == 0
    return folder


def test_counts_keys_and_timesteps(made):
    train, val = metas(made / "train"), metas(made / "val")
    assert [meta.key for meta in train] == [f"train_{i:08d}" for i in range(40)]
    assert {meta.timestep for meta in train} == {None}
    assert Counter(meta.timestep for meta in val) == {k: 4 for k in range(8)}


def test_training_never_shows_what_validation_asks_for(made):
    held_out = {drawing.caption for drawing in shapes.held_out()}
    assert {meta.caption for meta in metas(made / "val")} <= held_out
    assert not {meta.caption for meta in metas(made / "train")} & held_out


def test_the_same_set_is_made_every_time(made, tmp_path):
    prepare.main([*ARGS, "--out", str(tmp_path / "again")])
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    assert len(files) == 4
    assert all((made / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)


def test_an_existing_folder_is_refused_and_left_alone(made, capsys):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    assert prepare.main([*ARGS, "--out", str(made)]) == 2
    assert "exists" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in made.rglob("*")}


def test_an_interrupted_set_is_never_visible_and_the_next_call_succeeds(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "to_bf16_bits", interrupt)
        assert prepare.main([*ARGS, "--out", str(tmp_path / "set")]) == 130
    assert not any(tmp_path.iterdir())
    (tmp_path / ".set.partial" / "train").mkdir(parents=True)  # as a kill leaves it
    assert prepare.main([*ARGS, "--out", str(tmp_path / "set")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("option", ["--train=0", "--train=-5", "--val=0"])
def test_a_set_of_nothing_is_refused(tmp_path, capsys, option):
    assert prepare.main([*ARGS, "--out", str(tmp_path / "set"), option]) == 2
    assert "must both be at least 1" in capsys.readouterr().err and not (tmp_path / "set").exists()


def test_a_model_that_shapes_cannot_feed_is_refused(tmp_path, capsys):
    (tmp_path / "few.toml").write_text(MICRO.read_text().replace("text_tokens = 9", "text_tokens = 7"))
    assert prepare.main(["shapes", "--config", str(tmp_path / "few.toml"), "--out", str(tmp_path / "set")]) == 2
    assert "model.text_tokens" in capsys.readouterr().err
