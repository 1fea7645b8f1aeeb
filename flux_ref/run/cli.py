"""The command line of commands that run on several ranks: one line for each end, exit codes, arguments."""

import os
import re
import signal
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import NoReturn

from flux_ref import config, config_file, ranks
from flux_ref.errors import Fault, Interrupted, Refusal
from flux_ref.formats.outside import told, whole_number
from flux_ref.run.alive import SIGNALS, follow_launcher, received
from flux_ref.run.attempt import complain, give_up_full_streams, lasting_terminal, make_terminal_patient

# What needs less memory, by script.
REMEDIES = {"train.py": "lower train.micro_batch", "eval.py": "lower eval.batch or sample.count"}
LINGER_S = 5.0


def run(name: str, usage: str | None, task: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a task. An error becomes one line and an exit code: 0 done, 2 refused, 3 broken, 128 + signal."""
    make_terminal_patient()
    if "-h" in argv or "--help" in argv:
        usage = usage or "Python's option -OO leaves the help out; start without it"
        if "flux_ref/config.py" in usage:  # its options are keys
            usage += key_list()
        with lasting_terminal():
            print(usage)
        return 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=follow_launcher, args=(name,), daemon=True).start()
    with lasting_terminal():
        code = _attempt(name, task, argv)
    # After a fault, other ranks may wait in a collective. Leaving the process group would then wait for them.
    if code == 0 or ranks.is_single():
        ranks.stop()
    return code


def key_list() -> str:
    """Every key of a config with its default, meaning and limits."""
    lines = [
        "",
        "Every key of a config, with its default. Give it as --section.key=value. A run may continue with another",
        "value of a key that is marked *.",
    ]
    for key, known in config.KEYS.items():
        meaning = "; ".join(filter(None, (known.meaning, known.allowed)))
        lines.append(f"{'*' if known.resume else ' '} --{key}={config_file.toml_text(known.default)}")
        lines.append(textwrap.fill(meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def _attempt(name: str, task: Callable[[list[str]], int], argv: list[str]) -> int:
    caught = 0
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        try:
            return task(argv)
        finally:
            caught = received()
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # torchrun may end this rank while it lingers
    except (Refusal, Fault, Interrupted) as error:
        return _complain(name, error)
    except OSError as error:
        return _complain(name, Fault(told(error), alone=True))
    except KeyboardInterrupt:
        return _complain(name, Interrupted(signal.SIGINT))
    except Exception as error:
        text = str(error) or "MemoryError"
        if isinstance(error, MemoryError) or re.search(r"out of memory|allocate memory", text):
            remedy = REMEDIES.get(name, "give a smaller batch")
            reason = f"out of memory: {text.splitlines()[0]}; free memory or {remedy}"
            return _complain(name, Fault(reason, alone=True))
        if isinstance(error, RuntimeError) and re.search(r"peer|Connection|[Tt]imed out", str(error)):
            # Another rank broke and prints the reason. torchrun ends this rank, meanwhile or already.
            if caught in (signal.SIGTERM, signal.SIGINT):
                return 128 + caught
            time.sleep(LINGER_S)
            return _complain(name, Fault(f"lost another rank: {str(error).splitlines()[0]}", alone=True))
        if re.search(r"Too many open files|Resource temporarily unavailable|can't start new thread", text):
            reason = f"{text.splitlines()[0][-200:]}; the limits of files, threads or memory are too low (`ulimit -a`)"
            return _complain(name, Fault(reason, alone=True))
        traceback.print_exc()  # a defect of flux_ref
        return Fault.exit_code


def leave(code: int) -> NoReturn:
    """End the process at once, because static destructors of a backend's threads can abort a finished run."""
    give_up_full_streams()
    os._exit(code)


def _complain(name: str, error: Refusal | Fault | Interrupted) -> int:
    rank = whole_number(os.environ.get("RANK", ""), 0, ranks.MOST) or 0
    # Before the process group exists, one rank of each node prints.
    speaks = rank == 0 or (ranks.is_apart() and not whole_number(os.environ.get("LOCAL_RANK", ""), 0, ranks.MOST))
    if speaks or error.alone:
        prefix = f"rank {rank}: " if error.alone and "RANK" in os.environ else ""
        complain(f"{name}: {prefix}".removesuffix(": "), error)
    elif error.exit_code != 128 + signal.SIGINT:  # for Ctrl-C torchrun waits until all ranks have ended
        time.sleep(LINGER_S)  # torchrun ends all ranks when one ends; rank 0 must print before that
    return error.exit_code


def config_and_overrides(argv: list[str], default: str) -> tuple[str, list[str]]:
    """Split [FILE] [--section.key=value ...]. Raises: Refusal for a word at another place."""
    before, late = next((pair for pair in pairwise(argv) if not pair[1].startswith("-")), ("", None))
    if re.fullmatch(r"--\w+\.\w+", before):
        raise Refusal(f"{before} {late}: a key and its value need an equals sign; write {before}={late}")
    if late is not None:
        raise Refusal(f"{late!r} is no option; the file or folder comes first, options are --section.key=value")
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return default, argv
