"""Targets: commands on a run with files of another run or special files, and in a process that lacks something.

a/ is a run that broke off after its second step, b/ a whole run of another seed. how.json says what the process lacks:
a stream, descriptors, room for files, or the rights of root. Whatever succeeds must give what run a or its newest
checkpoint gives alone. known.json has these figures: of run a, and of each checkpoint by the checksum of its manifest.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from unittest import mock

from fuzz.damage import Change, other_kind
from fuzz.engine import Said, Target, command
from fuzz.targets_data import crc
from fuzz.targets_weights import CFG, parsed

import eval as eval_script
import train
from flux_ref import config_file
from flux_ref.errors import Fault
from flux_ref.formats import checkpoint_files, files, jsonl
from flux_ref.run import cli
from flux_ref.toy import make
from tools.report import commands as report
from tools.weights import commands as weights

SHORT = {"train__max_samples": 36, "eval__every_samples": 24, "checkpoint__every_samples": 12, "checkpoint__keep": 9}
SMALL = {"model__double_blocks": 1, "model__single_blocks": 1, "sample__count": 0, "data__val_count": 16}
ONE = config_file.replace(CFG, data__train="data/train", data__val="data/val", train__seed=1, **SHORT, **SMALL)
RECORDS = ("config.toml", "environment.json", "metrics.jsonl", "eval.jsonl", "result_0.txt", "outcome.json")


# What each command finds


def trained(argv: list[str]) -> int:
    return cli.run("train.py", "", train.main, ["one.toml", *argv])


def evaluated(argv: list[str]) -> int:
    return cli.run("eval.py", "", eval_script.main, [*argv, "--json"])


def state(run: str) -> dict[str, object]:
    """The losses of a run's records, and a checksum of its weights. Raises: ValueError if it has no checkpoint.

    Of evaluations the last one. That of a checkpoint's own samples comes after it, so the checkpoint does not know it.
    """
    found = {}
    for name, key in zip(jsonl.FILES, ("loss", "val_loss")):
        losses = [record[key] for record in jsonl.records(Path(run, name), figures=(key,))]
        found[name] = losses[-1:] if key == "val_loss" else losses
    return found | {"weights": exported(newest(run))}


def newest(run: str) -> Path:
    return max(checkpoint_files.list_checkpoints(Path(run)))


def exported(source: Path) -> int:
    assert weights.main(["export", str(source), "own.safetensors"]) == 0
    found = crc_of_file(Path("own.safetensors"))
    Path("own.safetensors").unlink()
    return found


def crc_of_file(path: Path) -> int:
    return crc(repr(sorted(parsed(path)[0].items())).encode())


def run_resume(folder: Path) -> Said:
    """The run is continued. Records that it says it lacks do not count."""
    said = lacking(trained, "--run.dir=a")
    lost = dict.fromkeys(name for name in jsonl.FILES if f"a/{name} lacks records" in said.out)
    return said if said.code else Said(0, json.dumps(state("a") | lost), "")


def judge_resume(folder: Path, said: Said) -> str:
    found = json.loads(said.out) if said.code == 0 else {"exit code": said.code}
    return "" if {key: value for key, value in found.items() if value}.items() <= known("a").items() else "another run"


def known(name: str) -> dict:
    return json.loads(Path("known.json").read_text())[name]


def run_eval(folder: Path) -> Said:
    said = lacking(evaluated, "a")
    return said if said.code or not said.out else Said(0, repr(json.loads(said.out)["val_loss"]), "")


def run_export(folder: Path) -> Said:
    said = lacking(weights.main, "export", "a", "out.safetensors")
    return said if said.code else Said(0, repr(crc_of_file(Path("out.safetensors"))), "")


def judge_checkpoint(figure: str, folder: Path, said: Said) -> str:
    """A stream that takes nothing shows no figure."""
    want = known(str(crc((newest("a") / "manifest.json").read_bytes())))[figure]
    return "" if said.code == 0 and said.out in ("", repr(want)) else f"exit code {said.code}, want {want}"


def run_report(folder: Path) -> Said:
    return lacking(report.main, "a", "--json=figures.json")


def judge_code(code: int, folder: Path, said: Said) -> str:
    return "" if said.code == code else f"exit code {said.code}"


# The sound input


def make_runs(folder: Path) -> None:
    (folder / "one.toml").write_text(config_file.dump(ONE))
    (folder / "how.json").write_text("{}")
    make.make_shapes(folder / "data", ONE.model, ONE.data.train_count, ONE.data.val_count)
    figures = {}
    for name, seed in (("a", 1), ("b", 2)):
        assert trained([f"--run.dir={name}", f"--train.seed={seed}"]) == 0
        figures[name] = state(name)
        for path in checkpoint_files.list_checkpoints(Path(name)):
            loss = json.loads(command(evaluated, [str(path)]).out)["val_loss"]
            figures[crc((path / "manifest.json").read_bytes())] = {"loss": loss, "weights": exported(path)}
    (folder / "known.json").write_text(json.dumps(figures))
    (folder / "a" / "outcome.json").unlink()
    files.remove(newest("a"))


# Files of another run, and files of another kind


def exchanged(folder: Path, random: Random) -> str:
    """One to three files or checkpoints of a become those of b, or are gone."""
    said = []
    for _ in range(random.randrange(1, 4)):
        steps = [f"checkpoints/step_{step:09d}" for step in (1, 2, 3)]
        name = random.choice((*RECORDS, *steps))
        source = folder / "b" / (random.choice(steps) if name in steps else name)
        files.remove(folder / "a" / name)
        if is_there := random.random() < 0.7:
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / "a" / name)
        said.append(f"{name} is {source.relative_to(folder) if is_there else 'gone'}")
    return ", ".join(said)


def special(folder: Path, random: Random) -> str:
    """Something else than a file stands where a command reads or writes one."""
    names = (*RECORDS, "loss.png", ".claim", "samples", "checkpoints", "overwritten_1", "checkpoints/step_000000003")
    places = [*(folder / "a" / name for name in names), *folder.glob("a/checkpoints/**/*")]
    path = random.choice(sorted(places))
    return f"{path.relative_to(folder)}: {other_kind(path, random)}"


# What the process lacks


def lacking(main: Callable[[list[str]], int], *argv: str) -> Said:
    """Call a command as how.json says."""
    lacks = json.loads(Path("how.json").read_text())

    def call(argv: list[str]) -> int:
        with contextlib.ExitStack() as stack:
            for name, values in lacks.items():
                stack.enter_context(LACKS[name](*values))
            return main(argv)

    said = command(call, list(argv))
    assert said.code != Fault.exit_code or main is trained or "room" in lacks, f"nothing had begun: {said.err}"
    lines = [line for line in re.split("[\r\n]+", said.err) if "%|" not in line and line.strip()]  # no bars
    is_told = lacks.get("streams", ["open"])[-1] == "open"
    return Said(said.code, said.out, "\n".join(lines) if is_told else "there is no stderr that takes a line")


@contextlib.contextmanager
def streams(out: str, err: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, redirect in ((out, contextlib.redirect_stdout), (err, contextlib.redirect_stderr)):
            if kind != "open":
                stack.enter_context(redirect(open("/dev/full", "w") if kind == "full" else None))
        yield


@contextlib.contextmanager
def limited(name: str, more: int) -> Iterator[None]:
    """So many more descriptors than now, or files of so many bytes."""
    kind = getattr(resource, f"RLIMIT_{name}")
    before = resource.getrlimit(kind)
    now = len(os.listdir("/proc/self/fd")) if name == "NOFILE" else 0
    resource.setrlimit(kind, (now + more, before[1]))
    try:
        with mock.patch.object(resource, "setrlimit"):  # ranks.start would raise the limit again
            yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def plain(name: str, mode: int) -> Iterator[None]:
    """A file or folder has this mode, and this thread has not root's right to pass over modes."""
    path = Path(name)
    before = path.stat().st_mode
    head, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # as in linux/capability.h
    libc = ctypes.CDLL(None)
    libc.capget(head, rights)
    path.chmod(mode)
    rights[0] ^= 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; who is not root has none, and gets none
    libc.capset(head, rights)
    try:
        yield
    finally:
        rights[0] ^= 0b110
        libc.capset(head, rights)
        path.chmod(before)


