"""The processes of a run: who they are, which device each has, and how they agree.

Another accelerator with torch.distributed needs an entry in BACKENDS. Look also at the other places that name a kind
of device: git grep -nE 'device.type|torch.accelerator|version.hip' flux_ref. A port replaces this file, sharding.py
and graphs.py.
"""

import json
import os
import random
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flux_ref.cli import Fault, Refusal, in_words
from flux_ref.config import ParallelConfig

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # ROCm calls its devices cuda and RCCL nccl
# A file that a node with a GPU has, and whether torch is built for it
DRIVERS = {"/dev/nvidiactl": torch.version.cuda, "/dev/kfd": torch.version.hip}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
HIDING = ("", "-1", "NoDevFiles")  # values of these that hide all GPUs; Slurm sets the last
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What srun and mpirun tell of the processes that they start; in a batch script SLURM_NTASKS says nothing of this one.
STARTED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
ENVIRONMENT = {  # defaults of libraries' settings
    # ROCm: more queues than computing and communication need slow both.
    "GPU_MAX_HW_QUEUES": "2",
    # Some versions of RCCL refuse to start without it.
    "HSA_NO_SCRATCH_RECLAIM": "1",
    # torch 2.15 would take its new backend nccl2. Captures were written for the older one.
    "TORCH_DIST_USE_NCCL2": "0",
    # NCCL's monitor would take a pause for a hang, as its clock goes on. watchdog.Watchdog tells one from the other.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # With expandable segments, graph buffers that NCCL registers get wrong addresses: github.com/pytorch/pytorch 158029
    # Over several nodes, small and large registered collectives can stall: github.com/NVIDIA/nccl, issue 2389.
    "NCCL_GRAPH_REGISTER": "0",
}
PATIENCE = timedelta(days=30)  # of a collective: its clock goes on in a pause. watchdog.Watchdog ends what hangs


@dataclass(frozen=True)
class World:
    """This process among all ranks. The mesh has the dimensions (shard,) for FSDP, (replicate, shard) for HSDP.

    store: what all ranks of a job share, also those of later restarts by torchrun. Its calls wait for no other call.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store = field(default_factory=dist.HashStore)

    @property
    def replicas(self) -> int:
        """Full copies of the model over all ranks."""
        return self.size // self.mesh.size(-1)

    @property
    def pin(self) -> bool:
        """Whether copies to the device want pinned host memory."""
        return self.device.type != "cpu"


def start(cfg: ParallelConfig, one_thread: bool = False) -> World:
    """Join the process group that torchrun describes. Without torchrun the world is this process alone.

    one_thread: compute in one CPU thread, as torchrun has several ranks of a host do. A toy model's products are so
    small that a second thread costs more time than it saves. numerics: sums of several threads round otherwise.
    Raises: Refusal when the group cannot be formed.
    """
    is_alone = "RANK" not in os.environ
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing and not is_alone:
        raise Refusal(f"RANK is set but {', '.join(missing)} is not; start with torchrun, which sets them")
    several = [f"{name}={os.environ[name]}" for name in STARTED if os.environ.get(name, "1") != "1"]
    if several and is_alone:
        raise Refusal(f"RANK is not set, but {several[0]}: each process would train alone; start them with torchrun")
    rank, size, local_rank = (0, 1, 0) if is_alone else (int(os.environ[name]) for name in TORCHRUN[:3])
    for name, value in ENVIRONMENT.items():  # before a device is looked for
        os.environ.setdefault(name, value)
    device = _device(local_rank)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError):  # macOS has limits of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Gloo opens two files for each rank; 1024 is usual
    if one_thread and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        job = dist.HashStore() if is_alone else _job_store(rank, size)
        store = _fresh_store(job, rank, size)
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "bring up the loopback interface: ip link set lo up" if is_alone else "is MASTER_PORT in use?"
        raise Refusal(f"cannot form the process group: {reason}; {remedy}") from None
    # torchrun numbers its nodes; names can be the same on all, in containers.
    nodes = gather_objects(f"{os.uname().nodename}#{os.environ.get('GROUP_RANK', 0)}")
    mesh = make_mesh(device.type, size, replica_count(cfg.replicate, nodes))
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch before 2.14
    for group in mesh.get_all_groups():  # they would have the backend's own limit
        set_timeout(PATIENCE, group)
    return World(rank, size, device, mesh, job.clone())


def replica_count(wanted: int, nodes: list[str]) -> int:
    """Full copies of the model. wanted: parallel.replicate, 0 for one per node; nodes: the node of each rank, by rank.

    Raises: Refusal where the ranks cannot be arranged so.
    """
    if wanted:
        if len(nodes) % wanted:
            raise Refusal(f"parallel.replicate={wanted} does not divide the {len(nodes)} ranks")
        return wanted
    names = dict.fromkeys(nodes)
    if nodes != [node for node in names for _ in range(len(nodes) // len(names))]:
        raise Refusal(
            "a replica per node needs equally many ranks on each, numbered node by node; start with torchrun, or set"
            " parallel.replicate=1"
        )
    return len(names)


def make_mesh(kind: str, size: int, replicate: int) -> DeviceMesh:
    """All ranks as shards of one copy, or as (replicate, shard): shard inside a node, replicate across."""
    shape = (size,) if replicate == 1 else (replicate, size // replicate)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _job_store(rank: int, size: int) -> dist.Store:
    """torchrun's store, without the prefix by which torch tells attempts apart."""
    store, *_ = next(dist.rendezvous("env://", rank, size))
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store


