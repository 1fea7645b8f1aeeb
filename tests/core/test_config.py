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
from flux_ref.cli import Options, Refusal
from flux_ref.config import KEYS, Config

CONFIGS = [MICRO, *sorted((ROOT / "configs").glob("*.toml"))]
AWKWARD = ['say "hi"', "back\\slash \\n", "tab\tline\nfeed", "übergroß 日本 😀", "#'=[]", "\x01\x1b", ""]
AWKWARD.append("".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0x110000)))))  # every character but NUL


def reply(tmp_path, toml, *overrides):
    """The line with which a config is refused; empty if it is taken."""
    try:
        loaded(tmp_path, toml, *overrides)
    except Refusal as error:
        return str(error)
    return ""


def loaded(tmp_path, toml, *overrides):
    path = tmp_path / "some.toml"
    path.write_text(toml, encoding="utf-8")
    return config_file.load(path, overrides)


def both_ways(tmp_path, key, value):
    """The replies to a value in the file and on the command line."""
    return [reply(tmp_path, f"{key} = {value}"), reply(tmp_path, "", f"--{key}={value}")]


def test_a_config_comes_back_from_its_dump(tmp_path):
    assert loaded(tmp_path, "# nothing\n") == Config(name="some")
    assert [line.split(" = ")[0] for line in config_file.dump(Config()).splitlines()] == list(KEYS)
    micro = dataclasses.replace(config_file.load(MICRO), name="some")
    awkward = [config_file.replace(micro, data__train=text, optim__lr=0.1 + len(text)) for text in AWKWARD]
    switch = config_file.replace(Config(name="some"), precision__switch=((3, "fp8"),), train__seed=10**18)
    for cfg in (*awkward, switch, *map(config_file.load, CONFIGS)):
        copy = tmp_path / f"{cfg.name}.toml"
        copy.write_text(config_file.dump(cfg), encoding="utf-8")
        assert config_file.load(copy) == cfg
        assert config_file.from_flat(cfg.name, json.loads(json.dumps(config.flat(cfg)))) == cfg


def test_overrides_win_over_the_file_and_are_read_in_the_type_of_their_key(tmp_path):
    overrides = ["--train.seed=2", "--train.seed=3", "--run.dir=8", "--optim.lr=1", "--eval.at_start=true"]
    overrides += ["--model.rope_axes=[32, 48, 48]", "--data.val=a=b 'c'"]
    cfg = loaded(tmp_path, "train.seed = 1\noptim.lr = 1e-3\n[run]\nwatchdog_s = 7", *overrides)
    assert (cfg.train.seed, cfg.run.dir, cfg.optim.lr, cfg.eval.at_start) == (3, "8", 1.0, True)
    assert (cfg.model.rope_axes, cfg.data.val, cfg.run.watchdog_s) == ((32, 48, 48), "a=b 'c'", 7.0)
    assert type(cfg.optim.lr) is float
    for text in ("train.seed", "-x", "train.seed=1", "--train.seed", "more.toml", "--", ""):
        assert repr(text) in reply(tmp_path, "", text)


def test_an_unknown_key_names_the_nearest(tmp_path):
    nearest = {
        "train.global_bacth": "train.global_batch",
        "trian.seed": "train.seed",
    }
    for wrong, near in nearest.items():
        assert both_ways(tmp_path, wrong, 1) == [f"unknown key {wrong}; did you mean {near}?"] * 2
    assert reply(tmp_path, "zzz = 1") == "unknown key zzz; --help lists all keys"


# What a single key may be


def test_every_key_is_declared_whole_and_has_a_user():
    """The checks do not count as users: a key that is only checked changes nothing."""
    paths = [path for path in (ROOT / "flux_ref").rglob("*.py") if path.name != "config_file.py"]
    text = "".join(path.read_text() for path in (*paths, ROOT / "train.py", ROOT / "eval.py"))
    for key, known in KEYS.items():
        assert re.search(rf"\.{key.split('.')[1]}\b", text), key
        assert known.meaning and known.allows(known.default), key
    assert (Config().eval.target, Config().eval.every_samples) == (0.586, 262_144)
    assert Config().mllog.ruleset == KEYS["mllog.ruleset"].choices[-1], "the newest"


SAMPLES = {  # a value of each type, as TOML has it
    str: '"some"',
    int: "3",
    float: "2.5e-1",
    bool: "true",
    tuple[int, ...]: "[2, 4]",
    tuple[str, ...]: '["a", "b"]',
    tuple[tuple[int, str], ...]: '[[2, "a"], [4, "b"]]',
    None: "[[2], [4]]",
}


def test_a_value_has_the_type_of_its_key_in_the_file_and_on_the_command_line(tmp_path):
    """A value of the right type may still break another rule. Any text is a string on the command line."""
    a_key = {known.type: key for key, known in KEYS.items()}
    for kind, given in itertools.product(a_key, SAMPLES):
        fits = given == kind or (given, kind) == (int, float)
        for said in both_ways(tmp_path, a_key[kind], SAMPLES[given])[: 1 if kind is str else 2]:
            assert ("has the wrong type; default" in said) != fits, (a_key[kind], given, said)
    for text in ("", "on", "1 2", "[1", "1\n2", "1979-05-27"):
        words = "has the wrong type; default 0: seed of every random number"
        assert words in reply(tmp_path, "", f"--train.seed={text}"), text


