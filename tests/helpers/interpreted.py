"""A block's kernels for a GPU that is not there, interpreted, and each kernel's outputs against a reference.

    TRITON_INTERPRET=1 PYTHONPATH=. python tests/helpers/interpreted.py gfx942 double,single bf16,fp8,fp8_delayed,mxfp8

Matrix products and attention run on the CPU. A distance is relative to its bound, so above 1 it is an error.
In bf16 the program then changes the text of one kernel at a time. This kernel, and no other, must be above 1.
It ends with an error if a distance is too large, or if a changed kernel is not found.
"""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from unittest import mock

import torch
import triton
from functorch.compile import make_boxed_func
from interpreter import Kernel, copied, guarded, install, is_intact
from kernel_reference import Reference, distance, origins
from lively_nets import plain_net
from torch import Tensor
from torch._inductor.graph import GraphLowering

from bench.static import inductor
from bench.static.absent_gpu import AbsentGpu
from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.model import Flux
from flux_ref.speed import fp8_product, linear, policy, regions
from flux_ref.speed.precision import Precision

# Sizes that are no powers of two, so that masks matter. 32 divides what MXFP8 sums over.
SIZES = [
    "--model.hidden=96",
    "--model.heads=2",
    "--model.rope_axes=[16, 16, 16]",
    "--model.text_tokens=32",
    "--model.latent_height=8",
    "--model.latent_width=24",
    "--model.double_blocks=1",
    "--model.single_blocks=1",
]
ROWS = 2
DELAYED = (50.0, 5000.0)  # scales of inputs and gradients, for which magnitudes near 5 nearly fill e4m3 and e5m2
PLANTS = {  # a pattern of a kernel's text, and what replaces its first match
    "the constant of GELU": (r"0\.044715", "0.054715"),
    "a stride": (r"(tl\.load\(.*\b)96\*", r"\g<1>95*"),
    "a wider mask": (r"r0_index < r0_numel", "r0_index < r0_numel + 1"),
    "no mask": (r"xindex < xnumel", "xindex >= 0"),
}
LAUNCH = re.compile(r"(triton_\w+)\.run\(([\w, ]+), stream=\w+\)")
REUSE = re.compile(r"((\w+) = .+); del (\w+)(?=  # reuse)")
FOR_A_GPU = {"with torch.cuda._DeviceGuard(0):": "if True:", "torch.cuda.set_device(0)": "pass"}


