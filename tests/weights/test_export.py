"""diffusers opens what tools.export writes and computes the same with it. Nothing changes on the way there and back."""

import json

import lively_nets
import pytest
import torch
from conftest import MICRO, refusal, require_identical
from diffusers import FluxTransformer2DModel
from peer_net import diffusers_forward, random_inputs, relative_error, to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flux_ref import config_file, diffusers_names, errors, weights
from flux_ref.config import ModelConfig
from flux_ref.model import Flux, parameter_table
from tools import export

MODEL = config_file.load(MICRO).model
TRAINED = {"trained_by": "flux_ref", "step": "5", "samples": "60", "name": "micro"}
TOLERANCE = 1e-5  # relative, fp32
FILE = export.DIFFUSERS_FILE


@pytest.fixture
def lively(tmp_path):
    """Weights, as a file saved.safetensors too."""
    tensors = {name: lively_nets.lively(name, shape) for name, shape in parameter_table(MODEL).items()}
    save_file(tensors, tmp_path / "saved.safetensors", TRAINED)
    return tensors


def exported(source, out, *options):
    assert export.main([str(source), str(out), f"--config={MICRO}", *options]) == 0
    return out


def test_what_diffusers_itself_would_save_and_compute(lively, tmp_path):
    """The same files, config, names and bits, and the same output."""
    twin = FluxTransformer2DModel.from_config(diffusers_names.diffusers_config(MODEL))
    twin.load_state_dict(to_diffusers(lively, MODEL.hidden))
    theirs = tmp_path / "theirs"
    twin.save_pretrained(theirs)
    ours = exported(tmp_path / "saved.safetensors", tmp_path / "ours", "--format=diffusers")
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    want, found = (json.loads((folder / "config.json").read_text()) for folder in (theirs, ours))
    assert want.pop("_diffusers_version") and want == found | {"out_channels": None}
    require_identical(load_file(ours / FILE), load_file(theirs / FILE))
    inputs = random_inputs(MODEL)
    with torch.device("meta"):
        net = Flux(MODEL)
    net.load_state_dict(lively, assign=True)
    net.rope = net.make_rope()
    with torch.no_grad():
        computed = diffusers_forward(FluxTransformer2DModel.from_pretrained(ours), MODEL)(**inputs)
        assert relative_error(net(*inputs.values()), computed) < TOLERANCE


def test_nothing_changes_on_the_way_round_but_by_one_rounding(lively, tmp_path):
    """BFL, diffusers, BFL. The metadata keep what is known of the training."""
    for name, dtype in export.DTYPES.items():
        want = {key: tensor.to(dtype) for key, tensor in lively.items()}
        first = exported(tmp_path / "saved.safetensors", tmp_path / f"1 {name}", f"--dtype={name}")
        second = exported(first, tmp_path / f"2 {name}", f"--dtype={name}", "--format=diffusers")
        require_identical(load_file(second / FILE), to_diffusers(want, MODEL.hidden))
        third = exported(second, tmp_path / f"3 {name}", f"--dtype={name}")
        for path in (first, third):
            found = load_file(path)
            require_identical(found, want)
            assert {tensor.dtype for tensor in found.values()} == {dtype}
            with safe_open(path, framework="pt") as file:
                assert file.metadata() == TRAINED | {"format": "pt"}
    save_file(lively, tmp_path / "public", {"samples": "many"})
    with safe_open(exported(tmp_path / "public", tmp_path / "of public"), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "trained elsewhere"


def test_the_map_gives_diffusers_names_and_shapes_at_full_size():
    with torch.device("meta"):
        twin = FluxTransformer2DModel()
    want = {name: tuple(tensor.shape) for name, tensor in twin.state_dict().items()}
    assert diffusers_names.diffusers_table(ModelConfig()) == want


def test_what_is_there_stays_and_what_diffusers_cannot_compute_is_not_exported_to_it(lively, tmp_path):
    source = tmp_path / "saved.safetensors"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for out, words in (("file", "file exists; remove it"), ("folder", "exists"), ("no/out", "no, where out is to app")):
        for layout in ("bfl", "diffusers"):
            argv = [str(source), str(tmp_path / out), f"--format={layout}", f"--config={MICRO}"]
            assert words in refusal(export.main, argv)
    assert (tmp_path / "file").read_text() == "mine" and not [*(tmp_path / "folder").iterdir()]
    other = config_file.replace(config_file.load(MICRO), model__mlp_ratio=3).model
    opened = weights.open_source(source, MODEL)
    assert "model.mlp_ratio" in refusal(export.export, opened, other, tmp_path / "x", "diffusers", torch.float32)


def test_what_breaks_off_leaves_nothing(lively, tmp_path, monkeypatch):
    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", half)
    before = {*tmp_path.iterdir()}
    for layout in ("bfl", "diffusers"):
        argv = [str(tmp_path / "saved.safetensors"), str(tmp_path / "out"), f"--format={layout}", f"--config={MICRO}"]
        assert errors.run("export", export.main, argv) == 3
        assert {*tmp_path.iterdir()} == before
