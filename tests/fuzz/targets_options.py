"""Targets: overrides, the command lines of all commands, and environment variables.

A command line lies in args.json, {"argv": [...], "env": {...}}. Options get absurd values, and go, come twice or
change places. A changed command line may be accepted only if each of its words makes sense by the rules here.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import patch

from fuzz import damage, targets_text
from fuzz.engine import Damage, Said, Target, command

import eval as eval_script
from flux_ref import config, config_file, config_rules, ranks
from flux_ref.run import cli
from flux_ref.run.attempt import attempt
from flux_ref.sampling import drawing
from tools.plan import commands as plan
from tools.preflight import commands as preflight
from tools.prepare import commands as prepare
from tools.prepare import images, mlcommons, shapes, verify
from tools.report import commands as report
from tools.shared import hardware

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "tests" / "micro.toml"
TERMINAL = "FUZZ_TERMINAL"  # the encoding of the terminal


def arguments() -> tuple[list[str], dict[str, str]]:
    content = json.loads(Path("args.json").read_text())
    return content["argv"], content["env"]


def write_arguments(argv: list[str], env: dict[str, str], folder: Path) -> None:
    """Without null bytes, which no system passes on."""
    content = json.dumps({"argv": argv, "env": env})
    (folder / "args.json").write_text(content.replace(r"\u0000", ""))


# Damages

HOSTILE = (*damage.NUMBERS, *damage.TEXTS)
NEW = ("--", "-h=1", "--no-such", "-", "", "--=", "--=1", "--.=1", "extra", "--json=", "@args")


def value(folder: Path, random: Random) -> str:
    """A word, or what follows its =, becomes absurd."""
    argv, env = arguments()
    at = random.randrange(len(argv))
    text = random.choice(HOSTILE)
    head, eq, _ = argv[at].partition("=")
    said = f"{argv[at][:40]} gets {text[:30]!a} of {len(text)}"
    argv[at] = head + eq + text if eq else text
    write_arguments(argv, env, folder)
    return said


def words(folder: Path, random: Random) -> str:
    """A word goes, comes twice, changes its place, is new, or has a letter more."""
    argv, env = arguments()
    argv, said = damage.moved_parts([*argv, random.choice(NEW)], random)
    if argv and random.random() < 0.3:
        argv[0] += random.choice("-=.é \x1b\r\n0")
    write_arguments(argv, env, folder)
    return f"{said}: {ascii(argv)[:200]}"


def variable(folder: Path, random: Random) -> str:
    """An environment variable gets an absurd value, or goes."""
    argv, env = arguments()
    name = random.choice(sorted(env))
    text = random.choice((None, *HOSTILE))
    env.pop(name)
    if text is not None:
        env[name] = text.encode("utf-8", "replace").decode()
    write_arguments(argv, env, folder)
    return f"{name} becomes {str(text)[:30]!a} of {len(str(text))}"


def terminal(folder: Path, random: Random) -> str:
    """A value that a terminal in another encoding cannot show."""
    argv, env = arguments()
    at = random.randrange(len(argv))
    encoding = random.choice(("ascii", "latin-1", "cp437"))
    text = random.choice(("\u2501", "\U0001f600", "\u00e9", "\u0663", "\ud800", "\x9b"))
    said = f"{argv[at][:40]} gets {text!a} more, in {encoding}"
    argv[at] += text
    write_arguments(argv, env | {TERMINAL: encoding}, folder)
    return said


ARGV = {"value": value, "words": words, "terminal": terminal}
ENV = {"variable": variable}


# Overrides


def run_overrides(folder: Path) -> dict[str, object]:
    return config.flat(config_file.load(MICRO, arguments()[0]))


def read_overrides(folder: Path) -> dict[str, object]:
    """The same by tomllib alone."""
    found = config.flat(config_file.load(MICRO))
    for word in arguments()[0]:
        key, text = re.fullmatch(r"--([a-z0-9_.]+)=(.*)", word, re.S).groups()
        kind = config.TYPES[key]
        given = text if kind is str else tomllib.loads(f"x = {text}")["x"]
        found[key] = float(given) if kind is float else tuple(given) if isinstance(given, list) else given
    return found


SOUND = config.flat(config_file.load(MICRO))
OVERRIDES = [f"--{key}={config_file._toml(v) if type(v) is not str else v}" for key, v in SOUND.items()]


# Command lines. A rule is the pattern of the text behind an option that makes sense; None for an option without a text.

Rule = str | None
COUNT = "[0-9]{1,20}"
DECIMAL = r"(?i)[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?"
ANY = "(?s).+"


def is_override(word: str) -> bool:
    try:
        config_file.load(MICRO, [word])
    except Exception:
        return False
    return True


def judge(rules: dict[str, Rule], counts: tuple[int, ...], folder: Path, said: Said) -> str:
    """The judge of a command line. rules: of options and of environment variables.

    counts: how many words may be no options. Twice the same option is fine.
    """
    argv, env = arguments()
    if {"-h", "--help"} & set(argv):
        return ""
    free = 0
    words = iter(argv)
    given = [pair for pair in env.items() if pair[0] in rules]
    for word in words:
        name, eq, text = word.partition("=")
        if not word.startswith("-"):
            free += 1
        elif rules.get(name):
            given.append((name, text if eq else next(words, "")))
        elif name not in rules and not is_override(word):
            return f"{word[:80]} is no option"
    wrong = [pair for pair in given if not re.fullmatch(rules[pair[0]], pair[1])]
    if wrong:
        return f"{wrong} makes no sense"
    return "" if free in counts else f"{free} words, want {counts}"


def run_command(main: Callable[[list[str]], int], folder: Path) -> Said:
    """Call a command with the arguments and the environment of args.json."""
    argv, env = arguments()
    os.environ.update(env)
    try:
        return command(main, argv, env.get(TERMINAL, "utf-8"))
    finally:
        ranks.stop()


# Commands up to the point where their work would begin


def started(argv: list[str]) -> None:
    """What train.py does before it opens the data."""
    cfg = config_file.load(*cli.config_and_overrides(argv, default=str(MICRO)))
    world = ranks.start(cfg.parallel, timeout_s=1)
    config_rules.validate_world(cfg, world.size)
    print(f"rank {world.rank} of {world.size}")


def parsed_eval(argv: list[str]) -> None:
    options = eval_script.parse(argv)
    config_file.override(config.Config(), options.overrides)
    print(options.step)


def planned(argv: list[str]) -> None:
    """All of a plan's input; nothing is counted."""
    args, overrides = plan.parse(argv)
    print(hardware.load(args.gpu, args.hardware)[0].arch)
    for path in args.configs:
        config_rules.validate_world(config_file.load(path, overrides), args.gpus)


