"""Targets: overrides, the command lines of all commands, and environment variables.

A command line lies in args.json, {"argv": [...], "env": {...}}. Options get absurd values, and go, come twice or
change places. A changed command line may be accepted only if each of its words makes sense by the rules here.
"""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz import damage, targets_text
from fuzz.engine import Said, Target, command

from flux_ref import config, config_file, config_rules, ranks
from flux_ref.formats.outside import whole_number
from flux_ref.run import cli, weight_files
from flux_ref.run.attempt import attempt
from flux_ref.sampling import drawing
from tools.plan import commands as plan
from tools.report import commands as report
from tools.shared import hardware
from tools.watch import commands as watch
from tools.weights import commands as weights

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "tests" / "micro.toml"
TERMINAL = "FUZZ_TERMINAL"  # the encoding of the terminal


def arguments(folder: Path) -> tuple[list[str], dict[str, str]]:
    content = json.loads((folder / "args.json").read_text())
    return content["argv"], content["env"]


def made(argv: list[str], env: dict[str, str] | None = None) -> Callable[[Path], None]:
    """A `make` that writes these arguments."""
    return lambda folder: (folder / "args.json").write_text(json.dumps({"argv": argv, "env": env or {}})) and None


# Damages


def _put(folder: Path, argv: list[str], env: dict[str, str]) -> None:
    no_null = {name: value.replace("\0", "") for name, value in env.items()}  # no system passes null bytes on
    content = {"argv": [word.replace("\0", "") for word in argv], "env": no_null}
    (folder / "args.json").write_text(json.dumps(content))


def value(folder: Path, random: Random) -> str:
    """A word, or what follows its =, becomes absurd."""
    argv, env = arguments(folder)
    at, text = random.randrange(len(argv)), random.choice((*damage.NUMBERS, *damage.TEXTS))
    head, eq, _ = argv[at].partition("=")
    said = f"{argv[at][:40]} gets {text[:30]!a} of {len(text)}"
    argv[at] = head + eq + text if eq else text
    _put(folder, argv, env)
    return said


def words(folder: Path, random: Random) -> str:
    """A word goes, comes twice, changes its place, or is mangled."""
    argv, env = arguments(folder)
    at, to = random.randrange(len(argv)), random.randrange(len(argv) + 1)
    how, word = random.choice(("gone", "twice", "moved", "mangled", "new")), argv[at]
    if how == "gone":
        del argv[at]
    elif how == "twice":
        argv.insert(to, word)
    elif how == "moved":
        argv.insert(min(to, len(argv) - 1), argv.pop(at))
    elif how == "mangled":
        place = random.randrange(len(word) + 1)
        argv[at] = word[:place] + random.choice("-=.é \x1b\r\n0") + word[place:]
    else:
        word = random.choice(("--", "-h=1", "--no-such", "-", "", "--=", "--=1", "--.=1", "extra", "--json=", "@args"))
        argv.insert(to, word)
    _put(folder, argv, env)
    return f"{word[:40]} {how} to {to}"


def variable(folder: Path, random: Random) -> str:
    """An environment variable gets an absurd value, or goes."""
    argv, env = arguments(folder)
    name, text = random.choice(sorted(env)), random.choice((*damage.NUMBERS, *damage.TEXTS))
    if random.random() < 0.2:
        del env[name]
        _put(folder, argv, env)
        return f"{name} gone"
    env[name] = text.encode("utf-8", "surrogateescape" if text.isascii() else "replace").decode()
    _put(folder, argv, env)
    return f"{name} becomes {text[:30]!a} of {len(text)}"


def terminal(folder: Path, random: Random) -> str:
    """A value that a terminal in another encoding cannot show."""
    argv, env = arguments(folder)
    at, encoding = random.randrange(len(argv)), random.choice(("ascii", "latin-1", "cp437"))
    text = random.choice(("\u2501", "\U0001f600", "\u00e9", "\u0663", "\ud800", "\x9b"))
    said = f"{argv[at][:40]} gets {text!a} more, in {encoding}"
    argv[at] += text
    _put(folder, argv, env | {TERMINAL: encoding})
    return said


ARGV = {change.__name__: change for change in (value, words, terminal)}
ENV = {variable.__name__: variable}


# Overrides


def run_overrides(folder: Path) -> dict[str, object]:
    return config.flat(config_file.load(MICRO, arguments(folder)[0]))


def read_overrides(folder: Path) -> dict[str, object]:
    """The same by tomllib alone."""
    found = config.flat(config_file.load(MICRO))
    for word in arguments(folder)[0]:
        key, text = re.fullmatch(r"--([a-z0-9_.]+)=(.*)", word, re.S).groups()
        kind = config.TYPES[key]
        given = text if kind is str else tomllib.loads(f"x = {text}")["x"]
        found[key] = float(given) if kind is float else tuple(given) if isinstance(given, list) else given
    return found


SOUND = config.flat(config_file.load(MICRO))
OVERRIDES = [f"--{key}={config_file._toml(v) if type(v) is not str else v}" for key, v in SOUND.items()]


