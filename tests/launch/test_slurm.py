"""launch/slurm.sbatch on a Slurm cluster of three nodes, real daemons on one machine: what it runs and recovers.

The faults are real, too: ranks and whole nodes are killed, a node is drained, a data set is damaged.
"""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import slurm_cluster
from conftest import MICRO, ROOT, data_overrides
from killing import send
from run_files import column, count
from slurm_cluster import Cluster

CAN_START = slurm_cluster.daemon("slurmctld") and slurm_cluster.daemon("munged") and os.geteuid() == 0
REASON = "the daemons want root, and apt-get install slurm-wlm munge"
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not CAN_START, reason=REASON)]
SHORT = "--train.max_samples=36"
LONG = ("--train.max_samples=3600", "--eval.every_samples=3600", "--checkpoint.every_samples=600")  # 300 steps
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", ["n1", "n2", "n3"]) as cluster:
        yield cluster


class Job:
    """A job of launch/slurm.sbatch."""

    def __init__(self, cluster, folder, data, *overrides, **env):
        self.cluster, self.results, self.log = cluster, folder / "results", folder / "job.log"
        own = {"GPUS_PER_NODE": "1", "RESULTS": str(self.results), "PREFLIGHT": "off", "SCORE": "off"}
        own |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.log}", f"--chdir={ROOT}"]
        command += [str(ROOT / "launch" / "slurm.sbatch"), str(MICRO), *data_overrides(data), *overrides]
        self.number = int(cluster.run(*command, **(own | env)))

    @property
    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    def everything(self):
        """What there is to see when a test fails."""
        logs = [f"== {path}\n{path.read_text()[-2000:]}" for path in sorted(self.results.glob("logs/*"))]
        return f"{self.cluster.job(self.number)}\n{self.said}\n" + "\n".join(logs)

    def state(self):
        return self.cluster.job(self.number)["JobState"]

    def until(self, condition, timeout=150):
        """Wait for something that comes before the job ends."""
        self.cluster.until(lambda: condition() or self.state() in ENDED, timeout, self.everything)
        assert condition(), self.everything()

    def wait(self, state="COMPLETED"):
        self.until(lambda: self.state() == state, timeout=300)
        return self.said

    def trained(self):
        return count(self.results / "run_0" / "metrics.jsonl")

    def require_whole(self, steps, run=0):
        """Every step was recorded once, in order, and the run has its end."""
        assert column(self.results / f"run_{run}", "step") == list(range(1, steps + 1))
        assert '"key": "run_stop"' in (self.results / f"result_{run}.txt").read_text()

    def require_moved(self):
        """The job went on without its second node, with the seed of its first start."""
        assert re.findall(r"start \d+: 2 nodes \((.*)\)", self.said) == ["n1 n2", "n1 n3"]
        assert count(self.results / "seeds.txt") == 1
        self.require_whole(300)


