"""Weights of every form fill a net bit for bit at any number of ranks. Files that do not fit, are damaged or mean harm
are refused in one line."""

import dataclasses
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import rank_runs
import torch
from conftest import MICRO, called, data_overrides, micro_run, refusal, require_identical, the_line
from fake_world import fake_world
from lively_nets import lively
from payload import Payload
from peer_net import to_diffusers
from safetensors.torch import save_file
from torch import Tensor, nn

from flux_ref import config, config_file, diffusers_names, errors, sharding, weights
from flux_ref.checkpoint import Checkpoint
from flux_ref.config import ModelConfig
from flux_ref.model import parameter_table

CFG = config_file.load(MICRO)
NARROW = config_file.replace(CFG, **rank_runs.NARROW)
FILE = "diffusion_pytorch_model.safetensors"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
KINDS = {  # name of a form below the folder that holds them all -> what it is recognised as
    "bfl.safetensors": "BFL",
    "bf16.safetensors": "BFL",
    "f16.safetensors": "BFL",
    "diffusers": "diffusers",
    "diffusers_bf16": "diffusers",
    "diffusers_in_three": "diffusers",
    "pipeline": "diffusers",
    "checkpoint": "checkpoint",
    "run": "checkpoint",
}


def tensors_of(model: ModelConfig) -> dict[str, Tensor]:
    return {name: lively(name, shape) for name, shape in parameter_table(model).items()}


def rounded(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values that a form keeps of these weights, as fp32."""
    dtype = next((dtype for part, dtype in DTYPES.items() if part in kind), torch.float32)
    return {name: tensor.to(dtype).float() for name, tensor in tensors.items()}


def write_diffusers(folder: Path, model: ModelConfig, tensors: dict[str, Tensor], files: int = 1) -> None:
    """A transformer folder as diffusers writes it, by a map of the tests' own."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(diffusers_names.diffusers_config(model)))
    renamed = {name: tensor.contiguous() for name, tensor in to_diffusers(tensors, model.hidden).items()}
    for number in range(files):
        file = FILE if files == 1 else f"diffusion_pytorch_model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(renamed.items())[number::files])  # the rows of one of our tensors lie in different files
        save_file(part, folder / file, {"format": "pt"})


def write_run(folder: Path, data: Path, source: Path, *overrides: str) -> int:
    """train.py with a rate of 0 from weights of any form: its checkpoint holds what it started from."""
    still = ["--optim.lr=0", "--train.max_samples=12", f"--init.weights={source}"]
    return called("train.py", *micro_run(data, folder, *still, *overrides))


@pytest.fixture(scope="module")
def kept(shapes_dir, tmp_path_factory) -> Path:
    """A folder of the same weights in every form; tests must not change it."""
    folder, model = tmp_path_factory.mktemp("kept"), CFG.model
    tensors = tensors_of(model)
    save_file(tensors, folder / "bfl.safetensors")
    for name, dtype in DTYPES.items():
        save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / f"{name}.safetensors")
    write_diffusers(folder / "diffusers", model, tensors)
    halved = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_diffusers(folder / "diffusers_bf16", model, halved)
    write_diffusers(folder / "diffusers_in_three", model, tensors, files=3)
    write_diffusers(folder / "pipeline" / "transformer", model, tensors)
    save_file({"encoder.conv_in.bias": torch.zeros(1)}, folder / "pipeline" / "ae.safetensors")  # lies there, too
    assert write_run(folder / "run", shapes_dir, folder / "bfl.safetensors") == 0
    shutil.copytree(weights.find(folder / "run"), folder / "checkpoint")
    return folder


def opened(path: Path, model: ModelConfig, step: int | None = None) -> weights.Source:
    return weights.open_source(weights.find(path, step), model)


def read_all(path: Path, given: str | None = str(MICRO)) -> int:
    """The exit code of a command that reads all weights at a path."""

    def read() -> int:
        found = weights.find(path)
        model = weights.config_of(found, given).model
        source = weights.open_source(found, model)
        for name, shape in parameter_table(model).items():
            source.read(name, 0, shape[0])
        return 0

    return errors.run("weights", lambda _: read(), [])


