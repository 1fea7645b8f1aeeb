"""Whether FSDP2 is at rest between two steps. A capture may begin only then.

torch has no public way to ask. So this file knows private fields of FSDP2, by version of torch.

A validation leaves two lists, which may stay: `post_forward_order` and a group's `_post_forward_indices`. They hold the
order of forwards and no event. The next backward takes its own entries from their ends, then clears both lists.
"""

from collections.abc import Iterator

from torch.distributed.fsdp import FSDPModule

from flux_ref.errors import Fault

# What must be empty, by the class of its owner. A torch that lacks a name has nothing to leave there.
# Sources: torch/distributed/fsdp/_fully_shard of torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
PENDING = {
    "FSDPCommContext": (
        "all_gather_state",
        "reduce_scatter_state",  # torch 2.11
        "reduce_scatter_states",  # since 2.12
        "_last_post_reduce_events",  # since 2.13
        "active_gradient_reduction",  # since 2.15
    ),
    "FSDPStateContext": (
        "iter_forward_root",  # a forward that has not ended
        "post_backward_final_callback_queued",  # a backward that has not ended
        "post_optim_event",
        "gradient_reduction_pending",  # since 2.15
        "manual_backward_finalization_active",  # since 2.15
    ),
    "FSDPParamGroup": (
        "_all_gather_result",
        "_post_reduce_event",
        "_reshard_after_forward_event",
        "_partial_reduce_output",
        "_all_reduce_state",
        "_post_backward_pending",  # since 2.15
    ),
    "FSDPParam": ("unsharded_accumulated_grad", "grad_offload_event"),
}


def owners(net: FSDPModule) -> Iterator[tuple[str, str, object]]:
    """FSDP2's objects that own the fields: (class, the unit's name, object). All units share the two contexts."""
    state = net._get_fsdp_state()
    yield "FSDPCommContext", "the net", state._comm_ctx
    yield "FSDPStateContext", "the net", state._state_ctx
    for name, unit in net.named_modules():
        if isinstance(unit, FSDPModule) and (group := unit._get_fsdp_state()._fsdp_param_group):
            where = name or "the root"
            yield "FSDPParamGroup", where, group
            for parameter in group.fsdp_params:
                yield "FSDPParam", where, parameter


def is_empty(value: object) -> bool:
    return value is None or (isinstance(value, (bool, list, dict)) and not value)


def pending(net: FSDPModule) -> Iterator[str]:
    """What is left of a step, in words."""
    for kind, where, owner in owners(net):
        if kind == "FSDPParamGroup" and not owner.is_sharded:
            yield f"the weights of {where} are gathered"
        for field in PENDING[kind]:
            if not is_empty(getattr(owner, field, None)):
                yield f"FSDP2 has left {field} of {where} pending"
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name} is left"


def require_settled(net: FSDPModule) -> None:
    """Raises: Fault unless the net is between two steps. A capture elsewhere would record a wrong step, or fail.

    A graph would not gather weights that are gathered already, and would use these old weights for ever. It would add
    to gradients that are left. It cannot wait for an event of an eager step.
    """
    if found := next(pending(net), None):
        raise Fault(f"{found}, so no step can be captured; set graph.enabled=off", alone=True)
