"""Golden values at the size of FLUX.1-schnell: rotations, one block of each kind, norms of the initial weights."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from flux_ref import config_file, model, sharding
from flux_ref.config import Config
from tools.golden import places
from tools.golden.draws import FULL_SEED
from tools.golden.inputs import drawn, width_of

PERIOD = 131_071  # a prime: so many numbers are drawn for a weight, and repeat through it
TOKENS = {"text_tokens": 4, "latent_height": 4, "latent_width": 8}  # of the blocks: 4 of text, 2 rows of 4 of the image
SHOWN = 8  # of the features of a token
PIECE, PIECE_OF = 1 << 16, "double_blocks.0.img_attn.qkv.weight"  # elements that sharding draws at once


def rope(values: dict) -> None:
    """The rotations at full size: some tokens, and the sums over all tokens."""
    table = _net(double_blocks=1, single_blocks=1).make_rope()
    values["full.rope"] = table[places.inputs_of("full.rope")["tokens"]]
    values["full.rope.sums"] = table.double().sum(0).float()


def piece(values: dict) -> None:
    """Initial elements around the end of the first piece in which sharding draws: SHOWN on each side."""
    hidden = Config().model.hidden
    part = torch.empty(PIECE + SHOWN)
    sharding._fill_random(part, 0, PIECE_OF, *model.initialiser(PIECE_OF, (3 * hidden, hidden)), FULL_SEED)
    values["full.init.piece"] = part[PIECE - SHOWN :]


def _net(**keys: int) -> model.Flux:
    """FLUX.1-schnell with some keys of its model changed. Its parameters have no memory."""
    with torch.device("meta"):
        return model.Flux(config_file.replace(Config(), **{f"model__{key}": keys[key] for key in keys}).model)


def full_parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """PERIOD numbers drawn as inputs.py draws, repeated through the shape in C order. Scales of norms add 1."""
    count = min(PERIOD, prod(shape))
    return np.resize(drawn(name, (count,), width_of(name, shape), float(name.endswith(".scale"))), shape)


def blocks(values: dict) -> None:
    """A double and a single block of full width from drawn weights, on few tokens, forward and backward."""
    net = _net(double_blocks=1, single_blocks=1, **TOKENS)
    cfg = net.cfg
    table = net.make_rope()
    text = cfg.text_tokens
    image = cfg.image_tokens

    def operand(name: str, *shape: int) -> Tensor:
        return torch.from_numpy(drawn(f"full.{name}", shape, 1.0)).requires_grad_()

    for kind, block, sizes in (
        ("double", net.double_blocks[0], {"img": image, "txt": text}),
        ("single", net.single_blocks[0], {"x": text + image}),
    ):
        block.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.copy_(torch.from_numpy(full_parameter(f"full.{kind}.{name}", tuple(parameter.shape))))
        streams = {name: operand(f"{kind}.{name}", 1, size, cfg.hidden) for name, size in sizes.items()}
        vec = operand(f"{kind}.vec", 1, cfg.hidden)
        inputs = tuple(streams.values())
        results = block(inputs, vec, table) if kind == "double" else (block(*inputs, vec, table),)
        _show(values, f"full.{kind}", dict(zip(streams, results)))
        weights = (operand(f"{kind}.{name}.grad", *x.shape).detach() for name, x in streams.items())
        sum((result * weight).sum() for result, weight in zip(results, weights)).backward()
        _show(values, f"full.{kind}.grad", {name: x.grad for name, x in (streams | {"vec": vec}).items()})
        grads = [p.new_zeros(()) if p.grad is None else p.grad for p in block.parameters()]
        norms = [grad.double().norm().float() for grad in grads]  # fp32 sums lose 0.4 %
        values[f"full.{kind}.grad.norms"] = torch.stack(norms)
        block.to("meta")  # frees its memory and that of its gradients


def _show(values: dict, place: str, tensors: dict[str, Tensor]) -> None:
    """The first features of each token, and the norm of each token."""
    for name, tensor in tensors.items():
        rows = tensor.detach().flatten(0, -2)
        values[f"{place}.{name}"], values[f"{place}.{name}.size"] = rows[:, :SHOWN].clone(), rows.norm(dim=1)


def inputs_of(name: str) -> dict:
    """What a value is computed from, for machines; names: the parameters of a list of norms."""
    if name == "full.init.norms":
        return {"seed": FULL_SEED, "names": list(model.parameter_table(Config().model))}
    if name not in ("full.double.grad.norms", "full.single.grad.norms"):
        return {}
    block = getattr(_net(double_blocks=1, single_blocks=1), name.split(".")[1] + "_blocks")[0]
    return {"names": [parameter for parameter, _ in block.named_parameters()]}


def initial_norms() -> np.ndarray:
    """The norms of the initial tensors of FLUX.1-schnell: (776,) fp32. Takes minutes and 1.5 GB."""
    found = []
    for name, shape in model.parameter_table(Config().model).items():
        kind, width = model.initialiser(name, shape)
        elements = torch.full((prod(shape),), float(kind == "ones"))
        if kind not in ("zeros", "ones"):
            sharding._fill_random(elements, 0, name, kind, width, FULL_SEED)
        found.append(torch.linalg.vector_norm(elements, dtype=torch.float64))
    return torch.stack(found).float().numpy()
