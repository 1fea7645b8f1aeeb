"""Checkpoint files: any rows come back bit for bit, and damage is refused in one line that names the place."""

import json
import os
import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import refusal, require_identical
from safetensors import safe_open
from safetensors.torch import load_file

from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, checkpoint_reader, safetensors_io
from flux_ref.formats.checkpoint_files import TensorSlice
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.formats.safetensors_io import BLOCK, CheckedFile, FileEntry

INFO = {"step": 7, "samples": 84, "name": "micro", "train_samples": 50}
INFO |= {"config": {"train.global_batch": 12, "model.rope_axes": [4, 2, 2]}}
NAME = "rank_00000.safetensors"
SHAPES = {"model.w": (13, 3, 2), "model.b": (1,), "optimizer.state.w.exp_avg": (7, 5), "model.wide": (2, 300)}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    content = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return content | {"model.b": content["model.b"].half(), "model.wide": content["model.wide"].bfloat16()}


def write_checkpoint(folder: Path, content: dict[str, torch.Tensor], parts: int = 1, seed: int = 0) -> Path:
    """A checkpoint whose tensors lie in pieces in `parts` files; a piece of no rows is nowhere."""
    draw = random.Random(seed)
    pieces = [{} for _ in range(parts)]
    for name, tensor in content.items():
        ends = [0, *sorted(draw.randint(0, len(tensor)) for _ in range(parts - 1)), len(tensor)]
        for piece, (low, high) in zip(draw.sample(pieces, parts), pairwise(ends)):
            if low < high:
                piece[name] = TensorSlice(tensor[low:high], low, tensor.shape)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    written = [checkpoint_files.write_rank(partial, number, piece) for number, piece in enumerate(pieces)]
    checkpoint_files.publish(partial, folder, checkpoint_files.manifest(INFO, written))
    return folder


