"""Checkpoints: any number of ranks goes on, bit for bit, from what any other has written; torch's own reader opens
them; a save that fails, on whatever rank, costs nothing but itself; and what a run cannot go on from is refused.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable
from math import ceil, prod
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import checkpoint_ranks
import pytest
import rank_runs
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ranks import FACTS, narrow_config
from conftest import MICRO, micro_run, refusal, require_identical
from run_files import column, saved_steps
from safetensors import safe_open

from flux_ref import checkpoint, config, config_file, optim, ranks
from flux_ref.alive import Alive
from flux_ref.checkpoint import Saver
from flux_ref.config import Config
from flux_ref.errors import Fault
from flux_ref.formats import checkpoint_files, safetensors_io
from flux_ref.formats.checkpoint_files import TensorSlice
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.run import resuming
from flux_ref.step import State

HSDP = pytest.param(4, marks=pytest.mark.slow)  # ranks: 2 replicas x 2 shards
SEVERAL, SIZES = (3, HSDP), (1, 3, HSDP)
STEP, SAMPLES = checkpoint_ranks.STEP, checkpoint_ranks.SAMPLES
NARROW = narrow_config(Path("unused"))
WANT = {key: checkpoint_ranks.value(key, shape) for key, shape in checkpoint_ranks.keys(NARROW).items()}
PARAMETERS = sum(prod(shape) for shape in parameter_table(NARROW.model).values())


@pytest.fixture
def world() -> World:
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


# Any number of ranks


@pytest.mark.parametrize("readers", SEVERAL)
def test_ranks_go_on_from_what_others_have_written_bit_for_bit(measured, readers):
    found = measured[readers]["checkpoint"]
    assert found["reading"].keys() == {size for size in rank_runs.SIZES if size <= readers}
    for read in found["reading"].values():
        require_identical(read.pop("after steps"), found["on"])
        assert read == {"wrong": [], "clock": (STEP, SAMPLES), "AdamW's steps": {STEP}, "wrong by torch's reader": []}


@pytest.mark.parametrize("writers", SIZES)
def test_one_process_goes_on_from_what_others_have_written_bit_for_bit(measured, world, writers):
    folder = measured.checkpoint(writers)
    found = checkpoint_ranks.reading(NARROW, world, folder)
    require_identical(found.pop("after steps"), measured[1]["checkpoint"]["on"])
    assert found == {"wrong": [], "clock": (STEP, SAMPLES), "AdamW's steps": {STEP}, "wrong by torch's reader": []}
    found = {key: torch.full_like(tensor, 7.0) for key, tensor in WANT.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    require_identical(found, WANT)
    Checkpoint(folder).verify()
    rows = [[rank[key] for rank in measured[3]["checkpoint"]["writing"]["rows"]] for key in WANT]
    assert any(0 < min(parts) < max(parts) for parts in rows) and any(min(parts) == 0 for parts in rows), "uneven"


# What is in the folder


@pytest.mark.parametrize("writers", SIZES)
def test_every_byte_is_written_once_whatever_the_replicas(measured, writers):
    folder, sizes = measured.checkpoint(writers), []
    files = {path.name for path in folder.iterdir()}
    assert files == {checkpoint_files.MANIFEST, *(f"rank_{rank:05d}.safetensors" for rank in range(writers))}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes.append(sum(file.get_tensor(key).nbytes for key in file.keys()))  # noqa: SIM118
            head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            assert path.stat().st_size == head + sizes[-1]
    assert sum(sizes) == 16 * PARAMETERS == optim.bytes_per_parameter(NARROW.optim) * PARAMETERS
    assert writers == 3 or max(sizes) < 1.2 * min(sizes)  # replicas share the work


@pytest.mark.parametrize("writers", SIZES)
def test_the_manifest_knows_the_run_and_no_rank(measured, writers):
    info = Checkpoint(measured.checkpoint(writers)).info
    cfg = config_file.from_flat(info["name"], info.pop("config"))
    run = measured.checkpoint(writers).parents[1]
    assert cfg == narrow_config(run, parallel__replicate=2 if writers == 4 else 1)
    assert info == {
        "step": STEP,
        "samples": SAMPLES,
        **FACTS,
        "records": {"metrics.jsonl": [0, 0], "eval.jsonl": [0, 0]},  # there are none
        "name": "micro",
        "torch": torch.__version__,
        "world_size": writers,
    }


def test_keys_are_bfls_names_whatever_the_regions_and_compilation(world, tmp_path):
    compiles = any(map(shutil.which, ("c++", "g++", "clang++")))
    cfg = narrow_config(tmp_path, parallel__region_blocks=3, parallel__compile=compiles)
    state = checkpoint_ranks.lively_state(cfg, world)
    save_now(Saver(cfg, world, state, FACTS, print), state)
    (folder,) = checkpoint_files.list_checkpoints(tmp_path)
    saved = Checkpoint(folder)
    require_identical({key: saved.read(key) for key in saved.tensors}, WANT)
    assert checkpoint_ranks.wrong(checkpoint_ranks.restored(narrow_config(tmp_path), world, folder)) == []


# When it becomes a checkpoint


@pytest.mark.parametrize("writers", SIZES)
def test_a_folder_gets_its_name_after_every_byte_is_on_the_disk(measured, writers):
    final = measured.checkpoint(writers)
    events = [event for rank in measured[writers]["checkpoint"]["writing"]["events"] for event in rank]
    ((renamed_at, _, target),) = [event for event in events if event[1] == "rename"]
    assert target == str(final)
    before = {Path(path).name for at, kind, path in events if kind == "sync" and at < renamed_at}
    (partial,) = [name for name in before if name.startswith(".step_")]
    assert before == {partial, *(path.name for path in final.iterdir())}
    last = [path for at, kind, path in sorted(events) if at < renamed_at][-1]
    assert Path(last).name == partial  # the names of the files come to the disk after the files
    assert [path for at, kind, path in sorted(events) if at > renamed_at] == [str(final.parent)]
    assert not list(final.parent.glob(".*"))
    first, *others = measured[writers]["checkpoint"]["writing"]["said"]
    assert len(first) == 1 and first[0].startswith(f"checkpoint {final} saved in ")  # though it was asked for twice
    assert not any(others)


# Saving behind the training


def save_now(saver: Saver, state: State) -> None:
    saver.save(state)
    saver.finish()


def saver_of(cfg: Config, world: World, state: State) -> tuple[Saver, list[str]]:
    said = []
    return Saver(cfg, world, state, FACTS, said.append), said


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Saves write nothing before it is set; as often as one begins while another is under way, it is noted."""
    event, write, running = threading.Event(), Saver._write, []
    event.overlaps = []

    def slow(saver: Saver, partial: Path, final: Path, *rest: object) -> None:
        event.overlaps += running
        running.append(final.name)
        assert event.wait(30)
        write(saver, partial, final, *rest)
        running.pop()

    monkeypatch.setattr(Saver, "_write", slow)
    return event


