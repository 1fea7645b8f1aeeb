"""Files of a checkpoint: what is written comes back bit for bit, any rows of it; what is damaged or foreign is told
in one line that names the file and the place, and nothing in a folder is ever executed.
"""

import contextlib
import io
import json
import pickle
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import refusal, require_identical
from payload import Payload
from safetensors import safe_open
from safetensors.torch import load_file

from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, safetensors_io
from flux_ref.formats.checkpoint_files import Checkpoint, Manifest, TensorEntry
from flux_ref.formats.safetensors_io import BLOCK, CheckedFile, FileEntry
from flux_ref.run import weight_files

INFO = {"step": 7, "samples": 84, "name": "micro", "config": {"train.seed": 0, "model.rope_axes": [4, 2, 2]}}
NAME = "rank_00000.safetensors"
SHAPES = {"model.w": (13, 3, 2), "model.b": (1,), "optimizer.state.w.exp_avg": (7, 5), "model.wide": (2, 300)}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write_file(path: Path, content: dict[str, torch.Tensor]) -> tuple[FileEntry, dict[str, int]]:
    """A safetensors file, and where each tensor begins."""
    entries = {name: (safetensors_io.DTYPE_NAMES[tensor.dtype], tensor.shape) for name, tensor in content.items()}
    head, begins = safetensors_io.header(entries, {"format": "pt"})
    file = CheckedFile(path)
    file.write(head)
    for tensor in content.values():
        file.write_tensor(tensor)
    return file.close(), begins


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
        files[file], begins = write_file(partial / file, {name: rows for name, (_, rows) in piece.items()})
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
    for module in (safetensors_io, checkpoint_files):
        monkeypatch.setattr(module, "BLOCK", 64)
    return 64


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint in three files."""
    return write_checkpoint(tmp_path / "step_000000007", tensors(), parts=3)


def everything(folder: Path) -> dict[str, torch.Tensor]:
    found = Checkpoint(folder)
    return {name: found.read(name) for name in found.tensors}


def require_checksums(path: Path, sizes: list[int], block: int, draw: random.Random) -> None:
    """Write pieces of such sizes; file, size and checksums must be those of the whole."""
    content = draw.randbytes(sum(sizes))
    file, at = CheckedFile(path), 0
    for size in sizes:
        file.write(content[at : at + size])
        at += size
    entry = file.close()
    assert path.read_bytes() == content and entry.bytes == len(content)
    assert entry.crc32 == [zlib.crc32(content[i : i + block]) for i in range(0, len(content), block)], sizes


def test_checksums_are_crc32_of_each_mebibyte(tmp_path):
    edges = [[], [0], [BLOCK, BLOCK], [BLOCK - 1, 1, 1], [BLOCK + 1], [1, 3 * BLOCK, 5], [7, 2 * BLOCK - 7]]
    for number, sizes in enumerate(edges):
        require_checksums(tmp_path / str(number), sizes, 1 << 20, random.Random(0))


def test_a_file_is_never_written_over(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        CheckedFile(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"


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
    head, begins = safetensors_io.header(entries, {"key": "value", "quote": '"'})
    assert len(head) % 8 == 0
    file = CheckedFile(tmp_path / "x.safetensors")
    file.write(head)
    for tensor in content.values():
        file.write_tensor(tensor)
    file.close()
    require_identical(load_file(tmp_path / "x.safetensors"), content)
    whole = (tmp_path / "x.safetensors").read_bytes()
    for name, begin in begins.items():
        raw = content[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert whole[begin : begin + len(raw)] == raw
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


def test_values_keep_their_dtype(tmp_path):
    want = {f"model.{dtype}": torch.randn(9, 4).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    require_identical(everything(write_checkpoint(tmp_path / "x", want, parts=2)), want)


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
    width = 4 * tensors()[name][0].numel()
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
    path = saved / "rank_00001.safetensors"
    content = path.read_bytes()
    for other in (content[:-1], content[:-1000], content + b"\0"):
        path.write_bytes(other)
        text = refusal(Checkpoint, saved)
        assert str(path) in text and "use another checkpoint" in text
        assert f"has {len(other)} bytes" in text and f"says {len(content)}" in text
    path.unlink()
    text = refusal(Checkpoint, saved)
    assert "lacks its file" in text and path.name in text and str(saved) in text


def test_a_file_cut_short_after_opening_is_refused(saved):
    found = Checkpoint(saved)
    for path in saved.glob("*.safetensors"):
        path.write_bytes(b"")
    assert "is damaged between bytes 0 and 0" in refusal(found.read, "model.w")
    for path in saved.glob("*.safetensors"):
        path.unlink()
    assert "No such file" in refusal(Checkpoint.read, found, "model.w")


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


def test_what_is_no_manifest_or_half_of_one_is_refused(saved):
    path = saved / checkpoint_files.MANIFEST
    whole = path.read_bytes()
    halves = [whole[: int(share * len(whole))] for share in (0, 0.3, 0.99)]
    others = [b"[]", b"3", b'"x"', b"null", b"{}", b'{"crc32": 0}', b'{"format": 1, "crc32": 0}', b"\xff\xfe"]
    for content in (*halves, *others, b"[" * 99999):
        path.write_bytes(content)
        assert f"manifest {path} is damaged" in refusal(Checkpoint, saved), content[:40]


def test_a_folder_without_a_manifest_is_no_checkpoint(saved, tmp_path):
    (saved / checkpoint_files.MANIFEST).unlink()
    (tmp_path / "file").write_text("x")
    for path in (saved, tmp_path / "absent", tmp_path / "file"):
        assert f"{path} is not a checkpoint: manifest.json" in refusal(Checkpoint, path)


def test_another_version_of_the_format_is_refused(saved):
    path = saved / checkpoint_files.MANIFEST
    whole = json.loads(path.read_text())
    del whole["crc32"]
    for version in (0, 2, "1", None, "two\nlines"):
        content = whole | {"format": version}
        path.write_text(json.dumps(content | {"crc32": zlib.crc32(json.dumps(content).encode())}))
        text = refusal(Checkpoint, saved)
        assert "format version" in text and "this flux_ref reads 1" in text and str(saved) in text


def rewrite(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Replace the manifest by another with a right checksum, as only another program would."""
    path = folder / checkpoint_files.MANIFEST
    path.write_text(change(Manifest.parse(path.read_text())).dump())


