"""The config: what loads, what comes back from a dump, and what each refusal says."""

import dataclasses
import itertools
import json
import random
import re
from pathlib import Path

import conftest
from conftest import MICRO, ROOT

from flux_ref import config, config_file, config_rules
from flux_ref.benchmark import EVAL_EVERY_SAMPLES, TARGET
from flux_ref.config import SECTIONS, TYPES, Config
from flux_ref.config_rules import CHOICES, POSITIVE, SIGNED
from flux_ref.errors import Refusal

CONFIGS = [MICRO, *sorted((ROOT / "configs").glob("*.toml"))]
NUMBERS = [key for key, kind in TYPES.items() if kind in (int, float)]
PATHS = ["run.dir", "data.train", "data.val", "data.empty"]
NOT_OF_THE_TYPE = (
    r"is not (a string|an integer|a number|true or false|a list of (integers|strings|\[integer, string\]))$"
)
SHAPES = "data.train_count = 1\ndata.val_count = 1\n"  # data.kind=shapes needs these counts
AWKWARD = [
    'say "hi"',
    "back\\slash \\n",
    "tab\tline\nfeed",
    "übergroß 日本 😀",
    " spaced ",
    "#'=[]",
    "\x01\x1b",
    "\x7f",
    "",
]


def loaded(tmp_path: Path, toml: str, *overrides: str) -> Config:
    path = tmp_path / "some.toml"
    path.write_text(toml, encoding="utf-8")
    return config_file.load(path, list(overrides))


def refusal(tmp_path: Path, toml: str, *overrides: str) -> str:
    """The one line with which a config is refused."""
    return conftest.refusal(loaded, tmp_path, toml, *overrides)


def reply(tmp_path: Path, toml: str, *overrides: str) -> str:
    """The line with which a config is refused; empty if it is taken."""
    try:
        loaded(tmp_path, toml, *overrides)
    except Refusal as error:
        return str(error)
    return ""


def both_ways(tmp_path: Path, key: str, value: str) -> list[str]:
    """The replies to a value in the file and on the command line."""
    return [reply(tmp_path, f"{key} = {value}"), reply(tmp_path, "", f"--{key}={value}")]


def test_a_file_without_keys_gives_the_defaults_and_their_dump_holds_every_key_once(tmp_path):
    assert loaded(tmp_path, "# nothing\n") == Config(name="some")
    assert [line.split(" = ")[0] for line in config_file.dump(Config()).splitlines()] == list(TYPES)


def test_every_config_file_loads_and_its_dump_gives_the_same_config(tmp_path):
    for path in CONFIGS:
        cfg = config_file.load(path)
        copy = tmp_path / path.name
        copy.write_text(config_file.dump(cfg), encoding="utf-8")
        assert config_file.load(copy) == cfg and cfg.name == path.stem, path


def test_any_value_comes_back_from_a_dump(tmp_path):
    micro = dataclasses.replace(config_file.load(MICRO), name="some")
    rng = random.Random(0)
    for text in AWKWARD:
        values = {"mllog__submission_org": text, "data__train": text}
        values |= {"optim__lr": rng.uniform(1, 10) * 10.0 ** rng.randint(-300, 17), "train__seed": rng.randrange(2**63)}
        cfg = config_file.replace(micro, **values)
        assert loaded(tmp_path, config_file.dump(cfg)) == cfg, ascii(text)


def test_a_string_with_a_null_byte_or_that_utf8_cannot_hold_is_refused(tmp_path):
    """Python makes such a string of a command-line byte that is not UTF-8."""
    assert [key for key in PATHS if key not in reply(tmp_path, f'{key} = "a\\u0000b"')] == []
    assert "run.dir" in refusal(tmp_path, "", "--run.dir=a\udcff")
    for text in ('precision.rules = ["* *: bf16 x bf16", "a\\u0000b"]', 'precision.switch = [[16, "a\\u0000b"]]'):
        assert re.search(r"^precision\.\w+=.* holds a null byte", refusal(tmp_path, text)), text


