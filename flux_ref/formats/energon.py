"""The shards of a split in a folder that `energon prepare` has been through.

Such a folder holds .nv-meta. Its split.yaml lists the shards of each split, and what to leave out.
"""

from pathlib import Path

import braceexpand
import yaml

from flux_ref.errors import Refusal

META = ".nv-meta"


def shards_of(folder: Path, split: str) -> list[Path]:
    """The shards of "train" or "val", in Energon's order. Raises: Refusal."""
    listing = folder / META / "split.yaml"
    try:
        content = yaml.safe_load(listing.read_text(encoding="utf-8"))
        patterns, left_out = content["split_parts"][split], content.get("exclude") or []
        names, excluded = (_expanded(lines) for lines in (patterns, left_out))
    except OSError as error:
        raise Refusal(f"{listing}: {error.strerror}; prepare the folder again or give the shards' folder") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise Refusal(f"{listing} lists no shards for {split!r} ({reason}); prepare the folder again") from None
    if samples := [name for name in excluded if not name.endswith(".tar")]:
        raise Refusal(f"{listing} excludes the sample {samples[0]}; flux_ref can leave out whole shards only")
    paths = [Path(name) for name in names if name not in excluded]
    for path in paths:  # a shard itself may be a link to elsewhere, as in Hugging Face's cache
        if ".." in path.parts or path.is_absolute() or not (folder / path).is_file():
            raise Refusal(f"{listing} lists {path}, which is not a file in {folder}; prepare the folder again")
    if not paths:
        raise Refusal(f"{listing} lists no shards for {split!r}; prepare the folder again")
    return [folder / path for path in paths]


def _expanded(patterns: list[str]) -> list[str]:
    """Brace ranges as in train/shard_{000000..000109}.tar, written out."""
    if not isinstance(patterns, list):
        raise TypeError(f"{patterns!r} is not a list")
    return [name for pattern in patterns for name in braceexpand.braceexpand(str(pattern))]
