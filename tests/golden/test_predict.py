"""The prediction of given weights: the same as the net's, from any form of the weights, and comparable."""

import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import ROOT

from flux_ref import config_file, rng
from flux_ref.model import Flux
from tools.golden import commands as golden
from tools.golden import inputs, predict

CONFIG = ROOT / "tests" / "golden" / "config.toml"


@pytest.fixture(scope="module")
def net() -> Flux:
    net = Flux(config_file.load(CONFIG).model)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            words = rng.words(3, rng.INIT, parameter.numel() + parameter.numel() % 2, sample=rng.name_key(name))
            parameter.copy_(torch.from_numpy(rng.normal(words)[: parameter.numel()]).view(parameter.shape) * 0.2)
    return net


def test_a_prediction_is_the_nets_and_a_changed_weight_shows(net, tmp_path, capsys):
    weights = {name: parameter.detach().numpy() for name, parameter in net.named_parameters()}
    safetensors.numpy.save_file(weights, tmp_path / "w.safetensors")
    command = ["predict", str(tmp_path / "w.safetensors"), "--config", str(CONFIG), "--out"]
    assert golden.main([*command, str(tmp_path / "a")]) == 0
    values, cfg = safetensors.numpy.load_file(tmp_path / "a"), net.cfg
    assert len(values) == 4 + 2 * cfg.double_blocks + cfg.single_blocks + 2
    shapes = {"img": (2, cfg.image_tokens, cfg.packed_channels), "txt": (2, cfg.text_tokens, cfg.t5_dim)}
    drawn = [torch.from_numpy(inputs.drawn(f"predict.{name}", shape, 1.0)) for name, shape in shapes.items()]
    drawn.append(torch.from_numpy(inputs.drawn("predict.clip", (2, cfg.clip_dim), 2.0)))
    with torch.no_grad():
        whole = net(*drawn, torch.tensor(predict.TIMES))
    assert np.array_equal(values["predict.prediction"], whole.flatten()[:: predict.STRIDE].numpy())

    assert golden.main([*command, str(tmp_path / "b"), "--from", str(tmp_path / "a")]) == 0
    assert "differs" not in capsys.readouterr().out
    weights["single_blocks.1.linear2.bias"] = weights["single_blocks.1.linear2.bias"] + 0.01
    safetensors.numpy.save_file(weights, tmp_path / "w.safetensors")
    assert golden.main([*command, str(tmp_path / "c"), "--from", str(tmp_path / "a")]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("differs")]
    assert "single_blocks.1" in lines[0] and "prediction" in lines[-1]


def test_predict_refuses_what_it_cannot_do(tmp_path, capsys):
    (tmp_path / "there").touch()
    for argv, text in (
        (["predict"], "needs WEIGHTS and --out"),
        (["check", "x", "--out", "y"], "take neither"),
        (["predict", "x", "--out", str(tmp_path / "there")], "exists already"),
        (["predict", str(tmp_path / "none"), "--out", str(tmp_path / "new")], "does not exist"),
    ):
        assert golden.main(argv) == 2 and text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