class Direction:
    """The code of one direction of a block as a function of CPU tensors, with every kernel checked.

    distances: of each kernel's outputs, by "kernel output". joint: outputs that hold no node, such as parts of a sum;
    the kernel that finishes the sum is compared with the whole.
    """

    def __init__(self, lowering: GraphLowering, code: str):
        self.nodes = origins(lowering)
        self.inputs = lowering.graph_input_names
        self.buffers = {node: name for name, node in self.nodes.items()}
        self.kernels: dict[str, Kernel] = {}
        for old, new in FOR_A_GPU.items():
            code = code.replace(old, new)
        # Inductor may allot memory to a value that a kernel then keeps to itself. Its name occurs nowhere else.
        self.unwritten = {old for *_, old in REUSE.findall(code) if len(re.findall(rf"\b{old}\b", code)) == 3}
        code = REUSE.sub(r"\1; reuse(locals(), '\2', '\3'); del \3", code)
        code = LAUNCH.sub(r"launch('\1', locals(), '\2'.split(', '), \2)", code)
        keep = mock.patch.object(inductor.AsyncCompile, "triton", self._keep)
        wait = mock.patch.object(inductor.AsyncCompile, "wait", lambda *_: None)
        self.space = {"launch": self._launch, "reuse": self._reuse}
        with keep, wait:
            exec(code, self.space)
        self.space |= {"empty_strided_cuda": guarded, "get_raw_stream": lambda index: 0}

    def _keep(self, name: str, source: str, device_str: str = "cuda"):
        self.kernels[name] = Kernel(name, source)

    def __call__(self, *args: object) -> list:
        """Run the generated code on copies of its arguments. What it changes in place changes in the arguments."""
        self.held = {}
        self.finished = set()
        self.reads = {}
        self.used = set()
        self.distances = {}
        self.joint = []
        found = self.space["call"]([copied(value) for value in args])
        assert {key.partition(" ")[2] for key in self.joint} <= self.used, "no kernel finishes a sum"
        for name, value in zip(self.inputs, args):
            if name in self.finished:
                value.copy_(self.held[name])
        return found

    def _hold(self, live: dict) -> dict[str, Tensor]:
        """Remember what the variables of the generated code hold. What a kernel has written is known already."""
        tensors = {name: value for name, value in live.items() if isinstance(value, Tensor)}
        self.held |= {name: value.clone() for name, value in tensors.items() if name not in self.finished}
        return tensors

    def _reuse(self, live: dict, new: str, old: str) -> None:
        """The memory of `old` gets the name `new`, which a kernel may read before it writes."""
        self._hold(live)
        self.reads[new] = {old} - self.unwritten | self.reads.get(old, set())

    def _launch(self, kernel: str, live: dict, names: list[str], *args) -> None:
        """Run a kernel; then compare its outputs with what follows from its inputs alone."""
        tensors = self._hold(live)
        outputs = self.kernels[kernel].outputs(names)
        self.kernels[kernel](*args)
        reads = set(names) - (set(outputs) - set(self.inputs))
        reads |= {earlier for name in names for earlier in self.reads.get(name, ())}
        self.used |= reads
        held = {name: self.held[name] for name in reads | set(self.inputs) if name in self.held}
        for name in outputs:
            key = f"{kernel} {name}"
            if name in self.nodes:
                self.distances[key] = self._distance(name, tensors[name], held)
            else:
                self.joint.append(key)
                self.reads[name] = reads
        self.held |= {name: tensors[name].clone() for name in outputs}
        self.finished |= set(outputs)

    def _distance(self, name: str, found: Tensor, held: dict[str, Tensor]) -> float:
        if not is_intact(found):
            return torch.inf
        reference = Reference(self.buffers, held)
        node = self.nodes[name]
        want = reference.evaluated(node) if self.buffers.get(node) == name else reference.value(node)
        return distance(found, want, reference.is_move)


class Block:
    """A block of a kind as training has it, compiled for the GPU, with one set of weights and inputs.

    directions: forward and backward, once the block has run on the GPU.
    """

    def __init__(self, cfg: Config, net: Flux, kind: str):
        model = cfg.model
        self.region = regions.regions(getattr(net, f"{kind}_blocks"), cfg.parallel)[0]
        streams = {
            "double": (model.image_tokens, model.text_tokens),
            "single": (model.image_tokens + model.text_tokens,),
        }
        self.streams = [torch.randn(ROWS, length, model.hidden).bfloat16() for length in streams[kind]]
        self.tangents = [torch.randn_like(stream) for stream in self.streams]
        self.vec = torch.randn(ROWS, model.hidden).bfloat16()
        self.rope = torch.randn_like(net.rope)
        self.cfg = cfg
        self.directions: list[Direction] = []

    @contextlib.contextmanager
    def on_a_gpu(self, gpu: AbsentGpu) -> Iterator[Callable]:
        """While inside, the block with interpreted kernels. FP8 products are torch's own, done here on any CPU."""
        written = []

        def inner(graph, example_inputs: list, **rest) -> Callable:
            inductor.lower(gpu, graph, example_inputs, **rest)
            self.directions.append(Direction(*written[-1]))
            return make_boxed_func(self.directions[-1])

        with (
            mock.patch.object(fp8_product, "has_kernel", lambda device: True),
            mock.patch.object(torch, "_scaled_mm", _scaled_mm),
            inductor.collecting(lambda *one: written.append(one), {}, self.cfg.parallel.activation_budget),
        ):
            yield inductor.compiled(self.region, inner, regions.options(self.cfg, inductor.DEVICE))

    def wrong(self, compiled: Callable) -> list[str]:
        """The kernels with a distance above 1 in forward and backward. compiled: of `on_a_gpu`."""
        for name, buffer in self.region.named_buffers():
            if name.endswith("amax"):
                buffer.copy_(torch.linspace(0, 5, len(buffer)))  # some are below the magnitudes to come
        *streams, vec = [x.clone().requires_grad_() for x in (*self.streams, self.vec)]
        outputs = compiled(tuple(streams) if len(streams) == 2 else streams[0], vec, self.rope)
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), self.tangents)
        found = [item for one in self.directions for item in one.distances.items()]
        return sorted({key.partition(" ")[0] for key, value in found if not value <= 1})

    def is_found(self, compiled: Callable, pattern: str, new: str) -> bool:
        """Change the first kernel whose text has a match: whether this kernel alone is then `wrong`."""
        kernels = [(one.kernels, name) for one in self.directions for name in one.kernels]
        among, name = next((all_of, name) for all_of, name in kernels if re.search(pattern, all_of[name].source))
        kernel = among[name]
        among[name] = Kernel(name, re.sub(pattern, new, kernel.source, count=1))
        found = self.wrong(compiled)
        among[name] = kernel
        return found == [name]


