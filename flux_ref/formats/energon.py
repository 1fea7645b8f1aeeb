"""Which shards a data set consists of: the *.tar files of a folder, or what Energon has written down about it.

A folder that `energon prepare` has been through holds .nv-meta; its split.yaml says which shards make up which split
and what to leave out. Energon 6 writes .info.yaml where 7 writes .info.json.
"""

from dataclasses import dataclass, field
from pathlib import Path

import braceexpand
import yaml

from flux_ref.errors import Refusal

META = ".nv-meta"


@dataclass(frozen=True)
class Listing:
    """The shards of a split, in order; what Energon counted in each (None: not said); keys to leave out, per shard."""

    paths: list[Path]
    counts: dict[Path, int | None] = field(default_factory=dict)
    excluded: dict[Path, set[str]] = field(default_factory=dict)


def shards_of(folder: Path, split: str) -> Listing:
    """split: "train" or "val"; only Energon's folders hold several. Raises: Refusal."""
    if not folder.is_dir():
        raise Refusal(f"data folder {folder} does not exist; set data.train, data.val or make it first")
    if (folder / META).is_dir():
        return _energon(folder, split)
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        inside = folder / split
        hint = f"; did you mean {inside}?" if list(inside.glob("*.tar")) else ""
        raise Refusal(f"data folder {folder} holds no *.tar shard{hint}")
    return Listing(paths)


def _energon(folder: Path, split: str) -> Listing:
    described = _yaml(folder / META / "split.yaml")
    parts = described.get("split_parts")
    if not isinstance(parts, dict) or not isinstance(parts.get(split), list) or not parts[split]:
        known = ", ".join(parts) if isinstance(parts, dict) and parts else "none"
        raise Refusal(f"{folder / META}/split.yaml has no split_parts for {split!r}, it has {known}; prepare it again")
    names = _expanded(parts[split])
    excluded: dict[str, set[str]] = {}
    for entry in _expanded(described.get("exclude") or []):
        shard, tar, key = entry.partition(".tar")
        excluded.setdefault(shard + tar, set()).update({key.removeprefix("/")} if key else {""})
    names = [name for name in names if "" not in excluded.get(name, ())]
    paths = [_inside(folder, name) for name in names]
    counted = _counts(folder / META)
    return Listing(
        paths,
        {path: counted.get(name) for name, path in zip(names, paths)},
        {path: excluded[name] for name, path in zip(names, paths) if name in excluded},
    )


def _expanded(patterns: list) -> list[str]:
    """Brace ranges as in train/shard_{000000..000109}.tar, written out."""
    return [name for pattern in patterns for name in braceexpand.braceexpand(str(pattern))]


def _inside(folder: Path, name: str) -> Path:
    """A listed shard; the list is data from outside and may not lead out of the folder."""
    path = folder / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise Refusal(f"{folder / META}/split.yaml lists {name!r}, which is not inside {folder}; prepare it again")
    if not path.is_file():
        raise Refusal(f"{folder / META}/split.yaml lists {name}, which is missing; copy it or prepare the folder again")
    return path


def _counts(meta: Path) -> dict[str, int]:
    """Samples per shard as Energon counted them; {} if it did not say."""
    path = next((path for path in (meta / ".info.json", meta / ".info.yaml") if path.is_file()), None)
    counts = _yaml(path).get("shard_counts", {}) if path else {}  # JSON is YAML, too
    if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
        raise Refusal(f"{meta} holds no usable shard_counts; prepare the folder again")
    return counts


def _yaml(path: Path) -> dict:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}; prepare the folder again or give the folder of the shards") from None
    except (yaml.YAMLError, ValueError) as error:
        raise Refusal(f"{path} is not YAML: {' '.join(str(error).split())}; prepare the folder again") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path} is not a mapping; prepare the folder again")
    return content
