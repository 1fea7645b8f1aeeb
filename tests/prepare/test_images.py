"""From pictures and captions to shards, by the command: what is stored, restarts, ranks, the set of validation."""

import contextlib
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import MICRO, script, the_line
from peer_vae import SMALL, relative_error
from run_files import contents
from shard_damage import LAYOUT, opened
from small_encoders import save_ae, save_clip, save_t5
from test_pictures import drawn, pixels, saved, write_tar
from transformers import CLIPTextModel, PreTrainedTokenizerFast, T5EncoderModel

from flux_ref import config_file, shards
from flux_ref.pictures import autoencoder
from flux_ref.pictures.autoencoder import FLUX
from flux_ref.pictures.encoders import Encoders
from tools.prepare import commands as prepare
from tools.prepare.pictures import Picture

HEIGHT, WIDTH = 32, 48  # the micro model's
TOKENS = config_file.load(MICRO).model.text_tokens


@pytest.fixture(scope="module", autouse=True)
def small_autoencoder() -> Iterator[None]:
    """FLUX's autoencoder would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoder, "load", partial(autoencoder.load, config=SMALL))
        yield


@pytest.fixture(scope="module")
def nets(tmp_path_factory) -> Path:
    """t5, clip/text_encoder and an autoencoder, all random; tests must not change them."""
    folder = tmp_path_factory.mktemp("nets")
    save_t5(folder / "t5")
    save_clip(folder / "clip")
    save_ae(folder / "ae.safetensors")
    return folder


def command(nets: Path, source: Path, output: Path, share: float = 0, *more: object) -> list[str]:
    options = {"input": source, "output": output, "val-share": share, "vae": nets / "ae.safetensors", "t5": nets / "t5"}
    options |= {"clip": nets / "clip" / "text_encoder", "config": MICRO, "batch": 3, "workers": 2, "per-shard": 5}
    return ["images", *(f"--{key}={value}" for key, value in options.items()), *map(str, more)]


def refused(args: list[str], capsys, code: int = 2) -> str:
    assert prepare.main(args) == code
    return the_line(capsys.readouterr().err, "prepare")


def stored(folder: Path) -> list[tuple[shards.Meta, dict[str, torch.Tensor]]]:
    """What a set of shards holds."""
    found, samples = opened(folder), []
    for i in range(len(found)):
        rows = LAYOUT.rows()
        meta = found.read(i, rows)
        samples.append((meta, {name: torch.from_numpy(shards.from_bf16_bits(bits)) for name, bits in rows.items()}))
    return samples


CAPTIONS = ["a red cat", "a large dog stands in the water at night " * 2, "the grass " * 60, "zebra", "l'été 猫"]
CAPTIONS += [f"a {colour} {animal}" for colour in ("red", "green", "blue") for animal in ("cat", "dog")]


def lay_out(folder: Path, timestep: int | None = None, count: int = len(CAPTIONS)) -> Path:
    """A folder of pictures with captions; two of them cannot be used."""
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:02}.png").write_bytes(saved(drawn(70 + number, 90, number)))
        said = {"caption": CAPTIONS[number % len(CAPTIONS)]} | ({} if timestep is None else {"timestep": timestep})
        (folder / f"{number:02}.json").write_text(json.dumps(said))
    (folder / "00_bad.png").write_bytes(b"")
    (folder / "00_bad.txt").write_bytes(b"a cat")
    (folder / "05_silent.png").write_bytes(saved(drawn(80, 80)))
    return folder


@pytest.fixture(scope="module")
def made(nets, tmp_path_factory) -> tuple[Path, Path]:
    """The input and the output of a command."""
    root = tmp_path_factory.mktemp("made")
    lay_out(root / "in")
    assert prepare.main(command(nets, root / "in", root / "out")) == 0
    return root / "in", root / "out"


def test_each_picture_is_a_sample_or_a_row_of_the_rejected(made, nets, tmp_path, capsys):
    source, output = made
    rows = (output / "rejected.tsv").read_text().splitlines()
    assert rows == ["picture\treason", "00_bad.png\tnot a picture", "05_silent.png\tno caption"]
    metas = [meta for meta, _ in stored(output / "train")]
    assert [meta.caption[:50] for meta in metas] == [caption.strip()[:50] for caption in CAPTIONS]
    assert {meta.timestep for meta in metas} == {None} and len({meta.key for meta in metas}) == len(metas)
    assert {path.name for path in output.iterdir()} == {"train", "rejected.tsv", "empty_encodings"}
    assert len(list((output / "train").iterdir())) == 3
    (tmp_path / "tars").mkdir()
    members = [(path.name, path.read_bytes()) for path in sorted(source.iterdir())]
    write_tar(tmp_path / "tars" / "0.tar", [("x.png", b"")])  # no sample: no shard, and no gap
    write_tar(tmp_path / "tars" / "1.tar", members[:10])
    write_tar(tmp_path / "tars" / "2.tar", members[10:])
    assert prepare.main(command(nets, tmp_path / "tars", tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert f"{len(CAPTIONS)} training and 0 validation samples; 3 rejected (" in said and "2 no caption" in said
    assert f"2 of the captions encoded now are cut after {TOKENS} tokens, model.text_tokens" in said
    for (meta, rows), (want, of_folder) in zip(
        stored(tmp_path / "out" / "train"), stored(output / "train"), strict=True
    ):
        assert meta.caption == want.caption and all((rows[name] == of_folder[name]).all() for name in rows)
    assert [path.name[-5:] for path in sorted((tmp_path / "out" / "train").iterdir())] == ["0.tar", "1.tar"]


def theirs(nets: Path, caption: str) -> dict[str, torch.Tensor]:
    """T5 sees its pads; CLIP's output does not depend on what comes after the first end."""
    t5, clip = T5EncoderModel.from_pretrained(nets / "t5"), CLIPTextModel.from_pretrained(nets / "clip/text_encoder")
    cut = {"truncation": True, "return_tensors": "pt"}
    t5_ids = PreTrainedTokenizerFast.from_pretrained(nets / "t5")(caption, padding="max_length", max_length=9, **cut)
    clip_ids = PreTrainedTokenizerFast.from_pretrained(nets / "clip" / "tokenizer")(caption, max_length=77, **cut)
    with torch.no_grad():
        t5_1TE, pooled_1V = t5(t5_ids["input_ids"]).last_hidden_state, clip(clip_ids["input_ids"]).pooler_output
    return {"t5": t5_1TE[0], "clip": pooled_1V[0]}


