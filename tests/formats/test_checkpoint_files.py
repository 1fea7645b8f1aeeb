"""Checkpoint files: any rows come back bit for bit, and damage is refused in one line that names the place."""

import contextlib
import io
import json
import pickle
import random
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import refusal, require_identical
from payload import Payload
from safetensors import safe_open
from safetensors.torch import load_file

from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, checkpoint_reader, safetensors_io
from flux_ref.formats.checkpoint_files import Manifest, TensorEntry
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.formats.safetensors_io import BLOCK, CheckedFile, FileEntry
from flux_ref.run import weight_files

INFO = {"step": 7, "samples": 84, "name": "micro", "config": {"train.seed": 0, "model.rope_axes": [4, 2, 2]}}
NAME = "rank_00000.safetensors"
SHAPES = {"model.w": (13, 3, 2), "model.b": (1,), "optimizer.state.w.exp_avg": (7, 5), "model.wide": (2, 300)}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    content = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return content | {"model.b": content["model.b"].half(), "model.wide": content["model.wide"].bfloat16()}


def write_file(path: Path, content: dict[str, torch.Tensor], metadata: dict) -> tuple[FileEntry, dict[str, int]]:
    """A safetensors file, and where each tensor begins."""
    entries = {name: (safetensors_io.DTYPE_NAMES[tensor.dtype], tensor.shape) for name, tensor in content.items()}
    file, begins = safetensors_io.write(path, entries, metadata, content.values())
    assert all(begin % 8 == 0 for begin in list(begins.values())[:1])
    return file, begins


def cut(rows: int, parts: int, draw: random.Random) -> list[tuple[int, int]]:
    """So many ranges that make up 0 .. rows, some of them empty."""
    return list(pairwise([0, *sorted(draw.randint(0, rows) for _ in range(parts - 1)), rows]))


def write_checkpoint(folder: Path, content: dict[str, torch.Tensor], parts: int = 1, seed: int = 0) -> Path:
    """A checkpoint whose tensors lie in pieces in `parts` files; a piece of no rows is nowhere."""
    draw, pieces, chunks = random.Random(seed), [{} for _ in range(parts)], {name: [] for name in content}
    for name, tensor in content.items():
        files = draw.sample(range(parts), parts)
        for number, (low, high) in zip(files, cut(len(tensor), parts, draw)):
            if low < high:
                pieces[number][name] = (low, tensor[low:high])
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    files = {}
    for number, piece in enumerate(pieces):
        file = f"rank_{number:05d}.safetensors"
        files[file], begins = write_file(
            partial / file, {name: rows for name, (_, rows) in piece.items()}, {"format": "pt"}
        )
        for name, (low, rows) in piece.items():
            chunks[name].append((file, begins[name], low, len(rows)))
    entries = {
        name: TensorEntry(safetensors_io.DTYPE_NAMES[tensor.dtype], list(tensor.shape), chunks[name])
        for name, tensor in content.items()
    }
    checkpoint_files.publish(partial, folder, Manifest(INFO, files, entries))
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
    write_file(tmp_path / "x.safetensors", content, {"key": "value", "quote": '"'})
    require_identical(load_file(tmp_path / "x.safetensors"), content)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"key": "value", "quote": '"'}


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