def test_training_may_go_on_as_soon_as_save_returns(world, tmp_path, gate):
    cfg = narrow_config(tmp_path)
    state = checkpoint_ranks.lively_state(cfg, world)
    saver, said = saver_of(cfg, world, state)
    saver.save(state)
    checkpoint_ranks.take_step(state, 1.0)
    assert checkpoint_files.list_checkpoints(tmp_path) == [] and said == []
    gate.set()
    saver.finish()
    (folder,) = checkpoint_files.list_checkpoints(tmp_path)
    assert folder.name == "step_000000007" and Checkpoint(folder).info["samples"] == 84
    assert checkpoint_ranks.wrong(checkpoint_ranks.restored(cfg, world, folder)) == []
    assert len(checkpoint_ranks.wrong(state)) == len(WANT)


def test_host_buffers_do_not_overlap_and_waste_little():
    """torch rounds pinned allocations up to powers of two. Rank 0 of 8 holds schnell's shards; nothing is allocated."""
    with torch.device("meta"):
        table = parameter_table(config.ModelConfig())
        rows = {
            name: TensorSlice(torch.empty(ceil(shape[0] / 8), *shape[1:]), 0, shape) for name, shape in table.items()
        }
        copies = checkpoint.allocate_host_buffers(rows, pin=False)
    storages = {part.local.untyped_storage()._cdata: part.local.untyped_storage() for part in copies.values()}
    needed = sum(part.local.nbytes for part in rows.values())
    taken = sum(1 << (storage.nbytes() - 1).bit_length() for storage in storages.values())
    assert needed < taken < 1.1 * needed
    rows = {str(size): TensorSlice(torch.empty(size), 0, torch.Size((size,))) for size in (3, 5)}
    copies = checkpoint.allocate_host_buffers(rows, pin=False)
    for value, part in enumerate(copies.values()):
        part.local.fill_(value)
    assert [part.local.tolist() for part in copies.values()] == [[0] * 3, [1] * 5]