def test_overrides_win_over_the_file_and_are_read_in_the_type_of_their_key(tmp_path):
    overrides = ["--train.seed=2", "--train.seed=3", "--run.dir=8", "--optim.lr=1", "--eval.at_start=true"]
    overrides += ["--model.rope_axes=[32, 48, 48]", "--data.val=a=b 'c'"]
    cfg = loaded(tmp_path, "train.seed = 1\noptim.lr = 1e-3", *overrides)
    assert (cfg.train.seed, cfg.run.dir, cfg.optim.lr, cfg.eval.at_start) == (3, "8", 1.0, True)
    assert (cfg.model.rope_axes, cfg.data.val) == ((32, 48, 48), "a=b 'c'")
    assert type(cfg.optim.lr) is float


def test_an_argument_that_is_no_override_is_refused(tmp_path):
    arguments = ["train.seed", "-x", "train.seed=1", "--train.seed", "more.toml", "--", ""]
    assert [text for text in arguments if repr(text) not in reply(tmp_path, "", text)] == []


# Keys


NEAREST = {
    "train.global_bacth": "train.global_batch",
    "train.globalbatch": "train.global_batch",
    "trian.seed": "train.seed",
    "modle.latent_height": "model.latent_height",
    "optim.caption_drop": "train.caption_drop",
    "global_batch": "train.global_batch",
    "lr": "optim.lr",
    "run.directory": "run.dir",
}


def test_an_unknown_key_names_the_nearest(tmp_path):
    for wrong, near in NEAREST.items():
        assert both_ways(tmp_path, wrong, "1") == [f"unknown key {wrong}; did you mean {near}?"] * 2


def test_a_value_for_a_whole_section_is_refused_and_a_key_of_it_named(tmp_path):
    for section in SECTIONS:
        keys = "|".join(key for key in TYPES if key.startswith(section + "."))
        for message in both_ways(tmp_path, section, "3"):
            assert re.search(rf"^{section} is a section; give one of its keys, as in ({keys})$", message), message
        assert f"{section} is a section" in conftest.refusal(config_file.from_flat, "name", {section: 3})


def test_a_key_that_a_file_gives_twice_is_refused(tmp_path):
    """TOML itself refuses a name that is written twice, but not a quoted one, nor an earlier name of the key."""
    for toml in ("train.seed = 1\n'train.seed' = 2", "fp8.margin = 0\nprecision.margin = 1"):
        assert re.search(r"gives (train\.seed|precision\.margin) twice; keep one", refusal(tmp_path, toml)), toml
    assert loaded(tmp_path, "'train.seed' = 2").train.seed == 2


def test_a_removed_key_is_read_where_it_says_what_runs_do_and_refused_elsewhere(tmp_path):
    for key, value in config_file.REMOVED.items():
        assert loaded(tmp_path, f"{key} = {json.dumps(value)}") == loaded(tmp_path, "")
        assert config_file.from_flat("config", {key: value}) == Config(name="config")
        asked = json.dumps("other" if isinstance(value, str) else not value)
        assert refusal(tmp_path, f"{key} = {asked}").startswith(f"{key}={asked}: this key was removed"), key


def test_the_tables_of_rules_name_only_keys_that_exist():
    assert set(POSITIVE) <= set(NUMBERS) and len(set(POSITIVE)) == len(POSITIVE)
    assert {key for key in CHOICES if TYPES.get(key) is not str} == set()
    assert set(TYPES.values()) <= {str, int, float, bool, tuple[int, ...], STRINGS, PAIRS}


def test_no_key_is_without_a_user():
    """The rules do not count as users: a key that is only checked changes nothing."""
    rules = {"config_file.py", "config_rules.py"}
    paths = [path for path in (ROOT / "flux_ref").rglob("*.py") if path.name not in rules]
    text = "".join(path.read_text() for path in (*paths, ROOT / "train.py", ROOT / "eval.py"))
    assert [key for key in TYPES if not re.search(rf"\.{key.split('.')[1]}\b", text)] == []


