"""A data set grows in a folder of its own, OUTPUT/SPLIT.partial, and becomes OUTPUT/SPLIT once it is whole.

SPLIT.partial/plan.json says what the set is made from. The process that writes there claims OUTPUT/.SPLIT.claim.
A job that was stopped goes on if its plan is the same.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flux_ref.errors import Refusal
from flux_ref.formats import claim, files, outside, shard_writer

PLAN = "plan.json"
Plan = dict  # {"options": {name: value}, "files": [[name, ...] of each input file, in order]}


def growing(final: Path) -> Path:
    """The folder in which a set grows."""
    return final.with_name(f"{final.name}.partial")


def require_new(final: Path) -> None:
    if final.exists():
        raise Refusal(f"{final} exists; remove it or choose another --output")


@contextmanager
def claimed(final: Path, plan: Plan) -> Iterator[None]:
    """Hold the growing folder of a set during the block, and give the set its name if the block ends well.

    Raises: Refusal if another process holds the folder, or if shards of another plan are in it.
    """
    folder = growing(final)
    folder.mkdir(parents=True, exist_ok=True)
    remedy = "wait for it or choose another --output"
    with claim.hold(final.with_name(f".{final.name}.claim"), f"{folder} is in use", remedy):
        plan_path = folder / PLAN
        wanted = json.dumps(plan)
        begun = ""
        if plan_path.exists():
            begun = outside.read_bytes(plan_path, "plan", outside.OWN_BYTES).decode(errors="replace")
        if begun != wanted:
            if any(folder.glob("*.tar")):
                raise Refusal(f"{folder} was begun otherwise: {_difference(begun, wanted)}; remove it to begin again")
            for path in set(folder.glob("*.json")) - {plan_path}:
                path.unlink()
            files.write_whole(plan_path, wanted)
        for ending in (files.PARTIAL, files.CLAIM):
            for path in folder.glob(f".*{ending}"):  # left by a job that was killed
                files.remove(path)
        yield
        files.sync(folder)
        folder.rename(final)
        files.sync(final.parent)


def _difference(begun: str, wanted: str) -> str:
    """The first options and files that differ."""
    try:
        contents = [outside.parse_json(plan) for plan in (begun, wanted)]
        then, now = (content["options"] | {name: about for name, *about in content["files"]} for content in contents)
    except (ValueError, KeyError, TypeError):
        return f"its {PLAN} is damaged or of another version"
    names = [name for name in then | now if then.get(name) != now.get(name)]
    changes = [f"{name} was {then.get(name, 'missing')}, is {now.get(name, 'missing')}" for name in names]
    return "; ".join(changes[:3]) or "its files came in another order"


def missing(final: Path, count: int, per_shard: int) -> dict[int, range]:
    """The samples of each shard that has not been written yet, by the shard's number."""
    shards = {}
    for number, start in enumerate(range(0, count, per_shard)):
        if not shard_writer.shard_path(growing(final), number).exists():
            shards[number] = range(start, min(start + per_shard, count))
    return shards


def write_empty(final: Path, encodings: dict[str, np.ndarray]) -> None:
    """Write empty_encodings beside the set that this process has claimed, unless another job does so meanwhile."""
    own = growing(final) / f".empty_encodings{files.PARTIAL}"
    shared = final.with_name("empty_encodings")
    shard_writer.write_empty(own, encodings)
    try:
        own.rename(shared)
    except OSError:
        files.remove(own)
        if not shared.exists():
            raise
