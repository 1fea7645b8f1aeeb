"""The objective and the latents, against a second implementation in numpy float64."""

import numpy as np
import pytest
import torch

from flux_ref import flow

SHAPE = (3, 16, 4, 6)  # B, C, Y, X


@pytest.fixture
def batch():
    """As the loader gives it."""
    rng = np.random.default_rng(0)
    shapes = {name: SHAPE for name in ("mean", "logvar", "latent_eps", "noise")} | {"t5": (3, 9, 28), "clip": (3, 14)}
    found = {name: torch.from_numpy(rng.standard_normal(shape)).float() for name, shape in shapes.items()}
    found |= {name: found[name].bfloat16() for name in ("mean", "logvar", "t5", "clip")}
    return found | {"t": torch.tensor([0.0, 0.375, 0.9])}


def pack_by_loops(image):
    """(B, C, Y, X) -> (B, N, P): tokens row by row, features ordered (C, dy, dx)."""
    B, C, Y, X = image.shape
    packed = np.empty((B, Y // 2 * (X // 2), 4 * C), image.dtype)
    for token, (y, x) in enumerate((y, x) for y in range(0, Y, 2) for x in range(0, X, 2)):
        for feature, (c, dy, dx) in enumerate(np.ndindex(C, 2, 2)):
            packed[:, token, feature] = image[:, c, y + dy, x + dx]
    return packed


def reference(batch):
    """MLPerf's formulas in float64, as (B, C, Y, X): the latent, the point at t, the target."""
    values = {name: tensor.double().numpy() for name, tensor in batch.items()}
    noise = values["noise"]
    x = (values["mean"] + np.exp(0.5 * values["logvar"]) * values["latent_eps"] - 0.1159) * 0.3611
    t = values["t"].reshape(-1, 1, 1, 1)
    return x, (1 - t) * x + t * noise, noise - x


def test_the_net_is_asked_at_x_t_and_its_error_is_averaged_per_sample_in_fp32(batch):
    """Whatever its dtype: inputs reach the net in the order (x_t, t5, clip, t), and t stays fp32."""
    _, x_t, target = reference(batch)
    for dtype in (torch.float32, torch.bfloat16):
        answer = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(7)).to(dtype)
        asked = []
        losses = flow.losses(lambda *args, asked=asked, answer=answer: (asked.extend(args), answer)[1], batch, dtype)
        x_BNP, *rest, t_B = asked
        rtol = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(x_BNP, torch.from_numpy(pack_by_loops(x_t)).to(dtype), rtol=rtol, atol=1e-6)
        assert all(map(torch.equal, rest, (batch["t5"].to(dtype), batch["clip"].to(dtype))))
        assert torch.equal(t_B, batch["t"]) and losses.dtype == t_B.dtype == torch.float32
        error = answer.double().numpy() - pack_by_loops(target)
        np.testing.assert_allclose(losses, (error**2).reshape(3, -1).mean(axis=1), rtol=1e-6)


def test_latent_agrees_with_the_reference(batch):
    """Without spread, `unscale` gives the mean again."""
    mean = batch["mean"].float()
    latent = flow.sample_latent(batch["mean"], batch["logvar"], batch["latent_eps"])
    assert latent.dtype == torch.float32
    np.testing.assert_allclose(latent, reference(batch)[0], rtol=1e-6, atol=1e-6)
    unscaled = flow.unscale(flow.sample_latent(mean, batch["logvar"], torch.zeros(SHAPE)))
    torch.testing.assert_close(unscaled, mean, rtol=1e-6, atol=1e-6)