def with_chunks(name: str, chunks: list[tuple]) -> Callable[[Manifest], Manifest]:
    """A change of where a tensor's rows lie."""
    return lambda manifest: replace(
        manifest, tensors=manifest.tensors | {name: replace(manifest.tensors[name], chunks=chunks)}
    )


def test_a_manifest_that_names_files_outside_its_folder_is_refused(saved, tmp_path):
    """Such a file is not even opened, whether the manifest lists it or lets tensors lie in it."""
    (tmp_path / "x.safetensors").write_bytes((saved / NAME).read_bytes())
    original = (saved / checkpoint_files.MANIFEST).read_text()
    places = [chunk[1:] for chunk in Manifest.parse(original).tensors["model.b"].chunks]
    for name in ("../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", "x.pt", "x.safetensors\n", ""):

        def listed(manifest: Manifest, name: str = name) -> Manifest:
            return replace(manifest, files=manifest.files | {name: manifest.files[NAME]})

        for change in (listed, with_chunks("model.b", [(name, *place) for place in places])):
            (saved / checkpoint_files.MANIFEST).write_text(original)
            rewrite(saved, change)
            assert "is damaged" in refusal(lambda: Checkpoint(saved).read("model.b")), repr(name)


def test_rows_that_no_file_holds_or_that_lie_outside_it_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "x", tensors())
    original = (folder / checkpoint_files.MANIFEST).read_text()
    entries, width = Manifest.parse(original).tensors, 4 * 6
    file, offset, _, _ = entries["model.w"].chunks[0]

    def reply(name: str, chunks: list[tuple]) -> str:
        (folder / checkpoint_files.MANIFEST).write_text(original)
        rewrite(folder, with_chunks(name, chunks))
        return refusal(lambda: Checkpoint(folder).read(name))

    for low, high in ((0, 4), (4, 9), (9, 13)):  # rows left out
        kept = [(begin, end) for begin, end in ((0, low), (high, 13)) if begin < end]
        chunks = [(file, offset + begin * width, begin, end - begin) for begin, end in kept]
        assert "rows of model.w are missing" in reply("model.w", chunks)
    assert str(folder) in reply("model.w", [(file, offset, 0, 6), (file, offset, 0, 7)])  # rows listed twice
    for place in (-8, 10**9):
        assert str(folder) in reply("model.b", [(entries["model.b"].chunks[0][0], place, 0, 1)])


def test_a_pickle_is_never_executed(tmp_path, micro):
    bomb, content = tmp_path / "executed", pickle.dumps(Payload(tmp_path / "executed"))
    for name in (".metadata", "model.pt", "pytorch_model.bin", NAME, checkpoint_files.MANIFEST):
        alone, whole = tmp_path / f"alone {name}", write_checkpoint(tmp_path / f"whole {name}", tensors())
        alone.mkdir()
        for folder in (alone, whole):
            (folder / name).write_bytes(content)
        if name == NAME:  # and its manifest says so
            files_entry = {NAME: FileEntry(len(content), [zlib.crc32(content)])}
            rewrite(whole, lambda manifest, entry=files_entry: replace(manifest, files=entry))
        for path in (alone, alone / name, whole, whole / name):
            for call in (everything, lambda path: weight_files.open_source(weight_files.find(path), micro.model)):
                with contextlib.suppress(Refusal):
                    call(path)
    assert not bomb.exists()
    pickle.loads(content)
    assert bomb.exists()  # it would have gone off


def test_only_whole_checkpoints_are_found_oldest_first(tmp_path):
    assert checkpoint_files.found(tmp_path) == []
    folder = checkpoint_files.folder_of(tmp_path)
    names = ["step_000000010", "step_000000009", "step_123456789", "step_000000000"]
    others = [".step_000000011.ab12cd34", ".step_000000001.deleted", "step_12", "step_0000000012", "step_00000001x"]
    others += ["step_000000012.partial", "x_step_000000012", "Step_000000012", "step_000000012 ", "step_-00000001"]
    for name in [*names, *others]:
        (folder / name).mkdir(parents=True)
    assert [path.name for path in checkpoint_files.found(tmp_path)] == sorted(names)
    assert [checkpoint_files.step_of(path) for path in checkpoint_files.found(tmp_path)] == [0, 9, 10, 123456789]


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


# What does not fit