LACKS = {"streams": streams, "room": limited, "plain": plain, "descriptors": limited}
PLACES = (".", "a", "a/checkpoints", "a/checkpoints/step_000000002", *(f"a/{name}" for name in RECORDS[:-1]), "data")
VALUES = {
    "streams": [*product(("open", "closed", "full"), repeat=2)][1:],
    "room": [("FSIZE", more) for more in (0, 100, 5000, 10**5, 10**6)],
    "descriptors": [("NOFILE", more) for more in range(4, 16)],  # with fewer a claim waits for the next process
    "plain": [*product(PLACES, (0o555, 0o444, 0o111, 0))],
}


def lack(name: str, folder: Path, random: Random) -> str:
    values = random.choice(VALUES[name])
    (folder / "how.json").write_text(json.dumps({name: values}))
    return " ".join(map(str, (name, *values)))


DAMAGES: dict[str, Change] = {"exchanged": exchanged, "special": special}
DAMAGES |= {name: partial(lack, name) for name in LACKS}
RANKS = {name: damage for name, damage in DAMAGES.items() if name != "descriptors"}  # gloo would not recover from it
TARGETS = [
    Target("resume", make_runs, RANKS, run_resume, judge=judge_resume, writes=("a", "a/*")),
    Target("eval", make_runs, RANKS, run_eval, judge=partial(judge_checkpoint, "loss")),
    Target("export", make_runs, DAMAGES, run_export, judge=partial(judge_checkpoint, "weights"), writes=("out.*",)),
    Target(
        "report_run",
        make_runs,
        DAMAGES,
        run_report,
        judge=partial(judge_code, report.INVALID),
        writes=("figures.json",),
    ),
]
