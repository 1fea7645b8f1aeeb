"""The objective and the latents, against a second implementation in numpy float64."""

import numpy as np
import torch
from torch import Tensor, nn

from flux_ref import flow, latents

SHAPE = (3, 16, 4, 6)  # B, C, Y, X


def batch_of(seed: int = 0, t: tuple[float, ...] = (0.0, 0.375, 0.9)) -> dict[str, Tensor]:
    """A batch as the loader gives it; text is not looked at by the nets of this file."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(SHAPE) for name in ("mean", "logvar", "latent_eps", "noise")}
    arrays |= {"t5": rng.standard_normal((3, 9, 28)), "clip": rng.standard_normal((3, 14)), "t": np.array(t)}
    batch = {name: torch.from_numpy(array).float() for name, array in arrays.items()}
    return batch | {name: batch[name].bfloat16() for name in ("mean", "logvar", "t5", "clip")}


def pack_by_loops(image: np.ndarray) -> np.ndarray:
    """(B, C, Y, X) -> (B, N, P): tokens row by row, features ordered (C, dy, dx)."""
    B, C, Y, X = image.shape
    packed = np.empty((B, Y // 2 * (X // 2), 4 * C), image.dtype)
    for token, (y, x) in enumerate((y, x) for y in range(0, Y, 2) for x in range(0, X, 2)):
        for feature, (c, dy, dx) in enumerate(np.ndindex(C, 2, 2)):
            packed[:, token, feature] = image[:, c, y + dy, x + dx]
    return packed


def reference(batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """MLPerf's formulas in float64, as (B, C, Y, X): the latent, the point at t, the target."""
    mean, logvar, eps, noise, t = (
        batch[name].double().numpy() for name in ("mean", "logvar", "latent_eps", "noise", "t")
    )
    x = (mean + np.exp(0.5 * logvar) * eps - 0.1159) * 0.3611
    t = t.reshape(-1, 1, 1, 1)
    return {"latent": x, "x_t": (1 - t) * x + t * noise, "target": noise - x}


class Stub(nn.Module):
    """A net that answers with a fixed tensor and remembers how it was asked."""

    def __init__(self, answer: Tensor):
        super().__init__()
        self.answer = answer

    def forward(self, *args: Tensor) -> Tensor:
        self.args = args
        return self.answer


def random_answer() -> Tensor:
    return torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(7))


def test_the_net_is_asked_at_x_t_and_its_error_is_averaged_per_sample_in_fp32():
    """Whatever its dtype: inputs reach the net in the order (x_t, t5, clip, t), and t stays fp32."""
    batch = batch_of()
    want = reference(batch)
    for dtype in (torch.float32, torch.bfloat16):
        net = Stub(random_answer().to(dtype))
        losses = flow.losses(net, batch, dtype)
        x_BNP, t5_BTE, clip_BV, t_B = net.args
        rtol = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(x_BNP, torch.from_numpy(pack_by_loops(want["x_t"])).to(dtype), rtol=rtol, atol=1e-6)
        assert torch.equal(t5_BTE, batch["t5"].to(dtype)) and torch.equal(clip_BV, batch["clip"].to(dtype))
        assert torch.equal(t_B, batch["t"]) and losses.dtype == t_B.dtype == torch.float32
        error = net.answer.double().numpy() - pack_by_loops(want["target"])
        np.testing.assert_allclose(losses, (error**2).reshape(3, -1).mean(axis=1), rtol=1e-6)


def test_latent_agrees_with_the_reference():
    """Without spread, `unscale` gives the mean again."""
    batch = batch_of()
    latent = latents.sample(batch["mean"], batch["logvar"], batch["latent_eps"])
    assert latent.dtype == torch.float32
    np.testing.assert_allclose(latent, reference(batch)["latent"], rtol=1e-6, atol=1e-6)
    mean = batch["mean"].float()
    unscaled = latents.unscale(latents.sample(mean, batch["logvar"], torch.zeros(SHAPE)))
    torch.testing.assert_close(unscaled, mean, rtol=1e-6, atol=1e-6)


def test_one_step_with_the_true_velocity_from_1_to_0_gives_the_data():
    """x + (0 - 1) * velocity, starting at the noise. The true velocity has no loss."""
    batch = batch_of()
    velocity = latents.pack(batch["noise"] - latents.sample(batch["mean"], batch["logvar"], batch["latent_eps"]))
    assert torch.equal(flow.losses(Stub(velocity), batch, torch.float32), torch.zeros(3))
    stepped = latents.unpack(latents.pack(batch["noise"]) + (0.0 - 1.0) * velocity, 4, 6)
    np.testing.assert_allclose(stepped, reference(batch)["latent"], rtol=1e-5, atol=1e-6)


def test_pack_orders_tokens_and_features_and_unpack_inverts_it():
    for shape in ((1, 1, 2, 2), (2, 3, 4, 6), (1, 2, 10, 2), (1, 16, 32, 32)):
        image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        packed = latents.pack(torch.from_numpy(image))
        np.testing.assert_array_equal(packed, pack_by_loops(image))
        np.testing.assert_array_equal(latents.unpack(packed, *shape[2:]), image)


def test_image_positions_follow_the_packed_tokens():
    """Each token's position is the row and column of its patch."""
    rows, columns = np.meshgrid(np.arange(6) // 2, np.arange(10) // 2, indexing="ij")
    packed = latents.pack(torch.from_numpy(np.stack((0 * rows, rows, columns)))[None])
    positions = latents.image_positions(6, 10)
    assert positions.dtype == torch.float64
    np.testing.assert_array_equal(positions, packed[0, :, ::4])
