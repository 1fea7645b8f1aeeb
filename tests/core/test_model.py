"""The network: its parameter table, parity with diffusers' Flux, and how it starts. Golden values hold its bf16."""

import itertools
import re

import torch
from conftest import MICRO
from diffusers import FluxTransformer2DModel
from lively_nets import plain_net
from peer_net import by_name, diffusers_twin, random_inputs, relative_error, to_diffusers
from torch import nn

from flux_ref import config_file, model
from flux_ref.config import ModelConfig

CFG = config_file.load(MICRO)
MICRO_MODEL = CFG.model

# How weights start that are neither biases (zeros) nor Xavier-uniform; without the number of their block.
STARTS = {
    "normal": ("time_in.in_layer", "time_in.out_layer", "vector_in.in_layer", "vector_in.out_layer"),
    "zeros": ("img_mod.lin", "txt_mod.lin", "modulation.lin", "final_layer.linear", "final_layer.adaLN_modulation.1"),
}


def output_and_gradients(forward, inputs, parameters):
    """The output, and the gradients of one random projection of it by every input and the given parameters."""
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    out = forward(**inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(out, [*inputs.values(), *parameters.values()], cotangent)
    return {"output": out.detach()} | dict(zip([*inputs, *parameters], gradients, strict=True))


def assert_parity(ours, theirs):
    assert ours.keys() == theirs.keys()
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    wrong = {name: error for name, error in errors.items() if not error < 1e-5}
    assert not wrong, wrong


def test_every_parameter_has_a_counterpart_in_diffusers():
    """Schnell at full size, on the meta device: same names after the map, same shapes, nothing left over."""
    cfg = ModelConfig()
    table = {name: torch.empty(shape, device="meta") for name, shape in model.parameter_table(cfg).items()}
    assert (len(table), sum(tensor.numel() for tensor in table.values())) == (776, 11_891_178_560)
    with torch.device("meta"):
        twin = FluxTransformer2DModel()
    mapped = {name: tuple(tensor.shape) for name, tensor in to_diffusers(table, cfg).items()}
    assert mapped == {name: tuple(parameter.shape) for name, parameter in twin.named_parameters()}


def test_micro_model_agrees_with_diffusers():
    """Output, and gradients by every input and every parameter."""
    net = plain_net(CFG)
    inputs = random_inputs(MICRO_MODEL)
    twin, twin_forward = diffusers_twin(net)
    ours = output_and_gradients(by_name(net), inputs, dict(net.named_parameters()))
    theirs = output_and_gradients(twin_forward, inputs, dict(twin.named_parameters()))
    parameter_gradients = {name: ours.pop(name) for name, _ in net.named_parameters()}
    assert_parity(ours | to_diffusers(parameter_gradients, MICRO_MODEL), theirs)


def test_the_angles_of_rope_are_exact_in_fp32():
    """As complex numbers e^(i * position * omega_r), at schnell's sizes. Parity with diffusers proves their use."""
    position = torch.arange(65, dtype=torch.float64)
    positions_S3 = torch.stack((position, position.flip(0), (position * 7) % 65), dim=1)
    omega_R = torch.tensor([10_000 ** (-2 * r / size) for size in (16, 56, 56) for r in range(size // 2)]).double()
    phase_SR = positions_S3.repeat_interleave(torch.tensor([8, 28, 28]), dim=1) * omega_R
    rope_SR2 = model.rope_table(positions_S3, (16, 56, 56), 10_000)
    turns_SR = torch.view_as_complex(rope_SR2.double())
    torch.testing.assert_close(turns_SR, torch.polar(torch.ones_like(phase_SR), phase_SR), rtol=0, atol=1e-5)


def test_rms_norm_has_eps_1e_6():
    """Against the formula in fp64; at 1e-5 and 1e-3 the eps decides the result."""
    norm = model.RMSNorm(24)
    nn.init.uniform_(norm.scale, 0.5, 1.5)
    for size, dtype in itertools.product((1e-5, 1e-3, 1.0, 1e3), (torch.float32, torch.bfloat16)):
        x = (size * torch.randn(7, 24, generator=torch.Generator().manual_seed(0))).to(dtype)
        expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.scale.double()
        out = norm(x)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-7)


def initialised():
    """A random net whose parameters are zero where `initial` says so."""
    net = plain_net(CFG)
    for name, parameter in net.named_parameters():
        if model.init_spec(name, tuple(parameter.shape))[0] == "zeros":
            nn.init.zeros_(parameter)
    return net


def test_blocks_are_the_identity_and_the_output_is_zero_at_the_start():
    """Zero gates: the streams leave every block as they came, whatever the conditioning."""
    net, inputs = initialised(), random_inputs(MICRO_MODEL)
    assert torch.equal(by_name(net)(**inputs), torch.zeros_like(inputs["img"]))
    generator = torch.Generator().manual_seed(0)
    shapes = ((MICRO_MODEL.image_tokens, 24), (MICRO_MODEL.text_tokens, 24), (24,))
    img_BND, txt_BTD, vec_BD = (torch.randn(2, *shape, generator=generator) for shape in shapes)
    img_after, txt_after = net.double_blocks[0](img_BND, txt_BTD, vec_BD, net.rope)
    joint_BSD = torch.cat((txt_BTD, img_BND), dim=1)
    assert torch.equal(img_after, img_BND) and torch.equal(txt_after, txt_BTD)
    assert torch.equal(net.single_blocks[0](joint_BSD, vec_BD, net.rope), joint_BSD)


def test_initial_distribution_of_every_parameter():
    """Kinds by module; the half-width of uniform weights is what torch's own Xavier draws from."""
    for name, shape in model.parameter_table(MICRO_MODEL).items():
        kind, width = model.init_spec(name, shape)
        module, _, part = re.sub(r"^(double|single)_blocks\.\d+\.", "", name).rpartition(".")
        started = [way for way, modules in STARTS.items() if part == "weight" and module in modules]
        assert kind == (*started, {"bias": "zeros", "scale": "ones"}.get(part, "uniform"))[0], name
        if kind == "normal":
            assert width == 0.02
        if kind == "uniform":
            largest = nn.init.xavier_uniform_(torch.empty(shape)).abs().max().item()
            assert 0.9 * width < largest <= width, name
