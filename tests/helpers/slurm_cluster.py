"""A Slurm cluster of a few nodes on this one machine, for the tests of launch/slurm.sbatch. Needs root.

    with Cluster(folder, ["n1", "n2"]) as cluster: ...

munged, slurmctld and one slurmd per node run from files in one folder, on ports of their own, and leave nothing
behind. A node's processes know it by SLURMD_NODENAME. All nodes share the processors and the file system, but for the
folder `disk`, which is another one on each node.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CONF = """
ClusterName=flux_ref
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool_%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=300
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
"""


def lacking() -> str:
    """Why no cluster can be started here; empty if one can."""
    missing = [name for name in DAEMONS if daemon(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "the daemons want root"


def daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def address() -> str:
    """An address of this machine that is not the loopback's, if it has one."""
    words = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return next((word for word in words if ":" not in word), "127.0.0.1")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(count)]


class Cluster:
    """The cluster; commands are run with its configuration."""

    def __init__(self, folder: Path, nodes: list[str]):
        self.folder, self.nodes = folder, nodes
        self.disk = folder / "disk"
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "SLURM_TIME_FORMAT": "%s"}
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        port, *ports = free_ports(1 + len(self.nodes))
        host, own = socket.gethostname().split(".")[0], address()
        known = {"folder": self.folder, "host": host, "address": own, "port": port}
        lines = [CONF.format(**known)]
        for node, number in zip(self.nodes, ports):
            more = "CPUs=1 RealMemory=1000 State=UNKNOWN"
            lines.append(f"NodeName={node} NodeHostname={host} NodeAddr={own} Port={number} {more}")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        (self.folder / "slurm.conf").write_text("\n".join(lines))
        try:
            munge = f"{self.folder}/munge"
            files = (f"--{kind}-file={munge}.{kind}" for kind in ("key", "pid", "log", "seed"))
            self._start("munged", "--foreground", "--force", f"--socket={munge}.socket", *files)
            self.until(lambda: (self.folder / "munge.socket").exists())
            self._start("slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            self.until(lambda: all(self.state(node) == "idle" for node in self.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, name: str, *args: str, node: str = "") -> None:
        key = node or name
        with (self.folder / f"{key}.out").open("ab") as output:
            self.daemons[key] = subprocess.Popen(
                [daemon(name), *args],
                env=self.env | {"DAEMON_OF": key},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        own = self.folder / f"disk_{node}"
        own.mkdir(exist_ok=True)
        self.disk.mkdir(exist_ok=True)
        mounted = f'mount --bind {own} {self.disk}; exec "$@"'
        self._start("unshare", "-m", "bash", "-c", mounted, "-", daemon("slurmd"), "-D", "-N", node, node=node)

    def __exit__(self, *_) -> None:
        """End everything: the jobs, the daemons and what they have started."""
        for name in reversed(list(self.daemons)):
            self.daemons[name].terminate()
        for process in self.daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                kill(pid)
            time.sleep(0.1)
        assert not left, f"processes outlive the cluster: {left}"

    def processes(self, **having: str) -> list[int]:
        """The processes of this cluster, daemons and jobs, with these environment variables."""
        having["SLURM_CONF"] = self.env["SLURM_CONF"]
        return [pid for pid, env in environments() if having.items() <= env.items() and pid != os.getpid()]

    def kill_node(self, node: str) -> None:
        """What a power cut does: slurmd, its steps and all they have started are gone at once."""
        for pid in self.processes(DAEMON_OF=node) + self.processes(SLURMD_NODENAME=node):
            kill(pid)
        self.daemons.pop(node).wait()

    # Commands

    def run(self, *command: str, **more: str) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(command, env=self.env | more, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, node: str) -> str:
        out = subprocess.run(["sinfo", "-hNn", node, "-o", "%t"], env=self.env, capture_output=True, text=True)
        return out.stdout.strip()

    def job(self, number: int) -> dict[str, str]:
        """What scontrol says about a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", str(number))))

    def until(self, condition: Callable[[], object], timeout: float = 60, what: Callable[[], str] = str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"after {timeout} s: {what()}"
            time.sleep(0.2)


def environments() -> list[tuple[int, dict[str, str]]]:
    """(process, its environment) of every living process of ours."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (folder / "environ").read_bytes().decode(errors="replace")
            found.append((int(folder.name), dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
