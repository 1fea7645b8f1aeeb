"""Processes, devices and sharding: the file that names backends and kinds of devices.

Of graphs, device.py does; of the formats and layouts of FP8, precision.py.

Another accelerator with torch.distributed and FSDP2 needs an entry in BACKENDS and a look at `to_device` and
`peak_memory_gb`; a port without them replaces this file, and the few collectives in optim.py and weights.py.
"""

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flux_ref import draws, precision, regions, topology
from flux_ref.config import Config, ParallelConfig
from flux_ref.data import Batch, Feed
from flux_ref.device import allow_attention_of, guard_expandable
from flux_ref.errors import Refusal
from flux_ref.model import Flux, initialiser

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # ROCm calls its devices cuda and RCCL nccl
TORCHRUN = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SAVING = "save"  # name of the group in which checkpoints are agreed on
RECORDED = "64"  # collectives that torch's flight recorder keeps, for the message about a hang
# A new one also needs a place in rules.CHOICES and mllog.PRECISION_NAMES.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class World:
    """This process among all; the mesh has the dimension shard, for HSDP replicate and shard."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    nodes: list[str]  # the node of each rank

    @property
    def replicas(self) -> int:
        """Full copies of the model over all ranks."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def pin(self) -> bool:
        """Whether copies to the device want pinned host memory."""
        return self.device.type != "cpu"


def start(cfg: ParallelConfig, timeout_s: float = 0.0) -> World:
    """Join the process group that torchrun describes; without one, a world of this process alone.

    timeout_s: for one collective, 0 for the backend's own.
    Raises: Refusal when the group cannot be formed.
    """
    missing = [name for name in TORCHRUN if name not in os.environ]
    if "RANK" in os.environ and missing:
        raise Refusal(f"RANK is set but {', '.join(missing)} is not; start with torchrun, which sets them")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = _device(int(os.environ.get("LOCAL_RANK", 0)))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)
    guard_expandable()
    timeout = timedelta(seconds=timeout_s) if timeout_s else None
    try:
        store = dist.HashStore() if "RANK" not in os.environ else _fresh_store(rank, size, timeout)
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {str(error).splitlines()[0]}"
        raise Refusal(f"cannot form the process group at {place}; is the port in use?") from None
    # torchrun numbers its nodes; names can be the same on all, in containers.
    nodes = gather_objects(f"{os.uname().nodename}#{os.environ.get('GROUP_RANK', 0)}")
    mesh = make_mesh(device.type, size, topology.replicas(cfg.replicate, nodes))
    if timeout:  # groups of a mesh would have the backend's own
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in mesh.get_all_groups():
            set_timeout(timeout, group)
    return World(rank, size, device, mesh, nodes)


def make_mesh(kind: str, size: int, replicate: int) -> DeviceMesh:
    """All ranks as shards of one copy, or as (replicate, shard): shard inside a node, replicate across."""
    if replicate == 1:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))


def _fresh_store(rank: int, size: int, timeout: timedelta | None) -> dist.Store:
    """A part of torchrun's store that only the ranks of this attempt write to.

    torchrun keeps one store for all its restarts, full of the addresses of dead ranks (github.com/pytorch/pytorch
    issue 167288). Rank 0 draws a name; the others join it once they see that rank 0 has heard of them.
    """
    store, *_ = next(dist.rendezvous("env://", rank, size, **({"timeout": timeout} if timeout else {})))
    own = secrets.token_hex(8)
    if rank == 0:
        store.set("attempt", own)
        heard = [store.get(f"{own}/{other}").decode() for other in range(1, size)]
        store.set(f"{own}/heard", json.dumps(heard))
        return dist.PrefixStore(own, store)
    deadline = time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < deadline:
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{rank}", own)
        if store.check([f"{attempt}/heard"]) and own in json.loads(store.get(f"{attempt}/heard")):
            return dist.PrefixStore(attempt, store)
        time.sleep(0.02)
    raise RuntimeError("rank 0 does not answer")