def test_a_save_waits_for_the_one_before(world, tmp_path, gate):
    cfg = narrow_config(tmp_path, checkpoint__keep=9)
    state, wants = checkpoint_ranks.lively_state(cfg, world), {}
    saver, said = saver_of(cfg, world, state)
    threading.Timer(0.2, gate.set).start()
    for _ in range(4):
        checkpoint_ranks.take_step(state, 1e-4)
        wants[state.step] = checkpoint_ranks.contents(state)
        saver.save(state)
    assert gate.is_set()
    saver.finish()
    assert gate.overlaps == [] and len(said) == 4
    assert saved_steps(tmp_path) == list(wants)
    for path in checkpoint_files.list_checkpoints(tmp_path):
        found = checkpoint_ranks.restored(cfg, world, path)
        require_identical(checkpoint_ranks.contents(found), wants[checkpoint_files.step_of(path)])


def test_a_step_is_saved_once_unless_its_save_has_failed(world, tmp_path, monkeypatch):
    cfg = narrow_config(tmp_path)
    state = checkpoint_ranks.lively_state(cfg, world)
    saver, said = saver_of(cfg, world, state)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint_files, "publish", lambda *_: 1 / 0)
        with pytest.raises(Fault, match="checkpoint of step 7 is not saved: division by zero"):
            save_now(saver, state)
    assert len(said) == 1 and list(checkpoint_files.folder_of(tmp_path).iterdir()) == []
    save_now(saver, state)
    inode = checkpoint_files.list_checkpoints(tmp_path)[0].stat().st_ino
    save_now(saver, state)
    resumed = Saver(cfg, world, state, FACTS, said.append, state.step)
    save_now(resumed, state)  # nothing has been trained since
    assert len(said) == 2 and checkpoint_files.list_checkpoints(tmp_path)[0].stat().st_ino == inode


PRUNED = [  # checkpoint.keep and keep_every, the steps that are saved, the steps that stay; every second step is due
    (2, 0, (1, 2, 4, 5), [4, 5]),
    (1, 1, (0, 1, 2, 3, 4), [2, 4]),
    (1, 2, (2, 4, 5, 6, 8, 9), [4, 8, 9]),
    (3, 3, (2, 4, 6, 7, 8, 9, 10), [6, 8, 9, 10]),
]


def test_the_last_checkpoints_stay_and_every_nth(world, tmp_path, monkeypatch):
    monkeypatch.setattr(Saver, "_write", lambda saver, partial, final, *_: final.mkdir(parents=True))
    state = checkpoint_ranks.lively_state(NARROW, world)
    every = 2 * NARROW.train.global_batch - 1  # rounded up
    for number, (keep, keep_every, saved, want) in enumerate(PRUNED):
        run = tmp_path / str(number)
        values = {"keep": keep, "every_samples": every, "keep_every": keep_every}
        run.mkdir()
        cfg = narrow_config(run, **{f"checkpoint__{key}": value for key, value in values.items()})
        saver, _ = saver_of(cfg, world, state)
        for state.step in saved:
            save_now(saver, state)
        assert saved_steps(run) == want
        assert not list(checkpoint_files.folder_of(run).glob(".*"))


def test_older_checkpoints_that_cannot_be_deleted_do_not_stop_the_run(world, tmp_path, monkeypatch):
    cfg = narrow_config(tmp_path)
    state = checkpoint_ranks.lively_state(cfg, world)
    saver, said = saver_of(cfg, world, state)
    monkeypatch.setattr(Saver, "_prune", mock.Mock(side_effect=PermissionError(13, "Not permitted")))
    save_now(saver, state)
    assert said[1:] == ["older checkpoints are not deleted: [Errno 13] Not permitted; training goes on"]


