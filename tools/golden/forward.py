"""The golden values of one forward and backward pass, read by hooks on the modules of a plain net."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flux_ref import flow, latents, model
from flux_ref.config import ModelConfig
from flux_ref.data import Batch
from tools.golden import places
from tools.golden.files import Values

# B batch  S tokens of a sequence, text first  H heads  K head dim  D hidden
Tensors = dict[str, Tensor]
Recorded = dict[str, Any]  # tensors, and arrays of numpy
WHOLE = places.TABLES["parameters"]["whole"]  # the parameters whose gradients, moments and weights are recorded whole
STREAMS = ("img", "txt")


def plain(cfg: ModelConfig, weights: Tensors, dtype: torch.dtype = torch.float32) -> model.Flux:
    """A net in this process with given weights, which computes in a dtype. RoPE stays fp32."""
    net = model.Flux(cfg)
    net.load_state_dict(weights)
    net.to(dtype)
    net.rope = net.make_rope()
    return net


def given_tensors(given: Values, prefix: str) -> Tensors:
    """The given values of a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): torch.from_numpy(given[name]) for name in given if name.startswith(prefix)}


def named(prefix: str, values: dict) -> dict:
    """The values under names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def norms(tensors: Tensors) -> Tensor:
    """The Euclidean norm of each, in order, fp32."""
    return torch.stack([tensor.float().norm() for tensor in tensors.values()])


def gradients(net: nn.Module) -> Tensors:
    """The gradients of a plain net, by name."""
    return {name: weight.grad for name, weight in net.named_parameters() if weight.grad is not None}


class Seen:
    """The first input and the output of every module of a net, by the module's name, after a pass."""

    def __init__(self, net: nn.Module):
        self.inputs: Tensors = {}
        self.outputs: dict = {}  # a tensor, or a tuple of two
        for name, module in net.named_modules():
            module.register_forward_hook(partial(self.note, name))

    def note(self, name: str, module: nn.Module, args: tuple[Tensor, ...], result: Tensor | tuple) -> None:
        self.inputs[name] = args[0]
        self.outputs[name] = result

    def of(self, *names: str) -> Tensors:
        """What some modules put out. NAME.input: what a module got. A norm of queries or keys: as (B, H, S, K)."""
        found = {}
        for name in names:
            if name.endswith(".input"):
                found[name] = self.inputs[name.removesuffix(".input")]
            else:
                found[name] = self.outputs[name].transpose(1, 2) if name.endswith("_norm") else self.outputs[name]
        return found


def passed(net: model.Flux, batch: Batch, dtype: torch.dtype) -> Tensors:
    """What one pass over a batch computes, in order, and the gradients of the mean loss. The net keeps the hooks."""
    seen = Seen(net)
    losses = flow.losses(net, batch, dtype)
    losses.mean().backward()
    latent = latents.sample(batch["mean"], batch["logvar"], batch["latent_eps"])
    noise = batch["noise"]
    values = {
        "rope": net.rope,
        "latent": latent,
        "x_t": flow.interpolate(latent, noise, batch["t"]),
        "target": latents.pack(noise - latent),
        "img": seen.inputs["img_in"],
        "img_in": seen.outputs["img_in"],
        "txt_in": seen.outputs["txt_in"],
        "time_waves": model.time_waves(batch["t"]),
    }
    values |= seen.of("time_in.in_layer", "time_in", "vector_in.in_layer", "vector_in")
    values["vec"] = seen.inputs["double_blocks.0.img_mod"]
    values |= double_block(seen, "double_blocks.0", net.cfg)
    for i in range(net.cfg.double_blocks):
        img, txt = seen.outputs[f"double_blocks.{i}"]
        values |= named(f"double_blocks.{i}", {"img": img, "txt": txt})
    values |= single_block(seen, "single_blocks.0", net.cfg)
    values |= seen.of(*(f"single_blocks.{i}" for i in range(net.cfg.single_blocks)))
    values |= seen.of("final_layer.adaLN_modulation.1", "final_layer.linear.input")
    values["prediction"] = seen.outputs["final_layer.linear"]
    values["losses"] = losses
    values["loss"] = losses.mean()
    grads = gradients(net)
    values |= named("grad", {name: grads[name] for name in reversed(WHOLE)})
    values["grad.norms"] = norms(grads)
    return values


def double_block(seen: Seen, name: str, cfg: ModelConfig) -> Tensors:
    """A double block from inside. In attention the streams are joined, text first."""
    values = seen.of(f"{name}.img_mod.lin", f"{name}.txt_mod.lin")
    for stream in STREAMS:
        at = f"{name}.{stream}_attn"
        values |= seen.of(f"{at}.qkv.input", f"{at}.qkv", f"{at}.norm.query_norm", f"{at}.norm.key_norm")
    operands = []  # of attention, and its result, of each stream
    for stream in reversed(STREAMS):
        at = f"{name}.{stream}_attn"
        q_BSHK, k_BSHK = seen.outputs[f"{at}.norm"]
        _, _, v_BSD = seen.outputs[f"{at}.qkv"].chunk(3, dim=-1)
        v_BSHK = model.split_heads(v_BSD, cfg.heads)
        operands.append((q_BSHK, k_BSHK, v_BSHK, seen.inputs[f"{at}.proj"]))
    joined = [torch.cat(pair, dim=1) for pair in zip(*operands)]
    values |= attention(name, *joined)
    for stream in STREAMS:
        mlp = f"{name}.{stream}_mlp"
        values |= seen.of(f"{name}.{stream}_attn.proj", f"{mlp}.0.input", f"{mlp}.0", f"{mlp}.1", f"{mlp}.2")
    return values


def single_block(seen: Seen, name: str, cfg: ModelConfig) -> Tensors:
    """A single block from inside."""
    values = seen.of(f"{name}.modulation.lin", f"{name}.linear1.input", f"{name}.linear1")
    values |= seen.of(f"{name}.norm.query_norm", f"{name}.norm.key_norm")
    q_BSHK, k_BSHK = seen.outputs[f"{name}.norm"]
    v_BSD = seen.outputs[f"{name}.linear1"][..., 2 * cfg.hidden : 3 * cfg.hidden]
    v_BSHK = model.split_heads(v_BSD, cfg.heads)
    result_BSD = seen.inputs[f"{name}.linear2"][..., : cfg.hidden]
    values |= attention(name, q_BSHK, k_BSHK, v_BSHK, result_BSD)
    return values | seen.of(f"{name}.linear2.input", f"{name}.linear2")


def attention(name: str, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, result_BSD: Tensor) -> Tensors:
    """The operands of attention, (B, H, S, K) each, and its result."""
    return {
        f"{name}.attention.v": v_BSHK.transpose(1, 2),
        f"{name}.attention.q": q_BSHK.transpose(1, 2),
        f"{name}.attention.k": k_BSHK.transpose(1, 2),
        f"{name}.attention": result_BSD,
    }
