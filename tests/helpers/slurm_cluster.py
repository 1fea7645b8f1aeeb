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

from killing import environments, send

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


def daemon(name):
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def address():
    """An address of this machine that is not the loopback's, if it has one."""
    words = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return next((word for word in words if ":" not in word), "127.0.0.1")


class Cluster:
    """The cluster; commands are run with its configuration."""

    def __init__(self, folder, nodes):
        self.folder, self.nodes = folder, nodes
        self.disk = folder / "disk"
        self.conf = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.env = os.environ | self.conf
        self.daemons = {}

    def __enter__(self):
        (self.folder / "state").mkdir(parents=True)
        self.disk.mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(socket.create_server(("", 0))) for _ in ("controller", *self.nodes)]
            port, *ports = [server.getsockname()[1] for server in servers]
        host, own = socket.gethostname().split(".")[0], address()
        lines = [CONF.format(folder=self.folder, host=host, address=own, port=port)]
        for node, number in zip(self.nodes, ports):
            where = f"NodeHostname={host} NodeAddr={own} Port={number}"
            lines.append(f"NodeName={node} {where} CPUs=1 RealMemory=1000 State=UNKNOWN")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        (self.folder / "slurm.conf").write_text("\n".join(lines))
        try:
            munge = f"{self.folder}/munge"
            files = (f"--{kind}-file={munge}.{kind}" for kind in ("key", "pid", "log", "seed"))
            self._start("munged", daemon("munged"), "--foreground", "--force", f"--socket={munge}.socket", *files)
            self.until((self.folder / "munge.socket").exists)
            self._start("slurmctld", daemon("slurmctld"), "-D")
            for node in self.nodes:
                self.start_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, key, *command):
        with (self.folder / f"{key}.out").open("ab") as output:
            self.daemons[key] = subprocess.Popen(
                command, env=self.env | {"DAEMON_OF": key}, stdout=output, stderr=output, start_new_session=True
            )

    def start_node(self, node):
        own = self.folder / f"disk_{node}"
        own.mkdir(exist_ok=True)
        mounted = f'mount --bind {own} {self.disk}; exec "$@"'
        self._start(node, "unshare", "-m", "bash", "-c", mounted, "-", daemon("slurmd"), "-D", "-N", node)
        self.until_idle(node)

    def until_idle(self, node):
        self.until(lambda: self.run("sinfo", "-hNn", node, "-o", "%t", check=False) == "idle\n")

    def __exit__(self, *_):
        """End everything: the jobs, the daemons and what they have started."""
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in self.daemons.values():
            process.wait(20)
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.1)
        assert not left, f"processes outlive the cluster: {left}"

    def processes(self, **having):
        """The processes of this cluster, daemons and jobs, with these environment variables: {process: environment}."""
        return environments(self.conf | having)

    def kill_node(self, node):
        """What a power cut does: slurmd, its steps and all they have started are gone at once."""
        for pid in (*self.processes(DAEMON_OF=node), *self.processes(SLURMD_NODENAME=node)):
            send(pid, signal.SIGKILL)
        self.daemons.pop(node).wait()

    def run(self, *command, check=True, **more):
        """The output of a command of Slurm."""
        done = subprocess.run(command, env=self.env | more, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def job(self, number):
        """What scontrol says about a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", str(number))))

    def until(self, condition, timeout=60, what=str):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"after {timeout} s: {what()}"
            time.sleep(0.2)
