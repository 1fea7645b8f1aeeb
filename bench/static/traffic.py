"""The bytes that a generated Triton kernel touches, found by running its index arithmetic over numpy arrays.

The kernel's own text runs once, with arrays for indices and a stand-in for every value. Each load and store notes the
32-byte sectors that it reaches. A sector that a kernel reaches twice counts once, as a cache would have it. Inductor's
own estimate counts a line again for each load of it, such as the even and the odd half of RoPE's pairs.

Of a large kernel only some windows run, spread over its rows.
"""

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

SECTOR = 32
ELEMENTS = 100_000  # of a window, about
WINDOWS = 4
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "i1": 1}  # fp8*: 1


class Value:
    """A value that nobody looks at. Whatever is done with it gives another one."""

    __array_ufunc__ = None  # numpy leaves operators to this class

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: Value()

    def __getitem__(self, key):
        return Value()

    def __iter__(self):  # what a reduction returns is taken apart
        return iter((Value(), Value(), Value()))


OPERATORS = "add sub mul truediv floordiv mod and or xor lt le gt ge eq ne pow"
for _operator in OPERATORS.split():
    for _side in ("", "r"):
        setattr(Value, f"__{_side}{_operator}__", lambda self, other: Value())
for _operator in ["neg", "invert", "abs"]:
    setattr(Value, f"__{_operator}__", lambda self: Value())
Value.__hash__ = object.__hash__


class Index(np.ndarray):
    """Integers or a mask that the kernel computes addresses with."""

    def to(self, *_, **__):
        return self

    broadcast_to = to


class Place(NamedTuple):
    """Elements of a buffer."""

    buffer: str
    index: object

    def __add__(self, more):
        return Place(self.buffer, self.index + more)


class Language:
    """Stands for `triton.language` and notes the sectors of loads and stores."""

    class PropagateNan:
        ALL = NONE = None

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes
        self.sectors = defaultdict(list)  # by direction and buffer
        self.window = (0, 0)

    def __getattr__(self, name: str):
        return None if re.fullmatch(r"(b?float|u?int)\d+\w*", name) else lambda *_, **__: Value()

    def program_id(self, axis: int) -> int:
        return self.window[axis] if axis < 2 else 0  # the third axis of a grid continues the second

    def num_programs(self, axis: int) -> int:
        return 1

    def arange(self, start: int, end: int) -> Index:
        return np.arange(start, end).view(Index)

    def range(self, start: int, end: int, step: int, **_) -> range:
        return range(start, end, step)

    def full(self, shape, value, dtype=None):
        if isinstance(value, (bool, int)):
            return np.full([1] * len(shape) if isinstance(shape, list) else 1, value).view(Index)
        return Value()

    def broadcast_to(self, value, *_):
        return value

    def where(self, condition, a, b):
        known = all(isinstance(part, (np.ndarray, int)) for part in (condition, a, b))
        return np.where(condition, a, b).view(Index) if known else Value()

    def minimum(self, a, b, *_, **__):
        return np.minimum(a, b).view(Index) if isinstance(a, np.ndarray) else Value()

    def load(self, place, mask=None, *_, **__) -> Value:
        self._note("read", place, mask)
        return Value()

    def store(self, place, value, mask=None, *_, **__) -> None:
        self._note("written", place, mask)

    atomic_add = store

    def _note(self, kind: str, place: Place, mask: object) -> None:
        if isinstance(place.index, Value):
            raise ValueError(f"an address of {place.buffer} depends on data")
        index = np.asarray(place.index, dtype=np.int64)
        known = np.asarray(mask, dtype=bool) if isinstance(mask, (np.ndarray, bool)) else np.ones((), bool)
        index, known = np.broadcast_arrays(index, known)
        self.sectors[kind, place.buffer].append(np.unique(index[known] * self.sizes[place.buffer] // SECTOR))


class Anything:
    """Stands for a module of helpers: every function gives a value."""

    def __getattr__(self, name: str):
        return lambda *_, **__: Value()


def traffic(source: str) -> float:
    """Bytes that one launch of a kernel reads and writes. source: its whole text, as Inductor writes it.

    Raises: Exception of any kind if the text holds what the stand-ins do not know.
    """
    signature = eval(re.search(r"'signature': (\{.*?\})", source)[1], {})  # written by Inductor in this process
    body = source[source.index("@triton.jit") + len("@triton.jit") :].split("''', device_str")[0]
    body = body.replace("tl.constexpr", "int")
    # Masks of whole blocks hide nothing.
    body = re.sub(r"= tl\.full\(\[[XYR0_BLOCK, ]+\], True, tl\.int1\).*", "= None", body)
    head = re.search(r"def (\w+)\(([^)]*)\)", body)
    names = [part.split(":")[0].strip() for part in head[2].split(",")]
    given = {name: re.search(rf"^\s+{name} = (\d+)", body, re.M) for name in names if name.endswith("numel")}
    numels = {name: int(match[1]) for name, match in given.items() if match}
    sizes = {name: SIZES.get(kind[1:], 1) for name, kind in signature.items() if kind.startswith("*")}
    language, (blocks, windows, share) = Language(sizes), _windows(numels)
    scope = {"tl": language, "triton": Anything(), "float": lambda text: Value()}
    scope |= dict.fromkeys(("triton_helpers", "libdevice", "tl_math", "math"), Anything())
    exec(body, scope)
    for language.window in windows:
        scope[head[1]](*(Place(name, 0) if name in sizes else blocks.get(name, numels.get(name, 1)) for name in names))
    return sum(_bytes(parts, share) for (_, buffer), parts in language.sectors.items() if buffer != "ws_ptr")


def _windows(numels: dict[str, int]) -> tuple[dict[str, int], list[tuple[int, int]], float]:
    """Block sizes, the programs (x, y) to run, and their share of all elements."""
    x, y = numels.get("xnumel", 1), numels.get("ynumel", 1)
    r = next((size for name, size in numels.items() if name.startswith("r")), 1)
    if x * y * r <= WINDOWS * ELEMENTS:
        return _sizes(x, y, r), [(0, 0)], 1.0
    x_block = _power_of_two(ELEMENTS // (r * min(y, 64)), x)
    y_block = _power_of_two(ELEMENTS // (x_block * r), y)
    last = (x // x_block - 1, y // y_block - 1)
    programs = [tuple(axis * i // (WINDOWS - 1) for axis in last) for i in range(WINDOWS)]
    return _sizes(x_block, y_block, r), programs, WINDOWS * x_block * y_block / (x * y)


def _power_of_two(size: int, most: int) -> int:
    """The largest power of two up to a size, so that blocks tile the axis; at least whole sectors, at most the axis."""
    return min(most, max(64, 1 << size.bit_length() >> 1))


def _sizes(x: int, y: int, r: int) -> dict[str, int]:
    return {"XBLOCK": x, "YBLOCK": y, "R0_BLOCK": r, "RSPLIT": 1, "RSPLIT_SIZE": x, "NUM_STAGES": 1}


def _bytes(parts: list[np.ndarray], share: float) -> float:
    """What the windows touch, scaled to all elements, but at most the extent of the buffer: tables are read again."""
    sectors = np.unique(np.concatenate(parts))
    return SECTOR * min(sectors.size / share, sectors[-1] - sectors[0] + 1) if sectors.size else 0.0
