"""A model's weights as one safetensors file with BFL's names: written and read piece by piece.

No process holds more than its shards and one whole tensor, so this also works for 47.6 GB.
"""

import json
import os
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from flux_ref.errors import Refusal
from flux_ref.parallel import local_rows, named_parameters


def save(net: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Write fp32 weights; the file appears under its name once it is whole. Collective, rank 0 writes.

    Format: 8 bytes little-endian header length, JSON header, tensors back to back (safetensors).
    """
    parameters = named_parameters(net)
    partial = path.with_suffix(".partial")
    writes = torch.distributed.get_rank() == 0
    file = partial.open("wb") if writes else None
    if file:
        file.write(_header(parameters, metadata))
    for parameter in parameters.values():
        whole = parameter.detach().full_tensor()
        if file:
            file.write(whole.cpu().contiguous().view(torch.uint8).numpy().data)
        torch.distributed.barrier()  # or the other ranks' gathers would time out behind a slow disk
    if file:
        file.flush()
        os.fsync(file.fileno())
        file.close()
        partial.rename(path)


def _header(parameters: dict[str, nn.Parameter], metadata: dict[str, str]) -> bytes:
    entries, offset = {"__metadata__": metadata}, 0
    for name, parameter in parameters.items():
        end = offset + 4 * parameter.numel()
        entries[name] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def load(net: nn.Module, path: Path) -> dict[str, str]:
    """Fill a sharded net; every rank reads only its own rows. Returns the file's metadata.

    Raises: Refusal naming missing, unexpected and misshaped tensors.
    """
    parameters = named_parameters(net)
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _require_fit(shapes, {name: tuple(p.shape) for name, p in parameters.items()}, path)
            for name, parameter in parameters.items():
                start, local = local_rows(parameter)
                local.copy_(file.get_slice(name)[start : start + local.shape[0]])
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise Refusal(f"weights {path}: {error}") from None


def _require_fit(found: dict[str, tuple], want: dict[str, tuple], path: Path) -> None:
    missing = sorted(want.keys() - found.keys())
    unexpected = sorted(found.keys() - want.keys())
    misshaped = [f"{n} {found[n]}, want {want[n]}" for n in sorted(want.keys() & found.keys()) if found[n] != want[n]]
    for problem, names in (("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped)):
        if names:
            raise Refusal(f"weights {path} do not fit the model: {len(names)} {problem}, first {names[0]}")