def _net(cfg: Config, arch: str) -> Flux:
    """A net as training has it, whose weights are gathered and which remembers scales."""
    torch.manual_seed(0)
    net = plain_net(cfg).bfloat16()
    net.rope = net.make_rope()
    linear.convert(net, cfg, arch)
    precision = Precision(net, cfg, torch.device("cpu"))
    for name in policy.layers_gathered_in_fp8(cfg):
        net.get_submodule(name).encode()
    for scale, inverse, value in zip(precision.scales, precision.inverses, cycle(DELAYED)):
        scale.fill_(value)
        inverse.fill_(1 / value)
    return net


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias, out_dtype, use_fast_accum: bool) -> Tensor:
    out = a.float() @ b.float() * scale_a * scale_b
    return copied((out if bias is None else out + bias.float()).to(out_dtype))


def _attention(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> tuple:
    """(B, H, S, K) -> the result in q's dtype, laid out as (B, S, H, K), and values that are not used here."""
    out = (_shares(q, k) @ v.float()).to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    sums, none, seed = q.new_zeros(*q.shape[:3], 1, dtype=torch.float32), q.new_empty(0).long(), q.new_zeros(()).long()
    return copied(out), copied(sums), none, none, q.shape[2], k.shape[2], seed, seed, none


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, ...]:
    shares, towards = _shares(q, k), grad.float() @ v.float().mT
    scores = shares * (towards - (shares * towards).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    found = (scores @ k.float(), scores.mT @ q.float(), shares.mT @ grad.float())
    return tuple(copied(torch.empty_like(like).copy_(x)) for like, x in zip((q, k, v), found))


def _shares(q: Tensor, k: Tensor) -> Tensor:
    return (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1)


def main(arch: str, blocks: str, presets: str) -> None:
    """Prints as JSON: outputs compared and parts of sums of each direction, and the number of mistakes found."""
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
    install()
    gpu = AbsentGpu(arch)
    operators = torch.library.Library("aten", "IMPL")
    operators.impl("_scaled_dot_product_cudnn_attention", _attention, "CPU")
    operators.impl("_scaled_dot_product_cudnn_attention_backward", _attention_backward, "CPU")
    counts = []
    wrong = []
    planted = 0
    for kind, preset in product(blocks.split(","), presets.split(",")):
        own = [f"--precision.preset={preset}", "--precision.dynamic_steps=0", "--parallel.dtype=bf16"]
        cfg = config_file.load(Path(__file__).parents[1] / "micro.toml", SIZES + own)
        block = Block(cfg, _net(cfg, arch), kind)
        with block.on_a_gpu(gpu) as compiled:
            wrong += block.wrong(compiled)
            counts += [(len(one.distances), len(one.joint)) for one in block.directions]
            for what, change in PLANTS.items() if preset == "bf16" else ():
                planted += 1
                wrong += [] if block.is_found(compiled, *change) else [f"{what} in {kind} is not found"]
    print(json.dumps({"counts": counts, "planted": planted}))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
