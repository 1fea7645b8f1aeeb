"""The golden values: this code computes them, planted mistakes show at the right place, files are written whole."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checking import checked
from conftest import script

from flux_ref import config_file, flow, latents, model, rng, schedule, step
from tools.golden import places, precision, record, training
from tools.golden.check import main
from tools.golden.files import CONFIG, DATA, FOLDER, Golden

DATA_SET = {f"data__{split}": f"{FOLDER / DATA}/{split}" for split in ("train", "val")}
CFG = config_file.replace(config_file.load(FOLDER / CONFIG), **DATA_SET)
KEPT = Golden(FOLDER)
GIVEN = KEPT.given()
read = KEPT.arrays.__getitem__


def arrays(values: dict) -> dict[str, np.ndarray]:
    return {name: array for name, (_, array) in record.plainly(values).items()}


@pytest.fixture(scope="module")
def world():
    with record.one_process() as alone:
        yield alone


@pytest.fixture
def agree(tmp_path, capsys):
    """agree(dump): all values of a dump agree with the golden ones."""

    def require(dump: dict[str, np.ndarray]) -> None:
        result = checked(dump, tmp_path, capsys)
        assert result.code == 0 and result.text.startswith(f"{len(dump)} values compared, 0 differ, "), result.text

    return require


def test_replay_agrees_in_every_place(agree):
    """From the data set beside the values, in the order of the index."""
    ours = {name: array for name, (_, array) in record.record(GIVEN).items()}
    assert list(ours) == [value.name for value in KEPT.values], "type python -m tools.golden.record --write"
    agree(ours)


@pytest.mark.slow
def test_two_real_ranks_agree(tmp_path, capsys):
    """Over gloo, with FSDP2's own mean."""
    done = script("tests/helpers/golden_ranks.py", str(FOLDER), str(tmp_path / "dump"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert main([str(tmp_path / "dump")]) == 0
    assert capsys.readouterr().out.startswith("7 values compared, 0 differ, ")


def trained(world, **keys) -> dict[str, np.ndarray]:
    """One step with other keys."""
    return arrays(training.training(config_file.replace(CFG, **keys), world, GIVEN))


cast = precision.cast


def unclamped(x, scale, dtype):
    """Of e5m2 only: what becomes of a large value as e4m3 depends on the version of torch."""
    return (x * scale).to(dtype) if dtype == torch.float8_e5m2 else cast(x, scale, dtype)


def halves(x, rope):
    """RoPE on (r, r + K / 2)."""
    order = np.arange(x.shape[-1]).reshape(2, -1).T.ravel()
    return model_rope(x[..., order], rope)[..., np.argsort(order)]


model_rope = model.apply_rope
pack = latents.pack
interpolate = flow.interpolate
PLANTED: tuple[tuple[object, str, Callable, str, str], ...] = (
    # owner, name, what stands there instead, the first value that differs then, words of the hint
    (rng, "order", lambda seed, epoch, count: np.arange(count), "step1.sample", "no order is drawn"),
    (rng, "LATENT", rng.NOISE, "batch.latent_eps", "LATENT is 2"),
    (flow, "interpolate", lambda x, noise, t: interpolate(noise, x, t), "x_t", "t = 0 is data"),
    (latents, "pack", lambda x: pack(x.transpose(-1, -2)), "target", "tokens run column by column"),
    (model, "apply_rope", halves, "double_blocks.0.attention.q", "neighbours (2r, 2r + 1)"),
    (model, "NORM_EPS", 1e-5, "double_blocks.0.img_attn.qkv.input", "epsilon of layer norm"),
    (F, "silu", lambda x, inplace=False: F.gelu(x), "time_in", "SiLU comes before"),
    (schedule, "lr", lambda step, optim: optim.lr * step / optim.warmup_steps, "step1.lr", "off by one step"),
    (precision, "cast", unclamped, "fp8.edge.e5m2.bits", "clamp before the cast"),
)


def test_planted_mistakes_are_found_where_they_are(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 1)
    wrong = []

    def require(dump, place, hint):
        result = checked(dump, tmp_path, capsys)
        if (result.code, result.first) != (1, place) or hint not in result.text:
            wrong.append((place, result.text))

    for owner, name, instead, place, hint in PLANTED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, instead)
            dump = arrays(precision.fp8_edges(GIVEN)) if place.startswith("fp8") else trained(world)
        require(dump, place, hint)
    require(trained(world, optim__weight_decay=0.0), "step1.weights.img_in.weight", "decay: it is missing")
    require(trained(world, optim__beta2=0.999), "step1.exp_avg_sq.img_in.weight", "the beta of this moment is 0.95")
    assert not wrong


def test_a_sum_over_micro_batches_is_found(world, tmp_path, capsys, monkeypatch):
    """train_step's own accumulation, which the values ranks.* hold."""
    real = step.train_step
    monkeypatch.setattr(step, "train_step", lambda *args: tuple(2 * x for x in real(*args)))
    result = checked(arrays(training.on_two_ranks(CFG, world, GIVEN)), tmp_path, capsys)
    assert result.first == "ranks.loss" and "its share of the rank's rows" in result.text, result.text


def test_the_run_shows_what_it_should():
    """A dropped caption, clipped and unclipped steps, epochs that begin in a step, values that are not 0."""
    assert [np.array_equal(text, read("data.empty.t5")) for text in read("batch.t5")] == [False, True]
    clips = [read(f"step{number}.clip_coefficient").item() for number in range(1, training.STEPS + 1)]
    assert min(clips) < 0.9 and clips.count(1) > 1, clips
    assert read("step3.epoch").tolist() == [0, 1] and read("ranks.epoch").tolist() == [[0, 1], [1, 1]]
    zeros = [value.name for value in KEPT.values if not read(value.name).any()]
    assert [name for name in zeros if not name.endswith((".drop", ".epoch"))] == []


def test_every_place_is_used_and_every_value_has_one():
    used = {id(places.place(value.name)) for value in KEPT.values}
    assert used == {id(place) for place in places.PLACES.values()}
    for value in KEPT.values:
        place = places.place(value.name)
        assert (value.meaning, value.why) == (place.meaning, place.why)
        assert (value.atol, value.rtol) == place.tolerances(read(value.name), CFG.optim.lr)
        assert value.inputs == places.inputs_of(value.name) and not any(hint.isupper() for hint in place.hints)


def test_write_keeps_bits_that_agree_and_takes_those_that_do_not(tmp_path, monkeypatch, capsys):
    factors = {"step1.loss": np.float32(1 + 1e-6), "step2.loss": np.float32(1.5)}

    def recorded(given):
        found = {}
        for value in KEPT.values:
            array = read(value.name)
            found[value.name] = value.dtype, np.asarray(array * factors.get(value.name, array.dtype.type(1)))
        return found

    monkeypatch.setattr(record, "record", recorded)
    record.write(tmp_path)
    again = Golden(tmp_path)
    assert [name for name in KEPT.arrays if not np.array_equal(again.arrays[name], read(name))] == ["step2.loss"]
    capsys.readouterr()
    assert record.main([]) == 1
    out = capsys.readouterr().out
    assert f"{len(KEPT.values)} values compared, 1 differ, 0 missing, 0 unknown" in out and "step2.loss" in out