def make_overrides(folder: Path) -> None:
    made(OVERRIDES)(folder)


# Command lines. A rule says whether the text behind an option's = makes sense.

Rule = Callable[[str], bool]


def number(least: float, most: float) -> Rule:
    """A rule of its own: a plain ASCII decimal in range."""
    return lambda text: (
        bool(re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.A | re.I)) and (least <= float(text) <= most)
    )


def whole(least: int, most: int) -> Rule:
    return lambda text: bool(re.fullmatch("[0-9]{1,20}", text)) and least <= int(text) <= most


def is_override(word: str) -> bool:
    try:
        config_file.load(MICRO, [word])
    except Exception:
        return False
    return True


def judge(rules: dict[str, Rule], *counts: int) -> Callable[[Path, Said], str]:
    """The judge of a command line. counts: how many words may be no options. Twice the same option is fine."""

    def wrong(folder: Path, said: Said) -> str:
        argv, free = arguments(folder)[0], 0
        if {"-h", "--help"} & set(argv):
            return ""
        it = iter(argv)
        for word in it:
            name, eq, text = word.partition("=")
            if not word.startswith("-"):
                free += 1
                continue
            if name in rules and not eq and rules[name] is not None:
                text = next(it, "")
            if name in rules:
                if rules[name] is not None and not rules[name](text):
                    return f"{word[:80]} makes no sense"
            elif not is_override(word):
                return f"{word[:80]} is no option"
        return "" if free in counts else f"{free} words, want {counts}"

    return wrong


def cli_command(main: Callable[[list[str]], int]) -> Callable[[Path], Said]:
    """A `run` that calls a command with the arguments and the environment of args.json."""

    def run(folder: Path) -> Said:
        argv, env = arguments(folder)
        os.environ.update(env)
        return command(main, argv, env.get(TERMINAL, "utf-8"))

    return run


def start(argv: list[str]) -> int:
    """What train.py does before it opens the data."""
    cfg = config_file.load(*cli.config_and_overrides(argv, default=str(MICRO)))
    world = ranks.start(cfg.parallel, timeout_s=1)
    config_rules.validate_world(cfg, world.size)
    print(f"rank {world.rank} of {world.size}")
    return 0


def run_train(folder: Path) -> Said:
    try:
        return cli_command(lambda argv: cli.run("train.py", "usage", start, argv))(folder)
    finally:
        ranks.stop()


RANKS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RANKS |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}


def judge_ranks(folder: Path, said: Said) -> str:
    """Alone, or as torchrun says."""
    env = arguments(folder)[1]
    size = whole_number(env.get("WORLD_SIZE", "1"), 1, 1)
    rest = [whole(0, 0)(env.get(name, "0")) for name in ("RANK", "LOCAL_RANK")]
    is_given = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= env.keys()
    return "" if size and all(rest) and (is_given or not {"RANK", "WORLD_SIZE"} & env.keys()) else "no such ranks"


def preflight(argv: list[str]) -> int:
    from tools.preflight import commands

    return attempt("preflight", lambda: print(commands.parse(argv).node) or 0)


def judge_preflight(folder: Path, said: Said) -> str:
    env = arguments(folder)[1]
    if "SLURM_NODEID" in env and not whole(0, 10**6)(env["SLURM_NODEID"]):
        return "SLURM_NODEID is no number"
    rules = {"--nodes": bool, "--node": whole(0, 2), "--gpus": whole(1, 1024), "--wait": number(1, 86400)}
    rules |= {"--slow": number(0, 1), "--address": lambda text: bool(re.fullmatch(r".+:[0-9]{1,5}", text, re.A))}
    return judge(rules, 0)(folder, said)


def eval_parse(argv: list[str]) -> int:
    import eval as script

    def task(argv: list[str]) -> int:
        options = script.parse(argv)
        config_file.override(config.Config(), options.overrides)
        print(options.step)
        return 0

    return cli.run("eval.py", "usage", task, argv)


def prepare_parse(argv: list[str]) -> int:
    """prepare's parsers; no job is started."""
    import tools.prepare.commands as commands
    from tools.prepare import images, mlcommons, shapes, verify

    kept = [(module, module.run) for module in (shapes, mlcommons, images, verify)]
    try:
        for module, _ in kept:
            module.run = lambda args: 0
        return commands.main(argv)
    finally:
        for module, own in kept:
            module.run = own


def plan_parse(argv: list[str]) -> int:
    """All of a plan's input; nothing is counted."""

    def task() -> int:
        args, overrides = plan.parse(argv)
        print(hardware.load(args.gpu, args.hardware)[0].arch)
        for path in args.configs:
            config_rules.validate_world(config_file.load(path, overrides), args.gpus)
        return 0

    return attempt("plan", task)


def weights_parse(argv: list[str]) -> int:
    def task() -> int:
        args = weights.parse(argv)
        print(args.checkpoint, weight_files.config_of(args.source, args.config).name)
        return 0

    return attempt("weights", task)