def require_filled(net: nn.Module, path: Path, cfg: config.Config, want: dict[str, Tensor]) -> None:
    """Load a rank's net: it gets its own rows in fp32, and reads no others."""
    rows = {name: sharding.local_rows(parameter) for name, parameter in sharding.named_parameters(net).items()}
    with torch.no_grad():
        for _, local in rows.values():
            local.zero_()
    source = opened(path, cfg.model)
    read = mock.Mock(wraps=source.stored)
    weights.load(net, dataclasses.replace(source, stored=read))
    for name, (first, local) in rows.items():
        require_identical({name: local}, {name: want[name][first : first + len(local)]})
    assert sum(call.args[2] for call in read.call_args_list) == sum(len(local) for _, local in rows.values()), path


def test_three_ranks_read_the_same_weights_and_each_only_its_own(kept, tmp_path):
    narrow = tensors_of(NARROW.model)  # the third rank has no rows of some parameters
    save_file(narrow, tmp_path / "bfl")
    write_diffusers(tmp_path / "split", NARROW.model, narrow, files=2)
    wanted = {kind: rounded(kind, tensors_of(CFG.model)) for kind in KINDS}
    for rank in range(3):
        with fake_world(3, rank) as world:
            net = sharding.build(CFG, world, seed=None)
            for kind, want in wanted.items():
                require_filled(net, kept / kind, CFG, want)
            net = sharding.build(NARROW, world, seed=None)
            for name in ("bfl", "split"):
                require_filled(net, tmp_path / name, NARROW, narrow)


def test_a_nan_that_one_rank_meets_is_the_same_line_on_every_rank(measured):
    line, *others = measured[3]["loading a NaN"]
    assert line.startswith("rank 2: ") and "img_in.weight" in line and "NaN" in line
    assert others == [line] * 2


def test_training_starts_from_exactly_these_weights(kept, shapes_dir, tmp_path, attempt, capsys):
    """A run of rate 0 saves them again, and its validation before the first step is eval.py's."""
    fixed, source = "--eval.noise=fixed", kept / "f16.safetensors"
    assert write_run(tmp_path / "run", shapes_dir, source, "--eval.at_start=true", fixed) == 0
    assert f"  weights init.weights={source}\n" in capsys.readouterr().out
    saved = Checkpoint(weights.find(tmp_path / "run"))
    model = {key.removeprefix("model."): saved.read(key) for key in saved.tensors if key.startswith("model.")}
    require_identical(model, rounded("f16", tensors_of(CFG.model)))

    options = ["--json", f"--config={MICRO}", *data_overrides(shapes_dir), fixed]
    code, out, _ = attempt(source, *options, name="eval.py")
    first = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[0])
    assert (code, first["samples"]) == (0, 0)
    assert json.loads(out)["val_loss"] == first["val_loss"]


