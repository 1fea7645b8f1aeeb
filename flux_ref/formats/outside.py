"""What comes from outside: files of people and other programs, environment variables, names. All of it is data.

Nothing is allocated or looped over before its size is known to be sound. Errors are one line: what, where, what to do.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flux_ref.errors import Refusal

TEXT_BYTES = 64 * 2**20  # no config, index or list of people is longer
OWN_BYTES = 2**31  # of a list that flux_ref itself writes: a line for each step, file or picture
MOST_DEPTH = 100  # levels of nesting; deeper values cannot be printed or compared without recursion
MOST_SHOWN = 200  # characters of a foreign value in a message
BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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


def of_environment(name: str, least: int, most: int, default: int) -> int:
    """The number in an environment variable. Raises: Refusal."""
    value = os.environ.get(name)
    if value is None:
        return default
    if (number := whole_number(value, least, most)) is None:
        raise Refusal(
            f"environment variable {name}={value!r} is no whole number from {least} to {most}; mend or unset it"
        )
    return number


def host_of_environment(name: str) -> str:
    """The name or number of a host in an environment variable; "" if there is none. Raises: Refusal."""
    value = os.environ.get(name, "")
    if not re.fullmatch(r"[\w.:%-]*", value, re.ASCII):
        raise Refusal(f"environment variable {name}={shown(value)} is no name or number of a host; mend or unset it")
    return value


def told(error: OSError) -> str:
    """An error of the system in words: the file, what is wrong and what to do."""
    if error.filename is None:
        return str(error)
    remedy = "free its disk" if error.errno in BROKEN_DISK else "make it readable and writable"
    return f"{error.filename}: {error.strerror}; {remedy}, or give another path"


@contextmanager
def refusing() -> Iterator[None]:
    """Raises: Refusal in place of an OSError of the block, such as that of a name that is too long."""
    try:
        yield
    except OSError as error:
        raise Refusal(told(error)) from None


def printable(text: object) -> str:
    """Foreign text for a terminal, a page or a picture; control characters and lone surrogates as in \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def one_line(text: object, most: int = 2000) -> str:
    """Text with foreign parts as one printable line of at most `most` characters."""
    line = printable(" ".join(str(text).splitlines()))
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def shown(value: object) -> str:
    """A foreign value as in a source text, cut to MOST_SHOWN characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer with more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
