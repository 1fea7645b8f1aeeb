"""The config: what loads, what comes back from a dump, and what each refusal says. Most tests loop over the keys."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import conftest
from conftest import MICRO, ROOT

from flux_ref import config, config_file
from flux_ref.config import KEYS, LARGEST, Config
from flux_ref.errors import Refusal

CONFIGS = [MICRO, *sorted((ROOT / "configs").glob("*.toml"))]
NUMBERS = {key: known for key, known in KEYS.items() if known.type in (int, float)}
KINDS = "|".join(config_file.KINDS.values()).replace("[", r"\[").replace("]", r"\]")
AWKWARD = ['say "hi"', "back\\slash \\n", "tab\tline\nfeed", "übergroß 日本 😀", "#'=[]", "\x01\x1b", "\x7f", ""]


def reply(tmp_path: Path, toml: str, *overrides: str) -> str:
    """The line with which a config is refused; empty if it is taken."""
    try:
        loaded(tmp_path, toml, *overrides)
    except Refusal as error:
        return str(error)
    return ""


def loaded(tmp_path: Path, toml: str, *overrides: str) -> Config:
    path = tmp_path / "some.toml"
    path.write_text(toml, encoding="utf-8")
    return config_file.load(path, overrides)


def both_ways(tmp_path: Path, key: str, value: str) -> list[str]:
    """The replies to a value in the file and on the command line."""
    return [reply(tmp_path, f"{key} = {value}"), reply(tmp_path, "", f"--{key}={value}")]


def test_a_config_comes_back_from_its_dump(tmp_path):
    assert loaded(tmp_path, "# nothing\n") == Config(name="some")
    assert [line.split(" = ")[0] for line in config_file.dump(Config()).splitlines()] == list(KEYS)
    micro = dataclasses.replace(config_file.load(MICRO), name="some")
    awkward = [config_file.replace(micro, data__train=text, optim__lr=0.1 + len(text)) for text in AWKWARD]
    switch = config_file.replace(Config(name="some"), precision__switch=((3, "fp8"),), train__seed=LARGEST)
    for cfg in (*awkward, switch, *map(config_file.load, CONFIGS)):
        copy = tmp_path / f"{cfg.name}.toml"
        copy.write_text(config_file.dump(cfg), encoding="utf-8")
        assert config_file.load(copy) == cfg
        assert config_file.from_flat(cfg.name, json.loads(json.dumps(config.flat(cfg)))) == cfg


def test_overrides_win_over_the_file_and_are_read_in_the_type_of_their_key(tmp_path):
    overrides = ["--train.seed=2", "--train.seed=3", "--run.dir=8", "--optim.lr=1", "--eval.at_start=true"]
    overrides += ["--model.rope_axes=[32, 48, 48]", "--data.val=a=b 'c'"]
    cfg = loaded(tmp_path, "train.seed = 1\noptim.lr = 1e-3\n[run]\nhang_s = 7", *overrides)
    assert (cfg.train.seed, cfg.run.dir, cfg.optim.lr, cfg.eval.at_start) == (3, "8", 1.0, True)
    assert (cfg.model.rope_axes, cfg.data.val, cfg.run.hang_s) == ((32, 48, 48), "a=b 'c'", 7.0)
    assert type(cfg.optim.lr) is float
    arguments = ["train.seed", "-x", "train.seed=1", "--train.seed", "more.toml", "--", ""]
    assert [text for text in arguments if repr(text) not in reply(tmp_path, "", text)] == []


def test_an_unknown_key_names_the_nearest(tmp_path):
    nearest = {
        "train.global_bacth": "train.global_batch",
        "trian.seed": "train.seed",
        "optim.caption_drop": "train.caption_drop",
        "lr": "optim.lr",
        "train": "data.train",
        "run.directory": "run.dir",
    }
    for wrong, near in nearest.items():
        assert both_ways(tmp_path, wrong, "1") == [f"unknown key {wrong}; did you mean {near}?"] * 2
    assert "there are graph.enabled" in reply(tmp_path, "graph.zzz = 1")
    swallowed = reply(tmp_path, "[optim]\nlr = 1e-3\nmodel.hidden = 24")
    assert swallowed.endswith("the table [optim] takes in all lines below it; write model.hidden above it")


# What a single key may be


def test_every_key_is_declared_whole_and_has_a_user():
    """The checks do not count as users: a key that is only checked changes nothing."""
    paths = [path for path in (ROOT / "flux_ref").rglob("*.py") if path.name != "config_file.py"]
    text = "".join(path.read_text() for path in (*paths, ROOT / "train.py", ROOT / "eval.py"))
    for key, known in KEYS.items():
        assert re.search(rf"\.{key.split('.')[1]}\b", text), key
        assert known.meaning and known.type in config_file.KINDS, key
        assert not known.choices or known.default in known.choices, key
    assert (Config().eval.target, Config().eval.every_samples) == (0.586, 262_144)
    assert Config().mllog.ruleset == KEYS["mllog.ruleset"].choices[-1], "the newest"


def test_a_run_may_continue_with_other_values_of_these_keys_alone():
    fixed = [key for key, known in KEYS.items() if not known.resume]
    whole = {"model", "init", "optim"}
    assert {key for key in KEYS if key.split(".")[0] in whole} <= set(fixed)
    assert [key for key in fixed if key.split(".")[0] not in whole] == [
        *("train.seed", "train.global_batch", "train.caption_drop"),
        *(key for key in KEYS if key.startswith("train.timestep")),
        *("eval.every_samples", "eval.at_start", "eval.noise", "data.kind", "data.train_count", "data.val_count"),
        *("parallel.dtype", "parallel.reduce_dtype"),
        *(key for key in KEYS if key.startswith("precision.") and key[10:] not in ("native", "gather")),
    ]


VALUES = {  # TOML text: the types of key that take it
    '"some"': {str},
    "3": {int, float},
    "2.5e-1": {float},
    "true": {bool},
    "[2, 4]": {tuple[int, ...]},
    '["a", "b"]': {tuple[str, ...]},
    "[]": {tuple[int, ...], tuple[str, ...], tuple[tuple[int, str], ...]},
    '[[2, "a"], [4, "b"]]': {tuple[tuple[int, str], ...]},
    '[["a", 2]]': set(),
    '[1, "a"]': set(),
    "[true, false, true]": set(),
    "[[2], [4]]": set(),
    "1979-05-27": set(),
}


def test_a_value_has_the_type_of_its_key_in_the_file_and_on_the_command_line(tmp_path):
    """A value of the right type may still break another rule. Any text is a string on the command line."""
    wrong = []
    for key, text in itertools.product({known.type: key for key, known in KEYS.items()}.values(), VALUES):
        fits = KEYS[key].type in VALUES[text]
        for said in both_ways(tmp_path, key, text)[: 1 if KEYS[key].type is str else 2]:
            if fits == bool(re.search(rf"^{re.escape(key)}=.* is not ({KINDS})$", said)):
                wrong.append((key, text, said))
    for text in ("", "on", "1 2", "[1", "1\n2", "1\noptim.lr=3"):
        said = reply(tmp_path, "", f"--train.seed={text}")
        wrong += [] if said == f"train.seed={text!r} is not an integer" else [(text, said)]
    assert wrong == []


def test_a_string_is_plain_text(tmp_path):
    """Python makes a lone surrogate of a command-line byte that is not UTF-8."""
    for text in ('run.dir = "a\\u0000b"', 'precision.rules = ["a\\u0000b"]', 'precision.switch = [[16, "a\\u0000b"]]'):
        assert re.search(rf"^\S+=.* is not ({KINDS})$", reply(tmp_path, text)), text
    assert reply(tmp_path, "", "--run.dir=a\udcff") == "run.dir='a\\udcff' is not a string of plain text"
    assert "begins with ~" in reply(tmp_path, 'run.dir = "~/x"')


def test_a_number_lies_within_its_bounds_and_is_finite(tmp_path):
    wrong = []
    for key, known in NUMBERS.items():
        outside = {known.least - 1, known.most + 1 if known.most < LARGEST else 10**19, 10**400}
        if known.type is float:
            outside = {math.nextafter(known.least, -math.inf), math.nextafter(known.most, math.inf)}
            outside |= {"nan", "inf", "-inf", "1e999", 10**400}
        inside = {known.least, min(known.most, 2**62), known.default}
        for value in (*inside, *outside):
            for said in both_ways(tmp_path, key, str(value)):
                if (f" must be {known.allowed}" in said) != (value in outside):
                    wrong.append((key, value, said))
    assert wrong == []


def test_a_choice_is_one_of_those_named(tmp_path):
    for key, known in KEYS.items():
        for choice in known.choices:
            assert "must be one of" not in reply(tmp_path, f'{key} = "{choice}"'), (key, choice)
        if known.choices:
            said = reply(tmp_path, f'{key} = "other"')
            assert said == f"{key}=other must be one of {', '.join(known.choices)}"


# Combinations

REFUSED = {  # TOML: words of the refusal
    "model.heads = 25": ["model.hidden=3072", "model.heads=25"],
    "model.latent_height = 31": ["model.latent_height", "even"],
    "model.latent_width = 31": ["model.latent_width", "even"],
    **{
        f"model.rope_axes = {axes}": ["model.rope_axes=[", "three even numbers that add up to hidden / heads = 128"]
        for axes in ([64, 64], [16, 56, 56, 0], [15, 56, 57], [-16, 72, 72], [16, 56, 58], [])
    },
    'data.kind = "shapes"\ndata.train_count = 1': ["data.kind=shapes", "data.val_count"],
    'data.kind = "shapes"\ndata.val_count = 1': ["data.kind=shapes", "data.train_count"],
    'parallel.attention = "flash"\nparallel.dtype = "fp32"': ["parallel.attention=flash", "parallel.dtype=bf16"],
    'parallel.recompute = "block"\nparallel.compile = true': ["parallel.recompute=block", "parallel.compile=false"],
}


def test_what_cannot_work_is_refused_with_the_rule_and_what_does_no_harm_is_taken(tmp_path):
    replies = {toml: reply(tmp_path, toml) for toml in REFUSED}
    assert {toml: said for toml, said in replies.items() if not all(word in said for word in REFUSED[toml])} == {}
    for harmless in (
        'data.val = ""\neval.at_start = true',
        "sample.every_samples = 600",
        "train.timestep_mean = 0.5",
        "parallel.activation_budget = 0.5",
        SHAPES + 'sample.vae = "x"',
    ):
        assert reply(tmp_path, harmless) == "", harmless


SHAPES = 'data.kind = "shapes"\ndata.train_count = 1\ndata.val_count = 1\n'


def test_ranks_and_micro_batches_divide_the_batch_and_any_other_is_refused_with_what_does():
    for batch, micro, ranks in itertools.product(range(1, 50), (0, 1, 2, 5), (1, 2, 3, 8)):
        cfg = config_file.replace(Config(), train__global_batch=batch, train__micro_batch=micro)
        chunk = ranks * max(1, micro)
        if batch % chunk == 0:
            config_file.validate_world(cfg, ranks)
            continue
        said = conftest.refusal(config_file.validate_world, cfg, ranks)
        assert f"train.global_batch={batch} is not divisible by {ranks} ranks" in said
        assert f"use a multiple of {chunk}" in said and (f"train.micro_batch={micro}" in said) == bool(micro)


# Files


def test_a_file_that_is_missing_or_not_toml_is_refused_by_name(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "no\0ne.toml"):
        assert str(tmp_path) in conftest.refusal(config_file.load, path)
    path = tmp_path / "some.toml"
    for content in (b"train.seed = \n", b"\xff\xff", b"train.seed = 1\ntrain.seed = 2\n", b"{}", b"\0"):
        path.write_bytes(content)
        assert str(path) in conftest.refusal(config_file.load, path)
    for encoding in ("utf-8-sig", "utf-16"):  # as editors of Windows write
        path.write_bytes("train.seed = 4".encode(encoding))
        assert config_file.load(path).train.seed == 4


def test_a_config_has_a_name_and_its_run_a_folder(tmp_path, monkeypatch):
    assert config.run_dir(config_file.load(MICRO)) == Path("runs/micro")
    assert config.run_dir(loaded(tmp_path, "", "--run.dir=else/where")) == Path("else/where")
    (tmp_path / "..toml").write_text("")
    assert "no name that a run's folder can have" in conftest.refusal(config_file.load, tmp_path / "..toml")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path / "first")
    assert {config_file.load(path).name for path in (tmp_path / "first" / "config.toml", "config.toml")} == {"first"}
