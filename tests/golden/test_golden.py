"""The golden values: this code computes them, any sound port passes, and planted mistakes are named."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checking import checked
from conftest import script
from tables import page as tables

from flux_ref import config_file, data, model, sharding
from flux_ref.formats import shards
from tools.golden import commands as golden
from tools.golden import full_size, inputs, places, record, training
from tools.golden.commands import FOLDER
from tools.golden.files import CONFIG, DATA, INDEX, VALUES, Golden

CFG = config_file.load(FOLDER / CONFIG)


@pytest.fixture(scope="module")
def kept() -> Golden:
    return Golden(FOLDER)


def recorded(kept: Golden) -> dict[str, np.ndarray]:
    """What this process computes, planted mistakes included, as a port's dump."""
    return {name: value.array for name, value in record.record(CFG, kept.given()).items()}


@pytest.fixture(scope="module")
def ours(kept) -> dict[str, np.ndarray]:
    """All but the blocks of full width, which a slow test computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "blocks", lambda values: None)
        return recorded(kept)


def test_replay_agrees_in_every_place(kept, ours, tmp_path, capsys):
    others = (*places.LONG, "full.double.", "full.single.")
    names = [value.name for value in kept.values if not value.name.startswith(others)]
    assert list(ours) == names, "record them anew: python -m tools.golden write"
    result = checked(ours, tmp_path, capsys)
    assert result.code == 0
    assert re.match(r"\d+ places compared, 0 differ, \d+ missing, 0 unknown\n", result.text)


@pytest.mark.slow
def test_blocks_of_full_width_agree(tmp_path, capsys):
    values = {}
    record.blocks(values)
    result = checked({name: record.plain(value).array for name, value in values.items()}, tmp_path, capsys)
    assert result.code == 0 and result.text.startswith(f"{len(values)} places compared, 0 differ, "), result.text


@pytest.mark.slow
def test_two_real_ranks_agree(tmp_path, capsys):
    """Over gloo, with FSDP2's own mean; they read the golden data set."""
    done = script("tests/helpers/golden_ranks.py", str(FOLDER), str(tmp_path / "dump"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert golden.main(["check", "--from", str(tmp_path / "dump")]) == 0
    assert capsys.readouterr().out.startswith("8 places compared, 0 differ, ")


@pytest.mark.nightly
def test_initial_norms_of_full_size_agree(tmp_path, capsys):
    result = checked({"full.init.norms": full_size.initial_norms()}, tmp_path, capsys)
    assert result.code == 0 and result.text.startswith("1 places compared, 0 differ, "), result.text


def test_check_without_a_dump_replays(kept, ours, monkeypatch, capsys):
    """A difference, a missing and an unknown value each make the exit code 1."""
    wide = {value.name: kept.file.read(value.name) for value in kept.values if value.name not in places.LONG}
    recorded = {name: SimpleNamespace(array=array) for name, array in (wide | ours).items()}
    changes = ({}, {"loss": SimpleNamespace(array=np.array(2 * ours["loss"]))}, {"new": recorded["loss"]})
    codes = []
    for change in changes:
        monkeypatch.setattr(record, "record", lambda cfg, given, change=change: recorded | change)
        codes.append(golden.main(["check"]))
    monkeypatch.setattr(record, "record", lambda cfg, given: {"loss": recorded["loss"]})
    codes.append(golden.main(["check"]))
    assert codes == [0, 1, 1, 1]
    counts = re.findall(r"(\d+) differ, (\d+) missing, (\d+) unknown", capsys.readouterr().out)
    assert counts[:3] == [("0", "0", "0"), ("1", "0", "0"), ("0", "0", "1")] and int(counts[3][1]) > 200


def test_inputs_are_what_the_generator_gives(kept):
    """So that a port may draw them itself."""
    again, given = inputs.inputs(CFG), kept.given()
    assert again.keys() == given.keys()
    assert all(np.array_equal(again[name], given[name]) for name in given)


def test_the_data_set_beside_the_values_holds_the_given_data(kept, tmp_path):
    """What a port reads: two training shards, the second filled up to whole records, one of validation."""
    inputs.write_data(tmp_path / "data", kept.given())
    files = {path.relative_to(tmp_path): path.read_bytes() for path in (tmp_path / "data").rglob("*.*")}
    assert len(files) == 5 and files == {path: (FOLDER / path).read_bytes() for path in files}
    for part, timesteps in (("train", [None] * 5), ("val", list(inputs.VAL_TIMESTEPS))):
        opened = shards.ShardSet(FOLDER / DATA / part, shards.layout(CFG.model))
        opened.open()
        rows = [opened.layout.rows() for _ in range(len(opened))]
        assert [opened.read(i, row).timestep for i, row in enumerate(rows)] == timesteps
        for name in shards.MEMBERS:
            read = np.stack([shards.from_bf16_bits(row[name]) for row in rows])
            assert np.array_equal(read, kept.file.read(f"data.{part}.{name}")), name


def test_the_sample_of_a_log_has_the_keys_of_the_table():
    lines = (FOLDER / "result_0.txt").read_text().splitlines()
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG ")]
    want = tables.events("6.1.0")
    for event in found + want:
        event["metadata"] = sorted(event["metadata"])
        del event["time_ms"]
    assert found == want


def test_the_run_shows_what_it_should(kept):
    """Axes of different sizes, a dropped caption, other epochs, both sides of each corner, values that are not 0."""
    m = CFG.model
    sizes = [CFG.train.global_batch, *m.latent_shape, m.image_tokens, m.packed_channels, m.text_tokens, m.hidden]
    sizes += [m.image_tokens + m.text_tokens, m.heads, m.head_dim, m.head_dim // 2, m.mlp_ratio * m.hidden, m.t5_dim]
    sizes += [m.clip_dim, model.TIME_WAVES]
    assert len(set(sizes)) == len(sizes)
    read = kept.file.read
    assert [np.array_equal(text, read("data.empty.t5")) for text in read("batch.t5")] == [False, True]
    steps = range(1, training.STEPS + 1)
    clips, rates = ([float(read(f"step{number}.{name}")) for number in steps] for name in ("clip_coefficient", "lr"))
    assert min(clips) < 0.9 and clips.count(1) > 1, clips
    assert rates[0] < rates[1] and rates[1:] == [rates[1]] * 5, rates
    assert read("step3.epoch").tolist() == [0, 1] and read("ranks.epoch").tolist() == [[0, 1], [1, 1]]
    assert len({read("step1.sample")[0], read("step3.sample")[1], 0}) == 3, (
        "the first sample of an epoch tells its order"
    )
    assert all(read(value.name).any() for value in kept.values if not value.name.endswith((".drop", ".epoch")))


def test_every_place_is_used_and_every_value_has_one(kept):
    used = {id(places.place(value.name)) for value in kept.values}
    assert used == {id(place) for place in places.PLACES.values()}
    weights = places.place("step1.weights.img_in.weight").kind
    assert [weights.tolerances(np.ones(1), rate)[0] for rate in (1e-3, 1e-2)] == [1e-6, 1e-5]
    with pytest.raises(KeyError, match="no place"):
        places.place("no place")
    for value in kept.values:
        place = places.place(value.name)
        assert not [words for words in places.mistakes(value.name, "") if re.fullmatch("[A-Z_]+|.* > .*", words)]
        assert (value.meaning, value.why) == (place.meaning, place.kind.why)
        assert (value.atol, value.rtol) == place.kind.tolerances(kept.file.read(value.name), CFG.optim.lr)


class DoubleAdamW(torch.optim.AdamW):
    """AdamW in fp64: its fused kernel still wants these two attributes in fp32."""

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
    for section in ("bf16", "operations", "fp8_edges", "fp8_linear", "fp8_order", "blocks", "formats", "presets"):
        monkeypatch.setattr(record, section, lambda *args: None)
    torch.set_default_dtype(torch.float64)
    try:
        dump = recorded(kept)
    finally:
        torch.set_default_dtype(torch.float32)
    doubles = {name for name, array in dump.items() if array.dtype == np.float64}
    assert {"prediction", "grad.img_in.weight", "step6.weights.img_in.weight", "single_blocks.2"} <= doubles
    result = checked(dump, tmp_path, capsys)
    assert result.code == 0, result.text


def golden_copy(tmp_path) -> Path:
    (tmp_path / "golden").mkdir()
    for name in (VALUES, INDEX, CONFIG):
        shutil.copy(FOLDER / name, tmp_path / "golden")
    return tmp_path / "golden"


DAMAGE = [  # file, how its content changes (None: it is gone), words of the message
    (VALUES, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is not the file that"),
    (VALUES, lambda data: data[:-1], "is not a whole safetensors file"),
    (INDEX, None, "No such file"),
    (INDEX, lambda data: data[:-9], "is no JSON"),
    (INDEX, lambda data: b"[" * 100_000, "nested too deeply"),
    (INDEX, lambda data: data.replace(b'"atol"', b'"a"'), "is no index of golden values"),
    (CONFIG, lambda data: data + b"model.size = 3", "unknown key model.size"),
]


def test_damaged_golden_values_are_refused(tmp_path, capsys):
    folder, wrong = golden_copy(tmp_path), []
    for name, change, text in DAMAGE:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(change(content)) if change else (folder / name).unlink()
        code = golden.main(["check", "--golden", str(folder)])
        out, err = capsys.readouterr()
        if not (code == 2 and out == "" and err.count("\n") == 1 and text in err):
            wrong.append((name, text, code, err))
        (folder / name).write_bytes(content)
    assert not wrong


def test_write_gives_the_same_files_and_leaves_no_others(monkeypatch, tmp_path, capsys):
    """The same within the tolerances: another processor rounds otherwise."""
    folder = golden_copy(tmp_path)
    (folder / VALUES).unlink()
    monkeypatch.setattr(record, "blocks", lambda values: None)
    assert golden.main(["write", "--golden", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted((CONFIG, DATA, INDEX, VALUES))
    assert golden.main(["check", "--from", str(folder / VALUES)]) == 0
    assert golden.main(["check", "--from", str(FOLDER / VALUES), "--golden", str(folder)]) == 0
    capsys.readouterr()
    assert golden.main(["write", "--from", "x", "--golden", str(folder)]) == 2
    assert "--from is for check" in capsys.readouterr().err
