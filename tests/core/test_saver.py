"""Saving and loading a state: any number of ranks goes on, bit for bit, from what any other has written; and a save
that fails, on whatever rank, costs nothing but itself.
"""

import re
import threading
from collections.abc import Callable
from math import ceil, prod
from pathlib import Path
from types import SimpleNamespace

import checkpoint_ranks
import pytest
import rank_runs
import torch
from checkpoint_ranks import FACTS, narrow_config
from conftest import MICRO, micro_run, require_identical
from run_files import column, saved_steps, verify
from safetensors import safe_open

from flux_ref import checkpoint, config, config_file, optim, ranks, saver
from flux_ref.alive import Alive
from flux_ref.checkpoint import Checkpoint, TensorSlice
from flux_ref.errors import Fault
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.saver import Saver

HSDP = pytest.param(4, marks=pytest.mark.slow)  # ranks: 2 replicas x 2 shards
SEVERAL, SIZES = (3, HSDP), (1, 3, HSDP)
STEP, SAMPLES = checkpoint_ranks.STEP, checkpoint_ranks.SAMPLES
RIGHT = {"wrong": [], "clock": (STEP, SAMPLES), "AdamW's steps": {STEP}}
NARROW = narrow_config(Path("unused"))
WANT = {key: checkpoint_ranks.value(key, shape) for key, shape in checkpoint_ranks.keys(NARROW).items()}
PARAMETERS = sum(prod(shape) for shape in parameter_table(NARROW.model).values())


@pytest.fixture
def world() -> World:
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


@pytest.mark.parametrize("readers", SEVERAL)
def test_ranks_go_on_from_what_others_have_written_bit_for_bit(measured, readers):
    found = measured[readers]["checkpoint"]
    assert found["reading"].keys() == {size for size in rank_runs.SIZES if size <= readers}
    for read in found["reading"].values():
        require_identical(read.pop("after steps"), found["on"])
        assert read == RIGHT


@pytest.mark.parametrize("writers", SIZES)
def test_one_process_goes_on_from_what_others_have_written_bit_for_bit(measured, world, writers):
    folder = measured.checkpoint(writers)
    found = checkpoint_ranks.reading(NARROW, world, folder)
    require_identical(found.pop("after steps"), measured[1]["checkpoint"]["on"])
    assert found == RIGHT
    saved = Checkpoint(folder)
    require_identical({key: saved.read(key) for key in saved.tensors}, WANT)
    cfg = config_file.from_flat(saved.info["name"], saved.info.pop("config"))
    assert cfg == narrow_config(folder.parents[1], parallel__replicate=2 if writers == 4 else 1)
    other = {"name": "micro", "torch": torch.__version__, "world_size": writers}
    assert saved.info == {"step": STEP, "samples": SAMPLES} | FACTS | other
    rows = [[rank[key] for rank in measured[3]["checkpoint"]["writing"]["rows"]] for key in WANT]
    assert any(0 < min(parts) < max(parts) for parts in rows) and any(min(parts) == 0 for parts in rows), "uneven"


@pytest.mark.parametrize("writers", SIZES)
def test_every_byte_is_written_once_and_is_on_the_disk_before_the_folder_has_its_name(measured, writers):
    final, sizes = measured.checkpoint(writers), []
    for path in final.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes.append(sum(file.get_tensor(key).nbytes for key in file.keys()))  # noqa: SIM118
    assert sum(sizes) == 16 * PARAMETERS == optim.bytes_per_parameter(NARROW.optim) * PARAMETERS
    assert writers == 3 or max(sizes) < 1.2 * min(sizes)  # replicas share the work
    writing = measured[writers]["checkpoint"]["writing"]
    events = sorted(event for rank in writing["events"] for event in rank)
    (renamed,) = [number for number, (_, kind, target) in enumerate(events) if (kind, target) == ("rename", str(final))]
    before = [Path(path).name for _, kind, path in events[:renamed] if kind == "sync"]
    assert before[-1].startswith(".step_"), "the names of the files come to the disk after the files"
    assert {path.name for path in final.glob("*.safetensors")} < set(before)
    assert any(name.startswith(".manifest.json.") for name in before)
    assert [path for _, kind, path in events[renamed + 1 :] if kind == "sync"] == [str(final.parent)]
    first, *others = writing["said"]
    assert len(first) == 1 and first[0].startswith(f"checkpoint {final} saved in ")  # though it was asked for twice
    assert not any(others) and not list(final.parent.glob(".*"))


def test_training_goes_on_as_soon_as_save_returns_and_the_next_save_waits(world, tmp_path, monkeypatch):
    cfg = narrow_config(tmp_path, checkpoint__keep=9)
    state = checkpoint_ranks.lively_state(cfg, world)
    gate, write, running, said = threading.Event(), Saver._write, [], []

    def slow(own: Saver, *rest: object) -> None:
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
        found = checkpoint_ranks.restored(cfg, world, path)
        require_identical(checkpoint_ranks.contents(found), wants[checkpoint.step_of(path)])


