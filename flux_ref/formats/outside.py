"""What comes from outside: files of people and other programs, environment variables, names. All of it is data.

Nothing is allocated or looped over before its size is known to be sound. Errors are one line: what, where, what to do.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flux_ref.errors import Refusal, one_line, printable, shown, told

__all__ = ["one_line", "printable", "shown", "told"]

TEXT_BYTES = 64 * 2**20  # no config, index or list of people is longer
OWN_BYTES = 2**31  # of a list that flux_ref itself writes: a line for each step, file or picture
MOST_DEPTH = 100  # levels of nesting; deeper values cannot be printed or compared without recursion


@contextmanager
def opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """A regular file, open for reading. what: its kind, for the message. Raises: Refusal, also while it is read.

    Pipes and devices are refused: some never end, and some wait for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refusal(f"{what} {path} is not a regular file; give a file")
            yield file
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise Refusal(f"{what} {path}: {getattr(error, 'strerror', None) or error}") from None


def read_bytes(path: Path, what: str, most: int = TEXT_BYTES) -> bytes:
    """The bytes of a regular file of at most `most`. what: its kind, for the message. Raises: Refusal."""
    with opened(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""  # a file may grow, or tell no size
    if max(size, len(content)) > most:
        raise Refusal(f"{what} {path} is larger than {most:,} bytes; give the right file")
    return content


def read_text(path: Path, what: str, most: int = TEXT_BYTES) -> str:
    """The text of a regular UTF-8 file of at most `most` bytes. Raises: Refusal."""
    try:
        return read_bytes(path, what, most).decode("utf-8-sig")  # editors of Windows write a mark of three bytes
    except UnicodeDecodeError as error:
        raise Refusal(f"{what} {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None


def parse_json(text: str | bytes) -> object:
    """The value of a JSON text. Raises: ValueError, also for nesting that is too deep and for bytes beyond UTF-8."""
    try:
        return shallow(json.loads(text if isinstance(text, str) else text.decode()))  # json would take UTF-16, too
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shallow(value: object) -> object:
    """The value, if lists and dicts in it are nested at most MOST_DEPTH deep. Raises: ValueError."""
    level = [value]
    for _ in range(MOST_DEPTH):
        nests = [item for item in level if isinstance(item, (list, dict))]
        level = [item for nest in nests for item in (nest.values() if isinstance(nest, dict) else nest)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def read_json(path: Path, what: str, most: int = TEXT_BYTES) -> dict:
    """The JSON object in a file. Raises: Refusal."""
    try:
        content = parse_json(read_bytes(path, what, most))
    except ValueError as error:
        raise Refusal(f"{what} {path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(f"{what} {path} holds no JSON object")
    return content


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that ASCII digits are; None for other text and for numbers outside least .. most."""
    is_short = text.isascii() and text.isdigit() and len(text) <= 20  # int() of long texts is slow
    return int(text) if is_short and least <= int(text) <= most else None


def decimal(text: str, least: float, most: float) -> float | None:
    """The number that ASCII text is, as in 1.5 or 1e-3; None for other text and for numbers outside least .. most."""
    try:
        number = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    return number if least <= number <= most else None


@contextmanager
def refusing() -> Iterator[None]:
    """Raises: Refusal in place of an OSError of the block, such as that of a name that is too long."""
    try:
        yield
    except OSError as error:
        raise Refusal(told(error)) from None
