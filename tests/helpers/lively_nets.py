"""Nets whose weights all have a say, unsharded and sharded, and what all ranks have of them."""

import zlib

import torch
import torch.distributed as dist

from flux_ref import sharding
from flux_ref.model import Flux


def lively(name, shape):
    """Weights with which every part of a net has a say; in the initial ones, the zeros silence most of it."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.15 + name.endswith(".scale")


def plain_net(cfg):
    """An unsharded net with lively weights."""
    net = Flux(cfg.model)
    net.load_state_dict({name: lively(name, tuple(p.shape)) for name, p in net.named_parameters()})
    return net


def lively_net(cfg, world, recipe=None):
    """A sharded net with lively weights."""
    net = sharding.build(cfg, world, None, recipe)
    with torch.no_grad():
        for name, parameter in sharding.named_parameters(net).items():
            start, local = sharding.local_rows(parameter)
            local.copy_(lively(name, tuple(parameter.shape))[start : start + len(local)])
    return net


def whole(net):
    """The gathered weights of a sharded net by BFL's names. They travel at once, and so in little time."""
    shards = {name: p.detach().to_local() for name, p in sharding.named_parameters(net).items()}
    replica = of_all(shards)[: net.img_in.weight.device_mesh.size(-1)]
    return {name: torch.cat([rank[name] for rank in replica]) for name in shards}


def of_all(value):
    """The value of every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
