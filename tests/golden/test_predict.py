"""The prediction of given weights: the same as the net's, from any form of the weights, and comparable."""

import re

import numpy as np
import safetensors.numpy
import torch

from flux_ref import config_file
from flux_ref.model import Flux
from tools.golden import commands as golden
from tools.golden import inputs, predict
from tools.golden.files import CONFIG, FOLDER

MODEL = config_file.load(FOLDER / CONFIG).model


def test_a_prediction_is_the_nets_and_a_changed_weight_shows(tmp_path, capsys):
    """A dump of other names is no dump of these weights."""
    net = Flux(MODEL)
    weights = {}
    for name, parameter in net.named_parameters():
        parameter.data = torch.from_numpy(inputs.drawn(name, tuple(parameter.shape), 0.4))
        weights[name] = parameter.data.numpy()
    file = tmp_path / "w.safetensors"

    def predicted(out: str, *options: object) -> tuple[int, str]:
        safetensors.numpy.save_file(weights, file)
        argv = ["predict", file, "--config", FOLDER / CONFIG, "--out", tmp_path / out, *options]
        return golden.main([str(word) for word in argv]), capsys.readouterr().out

    assert predicted("a")[0] == 0
    values = safetensors.numpy.load_file(tmp_path / "a")
    assert len(values) == 4 + 2 * MODEL.double_blocks + MODEL.single_blocks + 2
    shapes = {"img": (2, MODEL.image_tokens, MODEL.packed_channels), "txt": (2, MODEL.text_tokens, MODEL.t5_dim)}
    drawn = [torch.from_numpy(inputs.drawn(f"predict.{name}", shape, 1.0)) for name, shape in shapes.items()]
    drawn.append(torch.from_numpy(inputs.drawn("predict.clip", (2, MODEL.clip_dim), 2.0)))
    with torch.no_grad():
        whole = net(*drawn, torch.tensor(predict.TIMES))
    assert np.array_equal(values["predict.prediction"], whole.flatten()[:: predict.STRIDE].numpy())

    code, text = predicted("b", "--from", tmp_path / "a")
    assert code == 0 and " 0 differ, 0 missing, 0 unknown" in text
    weights["single_blocks.1.linear2.bias"] += np.float32(0.1)
    code, text = predicted("c", "--from", tmp_path / "a")
    assert code == 1 and "first difference: predict.single_blocks.1.0\n" in text
    assert re.search(r"^  predict.prediction: [\d.e+]+ times its tolerance$", text, re.M)
    assert predicted("d", "--from", file)[0] == 1


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