def attempted(task: Callable[[list[str]], None]) -> Callable[[list[str]], int]:
    """A command of one process."""
    return lambda argv: attempt("command", lambda: task(argv) or 0)


def on_ranks(task: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """A command of several ranks."""
    return lambda argv: cli.run("command", "usage", lambda argv: task(argv) or 0, argv)


def parsed_prepare(argv: list[str]) -> int:
    """prepare's parsers; no job is started."""
    with ExitStack() as stack:
        for module in (shapes, mlcommons, images, verify):
            stack.enter_context(patch.object(module, "run", return_value=0))
        return prepare.main(argv)


def judge_ranks(folder: Path, said: Said) -> str:
    """Alone, or as torchrun says."""
    env = arguments()[1]
    needed = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    is_sound = needed <= env.keys() or not {"RANK", "WORLD_SIZE"} & env.keys()
    return judge({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, (1,), folder, said) if is_sound else "no ranks"


def make_reported(folder: Path) -> None:
    targets_text.make_logs(folder)
    write_arguments(["logs", "--ruleset=6.0.0", "--points=points.json", "--json=figures.json"], {}, folder)


FREE = str(MICRO)
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_NODEID": "1", "SLURM_PROCID": "1"}
JSON = {"--json": r"(?s).*\.json"}
CARDS = "|".join(map(re.escape, tomllib.loads(hardware.TABLE.read_text())["gpu"]))
RULESETS = "|".join(map(re.escape, config_rules.CHOICES["mllog.ruleset"]))
PLANNED = {"--gpus": COUNT, "--gpu": CARDS, "--price-per-gpu-hour": DECIMAL, "--hardware": ANY}
EVAL = {"--checkpoint": COUNT, "--json": None, "--all": None, "--ema": None, "--draw-only": None, "--prompt": "(?s).*"}
EVAL |= dict.fromkeys(("--config", "--prompts", "--t5", "--clip", *(f"--{name}" for name in drawing.SHORT)), ANY)
PREFLIGHT = {"--nodes": ANY, "--node": "[0-2]", "--gpus": COUNT, "--wait": DECIMAL, "--slow": DECIMAL}
PREFLIGHT |= {"--address": "(?s).+:[0-9]{1,5}", "SLURM_NODEID": COUNT}


def line(
    name: str,
    main: Callable[[list[str]], int],
    make: Callable[[Path], None],
    rules: dict[str, Rule],
    *counts: int,
    damages: dict[str, Damage] = ARGV,
    **more: object,
) -> Target:
    """A target whose input is a command line. counts: how many words may be no options."""
    return Target(name, make, damages, partial(run_command, main), judge=partial(judge, rules, counts), **more)


def words_of(*argv: str, **env: str) -> Callable[[Path], None]:
    """A `make` that writes these arguments."""
    return partial(write_arguments, list(argv), env)


TARGETS = [
    Target("overrides", words_of(*OVERRIDES), ARGV, run_overrides, read_overrides),
    Target(
        "ranks",
        words_of(FREE, **ALONE),
        ENV,
        partial(run_command, on_ranks(started)),
        judge=judge_ranks,
    ),
    line("train_options", on_ranks(started), words_of(FREE, "--train.seed=3"), {}, 1),
    line(
        "eval_options",
        on_ranks(parsed_eval),
        words_of("runs/tiny", "--checkpoint=900", "--json", "--vae=ae.safetensors", "--prompt=a cat"),
        EVAL,
        1,
    ),
    line(
        "preflight_options",
        attempted(lambda argv: print(preflight.parse(argv).node)),
        words_of("--nodes=a,b,c", "--address=a:29500", "--gpus=8", "--wait=60", "--slow=.8", **SLURM),
        PREFLIGHT,
        0,
        damages=ARGV | ENV,
    ),
    line(
        "prepare_options",
        parsed_prepare,
        words_of("shapes", "--out=made", f"--config={FREE}"),
        {"--out": ANY, "--config": ANY},
        1,
    ),
    line(
        "plan_options",
        attempted(planned),
        words_of(FREE, "--gpus=4", "--gpu=h200", "--price-per-gpu-hour=2.5", "--train.seed=1"),
        PLANNED | JSON,
        *(1, 2, 3),
    ),
    line(
        "report_options",
        report.main,
        make_reported,
        JSON | {"--ruleset": RULESETS, "--points": ANY},
        *(1, 2),
        writes=("*.json",),
    ),
]
