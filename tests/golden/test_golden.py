"""The golden values: this code computes them, any sound port passes, and damage is refused."""

import json
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checking import checked
from conftest import script
from tables import page as tables

from flux_ref import config_file, data, sharding
from tools.golden import commands as golden
from tools.golden import full_size, inputs, places, record, training, write
from tools.golden.files import CONFIG, DATA, FOLDER, INDEX, VALUES, Golden

CFG = config_file.load(FOLDER / CONFIG)
KEPT = Golden(FOLDER)
read = KEPT.file.read
WIDE = ("full.double.", "full.single.", places.LONG)  # values that take long


def recorded() -> dict[str, np.ndarray]:
    """What this process computes, as a port's dump."""
    return {name: value.array for name, value in record.record(CFG, KEPT.given()).items()}


@pytest.fixture(scope="module")
def ours() -> dict[str, np.ndarray]:
    """All but the blocks of full width, which a slow test computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "blocks", lambda values: None)
        return recorded()


@pytest.fixture
def agree(tmp_path, capsys):
    """agree(dump): all values of a dump agree with the golden ones."""

    def require(dump: dict[str, np.ndarray]) -> None:
        result = checked(dump, tmp_path, capsys)
        assert result.code == 0 and result.text.startswith(f"{len(dump)} places compared, 0 differ, "), result.text

    return require


def test_replay_agrees_in_every_place(ours, agree):
    names = [value.name for value in KEPT.values if not value.name.startswith(WIDE)]
    assert list(ours) == names, "record them anew: python -m tools.golden write"
    agree(ours)


@pytest.mark.slow
def test_blocks_of_full_width_agree(agree):
    values = {}
    record.blocks(values)
    agree({name: record.plain(value).array for name, value in values.items()})


@pytest.mark.slow
def test_two_real_ranks_agree(tmp_path, capsys):
    """Over gloo, with FSDP2's own mean; they read the golden data set."""
    done = script("tests/helpers/golden_ranks.py", str(FOLDER), str(tmp_path / "dump"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert golden.main(["check", "--from", str(tmp_path / "dump")]) == 0
    assert capsys.readouterr().out.startswith("8 places compared, 0 differ, ")


@pytest.mark.nightly
def test_initial_norms_of_full_size_agree(agree):
    agree({places.LONG: full_size.initial_norms()})


def test_check_without_a_dump_replays(ours, monkeypatch, capsys):
    """A difference, a missing and an unknown value each make the exit code 1."""
    wide = {value.name: read(value.name) for value in KEPT.values if value.name.startswith(WIDE[:2])}
    found = {name: record.plain(array) for name, array in (ours | wide).items()}
    twice = record.plain(2 * found.pop("loss").array)
    half = record.plain(twice.array / 2)
    for changes, code, counts in (
        ({"loss": half}, 0, "0 differ, 0 missing, 0 unknown"),
        ({"loss": twice}, 1, "1 differ, 0 missing, 0 unknown"),
        ({}, 1, "0 differ, 1 missing, 0 unknown"),
        ({"loss": half, "new": half}, 1, "0 differ, 0 missing, 1 unknown"),
    ):
        monkeypatch.setattr(record, "record", lambda cfg, given, changes=changes: found | changes)
        assert golden.main(["check"]) == code
        assert counts in capsys.readouterr().out


def test_weights_and_data_are_what_the_generator_gives():
    """So that a port may draw them itself."""
    given = KEPT.given()
    again = inputs.inputs(CFG, given)
    assert list(again) == list(given)
    assert [name for name in given if not np.array_equal(again[name], given[name])] == []


def test_the_data_set_beside_the_values_holds_the_given_data(tmp_path):
    """Two training shards, the second filled up to whole records, one of validation. The replay reads such files.

    The kept training samples say that their timestep is null; those written today do not name it.
    """
    inputs.write_data(tmp_path / "data", KEPT.given())
    pairs = [(path, FOLDER / path.relative_to(tmp_path)) for path in (tmp_path / "data").rglob("*.*")]
    assert len(pairs) == 5
    for ours, kept in pairs:
        assert ours.stat().st_size == kept.stat().st_size
        assert members(ours) == members(kept) if ours.suffix == ".tar" else ours.read_bytes() == kept.read_bytes()


def members(path: Path) -> dict[str, object]:
    """What a shard holds."""
    with tarfile.open(path) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}
    return {
        name: {"timestep": None} | json.loads(text) if name.endswith(".json") else text for name, text in found.items()
    }


def test_the_sample_of_a_log_has_the_keys_of_the_table():
    lines = (FOLDER / "result_0.txt").read_text().splitlines()
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG ")]
    want = tables.events("6.1.0")
    for event in found + want:
        event["metadata"] = sorted(event["metadata"])
        del event["time_ms"]
    assert found == want


def test_the_run_shows_what_it_should():
    """Axes of different sizes, a dropped caption, other epochs, both sides of each corner, values that are not 0."""
    for name in ("batch.noise", "batch.t5", "img", "double_blocks.0.attention.q", "single_blocks.0.linear1", "rope"):
        shape = read(name).shape
        assert len(set(shape)) == len(shape), name
    assert [np.array_equal(text, read("data.empty.t5")) for text in read("batch.t5")] == [False, True]
    steps = range(1, training.STEPS + 1)
    clips = [read(f"step{number}.clip_coefficient").item() for number in steps]
    assert min(clips) < 0.9 and clips.count(1) > 1, clips
    first, *rates = [read(f"step{number}.lr").item() for number in steps]
    assert first < rates[0] and len(set(rates)) == 1, rates
    assert read("step3.epoch").tolist() == [0, 1] and read("ranks.epoch").tolist() == [[0, 1], [1, 1]]
    assert len({read("step1.sample")[0], read("step3.sample")[1], 0}) == 3, "an epoch's first sample tells its order"
    zeros = [value.name for value in KEPT.values if not read(value.name).any()]
    assert [name for name in zeros if not name.endswith((".drop", ".epoch"))] == []


def test_every_place_is_used_and_every_value_has_one():
    used = {id(places.place(value.name)) for value in KEPT.values}
    assert used == {id(place) for place in places.PLACES.values()}
    weights = places.place("step1.weights.img_in.weight").kind
    assert [weights.tolerances(np.ones(1), rate)[0] for rate in (1e-3, 1e-2)] == [1e-6, 1e-5]
    for value in KEPT.values:
        place = places.place(value.name)
        assert not [words for words in places.mistakes(value.name, "") if re.fullmatch("[A-Z_]+|.* > .*", words)]
        assert (value.meaning, value.why) == (place.meaning, place.kind.why)
        assert (value.atol, value.rtol) == place.kind.tolerances(read(value.name), CFG.optim.lr)


class DoubleAdamW(torch.optim.AdamW):
    """AdamW in fp64: its fused kernel still wants these two attributes in fp32."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value.to(torch.float32) if name in ("grad_scale", "found_inf") else value)


def test_a_port_in_fp64_passes(monkeypatch, agree):
    """Every .float(), every new tensor, parameters and batches: double. The fp32 tolerances are not too tight."""
    doubles = {torch.float32: torch.float64}
    fields = {name: (shape, doubles.get(dtype, dtype)) for name, (shape, dtype) in data.fields(CFG.model).items()}
    monkeypatch.setattr(data, "fields", lambda model: fields)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.optim, "AdamW", DoubleAdamW)
    monkeypatch.setitem(sharding.DTYPES, "fp32", torch.float64)
    for section in ("bf16", "operations", "fp8_edges", "fp8_linear", "fp8_order", "blocks", "formats", "presets"):
        monkeypatch.setattr(record, section, lambda *args: None)
    torch.set_default_dtype(torch.float64)
    try:
        dump = recorded()
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("prediction", "grad.img_in.weight", "step6.weights.img_in.weight", "single_blocks.2"):
        assert dump[name].dtype == np.float64, name
    agree(dump)


@pytest.fixture
def copied(tmp_path):
    """A folder with the golden values alone."""
    folder = tmp_path / "golden"
    folder.mkdir()
    for name in (VALUES, INDEX, CONFIG):
        shutil.copy(FOLDER / name, folder)
    return folder


DAMAGE = [  # file, what of its content is replaced and by what, words of the message
    (VALUES, rb".\Z", b"", "is not a whole safetensors file"),
    (VALUES, rb"[^x].{7}\Z", b"x" * 8, "is not the file that"),
    (INDEX, rb"\]\}\s*\Z", b"", "is no JSON"),
    (INDEX, rb".*", b"[" * 100_000, "nested too deeply"),
    (INDEX, rb'"atol"', b'"a"', "is no index of golden values"),
    (CONFIG, rb"\A", b"model.size = 3\n", "unknown key model.size"),
]


def test_damaged_golden_values_are_refused(copied, capsys):
    wrong = []
    for name, old, new, text in DAMAGE:
        content = (copied / name).read_bytes()
        (copied / name).write_bytes(re.sub(old, new, content, count=1, flags=re.S))
        code = golden.main(["check", "--golden", str(copied)])
        out, err = capsys.readouterr()
        if code != 2 or out or err.count("\n") != 1 or text not in err:
            wrong.append((name, text, code, err))
        (copied / name).write_bytes(content)
    (copied / INDEX).unlink()
    assert golden.main(["check", "--golden", str(copied)]) == 2
    assert "No such file" in capsys.readouterr().err and not wrong


def test_write_gives_the_same_files_and_leaves_no_others(copied, monkeypatch, capsys):
    """The same bits, although another processor rounds otherwise, and other bits of a value that has changed."""
    (copied / VALUES).unlink()
    monkeypatch.setattr(record, "blocks", lambda values: None)
    training = record.training

    def rounded(values, *given):
        training(values, *given)
        values["step1.loss"] = values["step1.loss"] * (1 + 1e-6)

    monkeypatch.setattr(record, "training", rounded)
    assert golden.main(["write", "--golden", str(copied)]) == 0
    assert sorted(path.name for path in copied.iterdir()) == sorted((CONFIG, DATA, INDEX, VALUES))
    assert golden.main(["check", "--from", str(copied / VALUES)]) == 0
    assert golden.main(["check", "--from", str(FOLDER / VALUES), "--golden", str(copied)]) == 0
    loss = KEPT.file.read("step1.loss")
    assert Golden(copied).file.read("step1.loss") == loss
    assert write._steady(loss * 1.5, "step1.loss", KEPT, 0.0, 1e-3) == loss * 1.5
    for value in Golden(copied).values:
        assert value.inputs == next(kept.inputs for kept in KEPT.values if kept.name == value.name), value.name
    capsys.readouterr()
    assert golden.main(["write", "--from", "x", "--golden", str(copied)]) == 2
    assert "--from is for check" in capsys.readouterr().err
