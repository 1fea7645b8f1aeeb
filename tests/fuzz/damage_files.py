"""Ways to hurt tar archives, .npy and safetensors files that know what is where in them."""

import shutil
import struct
from pathlib import Path
from random import Random

from fuzz.damage import BYTES, edits, moved, other_file, tree_text

BLOCK = 512
FIELDS = {  # of a tar header: first byte, length
    **{"name": (0, 100), "mode": (100, 8), "owner": (108, 8), "size": (124, 12), "time": (136, 12), "sum": (148, 8)},
    **{"kind": (156, 1), "link": (157, 100), "magic": (257, 6), "user": (265, 32), "prefix": (345, 155)},
}
FILLINGS = (
    *(b"", b" ", b"7", b"-1", b"1_0", b"0o7", b"+7", b"77777777777", b"00000000000", b"\x80" + b"\xff" * 11),
    *(b"\xff" * 12, b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff", b"../../x", b"/etc/x", b"\x1b[2J"),
    *(b"L", b"K", b"x", b"g", b"S", b"5", b"2", b"1", b"3", b"V", b"\xc3", b"a" * 200, b"__x__"),
    *(b"some_00000001.json", "\u0663".encode()),
)
EXTENSIONS = (
    *(b"", b"x" * 40, b"20 path=../../evil\n\0", b"19 size=9999999999\n", b"99999999999999 size=1\n"),
    *(b"30 GNU.sparse.size=9999999999\n", b"9" * 30 + b" path=a\n"),
)
NPY_WORDS = (  # a word in the header of a .npy blob, and what it becomes
    *((b"(", b"(9999999999999, "), (b"(", b"(-1, "), (b"(", b"(0, "), (b"(", b"(" * 50), (b"(", b"[")),
    *((b"<", b">"), (b"<", b"|"), (b"<", b""), (b"False", b"True"), (b"False", b"__import__('os')")),
    *((b"'descr': '", b"'descr': '|O"), (b"'descr': '", b"'descr': '<M8[ns]"), (b"}", b"}}")),
    *((b"'descr': '", b"'descr': '|V99999999999"), (b"shape", b"shapf"), (b"NUMPY\x01", b"NUMPY\x03")),
)


def headers(content: bytes) -> list[int]:
    """Where each tar header begins."""
    return [at for at in range(0, len(content), BLOCK) if content[at + 257 : at + 262] == b"ustar"]


def renewed(head: bytes) -> bytes:
    """A tar header with a right sum."""
    return head[:148] + b"%06o\0 " % sum(head[:148] + b" " * 8 + head[156:]) + head[156:]


def tar_field(content: bytes, random: Random) -> tuple[bytes, str]:
    """A field of a header becomes absurd."""
    at = random.choice(headers(content))
    name = random.choice(sorted(FIELDS))
    text = random.choice(FILLINGS)
    first, size = FIELDS[name]
    head = content[at : at + first] + text[:size].ljust(size, b"\0") + content[at + first + size : at + BLOCK]
    is_renewed = random.random() < 0.7
    said = f"{name} in the header at byte {at} becomes {text[:12]!a}{', sum renewed' if is_renewed else ''}"
    return content[:at] + (renewed(head) if is_renewed else head) + content[at + BLOCK :], said


def tar_chain(content: bytes, random: Random) -> tuple[bytes, str]:
    """Headers of long names, of other data or of PAX before a member."""
    at = random.choice(headers(content))
    kind = random.choice((b"L", b"K", b"x", b"g", b"X", b"S"))
    text = random.choice(EXTENSIONS)
    count = random.choice((1, 3, 2000))
    size = random.choice((len(text), 8**11 - 1, 0))
    head = content[at : at + 124] + b"%011o\0" % size + content[at + 136 : at + 156] + kind
    head = renewed(head + content[at + 157 : at + BLOCK])
    chain = (head + text.ljust(-(-len(text) // BLOCK) * BLOCK, b"\0")) * count
    return content[:at] + chain + content[at:], f"{count} headers {kind!a} of {size} bytes {text[:20]!a} at byte {at}"


def npy_head(content: bytes, random: Random) -> tuple[bytes, str]:
    """A word in the header of a .npy blob becomes absurd; the header keeps its length, or not."""
    at = random.choice([i for i in range(len(content)) if content.startswith(b"\x93NUMPY", i)])
    end = content.index(b"\n", at)
    old, new = random.choice(NPY_WORDS)
    head = content[at:end].replace(old, new, 1)
    if random.random() < 0.7:
        head = head.rstrip(b" ").ljust(end - at)[: end - at]
    return content[:at] + head + content[end:], f".npy header at byte {at}: {old!a} becomes {new[:20]!a}"


def safetensors_head(content: bytes, random: Random) -> tuple[bytes, str]:
    """The JSON of a safetensors file, changed anywhere; the length before it fits, or is absurd."""
    size = int.from_bytes(content[:8], "little")
    text, said = tree_text(content[8 : 8 + size].decode(), random)
    head = text.encode("utf-8", "surrogatepass")
    length = len(head)
    if random.random() < 0.15:
        length = random.choice((0, 1, 2**63, 2**64 - 1, 10**8, length - 1, length + 8))
        said += f", length {length}"
    return struct.pack("<Q", length) + head + content[8 + size :], said


def renamed(path: Path, random: Random) -> str:
    """A file or folder gets a strange name."""
    digits = "".join(chr(0x660 + int(c)) if c.isdigit() else c for c in path.name)
    names = [digits, f"{path.name} ", f"\x1b[2J{path.name}", f"{'9' * 40}{path.suffix}", f".{path.name}", path.stem]
    names += [path.name.replace("0", new) for new in (str(random.randrange(10)), "\u00b2")] + [f"{path.name}\udcff"]
    name = random.choice(names)
    if path.with_name(name).exists():
        return "keeps its name"
    path.rename(path.with_name(name))
    return f"gets the name {name!a}"


def doubled(path: Path, random: Random) -> str:
    """The file, or that of the other set, is there once more under a name beside."""
    source = random.choice([path, *sorted(Path("other").rglob(path.name))])
    name = random.choice((f"0{path.name}", path.name.replace("0", "7", 1), f"z_{path.name}"))
    if not path.is_file() or path.with_name(name).exists():
        return "stays"
    shutil.copyfile(source, path.with_name(name))
    return f"is there as {name}, too{'' if source == path else ', of another set'}"


# What may happen to each kind of file

ARCHIVE = edits(tar_field=tar_field, tar_chain=tar_chain, members=moved(headers))
NPY = BYTES | edits(npy_head=npy_head)
SAFETENSORS = BYTES | edits(safetensors_head=safetensors_head)
PLACES = {"renamed": renamed, "doubled": doubled, "other_file": other_file}