# Types

STRINGS, PAIRS = tuple[str, ...], tuple[tuple[int, str], ...]
VALUES = {  # TOML text: the types of key that take it
    '"some"': {str},
    "3": {int, float},
    "3.0": {float},
    "2.5e-1": {float},
    "true": {bool},
    "[2, 4]": {tuple[int, ...]},
    '["a", "b"]': {STRINGS},
    "[]": {tuple[int, ...], STRINGS, PAIRS},
    '[[2, "a"], [4, "b"]]': {PAIRS},
    '[["a", 2]]': set(),
    '[1, "a"]': set(),
    "[true, false, true]": set(),
    "[2.0, 4.0]": set(),
    "[[2], [4]]": set(),
    "{ a = 1 }": set(),
    "1979-05-27": set(),
}


def complaint(tmp_path: Path, key: str, text: str) -> str:
    """What is wrong with the answer to a value in the file."""
    fits = TYPES[key] in VALUES[text]
    try:
        value = config.flat(loaded(tmp_path, f"{key} = {text}"))[key]
    except Refusal as error:
        # A value of the right type may still break another rule.
        right = (str(error).startswith(f"{key}=") or fits) and bool(re.search(NOT_OF_THE_TYPE, str(error))) != fits
        return "" if right else f"{key} = {text}: {error}"
    right = fits and type(value) is getattr(TYPES[key], "__origin__", TYPES[key])
    same = right and json.loads(json.dumps(value)) == json.loads(text)  # JSON has no tuples
    return "" if same else f"{key} took {text} as {value!r}"


def test_only_an_integer_for_a_number_is_converted(tmp_path):
    keys = {kind: key for key, kind in TYPES.items()}.values()  # one of each type
    assert [words for text in VALUES for key in keys if (words := complaint(tmp_path, key, text))] == []


def test_the_command_line_is_as_strict_as_the_file(tmp_path):
    offenders = []
    for text in (*(text for text in VALUES if text != '"some"'), "", "on", "1 2", "0x", "[1", "1\n2"):
        for key in ("train.seed", "optim.weight_decay", "eval.at_start", "model.rope_axes"):
            if TYPES[key] not in VALUES.get(text, set()):
                message = reply(tmp_path, "", f"--{key}={text}")
                if not (message.startswith(f"{key}=") and re.search(NOT_OF_THE_TYPE, message)):
                    offenders.append((key, text, message))
    assert offenders == []
    assert "train.seed" in refusal(tmp_path, "", "--train.seed=1\noptim.lr=3")  # one value and nothing after it


def test_an_integer_beyond_all_bounds_is_refused(tmp_path):
    for key, digits in itertools.product(("optim.lr", "train.seed"), (19, 400, 5000)):
        for message in both_ways(tmp_path, key, "9" * digits):
            assert key in message or "not valid TOML" in message, (key, digits)


# Ranges


def test_no_number_may_be_negative_and_some_not_zero(tmp_path):
    replies = {key: reply(tmp_path, f'train.timestep = "logit_normal"\n{key} = -1') for key in NUMBERS}
    offenders = [key for key in NUMBERS if (key in replies[key]) == (key in SIGNED)]
    for key in NUMBERS:
        zero = reply(tmp_path, f"parallel.compile = true\n{key} = 0")
        if zero != (f"{key}={TYPES[key](0)} must be greater than 0" if key in POSITIVE else ""):
            offenders.append((key, zero))
    assert offenders == []


def test_no_number_may_be_infinite_or_nan(tmp_path):
    values = itertools.product((key for key in NUMBERS if TYPES[key] is float), ("nan", "inf", "-inf", "1e999"))
    replies = {(key, value): both_ways(tmp_path, key, value) for key, value in values}
    assert [pair for pair, texts in replies.items() if not all(text.startswith(f"{pair[0]}=") for text in texts)] == []


