"""The values of a config's keys: their types, and how TOML and the command line write them."""

import json
import math
import tomllib
from pathlib import Path

from flux_ref.errors import Refusal


def tree(path: Path) -> dict[str, object]:
    """What a TOML file holds. Raises: Refusal."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also bad UTF-8 and endless integers
        raise Refusal(f"config {path} is not valid TOML: {error}") from None


def parse(key: str, text: str, want: type) -> object:
    """The value of a command-line override: TOML, except that strings need no quotes. Raises: Refusal."""
    if want is str:
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    if parsed.keys() != {"value"}:
        raise Refusal(f"{key}={text!r} is not {describe(want)}")
    return parsed["value"]


def typed(key: str, value: object, want: type) -> object:
    """The value in the key's own type; an int may stand for a float and a list for a tuple, nothing else.

    Raises: Refusal.
    """
    if want is float and type(value) is int:
        return float(value) if abs(value) < 2**63 else math.inf  # which config.validate refuses
    is_list = want in (tuple[int, ...], tuple[str, ...]) and isinstance(value, (list, tuple))
    if is_list and all(type(item) is want.__args__[0] for item in value):
        return tuple(value)
    if type(value) is want:
        return value
    raise Refusal(f"{key}={value!r} is not {describe(want)}")


def describe(want: type) -> str:
    """A type in words."""
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return names.get(want, "a list of " + ("integers" if want == tuple[int, ...] else "strings"))


def toml(value: object) -> str:
    """The value as TOML; loads as the same."""
    return repr(value) if type(value) is float else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
