"""diffusers' Flux beside our model: the same weights, inputs, errors."""

import torch
from diffusers import FluxTransformer2DModel

from flux_ref.flow import image_positions
from tools.export import diffusers_config, parts_to_diffusers

INPUTS = ("img", "txt", "clip", "t")


def to_diffusers(tensors, model):
    """Weights or gradients under diffusers' names; that both nets compute the same proves the map."""
    return {
        name: torch.cat([tensors[part.name][part.first :][: part.rows] for part in parts])
        for name, parts in parts_to_diffusers(model).items()
    }


def random_inputs(cfg):
    """The net's arguments by name, in its order; of two samples."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((cfg.image_tokens, cfg.packed_channels), (cfg.text_tokens, cfg.t5_dim), (cfg.clip_dim,))
    tensors = [torch.randn(2, *shape, generator=generator) for shape in shapes]
    return dict(zip(INPUTS, [*tensors, torch.rand(2, generator=generator)], strict=True))


def diffusers_twin(net):
    """diffusers' Flux with the weights of net, and its forward as a function of INPUTS."""
    with torch.device("meta"):
        twin = FluxTransformer2DModel.from_config(diffusers_config(net.cfg))
    twin.load_state_dict(to_diffusers(net.state_dict(), net.cfg), assign=True)
    return twin, diffusers_forward(twin, net.cfg)


def diffusers_forward(twin, cfg):
    """The forward of diffusers' Flux as a function of INPUTS."""
    places = {
        "img_ids": image_positions(cfg.latent_height, cfg.latent_width).float(),
        "txt_ids": torch.zeros(cfg.text_tokens, 3),
    }

    def forward(img, txt, clip, t):
        states = {"hidden_states": img, "encoder_hidden_states": txt, "pooled_projections": clip}
        return twin(**states, **places, timestep=t, return_dict=False)[0]  # it multiplies t by 1000 itself

    return forward


def by_name(net):
    """The net's forward as a function of INPUTS."""
    return lambda img, txt, clip, t: net(img, txt, clip, t)


def relative_error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
