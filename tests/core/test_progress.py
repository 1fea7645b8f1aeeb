"""The bar of long work."""

import os
import subprocess
import sys

from conftest import ROOT


def test_a_terminal_without_a_size_shows_the_bar():
    """Such as that of a serial line or of `script`: it has 0 columns."""
    ours, theirs = os.openpty()
    code = "from flux_ref.progress import progress; list(progress(range(3), unit=' steps'))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=theirs, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    assert b"100%|" in os.read(ours, 10_000)
