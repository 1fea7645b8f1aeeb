"""diffusers opens what export writes and computes the same with it. import takes what diffusers writes bit for bit.
Nothing changes on the way there and back."""

import json
import re
from itertools import product
from pathlib import Path

import lively_nets
import pytest
import torch
from conftest import MICRO, require_identical
from diffusers import FluxTransformer2DModel
from peer_net import FULL_WIDTH, diffusers_forward, random_inputs, random_net, relative_error, to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flux_ref import config, config_file
from flux_ref.config import Config, ModelConfig
from flux_ref.formats import checkpoint_files, diffusers_names, safetensors_io
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.model import Flux, parameter_table
from flux_ref.run import weight_files
from tools.weights import commands as weights
from tools.weights import exports

CFG = config_file.load(MICRO)
MODEL = CFG.model
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRAINED = {"step": 5, "samples": 60, "name": "micro", "config": config.flat(CFG)}
TOLERANCE = 1e-5  # relative, fp32
COMMANDS = {"bfl": ["export"], "diffusers": ["export", "--format=diffusers"], "checkpoint": ["import"]}


@pytest.fixture
def lively() -> dict[str, Tensor]:
    return {name: lively_nets.lively(name, shape) for name, shape in parameter_table(MODEL).items()}


def save_checkpoint(folder: Path, weights: dict[str, Tensor]) -> Path:
    """A trained checkpoint: the files of two ranks, and the counters."""
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    parts = []
    for rank in range(2):
        rows = {}
        for name, tensor in weights.items():
            first = rank * -(-len(tensor) // 2)
            rows[f"model.{name}"] = checkpoint_files.TensorSlice(tensor.chunk(2)[rank], first, tensor.shape)
        parts.append(checkpoint_files.write_rank(partial, rank, rows))
    checkpoint_files.publish(partial, folder, checkpoint_files.manifest(TRAINED, parts))
    return folder


@pytest.fixture
def checkpoint(lively, tmp_path) -> Path:
    return save_checkpoint(tmp_path / "checkpoint", lively)


def command(*argv: object) -> int:
    return weights.main([str(arg) for arg in argv])


def export(source: Path, out: Path, layout: str = "bfl", dtype: str = "fp32", cfg: Path = MICRO) -> Path:
    assert command("export", source, out, f"--format={layout}", f"--dtype={dtype}", f"--config={cfg}") == 0
    return out


def import_(source: Path, out: Path) -> Path:
    assert command("import", source, out, f"--config={MICRO}") == 0
    return out


def kept(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint by BFL's names, in the dtype on disk."""
    saved = Checkpoint(path)
    return {key.removeprefix("model."): saved.read(key) for key in saved.tensors}


def require_same(tensors: dict[str, Tensor], want: dict[str, Tensor]):
    """The same names with the same dtypes and bits."""
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {name: t.dtype for name, t in want.items()}
    require_identical(tensors, want)


def test_the_map_gives_diffusers_names_and_shapes_at_full_size():
    with torch.device("meta"):
        twin = FluxTransformer2DModel()
    want = {name: tuple(tensor.shape) for name, tensor in twin.state_dict().items()}
    assert diffusers_names.diffusers_table(ModelConfig()) == want


def own_output(tensors: dict[str, Tensor], inputs: dict[str, Tensor], model: ModelConfig) -> Tensor:
    with torch.device("meta"):
        net = Flux(model)
    net.load_state_dict(tensors, assign=True)
    net.rope = net.make_rope()
    with torch.no_grad():
        return net(*inputs.values())


def from_pretrained(folder: Path, **options: object) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(folder, local_files_only=True, **options)


def from_single_file(file: Path, folder: Path) -> FluxTransformer2DModel:
    """config: a folder with diffusers' config.json, as text."""
    return FluxTransformer2DModel.from_single_file(str(file), config=str(folder), local_files_only=True)


def test_diffusers_computes_the_same_with_its_folder(checkpoint, lively, tmp_path):
    net = from_pretrained(export(checkpoint, tmp_path / "out", "diffusers"))
    inputs = random_inputs(MODEL)
    assert net.config.guidance_embeds is False and net.dtype == torch.float32
    with torch.no_grad():
        theirs = diffusers_forward(net, MODEL)(**inputs)
    assert relative_error(own_output(lively, inputs, MODEL), theirs) < TOLERANCE


@pytest.mark.nightly
def test_diffusers_opens_a_file_of_schnells_width_as_it_is(tmp_path):
    """One double and one single block, 2 GB a file; nothing of diffusers is changed."""
    net = random_net(FULL_WIDTH)
    save_file(dict(net.state_dict()), tmp_path / "net.safetensors")
    (tmp_path / "full.toml").write_text(config_file.dump(Config(model=FULL_WIDTH)))
    saved = [tmp_path / "net.safetensors", tmp_path / "out.safetensors", tmp_path / "folder"]
    export(saved[0], saved[1], cfg=tmp_path / "full.toml")
    export(saved[0], saved[2], "diffusers", cfg=tmp_path / "full.toml")
    inputs = random_inputs(FULL_WIDTH, batch=1)
    want = own_output(dict(net.state_dict()), inputs, FULL_WIDTH)
    for twin in (from_pretrained(saved[2]), from_single_file(saved[1], saved[2])):
        with torch.no_grad():
            assert relative_error(want, diffusers_forward(twin, FULL_WIDTH)(**inputs)) < TOLERANCE
    for path in (*saved[:2], *saved[2].iterdir()):
        path.unlink()


@pytest.fixture
def twin(lively) -> FluxTransformer2DModel:
    """diffusers' net with the weights of `lively`."""
    net = FluxTransformer2DModel.from_config(diffusers_names.diffusers_config(MODEL))
    net.load_state_dict(to_diffusers(lively, MODEL.hidden))
    return net


def test_a_folder_that_diffusers_saved_comes_in_bit_for_bit(twin, lively, tmp_path):
    for (name, dtype), most in product(DTYPES.items(), ("10GB", "50KB")):  # fp32 first: rounding to bf16 stays
        theirs = tmp_path / f"theirs {name} {most}"
        twin.to(dtype).save_pretrained(theirs, max_shard_size=most)
        assert (len(list(theirs.glob("*.safetensors"))) == 1) == (most == "10GB")
        want = {name: tensor.to(dtype).float() for name, tensor in lively.items()}
        require_same(kept(import_(theirs, tmp_path / f"ours {name} {most}")), want)


def test_config_and_names_of_an_export_are_those_that_diffusers_writes(twin, checkpoint, tmp_path):
    twin.save_pretrained(tmp_path / "theirs")
    ours = export(checkpoint, tmp_path / "ours", "diffusers")
    assert {path.name for path in ours.iterdir()} == {path.name for path in (tmp_path / "theirs").iterdir()}
    our, their = (json.loads((folder / "config.json").read_text()) for folder in (ours, tmp_path / "theirs"))
    assert their.pop("_diffusers_version") and their == our | {"out_channels": None}
    our, their = (load_file(folder / "diffusion_pytorch_model.safetensors") for folder in (ours, tmp_path / "theirs"))
    require_same(our, their)


def test_nothing_changes_on_the_way_round(checkpoint, lively, tmp_path, monkeypatch):
    """Checkpoint, BFL, checkpoint, diffusers, checkpoint, BFL. bf16 rounds once, at the first step."""
    for piece, (name, dtype) in zip((exports.PIECE_BYTES, 2000), DTYPES.items()):
        monkeypatch.setattr(exports, "PIECE_BYTES", piece)
        folder = tmp_path / name
        folder.mkdir()
        want = {name: tensor.to(dtype) for name, tensor in lively.items()}
        first = export(checkpoint, folder / "1.safetensors", dtype=name)
        require_same(load_file(first), want)
        again = import_(first, folder / "2")
        require_same(kept(again), {name: tensor.float() for name, tensor in want.items()})
        theirs = export(again, folder / "3", "diffusers", name)
        require_same(load_file(theirs / "diffusion_pytorch_model.safetensors"), to_diffusers(want, MODEL.hidden))
        last = export(import_(theirs, folder / "4"), folder / "5.safetensors", dtype=name)
        require_same(load_file(last), want)


def test_what_is_read_at_a_time_is_small(checkpoint, lively, tmp_path, monkeypatch):
    """Nothing is larger than a piece, unless a single row is. So memory does not grow with the model."""
    sizes, write = [], safetensors_io.CheckedFile.write_tensor
    monkeypatch.setattr(exports, "PIECE_BYTES", 2000)
    monkeypatch.setattr(safetensors_io.CheckedFile, "write_tensor", lambda f, t: (sizes.append(t.nbytes), write(f, t)))
    export(checkpoint, tmp_path / "bfl")
    export(checkpoint, tmp_path / "diffusers", "diffusers")
    import_(tmp_path / "diffusers", tmp_path / "again")
    assert max(sizes) <= 2000 and sum(sizes) == 3 * 4 * sum(tensor.numel() for tensor in lively.values())


def header_of(path: Path) -> dict[str, str] | None:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_files_say_what_trained_them_and_where_they_come_from(checkpoint, lively, tmp_path, capsys):
    want = {"format": "pt", "trained_by": "flux_ref", "step": "5", "samples": "60", "name": "micro"}
    folder = export(checkpoint, tmp_path / "folder", "diffusers")
    file = export(checkpoint, tmp_path / "file")
    again = export(file, tmp_path / "again")
    for path in (file, again, folder / "diffusion_pytorch_model.safetensors"):
        assert header_of(path) == want
    public = tmp_path / "public.safetensors"
    save_file(lively, public, {"samples": "many"})
    assert header_of(export(public, tmp_path / "of public")) == {"format": "pt"}, "trained elsewhere"
    path = import_(public, tmp_path / "ours")
    info = Checkpoint(path).info
    assert (info["from"], info["step"], info["samples"]) == (str(public), 0, 0)
    known = weight_files.open_source(path, MODEL).info
    assert "samples" not in known and "step" not in known, "so eval.py says that it is unknown"
    assert config_file.from_flat(info["name"], info["config"]).model == MODEL
    assert command("inspect", path, "--verify") == 0 and f"from      {public}" in capsys.readouterr().out


def complaint(capsys, *argv: object, code: int = 2) -> str:
    capsys.readouterr()
    assert command(*argv) == code
    (line,) = re.findall(r"weights: ([^\r\n]*)", capsys.readouterr().err)  # a progress bar may stand before it
    return line


def test_what_diffusers_cannot_compute_is_not_exported_to_it(tmp_path, capsys):
    """It has no place for these numbers, and would take its own."""
    for key, value in (("mlp_ratio", 3), ("rope_theta", 1000)):
        folder = tmp_path / key
        folder.mkdir()
        cfg = config_file.replace(CFG, **{f"model__{key}": value})
        (folder / "other.toml").write_text(config_file.dump(cfg))
        tensors = {name: lively_nets.lively(name, shape) for name, shape in parameter_table(cfg.model).items()}
        save_file(tensors, folder / "w.safetensors")
        where = [folder / "w.safetensors", folder / "out", f"--config={folder / 'other.toml'}"]
        assert f"model.{key}" in complaint(capsys, "export", *where, "--format=diffusers")
        assert not (folder / "out").exists() and command("export", *where) == 0


def break_off(monkeypatch, error: BaseException, after: int = 40) -> None:
    """Make the next write of that many fail."""
    write, left = safetensors_io.CheckedFile.write_tensor, [after]

    def stop(file: safetensors_io.CheckedFile, tensor: Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            raise error
        write(file, tensor)

    monkeypatch.setattr(safetensors_io.CheckedFile, "write_tensor", stop)


def test_what_breaks_off_leaves_nothing_and_the_next_succeeds(checkpoint, lively, tmp_path, monkeypatch, capsys):
    """Also when the next is to become something else under the same name."""
    before = set(tmp_path.iterdir())
    commands = list(COMMANDS.values())
    for number, (first, then) in enumerate(zip(commands, commands[1:] + commands[:1])):
        out = tmp_path / f"out {number}"
        with monkeypatch.context() as patch:
            break_off(patch, KeyboardInterrupt())
            assert command(*first, checkpoint, out) == 130
            break_off(patch, OSError(28, "No space left on device"))
            assert "No space left on device" in complaint(capsys, *first, checkpoint, out, code=3)
        assert set(tmp_path.iterdir()) == before
        assert command(*then, checkpoint, out) == 0
        before.add(out)
        assert set(tmp_path.iterdir()) == before
        source = weight_files.open_source(weight_files.find(out), MODEL)
        require_same({name: source.read(name, 0, len(tensor)) for name, tensor in lively.items()}, lively)
