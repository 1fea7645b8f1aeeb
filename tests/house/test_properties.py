"""Whatever a foreign file holds: it is read right, or refused in one line.

One property for each reader of files that people and other programs make. "Right" is what a second reader finds.
"""

import io
import json
import string
import tarfile
import tempfile
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import made_logs
import numpy as np
import pytest
import safetensors.torch
import shard_damage
import torch
from conftest import MICRO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from flux_ref import config_file, dataset, safetensors_io, weights
from flux_ref.cli import Fault, Refusal
from flux_ref.config import KEYS
from flux_ref.pictures import captioned as pictures
from flux_ref.pictures.captioned import Rejected
from tools.prepare.tars import split_into_parts
from tools.report import result_log, score

pytestmark = pytest.mark.timeout(60)
MODEL = config_file.load(MICRO).model
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def examples(count):
    """The same examples each time, as many as a second or two takes."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def told():
    """What is not read is refused: `cli.complain` says it in one line. Each other exception ends the test."""
    return suppress(Refusal, Fault)


@contextmanager
def file_of(content, name="file"):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        yield path


@st.composite
def damaged(draw, sound, head=0):
    """The bytes as they are, with other bytes, cuts and insertions, or none of them. head: where half of that lies."""
    kind = draw(st.sampled_from(["sound", "sound", "same length", "any length", "random"]))
    if kind == "random":
        return draw(st.binary(max_size=64))
    content = bytearray(sound)
    for _ in range(0 if kind == "sound" else draw(st.integers(1, 3))):
        most = head if head and draw(st.booleans()) else len(content)
        begin = draw(st.integers(0, min(most, len(content))))
        new = draw(
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"0", b"1e999", b"-1", b'"', b"[[", bytes(512)])
        )
        ends = [begin + len(new)] if kind == "same length" else [begin, begin + 1, begin + 512, len(content)]
        content[begin : draw(st.sampled_from(ends))] = new
    return bytes(content[: len(sound)] if kind == "same length" else content)


NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**63, 10**400, 1e-320])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
TOML = st.recursive(st.booleans() | NUMBERS | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3))


@examples(100)
@given(st.data())
def test_a_config(data):
    keys = st.sampled_from([*KEYS, *(f"{key}.x" for key in KEYS), "no.key", "[train]\nseed"])
    values = TOML.map(config_file.toml_text) | st.text(max_size=8)
    lines = data.draw(st.dictionaries(keys, values, max_size=4))
    overrides = data.draw(st.dictionaries(keys, values, max_size=2))
    text = "".join(f"{key} = {value}\n" for key, value in lines.items()).encode("utf-8", "replace")
    text = data.draw(damaged(MICRO.read_bytes()) | st.just(text))
    with file_of(text, "some.toml") as path, told():
        cfg = config_file.load(path, [f"--{key}={value}" for key, value in overrides.items()])
        path.write_text(config_file.dump(cfg))
        assert config_file.load(path) == cfg


@examples(100)
@given(
    st.dictionaries(
        st.text(string.printable, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=3,
    ),
    st.data(),
)
def test_the_weights_of_others(kinds, data):
    made = {
        name: torch.arange(np.prod(shape, dtype=int)).reshape(shape).to(kind) for name, (kind, shape) in kinds.items()
    }
    sound = safetensors.torch.save(made, {"trained_by": "flux_ref"})
    content = data.draw(st.just(sound) | damaged(sound, head=200))
    with file_of(content, "some.safetensors") as path, told():
        with safetensors_io.opened(path) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        want = safetensors.torch.load(content)
        assert shapes == {name: tuple(tensor.shape) for name, tensor in want.items()}
        for name, tensor in want.items():
            if tensor.ndim:
                rows = safetensors_io.read_rows(path, name, 1, 1)
                assert rows.dtype == tensor.dtype
                assert torch.equal(rows.view(torch.uint8), tensor[1:2].view(torch.uint8))
    with file_of(content, "some.safetensors") as path, told():
        weights.open_source(path, MODEL)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shard") / "set"
    shard_damage.write_set(folder, 3, 8)
    return (folder / "train" / "shard_000000.tar").read_bytes()


@examples(100)
@given(st.data())
def test_a_shard(shard, data):
    content = data.draw(damaged(shard, head=1024))
    with file_of(content, "some.tar") as path, told():
        stored = shard_damage.opened(path.parent)
        for index in range(len(stored)):
            with told():
                require_as_tarfile_reads(stored, index, content)


def require_as_tarfile_reads(stored, index, content):
    rows = shard_damage.LAYOUT.arrays()
    meta = stored.read(index, rows)
    stride = shard_damage.LAYOUT.stride
    want = {}
    sample = io.BytesIO(content[index * stride : (index + 1) * stride])
    with suppress(tarfile.TarError), tarfile.open(fileobj=sample) as archive:  # stops where a checksum is wrong
        want = {name.name.partition(".")[2]: archive.extractfile(name).read() for name in archive}
    for name in want.keys() & {f"{name}.bytes" for name in dataset.MEMBERS}:
        assert np.array_equal(rows[name.removesuffix(".bytes")], np.load(io.BytesIO(want[name])))
    if "json" in want:
        said = json.loads(want["json"])
        assert (meta.timestep, meta.caption) == (said.get("timestep"), str(said.get("caption") or ""))


def image(kind):
    stream = io.BytesIO()
    Image.linear_gradient("L").resize((70, 64)).convert("RGB").save(stream, kind)
    return stream.getvalue()


IMAGES = {kind: image(kind) for kind in pictures.FORMATS}
NAMES = st.lists(st.sampled_from(["a", "b", ".", "/", " ", "é", "\n"]), min_size=1, max_size=4).map("".join)
CONTENTS = {
    "jpg": st.sampled_from(list(IMAGES.values())).flatmap(lambda sound: damaged(sound, head=64)),
    "png": damaged(IMAGES["PNG"], head=64),
    "txt": st.text(max_size=8).map(str.encode) | st.binary(max_size=8),
    "json": JSON.map(lambda value: json.dumps({"caption": value}).encode()) | damaged(b'{"caption": "x"}'),
    "pdf": st.just(b""),
}
FILES = st.lists(
    st.tuples(NAMES, st.sampled_from([*CONTENTS])).flatmap(
        lambda name: st.tuples(st.just(".".join(name)), CONTENTS[name[1]])
    ),
    max_size=4,
)


def collected(root):
    """The names of all pictures of a folder, after each is loaded."""
    found = []
    for part in split_into_parts(root, pictures.list_files(root), "caption", 2):
        for picture in part():
            try:
                made, caption = picture.load(8, 16)
                assert made.shape == (3, 8, 16) and caption.strip()
            except Rejected as error:
                assert str(error) and "\n" not in str(error)
            found.append(picture.name)
    return found


@examples(100)
@given(FILES)
def test_a_folder_of_own_pictures(given_files):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, content in given_files:
            with suppress(OSError):  # a name may be that of a folder
                path = root / name.lstrip("/").replace("..", "")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        with told():
            found = collected(root)
            assert sorted(found) == [name for name in pictures.list_files(root) if not name.endswith(pictures.TEXTS)]


@examples(100)
@given(FILES, st.sampled_from(["", "gz"]), st.booleans(), st.data())
def test_a_tar_of_own_pictures(given_files, packed, is_sound, data):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{packed}") as archive:
        for name, content in given_files:
            entry = tarfile.TarInfo(name)
            entry.type = data.draw(
                st.sampled_from([tarfile.REGTYPE] * 5 + [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
            )
            entry.size = len(content) if entry.isreg() else 0
            entry.linkname = data.draw(st.sampled_from([name, "a.jpg", "/etc/passwd", "../x"]))
            archive.addfile(entry, io.BytesIO(content))
    content = stream.getvalue() if is_sound else data.draw(damaged(stream.getvalue(), head=1024))
    with file_of(content, "some.tar") as path, told():
        found = Counter(collected(path.parent))
        if is_sound:  # each picture has its row
            with tarfile.open(path) as archive:
                shown = [name for name in archive.getnames() if Path(name).name[0] != "."]
                names = Counter(f"some.tar/{name}" for name in shown if name.endswith((".jpg", ".png")))
            assert names <= found


LISTS = {"metadata.jsonl": b'{"file_name": "a.png", "caption": "x"}\n', "metadata.csv": b"file_name,caption\na.png,x\n"}


@examples(100)
@given(st.sampled_from([*LISTS]), st.lists(JSON, max_size=3), st.data())
def test_metadata(name, captions, data):
    rows = "".join(json.dumps({"file_name": "a.png", "caption": caption}) + "\n" for caption in captions)
    with file_of(data.draw(damaged(LISTS[name] + rows.encode())), name) as path, told():
        (path.parent / "a.png").write_bytes(IMAGES["PNG"])
        assert "a.png" in collected(path.parent)


@examples(40)
@given(st.data())
def test_a_log_of_the_benchmark(data):
    lines = made_logs.lines(evaluations=2)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        prefix, mark, entry = lines[at].partition(":::MLLOG ")
        values = json.loads(entry) if mark else {}
        key = data.draw(st.sampled_from(["key", "value", "metadata", "event_type", "time_ms", "other"]))
        lines[at] = f"{prefix}:::MLLOG {json.dumps(values | {key: data.draw(JSON)})}"
    content = "\n".join(lines).encode()
    with file_of(data.draw(st.just(content) | damaged(content)), "result_0.txt") as path, told():
        ((_, logs),) = result_log.find([path])
        system = score.judge("some", logs, "5.1.0")
        assert system.verdict == score.INVALID and "\n" not in "".join(system.reasons)
