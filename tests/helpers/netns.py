"""Hosts on one machine: network namespaces on one switch. Linux, root, iproute2.

    with Hosts(2) as hosts:
        job = hosts.start(0, ["torchrun", ...], log)      a process on host 0
        hosts.cut(1)                                      pull its cable

Each host has the address hosts.address(i) on its interface eth0, and shares files with all others.
"""

import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path

PREFIX = "10.77.0."


def obstacle() -> str:
    """Why there can be no hosts here; "" if there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    try:
        with Hosts(0):
            return ""
    except subprocess.CalledProcessError:
        return "network namespaces are not allowed here"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """`count` namespaces, cabled to a bridge in a namespace of its own."""

    def __init__(self, count: int):
        self.token, self.count, self.jobs = secrets.token_hex(3), count, []

    def name(self, host: int) -> str:
        return f"fr{self.token}{host}"

    def address(self, host: int) -> str:
        return f"{PREFIX}{host + 1}"

    def __enter__(self) -> "Hosts":
        self.switch = f"fr{self.token}s"
        try:
            self._cable()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _cable(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host in range(self.count):
            own = self.name(host)
            ip("netns", "add", own)
            ip("-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            ip("-n", own, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", own, "link", "set", device, "up")

    def start(self, host: int, command: list[str], log: Path, **env: str) -> subprocess.Popen:
        """Run a command on a host; the log receives what it prints."""
        with log.open("ab") as output:
            command = ["ip", "netns", "exec", self.name(host), *command]
            env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"} | env
            job = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        self.jobs.append(job)
        return job

    def cut(self, host: int) -> None:
        """Nothing goes to or from a host any more; nobody is told."""
        ip("-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def alive(self, host: int) -> list[int]:
        """The processes on a host."""
        found = subprocess.run(["ip", "netns", "pids", self.name(host)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def __exit__(self, *_) -> None:
        for host in range(self.count):
            for pid in self.alive(host):
                os.kill(pid, signal.SIGKILL)
        for job in self.jobs:
            job.wait()
        for name in (*(self.name(host) for host in range(self.count)), self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
