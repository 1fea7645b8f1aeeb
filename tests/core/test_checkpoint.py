"""Checkpoints: any rows and any number of ranks go on, bit for bit, from what any other has written; damage of any file
is told in one line; and a save that fails, on whatever rank, costs nothing but itself.
"""

import random
import re
import shutil
import threading
from math import ceil, prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import checkpoint_ranks
import pytest
import torch
from checkpoint_ranks import FACTS, SAMPLES, STEP, narrow_config
from conftest import micro_config, micro_run, refusal, require_identical
from run_files import column, saved_steps, tensors_of
from safetensors.torch import load_file

from flux_ref import checkpoint, config, config_file, safetensors_io
from flux_ref.checkpoint import Checkpoint, Saver, TensorSlice
from flux_ref.cli import Fault
from flux_ref.model import parameter_table
from flux_ref.watchdog import Watchdog

HSDP = pytest.param(4, marks=pytest.mark.slow)  # ranks: 2 replicas x 2 shards
SEVERAL, SIZES = (3, HSDP), (1, 3, HSDP)


# The format


def read_all(saved, name):
    """Open a checkpoint, and read what is in one of its files."""
    found = Checkpoint(saved)
    for key in found.files[name][1] if name in found.files else ():
        found.read(key)


def test_damage_of_any_file_is_told_and_no_damaged_row_is_read(measured, tmp_path):
    """A flipped bit, a file that is cut short, longer or missing."""
    draw = random.Random(0)
    saved = Path(shutil.copytree(measured.checkpoint(3), tmp_path / "step_000000007"))
    paths = sorted(saved.iterdir())
    assert len(paths) > 3 + 1, "some ranks have written several files"
    for path in paths:
        content = path.read_bytes()
        flipped = [bytearray(content) for _ in range(9)]
        for one in flipped:
            one[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        for other in (*flipped, b"", content[:-1], content + b"\0", b"null", b"\xff\xfe", None):
            path.unlink()
            if other is not None:
                path.write_bytes(other)
            words = refusal(read_all, saved, path.name)
            want = f"checkpoint file {path} is missing or damaged (checksum differs); `mv {saved} {saved}.damaged`"
            assert words.startswith(want)
            path.touch()
        path.write_bytes(content)
    require_identical(tensors_of(saved), tensors_of(measured.checkpoint(3)))


def test_the_newest_whole_checkpoints_stay_and_nothing_that_broke_off(tmp_path):
    checkpoint.prune(tmp_path, 2)
    folder = checkpoint.folder_of(tmp_path)
    names = ["step_000000009", "step_000000010", "step_123456789", "step_000000000"]
    others = ["step_12", "step_00000001x", "step_000000012.damaged", ".hidden", "mine"]
    for name in [*names, *others, ".step_000000011.flux_ref_partial", ".step_000000001.deleted.flux_ref_partial"]:
        (folder / name / "below").mkdir(parents=True)
    assert saved_steps(tmp_path) == [0, 9, 10, 123456789]
    checkpoint.prune(tmp_path, 2)
    assert {path.name for path in folder.iterdir()} == {"step_000000010", "step_123456789", *others}


# States of any number of ranks


@pytest.mark.parametrize("readers", SIZES)
def test_ranks_go_on_from_what_others_have_written_bit_for_bit(measured, world, readers):
    """Several ranks have read what at most as many have written; here one rank reads what all have."""
    reading = dict(measured[readers]["checkpoint"]["reading"])
    alone = checkpoint_ranks.read(narrow_config(Path("unused")), world, measured.checkpoint(readers))
    for found, size in [(alone, 1), *((found, readers) for found in reading.values())]:
        assert found["clock"] == (STEP, SAMPLES)
        require_identical(found["after steps"], measured[size]["checkpoint"]["on"])


@pytest.mark.parametrize("writers", SIZES)
def test_every_byte_is_written_once_and_is_on_the_disk_before_the_folder_has_its_name(measured, writers):
    final = measured.checkpoint(writers)
    saved = Checkpoint(final)
    cfg = narrow_config(final.parents[1], parallel__replicate=2 if writers == 4 else 1)
    require_identical(tensors_of(final), checkpoint_ranks.written_tensors(cfg))
    assert config_file.from_flat(saved.info["name"], saved.info.pop("config")) == cfg
    assert saved.info == {"step": STEP, "samples": SAMPLES, "name": "micro"} | FACTS
    sizes = [0] * writers
    for path in final.glob("*.safetensors"):
        sizes[int(path.name.split("_")[1])] += sum(tensor.nbytes for tensor in load_file(path).values())
    parameters = sum(prod(shape) for shape in parameter_table(cfg.model).values())
    assert sum(sizes) == 16 * parameters
    assert writers == 3 or max(sizes) < 1.2 * min(sizes)  # replicas share the work
    writing = measured[writers]["checkpoint"]["writing"]
    events = sorted(event for rank in writing["events"] for event in rank)
    (renamed,) = [number for number, (_, kind, target) in enumerate(events) if (kind, target) == ("rename", str(final))]
    before = [Path(path).name for _, kind, path in events[:renamed] if kind == "sync"]
    assert before[-1].startswith(".step_"), "the names of the files come to the disk after the files"
    assert saved.files.keys() < set(before)
    assert any(name.startswith(".manifest.json.") for name in before)
    assert [path for _, kind, path in events[renamed + 1 :] if kind == "sync"] == [str(final.parent)]
    first, *others = writing["said"]
    assert len(first) == 1 and first[0].startswith(f"checkpoint {final} saved in ")  # though it was asked for twice
    assert not any(others) and not list(final.parent.glob(".*"))


# Saving behind the training


def test_training_goes_on_as_soon_as_save_returns_and_the_next_save_waits(world, tmp_path, monkeypatch):
    cfg = narrow_config(tmp_path, checkpoint__keep=9)
    state = checkpoint_ranks.lively_state(cfg, world)
    gate, write, running, said = threading.Event(), Saver._write, [], []

    def slow(own, *rest):
        assert not running, "two at once"
        running.append(own)
        assert gate.wait(30)
        write(own, *rest)
        running.pop()

    monkeypatch.setattr(Saver, "_write", slow)
    own = Saver(cfg, world, state, FACTS, said.append)
    own.save(state)
    wants = {STEP: checkpoint_ranks.contents(state)}
    assert checkpoint.list_checkpoints(tmp_path) == [] and said == []
    threading.Timer(0.2, gate.set).start()
    for _ in range(2):
        checkpoint_ranks.take_step(state, 1e-4)
        wants[state.step] = checkpoint_ranks.contents(state)
        own.save(state)
    own.finish()
    assert saved_steps(tmp_path) == list(wants) and len(said) == 3
    for path in checkpoint.list_checkpoints(tmp_path):
        found = {f"{key} of rank 0": tensor for key, tensor in tensors_of(path).items()}
        require_identical(found, wants[checkpoint.step_of(path)])


def test_host_buffers_do_not_overlap_and_waste_little():
    """torch rounds pinned allocations up to powers of two. Rank 0 of 8 holds schnell's shards; nothing is allocated."""
    with torch.device("meta"):
        table = parameter_table(config.ModelConfig())
        rows = {
            name: TensorSlice(torch.empty(ceil(shape[0] / 8), *shape[1:]), 0, shape) for name, shape in table.items()
        }
        groups = checkpoint.allocate_host_buffers(rows, pin=False)
    storages = [{part.local.untyped_storage()._cdata for part in group.values()} for group in groups]
    sizes = [next(iter(group.values())).local.untyped_storage().nbytes() for group in groups]
    assert [len(one) for one in storages] == [1] * len(groups) == [1] * len(set.union(*storages))
    needed = sum(part.local.nbytes for part in rows.values())
    assert sum(sizes) == needed and max(sizes) <= checkpoint.FILE_BYTES
    assert sum(1 << (size - 1).bit_length() for size in sizes) < 1.1 * needed


@pytest.mark.parametrize("writers", SEVERAL)
def test_a_save_that_fails_on_one_rank_costs_only_itself(measured, writers):
    run = measured.checkpoint(writers).parents[1] / "breaking"
    found = measured[writers]["checkpoint"]["breaking"]
    assert found["before"]["faults"] == found["after"]["faults"] == [""] * writers
    assert found["after"]["left"] == ["step_000000001", "step_000000005"]
    for number, (what, (_, _, rank)) in enumerate(checkpoint_ranks.BREAKS.items(), start=2):
        assert found[what]["left"] == ["step_000000001"], "the older one; no piece of the new one"
        fault = found[what]["faults"][0]
        assert found[what]["faults"] == [fault] * writers
        reason = fault.removeprefix(f"checkpoint of step {number} is not saved: ")
        assert "No space left on device" in reason and reason.startswith(f"rank {rank % writers}: ") == bool(rank), what
        (line,), *others = found[what]["said"]
        assert line.startswith(f"checkpoint {run}/checkpoints/step_{number:09d} NOT saved: {reason};")
        assert "\n" not in line and not any(others)
    for path in checkpoint.list_checkpoints(run):
        assert all(tensor.isfinite().all() for tensor in tensors_of(path).values())


# Runs

SIZE = 12 * sum(prod(shape) for shape in parameter_table(micro_config().model).values())  # of a checkpoint, in bytes


def put_room(patch, free, total=1):
    """From here on a disk has so many free bytes, by the folder that asks."""
    patch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(total=total, free=free(folder)))


