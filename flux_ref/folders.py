"""Folders that may be taken away. What they do is loaded where a key of the config asks for it.

A run that asks for nothing of precision/ or pictures/ needs no file of it.
"""

import importlib
from types import ModuleType

from flux_ref.config import Config
from flux_ref.errors import Refusal


def module(name: str, asked: str) -> ModuleType:
    """A module of a folder, as FOLDER.MODULE. asked: the key that needs it. Raises: Refusal without the folder."""
    folder = f"flux_ref.{name.split('.')[0]}"
    try:
        return importlib.import_module(f"flux_ref.{name}")
    except ModuleNotFoundError as error:
        if error.name not in (folder, f"flux_ref.{name}"):
            raise
        raise Refusal(f"{asked} needs the folder {folder.replace('.', '/')}, which is not here") from None


def precision(cfg: Config, name: str) -> ModuleType | None:
    """A module of precision/; None if every block computes in parallel.dtype. Raises: Refusal."""
    own = cfg.precision
    if own.preset == "bf16" and not own.rules and not own.switch:
        return None
    return module(f"precision.{name}", f"precision.preset={own.preset}")


def narrowest(cfg: Config, *products: str) -> str | None:
    """The narrowest format in these products of linears, as the benchmark's log names it; None: parallel.dtype."""
    policy = precision(cfg, "policy")
    return policy.narrowest(cfg, *products) if policy else None
