"""What each product of a net loses under a policy, and which products break a batch."""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from flux_ref import data, flow
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.model import Flux
from flux_ref.run.progress import progress
from flux_ref.run.weight_files import Source
from flux_ref.speed import casts, fp8_product, linear
from flux_ref.speed.block_product import decoded
from flux_ref.speed.chances import chances
from flux_ref.speed.layers import layers
from flux_ref.speed.precision import Precision
from flux_ref.speed.sides import Products, Side, format_pair

BF16 = (None, None)  # the sides of a product that is not cast
FACTS = ("zeros", "overflow", "largest", "smallest")

Sides = dict[tuple[str, str], tuple[Tensor, Tensor]]  # by layer and product, as policy.py lays both sides out


def prepared(source: Source, cfg: Config, samples: int) -> tuple[Flux, data.Batch]:
    """A checkpoint's net in bf16, not sharded, and what its run trains on next, from a multiple of `samples` on."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    own = replace(cfg, train=replace(cfg.train, global_batch=samples))
    train_set = data.TrainSet(own, 0, 1, pin=False)
    train_set.open()
    batch = data.allocate(cfg.model, samples, device)
    feed = train_set.feed(int(source.info.get("samples", 0)))
    feed.copy_into(batch)
    feed.close()
    with torch.device("meta"):
        net = Flux(cfg.model).bfloat16()
    net.to_empty(device=device)
    net.rope = net.make_rope().to(device)
    for name, parameter in net.named_parameters():
        parameter.data.copy_(source.read(name, 0, len(parameter)))
    return net, batch


def gradients(net: Flux, batch: data.Batch) -> tuple[float, list[Tensor]]:
    """The mean loss of the samples, and its gradients."""
    net.zero_grad()
    loss = (flow.losses(net, batch, torch.bfloat16) * batch["weight"]).mean()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def sides(net: Flux, batch: data.Batch) -> Sides:
    """Both sides of each product of one step. Leaves hooks on the linears."""
    inputs = {}
    found = {}

    def note_input(layer: str, linear: nn.Linear, args: tuple[Tensor, ...]) -> None:
        inputs[layer] = torch.cat(args, -1).detach().flatten(0, -2)

    def note_sides(layer: str, linear: nn.Linear, _: object, grads: tuple[Tensor, ...]) -> None:
        x_MK = inputs[layer]
        w_NK = linear.weight.detach()
        g_MN = torch.cat(grads, dim=-1).flatten(0, -2)
        found[layer, "forward"] = x_MK, w_NK
        found[layer, "grad_input"] = g_MN, w_NK.t()
        found[layer, "grad_weight"] = g_MN.t(), x_MK.t()

    for module, layer in layers(net.cfg).items():
        net.get_submodule(module).register_forward_pre_hook(partial(note_input, layer.name))
        net.get_submodule(module).register_full_backward_hook(partial(note_sides, layer.name))
    gradients(net, batch)
    return found


def census(both: Sides, found: dict[str, Products], seed: int, name: str) -> Iterator[dict]:
    """A record of each product that a policy casts. both: of all products. found: the pairs of a stage."""
    for number, ((layer, product), (left, right)) in enumerate(progress(both.items(), desc=name)):
        pair = found[layer][product]
        if pair == BF16:
            continue
        cast_left, facts_left = look(left, pair[0], seed, 2 * number)
        cast_right, facts_right = look(right, pair[1], seed, 2 * number + 1)
        exact = left.float() @ right.float().t()
        error = norm([cast_left @ cast_right.t() - exact]) / (norm([exact]) or 1.0)
        record = {"preset": name, "layer": layer, "product": product, "cast": format_pair(pair)}
        record |= {f"left_{fact}": value for fact, value in facts_left.items()}
        record |= {f"right_{fact}": value for fact, value in facts_right.items()}
        yield record | {"error": math.inf if math.isnan(error) else error}


def look(x_RS: Tensor, side: Side | None, seed: int, number: int) -> tuple[Tensor, dict[str, float]]:
    """What a tensor becomes as a side, in fp32, and what happens to its values. number: of the side."""
    raw = x_RS.float()
    values = raw
    size = raw.abs()
    over = torch.zeros(1)
    if side:
        key = torch.tensor((seed, 0, number, 0), device=raw.device)
        values = decoded(raw, side, chances(key, raw) if side.stochastic else None)
        if side.hadamard:
            raw = casts.hadamard(raw, side.hadamard)
        _, scales, whole = casts.scaled(raw, side.form, side.scaling)
        above = side.form.largest + 2.0 ** (side.form.top - side.form.mantissa - 1)  # by half a step
        over = casts.blocks(raw.abs(), side.scaling) > above * scales[:, None, :, None] * whole
    lost = (values == 0) & (raw != 0)
    facts = (lost.float().mean(), over.float().mean(), size.max(), size.where(size > 0, torch.inf).min())
    return values, {name: fact.item() for name, fact in zip(FACTS, facts)}


def norm(tensors: Sequence[Tensor]) -> float:
    """The root of the sum of all squares, taken in fp64."""
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm().item()


def culprits(items: Sequence, goes_wrong: Callable[[Sequence], bool]) -> list:
    """Items without which the others go well, none of them too many. What goes wrong goes wrong with more items, too.

    A culprit ends the shortest beginning that goes wrong. So a list from mild to bad items gives the fewest culprits.
    n culprits take at most n * (ceil(log2(items)) + 1) + 1 calls.
    """
    rest = list(items)
    found = []
    low = 0  # rest[:low] goes well
    while rest and goes_wrong(rest):
        low = bisect_left(range(1, len(rest)), True, low, key=lambda count: goes_wrong(rest[:count]))
        found.append(rest.pop(low))
    return found


def blame(
    net: Flux, batch: data.Batch, cfg: Config, found: dict, records: list[dict], bound: float
) -> tuple[list[dict], int]:
    """The culprits among the records of a census of `found`, and the number of evaluations. Raises: Refusal."""
    device = batch["t"].device
    linear.convert(net, cfg, fp8_product.architecture(device))
    linears = Precision(net, cfg, device).linears
    evaluations = 0

    def run(active: Sequence[dict]) -> tuple[float, list[Tensor]]:
        cast = {(record["layer"], record["product"]) for record in active}
        for one in linears:
            one.take({name: pair if (one.layer, name) in cast else BF16 for name, pair in found[one.layer].items()})
            # Earlier steps' scales are not known here. A part of what "blocks" casts may look like "tensor".
            one.is_delayed = False
            if one.way == "tensor" and not one.arith:
                one.way = "blocks"
        return gradients(net, batch)

    def goes_wrong(active: Sequence[dict]) -> bool:
        nonlocal evaluations
        evaluations += 1
        loss, grads = run(active)
        error = norm([cast - own for cast, own in zip(grads, plain)]) / size
        is_well = math.isfinite(loss) and error <= bound
        print(
            f"{evaluations:>4}  {len(active)} products cast: loss {loss:.5g}, gradient error {error:.5g},"
            f" {'well' if is_well else 'wrong'}",
            file=sys.stderr,
        )
        return not is_well

    loss, plain = run(())
    size = norm(plain)
    if not (math.isfinite(loss) and 0 < size < math.inf):
        raise Refusal("the samples go wrong in bf16, too; give another checkpoint")
    bad = culprits(sorted(records, key=lambda record: record["error"]), goes_wrong)
    return bad, evaluations