@pytest.fixture
def trains(shapes_dir, attempt):
    """trains(run, *overrides) trains here; returns the exit code, stdout, and the line of what went wrong."""
    return lambda run, *overrides: attempt(*micro_run(shapes_dir, run, "--data.val=", *overrides))


def test_a_fault_does_not_cost_the_checkpoint_that_is_being_saved(trains, tmp_path, monkeypatch):
    def fail(*_):
        raise Fault("broken")

    write = safetensors_io.write
    monkeypatch.setattr(safetensors_io, "write", lambda *args: threading.Event().wait(0.5) or write(*args))
    monkeypatch.setattr(Watchdog, "stop_point", fail)
    assert trains(tmp_path / "run", "--checkpoint.every_samples=12")[::2] == (3, "broken")
    (path,) = checkpoint.folder_of(tmp_path / "run").iterdir()
    assert tensors_of(path)


def test_a_full_disk_costs_a_checkpoint_and_no_training(trains, tmp_path, monkeypatch):
    run = tmp_path / "run"
    often = ("--checkpoint.every_samples=12", "--checkpoint.keep=1")
    with monkeypatch.context() as full:
        put_room(full, lambda _: 0 if saved_steps(run) else 10**9)
        code, out, line = trains(run, *often)
    assert code == 3 and re.match("checkpoint of step 5 is not saved: .* has 0 GB free", line), line
    assert column(run, "step") == [1, 2, 3, 4, 5] and saved_steps(run) == [1]
    said = [line for line in out.splitlines() if line.startswith("checkpoint")]
    loss = "a stop now loses what came after the one before"
    assert len(said) == 6 and all(loss in line for line in said[1:]), "step 5 comes twice"
    code, out, _ = trains(run, *often)
    assert code == 0 and "from step 1" in out and column(run, "step") == [1, 2, 3, 4, 5]
    large = checkpoint.folder_of(run).rename(tmp_path / "large")
    checkpoint.folder_of(run).symlink_to(large)
    put_room(monkeypatch, lambda folder: 10**9 if folder.resolve() == large else 0)
    assert trains(run, "--train.max_samples=72")[0] == 0 and saved_steps(run) == [5, 6]