def test_a_read_that_returns_fewer_bytes_than_asked_for_is_continued(saved, monkeypatch):
    """As network file systems may."""

    class Short(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            return super().read(min(size, 1000) if size >= 0 else 1000)

        def readinto(self, buffer) -> int:
            return super().readinto(memoryview(buffer)[:1000])

    real = Path.open

    def opened(path: Path, mode: str = "r", buffering: int = -1, **options: object):
        if path.suffix != ".safetensors":
            return real(path, mode, buffering, **options)
        return Short(path) if buffering == 0 else io.BufferedReader(Short(path))

    monkeypatch.setattr(Path, "open", opened)
    require_identical(everything(saved), tensors())


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


def rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest and give it a right checksum, as only another program would."""
    path = folder / checkpoint_files.MANIFEST
    content = json.loads(path.read_text())
    del content["crc32"]
    change(content)
    path.write_text(json.dumps(content | {"crc32": zlib.crc32(json.dumps(content).encode())}))


def refusal_of(folder: Path, change: Callable[[dict], object]) -> str:
    """How a checkpoint is refused when a program with other ideas has written its manifest, with a right checksum."""
    path = folder / checkpoint_files.MANIFEST
    before = path.read_text()
    rewrite(folder, change)
    text = refusal(Checkpoint, folder)
    path.write_text(before)
    assert str(folder) in text
    return text


def test_another_version_of_the_format_is_refused(saved):
    for version in (0, 2, "1", None, "two\nlines"):
        text = refusal_of(saved, lambda content, version=version: content.update(format=version))
        assert "format version" in text and "this flux_ref reads 1" in text


def test_numbers_and_texts_of_the_wrong_kind_and_a_folder_of_another_step_are_refused(saved):
    """With a right checksum, as only another program would write them."""
    wrong, bad = [], [-1, 2**60, 1.5, True, None, "7", [], {}]
    places = {
        "step": lambda content, value: content["info"].update(step=value),
        "samples": lambda content, value: content["info"].update(samples=value),
        "train_samples": lambda content, value: content["info"].update(train_samples=value),
        "bytes": lambda content, value: content["files"][NAME].update(bytes=value),
        "crc32": lambda content, value: content["files"][NAME]["crc32"].__setitem__(0, value),
        "dtype": lambda content, value: content["tensors"]["model.w"].update(dtype=value),
        "shape": lambda content, value: content["tensors"]["model.w"].update(shape=value),
        "axis": lambda content, value: content["tensors"]["model.w"]["shape"].__setitem__(1, value),
        "chunk": lambda content, value: content["tensors"]["model.w"]["chunks"].__setitem__(0, value),
        **{
            f"chunk {i}": lambda content, value, i=i: content["tensors"]["model.w"]["chunks"][0].__setitem__(i, value)
            for i in range(4)
        },
    }
    cases = [(place, value) for place in places for value in bad]
    cases += [
        (None, lambda info, key=key, value=value: info.update({key: value}))
        for key in ("config", "name", "skipped")
        for value in (7, None, ["x"], {"x": "y", "\u0663": "y"} if key == "skipped" else 0.5)
    ]
    for place, value in cases:
        change = partial(places[place], value=value) if place else lambda content, value=value: value(content["info"])
        try:
            refusal_of(saved, change)
        except pytest.fail.Exception:
            wrong.append((place, value))
    assert wrong == []
    other = saved.rename(saved.with_name("step_000000009"))
    assert f"{other} holds step 7" in refusal(Checkpoint, other)
    Checkpoint(other.rename(saved.with_name("mine")))


def test_a_manifest_that_names_files_outside_its_folder_is_refused(saved, tmp_path):
    """Whether it lists such a file or lets rows lie in it."""
    (tmp_path / "x.safetensors").write_bytes((saved / NAME).read_bytes())
    for name in ("../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", "x.pt", "x.safetensors\n", ""):

        def listed(content: dict, name: str = name) -> None:
            content["files"][name] = content["files"][NAME]

        def used(content: dict, name: str = name) -> None:
            content["tensors"]["model.b"]["chunks"][0][0] = name

        assert all("is damaged" in refusal_of(saved, change) for change in (listed, used)), repr(name)


def test_rows_that_no_file_holds_or_that_lie_outside_it_are_refused(tmp_path):
    folder, width = write_checkpoint(tmp_path / "x", tensors()), 4 * 6
    ((file, offset, _, _),) = Checkpoint(folder).tensors["model.w"].chunks
    cases = {"missing": [[(0, 4)], [(0, 4), (9, 13)], [(4, 13)]], "doubled": [[(0, 6), (0, 13)], [(0, 14)]]}
    cases = {
        words: [[(file, offset + low * width, low, high - low) for low, high in kept] for kept in ranges]
        for words, ranges in cases.items()
    }
    cases["outside"] = [[(file, 10**9, 0, 13)]]
    for words, tables in cases.items():
        for chunks in tables:
            text = refusal_of(
                folder, lambda content, chunks=chunks: content["tensors"]["model.w"].update(chunks=chunks)
            )
            assert "rows of model.w are" in text, (words, chunks)


def test_a_pickle_is_never_executed(tmp_path, micro):
    bomb = tmp_path / "executed"
    content = pickle.dumps(Payload(bomb)).ljust(8192, b"\0")  # as long as a file of tensors
    for name in (".metadata", "model.pt", "pytorch_model.bin", NAME, checkpoint_files.MANIFEST):
        alone, whole = tmp_path / f"alone {name}", write_checkpoint(tmp_path / f"whole {name}", tensors())
        alone.mkdir()
        for folder in (alone, whole):
            (folder / name).write_bytes(content)
        if name == NAME:  # and its manifest says so: its bytes are read as numbers
            entry = {"bytes": len(content), "crc32": [zlib.crc32(content)]}
            rewrite(whole, lambda manifest, entry=entry: manifest["files"].update({NAME: entry}))
            assert everything(whole).keys() == SHAPES.keys()
        for path in (alone, alone / name, whole, whole / name):
            for call in (everything, lambda path: weight_files.open_source(weight_files.find(path), micro.model)):
                with contextlib.suppress(Refusal):
                    call(path)
    assert not bomb.exists()
    pickle.loads(content)
    assert bomb.exists()  # it would have gone off


def test_only_whole_checkpoints_are_found_oldest_first(tmp_path):
    assert checkpoint_files.list_checkpoints(tmp_path) == []
    folder = checkpoint_files.folder_of(tmp_path)
    names = ["step_000000010", "step_000000009", "step_123456789", "step_000000000"]
    others = [".step_000000011.ab12cd34", ".step_000000001.deleted", "step_12", "step_0000000012", "step_00000001x"]
    others += ["step_000000012.partial", "x_step_000000012", "Step_000000012", "step_000000012 ", "step_-00000001"]
    for name in [*names, *others]:
        (folder / name).mkdir(parents=True)
    listed = checkpoint_files.list_checkpoints(tmp_path)
    assert [path.name for path in listed] == sorted(names)
    assert [checkpoint_files.step_of(path) for path in listed] == [0, 9, 10, 123456789]


def test_cleaning_removes_what_broke_off_and_nothing_else(tmp_path):
    checkpoint_files.clean(tmp_path)
    folder = checkpoint_files.folder_of(tmp_path)
    kept = ["step_000000010", ".hidden", "mine", "step_000000011.backup"]
    for name in [*kept, ".step_000000011.ab12cd34", ".step_000000001.deleted"]:
        (folder / name / "below").mkdir(parents=True)
        (folder / name / "file").write_text(name)
    (folder / "notes.txt").write_text("mine")
    checkpoint_files.clean(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, "notes.txt"])
    assert all((folder / name / "file").read_text() == name for name in kept)