# Saves that fail


@pytest.mark.parametrize("writers", SEVERAL)
def test_a_save_that_fails_on_one_rank_costs_only_itself(measured, writers):
    found, run = measured[writers]["checkpoint"]["breaking"], measured.checkpoint(writers).parents[1] / "breaking"
    assert found["before"] == {"failures": [None] * writers, "left": ["step_000000001"]}
    for number, (what, (_, _, rank)) in enumerate(checkpoint_ranks.BREAKS.items(), start=2):
        error = "No space left on device"
        reason = found[what]["failures"][0]
        assert error in reason and reason.startswith(f"rank {rank % writers}: ") == bool(rank % writers), what
        assert (f"rank_{rank % writers:05d}.safetensors:" in reason) == (what in checkpoint_ranks.IN_A_FILE), what
        assert found[what]["failures"] == [reason] * writers, what
        assert found[what]["left"] == ["step_000000001"]  # the older one; no piece of the new one
        assert found[what]["faults"] == [f"checkpoint of step {number} is not saved: {reason}"] * writers
        (line,), *others = found[what]["said"]
        assert line.startswith(f"checkpoint {run}/checkpoints/step_{number:09d} NOT saved: {reason};")
        assert "\n" not in line and not any(others)
    after = found["after"]
    assert found["finite"] and after["faults"] == [""] * writers and saved_steps(run) == [1, after["step"]]
    assert [len(lines) for lines in after["said"]] == [1] + [0] * (writers - 1)
    for path in checkpoint_files.list_checkpoints(run):
        Checkpoint(path).verify()


def test_a_fault_does_not_cost_the_checkpoint_that_is_being_saved(trains, tmp_path, monkeypatch):
    def slowly(file: safetensors_io.CheckedFile) -> safetensors_io.FileEntry:
        time.sleep(0.5)
        return close(file)

    def fail(*_: object) -> None:
        raise Fault("broken")

    close = safetensors_io.CheckedFile.close
    monkeypatch.setattr(safetensors_io.CheckedFile, "close", slowly)
    monkeypatch.setattr(Alive, "at", fail)
    code, _, line = trains(tmp_path / "run", "--checkpoint.every_samples=12")
    assert (code, line) == (3, "broken")
    (path,) = checkpoint_files.folder_of(tmp_path / "run").iterdir()
    assert path.name == "step_000000001"
    Checkpoint(path).verify()


# Disks


@pytest.fixture
def trains(shapes_dir, attempt) -> Callable:
    """trains(run, *overrides) trains here; returns the exit code, stdout, and the line of what went wrong."""
    return lambda run, *overrides: attempt(*micro_run(shapes_dir, run, *overrides))


def test_a_full_disk_costs_a_checkpoint_and_no_training(trains, tmp_path, monkeypatch):
    run = tmp_path / "run"
    often = ("--checkpoint.every_samples=12", "--checkpoint.keep=1")

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=0 if saved_steps(run) else 10**9)

    with monkeypatch.context() as full:
        full.setattr(checkpoint_files.shutil, "disk_usage", usage)
        code, out, line = trains(run, *often)
    assert code == 3 and re.match("checkpoint of step 5 is not saved: .* has 0 GB free", line), line
    assert column(run, "step") == [1, 2, 3, 4, 5]
    said = [line for line in out.splitlines() if line.startswith("checkpoint")]
    assert "step_000000001 saved" in said[0]
    assert len(said) == 6 and all("older ones are untouched" in line for line in said[1:]), "step 5 comes twice"
    assert saved_steps(run) == [1]
    Checkpoint(checkpoint_files.list_checkpoints(run)[0]).verify()

    code, out, _ = trains(run, *often)
    assert code == 0 and "from step 1" in out and column(run, "step") == [1, 2, 3, 4, 5]
    assert saved_steps(run) == [5]


