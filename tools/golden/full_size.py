"""Golden values at the size of FLUX.1-schnell: rotations, one block of each kind, norms of the initial weights."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from flux_ref import config_file, model, sharding
from flux_ref.config import Config
from tools.golden import places
from tools.golden.draws import FULL_SEED
from tools.golden.inputs import drawn, drawn_as

PERIOD = 131_071  # a prime: so many numbers are drawn for a weight, and repeat through it in C order
SHOWN = 8  # of the features of a token


def rope(values: dict) -> None:
    """The rotations at full size: some tokens, and the sums over all tokens."""
    table = net_of().make_rope()
    values["full.rope"] = table[places.inputs_of("full.rope")["tokens"]]
    values["full.rope.sums"] = table.double().sum(0).float()


def net_of(**keys: int) -> model.Flux:
    """FLUX.1-schnell with one block of each kind and some keys of its model. Its parameters have no memory."""
    keys |= {"double_blocks": 1, "single_blocks": 1}
    with torch.device("meta"):
        return model.Flux(config_file.replace(Config(), **{f"model__{key}": keys[key] for key in keys}).model)


def initial(name: str, shape: tuple[int, ...], count: int) -> Tensor:
    """The first elements of an initial tensor of this shape, fp32."""
    kind, width = model.initialiser(name, shape)
    elements = torch.full((count,), float(kind == "ones"))
    if kind not in ("zeros", "ones"):
        sharding._fill_random(elements, 0, name, kind, width, FULL_SEED)
    return elements


def piece(values: dict) -> None:
    """Initial elements around the end of the first piece in which sharding draws."""
    name, first, count = (places.inputs_of("full.init.piece")[key] for key in ("name", "first", "count"))
    shape = model.parameter_table(Config().model)[name]
    values["full.init.piece"] = initial(name, shape, first + count)[first:]


def blocks(values: dict) -> None:
    """A double and a single block of full width from drawn weights, on few tokens, forward and backward."""
    net = net_of(text_tokens=4, latent_height=4, latent_width=8)  # 4 tokens of text, 2 rows of 4 of the image
    cfg = net.cfg
    table = net.make_rope()
    text = cfg.text_tokens
    image = cfg.image_tokens
    for kind, block, sizes in (
        ("double", net.double_blocks[0], {"img": image, "txt": text}),
        ("single", net.single_blocks[0], {"x": text + image}),
    ):
        place = f"full.{kind}"
        block.to_empty(device="cpu")
        for name, parameter in block.named_parameters():
            numbers = drawn_as(f"{place}.{name}", tuple(parameter.shape), PERIOD)
            parameter.data.copy_(torch.from_numpy(numbers))
        shapes = {name: (1, size, cfg.hidden) for name, size in sizes.items()} | {"vec": (1, cfg.hidden)}
        fed = {name: operand(f"{place}.{name}", shape).requires_grad_() for name, shape in shapes.items()}
        *streams, vec = fed.values()
        results = block(*streams, vec, table) if kind == "double" else [block(*streams, vec, table)]
        loss = 0
        for name, result in zip(sizes, results):
            show(values, f"{place}.{name}", result)
            loss += (result * operand(f"{place}.{name}.grad", shapes[name])).sum()
        loss.backward()
        for name, tensor in fed.items():
            show(values, f"{place}.grad.{name}", tensor.grad)
        grads = [p.new_zeros(()) if p.grad is None else p.grad for p in block.parameters()]
        norms = [grad.double().norm().float() for grad in grads]  # fp32 sums lose 0.4 %
        values[f"{place}.grad.norms"] = torch.stack(norms)
        block.to("meta")  # frees its memory and that of its gradients


def operand(name: str, shape: tuple[int, ...]) -> Tensor:
    """Drawn with width 1."""
    return torch.from_numpy(drawn(name, shape, 1.0))


def show(values: dict, place: str, tensor: Tensor) -> None:
    """The first features of each token, and the norm of each token."""
    rows = tensor.detach().flatten(0, -2)
    values[place] = rows[:, :SHOWN].clone()
    values[f"{place}.size"] = rows.norm(dim=1)


def initial_norms() -> np.ndarray:
    """The norms of the initial tensors of FLUX.1-schnell: (776,) fp32. Takes minutes and 1.5 GB."""
    found = []
    for name, shape in model.parameter_table(Config().model).items():
        found.append(torch.linalg.vector_norm(initial(name, shape, prod(shape)), dtype=torch.float64))
    return torch.stack(found).float().numpy()
