"""Other pipelines that make batches of the same shards. A package is imported only when it is asked for.

Each gets what speaks for it: shards in order instead of shuffled, no draws, and numpy's own parser for the members.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from flux_ref.errors import Refusal
from flux_ref.formats.shards import MEMBERS

PACKAGES = {"webdataset": ("webdataset", "webdataset"), "energon": ("megatron.energon", "megatron-energon")}
AHEAD = 2  # batches that each worker of a torch DataLoader reads ahead


def decode(sample: dict) -> dict[str, torch.Tensor]:
    """The members of a sample as both packages hand them over."""
    return {name: torch.from_numpy(np.load(io.BytesIO(sample[f"{name}.bytes"]))) for name in MEMBERS}


@contextlib.contextmanager
def webdataset(folder: Path, batch: int, workers: int) -> Iterator[Iterator]:
    """Batches without end by webdataset's own pipeline in so many processes."""
    import webdataset as wds

    paths = sorted(map(str, folder.glob("*.tar")))
    shards = wds.WebDataset(paths, shardshuffle=False, empty_check=False).repeat()
    collate = torch.utils.data.default_collate
    loader = wds.WebLoader(
        shards.map(decode).batched(batch, partial=False, collation_fn=collate),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=AHEAD,
    )
    yield iter(loader)


def energon(folder: Path, batch: int, workers: int) -> contextlib.AbstractContextManager[Iterator]:
    """Batches without end by Energon's loader in so many processes."""
    from bench import feed_energon

    return feed_energon.batches(folder, batch, workers)


PEERS = {"webdataset": webdataset, "energon": energon}


def require(names: list[str]) -> None:
    """Raises: Refusal for a peer that is unknown or not installed."""
    for name in names:
        if name not in PEERS:
            raise Refusal(f"unknown peer {name!r}; known peers: {', '.join(PEERS)}")
        module, package = PACKAGES[name]
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise Refusal(f"--peers {name} needs the package {package}; pip install {package}")


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name, (_, package) in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = version(package)
    return found
