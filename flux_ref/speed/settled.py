"""Whether FSDP2 is at rest between two steps. A capture may begin only then.

torch has no public way to ask. So this file knows private fields of FSDP2, by version of torch.

A validation leaves two lists, which may stay: `post_forward_order` and a group's `_post_forward_indices`. They hold the
order of forwards and no event. The next backward takes its own entries from their ends, then clears both lists.
"""

from itertools import product

from torch import nn
from torch.distributed.fsdp import FSDPModule

# What must be empty, by its owner. A torch that lacks a name has nothing to leave there.
# Sources: torch/distributed/fsdp/_fully_shard of torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
PENDING = {
    "streams": (
        "all_gather_state",
        "reduce_scatter_state",  # torch 2.11
        "reduce_scatter_states",  # since 2.12
        "_last_post_reduce_events",  # since 2.13
        "active_gradient_reduction",  # since 2.15
    ),
    "step": (
        "iter_forward_root",  # a forward that has not ended
        "post_backward_final_callback_queued",  # a backward that has not ended
        "post_optim_event",
        "gradient_reduction_pending",  # since 2.15
        "manual_backward_finalization_active",  # since 2.15
    ),
    "group": (
        "_all_gather_result",
        "_post_reduce_event",
        "_reshard_after_forward_event",
        "_partial_reduce_output",
        "_all_reduce_state",
        "_post_backward_pending",  # since 2.15
    ),
    "parameter": ("unsharded_accumulated_grad", "grad_offload_event"),
}


def owners(unit: FSDPModule) -> dict[str, list[object]]:
    """FSDP2's objects that own the fields of a unit. All units share the objects of "streams" and "step"."""
    state = unit._get_fsdp_state()
    group = state._fsdp_param_group
    groups = [group] if group else []
    parameters = [parameter for one in groups for parameter in one.fsdp_params]
    return {"streams": [state._comm_ctx], "step": [state._state_ctx], "group": groups, "parameter": parameters}


def is_empty(value: object) -> bool:
    return value is None or (isinstance(value, (bool, list, dict)) and not value)


def require_settled(net: nn.Module) -> None:
    """Assert that the net is between two steps. A capture started in another state records a wrong step, or fails.

    A graph would not gather weights that are gathered already, and would use these old weights for ever. It would add
    to gradients that are left. It cannot wait for an event of an eager step.
    """
    for name, unit in net.named_modules():
        if isinstance(unit, FSDPModule):
            held = owners(unit)
            where = name or "the root"
            assert all(group.is_sharded for group in held["group"]), f"the weights of {where} are gathered"
            for owner, fields in PENDING.items():
                for one, field in product(held[owner], fields):
                    assert is_empty(getattr(one, field, None)), f"FSDP2 has left {field} of {where} pending"
    kept = [name for name, parameter in net.named_parameters() if parameter.grad is not None]
    assert not kept, f"gradients are left: {kept[0]}, ..."
