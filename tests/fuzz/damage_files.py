"""Ways to hurt tar archives, .npy and safetensors files that know what is where in them."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz.damage import BYTES, OfContent, by_name, of_content, tree_text

BLOCK = 512
FIELDS = {  # of a tar header: first byte, length
    **{"name": (0, 100), "mode": (100, 8), "owner": (108, 8), "size": (124, 12), "time": (136, 12), "sum": (148, 8)},
    **{"kind": (156, 1), "link": (157, 100), "magic": (257, 6), "user": (265, 32), "prefix": (345, 155)},
}
FILLINGS = (
    *(b"", b"\0", b" ", b"7", b"-1", b"1_0", b"0o7", b"+7", b"77777777777", b"00000000000", b"\x80" + b"\xff" * 11),
    *(
        b"\xff" * 12,
        b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"../../x",
        b"/etc/x",
        b"\x1b[2J",
        "\u0663".encode(),
    ),
    *(b"L", b"K", b"x", b"g", b"S", b"5", b"2", b"1", b"3", b"V", b"\xc3", b"a" * 200, b"__x__"),
    *(b"some_00000001.json", "\u0663".encode()),
)


def headers(content: bytes) -> list[int]:
    """Where each tar header begins."""
    return [at for at in range(0, len(content), BLOCK) if content[at + 257 : at + 262] == b"ustar"]


def renewed(head: bytes) -> bytes:
    """A tar header with a right sum."""
    return head[:148] + b"%06o\0 " % sum(head[:148] + b" " * 8 + head[156:]) + head[156:]


def tar_field(content: bytes, random: Random) -> tuple[bytes, str]:
    """A field of a header becomes absurd."""
    at, name, text = random.choice(headers(content)), random.choice(sorted(FIELDS)), random.choice(FILLINGS)
    first, size = FIELDS[name]
    head = content[at : at + first] + text[:size].ljust(size, b"\0") + content[at + first + size : at + BLOCK]
    is_renewed = random.random() < 0.7
    head = renewed(head) if is_renewed else head
    said = f"{name} in the header at byte {at} becomes {text[:12]!a}{', sum renewed' if is_renewed else ''}"
    return content[:at] + head + content[at + BLOCK :], said


def tar_chain(content: bytes, random: Random) -> tuple[bytes, str]:
    """Headers of long names, of other data or of PAX before a member."""
    at, kind, count = random.choice(headers(content)), random.choice(b"LKxgXS"), random.choice((1, 1, 3, 2000))
    text = random.choice(
        (b"", b"x" * 40, b"20 path=../../evil\n\0", b"19 size=9999999999\n", b"99999999999999 size=1\n")
    )
    text = random.choice((text, b"30 GNU.sparse.size=9999999999\n", b"9" * 30 + b" path=a\n"))
    size = random.choice((len(text), 8**11 - 1, 0))
    head = content[at : at + 124] + b"%011o\0" % size + content[at + 136 : at + 156] + bytes([kind])
    head = renewed(head + content[at + 157 : at + BLOCK])
    chain = (head + text.ljust(-(-len(text) // BLOCK) * BLOCK, b"\0")) * count
    said = f"{count} headers {chr(kind)} of {size} bytes {text[:20]!a} at byte {at}"
    return content[:at] + chain + content[at:], said


def moved(parts: Callable[[bytes], list[int]]) -> Callable:
    """The change of a content that loses, doubles, exchanges or moves parts of a file. parts: where each begins."""

    def change(content: bytes, random: Random) -> tuple[bytes, str]:
        begins = parts(content)
        pieces = [content[a:b] for a, b in zip([0, *begins], [*begins, len(content)])]
        one, other = random.randrange(1, len(pieces)), random.randrange(1, len(pieces))
        how = random.choice(("gone", "twice", "exchanged", "moved", "in its place too"))
        if how == "gone":
            del pieces[one]
        elif how == "twice":
            pieces.insert(other, pieces[one])
        elif how == "exchanged":
            pieces[one], pieces[other] = pieces[other], pieces[one]
        elif how == "moved":
            pieces.insert(other, pieces.pop(one))
        else:
            pieces[other] = pieces[one]
        return b"".join(pieces), f"part {one} {how}, with {other}"

    return change


def npy_head(content: bytes, random: Random) -> tuple[bytes, str]:
    """A word in the header of a .npy blob becomes absurd; the header keeps its length, or not."""
    at = random.choice([i for i in range(len(content)) if content.startswith(b"\x93NUMPY", i)])
    end = content.index(b"\n", at)
    old, new = random.choice(
        (
            *(
                (b"(", text)
                for text in (b"(9999999999999, ", b"(-1, ", b"(0, ", b"(" * 50, b"(1.5, ", b"(True, ", b"[")
            ),
            *((b"<", text) for text in (b">", b"|", b"<<", b"")),
            *((b"'descr': '", b"'descr': '" + text) for text in (b"|O", b"<f8', '", b"<M8[ns]", b"|V99999999999")),
            *((b"False", text) for text in (b"True", b"1", b"None", b"__import__('os')")),
            *(
                (b"{", b"{'a': 1, "),
                (b"}", b"}}"),
                (b"shape", b"shapf"),
                (b"NUMPY\x01", b"NUMPY\x03"),
                (b"NUMPY\x01", b"N"),
            ),
        )
    )
    head = content[at:end].replace(old, new, 1)
    if random.random() < 0.7:
        head = head.rstrip(b" ").ljust(end - at) if len(head.rstrip(b" ")) <= end - at else head[: end - at]
    return content[:at] + head + content[end:], f".npy header at byte {at}: {old!a} becomes {new[:20]!a}"


def safetensors_head(content: bytes, random: Random) -> tuple[bytes, str]:
    """The JSON of a safetensors file, changed anywhere; the length before it fits, or is absurd."""
    size = int.from_bytes(content[:8], "little")
    text, said = tree_text(content[8 : 8 + size].decode(), random)
    head, length = text.encode("utf-8", "surrogatepass"), len(text.encode("utf-8", "surrogatepass"))
    if random.random() < 0.15:
        length = random.choice((0, 1, 2**63, 2**64 - 1, 10**8, length - 1, length + 8))
        said += f", length {length}"
    return struct.pack("<Q", length % 2**64) + head + content[8 + size :], said


def exchanged(path: Path, random: Random) -> str:
    """A file changes names with one beside it."""
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    if not others:
        return "stays"
    other = random.choice(others)
    path.rename(path.with_name("x"))
    other.rename(path)
    path.with_name("x").rename(other)
    return f"changes names with {other.name}"


def of_other_set(path: Path, random: Random) -> str:
    """The file becomes that of the same name in the other set, which lies in other/."""
    others = sorted(Path("other").rglob(path.name))
    if others and path.is_file():
        shutil.copyfile(random.choice(others), path)
    return f"becomes that of another set{'' if others else ', if there were one'}"


def renamed(path: Path, random: Random) -> str:
    """A file or folder gets a strange name."""
    digits = "".join(chr(0x660 + int(c)) if c.isdigit() else c for c in path.name)
    names = (
        digits,
        path.name + " ",
        path.name.upper(),
        f"\x1b[2J{path.name}",
        f"{'9' * 40}{path.suffix}",
        f".{path.name}",
    )
    number = str(random.randrange(10))
    names += (path.name.replace("0", number), path.name.replace("0", "\u00b2"), path.name + "\udcff", path.stem)
    name = random.choice(names)
    if path.with_name(name).exists():
        return "keeps its name"
    path.rename(path.with_name(name))
    return f"gets the name {name!a}"


def doubled(path: Path, random: Random) -> str:
    """The file, or that of the other set, is there once more under a name beside."""
    source = random.choice([path, *Path("other").rglob(path.name)])
    name = random.choice((f"0{path.name}", path.name.replace("0", "7", 1), f"z_{path.name}"))
    if path.is_file() and not path.with_name(name).exists():
        shutil.copyfile(source, path.with_name(name))
    return f"is there as {name}, too{'' if source == path else ', of another set'}"


# What may happen to each kind of file

ARCHIVE = of_content(tar_field, tar_chain) | {"members": OfContent(moved(headers))}
NPY = BYTES | of_content(npy_head)
SAFETENSORS = BYTES | of_content(safetensors_head)
PLACES = by_name(exchanged, of_other_set, renamed, doubled)
