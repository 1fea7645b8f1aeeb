"""The toy data set of a folder of pictures: each picture is in it or on its list, once, and a change is told."""

import itertools
import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest
from conftest import MICRO, called, refusal
from PIL import Image
from run_files import contents
from shard_damage import every_sample

from flux_ref import config_file, dataset, toy
from flux_ref.pictures import toy_from_pictures

SIZES = ["--model.latent_height=8", "--model.latent_width=8"]
MODEL = config_file.load(MICRO, SIZES).model
COLOURS = {"crimson": (200, 20, 60), "golden": (250, 150, 20), "teal": (0, 130, 130), "navy": (20, 30, 120)}
PIPES = shutil.ignore_patterns("pipe.*")


def overrides(pictures, folder):
    """The micro config on a folder of pictures."""
    own = [f"--data.pictures={pictures}", f"--data.train={folder}/train", f"--data.val={folder}/val"]
    return [*own, *SIZES, "--data.expected_train_samples=0", "--data.expected_val_samples=0"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """160 pictures of one thing above another, and files that are no good pictures. Tests must not change it."""
    folder, rows = tmp_path_factory.mktemp("pictures"), []
    things = itertools.permutations(itertools.product(COLOURS, ("ring", "cross", "bar", "diamond")), 2)
    for number, pair in enumerate(itertools.islice(things, 160)):
        picture = np.full((64, 64, 3), 235, np.uint8)
        for top, (colour, _) in zip((8, 40), pair):
            picture[top : top + 16, 16:48] = COLOURS[colour]
        Image.fromarray(picture).save(folder / f"{number:03}.png")
        caption = " above ".join(f"a {colour} {thing}" for colour, thing in pair)
        rows.append(json.dumps({"file_name": f"{number:03}.png", "text": caption}))
    whole = next(folder.glob("*.png")).read_bytes()
    bad = {
        "cut.png": whole[:100],
        "empty.png": b"",
        "text.png": b"text",
        "plain.bmp": b"BM",
        "some.tar": b"",
        "alone.png": whole,
    }
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.tar")
    (folder / "gone.jpg").symlink_to("nowhere")
    rows += [json.dumps({"file_name": name, "text": "a thing"}) for name in bad if name != "alone.png"]
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def test_each_picture_is_a_sample_or_a_row(pictures, tmp_path, capsys):
    cfg = config_file.load(MICRO, overrides(pictures, tmp_path / "set"))
    toy_from_pictures.ensure(cfg)
    train, val = (every_sample(tmp_path / "set" / split, dataset.sample_layout(MODEL)) for split in ("train", "val"))
    rejected = dict(row.split("\t") for row in (tmp_path / "set" / "rejected.tsv").read_text().splitlines()[1:])
    assert rejected == {
        "cut.png": "damaged picture",
        "empty.png": "not a picture",
        "text.png": "not a picture",
        "plain.bmp": "unsupported type",
        "some.tar": "unsupported type",
        "alone.png": "not in metadata.jsonl",
        "pipe.tar": "not in metadata.jsonl",
        "gone.jpg": "not in metadata.jsonl",
    }
    assert len(train) + len(val) == 160 and len(val) == 16
    assert [meta.timestep for meta, _ in val] == [i % 8 for i in range(len(val))]
    assert {meta.timestep for meta, _ in train} == {None}
    rows = [json.loads(row) for row in (pictures / "metadata.jsonl").read_text().splitlines()]
    good = {row["text"]: row["file_name"] for row in rows if row["file_name"] not in rejected}
    assert Counter(meta.caption for meta, _ in train + val) == Counter([*good])
    for meta, members in (*train[:3], *val[:3]):
        picture = np.asarray(Image.open(pictures / good[meta.caption]), np.float32).transpose(2, 0, 1) / 127.5 - 1
        wanted = toy.encode_caption(meta.caption, MODEL, own=True) | {"mean": toy.encode(picture)}
        assert all((members[name] == dataset.to_bf16_bits(values)).all() for name, values in wanted.items())
    shown = capsys.readouterr().out
    assert f"{len(train)} pictures to train on and {len(val)} held out; 8 rejected" in shown


def test_a_set_is_made_once_and_other_pictures_are_refused(pictures, tmp_path, capsys):
    own = tmp_path / "pictures"
    shutil.copytree(pictures, own, ignore=PIPES, symlinks=True)
    cfg = config_file.load(MICRO, overrides(own, tmp_path / "set"))
    toy_from_pictures.ensure(cfg)
    before = contents(tmp_path)
    toy_from_pictures.ensure(cfg)
    assert contents(tmp_path) == before
    first = next(own.glob("*.png"))
    moment = first.stat().st_mtime_ns
    content = first.read_bytes()
    other = content[:-1] + bytes([content[-1] ^ 1])
    words = f"the folder {tmp_path / 'set'} was not made from what {own} holds now: files that are new, gone or"
    for change, told in (
        (lambda: os.utime(first, ns=(moment, moment + 1)), ""),
        (lambda: (first.write_bytes(other), os.utime(first, ns=(moment, moment))), f"1, such as {first.name}"),
        (lambda: first.rename(own / "0.txt"), "2, such as 0.txt"),
        (lambda: ((own / "0.txt").unlink(), first.write_bytes(content)), ""),
        (lambda: own.rename(tmp_path / "away"), ""),
        (lambda: shutil.copytree(tmp_path / "away", own, symlinks=True, copy_function=shutil.copyfile), ""),
        ((tmp_path / "set" / toy_from_pictures.MADE_FROM).unlink, "such as 000.png"),  # as in a set of drawings
    ):
        change()
        if told:
            said = refusal(lambda: toy_from_pictures.ensure(cfg))
            assert said.startswith(words) and f"{told}; for a new set and its run give another --data.train=" in said
        else:
            toy_from_pictures.ensure(cfg)
    told = capsys.readouterr().err
    assert told.count(f"data.pictures={own} is gone; {tmp_path / 'set'} is used") == 1
    for path in [*own.glob("*.png")][20:]:
        path.unlink()
    few = config_file.replace(cfg, data__train=str(tmp_path / "few" / "train"))
    told = refusal(lambda: toy_from_pictures.ensure(few))
    assert " for: not in the folder," in told and ". One picture of 10 is held out, and 8 must be; give 80" in told
    assert not list(tmp_path.glob("few"))
    held_out = [*filter(toy_from_pictures.is_held_out, range(100))]
    assert [number // 10 for number in held_out] == [*range(10)], "80 are enough"
    assert len({number % 10 for number in held_out}) == 10, "no period of a folder counts"


def test_one_command_trains_and_draws_a_folder(pictures, tmp_path, capsys):
    """And eval.py tells which words of a prompt are new."""
    run = tmp_path / "run"
    options = [*overrides(pictures, tmp_path / "set"), f"--run.dir={run}", "--pictures.count=20", "--pictures.steps=2"]
    assert called("train.py", str(MICRO), *options) == 0
    assert (run / "samples" / "000000060.png").is_file()
    assert "  16 pictures: " in capsys.readouterr().out
    assert called("eval.py", str(run), "--draw-only", "--prompt", "A teal ring, above a purple bar") == 0
    shutil.rmtree(tmp_path / "set")  # prompts need no data set
    assert called("eval.py", str(run), "--draw-only", "--prompt", "a purple bar") == 0
    assert called("train.py", str(MICRO), *options[1:], "--train.max_samples=72", "--data.pictures=") == 2
