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
from shard_damage import LAYOUT, samples

from flux_ref.formats import files, shard_writer, shards

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed"),
]
DATA = (".tar", ".npy")
PADDED = 7  # so many samples can be told from the size of a shard that tar has padded
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


@pytest.fixture(scope="module")
def layouts(shapes_dir, tmp_path_factory) -> dict[str, list[str]]:
    """For each layout of shards, the options that name them."""
    root = tmp_path_factory.mktemp("layouts")
    own = data_overrides(shapes_dir)
    empty = f"--data.empty={shapes_dir}/empty_encodings"
    shard_writer.write(root / "padded", samples(PADDED), "some")
    shard = root / "padded" / "shard_000000.tar"
    shard.write_bytes(shard.read_bytes() + bytes(-shard.stat().st_size % shards.RECORD))
    assert len(shards.ShardSet(root / "padded", LAYOUT)) == PADDED
    for split in ("train", "val"):
        shutil.copytree(shapes_dir / split, root / "energon" / split)
    (root / "energon" / ".nv-meta").mkdir()
    listing = {split: [f"{split}/shard_000000.tar"] for split in ("train", "val")}
    (root / "energon" / ".nv-meta" / "split.yaml").write_text(json.dumps({"split_parts": listing}))
    return {
        "own": own,
        "evicted": [*own, "--data.evict=true"],
        "padded": [f"--data.train={root}/padded", f"--data.train_count={PADDED}", own[1], empty],
        "Energon's": [*(f"--data.{split}={root}/energon" for split in ("train", "val")), empty],
    }


def test_commands_connect_to_nobody_write_into_their_folders_and_read_data_after_run_start(
    layouts, shapes_dir, tmp_path
):
    short = ("--train.max_samples=12", "--eval.every_samples=12", "--sample.count=2")
    tmp = tmp_path / "tmp"
    shutil.copytree(shapes_dir, tmp_path / "set")
    encoders = small_encoders.save_all(tmp_path / "nets")
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (90, 80), (60, 90, 200)).save(tmp_path / "pictures" / "a.png")
    (tmp_path / "pictures" / "a.txt").write_text("a red cat")
    encode = ["images", f"--input={tmp_path}/pictures", f"--output={tmp_path}/encoded", "--split=train", *encoders]
    commands = {  # name: script, arguments, what it writes
        **{name: ("train.py", [MICRO, *given, *short, f"--run.dir={tmp_path}/{name}"], name)
           for name, given in layouts.items()},
        "eval": ("eval.py", [f"{tmp_path}/own", short[2]], "own/samples"),
        "verify": ("prepare", ["verify", f"{tmp_path}/set", f"--config={MICRO}"], "set/manifest.sha256"),
        "stage": ("prepare", ["stage", f"{tmp_path}/set", f"{tmp_path}/copy"], "copy"),
        "images": ("prepare", [*encode, f"--config={MICRO}"], "encoded"),
        "shapes": ("prepare", ["shapes", f"--out={tmp_path}/drawn", f"--config={MICRO}"], "drawn"),
    }  # fmt: skip
    jobs = [[name, script, [*map(str, argv)], 0] for name, (script, argv, _) in commands.items()]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(HELPERS / "traced_commands.py"), f"{tmp_path}/jobs.json"]
    found = tracing.traced(command, tmp_path, tmp_path / "log", environment(tmp))
    assert list(found) == ["", *commands]
    wrong = {}
    for name, calls in found.items():
        outputs = [tmp_path / commands[name][2]] if name else []
        outputs += [place(path) for path in outputs for place in (files.partial_of, files.claim_of)]
        wrong[name] = strange(calls, outputs, tmp), tracing.connections(calls) - ALONE.keys()
    assert {name: both for name, both in wrong.items() if any(both)} == {}
    assert [path for path in tmp.rglob("*") if not path.name.startswith("torchinductor_")] == []

    for name in layouts:
        before = tracing.before_run_start(found[name])
        after = found[name][len(before) :]
        assert tracing.read(before, DATA) == [], name
        assert name == "evicted" or tracing.opened(before, DATA) == [], name
        read = {Path(path).name for path in tracing.read(after, DATA)}
        assert {"shard_000000.tar", "t5_empty.npy", "clip_empty.npy"} <= read, name


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
    assert len({call.pid for call in git}) == 1 and all("no-optional-locks" in call.text for call in git)
    readers = {call.pid for call in calls if tracing.opened([call], DATA)}
    assert len(readers) == 2 and tracing.opened(tracing.before_run_start(calls), DATA) == []
