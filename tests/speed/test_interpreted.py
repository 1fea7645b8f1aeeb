"""The kernels that Inductor writes for GPUs, interpreted on the CPU, against what they should compute."""

import json
from pathlib import Path

import pytest
from conftest import script

HELPER = "tests/helpers/interpreted.py"


def interpreted(folder: Path, *argv: str, timeout: float) -> dict:
    """What the helper reports. A distance that is too large ends the helper with an exit code."""
    pytest.importorskip("triton", minversion="3.9")  # numpy refuses how older interpreters reduce
    report = folder / "report.json"
    done = script(HELPER, *argv, f"--json={report}", ranks=0, timeout=timeout, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return json.loads(report.read_text())


@pytest.mark.slow
def test_kernels_of_a_block_are_right_and_a_wrong_kernel_is_found(tmp_path):
    """A wrong constant, stride or mask in one kernel is an error of this kernel alone."""
    found = interpreted(tmp_path, "--arch=sm90", "--blocks=single", "--presets=bf16", timeout=300)
    forward, backward = found["rows"]
    assert (forward["outputs compared"], forward["parts of sums"]) == (12, 0)
    assert (backward["outputs compared"], backward["parts of sums"]) == (15, 4)
    assert len(found["planted"]) == 4
    assert all(one["high"] == [one["kernel"]] for one in found["planted"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_kernels_of_all_presets_are_right(arch, tmp_path):
    found = interpreted(tmp_path, f"--arch={arch}", timeout=1800)
    assert len(found["rows"]) == 2 * 4 * 2 and len(found["planted"]) == 2 * 4
    assert all(row["outputs compared"] > row["parts of sums"] for row in found["rows"])