@pytest.fixture
def small_blocks(monkeypatch) -> int:
    """Checksums over so few bytes that small tensors have many."""
    for module in (safetensors_io, checkpoint_files, checkpoint_reader):
        monkeypatch.setattr(module, "BLOCK", 64)
    return 64


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint in three files."""
    return write_checkpoint(tmp_path / "step_000000007", tensors(), parts=3)


def everything(folder: Path) -> dict[str, torch.Tensor]:
    found = Checkpoint(folder)
    return {name: found.read(name) for name in found.tensors}


def test_checksums_are_crc32_of_each_mebibyte(tmp_path):
    edges = [[], [0], [BLOCK, BLOCK], [BLOCK - 1, 1, 1], [BLOCK + 1], [1, 3 * BLOCK, 5], [7, 2 * BLOCK - 7]]
    for number, sizes in enumerate(edges):
        content, begin = random.Random(0).randbytes(sum(sizes)), 0
        file = CheckedFile(tmp_path / str(number))
        for size in sizes:
            file.write(content[begin : begin + size])
            begin += size
        checksums = [zlib.crc32(content[i : i + (1 << 20)]) for i in range(0, len(content), 1 << 20)]
        assert file.close() == FileEntry(len(content), checksums), sizes
        assert (tmp_path / str(number)).read_bytes() == content
    with pytest.raises(FileExistsError):
        CheckedFile(tmp_path / "0")


def test_a_writer_waits_for_the_disk_again_and_again(tmp_path, monkeypatch):
    """Otherwise the last bytes of a large file reach a slow disk in one wait, which the hang watch takes for a hang."""
    at = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: at.append(os.stat(tmp_path / "file").st_size))
    monkeypatch.setattr(safetensors_io, "SYNCED", 2 * BLOCK)
    file = CheckedFile(tmp_path / "file")
    for size in (BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 5):
        file.write(bytes(size))
    file.close()
    assert at == [2 * BLOCK, 4 * BLOCK, 6 * BLOCK, 6 * BLOCK + 4]


def test_files_are_safetensors(tmp_path):
    odd = torch.arange(12).reshape(3, 4)
    content = {
        "a": torch.randn(3, 5),
        "transposed": odd.T.bfloat16(),
        "every other": odd.float()[:, ::2],
        "no rows": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        'a "name" \\ ü': torch.ones(1).half(),
    }
    entries = {name: (safetensors_io.DTYPE_NAMES[tensor.dtype], tensor.shape) for name, tensor in content.items()}
    metadata = {"key": "value", "quote": '"'}
    _, begins = safetensors_io.write(tmp_path / "x.safetensors", entries, metadata, content.values())
    assert begins["a"] % 8 == 0 and begins["transposed"] == begins["a"] + 4 * 15
    require_identical(load_file(tmp_path / "x.safetensors"), content)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        assert opened.metadata() == metadata


def test_any_rows_are_those_of_the_whole(tmp_path, small_blocks):
    draw = random.Random(0)
    for seed, parts in enumerate((1, 2, 3, 5) * 3):
        want = tensors(seed)
        found = Checkpoint(write_checkpoint(tmp_path / str(seed), want, parts, seed))
        assert found.info == INFO
        for _ in range(60):
            name = draw.choice(list(want))
            low, high = sorted(draw.randint(0, len(want[name])) for _ in range(2))
            rows = found.read(name, low, high - low)
            assert torch.equal(rows, want[name][low:high]) and rows.shape == want[name][low:high].shape
            assert torch.equal(found.read(name, low), want[name][low:])
        require_identical(everything(tmp_path / str(seed)), want)


def test_rows_that_a_tensor_lacks_are_not_made_up(saved):
    found = Checkpoint(saved)
    for first, count in ((10, 10), (-1, 2), (14, 0), (3, -1), (14, None)):
        with pytest.raises(IndexError, match="which has 13"):
            found.read("model.w", first, count)


def test_a_tensor_named_info_hides_no_counters(tmp_path):
    folder = write_checkpoint(tmp_path / "step_000000007", tensors() | {"info": torch.ones(1)})
    assert "its entry of info holds what is no count" in refusal_of(folder, ["info", "train_samples"], -5)


def touched(found: Checkpoint, name: str, low: int, high: int, block: int) -> set[tuple[str, int]]:
    """The blocks (file, number) in which rows of a tensor lie."""
    width = tensors()[name][0].nbytes
    places = set()
    for file, offset, first, count in found.tensors[name].chunks:
        for row in range(max(low, first), min(high, first + count)):
            begin = offset + (row - first) * width
            places |= {(file, number) for number in range(begin // block, (begin + width - 1) // block + 1)}
    return places


def test_a_flipped_bit_is_told_by_every_read_that_meets_it_and_by_no_other(small_blocks, tmp_path):
    folder, want, draw = write_checkpoint(tmp_path / "own", tensors(), parts=3), tensors(), random.Random(2)
    for _ in range(150):
        path = draw.choice(sorted(folder.glob("*.safetensors")))
        content = path.read_bytes()
        at = draw.randrange(len(content))
        damaged = bytearray(content)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        block = at // small_blocks
        end = min((block + 1) * small_blocks, len(content))
        words = f"checkpoint file {path} is damaged between bytes {block * small_blocks} and {end}"
        found = Checkpoint(folder)
        for name in want:
            low, high = sorted(draw.randint(0, len(want[name])) for _ in range(2))
            if (path.name, block) in touched(found, name, low, high, small_blocks):
                assert words in refusal(found.read, name, low, high - low)
            else:
                assert torch.equal(found.read(name, low, high - low), want[name][low:high])
        assert words in refusal(found.verify)
        path.write_bytes(content)
    require_identical(everything(folder), want)


def test_a_file_that_is_missing_shorter_or_longer_is_refused(saved):
    path, opened = saved / "rank_00001.safetensors", Checkpoint(saved)
    content = path.read_bytes()
    for other in (content[:-1000], content + b"\0"):
        path.write_bytes(other)
        want = f"checkpoint file {path} has {len(other)} bytes, its manifest says {len(content)}; use another"
        assert want in refusal(Checkpoint, saved)
    path.unlink()
    assert f"checkpoint file {path} is missing; use another checkpoint" in refusal(Checkpoint, saved)
    assert f"{path}: No such file" in refusal(opened.verify)  # removed after it was opened
    path.touch()
    assert "is damaged between bytes 0 and 0" in refusal(opened.verify)


def test_the_newest_other_whole_checkpoint_is_named(tmp_path):
    first, second, third = (tmp_path / "checkpoints" / f"step_00000000{step}" for step in (6, 7, 8))
    write_checkpoint(second, tensors())
    for folder in (first, third):
        folder.mkdir()  # damaged
        want = f"is missing; the newest other checkpoint that is whole is {second}; `mv {folder} {folder}.damaged`"
        assert want in refusal(Checkpoint, folder)
    (second / NAME).unlink()
    assert "no other checkpoint of the run is whole; train.py --run.overwrite=true" in refusal(Checkpoint, second)


def test_a_flipped_bit_in_the_manifest_is_refused_or_changes_nothing(saved):
    path = saved / checkpoint_files.MANIFEST
    content, whole, draw, refused = path.read_bytes(), Checkpoint(saved), random.Random(3), 0
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            found = Checkpoint(saved)
        except Refusal as error:
            assert "\n" not in str(error) and str(saved) in str(error)
            refused += 1
            continue
        assert (found.info, found.files, found.tensors) == (whole.info, whole.files, whole.tensors)
    assert refused > 0.9 * len(content)  # the rest turns a space into a tab


def test_what_is_no_manifest_or_half_of_one_is_refused(saved, tmp_path):
    path = saved / checkpoint_files.MANIFEST
    whole = path.read_bytes()
    halves = [whole[: int(share * len(whole))] for share in (0, 0.3, 0.99)]
    others = [b"[]", b"3", b'"x"', b"null", b"{}", b'{"crc32": 0}', b'{"format": 1, "crc32": 0}', b"\xff\xfe"]
    for content in (*halves, *others, b"[" * 99999):
        path.write_bytes(content)
        assert f"manifest {path} is damaged" in refusal(Checkpoint, saved), content[:40]
    path.unlink()
    (tmp_path / "file").write_text("x")
    for path in (saved, tmp_path / "absent", tmp_path / "file"):
        assert f"{path} is not a checkpoint: {path}/manifest.json" in refusal(Checkpoint, path)


def put(content: dict, place: list, value: object) -> None:
    *way, last = place
    for key in way:
        content = content[key]
    content[last] = value


def refusal_of(folder: Path, place: list, value: object) -> str:
    """How a checkpoint is refused when a program with other ideas has written its manifest, with a right checksum."""
    path = folder / checkpoint_files.MANIFEST
    before = path.read_text()
    content = json.loads(before)
    del content["crc32"]
    put(content, place, value)
    path.write_text(json.dumps(content | {"crc32": zlib.crc32(json.dumps(content).encode())}))
    try:
        text = refusal(Checkpoint, folder)
    except pytest.fail.Exception:
        text = "it is read"
    path.write_text(before)
    return text


WHOLE_NUMBERS = [
    ["info", "step"],
    ["info", "samples"],
    ["info", "train_samples"],
    ["files", NAME, "bytes"],
    ["files", NAME, "crc32", 0],
    ["tensors", "model.w", "dtype"],
    ["tensors", "model.w", "shape"],
    ["tensors", "model.w", "shape", 1],
    ["tensors", "model.w", "chunks"],
    ["tensors", "model.w", "chunks", 0],
    *(["tensors", "model.w", "chunks", 0, i] for i in range(4)),
]


def test_a_manifest_that_another_program_has_written_is_refused(tmp_path):
    """Numbers and texts of the wrong kind, files outside its folder, and rows that no file holds."""
    folder = write_checkpoint(tmp_path / "step_000000007", tensors())
    ((file, offset, _, _),) = Checkpoint(folder).tensors["model.w"].chunks
    (tmp_path / "x.safetensors").write_bytes((folder / file).read_bytes())
    whole = json.loads((folder / checkpoint_files.MANIFEST).read_text())
    cases = [(place, value, "") for place in WHOLE_NUMBERS for value in (-1, 2**60, 1.5, True, None, "7", [], {})]
    cases += [(["info", key], value, "") for key in ("config", "name") for value in (7, None, ["x"])]
    cases += [(["tensors", "info"], whole["tensors"]["model.b"] | {"dtype": 3}, "its dtype of 'info' is 3")]
    for key in INFO.keys() - {"train_samples"}:
        cases.append((["info"], {k: v for k, v in INFO.items() if k != key}, f"it lacks '{key}'"))
    cases += [(["info", "samples"], 83, "do not belong together")]
    cases += [(["format"], version, "this flux_ref reads 1") for version in (0, 2, "1", None, "two\nlines")]
    for name in ("../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", "x.pt", "x.safetensors\n", ""):
        cases.append((["files", name], {"bytes": 0, "crc32": []}, "files outside its folder"))
        cases.append((["tensors", "model.b", "chunks", 0, 0], name, "is damaged"))
    for kept in ([(0, 4)], [(0, 4), (9, 13)], [(4, 13)], [(0, 6), (0, 13)], [(0, 14)]):
        chunks = [(file, offset + low * 24, low, high - low) for low, high in kept]
        cases.append((["tensors", "model.w", "chunks"], chunks, "rows of model.w are"))
    cases.append((["tensors", "model.w", "chunks"], [(file, 10**9, 0, 13)], "outside"))
    wrong = []
    for place, value, words in cases:
        text = refusal_of(folder, place, value)
        if words not in text or str(folder) not in text:
            wrong.append((place, value, text))
    assert wrong == []
    other = folder.rename(folder.with_name("step_000000009"))
    assert f"{other} holds step 7" in refusal(Checkpoint, other)
    Checkpoint(other.rename(folder.with_name("mine")))


def test_only_whole_checkpoints_are_found_oldest_first_and_cleaning_removes_what_broke_off(tmp_path):
    checkpoint_files.clean(tmp_path)
    assert checkpoint_files.list_checkpoints(tmp_path) == []
    folder = checkpoint_files.folder_of(tmp_path)
    names = ["step_000000010", "step_000000009", "step_123456789", "step_000000000"]
    others = ["step_12", "step_0000000012", "step_00000001x", "step_000000012.partial", "x_step_000000012"]
    others += ["Step_000000012", "step_000000012 ", "step_-00000001", ".hidden", "mine"]
    for name in [*names, *others, ".step_000000011.ab12cd34", ".step_000000001.deleted"]:
        (folder / name / "below").mkdir(parents=True)
        (folder / name / "file").write_text(name)
    listed = checkpoint_files.list_checkpoints(tmp_path)
    assert [path.name for path in listed] == sorted(names)
    assert [checkpoint_files.step_of(path) for path in listed] == [0, 9, 10, 123456789]
    checkpoint_files.clean(tmp_path)
    assert {path.name: (path / "file").read_text() for path in folder.iterdir()} == {
        name: name for name in names + others
    }
