"""What a benchmark writes, for the tests of bench/."""

import json

import torch
from conftest import MICRO, own_settings

from flux_ref import ranks


def report_of(module, folder, *options):
    """Run a benchmark on the micro model in this process; the report is FOLDER/new/report.json."""
    path = folder / "new" / "report.json"
    try:
        with own_settings():
            assert module.main(["--config", str(MICRO), f"--json={path}", *map(str, options)]) == 0
    finally:
        ranks.stop()
        torch.compiler.set_stance("default")
    return json.loads(path.read_text())