def _fresh_store(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of a job's store that only the ranks of this attempt write to.

    torchrun keeps one store for all its restarts. It is full of the addresses of dead ranks (github.com/pytorch/pytorch
    issue 167288). So rank 0 draws a name. Another rank takes the name once it finds its own token in rank 0's list.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        store.set("attempt", own)
        heard = [store.get(f"{own}/{other}").decode() for other in range(1, size)]
        store.set(f"{own}/heard", json.dumps(heard))
        return dist.PrefixStore(own, store)
    while True:  # watchdog.Watchdog ends this where rank 0 never comes
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{rank}", own)
        if store.check([f"{attempt}/heard"]) and own in json.loads(store.get(f"{attempt}/heard")):
            return dist.PrefixStore(attempt, store)
        time.sleep(random.uniform(0.5, 1.5) * size / 500)  # so all ranks ask about 1500 times a second


def _device(local_rank: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in BACKENDS:
        # A GPU that torch cannot use, as its driver is too old, must not lead to a run on the CPU.
        found = [path for path, is_built in DRIVERS.items() if is_built and os.path.exists(path)]
        if found and not any(os.environ.get(name) in HIDING for name in VISIBLE):
            raise Refusal(
                f"this node has a GPU ({found[0]}), but torch {torch.__version__} cannot use it; update the driver or"
                f" install another torch, or set {VISIBLE[0]}= to run on the CPU"
            )
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise Refusal(
            f"local rank {local_rank} has no device: this node has {count}; start {count} ranks per node",
            alone=local_rank == count,
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def device_name(device: torch.device) -> str:
    """The model of a device, such as "NVIDIA H200"."""
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def peak_memory_gb(device: torch.device) -> float:
    """Largest device memory this process has held, in 1e9 bytes; on the CPU its peak resident size."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return torch.get_device_module(device).max_memory_allocated(device) / 1e9


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What any rank refuses in this block is refused on all ranks, with the first rank's reason. Collective.

    No collective may stand inside the block: a rank that refuses would not reach it.
    group:  of all ranks, for use in another thread; None for the default group.
    Raises: Refusal for a Refusal or an OSError of any rank. Another error is raised as it is on its own rank; all
            other ranks raise a Fault that names it.
    """
    refused = broken = None
    try:
        yield
    except (Refusal, OSError) as error:
        refused = str(in_words(error))
    except Exception as error:
        broken = error
    reasons = gather_objects((refused, broken and f"{type(broken).__name__}: {broken}"), group)
    if broken:
        raise broken
    for rank, (refusal, defect) in enumerate(reasons):
        if defect:
            raise Fault(f"rank {rank}: {defect}")
        if refusal is not None:
            raise Refusal(refusal if refusal == reasons[0][0] else f"rank {rank}: {refusal}")


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list:
    """A small value of every rank, by rank; tuples come back as lists. sync: the host waits for all ranks.

    It travels as JSON: torch's all_gather_object unpickles what comes from the network, and pickles run code.
    """
    text = json.dumps(value).encode()
    kinds = {backend: kind for kind, backend in BACKENDS.items()}
    longest = torch.tensor([len(text)], device=kinds[dist.get_backend(group)])
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    own = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8).to(longest.device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own, group=group)
    return [json.loads(bytes(part.cpu().numpy())) for part in parts]


def barrier() -> None:
    """Wait for all ranks."""
    gather_objects(None)


def require_same(config: str) -> None:
    """Refuse to go on if a rank has another config."""
    texts = gather_objects(config)
    for rank, text in enumerate(texts):
        if own := set(text.split("\n")) - set(texts[0].split("\n")):
            raise Refusal(f"config differs between ranks: unlike rank 0, rank {rank} has {min(own)}")


def host_group(name: str) -> dist.ProcessGroup:
    """One more group of all ranks, for host tensors and for use in a thread of its own. Collective."""
    return cast(dist.ProcessGroup, dist.new_group(backend=BACKENDS["cpu"], timeout=PATIENCE, group_desc=name))


def make_copy_waiter(device: torch.device) -> Callable[[], None]:
    """A function that waits for the copies that were just enqueued. Any thread may call it."""
    if device.type == "cpu":
        return lambda: None
    event = torch.get_device_module(device).Event(blocking=True)  # no thread spins; torch.Event ignores `blocking`
    event.record()

    def wait() -> None:
        torch.accelerator.set_device_index(device.index)  # a new thread would be on device 0
        event.synchronize()

    return wait
