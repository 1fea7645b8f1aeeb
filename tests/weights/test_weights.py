"""Weights of every form fill a net bit for bit at any number of ranks. Files that do not fit are refused."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
import rank_runs
import torch
from conftest import MICRO, called, data_overrides, micro_run, refusal, require_identical, the_line, trained
from lively_nets import lively
from peer_net import to_diffusers
from safetensors.torch import save_file

from bench.fake_ranks import fake_world
from flux_ref import config_file, sharding, weights
from flux_ref.model import parameter_table

CFG = config_file.load(MICRO)
NARROW = config_file.replace(CFG, **rank_runs.NARROW)
FORMS = ("bfl", "diffusers", "pipeline", "checkpoint", "run")


def tensors_of(model):
    """In bf16's values, so that files in fp32 and bf16 hold the same."""
    return {name: lively(name, shape).bfloat16().float() for name, shape in parameter_table(model).items()}


def write_diffusers(folder, model, dtype=torch.float32):
    """A transformer folder of three files; the rows of one of our tensors lie in different files."""
    folder.mkdir(parents=True)
    tensors = list(to_diffusers(tensors_of(model), model).items())
    for number in range(3):
        part = {name: tensor.to(dtype) for name, tensor in tensors[number::3]}
        save_file(part, folder / f"part_{number}.safetensors", {"format": "pt"})
    return folder


def write_run(folder, data, source, *overrides):
    """train.py with a rate of 0 from weights of any form: its checkpoint holds what it started from."""
    still = ["--optim.lr=0", "--train.max_samples=12", f"--init.weights={source}", "--eval.noise=fixed"]
    return called("train.py", *micro_run(data, folder, *still, *overrides))


@pytest.fixture(scope="module")
def kept(shapes_dir, tmp_path_factory):
    """A folder of the same weights in FORMS; tests must not change it."""
    folder = tmp_path_factory.mktemp("kept")
    save_file({name: tensor.bfloat16() for name, tensor in tensors_of(CFG.model).items()}, folder / "bfl")
    write_diffusers(folder / "diffusers", CFG.model, torch.bfloat16)
    write_diffusers(folder / "pipeline" / "transformer", CFG.model)
    save_file({"encoder.conv_in.bias": torch.zeros(1)}, folder / "pipeline" / "ae.safetensors")  # lies there, too
    assert write_run(folder / "run", shapes_dir, folder / "bfl", "--eval.at_start=true") == 0
    shutil.copytree(weights.find(folder / "run"), folder / "checkpoint")
    return folder


def foreign():
    """What, the files of a folder, the weights that they mean."""
    plain = tensors_of(CFG.model)
    theirs = to_diffusers(plain, CFG.model)
    one = "diffusion_pytorch_model.safetensors"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        want = {name: tensor.to(dtype).float() for name, tensor in plain.items()}
        file = {name: tensor.to(dtype) for name, tensor in theirs.items()}
        yield f"diffusers, {dtype}", {one: file}, want
    yield "a variant of diffusers", {one.replace(".", ".fp16.", 1): file}, want
    names = [*file]
    shards = {f"diffusion_pytorch_model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    yield "shards", {name: {key: file[key] for key in keys} for name, keys in shards.items()}, want
    yield "BFL's names", {"x.safetensors": plain}, plain
    stored = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in plain.items()}
    yield "e4m3", {"x.safetensors": stored}, {name: tensor.float() for name, tensor in stored.items()}


def test_weights_as_other_programs_write_them_are_read(tmp_path):
    """In fp32, bit for bit."""
    wrong = {}
    for what, files, want in foreign():
        folder = tmp_path / what
        folder.mkdir()
        for name, content in files.items():
            save_file(content, folder / name)
        source = weights.open_source(weights.find(folder), CFG.model)
        found = {name: source.read(name, 0, len(tensor)) for name, tensor in want.items()}
        if unlike := [name for name in want if not torch.equal(found[name], want[name])]:
            wrong[what] = f"{unlike[0]} and {len(unlike) - 1} others differ"
    assert wrong == {}


def require_filled(path, cfg, rank):
    """A rank of three gets its own rows in fp32, and reads no others."""
    with fake_world(3, rank) as world:
        net = sharding.build(cfg, world, seed=None)
        source = weights.open_source(weights.find(path), cfg.model)
        read = mock.Mock(wraps=source.stored)
        weights.load(net, dataclasses.replace(source, stored=read))
        rows = {name: sharding.local_rows(parameter) for name, parameter in sharding.named_parameters(net).items()}
    want = tensors_of(cfg.model)
    found = {name: local for name, (_, local) in rows.items()}
    require_identical(found, {name: want[name][first:][: len(local)] for name, (first, local) in rows.items()})
    assert sum(call.args[2] for call in read.call_args_list) == sum(map(len, found.values())), path


