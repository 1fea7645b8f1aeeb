"""Weights gathered in FP8: what a compiled backward keeps, and what a changed weight does.

test_fp8.py compares the bits with those of a gather in bf16, on several ranks.
"""

import math

import torch
from fp8_net import encode, low
from precision_ranks import fp8_config, lively_state, steps
from torch import nn


def test_backward_keeps_no_copy_of_a_weight():
    """FSDP2 frees the gathered codes after a region, but no copy of them."""
    linear = low(nn.Linear(64, 96), arch="sm90")
    encode(linear)
    kept = []
    for call in (linear, torch.compile(linear, backend="aot_eager_decomp_partition", fullgraph=True)):
        kept.clear()
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
            call(x)
        places = {tensor.data_ptr() for tensor in kept if tensor.numel() == linear.weight.numel()}
        assert linear.gathered.codes.data_ptr() in places
        assert places <= {linear.gathered.codes.data_ptr(), linear.weight.data_ptr()}


def test_a_changed_weight_meets_a_new_scale_and_nan_shows(world):
    cfg = fp8_config(parallel__kept_regions=-1)
    state = lively_state(cfg, world)
    linear = state.recipe.linears[0]
    loss = steps(state, cfg, world, count=1)[0]
    scale, _ = linear.gathered.scales
    before = scale.clone()
    with torch.no_grad():
        linear.weight.mul_(8)  # nobody is told
    assert steps(state, cfg, world, count=1)[0] != loss
    assert before / 16 < scale <= before / 7
    with torch.no_grad():
        linear.weight[0, 0] = math.nan
    assert not math.isfinite(steps(state, cfg, world, count=1)[0])
