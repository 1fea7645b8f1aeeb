"""Pictures and captions of people in parts, also from tars as img2dataset writes them. No name leads out of a tar."""

import itertools
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from webdataset.tariterators import base_plus_ext

from flux_ref.pictures.captioned import SUFFIXES, TEXTS, Picture, find_pictures, grouped

TARS = (".tar", ".tar.gz", ".tgz")
Part = Callable[[], Iterator[Picture]]  # some consecutive pictures; every call gives the same ones


def split_into_parts(root: Path, names: list[str], column: str, size: int) -> list[Part]:
    """The pictures of a folder: a part for each tar, then parts of `size` other pictures. Raises: Refusal.

    names, column: see captioned.find_pictures.
    """
    # isfile: a pipe would wait for ever
    tars = [name for name in names if name.lower().endswith(TARS) and os.path.isfile(root / name)]
    found = find_pictures(root, [name for name in names if name not in tars], column)
    return [
        *(partial(read_tar, root, name) for name in tars),
        *(partial(iter, found[start : start + size]) for start in range(0, len(found), size)),
    ]


def read_tar(root: Path, tar: str) -> Iterator[Picture]:
    """The pictures of an archive, named TAR/MEMBER, in webdataset's groups: consecutive members with one key.

    Hidden names are left out, as in folders: a Mac puts ._NAME before each file.
    """
    for key, files in itertools.groupby(_members(root, tar), key=lambda file: base_plus_ext(file.name)[0] or ""):
        yield from grouped(key, list(files))


def _members(root: Path, tar: str) -> Iterator[Picture]:
    """Each file; pictures and texts with what they hold or link to. The last one stands for damage, if there is any."""
    try:
        with tarfile.open(root / tar) as archive:
            for member in archive:
                if not member.isdir() and not os.path.basename(member.name).startswith("."):
                    yield _member(archive, member, f"{tar}/{member.name}")
            archive.fileobj.seek(archive.offset)
            end = archive.fileobj.read(2**20)
            if not end or any(end) or archive.fileobj.read(1):  # tarfile stops there without a word
                raise tarfile.ReadError
    except Exception:  # tarfile and its decompressors raise a dozen kinds
        yield Picture(tar, "damaged archive: it has no end, or does not end there")


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> Picture:
    """A member under its new name. What is no picture and no text is not read.

    Raises: what tarfile raises at damage.
    """
    if not name.lower().endswith(SUFFIXES + TEXTS):
        return Picture(name)
    with suppress(KeyError, RecursionError):
        if file := archive.extractfile(member):
            return Picture(name, content=file.read())
    return Picture(name, "a link to nothing in its archive")
