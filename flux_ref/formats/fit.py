"""Checks of tensors that were read from files."""

from pathlib import Path

from torch import Tensor

from flux_ref.errors import Refusal


def require_fit(found: dict[str, tuple], want: dict[str, tuple], where: str | Path) -> None:
    """Compare names and shapes of tensors. Raises: Refusal that lists what does not fit."""
    missing = sorted(want.keys() - found.keys())
    unexpected = sorted(found.keys() - want.keys())
    misshaped = []
    for key in sorted(want):
        if found.get(key, want[key]) != want[key]:
            misshaped.append(f"{key} {found[key]}, want {want[key]}")
    problems = []
    for problem, names in (("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped)):
        if names:
            shown = names if len(names) <= 3 else [*names[:3], "..."]
            problems.append(f"{len(names)} {problem}: {', '.join(shown)}")
    if problems:
        raise Refusal(f"{where} does not fit: {'; '.join(problems)}")


def finite(values: Tensor, name: str, where: str | Path) -> Tensor:
    """The values. Raises: Refusal if any is NaN or infinite."""
    if not values.isfinite().all():
        raise Refusal(f"{where}: {name} holds NaN or infinite values; use another file")
    return values