def test_samples_hold_what_the_encoders_say(made, nets):
    source, output = made
    net = autoencoder.load(nets / "ae.safetensors", torch.device("cpu"))
    for number, (meta, rows) in enumerate(stored(output / "train")):
        content = (source / f"{number:02}.png").read_bytes()
        with torch.no_grad():
            mean, logvar = net.encode(pixels(content, HEIGHT, WIDTH)[None] / 255 * 2 - 1)
        want = {"mean": mean[0], "logvar": logvar[0]} | theirs(nets, CAPTIONS[number].strip())
        for name, values in want.items():
            assert relative_error(rows[name], values.bfloat16().float()) < 1e-3, (name, meta.caption)
    empty = shards.read_empty(output / "empty_encodings", LAYOUT)
    for name, values in theirs(nets, "").items():
        assert relative_error(torch.from_numpy(shards.from_bf16_bits(empty[name])), values.bfloat16().float()) < 1e-3


# Validation, restarts and ranks


@contextlib.contextmanager
def failing(owner: object, name: str, at_call: int, error: BaseException) -> Iterator[None]:
    """A method raises the error at its call of this number."""
    method, calls = getattr(owner, name), []

    def fail(*given: object) -> object:
        calls.append(given)
        if len(calls) == at_call:
            raise error
        return method(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def test_a_stopped_command_goes_on_with_the_parts_that_are_not_done(nets, tmp_path, capsys, monkeypatch):
    lay_out(tmp_path / "in", count=40)
    whole, stopped = (command(nets, tmp_path / "in", tmp_path / out, 0.3) for out in ("whole", "stopped"))
    assert prepare.main(whole) == 0
    train, val = ([meta for meta, _ in stored(tmp_path / "whole" / split)] for split in ("train", "val"))
    assert len(train) + len(val) == 40 and 8 <= len(val) < 20
    assert [meta.timestep for meta in val] == [i % 8 for i in range(len(val))]
    assert [meta.key for meta in val] == [f"val_{i:08d}" for i in range(len(val))]
    capsys.readouterr()
    full = OSError(28, "No space left on device")
    with failing(shards, "add", 7, full):
        assert "tar: No space left on device; free its disk" in refused(stopped, capsys, code=3)
    with failing(Encoders, "encode", 5, KeyboardInterrupt()):
        assert prepare.main(stopped) == 130
    with failing(shards, "add", 35, KeyboardInterrupt()):  # while validation is copied
        assert prepare.main(stopped) == 130
    capsys.readouterr()
    assert "was begun from another input or with other options" in refused([*stopped, "--dtype=bf16"], capsys)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"in", "whole", "stopped.partial"}
    monkeypatch.setattr(Picture, "load", None)  # no picture is read again
    assert prepare.main(stopped) == 0 and contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    assert "exists; remove it" in refused(stopped, capsys)


