"""What each product of a net loses under a policy, and which products break a batch."""

import math
import sys
import time
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


def prepared(source: Source, cfg: Config, samples: int) -> tuple[Flux, data.Batch]:
    """A checkpoint's net in bf16, not sharded, and what its run trains on next, from a multiple of `samples` on."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    train_set = data.TrainSet(replace(cfg, train=replace(cfg.train, global_batch=samples)), 0, 1, pin=False)
    train_set.open()
    feed = train_set.feed(int(source.info.get("samples", 0)))
    feed.copy_into(batch := data.allocate(cfg.model, samples, device))
    feed.close()
    with torch.device("meta"):
        net = Flux(cfg.model).bfloat16()
    net.to_empty(device=device).rope = net.make_rope().to(device)
    for name, parameter in net.named_parameters():
        parameter.data.copy_(source.read(name, 0, len(parameter)))
    return net, batch


def gradients(net: Flux, batch: data.Batch) -> tuple[float, list[Tensor]]:
    """The mean loss of the samples, and its gradients."""
    net.zero_grad()
    loss = (flow.losses(net, batch, torch.bfloat16) * batch["weight"]).mean()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def sides(net: Flux, batch: data.Batch) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Both sides of each product, by layer and product, as sides.py lays them out. Leaves hooks on the linears."""
    found = {}

    def note(layer: str, linear: nn.Linear, _: object, grads: tuple[Tensor, ...]) -> None:
        x_MK = linear.seen
        w_NK = linear.weight.detach()
        g_MN = torch.cat(grads, dim=-1).flatten(0, -2)
        found[layer, "forward"], found[layer, "grad_input"] = (x_MK, w_NK), (g_MN, w_NK.t())
        found[layer, "grad_weight"] = g_MN.t(), x_MK.t()

    for module, layer in layers(net.cfg).items():
        linear = net.get_submodule(module)
        linear.register_forward_hook(lambda m, x, _: setattr(m, "seen", torch.cat(x, -1).detach().flatten(0, -2)))
        linear.register_full_backward_hook(partial(note, layer.name))
    gradients(net, batch)
    return found


def census(sides: dict, found: dict[str, Products], seed: int, name: str) -> Iterator[dict]:
    """A record of each product that a policy casts. found: the pairs of a stage."""
    for number, ((layer, product), both) in enumerate(progress(sides.items(), desc=name)):
        if (pair := found[layer][product]) != BF16:
            record = {"preset": name, "layer": layer, "product": product, "cast": format_pair(pair)}
            left, right = map(partial(look, record, seed, number), ("left", "right"), both, pair)
            exact = both[0].float() @ both[1].float().t()
            error = norm([left @ right.t() - exact]) / (norm([exact]) or 1.0)
            yield record | {"error": math.inf if math.isnan(error) else error}


def look(record: dict, seed: int, number: int, place: str, x_RS: Tensor, side: Side | None) -> Tensor:
    """What a tensor becomes as a side. The record gets what happens to the values. number: of the product."""
    raw = values = x_RS.float()
    size = raw.abs()
    over = torch.zeros(1)
    if side:
        key = torch.tensor((seed, 0, 2 * number + (place == "right"), 0), device=raw.device)
        values = decoded(raw, side, chances(key, raw) if side.stochastic else None)
        raw = casts.hadamard(raw, side.hadamard) if side.hadamard else raw
        _, scales, whole = casts.scaled(raw, side.form, side.scaling)
        above = side.form.largest + 2.0 ** (side.form.top - side.form.mantissa - 1)  # by half a step
        over = casts.blocks(raw.abs(), side.scaling) > above * scales[:, None, :, None] * whole
    lost = (values == 0) & (raw != 0)
    facts = (lost.float().mean(), over.float().mean(), size.max(), size.where(size > 0, torch.inf).min())
    record |= {f"{place}_{name}": fact.item() for name, fact in zip(FACTS, facts)}
    return values


def norm(tensors: Sequence[Tensor]) -> float:
    """The root of the sum of all squares, taken in fp64."""
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm().item()


def culprits(items: Sequence, goes_wrong: Callable[[Sequence], bool]) -> list:
    """Items without which the others go well, none of them too many. What goes wrong goes wrong with more items, too.

    A culprit ends the shortest beginning that goes wrong. So a list from mild to bad items gives the fewest culprits.
    n culprits take at most n * (ceil(log2(items)) + 1) + 1 calls.
    """
    rest, found, low = list(items), [], 0  # rest[:low] goes well
    while rest and goes_wrong(rest):
        low = bisect_left(range(1, len(rest)), True, low, key=lambda count: goes_wrong(rest[:count]))
        found.append(rest.pop(low))
    return found


def blame(net: Flux, batch: data.Batch, cfg: Config, found: dict, records: list, bound: float) -> tuple[list, int]:
    """The culprits among the records of a census of `found`, and the number of evaluations. Raises: Refusal."""
    linear.convert(net, cfg, fp8_product.architecture(batch["t"].device))
    linears = Precision(net, cfg, batch["t"].device).linears
    seconds = []

    def run(active: Sequence[dict]) -> tuple[float, list[Tensor]]:
        cast = {(record["layer"], record["product"]) for record in active}
        for one in linears:
            one.take({name: pair if (one.layer, name) in cast else BF16 for name, pair in found[one.layer].items()})
            # Earlier steps' scales are not known here. A part of what "blocks" casts may look like "tensor".
            one.is_delayed = False
            one.way = "blocks" if one.way == "tensor" and not one.arith else one.way
        return gradients(net, batch)

    def goes_wrong(active: Sequence[dict]) -> bool:
        begin = time.perf_counter()
        loss, grads = run(active)
        error = norm([cast - own for cast, own in zip(grads, plain)]) / size
        is_wrong = not (math.isfinite(loss) and error <= bound)
        seconds.append(time.perf_counter() - begin)
        said = f"{len(active)} products cast: loss {loss:.5g}, gradient error {error:.5g}"
        print(f"{len(seconds):>4}  {said}, {'wrong' if is_wrong else 'well'}, {seconds[-1]:.1f} s", file=sys.stderr)
        return is_wrong

    loss, plain = run(())
    if not (math.isfinite(loss) and 0 < (size := norm(plain)) < math.inf):
        raise Refusal("the samples go wrong in bf16, too; give another checkpoint")
    return culprits(sorted(records, key=lambda record: record["error"]), goes_wrong), len(seconds)
