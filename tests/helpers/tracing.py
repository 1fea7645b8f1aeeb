"""What a command does, as strace sees it: its connections, what it writes, and when it reads which file."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

NETWORK = "connect,bind,listen,sendto"
NAMES = "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat"
NAMES += ",mknod,mknodat,truncate,chmod,fchmodat,execve"
BYTES = "read,pread64,readv,preadv,preadv2,mmap,sendfile,copy_file_range,write"
PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')  # with the folder that it begins from
CALL = re.compile(r"(\d+) +(\w+)\((.*)", re.S)
READS = ("read", "pread64", "readv", "preadv", "preadv2", "mmap", "sendfile", "copy_file_range")
MARK = "/job begins: "


@dataclass
class Call:
    """A system call that succeeded, or a mark. text: its arguments and result."""

    pid: int
    name: str
    text: str
    paths: list[str]  # those in quotes, absolute


def traced(
    command: list[str], cwd: Path, log: Path, env: dict[str, str], timeout: float = 300
) -> dict[str, list[Call]]:
    """Run a command to its end; returns what `parse` does. Raises: AssertionError if it fails."""
    strace = ["strace", "-f", "-y", "-qq", "--seccomp-bpf", "-s", "160", "-o", str(log)]
    strace += ["-e", f"trace={NETWORK},{NAMES},{BYTES}", "--"]
    done = subprocess.run([*strace, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-4000:])
    return parse(log, cwd)


def parse(log: Path, cwd: Path) -> dict[str, list[Call]]:
    """The calls of a command and of all its processes, in order; by job where the command marks them, "" before."""
    jobs, begun, job = {"": []}, {}, ""  # begun: calls whose end comes later
    with log.open(errors="replace") as lines:
        for line in lines:
            pid, _, rest = line.rstrip("\n").partition(" ")
            rest = rest.strip()
            if rest.endswith("<unfinished ...>"):
                begun[pid] = rest.removesuffix("<unfinished ...>")
                continue
            if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
                rest = begun.pop(pid, "") + resumed[1]
            if MARK in rest and "openat" in rest:
                job = rest.split(MARK)[1].split('"')[0]
                jobs[job] = []
                continue
            if (call := CALL.match(f"{pid} {rest}")) and not failed(rest):
                named = PATH.findall(call[3]) if call[2] not in BYTES.split(",") else ()
                paths = [str((Path(folder) if folder else cwd) / path) for folder, path in named]
                jobs[job].append(Call(int(pid), call[2], call[3], paths))
    return jobs


def failed(rest: str) -> bool:
    """A connection that is under way has not failed; one that was refused was still wanted."""
    return " = -1 " in rest and not rest.startswith(("connect(", "sendto("))


def connections(calls: list[Call]) -> set[tuple[str, str]]:
    """(connect, bind or sendto; address without the port). A socket of this machine has its path as address."""
    found = set()
    for call in calls:
        if call.name not in ("connect", "bind", "sendto"):
            continue
        address = re.search(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"|sun_path=@?"([^"]+)"', call.text)
        if "htons(53)" in call.text:
            found.add((call.name, "a name server"))
        elif address:
            found.add((call.name, next(filter(None, address.groups()))))
        elif "sa_family=" in call.text:
            found.add((call.name, re.search(r"sa_family=(\w+)", call.text)[1]))
    return found


def written(calls: list[Call]) -> set[str]:
    """Paths that were made, opened for writing, renamed, removed or changed."""
    found = set()
    for call in calls:
        if call.name in ("open", "openat"):
            if re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND|O_TMPFILE", call.text):
                found.update(call.paths[:1])
        elif call.name in NAMES.split(",") and call.name != "execve":
            found.update(call.paths)
    return found


def opened(calls: list[Call], suffixes: tuple[str, ...]) -> list[str]:
    """The files with these endings that were opened, in order."""
    return [p for call in calls if call.name in ("open", "openat") for p in call.paths[:1] if is_data(p, suffixes)]


def read(calls: list[Call], suffixes: tuple[str, ...]) -> list[str]:
    """The files with these endings of which bytes were read or mapped, in order."""
    descriptors = [re.findall(r"\d+<([^>]+)>", call.text.split(" = ")[0]) for call in calls if call.name in READS]
    return [path for paths in descriptors for path in paths[:1] if is_data(path, suffixes)]


def is_data(path: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file has one of these endings. Files of the repository do not count: git looks for changes in them."""
    return path.endswith(suffixes) and not Path(path).is_relative_to(ROOT)


def before_run_start(calls: list[Call]) -> list[Call]:
    """The calls before the benchmark's clock started; all calls of a run that was refused earlier."""
    for number, call in enumerate(calls):
        if call.name == "write" and "run_start" in call.text and "MLLOG" in call.text:
            return calls[:number]
    return calls
