"""Making the shapes data set, as `python -m tools.prepare shapes` does."""

import resource
import time
from collections import Counter

import pytest
from conftest import MICRO
from tqdm import tqdm

from flux_ref import config_file, shards, toy
from flux_ref.errors import Fault
from tools.prepare import commands as prepare
from tools.prepare import job

ARGS = ["shapes", "--config", str(MICRO)]
TRAIN, VAL = 50, 45  # samples of MICRO


def metas(folder):
    """What the json of every sample says."""
    stored = shards.ShardSet(folder, shards.layout(config_file.load(MICRO).model))
    stored.open()
    return [stored.read(i, stored.layout.rows()) for i in range(len(stored))]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "set"
    assert prepare.main([*ARGS, "--out", str(folder)]) == 0
    return folder


def test_counts_keys_and_timesteps_and_training_never_shows_what_validation_asks_for(made):
    train, val = metas(made / "train"), metas(made / "val")
    assert [meta.key for meta in train] == [f"train_{i:08d}" for i in range(TRAIN)]
    assert {meta.timestep for meta in train} == {None}
    assert Counter(meta.timestep for meta in val) == Counter(k % 8 for k in range(VAL))
    held_out = {drawing.caption for drawing in toy.held_out()}
    assert {meta.caption for meta in val} <= held_out and not {meta.caption for meta in train} & held_out


def test_an_interrupted_set_is_never_visible_and_the_next_call_succeeds(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "to_bf16_bits", interrupt)
        assert prepare.main([*ARGS, "--out", str(tmp_path / "set")]) == 130
    assert not any(tmp_path.iterdir())
    assert prepare.main([*ARGS, "--out", str(tmp_path / "set")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_disk_that_takes_no_more_is_told_with_the_file_and_leaves_nothing(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        assert prepare.main([*ARGS, "--out", str(tmp_path / "set")]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert f"prepare: {tmp_path}/" in said and "File too large; free its disk" in said
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_made_is_refused_and_leaves_all_as_it_was(made, tmp_path, capsys):
    none = 'data.kind = "shapes"\ndata.train_count = 50'
    for name, line, other in (("few", "text_tokens = 9", "text_tokens = 7"), ("none", none, "data.train_count = 0")):
        (tmp_path / f"{name}.toml").write_text(MICRO.read_text().replace(line, other))
    before, wrong = {path: path.stat().st_mtime_ns for path in made.rglob("*")}, []
    for options, words in (
        (["--out", str(made)], "exists"),
        (["--config", str(tmp_path / "none.toml")], "data.train_count=0 and data.val_count=45 must both be at least 1"),
        (["--config", str(tmp_path / "few.toml")], "model.text_tokens"),
    ):
        code, said = prepare.main([*ARGS, "--out", str(tmp_path / "set"), *options]), capsys.readouterr().err
        wrong += [said] * (code != 2 or words not in said)
    assert wrong == [] and not (tmp_path / "set").exists()
    assert before == {path: path.stat().st_mtime_ns for path in made.rglob("*")}


def test_an_error_of_one_thread_ends_the_others():
    finished = []

    def task(item: int, advance: job.Advance) -> None:
        if item:
            raise Fault("broken")
        for _ in range(500):
            advance(1)
            time.sleep(0.01)
        finished.append(item)

    with pytest.raises(Fault):
        job.each(task, [0, 1], 2, tqdm(disable=True))
    assert not finished
