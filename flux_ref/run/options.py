"""Command lines of commands that need no torch: bad arguments are refused in one line."""

import argparse
from typing import NoReturn

from flux_ref.errors import Refusal


class Options(argparse.ArgumentParser):
    """A parser whose help is a module's docstring. No option is abbreviated: it could be meant for the config."""

    def __init__(self, name: str, text: str):
        super().__init__(
            name, description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; see --help")
