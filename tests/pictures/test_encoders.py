"""What text encoders are refused, and what encodings."""

import contextlib
import json
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import MICRO, refusal
from payload import Payload
from peer_vae import SMALL, relative_error
from safetensors.torch import load_file, save_file
from small_encoders import WORDS, save_ae, save_clip, save_t5

from flux_ref import config_file, shards
from flux_ref.errors import Fault, Refusal
from flux_ref.pictures import autoencoder
from flux_ref.pictures.encoders import Encoders

MODEL = config_file.load(MICRO).model


@pytest.fixture(scope="module", autouse=True)
def small_autoencoder():
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


def build(nets: Path, changes: dict) -> Encoders:
    parts = {"vae_file": nets / "ae.safetensors", "t5": nets / "t5", "clip": nets / "clip" / "text_encoder"}
    parts |= {"model": MODEL, "device": torch.device("cpu"), "dtype": torch.float32}
    return Encoders(**parts | changes)


def test_text_encoders_that_do_not_fit_are_refused(nets, tmp_path):
    lacking = save_t5(tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["encoder.block.1.layer.0.SelfAttention.q.weight"]  # transformers would put random values there
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    cases = {
        "has 21 features, the model wants 28; set model.t5_dim": {"t5": save_t5(tmp_path / "t5", 21)},
        "has 16 features, the model wants 14; set model.clip_dim": {"clip": save_clip(tmp_path / "clip", 16)},
        "1 tensors are missing": {"t5": lacking},
        "model.latent_channels=4": {"model": config_file.load(MICRO, ["--model.latent_channels=4"]).model},
    }
    assert [words for words, changes in cases.items() if words not in refusal(build, nets, changes)] == []


def test_a_pickle_in_place_of_weights_and_code_beside_them_are_not_run(nets, tmp_path):
    folder = save_t5(tmp_path / "t5")
    mark = tmp_path / "it ran"
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).mkdir()\nclass Own: pass\n")
    owns = {"tokenizer_config.json": {"AutoTokenizer": ["own.Own", None]}, "config.json": {"AutoModel": "own.Own"}}
    for name, key in owns.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": key, "tokenizer_class": "Own"}))
    with contextlib.suppress(Refusal):
        build(nets, {"t5": folder})
    folder = save_t5(tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    assert "no file named model.safetensors" in refusal(build, nets, {"t5": folder})
    assert not mark.exists()


def test_encodings_that_are_not_finite_stop_the_job_by_name(nets):
    net = build(nets, {})
    weight = net.t5.net.shared.weight.data
    weight[WORDS.index("dog") + 3] = torch.nan
    with pytest.raises(Fault, match="t5 of 'a dog' is NaN"):
        net.encode(torch.zeros(2, 3, 32, 48, dtype=torch.uint8), ["a cat", "a dog"])


def test_bf16_text_encoders_differ_by_rounding_only(nets):
    full, half = (build(nets, {"dtype": dtype}).encode_text(["a red cat"]) for dtype in (torch.float32, torch.bfloat16))
    for name in ("t5", "clip"):
        ours, theirs = (torch.from_numpy(shards.from_bf16_bits(bits[name])) for bits in (half, full))
        assert 0 < relative_error(ours, theirs) < 0.05
