"""A cable between two hosts is pulled: torchrun across network namespaces."""

import re
import sys
import time

import netns
import pytest
from conftest import ROOT, micro_run
from run_files import count

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(netns.obstacle()), reason=netns.obstacle() or "-")]
HANG_S = 10
ENDLESS = ("--train.max_samples=12000000", "--eval.every_samples=12000000", f"--run.hang_s={HANG_S}")


def test_a_cable_out_for_good_ends_the_job_on_both_sides(shapes_dir, tmp_path):
    run, logs = tmp_path / "run", [tmp_path / f"host{host}.log" for host in range(2)]

    def wait_for(condition, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "\n".join(log.read_text()[-3000:] for log in logs)
            time.sleep(0.05)

    with netns.Hosts(2) as hosts:
        jobs = []
        for host, log in enumerate(logs):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            command += [f"--node-rank={host}", f"--master-addr={hosts.address(0)}", "--master-port=29400"]
            command += [str(ROOT / "train.py"), *micro_run(shapes_dir, run, *ENDLESS)]
            jobs.append(hosts.start(host, command, log, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)))
        wait_for(lambda: count(run / "metrics.jsonl") >= 20, 120)
        hosts.cut(1)
        wait_for(lambda: all(job.poll() is not None for job in jobs), 12 * HANG_S)
        assert [hosts.alive(host) for host in range(2)] == [[], []]
    assert all(job.returncode for job in jobs)
    said = [log.read_text() for log in logs]
    assert "train.py: ranks 2, 3 hang" in said[0], said[0][-3000:]
    assert re.search(r"train\.py: rank [23]\b|Timeout \(", said[1]), said[1][-3000:]
