"""What a node has, as its operating system tells it: links, driver, disks."""

import os
import tempfile
import time
from collections import Counter
from pathlib import Path

PIECE, PIECES = 1 << 20, 64  # bytes that are written and read back


def links(sys_root: Path = Path("/sys")) -> str:
    """The ports of InfiniBand and RoCE and the physical network cards: how many at which speed, how many down."""
    speeds: dict[str, list[str]] = {"RDMA": [], "Ethernet": []}
    for port in (sys_root / "class/infiniband").glob("*/ports/*"):
        up = "ACTIVE" in _text(port / "state")
        speeds["RDMA"].append(f"{_text(port / 'rate').split(' ')[0]} Gb/s" if up else "down")
    for card in (sys_root / "class/net").glob("*"):
        if (card / "device").exists():
            mbits = _text(card / "speed")
            known = f"{int(mbits) / 1000:g} Gb/s" if mbits.isdigit() else "up"
            speeds["Ethernet"].append(known if _text(card / "operstate") == "up" else "down")
    counted = [
        f"{kind} " + " + ".join(f"{count} x {speed}" for speed, count in sorted(Counter(found).items()))
        for kind, found in speeds.items()
        if found
    ]
    return ", ".join(counted) or "none"


def driver(sys_root: Path = Path("/sys")) -> str:
    """The version of the devices' kernel driver, else of the kernel."""
    versions = [f"{name} {_text(sys_root / 'module' / name / 'version')}" for name in ("nvidia", "amdgpu")]
    return next((text for text in versions if not text.endswith(" ")), f"Linux {os.uname().release}")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a card that is down has no speed
        return ""


def disk(folder: Path) -> dict[str, object]:
    """Free space, and how fast 64 MiB are written to the disk and read back from it; or what went wrong."""
    try:
        status = os.statvfs(folder)
        piece = os.urandom(PIECE)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            for _ in range(PIECES):
                if file.write(piece) != PIECE:
                    raise OSError(0, "a write was cut short: it is full")
            os.fsync(file.fileno())
            written = time.perf_counter()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            if any(file.read(PIECE) != piece for _ in range(PIECES)):
                raise OSError(0, "it gives back other bytes than were written")
        mb, end = PIECES * PIECE / 1e6, time.perf_counter()
        free = status.f_bavail * status.f_frsize / 1e9
        return {"free_gb": free, "write": mb / (written - begin), "read": mb / (end - written)}
    except OSError as error:
        return {"problem": error.strerror}
