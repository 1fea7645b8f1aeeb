"""The kernels that Inductor writes for GPUs, interpreted on the CPU, against what they should compute."""

import json

import pytest
from conftest import script

HELPER = "tests/helpers/interpreted.py"


def interpreted(arch: str, blocks: str, presets: str, timeout: float) -> dict:
    """What the helper reports. A distance that is too large ends the helper with an error."""
    pytest.importorskip("triton", minversion="3.9")  # numpy refuses how older interpreters reduce
    done = script(HELPER, arch, blocks, presets, ranks=0, timeout=timeout, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_kernels_of_a_block_are_right_and_a_wrong_kernel_is_found():
    """A wrong constant, stride or mask in one kernel is an error of this kernel alone."""
    assert interpreted("sm90", "single", "bf16", timeout=300) == {"counts": [[12, 0], [15, 4]], "planted": 4}


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_kernels_of_all_presets_are_right(arch):
    found = interpreted(arch, "double,single", "bf16,fp8,fp8_delayed,mxfp8", timeout=1800)
    assert len(found["counts"]) == 2 * 4 * 2 and found["planted"] == 2 * 4
    assert all(compared > parts for compared, parts in found["counts"])
