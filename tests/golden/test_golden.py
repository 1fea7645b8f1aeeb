"""The golden values: they are what this code computes, any sound port passes, and planted mistakes are named."""

import inspect
import json
import re
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from flux_ref import config_file, data, evaluate, flow, latents, model, optim, rng, schedule, sharding, step
from flux_ref.golden import commands as golden
from flux_ref.golden import places, record
from flux_ref.golden.commands import FOLDER, Golden
from flux_ref.speed import fp8

CFG = config_file.load(FOLDER / golden.CONFIG)


@pytest.fixture(scope="module")
def kept() -> Golden:
    return Golden(FOLDER)


def recorded(kept: Golden) -> dict[str, np.ndarray]:
    """What this process computes, planted mistakes included, as a port's dump."""
    return {name: value.array for name, value in record.record(CFG, kept.given()).items()}


@pytest.fixture(scope="module")
def ours(kept) -> dict[str, np.ndarray]:
    return recorded(kept)


def checked(dump: dict[str, np.ndarray], tmp_path, capsys) -> SimpleNamespace:
    """What `check --from` says of a dump: the exit code, the first place, and the text."""
    safetensors.numpy.save_file({name: np.array(array, order="C") for name, array in dump.items()}, tmp_path / "dump")
    capsys.readouterr()
    code = golden.main(["check", "--from", str(tmp_path / "dump")])
    text = capsys.readouterr().out
    first = re.search(r"^first difference: (.*)$", text, re.M)
    return SimpleNamespace(code=code, first=first and first[1], text=text)


# They are ours


def test_replay_agrees_in_every_place(kept, ours, capsys):
    assert list(ours) == [value.name for value in kept.values], "record them anew: python -m flux_ref.golden write"
    found = {name: golden.of_array(array) for name, array in ours.items()}
    assert golden.report(kept, found, []) == (0, 0)
    assert "first difference" not in capsys.readouterr().out


def test_check_without_a_dump_replays(capsys):
    assert golden.main(["check"]) == 0
    assert re.fullmatch(r"\d+ places compared, 0 differ, 0 missing, 0 unknown\n", capsys.readouterr().out)


def test_inputs_are_what_the_generator_gives(kept):
    """So that a port may draw them itself."""
    again, given = record.inputs(CFG), kept.given()
    assert again.keys() == given.keys()
    assert all(np.array_equal(again[name], given[name]) for name in given)


def test_other_tools_read_the_file(kept):
    arrays = safetensors.numpy.load_file(FOLDER / golden.VALUES)
    assert arrays.keys() == {value.name for value in kept.values}
    for value in kept.values:
        assert list(arrays[value.name].shape) == value.shape
        assert np.array_equal(arrays[value.name], kept.file.read(value.name))


