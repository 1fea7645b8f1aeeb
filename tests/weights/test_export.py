"""diffusers opens what tools.export writes and computes the same with it. Nothing changes on the way there and back."""

import json

import pytest
import torch
from conftest import MICRO, refusal, require_identical
from diffusers import FluxTransformer2DModel
from lively_nets import plain_net
from peer_net import diffusers_forward, diffusers_twin, random_inputs, relative_error
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flux_ref import cli, config_file, weights
from tools import export

CFG = config_file.load(MICRO)
NET = plain_net(CFG)
TRAINED = {"format": "pt", "trained_by": "flux_ref", "step": "5", "samples": "60", "name": "micro"}
FILE = export.DIFFUSERS_FILE


@pytest.fixture
def saved(tmp_path):
    """A file of NET's weights."""
    save_file(NET.state_dict(), tmp_path / "saved.safetensors", TRAINED)
    return tmp_path / "saved.safetensors"


def exported(source, out, *options):
    assert export.main([str(source), str(out), f"--config={MICRO}", *options]) == 0
    return out


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_what_diffusers_itself_would_save_and_compute(saved, tmp_path):
    """The same files, config, names and bits, and the same output."""
    theirs = tmp_path / "theirs"
    diffusers_twin(NET)[0].save_pretrained(theirs)
    ours = exported(saved, tmp_path / "ours", "--format=diffusers")
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    want, found = (json.loads((folder / "config.json").read_text()) for folder in (theirs, ours))
    assert want.pop("_diffusers_version") and want == found | {"out_channels": None}
    require_identical(load_file(ours / FILE), load_file(theirs / FILE))
    inputs = random_inputs(CFG.model)
    with torch.no_grad():
        computed = diffusers_forward(FluxTransformer2DModel.from_pretrained(ours), CFG.model)(**inputs)
        assert relative_error(NET(*inputs.values()), computed) < 1e-5


def test_nothing_changes_on_the_way_round_but_by_one_rounding(saved, tmp_path):
    """BFL, diffusers, BFL. The metadata keep what is known of the training."""
    for name, dtype in export.DTYPES.items():
        there = exported(saved, tmp_path / f"there {name}", f"--dtype={name}", "--format=diffusers")
        back = exported(there, tmp_path / f"back {name}", f"--dtype={name}")
        found = load_file(back)
        require_identical(found, {key: tensor.to(dtype) for key, tensor in NET.state_dict().items()})
        assert {tensor.dtype for tensor in found.values()} == {dtype} and metadata(back) == TRAINED
    save_file(NET.state_dict(), tmp_path / "public", {"samples": "many"})
    assert metadata(exported(tmp_path / "public", tmp_path / "no" / "x")) == {"format": "pt"}, "trained elsewhere"


def test_what_is_there_stays_and_what_breaks_off_leaves_nothing(saved, tmp_path, monkeypatch):
    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", half)
    before = saved.read_bytes()
    for layout in ("bfl", "diffusers"):
        argv = [str(saved), str(tmp_path / "out"), f"--format={layout}", f"--config={MICRO}"]
        assert cli.run("export", export.main, argv) == 3
        argv[1] = str(saved)
        assert "saved.safetensors exists; choose another" in refusal(export.main, argv)
        assert [*tmp_path.iterdir()] == [saved] and saved.read_bytes() == before


def test_what_diffusers_cannot_compute_is_not_exported_to_it(saved, tmp_path):
    model = config_file.replace(CFG, model__rope_theta=5000).model
    source = weights.open_source(saved, model)
    assert "model.rope_theta" in refusal(export.export, source, model, tmp_path / "x", "diffusers", torch.float32)
