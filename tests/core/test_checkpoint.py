"""Checkpoints on disk: any rows come back bit for bit, and damage of any file is told in one line."""

import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import refusal, require_identical
from safetensors.torch import load_file

from flux_ref import checkpoint, tensors
from flux_ref.checkpoint import Checkpoint, TensorSlice

INFO = {"step": 7, "samples": 84, "name": "micro", "config": {"model.rope_axes": [4, 2, 2], "optim.lr": 1e-4}}
SHAPES = {"model.w": (13, 3, 2), "model.b": (1,), "optimizer.state.w.exp_avg": (7, 5), "model.wide": (2, 300)}
WANT = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in SHAPES.items()}


def write_checkpoint(folder: Path, parts: int, seed: int = 0) -> Path:
    """A checkpoint by so many ranks, of which some hold no rows of some tensors."""
    draw = random.Random(seed)
    pieces: list[dict[str, TensorSlice]] = [{} for _ in range(parts)]
    for name, tensor in WANT.items():
        ends = [0, *sorted(draw.randint(0, len(tensor)) for _ in range(parts - 1)), len(tensor)]
        for piece, (low, high) in zip(draw.sample(pieces, parts), pairwise(ends)):
            if low < high:
                piece[name] = TensorSlice(tensor[low:high], low, tensor.shape)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    written = [checkpoint.write_rank(partial, number, piece) for number, piece in enumerate(pieces)]
    checkpoint.publish(partial, folder, INFO, written)
    return folder


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """A checkpoint by three ranks, whose files hold few tensors."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    return write_checkpoint(tmp_path / "checkpoints" / "step_000000007", parts=3)


def test_any_rows_are_those_of_the_whole(tmp_path, monkeypatch):
    draw = random.Random(0)
    for seed, (parts, most) in enumerate([(1, 1), (1, 10**9), (2, 100), (3, 1), (3, 10**9), (5, 100)]):
        monkeypatch.setattr(checkpoint, "FILE_BYTES", most)
        folder = write_checkpoint(tmp_path / str(seed), parts, seed)
        found = Checkpoint(folder)
        assert found.info == INFO and (len(found.files) > parts) == (most < 10**9)
        for name, tensor in list(WANT.items()) * 10:
            low, high = sorted(draw.randint(0, len(tensor)) for _ in range(2))
            assert torch.equal(found.read(name, low, high - low), tensor[low:high])
        require_identical({name: found.read(name) for name in found.tensors}, WANT)
        own = {name: torch.full_like(tensor, 7.0) for name, tensor in WANT.items()}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(own, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
        require_identical(own, WANT)


def test_rows_that_no_rank_has_written_are_told_before_the_folder_has_its_name(tmp_path):
    tensor = torch.zeros(4, 2)
    for number, rows in enumerate([[(0, 2)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 2), (0, 4)]]):
        partial = tmp_path / f".{number}"
        partial.mkdir()
        pieces = [{"model.w": TensorSlice(tensor[low:high], low, tensor.shape)} for low, high in rows]
        parts = [checkpoint.write_rank(partial, rank, piece) for rank, piece in enumerate(pieces)]
        with pytest.raises(ValueError, match=r"rows of model\.w are missing"):
            checkpoint.publish(partial, tmp_path / str(number), INFO, parts)
        assert not (tmp_path / str(number)).exists()


def test_a_flipped_bit_of_any_file_is_told_and_no_damaged_row_is_read(saved):
    draw = random.Random(2)
    holders = {file: key for key, entry in Checkpoint(saved).tensors.items() for file, *_ in entry.chunks}
    for path in sorted(saved.iterdir()):
        content = path.read_bytes()
        for at in [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(20))]:
            damaged = bytearray(content)
            damaged[at] ^= 16
            path.write_bytes(damaged)
            if path.name == checkpoint.MANIFEST:
                words = refusal(Checkpoint, saved)
            else:
                found = Checkpoint(saved)
                words = refusal(found.read, holders[path.name])
                assert refusal(found.verify) == words
            assert words.startswith(
                f"checkpoint file {path} is damaged (checksum differs); `mv {saved} {saved}.damaged`"
            )
        path.write_bytes(content)
    Checkpoint(saved).verify()


def test_what_is_missing_cut_short_or_renamed_is_told(saved, tmp_path):
    path = next(saved.glob("*.safetensors"))
    content = path.read_bytes()
    for other in (content[:-10], content + b"\0", None):
        path.unlink()
        if other is not None:
            path.write_bytes(other)
        assert f"{path} is missing or has not the {len(content)} bytes" in refusal(Checkpoint, saved)
    path.write_bytes(content)
    manifest = (saved / checkpoint.MANIFEST).read_bytes()
    for half in (
        b"",
        manifest[:99],
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        manifest.replace(b'"format": 2', b'"format": 1'),
    ):
        (saved / checkpoint.MANIFEST).write_bytes(half)
        assert "manifest.json is damaged" in refusal(Checkpoint, saved), half
    (saved / checkpoint.MANIFEST).write_bytes(manifest)
    assert "holds step 7, so this is not" in refusal(Checkpoint, saved.rename(saved.with_name("step_000000009")))
    assert f"{tmp_path}/manifest.json is missing; use another" in refusal(Checkpoint, tmp_path)


def test_the_newest_whole_checkpoints_stay_and_nothing_that_broke_off(tmp_path):
    checkpoint.prune(tmp_path, 2)
    folder = checkpoint.folder_of(tmp_path)
    names = ["step_000000009", "step_000000010", "step_123456789", "step_000000000"]
    others = ["step_12", "step_0000000012", "step_00000001x", "step_000000012.damaged", ".hidden", "mine"]
    for name in [*names, *others, ".step_000000011.ab12cd34", ".step_000000001.deleted"]:
        (folder / name / "below").mkdir(parents=True)
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [0, 9, 10, 123456789]
    checkpoint.prune(tmp_path, 2)
    assert {path.name for path in folder.iterdir()} == {"step_000000010", "step_123456789", *others}


def test_files_are_safetensors_and_what_is_none_is_refused(tmp_path):
    odd = torch.arange(12).reshape(3, 4)
    content = {"a": odd[1:], "none": odd[:0], "scalar": torch.tensor(2.5), 'a "b" \\ ü': torch.ones(1).bfloat16()}
    path = tmp_path / "x.safetensors"
    assert tensors.write(path, content, {"key": '"'}) == tensors.crc32(path) == zlib.crc32(path.read_bytes())
    require_identical(load_file(path), content)
    assert torch.equal(tensors.read_rows(path, "a", 1, 1, "weights"), content["a"][1:2])
    for bad in (path.read_bytes()[:-1], b"", b"\xff" * 8):
        path.write_bytes(bad)
        assert f"weights {path} cannot be read as safetensors: " in refusal(
            tensors.read_rows, path, "a", 0, 1, "weights"
        )
