"""The shards of a split in a folder that `energon prepare` has been through.

Such a folder holds .nv-meta. Its split.yaml lists the shards of each split, and what to leave out.
"""

from pathlib import Path

import yaml

from flux_ref.errors import Refusal
from flux_ref.formats import braces, outside

META = ".nv-meta"
LIST_BYTES = 2**20  # yaml reads 30 kB a second


def shards_of(folder: Path, split: str) -> list[Path]:
    """The shards of "train" or "val", in Energon's order. Raises: Refusal."""
    listing = folder / META / "split.yaml"
    text = outside.read_text(listing, "list of shards", LIST_BYTES)
    try:
        content = yaml.safe_load(text)
        parts = {name: _expanded(lines) for name, lines in content["split_parts"].items()}
        names = parts[split]
        excluded = set(_expanded(content.get("exclude") or []))
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = outside.printable(" ".join(str(error).split()))[:200]
        raise Refusal(f"{listing} lists no shards for {split!r} ({reason}); prepare the folder again") from None
    if len(set(names)) < len(names):
        raise Refusal(f"{listing} lists a shard of {split!r} more than once; prepare the folder again")
    for other, listed in parts.items():
        if other != split and (both := set(names) & set(listed) - excluded):
            raise Refusal(f"{listing} lists {min(both)} for {split!r} and for {other!r}; prepare the folder again")
    if samples := [name for name in excluded if not name.endswith(".tar")]:
        raise Refusal(f"{listing} excludes the sample {samples[0]}; flux_ref can leave out whole shards only")
    paths = [Path(name) for name in names if name not in excluded]
    for path in paths:  # a shard itself may be a link to elsewhere, as in Hugging Face's cache
        if ".." in path.parts or path.is_absolute() or not (folder / path).is_file():
            raise Refusal(f"{listing} lists {path}, which is not a file in {folder}; prepare the folder again")
    if not paths:
        raise Refusal(f"{listing} lists no shards for {split!r}; prepare the folder again")
    return [folder / path for path in paths]


def _expanded(patterns: object) -> list[str]:
    """Brace ranges as in train/shard_{000000..000109}.tar, written out. Raises: TypeError, ValueError."""
    if not (isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)):
        raise TypeError("no list of names")  # to print it could take for ever: aliases may nest
    return braces.expanded(patterns)
