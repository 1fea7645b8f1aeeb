"""Weights survive a file and another world size bit for bit; files that do not fit are refused."""

import pytest
import ranks
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flux_ref import config, parallel, weights
from flux_ref.errors import Refusal
from flux_ref.model import parameter_table
from flux_ref.parallel import World


@pytest.fixture(scope="module")
def measured(shapes_dir):
    return lambda size: ranks.measured(shapes_dir, size)


@pytest.fixture(scope="module")
def alone() -> World:
    """A world of this process."""
    yield parallel.start(config.ParallelConfig())
    parallel.stop()


@pytest.fixture
def lively(micro) -> dict[str, torch.Tensor]:
    return {name: ranks.lively(name, shape) for name, shape in parameter_table(micro.model).items()}


def require_identical(found: dict, want: dict):
    assert found.keys() == want.keys()
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_files_are_safetensors_with_bfls_names_whoever_writes_them(measured, lively, size):
    folder = measured(size).folder
    require_identical(load_file(folder / "weights.safetensors"), lively)
    with safe_open(folder / "weights.safetensors", framework="pt") as file:
        assert file.metadata() == {"samples": "36"}
    assert not list(folder.rglob("*.partial"))


@pytest.mark.parametrize("writers, readers", [(2, 1), (1, 3)])
def test_weights_are_bit_identical_at_another_world_size(measured, lively, writers, readers):
    assert ranks.LOADS_FROM[readers] == writers
    found = measured(readers)["loaded"]
    require_identical(found["whole"], lively)
    assert found["metadata"] == {"samples": "36"}


def test_ranks_without_rows_write_and_read(measured, shapes_dir):
    model = ranks.micro_config(shapes_dir, **ranks.NARROW).model
    want = {name: ranks.lively(name, shape) for name, shape in parameter_table(model).items()}
    require_identical(measured(3)["saving"]["whole"], want)
    require_identical(load_file(measured(3).folder / "narrow.safetensors"), want)


def test_public_bf16_weights_load(alone, micro, lively, tmp_path):
    save_file({name: tensor.bfloat16() for name, tensor in lively.items()}, tmp_path / "bf16.safetensors")
    net = parallel.build(micro, alone, seed=None)
    assert weights.load(net, tmp_path / "bf16.safetensors") == {}
    require_identical(ranks.whole(net), {name: tensor.bfloat16().float() for name, tensor in lively.items()})


def refusal(alone, micro, path) -> str:
    """Why a file is refused; the net must stay as it was."""
    net = parallel.build(micro, alone, seed=0)
    before = ranks.whole(net)
    with pytest.raises(Refusal) as caught:
        weights.load(net, path)
    require_identical(ranks.whole(net), before)
    return str(caught.value)


def test_missing_tensors_are_refused(alone, micro, lively, tmp_path):
    del lively["img_in.bias"], lively["txt_in.weight"]
    save_file(lively, tmp_path / "w.safetensors")
    assert "2 missing, first img_in.bias" in refusal(alone, micro, tmp_path / "w.safetensors")


def test_unexpected_tensors_are_refused(alone, micro, lively, tmp_path):
    save_file(lively | {"guidance_in.in_layer.bias": torch.zeros(24)}, tmp_path / "w.safetensors")
    assert "1 unexpected, first guidance_in.in_layer.bias" in refusal(alone, micro, tmp_path / "w.safetensors")


def test_misshaped_tensors_are_refused(alone, micro, lively, tmp_path):
    save_file(lively | {"img_in.weight": torch.zeros(24, 60)}, tmp_path / "w.safetensors")
    text = refusal(alone, micro, tmp_path / "w.safetensors")
    assert "1 misshaped, first img_in.weight (24, 60), want (24, 64)" in text


@pytest.mark.parametrize("keep", [0, 5, 4000, -4])
def test_truncated_files_are_refused(alone, micro, lively, tmp_path, keep):
    save_file(lively, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(content[:keep])
    assert str(tmp_path / "w.safetensors") in refusal(alone, micro, tmp_path / "w.safetensors")


def test_an_absent_file_is_refused(alone, micro, tmp_path):
    assert "absent.safetensors" in refusal(alone, micro, tmp_path / "absent.safetensors")


def test_a_write_that_breaks_off_leaves_the_old_file(alone, micro, tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    net = ranks.lively_net(micro, alone)
    weights.save(net, path, {"samples": "36"})
    before = path.read_bytes()
    monkeypatch.setattr(weights.os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        weights.save(parallel.build(micro, alone, seed=0), path, {"samples": "72"})
    assert path.read_bytes() == before
