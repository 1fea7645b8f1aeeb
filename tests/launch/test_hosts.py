"""Several hosts: torchrun across network namespaces, HSDP over two of them, and cables that are pulled."""

import re
import sys
import time
from pathlib import Path

import netns
import pytest
from conftest import MICRO, ROOT, data_overrides
from run_files import count, lines, what_counts

pytestmark = pytest.mark.skipif(bool(netns.obstacle()), reason=netns.obstacle() or "-")
HANG_S = 10
PORT = 29400


def torchrun(hosts: netns.Hosts, host: int, run: Path, log: Path, *overrides: str, ranks: int = 2):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts.count}", f"--nproc-per-node={ranks}"),
        *(f"--node-rank={host}", f"--master-addr={hosts.address(0)}", f"--master-port={PORT}"),
        *(str(ROOT / "train.py"), str(MICRO), f"--run.dir={run}", f"--run.hang_s={HANG_S}", *overrides),
    ]
    return hosts.start(host, command, log, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))


def start_all(hosts: netns.Hosts, folder: Path, *overrides: str) -> tuple[list, list[Path]]:
    logs = [folder / f"host{host}.log" for host in range(hosts.count)]
    return [torchrun(hosts, host, folder / "run", log, *overrides) for host, log in enumerate(logs)], logs


def wait_for(condition, timeout: float, logs: list[Path]) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-3000:] for log in logs)
        time.sleep(0.05)


def ended(jobs) -> bool:
    return all(job.poll() is not None for job in jobs)


@pytest.fixture(scope="module")
def steps(shapes_dir) -> list[str]:
    return [*data_overrides(shapes_dir), "--train.max_samples=2400", "--eval.every_samples=1200"]


@pytest.fixture(scope="module")
def undisturbed(steps, tmp_path_factory) -> Path:
    """Two hosts of two ranks; the folder of their run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with netns.Hosts(2) as hosts:
        jobs, logs = start_all(hosts, folder, *steps)
        wait_for(lambda: ended(jobs), 180, logs)
    assert [job.returncode for job in jobs] == [0, 0], logs[0].read_text()[-3000:]
    assert "replicas x shards: 2 x 2" in logs[0].read_text()
    return folder / "run"


@pytest.mark.nightly
def test_two_hosts_train_as_one_does(undisturbed, steps, tmp_path):
    with netns.Hosts(1) as hosts:
        job = torchrun(hosts, 0, tmp_path / "run", tmp_path / "log", *steps, "--parallel.replicate=2", ranks=4)
        wait_for(lambda: ended([job]), 180, [tmp_path / "log"])
    assert what_counts(tmp_path / "run") == what_counts(undisturbed)


@pytest.mark.nightly
def test_a_cable_out_for_good_ends_the_job_on_both_sides(shapes_dir, tmp_path):
    endless = [*data_overrides(shapes_dir), "--train.max_samples=12000000", "--eval.every_samples=12000000"]
    with netns.Hosts(2) as hosts:
        jobs, logs = start_all(hosts, tmp_path, *endless, "--checkpoint.every_samples=120")
        wait_for(lambda: count(tmp_path / "run" / "metrics.jsonl") >= 20, 120, logs)
        hosts.cut(1)
        begin = time.monotonic()
        wait_for(lambda: ended(jobs), 12 * HANG_S, logs)
        took = time.monotonic() - begin
        left = [pid for host in range(2) for pid in hosts.alive(host)]
    assert left == []
    assert all(job.returncode != 0 for job in jobs)
    said = [log.read_text() for log in logs]
    print(f"{took:.0f} s after the cut; hang_s={HANG_S}")
    assert "train.py: ranks 2, 3 hang" in said[0], said[0][-3000:]
    assert re.search(r"train\.py: rank [23]\b|Timeout \(", said[1]), said[1][-3000:]
    assert lines(tmp_path / "run")  # whole, for the same command to go on
