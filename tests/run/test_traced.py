"""What commands do beside their work, by their system calls: connections, what is written where, what is read when.

Needs strace. The tables name each exception with its reason.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import small_encoders
import tracing
from conftest import HELPERS, MICRO, PYTHONPATH, ROOT, data_overrides
from PIL import Image
from shard_damage import LAYOUT, STRIDE, samples

from flux_ref.errors import Refusal
from flux_ref.formats import shard_writer, shards

pa = pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed"),
]
DATA = (".tar", ".npy")
# Where else a command may write, and why.
ELSEWHERE = {
    r"/dev/null": "no file",
    r"/dev/shm/sem\..*": "the lock of progress bars (multiprocessing); its name is removed at once",
    r"TMP/[a-z0-9_]{8}": "Python tries whether it can write to the temporary folder",
    r"TMP/torchinductor_\w+": "torch makes this empty folder when a net is built on the meta device",
    r".*/__pycache__(/.*)?": "Python's compiled modules",
}
TORCHRUN = {r"TMP/torchelastic_\w+(/.*)?": "the folder of torchrun's logs and of its error file"}
# Connections of a command that runs alone, and why.
ALONE = {
    ("bind", "127.0.0.1"): "gloo's end of a process group of one; it listens there",
    ("bind", "AF_NETLINK"): "gloo asks the kernel for the network interfaces",
    ("sendto", "AF_NETLINK"): "the same",
    ("connect", "/var/run/nscd/socket"): "libc looks for a name service on this machine",
    ("sendto", "AF_UNSPEC"): "an answer of the kernel",
}
TOGETHER = {
    ("connect", "127.0.0.1"): "ranks reach each other and the store of torchrun",
    ("connect", "::ffff:127.0.0.1"): "the same",
    ("connect", "::1"): "the same",
    ("connect", "a name server"): "torch asks for the name of this machine",
    ("bind", "::"): "the store of torchrun listens on every interface; launch/README.md says so",
}


def environment(tmp: Path) -> dict[str, str]:
    tmp.mkdir()
    own = {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"} | own


def strange(calls: list[tracing.Call], folders: list[Path], tmp: Path, more: dict[str, str] | None = None) -> list[str]:
    """Paths written outside these folders and without a reason in the table."""
    allowed = [re.compile(pattern.replace("TMP", re.escape(str(tmp)))) for pattern in ELSEWHERE | (more or {})]
    return [
        path
        for path in sorted(tracing.written(calls))
        if not any(Path(path).is_relative_to(folder) for folder in folders)
        and not any(pattern.fullmatch(path) for pattern in allowed)
    ]


def save_arrow(folder: Path) -> None:
    """Three samples as the public download has them."""
    folder.mkdir(parents=True)
    names = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}
    members = {column: pa.binary() for column in names.values()}
    schema = pa.schema({"__key__": pa.string(), **members, "timestep": pa.int32()})
    rows = [
        {"__key__": f"{i:012d}", "timestep": None}
        | {names[name]: shard_writer.npy_blob(bits) for name, bits in sample.members.items()}
        for i, sample in enumerate(samples(3))
    ]
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


@pytest.fixture(scope="module")
def layouts(shapes_dir, tmp_path_factory) -> dict[str, tuple[list[str], int]]:
    """For each layout of shards, the options that name them and the exit code of a run."""
    root = tmp_path_factory.mktemp("layouts")
    own = data_overrides(shapes_dir)
    beside = [f"--data.val={shapes_dir}/val", f"--data.empty={shapes_dir}/empty_encodings"]

    def padded(folder: Path, count: int) -> Path:
        shard_writer.write(folder, samples(count), "some")
        path = folder / "shard_000000.tar"
        path.write_bytes(path.read_bytes() + bytes(-path.stat().st_size % shards.RECORD))
        return folder

    def is_clear(count: int) -> bool:
        try:
            return len(shards.ShardSet(padded(root / f"padded{count}", count), LAYOUT)) == count
        except Refusal:
            return False

    by_clarity = {is_clear(count): count for count in range(2, 12)}
    clear, unclear = by_clarity[True], by_clarity[False]
    shard_writer.write(root / "disorder", samples(4), "some")
    path = root / "disorder" / "shard_000000.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[2 * shards.BLOCK : STRIDE] + whole[: 2 * shards.BLOCK] + whole[STRIDE:])
    for split in ("train", "val"):
        shutil.copytree(shapes_dir / split, root / "energon" / split)
    (root / "energon" / ".nv-meta").mkdir()
    listing = {split: [f"{split}/shard_000000.tar"] for split in ("train", "val")}
    (root / "energon" / ".nv-meta" / "split.yaml").write_text(json.dumps({"split_parts": listing}))
    energon = [f"--data.{split}={root}/energon" for split in ("train", "val")]
    return {
        "own": (own, 0),
        "evicted": ([*own, "--data.evict=true"], 0),
        "padded by tar": ([f"--data.train={root}/padded{clear}", f"--data.train_count={clear}", *beside], 0),
        "padded, unclear": ([f"--data.train={root}/padded{unclear}", *beside], 2),
        "Energon's": ([*energon, f"--data.empty={shapes_dir}/empty_encodings"], 0),
        "other order": ([f"--data.train={root}/disorder", "--data.train_count=4", *beside], 2),
    }


def test_commands_connect_to_nobody_write_into_their_folders_and_read_data_after_run_start(
    layouts, shapes_dir, tmp_path
):
    short, tmp = ("--train.max_samples=12", "--eval.every_samples=12", "--sample.count=2"), tmp_path / "tmp"
    jobs = [
        [f"train {name}", "train.py", [str(MICRO), *given, *short, f"--run.dir={tmp_path}/{name}"], code]
        for name, (given, code) in layouts.items()
    ]
    folders = {f"train {name}": [tmp_path / name] for name in layouts}
    shutil.copytree(shapes_dir, tmp_path / "set")
    encoders = small_encoders.save_all(tmp_path / "nets")
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        Image.new("RGB", (90, 80), (number, 90, 200)).save(tmp_path / "pictures" / f"{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text("a red cat")
    save_arrow(tmp_path / "public" / "arrow")
    shutil.copytree(shapes_dir / "empty_encodings", tmp_path / "public" / "empty_encodings")
    convert = ["mlcommons", f"--input={tmp_path}/public/arrow", f"--output={tmp_path}/converted", "--split=train"]
    encode = ["images", f"--input={tmp_path}/pictures", f"--output={tmp_path}/encoded", "--split=train", *encoders]
    for name, script, argv, outputs in (
        ("eval", "eval.py", [f"{tmp_path}/own", *short[2:]], ["own/samples"]),
        ("verify", "prepare", ["verify", f"{tmp_path}/set", f"--config={MICRO}"], ["set/manifest.sha256"]),
        ("stage", "prepare", ["stage", f"{tmp_path}/set", f"{tmp_path}/copy"], ["copy"]),
        ("mlcommons", "prepare", [*convert, "--expect-samples=0", f"--config={MICRO}"], ["converted"]),
        ("images", "prepare", [*encode, f"--config={MICRO}"], ["encoded"]),
        ("shapes", "prepare", ["shapes", f"--out={tmp_path}/drawn", f"--config={MICRO}"], ["drawn"]),
    ):
        jobs.append([name, script, argv, 0])
        folders[name] = [tmp_path / output for output in outputs]
        folders[name] += [output.with_name(f".{output.name}.partial") for output in folders[name]]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(HELPERS / "traced_commands.py"), f"{tmp_path}/jobs.json"]
    found = tracing.traced(command, tmp_path, tmp_path / "log", environment(tmp))
    assert list(found) == ["", *folders]
    wrong = {name: paths for name, calls in found.items() if (paths := strange(calls, folders.get(name, []), tmp))}
    assert not wrong
    talk = {name: new for name, calls in found.items() if (new := tracing.connections(calls) - ALONE.keys())}
    assert not talk
    assert [path for path in tmp.rglob("*") if not path.name.startswith("torchinductor_")] == []

    for name, (_, code) in layouts.items():
        before = tracing.before_run_start(found[f"train {name}"])
        after = found[f"train {name}"][len(before) :]
        assert tracing.read(before, DATA) == [], name
        assert name == "evicted" or tracing.opened(before, DATA) == [], name
        assert bool(tracing.read(after, DATA)) == (name != "padded, unclear"), name
        read = {Path(path).name for path in tracing.read(after, DATA)}
        assert code or {"shard_000000.tar", "t5_empty.npy", "clip_empty.npy"} <= read, name


def test_two_ranks_talk_to_each_other_only_and_ask_for_the_commit_once(shapes_dir, tmp_path):
    tmp, run = tmp_path / "tmp", tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "train.py"), str(MICRO), *data_overrides(shapes_dir), f"--run.dir={run}"]
    command += ["--train.max_samples=12", "--eval.every_samples=12"]
    calls = tracing.traced(command, tmp_path, tmp_path / "log", environment(tmp))[""]
    assert strange(calls, [run], tmp, TORCHRUN) == []
    assert tracing.connections(calls) - (ALONE | TOGETHER).keys() == set()
    assert ("connect", "127.0.0.1") in tracing.connections(calls)
    git = [call for call in calls if call.name == "execve" and Path(call.paths[0]).name == "git"]
    assert len({call.pid for call in git}) == 2 and all("no-optional-locks" in call.text for call in git)
    readers = {call.pid for call in calls if tracing.opened([call], DATA)}
    assert len(readers) == 2 and tracing.opened(tracing.before_run_start(calls), DATA) == []
