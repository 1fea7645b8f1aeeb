"""TOML that people write: read, checked for types and unknown names, refused in one line."""

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from flux_ref.errors import Refusal
from flux_ref.formats import outside

MOST_BYTES = 2**20  # a config has a few kilobytes
KINDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple[int, ...]: "a list of integers",
    tuple[str, ...]: "a list of strings",
    tuple[tuple[int, str], ...]: "a list of [integer, string]",
}


def read(path: Path, what: str) -> dict[str, object]:
    """The tree of a TOML file. what: its kind, for the message. Raises: Refusal."""
    text = outside.read_text(path, what, MOST_BYTES)
    try:
        return outside.shallow(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # also endless integers
        raise Refusal(f"{what} {path} is not valid TOML: {error}") from None


def parse(key: str, text: str, kind: type) -> object:
    """The value that a text is in TOML; a string needs no quotes. Raises: Refusal."""
    if kind is str:
        return text
    try:
        tree = outside.shallow(tomllib.loads(f"value = {text}"))
    except (ValueError, RecursionError):
        tree = {}
    if tree.keys() != {"value"}:
        raise Refusal(f"{key}={outside.shown(text)} is not {KINDS[kind]}")
    return tree["value"]


def typed(key: str, value: object, kind: type) -> object:
    """The value in a key's type. An int may stand for a float and a list for a tuple, nothing else. Raises: Refusal."""
    if any(type(item) is int and abs(item) >= 2**63 for item in leaves(value)):
        raise Refusal(f"{key}={outside.shown(value)} is out of range; TOML's integers are below 2**63")
    if kind is float and type(value) is int:
        return float(value)
    if not _is(value, kind):
        raise Refusal(f"{key}={outside.shown(value)} is not {KINDS[kind]}")
    return _tuple(value)


def leaves(value: object) -> list[object]:
    """What lists in lists hold."""
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _is(value: object, kind: type) -> bool:
    kinds = get_args(kind)
    if not kinds or not isinstance(value, (list, tuple)):
        return type(value) is kind
    kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
    return len(kinds) == len(value) and all(map(_is, value, kinds))


def _tuple(value: object) -> object:
    return tuple(map(_tuple, value)) if isinstance(value, (list, tuple)) else value


def unknown(what: str, name: str, known: Collection[str], otherwise: str) -> Refusal:
    """The refusal of an unknown name, with the nearest known one. otherwise: the hint if no known name is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    near = near or [full for full in known if full.endswith("." + name.split(".")[-1])]
    return Refusal(f"unknown {what} {name}; {f'did you mean {near[0]}?' if near else otherwise}")