def test_host_buffers_do_not_overlap_and_waste_little():
    """torch rounds pinned allocations up to powers of two. Rank 0 of 8 holds schnell's shards; nothing is allocated."""
    with torch.device("meta"):
        table = parameter_table(config.ModelConfig())
        rows = {
            name: TensorSlice(torch.empty(ceil(shape[0] / 8), *shape[1:]), 0, shape) for name, shape in table.items()
        }
        copies = saver.allocate_host_buffers(rows, pin=False)
    storages = {part.local.untyped_storage()._cdata: part.local.untyped_storage() for part in copies.values()}
    needed = sum(part.local.nbytes for part in rows.values())
    taken = sum(1 << (storage.nbytes() - 1).bit_length() for storage in storages.values())
    assert needed < taken < 1.1 * needed


@pytest.mark.parametrize("writers", SEVERAL)
def test_a_save_that_fails_on_one_rank_costs_only_itself(measured, writers):
    found, run = measured[writers]["checkpoint"]["breaking"], measured.checkpoint(writers).parents[1] / "breaking"
    assert found["before"] == {"failures": [None] * writers, "left": ["step_000000001"]}
    for number, (what, (_, _, rank)) in enumerate(checkpoint_ranks.BREAKS.items(), start=2):
        reason = found[what]["failures"][0]
        assert "No space left on device" in reason and reason.startswith(f"rank {rank % writers}: ") == bool(rank), what
        assert found[what]["failures"] == [reason] * writers, what
        assert found[what]["left"] == ["step_000000001"]  # the older one; no piece of the new one
        assert found[what]["faults"] == [f"checkpoint of step {number} is not saved: {reason}"] * writers
        (line,), *others = found[what]["said"]
        assert line.startswith(f"checkpoint {run}/checkpoints/step_{number:09d} NOT saved: {reason};")
        assert "\n" not in line and not any(others)
    after = found["after"]
    assert found["finite"] and after["faults"] == [""] * writers and saved_steps(run) == [1, after["step"]]
    for path in checkpoint.list_checkpoints(run):
        verify(path)


@pytest.fixture
def trains(shapes_dir, attempt) -> Callable:
    """trains(run, *overrides) trains here; returns the exit code, stdout, and the line of what went wrong."""
    return lambda run, *overrides: attempt(*micro_run(shapes_dir, run, *overrides))


def test_a_fault_does_not_cost_the_checkpoint_that_is_being_saved(trains, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise Fault("broken")

    write = checkpoint.write_rank
    monkeypatch.setattr(checkpoint, "write_rank", lambda *args: threading.Event().wait(0.5) or write(*args))
    monkeypatch.setattr(Alive, "at", fail)
    assert trains(tmp_path / "run", "--checkpoint.every_samples=12")[::2] == (3, "broken")
    (path,) = checkpoint.folder_of(tmp_path / "run").iterdir()
    verify(path)


def test_a_full_disk_costs_a_checkpoint_and_no_training(trains, tmp_path, monkeypatch):
    run = tmp_path / "run"
    often = ("--checkpoint.every_samples=12", "--checkpoint.keep=1")
    with monkeypatch.context() as full:
        usage = lambda folder: SimpleNamespace(free=0 if saved_steps(run) else 10**9)  # noqa: E731
        full.setattr(saver.shutil, "disk_usage", usage)
        code, out, line = trains(run, *often)
    assert code == 3 and re.match("checkpoint of step 5 is not saved: .* has 0 GB free", line), line
    assert column(run, "step") == [1, 2, 3, 4, 5] and saved_steps(run) == [1]
    said = [line for line in out.splitlines() if line.startswith("checkpoint")]
    assert len(said) == 6 and all("older ones are untouched" in line for line in said[1:]), "step 5 comes twice"
    code, out, _ = trains(run, *often)
    assert code == 0 and "from step 1" in out and column(run, "step") == [1, 2, 3, 4, 5]
    assert saved_steps(run) == [5]


def test_what_a_start_lacks_for_checkpoints_is_refused_and_leaves_nothing(trains, tmp_path, monkeypatch):
    parameters = sum(prod(shape) for shape in parameter_table(config_file.load(MICRO).model).values())
    with monkeypatch.context() as full:
        full.setattr(saver.shutil, "disk_usage", lambda folder: SimpleNamespace(free=12 * parameters - 1))
        code, _, line = trains(tmp_path / "run")
    assert code == 2 and "GB free and a checkpoint takes" in line and f"{tmp_path} " in line
    assert "set run.dir to another disk or checkpoint.save=false" in line
    empty = torch.empty

    def short(*size: int, **options: object) -> torch.Tensor:
        if options == {"pin_memory": False}:
            raise MemoryError("cannot pin")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", short)
    code, _, line = trains(tmp_path / "run")
    assert code == 3 and line.startswith("out of memory: cannot pin; free memory")
    assert list(tmp_path.iterdir()) == []