def test_axes_have_different_sizes():
    m = CFG.model
    sizes = [CFG.train.global_batch, *m.latent_shape, m.image_tokens, m.packed_channels, m.text_tokens, m.hidden]
    sizes += [m.image_tokens + m.text_tokens, m.heads, m.head_dim, m.head_dim // 2, m.mlp_ratio * m.hidden, m.t5_dim]
    sizes += [m.clip_dim, model.TIME_WAVES]
    assert len(set(sizes)) == len(sizes)


def test_the_run_shows_what_it_should(kept):
    """A dropped caption in the first batch, another epoch, clipping in every step, values that are not 0."""
    read = kept.file.read
    empty = read("data.empty.t5")
    assert [np.array_equal(text, empty) for text in read("batch.t5")] == [False, True]
    assert record.STEPS * CFG.train.global_batch > CFG.data.train_count
    assert all(read(f"step{number}.clip_coefficient") < 1 for number in (1, 2, 3))
    assert all(read(value.name).any() for value in kept.values)
    assert sum((FOLDER / name).stat().st_size for name in (golden.VALUES, golden.INDEX)) < 1e6


def test_every_place_is_used_and_every_value_has_one(kept):
    used = {places.place(value.name) for value in kept.values}
    assert used == {*places.PLACES, *places.OF_BF16}
    for value in kept.values:
        assert value.meaning == places.meaning(value.name)
        assert (value.atol, value.rtol) == places.place(value.name).kind.tolerances(kept.file.read(value.name))


# Sound ports pass


class DoubleAdamW(torch.optim.AdamW):
    """Whose fused kernel wants these two in fp32 even so."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value.to(torch.float32) if name in ("grad_scale", "found_inf") else value)


def test_a_port_in_fp64_passes(kept, monkeypatch, tmp_path, capsys):
    """Every .float(), every new tensor, parameters and batches: double. The fp32 tolerances are not too tight."""
    fields = data.fields(CFG.model)
    wide = {
        name: (shape, torch.float64 if dtype == torch.float32 else dtype) for name, (shape, dtype) in fields.items()
    }
    monkeypatch.setattr(data, "fields", lambda model: wide)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.optim, "AdamW", DoubleAdamW)
    monkeypatch.setitem(sharding.DTYPES, "fp32", torch.float64)
    for section in ("_bf16", "_fp8"):
        monkeypatch.setattr(record, section, lambda *args: None)
    torch.set_default_dtype(torch.float64)
    try:
        dump = recorded(kept)
    finally:
        torch.set_default_dtype(torch.float32)
    doubles = {name for name, array in dump.items() if array.dtype == np.float64}
    assert {"prediction", "grad.img_in.weight", "step3.weights.img_in.weight", "single_blocks.2"} <= doubles
    found = checked(dump, tmp_path, capsys)
    assert found.code == 0, found.text


def test_more_threads_pass(kept, tmp_path, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        dump = recorded(kept)
    finally:
        torch.set_num_threads(before)
    found = checked(dump, tmp_path, capsys)
    assert found.code == 0, found.text


def test_a_part_passes_and_the_rest_is_listed(kept, ours, tmp_path, capsys):
    part = {name: ours[name] for name in ("prediction", "loss", "rope")}
    found = checked(part | {"my_own": np.zeros(3, np.float32)}, tmp_path, capsys)
    assert found.code == 0
    assert found.text.startswith("3 places compared, 0 differ, ")
    assert (
        re.search(r"missing:\n  draws\.\* \(16\), init\.\* \(4\), batch\.\* \(7\), latent, x_t, ", found.text)
        and "unknown:\n  my_own" in found.text
    )
    assert "weights.img_in.bias" not in found.text.replace("step1.weights.img_in.bias", ""), "inputs are never missing"


def test_unsigned_words_may_come_as_signed_ones(ours, tmp_path, capsys):
    part = {name: array.view(np.int64) for name, array in ours.items() if array.dtype == np.uint64}
    assert len(part) == 6 and checked(part, tmp_path, capsys).code == 0


# Planted mistakes

EPS_INSIDE = """
    for shard in self.shards:
        state, c1, c2 = self.adamw.state[shard], 1 - 0.9 ** self.number, 1 - 0.95 ** self.number
        m, v = state["exp_avg"] / c1, state["exp_avg_sq"] / c2
        shard.data += self.lr * (m / (v.sqrt() + 1e-8) - m / (v + 1e-8).sqrt())
"""
DROPPED = """if draws.train_draw(1, 0, sample, self.cfg.model.latent_shape, 0.4).drop_caption:
        rows["t5"][i] = rows["clip"][i] = 0
    rows["timestep"][i], rows["t"][i] ="""

# What goes wrong: the place and the cause to be named, the function, and (what it says, what the planted one says).
MISTAKES = {
    "counter from 0": (
        "draws.words.0",
        "begins at 1",
        rng,
        "words",
        ("start // 4, sample", "start // 4 + 1, sample"),
    ),
    "32 bits of t": ("draws.uniform", "can round to 1", rng, "uniform", ("40)) * 2.0**-24", "32)) * 2.0**-32")),
    "sine first": (
        "draws.normal",
        "the cosine comes first",
        rng,
        "normal",
        ("0] = radius * np.cos", "0] = radius * np.sin"),
        ("1] = radius * np.sin", "1] = radius * np.cos"),
    ),
    "ranks for order": ("draws.order.0", "not its inverse", rng, "order", ('"stable")', '"stable").argsort()')),
    "streams": ("draws.latent_eps", "LATENT is 2", rng, "train_draw", ("seed, LATENT", "seed, NOISE")),
    "empty caption is 0": (
        "batch.t5",
        "not zeros",
        data.TrainSet,
        "_fill",
        ('self.empty["t5"], self.empty["clip"]', "0, 0"),
    ),
    "init": ("init.img_in.weight", "Xavier-uniform", sharding, "initialiser", ("6.0 /", "3.0 /")),
    "latent shift": ("latent", "scale/shift order", latents, "sample", ("(z_BCYX - SHIFT)", "z_BCYX - SHIFT")),
    "variance": ("latent", "exp(logvar) the variance", latents, "sample", ("0.5 * logvar", "logvar")),
    "x_t direction": (
        "x_t",
        "x_t direction",
        flow,
        "interpolate",
        ("(1.0 - t_B111) * latent_BCYX + t_B111 * noise", "t_B111 * latent_BCYX + (1.0 - t_B111) * noise"),
    ),
    "velocity sign": (
        "target",
        "velocity sign",
        flow,
        "losses",
        ('batch["noise"] - latent_BCYX', 'latent_BCYX - batch["noise"]'),
    ),
    "patch order": ("target", "patch feature order", latents, "pack", ("1, 3, 5)", "3, 5, 1)")),
    "cos/sin in rope": (
        "rope",
        "the cosine is first",
        model,
        "rope_table",
        ("angle_SR.cos(), angle_SR.sin()", "angle_SR.sin(), angle_SR.cos()"),
    ),
    "cos/sin of t": (
        "time_waves",
        "128 cosines",
        model,
        "time_waves",
        ("(angle.cos(), angle.sin())", "(angle.sin(), angle.cos())"),
    ),
    "1000 t in bf16": (
        "time_waves",
        "steps of 4",
        model,
        "time_waves",
        ("1000.0 * t_B.float()", "(1000.0 * t_B).bfloat16().float()"),
    ),
    "no 1000": ("time_waves", "1000 is missing", model, "time_waves", ("1000.0 * ", "")),
    "silu of vec": (
        "double_blocks.0.img_mod.lin",
        "SiLU comes before",
        model.Modulation,
        "forward",
        ("F.silu(vec_BD)", "vec_BD"),
    ),
    "scale and shift": (
        "double_blocks.0.img_attn.qkv.input",
        "scale and shift swapped",
        model,
        "modulate",
        ("shift_B1D: Tensor, scale", "scale_B1D: Tensor, shift"),
    ),
    "eps of layer norm": (
        "double_blocks.0.img_attn.qkv.input",
        "1e-6, not 1e-5",
        model,
        "modulate",
        ("eps=NORM_EPS", "eps=1e-5"),
    ),
    "qkv order": (
        "double_blocks.0.img_attn.norm.query_norm",
        "qkv order",
        model,
        "split_heads",
        ("(3, heads, -1)", "(heads, 3, -1)"),
        ("(2, 0, 3", "(3, 0, 2"),
    ),
    "head order": (
        "double_blocks.0.img_attn.norm.query_norm",
        "head order",
        model,
        "split_heads",
        ("(3, heads, -1)", "(3, -1, heads)"),
        ("unbind(0)", "contiguous().unbind(0)"),
        ("3, 1, 4)", "4, 1, 3)"),
    ),
    "eps of RMSNorm": (
        "double_blocks.0.img_attn.norm.query_norm",
        "epsilon of RMSNorm",
        model.RMSNorm,
        "forward",
        ("eps=NORM_EPS", "eps=None"),
    ),
    "RMSNorm in bf16": (
        "double_blocks.0.img_attn.norm.query_norm",
        "RMSNorm computed in bf16",
        model.RMSNorm,
        "forward",
        ("x.float()", "x.bfloat16()"),
        ("scale.float(), eps=NORM_EPS)", "scale.bfloat16(), eps=NORM_EPS).float()"),
    ),
    "rope in halves": (
        "double_blocks.0.attention.q",
        "interleaved",
        model,
        "apply_rope",
        ("(-1, 2))", "(2, -1)).transpose(-1, -2).contiguous()"),
        ("rope_SR2)).flatten", "rope_SR2)).mT.flatten"),
    ),
    "image before text": (
        "double_blocks.0.attention.v",
        "text comes first",
        model.DoubleBlock,
        "forward",
        ("zip(txt_qkv, img_qkv)", "zip(img_qkv, txt_qkv)"),
        ("txt_out_BTD, img_out_BND =", "img_out_BND, txt_out_BTD ="),
        ("(txt_BTD.shape[1], img_BND.shape[1])", "(img_BND.shape[1], txt_BTD.shape[1])"),
    ),
    "scale of attention": (
        "double_blocks.0.attention",
        "sqrt(K)",
        model,
        "attention",
        ("k_BHSK, v_BHSK)", "k_BHSK, v_BHSK, scale=1.0)"),
    ),
    "erf": ("double_blocks.0.img_mlp.1", "tanh form", model, "mlp", ('"tanh"', '"none"')),
    "no gate": ("double_blocks.0.img", "gate is missing", model.DoubleBlock, "forward", ("img_gate2 * ", "")),
    "mean over tokens": ("losses", "mean reduction", flow, "losses", (".mean(dim=(1, 2))", ".sum(dim=2).mean(dim=1)")),
    "no clip": ("step1.clip_coefficient", "clip:", optim.ShardedAdamW, "step", ("(norm + CLIP_EPS)", "(norm * 0)")),
    "clip to 2": (
        "step1.clip_coefficient",
        "clip:",
        optim.ShardedAdamW,
        "__init__",
        ("cfg.clip_norm", "2 * cfg.clip_norm"),
    ),
    "lr off by one": ("step1.lr", "lr off by one", schedule, "lr", ("step + 1", "step")),
    "coupled decay": (
        "step1.exp_avg.img_in.weight",
        "decay coupled",
        optim.ShardedAdamW,
        "__init__",
        ("torch.optim.AdamW", "torch.optim.Adam"),
    ),
    "no bias correction": (
        "step1.weights.img_in.weight",
        "bias correction",
        optim.ShardedAdamW,
        "step",
        ("self.adamw.step()", "self.set_steps(10**6); self.adamw.step()"),
    ),
    "no decay": (
        "step1.weights.time_in.in_layer.bias",
        "decay: w",
        optim.ShardedAdamW,
        "__init__",
        ("cfg.weight_decay", "0.0"),
    ),
    "validation in the middle": (
        "val.t",
        "(timestep + 0.5) / 8",
        schedule,
        "validation_time",
        ("timestep /", "(timestep + 0.5) /"),
    ),
    "mean over samples": (
        "val.loss",
        "each counted once",
        evaluate,
        "summarise",
        ("sum(losses) / len(losses)", "sum(sums[1]) / sum(sums[0])"),
    ),
    "eps inside the root": (
        "step1.weights.img_in.weight",
        "eps outside the root",
        optim.ShardedAdamW,
        "step",
        (
            "    self.adamw.step()\n",
            "    self.number = getattr(self, 'number', 0) + 1\n    self.adamw.step()" + EPS_INSIDE,
        ),
    ),
    "sum over samples": (
        "grad.final_layer.linear.weight",
        "a sum over samples",
        step,
        "train_step",
        ('part["weight"]).sum() / rows', 'part["weight"]).sum()'),
    ),
    "caption drop in validation": (
        "val.losses",
        "caption drop in validation",
        data.ValSet,
        "_fill",
        ('rows["timestep"][i], rows["t"][i] =', DROPPED),
    ),
    "noise of training in validation": ("val.losses", "VAL_NOISE", rng, "val_draw", ("VAL_", "")),
    "RMSNorm of bf16 in bf16": (
        "bf16.rms_norm",
        "RMSNorm computed in bf16",
        model.RMSNorm,
        "forward",
        ("x.float()", "x"),
        ("scale.float(), eps=NORM_EPS)", "scale.bfloat16(), eps=NORM_EPS).float()"),
    ),
    "1000 t of bf16 in bf16": (
        "bf16.time_waves",
        "steps of 4",
        model,
        "time_waves",
        ("1000.0 * t_B.float()", "(1000.0 * t_B).bfloat16().float()"),
    ),
    "e4m3 to 240": (
        "fp8.x.scale",
        "e4m3 max",
        fp8,
        "scale_of_magnitude",
        ("largest /", "torch.as_tensor(largest).clamp(max=240) /"),
    ),
    "power of 2": (
        "fp8.x.scale",
        "power of 2",
        fp8,
        "scale_of_magnitude",
        ("(largest / amax)", "(largest / amax).log2().floor().exp2()"),
    ),
    "margin": ("fp8.delayed.scale", "margin", fp8.Fp8State, "__init__", ("/ 2**cfg.margin", "* 1.0")),
    "cap": ("fp8.delayed.scale", "at most 2^44", fp8.Fp8State, "set_scales", ("self.cfg.max_scale_exponent", "126")),
}


SECTIONS = {"draws": "_draws", "init": "_init", "val": "_validation", "bf16": "_bf16", "fp8": "_fp8"}


def plant(monkeypatch, owner: object, name: str, *changes: tuple[str, str]) -> None:
    """Let a function say something else, by editing its source."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in source, f"{name} does not say {old!r} any more"
        source = source.replace(old, new)
    scope = {}
    exec(source, function.__globals__, scope)
    monkeypatch.setattr(owner, name, scope[name])


def require_found(mistake: str, dump: dict[str, np.ndarray], tmp_path, capsys) -> None:
    place, cause, *_ = MISTAKES[mistake]
    found = checked(dump, tmp_path, capsys)
    assert found.code == 1
    assert found.first == place, found.text
    assert cause in found.text.partition("known causes:")[2].partition("after it")[0]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_where_it_is(mistake, kept, monkeypatch, tmp_path, capsys):
    """In a dump of the section where it is planted."""
    plant(monkeypatch, *MISTAKES[mistake][2:])
    prefix = MISTAKES[mistake][0].partition(".")[0]
    wanted = SECTIONS.get(prefix, "_training")
    for section in {*SECTIONS.values(), "_training"} - {wanted, "_training" if prefix == "bf16" else wanted}:
        monkeypatch.setattr(record, section, lambda *args: None)
    dump = recorded(kept)
    if prefix in SECTIONS:
        dump = {name: array for name, array in dump.items() if name.startswith(prefix)}
    require_found(mistake, dump, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [name for name in MISTAKES if not re.search("in bf16|in validation", name)])
def test_a_planted_mistake_is_found_in_a_whole_dump(mistake, kept, monkeypatch, tmp_path, capsys):
    plant(monkeypatch, *MISTAKES[mistake][2:])
    require_found(mistake, recorded(kept), tmp_path, capsys)


# What it says


def test_how_far_and_which_parameters(kept, ours, tmp_path, capsys):
    norms = ours["grad.norms"].copy()
    norms[[3, 80]] *= 1.01
    found = checked({"vec": ours["vec"], "grad.norms": norms}, tmp_path, capsys)
    assert found.first == "grad.norms"
    assert f"of {kept.parameters[80]}, {kept.parameters[3]}\n" in found.text, "in the order of backward"
    assert "2 of 88 differ; tolerance 8.0e-05 of each (of each parameter's norm; 2e-05 seen" in found.text.replace(
        "2e-5", "2e-05"
    )
    assert "all before it agree, the last of them vec" in found.text
    assert "between these, missing: double_blocks.0.img_mod.lin, " in found.text


def test_what_comes_after_the_first_is_counted_only(ours, tmp_path, capsys):
    names = ("rope", "img_in", "vec", "prediction", "loss")
    dump = {name: ours[name] * (1 if name in ("rope", "loss") else 1.5) for name in names}
    found = checked(dump, tmp_path, capsys)
    assert (found.code, found.first) == (1, "img_in")
    assert "5 places compared, 3 differ" in found.text and "after it, 2 of 3 differ" in found.text
    assert "prediction" not in found.text.partition("missing:")[0]


ALIKE = {
    "negated": ("prediction", lambda x: -x, "yours is the golden value negated"),
    "factor": ("losses", lambda x: 28 * x, "yours is 28 x golden"),
    "reordered": (
        "img",
        lambda x: x.reshape(2, 15, 7, 2, 2).swapaxes(2, 4).reshape(2, 15, 28),
        "another order along axis 2",
    ),
    "rows": ("rope", lambda x: np.roll(x, 11, 0), "another order along axis 0"),
    "layout": ("double_blocks.0.attention", lambda x: x.reshape(2, 24, 26).swapaxes(1, 2), "in another order\n"),
    "transposed": (
        "step1.weights.img_in.weight",
        lambda x: x.T,
        "shape is [28, 24], want [24, 28] (it is the transposed)",
    ),
    "turned input": ("weights.img_in.weight", lambda x: x.T, "(it is the transposed)"),
    "other place": ("double_blocks.1.img", lambda x: None, "yours is the golden value of double_blocks.0.img"),
    "too narrow": ("prediction", lambda x: x.astype(np.float16), "its dtype is F16, want F32 or F64"),
    "order": ("draws.order.0", np.argsort, "of 50 differ, first at [0]: yours"),
    "nan": ("prediction", lambda x: np.where(x > 1, np.nan, x).astype(np.float32), "elements are not finite"),
    "negated drops": ("draws.drop", lambda x: ~x, "50 of 50 differ, first at [0]: yours"),
    "words": ("draws.words.1", lambda x: x[::-1].copy(), "8 of 8 differ"),
    "shifted words": ("draws.words.1", lambda x: x - np.uint64(1), "8 of 8 differ"),
    "too large": ("rope", lambda x: np.zeros((3, 26, 4, 2), np.float32), "its shape is [3, 26, 4, 2], want [26, 4, 2]"),
    "exact": ("batch.t", lambda x: x + np.float32(1e-6), "tolerance 0 (no rounding"),
    "infinite": ("loss", lambda x: x / 0, "1 of its 1 elements are not finite"),
    "row": ("rope", lambda x: x[:1], "its shape is [1, 4, 2], want [26, 4, 2]"),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("case", ALIKE)
def test_it_tells_what_the_values_are_instead(case, ours, tmp_path, capsys):
    name, change, text = ALIKE[case]
    yours = ours["double_blocks.0.img"] if case == "other place" else change(ours[name])
    found = checked({name: yours}, tmp_path, capsys)
    assert found.code == 1 and found.first == name
    assert text in found.text, found.text


def test_bf16_of_fp32_is_refused_and_of_bf16_taken(ours, tmp_path, capsys):
    tensors = {name: torch.from_numpy(ours[name]).bfloat16() for name in ("prediction", "bf16.prediction")}
    safetensors.torch.save_file(tensors, tmp_path / "dump")
    assert golden.main(["check", "--from", str(tmp_path / "dump")]) == 1
    text = capsys.readouterr().out
    assert "first difference: prediction" in text and "its dtype is BF16, want F32 or F64" in text
    assert "2 places compared, 1 differ" in text


# Files


def bad_files(ours: dict[str, np.ndarray]) -> dict[str, tuple[bytes, str]]:
    """What is wrong with a dump -> its bytes, and what is said."""
    whole = safetensors.numpy.save({"rope": ours["rope"], "vec": ours["vec"]})

    def with_header(text: str) -> bytes:
        return len(text).to_bytes(8, "little") + text.encode() + bytes(64)

    return {
        "empty": (b"", "header is cut short"),
        "few bytes": (whole[:5], "header is cut short"),
        "cut header": (whole[:20], "header is cut short"),
        "cut data": (whole[:-1], "the bytes of vec are not all there"),
        "zip": (b"PK\x03\x04" + bytes(200), "no whole safetensors file"),
        "text": (b"name,value\nloss,3\n" * 9, "header is cut short"),
        "a list": (with_header("[]"), "no whole safetensors file"),
        "no object": (with_header('{"rope": 3}'), "no whole safetensors file"),
        "no dtype": (with_header('{"rope": {"shape": [1]}}'), "no whole safetensors file"),
        "odd dtype": (with_header('{"rope": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}'), "has dtype F4"),
        "negative": (
            with_header('{"rope": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
            "has dtype F32 and shape",
        ),
        "huge": (
            with_header('{"rope": {"dtype": "F32", "shape": [9999999999], "data_offsets": [0, 4]}}'),
            "not all there",
        ),
        "beyond": (with_header('{"rope": {"dtype": "F32", "shape": [1], "data_offsets": [64, 68]}}'), "not all there"),
        "true": (
            with_header('{"rope": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}'),
            "has dtype F32 and shape",
        ),
        "offsets": (with_header('{"rope": {"dtype": "F32", "shape": [1], "data_offsets": 4}}'), "no whole safetensors"),
        "axes": (
            with_header(json.dumps({"rope": {"dtype": "F32", "shape": [1] * 99, "data_offsets": [0, 4]}})),
            "shape (1, 1",
        ),
        "deep": (with_header("[" * 20_000), "no whole safetensors file"),
        "escapes": (
            with_header('{"\\u001b[2J": {"dtype": "?", "shape": [1], "data_offsets": [0, 4]}}'),
            "\\x1b[2J has",
        ),
        "none of ours": (safetensors.numpy.save({"pred": ours["vec"]}), "none of its 1 names is in"),
    }


def test_a_damaged_or_foreign_dump_is_one_line(ours, tmp_path, capsys):
    for case, (content, text) in bad_files(ours).items():
        (tmp_path / "dump").write_bytes(content)
        assert golden.main(["check", "--from", str(tmp_path / "dump")]) == 2, case
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("golden: "), case
        assert text in err and "\x1b" not in err, (case, err)


@pytest.mark.parametrize("path", ["missing", "."])
def test_a_dump_that_is_no_file(path, tmp_path, capsys):
    assert golden.main(["check", "--from", str(tmp_path / path)]) == 2
    assert re.fullmatch(r"golden: .*: (No such file or directory|Is a directory)\n", capsys.readouterr().err)


def test_unknown_names_are_printable(ours, tmp_path, capsys):
    found = checked({"rope": ours["rope"], "\x1b[31m\n" + "x" * 500: ours["vec"]}, tmp_path, capsys)
    assert "\x1b" not in found.text and "\\x1b[31m\\nxxx" in found.text and "x" * 101 not in found.text


def golden_copy(tmp_path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "golden"))


DAMAGE = {
    "values changed": (golden.VALUES, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is not the file that"),
    "values cut": (golden.VALUES, lambda data: data[:-1], "not all there"),
    "values gone": (golden.VALUES, None, "No such file"),
    "index gone": (golden.INDEX, None, "No such file"),
    "index cut": (golden.INDEX, lambda data: data[:-9], "is no index of golden values"),
    "index of another kind": (golden.INDEX, lambda data: b"[]", "is no index of golden values"),
    "index entry": (golden.INDEX, lambda data: data.replace(b'"atol"', b'"a"'), "is no index of golden values"),
    "index without sum": (golden.INDEX, lambda data: data.replace(b'"sha256"', b'"md5"'), "is no index of golden"),
    "config": (golden.CONFIG, lambda data: data + b"model.size = 3", "unknown key model.size"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_golden_values_are_refused(case, tmp_path, capsys):
    name, change, text = DAMAGE[case]
    folder = golden_copy(tmp_path)
    if change:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    else:
        (folder / name).unlink()
    assert golden.main(["check", "--golden", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and text in err


def test_write_gives_the_same_files_and_leaves_no_others(tmp_path, capsys):
    """As far as this processor rounds like the one they were written on."""
    folder = golden_copy(tmp_path)
    (folder / golden.VALUES).unlink()
    assert golden.main(["write", "--golden", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted((golden.CONFIG, golden.INDEX, golden.VALUES))
    assert golden.main(["check", "--from", str(folder / golden.VALUES)]) == 0
    assert golden.main(["check", "--from", str(FOLDER / golden.VALUES), "--golden", str(folder)]) == 0
    capsys.readouterr()
    assert golden.main(["write", "--from", "x", "--golden", str(folder)]) == 2
    assert "--from is for check" in capsys.readouterr().err