def _device(local_rank: int) -> torch.device:
    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    if kind == "cpu" or kind not in BACKENDS:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise Refusal(
            f"local rank {local_rank} has no device: this node has {count}; start {count} ranks per node",
            alone=local_rank == count,
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_apart() -> bool:
    """Whether this process has not joined the group yet."""
    return not dist.is_initialized()


def is_single() -> bool:
    """Whether no other process can be waiting for this one."""
    return is_apart() or dist.get_world_size() == 1


def together(task: Callable[[], object]) -> object:
    """Run a task on every rank; if it is refused on any of them, all ranks raise the first rank's reason."""
    result, reason = None, None
    try:
        result = task()
    except (Refusal, OSError) as error:
        reason = str(error)
    reasons = gather_objects(reason)
    for rank, text in enumerate(reasons):
        if text is not None:
            raise Refusal(text if reasons[0] == text else f"rank {rank}: {text}")
    return result


def gather_objects(value: object) -> list:
    """A small Python value of every rank. sync: the host waits for all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_restarted() -> bool:
    """Whether torchrun has begun this job before. Collective.

    The node that failed counts its restarts; those that only joined again do not.
    """
    return any(gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))


def require_same(text: str, what: str) -> None:
    """Refuse to go on if a text, such as the config, differs between ranks."""
    texts = gather_objects(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            pair = next(pair for pair in zip(texts[0].splitlines(), other.splitlines()) if pair[0] != pair[1])
            raise Refusal(f"{what} differs between ranks: rank 0 has {pair[0]}, rank {rank} has {pair[1]}")


def store_clone() -> dist.Store:
    """A connection of its own to the store of the process group, for a thread."""
    return dist.distributed_c10d._get_default_store().clone()


def groups(world: World) -> list[dist.ProcessGroup]:
    """The groups that a training step communicates in."""
    return list({id(group): group for group in (dist.group.WORLD, *world.mesh.get_all_groups())}.values())


def collectives(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has begun in a group."""
    return group._get_sequence_number_for_group()


def last_collective() -> str:
    """What this rank began to communicate last, but for saves, from torch's flight recorder; "" if nothing."""
    dumps = (_distributed_c10d._dump_nccl_trace_json(), _distributed_c10d._dump_fr_trace_json())
    entries = [entry for dump in dumps for entry in json.loads(dump).get("entries", ())]
    entries = [entry for entry in entries if entry["process_group"][1] != SAVING]
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    return f"{last['profiling_name']} of {last['input_sizes']}"


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum over all ranks, in place. numerics: every rank ends with rank 0's bits, so that all decide alike."""
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    return tensor


def gather(tensor: Tensor) -> list[list[float]]:
    """The tensor of every rank, on the host. sync: the host waits for the device."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts).tolist()


def named_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by BFL's names, whatever the regions of the net."""
    inside = re.compile(r"^((?:double|single)_blocks)\.(\d+)\.blocks\.(\d+)")

    def block_name(match: re.Match) -> str:
        kind, region, block = match.groups()
        return f"{kind}.{int(region) * len(getattr(net, kind)[0].blocks) + int(block)}"

    return {inside.sub(block_name, name): parameter for name, parameter in net.named_parameters()}


def build(cfg: Config, world: World, seed: int | None) -> Flux:
    """The sharded net of a config, with its initial weights if a seed is given, else with any values."""
    allow_attention_of(cfg, world.device)
    with torch.device("meta"):
        net = Flux(cfg.model)
        precision.convert(net, cfg, world.device)
    net = shard(net, cfg.parallel, world)
    materialise(net, world, seed)
    net.fp8 = precision.Fp8State(net, cfg.fp8, world.device)
    return net


def shard(net: Flux, cfg: ParallelConfig, world: World) -> Flux:
    """Group the blocks of a net on the meta device into regions and shard it; order matters as written.

    Weights are gathered, and gradients of each micro-batch reduced, among the ranks of a replica; the shards are summed
    over replicas with a step's last micro-batch only (step.train_step).
    numerics: master weights stay fp32; units are gathered in cfg.dtype and gradients reduced in cfg.reduce_dtype.
    """
    net.double_blocks = regions.regions(net.double_blocks, cfg)
    net.single_blocks = regions.regions(net.single_blocks, cfg)
    units = [*net.double_blocks, *net.single_blocks]
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.dtype],
        reduce_dtype=DTYPES[cfg.reduce_dtype],
        cast_forward_inputs=False,  # numerics: would turn t and RoPE into bf16
    )
    if cfg.compile:
        regions.compile_all(units, cfg, world.device)
    for unit in units:
        fully_shard(unit, mesh=world.mesh, mp_policy=policy, reshard_after_forward=cfg.reshard_after_forward)
    fully_shard(net, mesh=world.mesh, mp_policy=policy)
    regions.overlap(net, units, cfg)
    return net


