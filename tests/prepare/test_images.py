"""From pictures and captions to shards, by the command: what is stored, restarts, ranks, the set of validation."""

import contextlib
import itertools

import pytest
import torch
from conftest import MICRO, script, the_line
from peer_net import relative_error
from run_files import contents
from shard_damage import LAYOUT, every_sample
from test_pictures import drawn, pixels, put, saved, write_tar

from flux_ref import config_file, dataset
from flux_ref.pictures.captioned import Picture
from tools.prepare import __main__ as prepare
from tools.prepare import images
from tools.prepare.images import Encoders

HEIGHT, WIDTH = 32, 48  # the micro model's
TOKENS = config_file.load(MICRO).model.text_tokens


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(images, "PER_PART", 5)


def command(nets, source, output, share=0, *more):
    options = {"input": source, "output": output, "val-share": share, "model": nets, "config": MICRO}
    return ["images", "--batch=3", *(f"--{key}={value}" for key, value in options.items()), *map(str, more)]


def refused(args, capsys, code=2):
    capsys.readouterr()
    assert prepare.main(args) == code
    return the_line(capsys.readouterr().err, "prepare")


def stored(folder):
    """What a set of shards holds."""
    return [
        (meta, {name: torch.from_numpy(dataset.from_bf16_bits(bits)) for name, bits in rows.items()})
        for meta, rows in every_sample(folder)
    ]


CAPTIONS = ["a red cat", "the grass " * 60, "l'été 猫", *(f"a {colour} dog" for colour in ("red", "green", "blue"))]


def lay_out(folder, count=6):
    """A folder of pictures with captions; two of them cannot be used."""
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:02}.png").write_bytes(saved(drawn(70 + number, 90, number)))
        (folder / f"{number:02}.txt").write_text(CAPTIONS[number % len(CAPTIONS)])
    (folder / "00_bad.png").write_bytes(b"")
    (folder / "00_bad.txt").write_bytes(b"a cat")
    (folder / "05_silent.png").write_bytes(saved(drawn(80, 80)))
    return folder


def test_each_picture_is_a_sample_as_the_encoders_say_or_a_row_of_the_rejected(nets, tmp_path, capsys):
    """In a folder and in tars."""
    source = lay_out(tmp_path / "in")
    assert prepare.main(command(nets, source, tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert f"{len(CAPTIONS)} training and 0 validation samples; 2 rejected" in said
    rows = (tmp_path / "out" / "rejected.tsv").read_text().splitlines()
    assert rows == ["picture\treason", "00_bad.png\tnot a picture", "05_silent.png\tno caption"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train", "rejected.tsv", "empty_encodings"}
    samples = stored(tmp_path / "out" / "train")
    assert len(samples) == len(CAPTIONS) == len({meta.key for meta, _ in samples})
    own = Encoders(nets, config_file.load(MICRO).model, torch.device("cpu"), torch.float32)
    for number, (meta, found) in enumerate(samples):
        assert meta.caption[:40] == CAPTIONS[number].strip()[:40] and meta.timestep is None
        picture = pixels((source / f"{number:02}.png").read_bytes(), HEIGHT, WIDTH)
        for name, bits in own.encode(picture[None], [CAPTIONS[number].strip()]).items():
            assert relative_error(found[name], torch.from_numpy(dataset.from_bf16_bits(bits[0]))) < 1e-3, name
    empty, want = dataset.read_empty(tmp_path / "out" / "empty_encodings", LAYOUT), own.encode_text([""])
    assert all((empty[name] == want[name][0]).all() for name in want)

    (tmp_path / "tars").mkdir()
    members = [(path.name, path.read_bytes()) for path in sorted(source.iterdir())]
    for name, part in (("0", [("x.png", b"")]), ("1", members[:10]), ("2", members[10:])):
        write_tar(tmp_path / "tars" / f"{name}.tar", part)  # the first gives no shard, and leaves no gap
    assert prepare.main(command(nets, tmp_path / "tars", tmp_path / "of tars")) == 0
    again = stored(tmp_path / "of tars" / "train")
    for (meta, own), (want, other) in zip(again, samples, strict=True):
        assert meta.caption == want.caption and all(map(torch.equal, own.values(), other.values()))
    assert [path.name[-5:] for path in sorted((tmp_path / "of tars" / "train").iterdir())] == ["0.tar", "1.tar"]


# Validation, restarts and ranks


@contextlib.contextmanager
def failing(owner, name, at_call, error):
    """A function raises the error at its call of this number."""
    function = getattr(owner, name)
    calls = itertools.count(1)

    def fail(*given, **named):
        if next(calls) == at_call:
            raise error
        return function(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def test_a_stopped_command_goes_on_with_the_parts_that_are_not_done(nets, tmp_path, capsys, monkeypatch):
    lay_out(tmp_path / "in", count=40)
    whole, stopped = (command(nets, tmp_path / "in", tmp_path / out, 0.3) for out in ("whole", "stopped"))
    assert prepare.main(whole) == 0
    train, val = ([meta for meta, _ in stored(tmp_path / "whole" / split)] for split in ("train", "val"))
    assert len(train) + len(val) == 40 and 8 <= len(val) < 20
    assert [(meta.key, meta.timestep) for meta in val] == [(f"val_{i:08d}", i % 8) for i in range(len(val))]
    with failing(dataset, "add", 7, OSError(28, "No space left on device")):
        assert "tar: No space left on device; free" in refused(stopped, capsys, code=3)
    with failing(Encoders, "encode", 5, KeyboardInterrupt()):
        assert prepare.main(stopped) == 130
    with failing(dataset, "add", 35, KeyboardInterrupt()):  # while validation is copied
        assert prepare.main(stopped) == 130
    assert "was begun from another input or with other options" in refused([*stopped, "--dtype=bf16"], capsys)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"in", "whole", "stopped.partial"}
    monkeypatch.setattr(Picture, "load", None)  # no picture is read again
    assert prepare.main(stopped) == 0 and contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    assert "exists; choose another --output" in refused(stopped, capsys)


def test_too_few_pictures_are_refused_before_encoders_load(nets, tmp_path, capsys):
    source = lay_out(tmp_path / "in", count=16)
    silent = put(tmp_path / "in" / "silent", {f"{number}.png": b"" for number in range(9)})
    with failing(Encoders, "__init__", 1, AssertionError("the folder is looked at first")):
        for place, share, words in (
            (tmp_path / "absent", 0.0, "absent: No such file or directory"),
            (source, 0.0001, "; want at least 1 train and 8 val; add"),
            (silent, 0.0, "gives no caption: 9; want at least 1 train and 0 val"),
        ):
            assert words in refused(command(nets, place, tmp_path / "out", share), capsys)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.slow
def test_two_ranks_make_the_same_bytes_as_one(nets, tmp_path):
    lay_out(tmp_path / "in", count=24)
    alone, both = (command(nets, tmp_path / "in", tmp_path / out, 0.5) for out in ("alone", "both"))
    assert prepare.main(alone) == 0
    done = script("tests/helpers/image_ranks.py", *both, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "validation samples; 2 rejected" in done.stdout
    assert contents(tmp_path / "both") == contents(tmp_path / "alone")