def test_a_choice_is_one_of_those_named(tmp_path):
    for key, choices in CHOICES.items():
        taken = [config.flat(loaded(tmp_path, SHAPES + f'{key} = "{choice}"'))[key] for choice in choices]
        assert tuple(taken) == choices
        for wrong in ("", choices[0].upper() + " ", "nothing"):
            assert refusal(tmp_path, f'{key} = "{wrong}"') == f"{key}={wrong!r} is not one of {', '.join(choices)}"


REFUSED = {  # TOML: words of the refusal
    "train.caption_drop = 1.01": ["train.caption_drop"],
    "optim.beta1 = 1.0": ["optim.beta1"],
    "optim.beta2 = 1.5": ["optim.beta2"],
    "model.heads = 25": ["model.hidden=3072", "model.heads=25"],
    "model.latent_height = 31": ["model.latent_height", "even"],
    "model.latent_width = 31": ["model.latent_width", "even"],
    "model.rope_axes = [64, 64]": ["model.rope_axes=[64, 64]", "three even numbers"],
    "model.rope_axes = [16, 56, 56, 0]": ["three even numbers"],
    "model.rope_axes = [15, 56, 57]": ["three even numbers"],
    "model.rope_axes = [-16, 72, 72]": ["three even numbers"],
    "model.rope_axes = [16, 56, 58]": ["model.rope_axes=[16, 56, 58]", "hidden / heads = 128"],
    "model.rope_axes = []": ["three even numbers"],
    f"model.rope_axes = {[2] * 100_000}": ["2, 2... must be three even numbers"],
    "optim.eps = 1e-320": ["optim.eps=1e-320 vanishes in fp32", "use 1e-30 or more"],
    'run.dir = "~/x"': ["run.dir='~/x' begins with ~", "write the whole path"],
    'data.kind = "shapes"\ndata.train_count = 1': ["data.kind=shapes", "data.val_count"],
    'data.kind = "shapes"\ndata.val_count = 1': ["data.kind=shapes", "data.train_count"],
    "train.timestep_mean = -0.5": [
        "train.timestep_mean=-0.5",
        "only with train.timestep=logit_normal; set that, or leave",
    ],
    "train.timestep_width = 2": [
        "train.timestep_width=2.0",
        "only with train.timestep=logit_normal; set that, or leave",
    ],
    'train.timestep = "logit_normal"\ntrain.timestep_mean = -16.5': ["train.timestep_mean=-16.5", "from -16 to 16"],
    'train.timestep = "logit_normal"\ntrain.timestep_mean = 17': ["train.timestep_mean=17.0", "from -16 to 16"],
    'train.timestep = "logit_normal"\ntrain.timestep_width = 17': ["train.timestep_width=17.0", "from 0 to 16"],
    "train.timestep_shift = 1001": ["train.timestep_shift=1001.0", "from 0 to 1,000"],
    'train.timestep = "lognormal"': ["train.timestep='lognormal' is not one of uniform, logit_normal"],
    "checkpoint.keep_every = 2": ["checkpoint.keep_every", "checkpoint.every_samples"],
    SHAPES + 'data.kind = "shapes"\nsample.vae = "x"': ["sample.vae=x", "shapes"],
    "sample.every_samples = 600": ["sample.every_samples=600", "set sample.count above 0"],
    "fp8.recipe = [1]": ["precision.preset=[1] is not a string"],  # a key of earlier versions
}


def test_what_breaks_a_rule_is_refused_with_the_rule(tmp_path):
    replies = {toml: reply(tmp_path, toml) for toml in REFUSED}
    assert {toml: text for toml, text in replies.items() if not all(word in text for word in REFUSED[toml])} == {}
    for key in ("train.caption_drop", "optim.beta1", "optim.beta2"):
        loaded(tmp_path, f"{key} = 0.99")


# Ranks


def refused_for(batch: int, micro: int, ranks: int) -> str:
    """Why so many ranks cannot run a config; "" if they can."""
    train = dataclasses.replace(Config().train, global_batch=batch, micro_batch=micro)
    try:
        config_rules.validate_world(Config(train=train), ranks)
    except Refusal as error:
        return str(error)
    return ""


