"""Replicas by node; what ranks send to each other."""

import os
import resource
import socket
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import refusal

from flux_ref import ranks
from flux_ref.cli import printable
from flux_ref.config import ParallelConfig
from flux_ref.ranks import replica_count


def started(one_thread=False):
    """The world of a process without ranks, whose group is gone again."""
    world = ranks.start(ParallelConfig(), one_thread)
    ranks.stop()
    return world


def on(*counts):
    return [f"n{node}" for node, count in enumerate(counts) for _ in range(count)]


def test_one_copy_per_node_unless_asked_otherwise():
    for nodes, wanted, count in (  # the node of each rank, parallel.replicate, full copies of the model
        (on(1), 0, 1),
        (on(8), 0, 1),
        (on(8, 8), 0, 2),
        (on(*[8] * 64), 0, 64),
        (on(8, 8), 1, 1),
        (on(8, 8, 8, 8), 2, 2),
        (on(2, 4), 2, 2),
        (on(1, 1, 1), 0, 3),
    ):
        assert replica_count(wanted, nodes) == count
    for nodes, wanted, words in (
        (on(8), 3, "parallel.replicate=3 does not divide the 8 ranks"),
        (on(8, 4), 0, "equally many ranks on each"),
        (["a", "b", "a", "b"], 0, "numbered node by node"),
    ):
        assert words in refusal(replica_count, wanted, nodes)


def test_of_several_processes_without_ranks_none_trains_alone(monkeypatch):
    for name, value, is_refused in (
        ("SLURM_STEP_NUM_TASKS", "2", True),
        ("OMPI_COMM_WORLD_SIZE", "4", True),
        ("PMI_SIZE", "1", False),
        ("SLURM_NTASKS", "2", False),  # also in a batch script, which is one process
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            if is_refused:
                words = f"RANK is not set, but {name}={value}: each process would train alone; start them with torchrun"
                assert refusal(started) == words
            else:
                assert started().size == 1, name


def test_every_group_waits_as_long_as_a_pause_lasts(monkeypatch):
    given = []
    monkeypatch.setattr(dist, "set_timeout", lambda *limit: given.append(limit), raising=False)
    groups = ranks.start(ParallelConfig()).mesh.get_all_groups()
    ranks.stop()
    assert given == [(ranks.PATIENCE, group) for group in groups] != []


def test_a_loopback_that_is_down_is_named(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=RuntimeError("no interface\nmore")))
    assert ": no interface; bring up the loopback interface: ip link set lo up" in refusal(started)


def test_a_gpu_that_torch_cannot_use_is_no_cpu(monkeypatch, tmp_path):
    """A driver that is too old must not lead to a run on the CPU, unless the user hides the GPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    (tmp_path / "driver").touch()
    for is_built, visible, is_refused in (
        (True, None, True),
        (False, None, False),
        (True, "", False),
        (True, "0", True),
    ):
        monkeypatch.setattr(ranks, "DRIVERS", {tmp_path / "none": True, tmp_path / "driver": is_built})
        give(monkeypatch, **dict.fromkeys(ranks.VISIBLE) | {ranks.VISIBLE[1]: visible})
        if is_refused:
            assert "cannot use it; update the driver" in refusal(started)
        else:
            assert started().device.type == "cpu"


def give(patch, **values):
    """Set environment variables, or take away those that are None."""
    for name, value in values.items():
        patch.setenv(name, value) if value is not None else patch.delenv(name, raising=False)


SETTINGS = {  # of a rank's environment
    "TORCH_DIST_USE_NCCL2": "0",  # torch's first program for NCCL
    "NCCL_GRAPH_REGISTER": "0",  # registered collectives may stall: github.com/NVIDIA/nccl, issue 2389
    "GPU_MAX_HW_QUEUES": "2",
    "HSA_NO_SCRATCH_RECLAIM": "1",
}


def test_a_rank_has_one_thread_and_settings_of_its_own_unless_the_user_asks(monkeypatch):
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    for asked, want in ((None, SETTINGS), ("4", dict.fromkeys(SETTINGS, "4"))):
        give(monkeypatch, OMP_NUM_THREADS=asked, **dict.fromkeys(SETTINGS, asked))
        for one_thread in (True, False):
            started(one_thread)
        assert want.items() <= os.environ.items()
    assert taken == [1]


def test_a_rank_may_open_as_many_files_as_the_system_allows(monkeypatch):
    """Two groups of Gloo at 512 ranks open more than 1024."""
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: found.append(limit))
    started()
    assert found == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def test_the_store_is_at_a_name_or_at_an_address_of_either_kind(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # srun may start torchrun
    for host in ("localhost", "127.0.0.1", "::1"):  # torchrun takes the brackets off
        with socket.create_server(("localhost", 0)) as server:
            place = host, server.getsockname()[1]
        for name, value in zip(ranks.TORCHRUN, (0, 1, 0, *place)):
            monkeypatch.setenv(name, str(value))
        assert started().size == 1, host


def test_values_travel_as_json_and_never_as_pickles():
    ranks.start(ParallelConfig())
    try:
        for value in (None, 1.5, float("inf"), 2**70, "é\udcff\n", {"a": [1, "x" * 5000, {}]}, [], ""):
            assert ranks.gather_objects(value) == [value]
        assert ranks.gather_objects({1: (2, 3)}) == [{"1": [2, 3]}]
        for value in (object(), b"bytes", {1, 2}):
            with pytest.raises(TypeError):
                ranks.gather_objects(value)
    finally:
        ranks.stop()


def test_a_text_that_differs_between_ranks_is_refused_with_its_line(monkeypatch):
    monkeypatch.setattr(ranks, "gather_objects", lambda text: [text, text, text.replace("b = 2", "b = 3")])
    assert ranks.require_same("a = 1") is None
    words = "config differs between ranks: unlike rank 0, rank 2 has b = 3\\u2028"
    assert words == printable(refusal(ranks.require_same, "a = 1\nb = 2\u2028"))
