"""The shards of a split in a folder that `energon prepare` has been through.

Such a folder holds .nv-meta. Its split.yaml lists the shards of each split, and what to leave out.
"""

import itertools
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
        parts = {name: _names(patterns) for name, patterns in content["split_parts"].items()}
        excluded = set(_names(content.get("exclude") or []))
        names = [name for name in parts[split] if name not in excluded]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = outside.printable(" ".join(str(error).split()))[:200]
        raise Refusal(f"{listing} lists no shards for {split!r} ({reason}); prepare the folder again") from None
    if not names:
        raise Refusal(f"{listing} lists no shards for {split!r}; prepare the folder again")
    for name in excluded:
        if not name.endswith(".tar"):
            raise Refusal(f"{listing} excludes the sample {name}; flux_ref can leave out whole shards only")
    seen = set()
    for name in itertools.chain(*parts.values()):
        if name in seen and name not in excluded:
            raise Refusal(f"{listing} lists {name} twice, for one split or for two; prepare the folder again")
        seen.add(name)
    for name in names:  # a shard itself may be a link to elsewhere, as in Hugging Face's cache
        path = Path(name)
        if ".." in path.parts or path.is_absolute() or not (folder / path).is_file():
            raise Refusal(f"{listing} lists {path}, which is not a file in {folder}; prepare the folder again")
    return [folder / name for name in names]


def _names(patterns: object) -> list[str]:
    """Brace ranges as in train/shard_{000000..000109}.tar, written out. Raises: TypeError, ValueError."""
    if not (isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)):
        raise TypeError("no list of names")  # to print it could take for ever: aliases may nest
    return braces.expand(patterns)
