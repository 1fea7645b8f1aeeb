"""Where the samples of a shard lie whose members do not follow the fixed layout: found by walking its tar headers.

Other tools write the same members in another order, with more beside them, or with headers of another size. Walking
reads a few bytes per member and takes seconds per ten thousand samples; `python -m flux_ref.prepare index DIR` keeps
what it finds beside the shards, so that a run need not walk.
"""

import tarfile
from pathlib import Path

import numpy as np

from flux_ref.errors import Refusal

FOLDER = ".flux_ref_index"
BLOCK, RECORD, NPY_HEADER = 512, 10_240, 128  # bytes; tar's two units, and what precedes the numbers in a .npy file


class NotOurs(Exception):
    """A file is no whole tar of samples; the message says why."""


def walk(path: Path, payload_bytes: dict[str, int]) -> np.ndarray:
    """Per sample, (offset, size) of the json and of each KEY.member.bytes: (samples, 1 + members, 2) int64.

    As WebDataset has it, the members of a sample follow each other and share the name up to the first dot.
    payload_bytes: of each member, behind a .npy header. Raises: NotOurs.
    """
    kinds = {"json": 0} | {f"{member}.bytes": i for i, member in enumerate(payload_bytes, 1)}
    want = dict(zip(kinds, (None, *(NPY_HEADER + size for size in payload_bytes.values()))))
    found: list[np.ndarray] = []
    key, end = None, 0
    try:
        with tarfile.open(path, "r:") as archive:
            for entry in archive:
                archive.members = []  # which it would keep for ever
                end = entry.offset_data + -(-entry.size // BLOCK) * BLOCK
                own, _, kind = Path(entry.name).name.partition(".")
                if not entry.isreg() or kind not in kinds:
                    continue
                if own != key:
                    _require_whole(found, key, kinds)
                    found.append(np.full((len(kinds), 2), -1, np.int64))
                    key = own
                if found[-1][kinds[kind], 0] >= 0:
                    raise NotOurs(f"sample {len(found) - 1}, key {key} has two members {kind}")
                if want[kind] not in (None, entry.size):
                    raise NotOurs(
                        f"sample {len(found) - 1}, key {key}: {kind} has {entry.size} bytes, want {want[kind]}"
                    )
                found[-1][kinds[kind]] = entry.offset_data, entry.size
    except (tarfile.TarError, OSError) as error:
        raise NotOurs(f"it is no whole tar file: {error}") from None
    _require_whole(found, key, kinds)
    _require_end(path, end)
    if not found:
        raise NotOurs(f"it holds no sample of {', '.join(kinds)}")
    return np.stack(found)


def _require_whole(found: list[np.ndarray], key: str | None, kinds: dict[str, int]) -> None:
    missing = [kind for kind, i in kinds.items() if found and found[-1][i, 0] < 0]
    if missing:
        raise NotOurs(f"sample {len(found) - 1}, key {key} lacks {', '.join(missing)}")


def _require_end(path: Path, end: int) -> None:
    """A file that was cut between two members looks whole but for the two zero blocks and what pads it to a record."""
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read(RECORD + 2 * BLOCK)
    marked = end + 2 * BLOCK
    if any(rest) or path.stat().st_size not in (marked, -(-marked // RECORD) * RECORD):
        raise NotOurs(f"it has no proper end at byte {end}")


def _file(shard: Path) -> Path:
    return shard.parent / FOLDER / f"{shard.name}.npz"


def save(shard: Path, places: np.ndarray) -> None:
    """Keep what `walk` found, whole or not at all."""
    path = _file(shard)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        np.savez_compressed(file, places=places, stamp=_stamp(shard))
    partial.replace(path)


def find(shard: Path, payload_bytes: dict[str, int]) -> np.ndarray:
    """What `walk` finds in a shard, from the index if there is one that is up to date. Raises: NotOurs, Refusal."""
    try:
        with np.load(_file(shard), allow_pickle=False) as content:
            if np.array_equal(content["stamp"], _stamp(shard)) and content["places"].shape[1:] == (
                1 + len(payload_bytes),
                2,
            ):
                return content["places"]
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy's and zip's parsers raise a dozen kinds
        raise Refusal(f"index {_file(shard)} is damaged: {' '.join(str(error).split())}; delete it") from None
    return walk(shard, payload_bytes)


def _stamp(shard: Path) -> np.ndarray:
    """Size and time of change, by which an index knows its shard."""
    status = shard.stat()
    return np.array([status.st_size, status.st_mtime_ns], np.int64)