def test_validation_that_lacks_samples_or_a_timestep_is_refused(nets, tmp_path, capsys):
    lay_out(tmp_path / "all", count=16)
    assert prepare.main(command(nets, tmp_path / "all", tmp_path / "val", 1)) == 0
    assert [meta.timestep for meta, _ in stored(tmp_path / "val" / "val")] == [*range(8)] * 2
    lay_out(tmp_path / "three", timestep=3)
    line = refused(command(nets, tmp_path / "three", tmp_path / "out", 1), capsys)
    assert "no validation sample has timestep 0; mend the .json files" in line and not (tmp_path / "out").exists()
    with failing(Encoders, "__init__", 1, AssertionError("pictures are counted first")):
        line = refused(command(nets, tmp_path / "all", tmp_path / "few", 0.0001), capsys)
    assert "gives 18 pictures, of which validation gets" in line or "of the 8 samples that validation needs" in line
    for number in range(9):
        (tmp_path / "three" / f"{number:02}.png").write_bytes(b"")
    line = refused(command(nets, tmp_path / "three", tmp_path / "bad", 1), capsys)
    assert "2 of the 8 samples that validation needs" in line and "10 not a picture" in line


def test_inputs_that_are_none_are_refused(nets, tmp_path, capsys):
    source = lay_out(tmp_path / "in")
    for place, output, words in (
        (tmp_path / "absent", "out", "is no folder; give"),
        (source, "in/out", "lies in --input"),
    ):
        assert words in refused(command(nets, place, tmp_path / output), capsys)
    assert {path.name for path in tmp_path.iterdir()} == {"in"} and not (source / "out").exists()


@pytest.mark.slow
def test_two_ranks_make_the_same_bytes_as_one(nets, tmp_path, monkeypatch):
    flux = f"--vae={save_ae(tmp_path / 'flux.safetensors', FLUX)}"  # no patch reaches the ranks
    monkeypatch.setattr(autoencoder, "load", autoencoder.load.func)
    lay_out(tmp_path / "in", count=24)
    alone, both = (command(nets, tmp_path / "in", tmp_path / out, 0.5, flux) for out in ("alone", "both"))
    assert prepare.main(alone) == 0
    done = script("tools/prepare/__main__.py", *both, ranks=2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"training and \d+ validation samples; 2 rejected", done.stdout)
    assert contents(tmp_path / "both") == contents(tmp_path / "alone")