@pytest.fixture
def submit(cluster, shapes_dir, tmp_path):
    """Submits jobs and cancels what is left of them."""
    jobs = []

    def start(*overrides, **more):
        jobs.append(Job(cluster, tmp_path, shapes_dir, *overrides, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        cluster.run("scancel", str(job.number))
    cluster.until(lambda: not cluster.run("squeue", "-h"))


@pytest.mark.nightly
def test_runs_one_after_another_with_seeds_of_their_own_on_data_that_is_staged_and_verified(
    submit, cluster, shapes_dir
):
    place = cluster.disk / "set"
    closed = "--mllog.submission_division=closed"  # `report` then looks at the seeds
    env = {"STAGE": f"{shapes_dir} {place}", "VERIFY": str(place), "NEXP": "2"}
    tolerant = "--slow 0.02 --wait 90"  # of nodes that share two cores
    own = (SHORT, closed, *data_overrides(place))
    job = submit(*own, **env, PREFLIGHT=tolerant, SCORE="--ruleset 6.0.0")
    said = job.wait()
    want = {path.name: path.read_bytes() for path in shapes_dir.rglob("*.tar")}
    for node in ("n1", "n2"):
        assert {path.name: path.read_bytes() for path in (cluster.folder / f"disk_{node}").rglob("*.tar")} == want
    assert not place.exists() and "preflight: all nodes are fit" in said
    seeds = (job.results / "seeds.txt").read_text().split()
    assert len(set(seeds)) == 2
    for run, seed in enumerate(seeds):
        text = (job.results / f"result_{run}.txt").read_text()
        assert re.findall(r':::MLLOG .*"key": "seed", "value": (\d+)', text) == [seed]
        assert "ranks   2 x cpu (replicas x shards: 2 x 1)" in text  # the framework's own lines, too
        job.require_whole(3, run)
    assert (job.results / "faults.txt").read_text() == ""
    assert "ruleset 6.0.0" in said and "not a valid result" in said, said
    assert (job.results / "report" / "report.html").is_file()
    again = submit(*own, NEXP="2")  # the same RESULTS: nothing is left to do
    said = again.wait().split(f"job {again.number}")[1]
    assert ", seed " not in said and "all 2 runs are done" in said
    assert (job.results / "seeds.txt").read_text().split() == seeds


@pytest.mark.nightly
def test_damaged_data_a_refusal_and_a_run_that_breaks_again_and_again_end_the_job(submit, tmp_path, shapes_dir):
    copy = shutil.copytree(shapes_dir, tmp_path / "copy")
    (shard, *_) = sorted((copy / "val").glob("*.tar"))
    os.truncate(shard, 5000)
    job = submit(SHORT, VERIFY=str(copy))
    assert "the data set is damaged, see" in job.wait("FAILED")
    assert shard.name in (job.results / "logs" / "verify.log").read_text()
    said = submit("--optim.lr=-1").wait("FAILED")
    assert "exit code 2: train.py: optim.lr=-1" in said and "run 0 was refused" in said
    assert len(list(job.results.glob("logs/run_0.*"))) == 1
    said = submit("--optim.lr=1e15", "--train.max_samples=120", FAULTS="1").wait("FAILED")
    assert re.search(r"run 0: n\d, rank \d, exit code 3: .*not finite", said)
    assert "ends: more than 1 faults" in said


@pytest.mark.nightly
def test_a_job_that_is_told_to_stop_saves_is_requeued_and_goes_on_without_a_drained_node(submit, cluster):
    """Slurm lets a job go on that runs on a node which is drained."""
    job = submit(*LONG)
    job.until(lambda: job.trained() > 20)
    cluster.run("scontrol", "update", "NodeName=n2", "State=drain", "Reason=memory errors")
    try:
        cluster.run("scancel", "--signal=USR1", "--batch", str(job.number))
        job.until(lambda: "requeued" in job.said)
        saved = job.trained()
        assert f"step_{saved:09d}" in os.listdir(job.results / "run_0" / "checkpoints")
        log = (job.results / "logs" / "run_0.0.log").read_text()
        assert "exitcode  : 138 " in log  # torchrun did not end before its ranks had
        job.wait()
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=resume")
        cluster.until_idle("n2")
    assert "since the last start n2 is drained (memory errors)" in (job.results / "faults.txt").read_text()
    assert f"from step {saved} " in (job.results / "result_0.txt").read_text()
    job.require_moved()


@pytest.mark.nightly
def test_a_rank_that_is_killed_is_named_and_a_node_that_dies_is_replaced(submit, cluster):
    job = submit(*LONG, GPUS_PER_NODE="2", FABRIC="roce", NCCL_IB_TC="96")
    job.until(lambda: job.trained() > 20)
    found = cluster.processes(SLURM_JOB_ID=str(job.number)).items()
    ranks = {int(env["RANK"]): (pid, env) for pid, env in found if "LOCAL_RANK" in env}
    settings = {rank: (env["SLURMD_NODENAME"], env["MASTER_ADDR"]) for rank, (_, env) in ranks.items()}
    host = slurm_cluster.address()
    assert settings == {0: ("n1", host), 1: ("n1", host), 2: ("n2", host), 3: ("n2", host)}
    assert {(env["NCCL_IB_TC"], env["NCCL_IB_QPS_PER_CONNECTION"]) for _, env in ranks.values()} == {("96", "4")}
    send(ranks[2][0], signal.SIGKILL)
    job.until(lambda: (job.results / "logs" / "run_0.1.log").exists() and job.trained() > 80)
    cluster.kill_node("n2")
    try:
        job.wait()
    finally:
        cluster.start_node("n2")
    rank, *_, node = (job.results / "faults.txt").read_text().splitlines()
    assert re.search(r"run 0: n2, rank 2, exit code -9: ", rank)
    assert "since the last start n2 is down* (Not responding)" in node
    job.require_moved()