def test_ranks_and_micro_batches_divide_the_batch_and_any_other_is_refused_with_batches_that_do():
    for batch, micro, ranks in itertools.product(range(1, 50), (0, 1, 2, 5), (1, 2, 3, 8)):
        message = refused_for(batch, micro, ranks)
        assert bool(message) == (batch % (ranks * max(1, micro)) > 0)
        if message:
            assert f"train.global_batch={batch}" in message and f"{ranks} ranks" in message
            assert (f"train.micro_batch={micro}" in message) == bool(micro)
            usable = [int(number) for number in re.search(r"; use (\d+)(?: or (\d+))?", message).groups() if number]
            assert min(usable) > 0 and max(usable) > batch
            assert not any(refused_for(other, micro, ranks) for other in usable)


# Files


def test_a_file_that_is_missing_or_not_toml_is_refused_by_name(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "no\0ne.toml"):
        assert str(tmp_path) in conftest.refusal(config_file.load, path)
    path = tmp_path / "some.toml"
    for content in (b"train.seed = \n", b"\xff\xfe", b"train.seed = 1\ntrain.seed = 2\n", b"{}", b"\0"):
        path.write_bytes(content)
        assert str(path) in conftest.refusal(config_file.load, path)
    path.write_bytes(b"\xef\xbb\xbftrain.seed = 4")  # the mark that editors of Windows write
    assert config_file.load(path).train.seed == 4


def test_a_run_goes_to_runs_and_its_name_unless_told(tmp_path):
    assert config.run_dir(loaded(tmp_path, "")) == Path("runs/some")
    assert config.run_dir(config_file.load(MICRO)) == Path("runs/micro")
    assert config.run_dir(loaded(tmp_path, "", "--run.dir=else/where")) == Path("else/where")
    for name in ("..toml", "...toml"):
        (tmp_path / name).write_text("")
        assert f"{name} has no name that a run's folder can have" in conftest.refusal(config_file.load, tmp_path / name)


def test_the_config_of_a_run_keeps_the_name_of_its_folder(tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.toml").write_text("")
    assert config_file.load(tmp_path / "first" / "config.toml").name == "first"
    monkeypatch.chdir(tmp_path / "first")
    assert config_file.load("config.toml").name == "first"


def test_the_defaults_are_the_benchmarks_constants():
    assert (Config().eval.target, Config().eval.every_samples) == (TARGET, EVAL_EVERY_SAMPLES)
    assert Config().mllog.ruleset == CHOICES["mllog.ruleset"][-1], "the newest"


def test_configs_of_runs_before_precision_became_a_policy_are_read(tmp_path):
    for old, new in {"off": "bf16", "dynamic": "fp8", "delayed": "fp8_delayed"}.items():
        early = {"fp8.recipe": old, "fp8.history": 7, "fp8.gather": False}
        for cfg in (
            config_file.from_flat("early", early),
            loaded(tmp_path, "".join(f"{key} = {json.dumps(value)}\n" for key, value in early.items())),
        ):
            assert (cfg.precision.preset, cfg.precision.history, cfg.precision.gather) == (new, 7, False)


def test_presets_of_earlier_runs_have_their_names_of_today(tmp_path):
    """In config files and checkpoints; an option must give the name of today."""
    early = {
        "parallel.dtype": "bf16",
        "precision.preset": "mxfp4_backward",
        "precision.switch": [[512_000, "fp8"], [1_024_000, "mxfp4_backward"]],
    }
    for cfg in (
        config_file.from_flat("early", early),
        loaded(tmp_path, "".join(f"{key} = {json.dumps(value)}\n" for key, value in early.items())),
    ):
        assert cfg.precision.preset == "under80"
        assert cfg.precision.switch == ((512_000, "fp8"), (1_024_000, "under80"))
    message = conftest.refusal(config_file.override, cfg, ["--precision.preset=mxfp4_backward"])
    assert re.search("^precision.preset names the preset 'mxfp4_backward'; give one of .*under80", message)
