"""The golden values of one forward and backward pass, read by hooks on a plain net and by a stand-in for attention."""

from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from flux_ref import config_file, flow, model, sharding
from flux_ref.config import Config, ModelConfig
from flux_ref.dataloader import Batch
from flux_ref.ranks import World
from flux_ref.trainer import TrainState
from tools.golden import places
from tools.golden.files import Values

# B batch  S tokens of a sequence, text first  H heads  K head dim  D hidden
Tensors = dict[str, Tensor]
Recorded = dict[str, Any]  # tensors, and arrays of numpy
WHOLE = places.TABLES["parameters"]["whole"]  # the parameters whose gradients, moments and weights are recorded whole


class Replay(NamedTuple):
    """What golden values are computed from: the config, this process's world and the given values."""

    cfg: Config
    world: World
    given: Values

    def replaced(self, **keys: Any) -> "Replay":
        """The same with other keys of the config, written as section__key."""
        return self._replace(cfg=config_file.replace(self.cfg, **keys))

    def tensors(self, prefix: str) -> Tensors:
        """The given values of a prefix, by the rest of their names."""
        found = {name.removeprefix(prefix): array for name, array in self.given.items() if name.startswith(prefix)}
        return {name: torch.from_numpy(array) for name, array in found.items()}

    def weights(self) -> Tensors:
        return self.tensors("weights.")

    def start(self) -> TrainState:
        """The state of a run that starts from the given weights."""
        net = sharding.build(self.cfg, self.world, None)
        weights = self.weights()
        with torch.no_grad():
            for name, parameter in sharding.named_parameters(net).items():
                first, rows = sharding.local_rows(parameter)
                rows.copy_(weights[name][first : first + len(rows)])
        return TrainState(net, self.cfg, self.world)


def plain(cfg: ModelConfig, weights: Tensors, dtype: torch.dtype = torch.float32) -> model.Flux:
    """A net in this process with given weights, which computes in a dtype. RoPE stays fp32."""
    net = model.Flux(cfg)
    net.load_state_dict(weights)
    net.to(dtype)
    net.rope = net.make_rope()
    return net


def named(prefix: str, values: dict) -> dict:
    """The values under names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def norms(tensors: Tensors) -> Tensor:
    """The Euclidean norm of each, in order, fp32."""
    return torch.stack([tensor.float().norm() for tensor in tensors.values()])


def gradients(net: nn.Module) -> Tensors:
    """The gradients of a plain net, by name."""
    return {name: weight.grad for name, weight in net.named_parameters() if weight.grad is not None}


def passed(net: model.Flux, batch: Batch, dtype: torch.dtype) -> Tensors:
    """What one pass over a batch computes, in order, and the gradients of the mean loss. The net keeps the hooks."""
    values: dict[str, Any] = {}
    calls: list[tuple[Tensor, ...]] = []  # of attention, block by block: operands and result
    attention = model.attention

    def attend(*operands_BSHK: Tensor) -> Tensor:
        result_BSD = attention(*operands_BSHK)
        calls.append((*operands_BSHK, result_BSD))
        return result_BSD

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
        is_norm = name.endswith(("query_norm", "key_norm"))  # of queries or keys, (B, S, H, K)
        values[f"{name}.input"] = args[0]
        values[name] = result.transpose(1, 2) if is_norm else result

    for name, module in net.named_modules():
        module.register_forward_hook(partial(note, name))

    with patch.object(model, "attention", attend):
        losses = flow.losses(net, batch, dtype)
    losses.mean().backward()
    latent = flow.sample(batch["mean"], batch["logvar"], batch["latent_eps"])
    noise = batch["noise"]

    values |= {
        "rope": net.rope,
        "latent": latent,
        "x_t": flow.interpolate(latent, noise, batch["t"]),
        "target": flow.pack(noise - latent),
        "img": values["img_in.input"],
        "timestep_embedding": model.timestep_embedding(batch["t"]),
        "vec": values["double_blocks.0.img_mod.input"],
        "prediction": values["final_layer.linear"],
        "losses": losses,
        "loss": losses.mean(),
    }
    for i in range(net.cfg.double_blocks):
        values[f"double_blocks.{i}.img"], values[f"double_blocks.{i}.txt"] = values[f"double_blocks.{i}"]

    for name, call in (("double_blocks.0", calls[0]), ("single_blocks.0", calls[net.cfg.double_blocks])):
        for part, operand_BSHK in zip("qkv", call):
            values[f"{name}.attention.{part}"] = operand_BSHK.transpose(1, 2)
        values[f"{name}.attention"] = call[-1]

    grads = gradients(net)
    kept = {name: values[name] for name in places.TABLES["recorded"]["forward"]} | named(
        "grad", {name: grads[name] for name in reversed(WHOLE)}
    )
    return kept | {"grad.norms": norms(grads)}