def test_weights_that_do_not_fit_are_refused_and_no_run_is_left(kept, shapes_dir, tmp_path, capsys):
    assert write_run(tmp_path / "run", shapes_dir, kept / "bfl.safetensors", "--model.single_blocks=4") == 2
    assert "8 missing: single_blocks.3.linear1.bias, " in the_line(capsys.readouterr().err)
    assert write_run(tmp_path / "run", shapes_dir, kept / "no such") == 2
    assert "no such does not exist" in the_line(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
    large = write_bfl(tmp_path, lambda t: [tensor.fill_(3e38) for tensor in t.values()])
    assert write_run(tmp_path / "run", shapes_dir, large) == 3
    assert "is not finite: weights of init.weights or of a checkpoint are" in the_line(capsys.readouterr().err)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with three checkpoints, a save under way and a deletion."""
    names = [f"step_{step:09d}" for step in (2, 10, 9)] + [".step_000000011.ab12", ".step_000000001.deleted"]
    for name in names:
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    return tmp_path / "run"


def complaint(path: Path, step: int | None = None) -> str:
    return refusal(weights.find, path, step)


def test_a_step_means_that_checkpoint_of_a_run_and_none_the_newest(run, kept):
    assert weights.find(run).name == "step_000000010"
    assert weights.find(run, 2).name == "step_000000002"
    assert complaint(run, 11) == f"{run} holds no checkpoint of step 11; it has 2, 9, 10"
    shutil.rmtree(run / "checkpoints")
    assert complaint(run) == f"{run} holds no checkpoint; it has none"
    for name in ("bfl.safetensors", "checkpoint", "pipeline"):
        assert "is not a run, so it has no checkpoint 3" in complaint(kept / name, 3)
    for path, problem in ((run.parent, "holds no .safetensors file, only run"), (run / "none", "does not exist")):
        text = complaint(path)
        assert text.startswith(f"{path} {problem}; ") and "a .safetensors file in BFL's layout" in text
    (run.parent / "ae.safetensors").touch()
    assert "has no transformer/; docs/own_pictures.md has what fetches" in complaint(run.parent)
    folder = run.parent / "pipeline" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    for path in (folder, folder.parent):  # fault M5: the reason in the user's names
        assert complaint(path).startswith(f"{folder} holds no .safetensors file, only config.json; give a run")
    (folder / "diffusion_pytorch_model.bin").touch()
    assert f"{folder}/diffusion_pytorch_model.bin is a pickle" in complaint(folder.parent)


def write_bfl(folder: Path, change: Callable[[dict], object] = lambda tensors: None, cut: int | None = None) -> Path:
    """BFL's file with changed tensors, cut short."""
    tensors, path = tensors_of(CFG.model), folder / "w.safetensors"
    change(tensors)
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:cut])
    return path


def write_bytes(folder: Path, content: bytes | Callable) -> Path:
    """content: the bytes of the file, or what writes a payload to it."""
    path = folder / "w.safetensors"
    with path.open("wb") as file:
        content({"img_in.bias": Payload(folder / "executed")}, file) if callable(content) else file.write(content)
    return path


