"""The bar of long work: lively on a terminal, a line every ten seconds in a log file."""

import sys

from tqdm import tqdm


def progress(iterable=None, **options: object) -> tqdm:
    """tqdm with the project's manners; options are tqdm's."""
    interval_s = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(iterable, dynamic_ncols=True, mininterval=interval_s, **options)
