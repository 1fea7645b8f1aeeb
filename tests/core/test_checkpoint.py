"""Checkpoints on disk: any rows come back bit for bit, and damage of any file is told in one line."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import refusal, require_identical
from safetensors.torch import load_file

from flux_ref import checkpoint, tensors
from flux_ref.checkpoint import Checkpoint, TensorSlice

INFO = {"step": 7, "samples": 84, "name": "micro", "config": {"model.rope_axes": [4, 2, 2], "optim.lr": 1e-4}}
SHAPES = {"model.w": (13, 3, 2), "model.b": (1,), "optimizer.state.w.exp_avg": (7, 5), "model.wide": (2, 300)}
WANT = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in SHAPES.items()}


def write_checkpoint(folder: Path, parts: int, left_out: int = 0) -> Path:
    """A checkpoint by so many ranks, of which some hold no rows of some tensors. left_out: rows of each tensor."""
    draw = random.Random(parts)
    pieces: list[dict[str, TensorSlice]] = [{} for _ in range(parts)]
    for name, tensor in WANT.items():
        ends = [left_out, *sorted(draw.randint(left_out, len(tensor)) for _ in range(parts - 1)), len(tensor)]
        for piece, (low, high) in zip(draw.sample(pieces, parts), pairwise(ends)):
            if low < high:
                piece[name] = TensorSlice(tensor[low:high], low, tensor.shape)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    written = [checkpoint.write_rank(partial, number, piece) for number, piece in enumerate(pieces)]
    checkpoint.publish(partial, folder, INFO, written)
    return folder


def test_any_rows_are_those_of_the_whole_and_none_is_left_out(tmp_path, monkeypatch):
    draw = random.Random(0)
    for number, (parts, most) in enumerate([(1, 1), (1, 10**9), (2, 100), (3, 10**9), (5, 100)]):
        monkeypatch.setattr(checkpoint, "FILE_BYTES", most)
        found = Checkpoint(write_checkpoint(tmp_path / str(number), parts))
        assert found.info == INFO and (len(found.files) > parts) == (most < 10**9)
        for name, tensor in list(WANT.items()) * 10:
            low, high = sorted(draw.randint(0, len(tensor)) for _ in range(2))
            assert torch.equal(found.read(name, low, high - low), tensor[low:high])
        require_identical({name: found.read(name) for name in found.tensors}, WANT)
    with pytest.raises(ValueError, match=r"rows of .* are missing"):
        write_checkpoint(tmp_path / "step_000000007", 2, left_out=1)
    assert not (tmp_path / "step_000000007").exists()


def test_damage_of_any_file_is_told_and_no_damaged_row_is_read(tmp_path, monkeypatch):
    """A flipped bit, a file that is cut short, longer or missing."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    saved = write_checkpoint(tmp_path / "step_000000007", parts=3)
    holders = {file: key for key, entry in Checkpoint(saved).tensors.items() for *_, file in entry.chunks}
    for path in sorted(saved.iterdir()):
        content = path.read_bytes()
        flipped = [content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :] for at in range(0, len(content), 7)]
        for other in (*flipped, b"", content[:-1], content + b"\0", b"null", b"\xff\xfe", None):
            path.unlink()
            if other is not None:
                path.write_bytes(other)
            if path.name == checkpoint.MANIFEST:
                words = refusal(Checkpoint, saved)
            else:
                words = refusal(Checkpoint(saved).read, holders[path.name])
            want = f"checkpoint file {path} is missing or damaged (checksum differs); `mv {saved} {saved}.damaged`"
            assert words.startswith(want)
            path.touch()
        path.write_bytes(content)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    assert "is of another version" in refusal(Checkpoint, saved)


def test_the_newest_whole_checkpoints_stay_and_nothing_that_broke_off(tmp_path):
    checkpoint.prune(tmp_path, 2)
    folder = checkpoint.folder_of(tmp_path)
    names = ["step_000000009", "step_000000010", "step_123456789", "step_000000000"]
    others = ["step_12", "step_00000001x", "step_000000012.damaged", ".hidden", "mine"]
    for name in [*names, *others, ".step_000000011.ab12cd34", ".step_000000001.deleted"]:
        (folder / name / "below").mkdir(parents=True)
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [0, 9, 10, 123456789]
    checkpoint.prune(tmp_path, 2)
    assert {path.name for path in folder.iterdir()} == {"step_000000010", "step_123456789", *others}


def test_files_are_safetensors_and_what_is_none_is_refused(tmp_path):
    odd = torch.arange(12).reshape(3, 4)
    content = {"a": odd[1:], "none": odd[:0], "scalar": torch.tensor(2.5), 'a "b" \\ ü': torch.ones(1).bfloat16()}
    path = tmp_path / "x.safetensors"
    assert tensors.write(path, content) == tensors.crc32(path)
    require_identical(load_file(path), content)
    assert torch.equal(tensors.read_rows(path, "a", 1, 1, "weights"), content["a"][1:2])
    for bad in (path.read_bytes()[:-1], b"\xff" * 8):
        path.write_bytes(bad)
        words = refusal(tensors.read_rows, path, "a", 0, 1, "weights")
        assert f"weights {path} cannot be read as safetensors: " in words