def write_folder(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """A transformer folder of two files of tensors. One file is removed, then made anew."""
    path = folder / "transformer" / name
    write_diffusers(folder / "transformer", CFG.model, tensors_of(CFG.model), files=2)
    path.unlink()
    make(path)
    return folder


def write_part(folder: Path, make: Callable[[Path], object]) -> Path:
    return write_folder(folder, "diffusion_pytorch_model-00001-of-00002.safetensors", make)


def write_config(folder: Path, content: str | dict) -> Path:
    """content: the text of config.json, or what it says of another model."""
    if isinstance(content, dict):
        content = json.dumps(diffusers_names.diffusers_config(CFG.model) | content)
    return write_folder(folder, "config.json", lambda path: path.write_text(content))


def with_last(name: str, value: float) -> Callable[[dict], object]:
    """Set the last value of a tensor."""
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(value)


PROJ = "single_transformer_blocks.0.proj_mlp.bias"


def write_twice(folder: Path, value: float) -> Path:
    """A folder in which two files hold a tensor."""
    write_diffusers(folder / "transformer", CFG.model, tensors_of(CFG.model))
    save_file({PROJ: torch.full((96,), value)}, folder / "transformer" / "more.safetensors")
    return folder


def write_metadata(folder: Path, samples: str) -> Path:
    metadata = {"trained_by": weights.TRAINER, "samples": samples}
    save_file(tensors_of(CFG.model), folder / "w.safetensors", metadata)
    return folder / "w.safetensors"


NO_FILE = "w.safetensors cannot be read as safetensors: |; give another"
NO_CONFIG = "diffusers' config|config.json|JSON"
REFUSED = [  # what makes it, with which argument, and words of the line, divided by |
    (write_bfl, lambda t: [t.pop(name) for name in list(t)[:4]], "4 missing: img_in.bias, img_in.weight, time_in"),
    (write_bfl, lambda t: t.update({"img_in.bias": torch.zeros(())}), "1 misshaped: img_in.bias (), want (24,)"),
    (
        write_bfl,
        lambda t: t.update({"x": t.pop("img_in.bias"), "img_in.weight": torch.zeros(1)}),
        "1 missing: img_in.bias; 1 unexpected: x; 1 misshaped: img_in.weight (1,), want (24, 64)",
    ),
    (
        write_bfl,
        lambda t: t.update({"guidance_in.in_layer.bias": t["img_in.bias"].clone()}),
        "guidance_in.in_layer.bias of FLUX.1-dev|use FLUX.1-schnell's",
    ),
    (write_bfl, with_last("txt_in.weight", math.nan), "txt_in.weight holds NaN"),
    (write_bfl, with_last("txt_in.bias", -math.inf), "txt_in.bias holds NaN or infinite"),
    (write_bfl, lambda t: t.update({"img_in.bias": t["img_in.bias"].double()}), "bias is F64, want F32, BF16, F16"),
    *((lambda folder, cut: write_bfl(folder, cut=cut), cut, NO_FILE) for cut in (0, 5, 4000, -4)),
    (write_bytes, b"\x02" + b"\0" * 7 + b"{}", "88 missing"),
    *((write_bytes, content, NO_FILE) for content in (b"\xff" * 1000, b"\xff" * 7 + b"\0" + b"{}")),
    *((write_bytes, dump, NO_FILE) for dump in (pickle.dump, torch.save)),
    (write_twice, 0.0, f"{PROJ} is in {FILE}, too"),
    *((write_metadata, count, "is no count") for count in ("-1", "1e3", "")),
    (write_part, lambda path: None, "61 missing: context_embedder.weight"),
    (write_part, os.mkfifo, "00001-of-00002.safetensors is not a regular file"),
    (write_part, Path.mkdir, "00001-of-00002.safetensors is not a regular file"),
    (write_part, lambda path: path.symlink_to("/dev/zero"), "00001-of-00002.safetensors is not a regular file"),
    (write_part, lambda path: path.symlink_to("nowhere"), "00001-of-00002.safetensors cannot be read|No such file"),
    (write_config, {"guidance_embeds": True}, "another model's: guidance_embeds=True, want False|--config"),
    (write_config, {"num_layers": 19, "num_single_layers": 38}, "num_layers=19, want 2; num_single_layers=38, want 3"),
    (lambda folder, make: write_folder(folder, "config.json", make), lambda path: None, "config.json: No such file"),
    *((write_config, text, NO_CONFIG) for text in ("{", "[1]")),
]


def test_what_is_wrong_is_one_line_and_no_pickle_is_executed(tmp_path, capsys):
    wrong = {}
    for number, (make, argument, words) in enumerate(REFUSED):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = make(folder, argument)
        code = read_all(path)
        shown = capsys.readouterr()
        line = the_line(shown.err, "weights")
        is_refused = code == 2 and shown.out == "" and all(word in line for word in (*words.split("|"), str(path)))
        if not is_refused or (folder / "executed").exists():
            wrong[number] = (words, code, shown)
    assert not wrong
    pickle.loads(write_bytes(tmp_path, pickle.dump).read_bytes())
    assert (tmp_path / "executed").exists(), "the payload is one that works"


def test_every_form_is_recognised_and_whole(kept):
    for kind, recognised in KINDS.items():
        assert opened(kept / kind, CFG.model).kind == recognised and read_all(kept / kind) == 0


def test_the_tensors_decide_what_a_path_is(tmp_path, capsys):
    """Not whether it is a file or a folder."""
    save_file(tensors_of(CFG.model), write_metadata(tmp_path, "0"), {"trained_by": weights.TRAINER})
    assert opened(tmp_path, CFG.model).kind == "BFL"
    write_diffusers(tmp_path / "other", CFG.model, tensors_of(CFG.model))
    (tmp_path / "other" / "config.json").write_text('{"axes_dims_rope": [1, 2, 3]}')
    assert read_all(tmp_path / "other" / FILE) == 2
    assert "another model's: axes_dims_rope=" in capsys.readouterr().err


def test_without_a_config_the_sizes_are_schnells(kept, capsys):
    assert read_all(kept / "bfl.safetensors", None) == 2
    line = the_line(capsys.readouterr().err, "weights")
    assert "688 missing: double_blocks.10.img_attn.norm.key_norm.scale, " in line and "img_in" not in line.split(";")[0]
    assert read_all(kept / "bfl.safetensors", "none.toml") == 2
    assert "config none.toml: No such file" in the_line(capsys.readouterr().err, "weights")