def test_a_disk_that_holds_no_checkpoint_is_refused_at_the_start(trains, tmp_path, monkeypatch):
    parameters = sum(prod(shape) for shape in parameter_table(config_file.load(MICRO).model).values())
    space = SimpleNamespace(free=12 * parameters - 1)
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda folder: space)
    code, _, line = trains(tmp_path / "run")
    assert code == 2 and "GB free and a checkpoint takes" in line and f"{tmp_path}/run" in line
    assert "run.dir" in line and "checkpoint.save=false" in line and not (tmp_path / "run").exists()


def test_a_rank_without_memory_for_the_copies_is_refused_at_the_start(trains, tmp_path, monkeypatch):
    empty = torch.empty

    def short(*size: int, **options: object) -> torch.Tensor:
        if options == {"pin_memory": False}:
            raise MemoryError("cannot pin")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", short)
    code, _, line = trains(tmp_path / "run")
    assert (
        code == 2
        and line == "no host memory for the copy of a checkpoint: cannot pin; free memory or set checkpoint.save=false"
    )
    assert not (tmp_path / "run").exists()
    assert trains(tmp_path / "run", "--checkpoint.save=false")[0] == 0


# What a run cannot go on from


MISFITS = [
    ({"model__double_blocks": 3}, "96 missing: model.double_blocks.2."),
    ({"model__single_blocks": 2}, "unexpected: model.single_blocks.2.linear1.bias, "),
    ({"model__mlp_ratio": 3}, "misshaped: model.double_blocks.0.img_mlp.0.bias (48,), want (36,)"),
    ({"model__clip_dim": 15}, "4 misshaped: model.vector_in.in_layer.weight (12, 14), want (12, 15)"),
]


def test_values_that_are_not_finite_are_refused_by_name(world, tmp_path):
    bad = {"model.img_in.weight": float("nan")}
    bad |= {f"optimizer.state.img_in.weight.{moment}": float("inf") for moment in ("exp_avg", "exp_avg_sq", "ema")}
    for key, value in bad.items():
        cfg = narrow_config(tmp_path / key)
        state = checkpoint_ranks.lively_state(cfg, world)
        checkpoint.rows_of(state)[key].local[-1, -1] = value
        save_now(Saver(cfg, world, state, FACTS, print), state)
        (folder,) = checkpoint_files.list_checkpoints(Path(cfg.run.dir))
        text = refusal(checkpoint_ranks.restored, cfg, world, folder)
        assert text.startswith(f"{folder}: {key} holds NaN or infinite values")


def test_what_a_run_cannot_go_on_from_is_refused(world, tmp_path):
    """Another model's checkpoint, one of another data set, and a damaged file."""
    cfg = narrow_config(tmp_path)
    state = checkpoint_ranks.lively_state(cfg, world)
    save_now(Saver(cfg, world, state, FACTS, print), state)
    (saved,) = checkpoint_files.list_checkpoints(tmp_path)
    for values, words in MISFITS:
        own = narrow_config(tmp_path, **values)
        text = refusal(resuming.open_for, saved, checkpoint_ranks.other_state(own, world), own, FACTS)
        assert text.startswith(f"checkpoint {saved} does not fit: ") and words in text
    resuming.open_for(saved, state, cfg, FACTS)
    for key in ("train_samples", "val_samples"):
        text = refusal(resuming.open_for, saved, state, cfg, FACTS | {key: 51})
        assert f"{saved} comes from a data set of {FACTS[key]} {key.replace('_', ' ')}, this one has 51" in text
    text = refusal(resuming.open_for, saved, state, cfg, FACTS | {"run": "another"})
    assert f"{saved} belongs to run a run ({cfg.name}), this is run another ({cfg.name}); move it out" in text
    other = config_file.replace(cfg, train__seed=cfg.train.seed + 1, optim__lr=0.5)
    assert f"train.seed={other.train.seed}, there {cfg.train.seed}; optim.lr=0.5, there" in refusal(
        resuming.open_for, saved, state, other, FACTS
    )
    (path,) = saved.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff\xff")
    text = refusal(checkpoint_ranks.restored, cfg, world, saved)
    assert f"checkpoint file {path} is damaged between bytes 0 and {path.stat().st_size}" in text
