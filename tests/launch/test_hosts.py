"""Several hosts: torchrun across network namespaces, HSDP over two of them, and cables that are pulled."""

import re
import sys
import time
from pathlib import Path

import netns
import pytest
from conftest import MICRO, ROOT, data_overrides
from run_files import count, lines, what_counts

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(netns.obstacle()), reason=netns.obstacle() or "-")]
HANG_S = 10
PORT = 29400


def start_all(hosts: netns.Hosts, folder: Path, *overrides: str, ranks: int = 2) -> tuple[list, list[Path]]:
    """torchrun on every host, and their logs; the run is FOLDER/run."""
    jobs, logs = [], []
    for host in range(hosts.count):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts.count}", f"--nproc-per-node={ranks}"),
            *(f"--node-rank={host}", f"--master-addr={hosts.address(0)}", f"--master-port={PORT}"),
            *(str(ROOT / "train.py"), str(MICRO), f"--run.dir={folder / 'run'}", f"--run.hang_s={HANG_S}", *overrides),
        ]
        logs.append(folder / f"host{host}.log")
        jobs.append(hosts.start(host, command, logs[-1], OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)))
    return jobs, logs


def wait_for(condition, timeout: float, logs: list[Path]) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-3000:] for log in logs)
        time.sleep(0.05)


def ended(jobs) -> bool:
    return all(job.poll() is not None for job in jobs)


def test_two_hosts_train_as_one_does(shapes_dir, tmp_path):
    steps = [*data_overrides(shapes_dir), "--train.max_samples=2400", "--eval.every_samples=1200"]
    for count_of_hosts, more, ranks in ((2, (), 2), (1, ("--parallel.replicate=2",), 4)):
        folder = tmp_path / str(count_of_hosts)
        folder.mkdir()
        with netns.Hosts(count_of_hosts) as hosts:
            jobs, logs = start_all(hosts, folder, *steps, *more, ranks=ranks)
            wait_for(lambda jobs=jobs: ended(jobs), 180, logs)
        said = logs[0].read_text()
        assert not any(job.returncode for job in jobs) and "replicas x shards: 2 x 2" in said, said[-3000:]
    assert what_counts(tmp_path / "1" / "run") == what_counts(tmp_path / "2" / "run")


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