def test_a_start_asks_for_the_room_that_its_checkpoints_will_take(trains, tmp_path, monkeypatch):
    """checkpoint.keep is 2, and a third is there for a moment."""
    for most, free, want in ((36, 2.9, 2), (36, 3.0, 0), (60, 0.9, 2), (60, 1.0, 0)):  # two are there for the last two
        put_room(monkeypatch, lambda _, free=free: SIZE * free)
        argv = ("--checkpoint.every_samples=12", f"--train.max_samples={most}")
        code, _, line = trains(tmp_path / "run", *argv)
        assert code == want and ("GB free; " in line) == bool(want), (most, free, line)
    put_room(monkeypatch, lambda _: 0, total=0)
    assert trains(tmp_path / "unknown")[0] == 0, "some file systems do not tell their size"


def test_what_a_start_lacks_for_checkpoints_is_refused_and_leaves_nothing(trains, tmp_path, monkeypatch):
    with monkeypatch.context() as full:
        put_room(full, lambda _: SIZE - 1)
        code, _, line = trains(tmp_path / "run")
    assert code == 2 and "GB free; 0.00188 GB are needed" in line and f"{tmp_path} " in line
    assert "set run.dir to another disk, lower checkpoint.keep" in line
    monkeypatch.setattr(checkpoint, "allocate_host_buffers", Mock(side_effect=MemoryError("cannot pin")))
    code, _, line = trains(tmp_path / "run")
    assert code == 3 and line.startswith("out of memory: cannot pin; free memory")
    assert {path.name for path in tmp_path.iterdir()} <= {".run.lock"}
