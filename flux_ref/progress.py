"""The bar of long work: lively on a terminal, a line every ten seconds in a log file."""

import shutil
import sys

from tqdm import tqdm

from flux_ref.errors import Terminal


def progress(iterable=None, **options: object) -> tqdm:
    """tqdm with the project's manners; options are tqdm's."""
    if not sys.stderr.isatty():
        # No work ends because its bar cannot be shown.
        options |= {"file": Terminal(sys.stderr), "mininterval": 10.0, "bar_format": "{l_bar}{bar}{r_bar}\n"}
    columns, lines = shutil.get_terminal_size()  # where a terminal says 0, tqdm would show nothing
    return tqdm(iterable, **{"ncols": columns, "nrows": lines, "mininterval": 0.2} | options)
