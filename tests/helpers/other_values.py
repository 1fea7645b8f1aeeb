"""A config with another value of one key."""

import dataclasses


def with_another(cfg, key):
    """A copy with another value of a key, unchecked."""
    section, name = key.split(".")
    part = getattr(cfg, section)
    value = getattr(part, name)
    if isinstance(value, tuple):
        other = (*value, (12, "fp8"))
    else:
        other = not value if isinstance(value, bool) else 2 * value or "some"
    return dataclasses.replace(cfg, **{section: dataclasses.replace(part, **{name: other})})