def materialise(net: Flux, world: World, seed: int | None) -> None:
    """Allocate the shards and, given a seed, fill each with its part of the initial weights.

    Element e of a parameter is a function of (seed, name, e), so every world size starts from the same
    values and no rank draws more than it keeps.
    """
    net.to_empty(device=world.device)
    net.rope = net.make_rope().to(world.device)
    if seed is None:
        return
    with torch.no_grad():
        for name, parameter in named_parameters(net).items():
            start, local = local_rows(parameter)
            kind, width = initialiser(name, parameter.shape)
            if kind in ("zeros", "ones"):
                local.fill_(kind == "ones")
            else:
                _fill_random(local.view(-1), start * local[:1].numel(), name, kind, width, seed)


def local_rows(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """(first row, rows) of a parameter on this rank; FSDP2 splits dimension 0 like torch.chunk."""
    assert isinstance(parameter, DTensor), "sharded parameters only"
    mesh = parameter.device_mesh
    chunk = -(-parameter.shape[0] // mesh.size(-1))
    return min(mesh.get_local_rank(mesh.ndim - 1) * chunk, parameter.shape[0]), parameter.to_local()


def _fill_random(flat: Tensor, start: int, name: str, kind: str, width: float, seed: int) -> None:
    """Elements start, start + 1, ... of a parameter's random values, drawn a few million at a time."""
    piece = 1 << 22
    for begin in range(0, flat.numel(), piece):
        count = min(piece, flat.numel() - begin)
        lead = (start + begin) % 4  # words come in blocks of four
        words = draws.words(
            seed, draws.INIT, lead + count + (lead + count) % 2, sample=draws.name_key(name), start=start + begin - lead
        )
        values = draws.normal(words) * width if kind == "normal" else (draws.uniform(words) * 2 - 1) * width
        flat[begin : begin + count] = torch.from_numpy(values[lead : lead + count].astype(np.float32)).to(flat.device)


@dataclass(frozen=True)
class _Copied:
    """The end of an asynchronous copy; may be awaited from any thread."""

    event: torch.Event
    device: torch.device

    def synchronize(self) -> None:
        torch.accelerator.set_device_index(self.device.index)  # a new thread would be on device 0
        self.event.synchronize()


def host_group(name: str, timeout_s: float = 0.0) -> dist.ProcessGroup:
    """One more group of all ranks, for host tensors, so that it may be used beside the others. Collective.

    timeout_s: for one collective, 0 for the backend's own.
    """
    timeout = timedelta(seconds=timeout_s) if timeout_s else None
    return dist.new_group(backend=BACKENDS["cpu"], timeout=timeout, group_desc=name)


def copied(device: torch.device) -> _Copied | None:
    """A mark behind the copies to host memory that were just enqueued; None where they are done already."""
    if device.type == "cpu":
        return None
    event = torch.Event(device.type)
    event.record()
    return _Copied(event, device)


def reshard(net: nn.Module) -> None:
    """Free all gathered weights: after a forward without backward they would go stale."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def to_device(feed: Feed, static: Batch) -> Batch:
    """Copy the feed's next batch into the static device buffers; on an accelerator the copy runs behind the host."""
    device = static["t"].device
    if device.type == "cpu":
        host = feed.take()
    else:
        work = torch.Event(device.type)
        work.record()  # while the device is still busy with earlier steps, waiting for data costs nothing
        host = feed.take(idle=work.query)
    for name, tensor in static.items():
        tensor.copy_(host.tensors[name], non_blocking=True)
    host.in_use = copied(device)
    feed.give_back(host)
    return static


def peak_memory_gb(device: torch.device) -> float:
    """Largest device memory this process has held, in 1e9 bytes; on the CPU its peak resident size."""
    if device.type == "cpu":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return torch.get_device_module(device).max_memory_allocated(device) / 1e9
