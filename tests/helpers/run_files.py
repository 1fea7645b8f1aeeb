"""Reads what a run has written into its folder."""

import json

from conftest import require_identical

from flux_ref import checkpoint, files
from flux_ref.checkpoint import Checkpoint

WALL_CLOCK = ("samples_per_s", "data_wait", "peak_memory_gb", "seconds")  # these values depend on the run's speed


def lines(folder, name="metrics.jsonl"):
    """The records of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def column(folder, key, name="metrics.jsonl"):
    return [record[key] for record in lines(folder, name)]


def count(path):
    """The number of lines of a file, which may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def events(folder):
    """The benchmark's lines of a run."""
    text = (folder / "result_0.txt").read_text()
    return [json.loads(line.partition(":::MLLOG ")[2]) for line in text.splitlines() if ":::MLLOG " in line]


def event(folder, key):
    """The only line of the benchmark's log with this key."""
    (found,) = [line for line in events(folder) if line["key"] == key]
    return found


def newest(run):
    return Checkpoint(checkpoint.list_checkpoints(run)[-1])


def saved_steps(run):
    """The steps of a run's checkpoints."""
    return [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run)]


def tensors_of(path):
    """All of a checkpoint. Raises: Refusal for damage."""
    saved = Checkpoint(path)
    return {key: saved.read(key) for key in saved.shapes}


def what_counts(run):
    """All records of a run, without the values that depend on its speed."""
    return {
        name: [{key: value for key, value in record.items() if key not in WALL_CLOCK} for record in lines(run, name)]
        for name in ("metrics.jsonl", "eval.jsonl")
    }


def require_equal_runs(found, want):
    """The last checkpoints and all records of two runs agree bit for bit."""
    assert what_counts(found) == what_counts(want)
    first, second = newest(found), newest(want)
    assert first.folder.name == second.folder.name
    require_identical(tensors_of(first.folder), tensors_of(second.folder))


def contents(folder):
    """Every file below a folder, but the empty ones that are locked."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def left_in(folder):
    """What killed processes have left unfinished."""
    return [*folder.rglob(f".*{files.PARTIAL}")]


def flip(path, at):
    """Flip the lowest bit of a byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