def test_three_ranks_read_the_same_weights_and_each_only_its_own(kept, tmp_path):
    save_file(tensors_of(NARROW.model), tmp_path / "bfl")  # the third rank has no rows of some parameters
    write_diffusers(tmp_path / "split", NARROW.model)
    for form in FORMS:
        require_filled(kept / form, CFG, rank=1)
    for rank in range(3):
        for name in ("bfl", "split"):
            require_filled(tmp_path / name, NARROW, rank)


def test_a_nan_that_one_rank_meets_is_the_same_line_on_every_rank(measured):
    line, *others = measured[3]["loading a NaN"]
    assert line.startswith("rank 2: ") and "img_in.weight" in line and "NaN" in line
    assert others == [line] * 2


def test_training_starts_from_exactly_these_weights(kept, shapes_dir, attempt):
    """A run of rate 0 saves them again, and its validation before the first step is eval.py's."""
    require_identical(trained(kept / "run"), tensors_of(CFG.model))
    options = ["--json", f"--config={MICRO}", *data_overrides(shapes_dir), "--eval.noise=fixed"]
    _, out, _ = attempt(kept / "bfl", *options, name="eval.py")
    first = json.loads((kept / "run" / "eval.jsonl").read_text().splitlines()[0])
    assert first["samples"] == 0 and json.loads(out)["val_loss"] == first["val_loss"]


def test_weights_that_do_not_fit_are_refused_and_no_run_is_left(kept, shapes_dir, tmp_path, capsys):
    save_file({name: tensor.fill_(3e38) for name, tensor in tensors_of(CFG.model).items()}, tmp_path / "large")
    for path, more, code, words in (
        (
            kept / "run",
            ["--model.single_blocks=4"],
            2,
            "does not fit in 16 tensors, such as: single_blocks.2.linear1.bias is missing",
        ),
        (kept / "no such", [], 2, "no such does not exist"),
        (tmp_path / "large", [], 3, "is not finite: weights of init.weights or of a checkpoint are"),
    ):
        assert write_run(tmp_path / "run", shapes_dir, path, *more) == code
        assert words in the_line(capsys.readouterr().err) and not (tmp_path / "run").exists()


def test_of_a_run_the_newest_whole_checkpoint_is_meant(tmp_path):
    assert f"{tmp_path} does not exist, or holds no checkpoint and no safetensors; give" in refusal(
        weights.find, tmp_path
    )
    for name in ("step_000000002", "step_000000010", ".step_000000011.ab12"):  # the last is a save under way
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    assert weights.find(tmp_path) == tmp_path / "checkpoints" / "step_000000010"


def bfl(folder, **changes):
    """BFL's file with changed tensors; with None they are absent."""
    tensors = tensors_of(CFG.model) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "w.safetensors")
    return folder / "w.safetensors"


def diffusers(folder, make):
    """A transformer folder of which a file is made anew."""
    path = write_diffusers(folder / "transformer", CFG.model) / "part_1.safetensors"
    path.unlink()
    make(path)
    return folder


BIAS = "img_in.bias"
REFUSED = {  # words of the line -> what makes it in a folder
    "fit in 3 tensors, such as: img_in.bias is missing, want (24,)": lambda folder: bfl(
        folder, **{BIAS: None, "x": torch.zeros(1), "img_in.weight": torch.zeros(1)}
    ),
    "fit in 1 tensors, such as: img_in.bias is (1,), want (24,)": lambda folder: bfl(folder, **{BIAS: torch.zeros(1)}),
    "img_in.bias holds NaN or infinite": lambda folder: bfl(folder, **{BIAS: torch.full((24,), -math.inf)}),
    "part_1.safetensors cannot be read as safetensors: ": lambda folder: diffusers(folder, Path.touch),
    " is missing": lambda folder: diffusers(folder, lambda path: None),
    "fit in 2 tensors, such as: guidance_in.in_layer.bias is (1,), want none": lambda folder: bfl(
        folder, **{f"guidance_in.in_layer.{kind}": torch.zeros(1) for kind in ("weight", "bias")}
    ),
    "img_in.bias is torch.int8, want floating point": lambda folder: bfl(
        folder, **{BIAS: torch.ones(24, dtype=torch.int8)}
    ),
    "part_1.safetensors and part_0.safetensors both hold ": lambda folder: diffusers(
        folder, lambda path: shutil.copy(path.with_name("part_0.safetensors"), path)
    ),
}


def test_what_is_wrong_is_one_line_that_names_the_file(tmp_path):
    def read(path):
        source = weights.open_source(weights.find(path), CFG.model)
        source.read(BIAS, 0, 24)

    for number, (words, make) in enumerate(REFUSED.items()):
        (tmp_path / str(number)).mkdir()
        line = refusal(read, make(tmp_path / str(number)))
        assert words in line and f"{tmp_path}/{number}/" in line, line


def test_without_a_config_the_sizes_are_schnells(kept):
    line = refusal(weights.open_source, kept / "bfl", weights.config_of(kept / "bfl", None).model)
    assert "fit in 775 tensors, such as: double_blocks.0.img_attn.norm.key_norm.scale is (8,), want (128,)" in line
    assert weights.config_of(kept / "bfl", str(MICRO)).model == CFG.model
