"""What several subcommands take from their command line."""

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.run.options import between

number = between(1, 10**9)


def config(path: str | None) -> Config:
    """The config of --config, or FLUX.1-schnell's. Raises: Refusal."""
    return config_file.load(path) if path else Config()
