"""What a compiler makes of FP8 products: the layouts that reach torch's own product, and equal bits."""

import pytest
import torch
from fp8_net import Net
from torch import Tensor

from flux_ref.precision import fp8


def on_a_device(layouts: list[bool]):
    """torch's product as a device would do it, on a CPU. Notes whether it is one of rows by columns."""

    def multiply(a: Tensor, b: Tensor, *, scale_a, scale_b, bias, out_dtype, use_fast_accum) -> Tensor:
        layouts.append(a.stride(1) == 1 and b.stride(0) == 1)
        out = torch.mm(a.float(), b.float()) * scale_a * scale_b
        return (out if bias is None else out + bias.float()).to(out_dtype)

    return multiply


@pytest.mark.slow
@torch._inductor.config.patch(emulate_precision_casts=True, force_disable_caches=True)
def test_a_compiler_hands_a_device_the_layouts_that_it_takes(monkeypatch):
    """Nine products each: rows by columns on an H200, no transposed copies on a B200. The bits equal eager code's."""
    import torch._inductor.kernel.mm

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    layouts = []
    monkeypatch.setattr(fp8, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", on_a_device(layouts))
    for arch, preset in (("sm90", "fp8"), ("sm90", "fp8_delayed"), ("sm100", "fp8_delayed")):
        found = []
        for compiles in (False, True):
            torch._dynamo.reset()
            layouts.clear()
            net = Net(arch, preset)
            leaf = x.clone().requires_grad_()
            out = torch.compile(net, fullgraph=True, dynamic=False)(leaf) if compiles else net(leaf)
            out.square().sum().backward()
            found.append([out.detach(), leaf.grad, *(one.grad for one in net.parameters()), *net.buffers()])
            assert (len(layouts), sum(layouts)) == (9, 9 if arch == "sm90" else 3), (arch, compiles)
        assert all(map(torch.equal, *found)), (arch, preset)
    torch._dynamo.reset()