def test_a_value_lies_within_the_bounds_of_its_key_or_is_one_of_its_choices(tmp_path):
    for key, known in KEYS.items():
        inside, outside = {json.dumps(choice) for choice in known.choices}, {'"other"'}
        if known.type in (int, float):
            inside = {known.least, int(min(known.most, 1e18)), known.default}
            outside = {known.least - 1, known.most + 1 if known.most < 1e18 else 10**19}
        if known.type is float:
            outside = {math.nextafter(known.least, -math.inf), math.nextafter(known.most, math.inf)}
            outside |= {"nan", "inf", "-inf", "1e999"}
        if known.allowed:
            for value in (*inside, *outside):
                said = reply(tmp_path, f"{key} = {value}")
                assert (f" must be {known.allowed}" in said) == (value in outside), (key, value, said)


def test_what_would_take_minutes_in_silence_is_out_of_bounds():
    silent = "data.prefetch data.workers train.synthetic_steps pictures.steps model.double_blocks train.global_batch"
    silent += " eval.batch precision.history"
    assert [key for key in silent.split() if KEYS[key].allows(10**9)] == []


# Combinations

TOY = 'data.kind = "toy"\ndata.expected_train_samples = 1\n'
REFUSED = {  # TOML: words of the refusal
    "model.heads = 25": ["model.hidden=3072", "model.heads=25"],
    "model.latent_height = 31": ["model.latent_height", "even"],
    "model.latent_width = 31": ["model.latent_width", "even"],
    **{
        f"model.rope_axes = {axes}": ["model.rope_axes=(", "three even numbers with the sum hidden / heads = 128"]
        for axes in ([64, 64], [15, 56, 57], [-16, 72, 72], [16, 56, 58])
    },
    TOY: ["data.kind=toy", "data.expected_val_samples"],
    'data.pictures = "a"': ["set data.kind=toy"],
    TOY + 'data.pictures = "a"': ["set data.expected_train_samples and data.expected_val_samples to 0"],
    'compute.attention = "flash"\ncompute.dtype = "fp32"': [
        "compute.attention=cudnn and flash",
        "compute.dtype=bf16",
    ],
}
HARMLESS = (
    'data.val = ""\neval.at_start = true',
    "pictures.every_samples = 600",
    "train.logit_mean = 0.5",
    "compute.activation_memory_budget = 0.5",
    'compute.activation_checkpointing = "block"\ncompute.compile = true',
    TOY + 'data.expected_val_samples = 1\npictures.vae = "x"',
)


def test_what_cannot_work_is_refused_with_the_rule_and_what_does_no_harm_is_taken(tmp_path):
    for toml, words in REFUSED.items():
        said = reply(tmp_path, toml)
        assert said and all(word in said for word in words), (toml, said)
    assert [reply(tmp_path, toml) for toml in HARMLESS] == [""] * len(HARMLESS)


def test_ranks_and_micro_batches_divide_the_batch_and_any_other_is_refused_with_what_does():
    for batch, micro, ranks in itertools.product(range(1, 50), (0, 1, 2, 5), (1, 2, 3, 8)):
        cfg = config_file.replace(Config(), train__global_batch=batch, train__micro_batch=micro)
        accumulates = 0 < micro < batch // ranks  # a rank with fewer samples takes them at once
        chunk = ranks * (micro if accumulates else 1)
        if batch % chunk == 0:
            config_file.validate_world(cfg, ranks)
            assert config.micro_batch(cfg, ranks) == (micro if accumulates else batch // ranks)
            continue
        said = conftest.refusal(config_file.validate_world, cfg, ranks)
        assert f"train.global_batch={batch} is no multiple of {chunk}, the number of ranks" in said


# Files


def test_a_file_is_toml_and_its_name_is_that_of_the_run(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    for content in (
        b"train.seed = \n",
        b"\xff\xff",
        b"train.seed = 1\ntrain.seed = 2\n",
    ):
        path.write_bytes(content)
        assert str(path) in conftest.refusal(config_file.load, path)
    assert f"{tmp_path} is no file" in conftest.refusal(config_file.load, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path}/no.toml is no file" in conftest.refusal(config_file.load, "no.toml")
    path.write_bytes("train.seed = 4".encode("utf-8-sig"))  # as editors of Windows write
    assert config_file.load(path).train.seed == 4
    assert config.run_dir(config_file.load(MICRO)) == Path("runs/micro")


def test_the_home_of_a_user_is_known_in_every_path(tmp_path, monkeypatch):
    """Also where no shell expands ~: in a file, and after an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = loaded(tmp_path, 'data.train = "~/set/train"', "--run.dir=~/x", "--data.val=a~/b")
    assert (cfg.data.train, cfg.run.dir, cfg.data.val) == (f"{tmp_path}/set/train", f"{tmp_path}/x", "a~/b")
    parser = Options("x", "")
    parser.add_subparsers().add_parser("y", description="").add_argument("--out", type=Path)
    assert parser.parse_args(["y", "--out=~/z"]).out == tmp_path / "z"
