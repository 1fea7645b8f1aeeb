"""Random encoders of a command: what `images` and eval.py read, and pictures to try them on."""

import torch
from conftest import MICRO
from small_encoders import CHANNELS

from flux_ref import config_file
from flux_ref.pictures import encoders
from flux_ref.pictures.encoders import Encoders
from tools.prepare import commands, pictures

MODEL = config_file.load(MICRO).model


def test_random_encoders_fit_the_model_and_tell_captions_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(encoders.VAE, "block_out_channels", CHANNELS)
    folder = tmp_path / "toy"
    argv = ["encoders", "--out", str(folder), "--config", str(MICRO)]
    assert commands.main(argv) == 0 and "180 captioned drawings" in capsys.readouterr().out
    root = folder / "pictures"
    (part,) = pictures.parts_of(root, pictures.find(root), "text", 1000)
    first, *_, last = part()
    found, captions = zip(*(picture.load(32, 48) for picture in (first, last)))
    assert captions == ("a small red circle at the top left", "a large black triangle at the bottom right")
    nets = Encoders(folder, MODEL, torch.device("cpu"), torch.float32)
    members = nets.encode(torch.stack(found), captions)
    assert members["t5"].shape[1:] == (MODEL.text_tokens, MODEL.t5_dim)
    assert members["clip"].shape[1:] == (MODEL.clip_dim,)
    assert all((bits[0] != bits[1]).any() for bits in members.values())
    assert commands.main(argv) == 2 and "exists; remove it" in capsys.readouterr().err
