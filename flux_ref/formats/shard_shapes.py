"""What a shard that does not fit says of its own samples. formats/shards.py has the layout."""

import contextlib
import re
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import outside

SIZE = re.compile(rb" *([0-7]+)[ \0]*")  # of a tar member
SHAPE = re.compile(rb"'shape': [(]([0-9]{1,9}(?:, [0-9]{1,9})*),?[)]")  # in the head of a .npy blob


def require(path: Path, wanted: dict[str, tuple[int, ...]]) -> None:
    """Raises: Refusal if the first sample of a shard has other shapes. wanted: by member, in the members' order."""
    found, offset = {}, 1024  # bytes; json comes first
    with contextlib.suppress(Refusal, TypeError), outside.opened(path, "shard") as file:
        for name in wanted:
            file.seek(offset)
            head = file.read(640)
            found[name] = tuple(map(int, SHAPE.search(head, 512)[1].split(b",")))
            offset += 512 + -(-int(SIZE.fullmatch(head, 124, 136)[1], 8) // 512) * 512
    if len(found) == len(wanted) and found != wanted:
        raise Refusal(
            f"shard {path} is of another config: it holds {_in_words(found)}, want {_in_words(wanted)};"
            " give the config that it was made for (verify takes --config), or prepare the data again"
        )


def _in_words(shapes: dict[str, tuple[int, ...]]) -> str:
    *_, height, width = (1, 1, *shapes["mean"])
    return f"{8 * width} x {8 * height} pixels (t5 {shapes['t5']}, clip {shapes['clip']}, mean {shapes['mean']})"
