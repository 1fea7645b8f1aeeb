"""launch/slurm.sbatch on a Slurm cluster of three nodes, real daemons on one machine: what it runs and recovers.

The faults are real, too: ranks and whole nodes are killed, a node is drained, a data set is damaged.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import slurm_cluster
from conftest import MICRO, ROOT, data_overrides
from slurm_cluster import Cluster

LACKING = slurm_cluster.lacking()
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(LACKING), reason=LACKING)]
SHORT = ("--train.max_samples=36",)
LONG = ("--train.max_samples=3600", "--eval.every_samples=3600", "--checkpoint.every_samples=600")  # 300 steps
TOLERANT = "--slow 0.02 --wait 90"  # of three nodes that share two cores


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", ["n1", "n2", "n3"]) as cluster:
        yield cluster


class Job:
    """A job of launch/slurm.sbatch."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path, *overrides: str, **env: str):
        self.cluster, self.results, self.log = cluster, folder / "results", folder / "job.log"
        own = {"GPUS_PER_NODE": "1", "RESULTS": str(self.results), "PREFLIGHT": "off", "SCORE": "off"}
        own["OMP_NUM_THREADS"] = "1"
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["sbatch", "--parsable", "--nodes=2", f"--output={self.log}", f"--chdir={ROOT}"]
        config = (str(MICRO), *data_overrides(data), *overrides)
        out = cluster.run(*command, str(ROOT / "launch" / "slurm.sbatch"), *config, **(path | own | env))
        self.number = int(out)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def everything(self) -> str:
        """What there is to see when a test fails."""
        logs = [f"== {path}\n{path.read_text()[-2000:]}" for path in sorted(self.results.glob("logs/*"))]
        return f"{self.cluster.job(self.number)}\n{self.said}\n" + "\n".join(logs)

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def until(self, condition, timeout: float = 150) -> None:
        """Wait for something that comes before the job ends."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.cluster.until(lambda: condition() or self.state() in ended, timeout, self.everything)
        assert condition(), self.everything()

    def trained(self, run: int = 0) -> int:
        path = self.results / f"run_{run}" / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait(self, state: str = "COMPLETED") -> str:
        self.until(lambda: self.state() == state, timeout=300)
        return self.said

    def started_on(self) -> list[str]:
        """The nodes of each start."""
        return re.findall(r"start \d+: 2 nodes \((.*)\)", self.said)

    def require_whole(self, steps: int, run: int = 0) -> None:
        """Every step was recorded once, in order, and the run has its end."""
        lines = (self.results / f"run_{run}" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
        assert (self.results / f"result_{run}.txt").read_text().count('"key": "run_stop"') >= 1

    def ranks(self) -> dict[int, tuple[int, dict[str, str]]]:
        """{rank: (process, its environment)}"""
        number = {"SLURM_JOB_ID": str(self.number), "SLURM_CONF": self.cluster.env["SLURM_CONF"]}
        own = [(pid, env) for pid, env in slurm_cluster.environments() if number.items() <= env.items()]
        return {int(env["RANK"]): (pid, env) for pid, env in own if "LOCAL_RANK" in env}


@pytest.fixture
def submit(cluster, shapes_dir, tmp_path):
    """Submits jobs and cancels what is left of them."""
    jobs = []

    def start(*overrides: str, **more: object) -> Job:
        jobs.append(Job(cluster, tmp_path, shapes_dir, *overrides, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        cluster.run("scancel", str(job.number))
    cluster.until(lambda: not cluster.run("squeue", "-h"))


# Runs


@pytest.mark.slow
def test_three_runs_one_after_another_with_seeds_of_their_own(submit):
    closed = "--mllog.submission_division=closed"  # `report` then looks at the seeds
    job = submit(*SHORT, closed, NEXP="3", PREFLIGHT=TOLERANT, SCORE="--ruleset 6.0.0")
    said = job.wait()
    assert job.started_on() == ["n1 n2"] and "preflight: all nodes are fit" in said
    seeds = [int(line) for line in (job.results / "seeds.txt").read_text().split()]
    assert len(set(seeds)) == 3
    for run, seed in enumerate(seeds):
        text = (job.results / f"result_{run}.txt").read_text()
        assert re.findall(r':::MLLOG .*"key": "seed", "value": (\d+)', text) == [str(seed)]
        assert "ranks   2 x cpu (replicas x shards: 2 x 1)" in text  # the framework's own lines, too
        job.require_whole(3, run)
    assert (job.results / "faults.txt").read_text() == ""
    assert "ruleset 6.0.0" in said and "seeds: all different" in said and "not a valid result" in said
    assert (job.results / "report" / "report.html").is_file()
    again = submit(*SHORT, closed, NEXP="3")  # the same RESULTS: nothing is left to do
    said = again.wait().split(f"job {again.number}")[1]
    assert ", seed " not in said and "all 3 runs are done" in said
    assert [int(line) for line in (job.results / "seeds.txt").read_text().split()] == seeds
    assert "seeds.txt is for 3 runs, NEXP=2" in submit(*SHORT, NEXP="2").wait("FAILED")


@pytest.mark.nightly
def test_data_is_staged_and_verified_on_every_node_first(submit, cluster, shapes_dir):
    place = cluster.disk / "set"
    job = submit(*SHORT, *data_overrides(place), STAGE=f"{shapes_dir} {place}", VERIFY=str(place), SEED="41")
    job.wait()
    want = {path.name: path.read_bytes() for path in shapes_dir.rglob("*.tar")}
    for node in ("n1", "n2"):
        own = cluster.folder / f"disk_{node}" / "set"
        assert {path.name: path.read_bytes() for path in own.rglob("*.tar")} == want
    assert not place.exists() and (job.results / "seeds.txt").read_text() == "41\n"
    job.require_whole(3)


@pytest.mark.nightly
def test_damaged_data_and_a_refusal_end_the_job_at_once(submit, tmp_path, shapes_dir):
    copy = shutil.copytree(shapes_dir, tmp_path / "copy")
    (shard, *_) = sorted((copy / "val").glob("*.tar"))
    os.truncate(shard, 5000)
    job = submit(*SHORT, VERIFY=str(copy))
    assert "the data set is damaged, see" in job.wait("FAILED")
    assert shard.name in (job.results / "logs" / "verify.log").read_text()
    said = submit("--optim.lr=-1").wait("FAILED")
    assert "exit code 2: train.py: optim.lr=-1" in said and "run 0 was refused" in said
    assert len(list(job.results.glob("logs/run_0.*"))) == 1


# Going on


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
        cluster.until(lambda: cluster.state("n2") == "idle")
    assert cluster.job(job.number)["Restarts"] == "1" and job.started_on() == ["n1 n2", "n1 n3"]
    assert "since the last start n2 is drained (memory errors)" in (job.results / "faults.txt").read_text()
    assert f"from step {saved} " in (job.results / "result_0.txt").read_text()
    assert len((job.results / "seeds.txt").read_text().split()) == 1
    job.require_whole(300)


# Faults


@pytest.mark.nightly
def test_ranks_are_numbered_by_node_and_one_that_is_killed_is_named_and_the_run_goes_on(submit):
    job = submit(*LONG, GPUS_PER_NODE="2", FABRIC="roce", NCCL_IB_TC="96")
    job.until(lambda: job.trained() > 60)
    ranks = job.ranks()
    settings = {rank: (env["SLURMD_NODENAME"], env["MASTER_ADDR"]) for rank, (_, env) in ranks.items()}
    host = slurm_cluster.address()
    assert settings == {0: ("n1", host), 1: ("n1", host), 2: ("n2", host), 3: ("n2", host)}
    assert {(env["NCCL_IB_TC"], env["NCCL_IB_QPS_PER_CONNECTION"]) for _, env in ranks.values()} == {("96", "4")}
    slurm_cluster.kill(ranks[2][0])
    job.wait()
    (fault,) = (job.results / "faults.txt").read_text().splitlines()
    assert re.search(r"run 0: n2, rank 2, exit code -9: ", fault)
    assert job.started_on() == ["n1 n2"]  # in the same allocation
    job.require_whole(300)


@pytest.mark.nightly
def test_a_run_that_breaks_again_and_again_ends_the_job(submit):
    job = submit("--optim.lr=1e15", "--train.max_samples=120", FAULTS="1")
    said = job.wait("FAILED")
    assert len(re.findall(r"run 0: n\d, rank \d, exit code 3: .*not finite", said)) >= 2
    assert "ends: more than 1 faults" in said


@pytest.mark.nightly
def test_a_node_that_dies_is_replaced_by_slurm_and_named(submit, cluster):
    job = submit(*LONG)
    job.until(lambda: job.trained() > 60)
    cluster.kill_node("n2")
    try:
        job.wait()
        assert job.started_on() == ["n1 n2", "n1 n3"]
        assert "since the last start n2 is down* (Not responding)" in (job.results / "faults.txt").read_text()
        job.require_whole(300)
    finally:
        cluster.start_node("n2")
        cluster.until(lambda: cluster.state("n2") == "idle")
