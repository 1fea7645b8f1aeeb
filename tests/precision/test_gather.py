"""Weights gathered in FP8: what a compiled backward keeps, what a changed weight does, what is refused.

test_fp8.py compares the bits with those of a gather in bf16, on several ranks.
"""

import math

import pytest
import torch
from fp8_net import low
from precision_ranks import fp8_config, fp8_linears, lively_state, steps
from torch import nn

from flux_ref.arithmetic import arithmetic_of
from flux_ref.errors import Refusal


def test_backward_keeps_no_copy_of_a_weight():
    """FSDP2 frees the gathered codes after a region, but no copy of them."""
    linear = low(nn.Linear(64, 96).bfloat16(), arch="sm90")
    linear.encode()
    kept = []
    for call in (linear, torch.compile(linear, backend="aot_eager_decomp_partition", fullgraph=True)):
        kept.clear()
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
            call(x)
        places = {tensor.data_ptr() for tensor in kept if tensor.numel() == linear.weight.numel()}
        assert linear.codes.data_ptr() in places
        assert places <= {linear.codes.data_ptr(), linear.weight.data_ptr()}


def test_a_changed_weight_meets_a_new_scale_and_nan_shows(world):
    cfg = fp8_config(parallel__kept_regions=-1)
    state = lively_state(cfg, world)
    name, linear = next(iter(fp8_linears(state.net).items()))
    loss = steps(state, cfg, world, count=1)[0]
    before = linear.weight_scale.clone()
    with torch.no_grad():
        linear.weight.mul_(8)  # nobody is told
    assert steps(state, cfg, world, count=1)[0] != loss
    assert before / 16 < linear.weight_scale <= before / 7, name
    with torch.no_grad():
        linear.weight[0, 0] = math.nan
    assert not math.isfinite(steps(state, cfg, world, count=1)[0])


def test_a_shard_that_lost_its_hooks_is_found(world):
    state = lively_state(fp8_config(), world)
    linear = next(iter(fp8_linears(state.net).values()))
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    with pytest.raises(AssertionError, match="its hooks are lost"):
        steps(state, fp8_config(), world, count=1)


def test_validation_in_bf16_needs_weights_gathered_in_bf16():
    with pytest.raises(Refusal, match=r"precision\.eval=false validates in bf16.*set precision\.gather=false"):
        arithmetic_of(fp8_config(precision__eval=False))
    arithmetic_of(fp8_config(precision__eval=False, precision__gather=False))