def golden_parse(argv: list[str]) -> int:
    """golden's parser. Nothing is recorded or compared."""
    from tools.golden import commands

    stubbed = ("check", "write", "predict", "Golden")
    tasks = {name: getattr(commands, name) for name in stubbed if hasattr(commands, name)}
    try:
        for name in tasks:
            setattr(commands, name, lambda *args: 0)
        return commands.main(argv)
    finally:
        for name, own in tasks.items():
            setattr(commands, name, own)


def is_card(text: str) -> bool:
    return f"[gpu.{text}]" in hardware.TABLE.read_text().splitlines()


def run_terminal(folder: Path) -> Said:
    """The panel for a terminal as COLUMNS, LINES and NO_COLOR describe it."""

    def show(argv: list[str]) -> int:
        columns = shutil.get_terminal_size().columns
        print(watch.panel([watch.look(Path("run"))], min(watch.MOST_COLUMNS, columns), coloured=False))
        return 0

    return cli_command(show)(folder)


def judge_terminal(folder: Path, said: Said) -> str:
    """The text cut to the columns; 80 if the variable makes no sense."""
    text = arguments(folder)[1].get("COLUMNS", "80")
    columns = int(text) if whole(1, 10**9)(text) else 100
    return "" if max(map(len, said.out.splitlines())) <= min(100, columns) else f"wider than {columns}"


def make_watched(folder: Path) -> None:
    targets_text.make_run(folder)
    made(["run", "--once", "--every=2"], {"COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"})(folder)


def make_reported(folder: Path) -> None:
    targets_text.make_points(folder)
    made(["logs", "--ruleset=6.0.0", "--points=points.json", "--json=figures.json"])(folder)


FREE = str(MICRO)
JSON = {"--json": lambda text: text.endswith(".json")}
PLANNED = {"--gpus": whole(1, 16384), "--gpu": is_card, "--price-per-gpu-hour": number(0, 1e9), "--hardware": bool}
REPORTED = JSON | {"--ruleset": lambda text: text in config_rules.CHOICES["mllog.ruleset"], "--points": bool}
STEP = whole(0, 2**63 - 1)
TARGETS = [
    Target("overrides", make_overrides, ARGV, run_overrides, read_overrides, weight=2),
    Target("train_options", made([FREE, "--train.seed=3"]), ARGV, run_train, judge=judge({}, 1)),
    Target("ranks", made([FREE], RANKS), ENV, run_train, judge=judge_ranks, weight=2),
    Target(
        "eval_options",
        made(["runs/tiny", "--checkpoint=900", "--json", "--vae=ae.safetensors", "--prompt=a cat"]),
        ARGV,
        cli_command(eval_parse),
        judge=judge(
            {"--checkpoint": STEP, "--json": None, "--all": None, "--draw-only": None, "--prompt": lambda text: True}
            | dict.fromkeys(
                ("--config", "--prompts", "--t5", "--clip", *(f"--{name}" for name in drawing.SHORT)), bool
            ),
            1,
        ),
    ),
    Target(
        "preflight_options",
        made(
            ["--nodes=a,b,c", "--address=a:29500", "--gpus=8", "--wait=60", "--slow=.8"],
            {"SLURM_NODEID": "1", "SLURM_PROCID": "1"},
        ),
        ARGV | ENV,
        cli_command(preflight),
        judge=judge_preflight,
    ),
    Target(
        "prepare_options",
        made(["shapes", "--out=made", f"--config={FREE}"]),
        ARGV,
        cli_command(prepare_parse),
        judge=judge(dict.fromkeys(("--out", "--config"), bool), 1),
    ),
    Target(
        "plan_options",
        made([FREE, "--gpus=4", "--gpu=h200", "--price-per-gpu-hour=2.5", "--train.seed=1"]),
        ARGV,
        cli_command(plan_parse),
        judge=judge(PLANNED | JSON, 1, 2, 3),
    ),
    Target(
        "report_options",
        make_reported,
        ARGV,
        cli_command(report.main),
        judge=judge(REPORTED, 1, 2),
        writes=("*.json",),
    ),
    Target(
        "watch_options",
        make_watched,
        ARGV,
        cli_command(watch.main),
        judge=judge({"--once": None, "--every": number(0.01, 3600)}, 1, 2),
    ),
    Target("terminal", make_watched, ENV, run_terminal, judge=judge_terminal, weight=0.5),
    Target(
        "weights_options",
        made(["inspect", "w.safetensors", "--checkpoint=7", f"--config={FREE}", "--verify"]),
        ARGV,
        cli_command(weights_parse),
        judge=judge({"--checkpoint": STEP, "--config": bool, "--verify": None}, 2),
    ),
    Target(
        "golden_options",
        made(["check", "--from=dump.safetensors", "--golden=values"]),
        ARGV,
        cli_command(golden_parse),
        judge=judge({"--from": bool, "--golden": bool}, 1, 2),
        weight=0.5,
    ),
]
