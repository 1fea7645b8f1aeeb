"""The command lines of train.py and eval.py, and of commands that run like them."""

import re
import textwrap
from collections.abc import Callable
from itertools import pairwise

from flux_ref import config, config_file, errors, ranks
from flux_ref.errors import Refusal, leave

__all__ = ["config_and_overrides", "key_list", "leave", "run"]


def run(name: str, usage: str, task: Callable[[list[str]], int], argv: list[str]) -> int:
    """Print the usage if argv asks for help, otherwise run the task. Returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(usage + key_list() if "flux_ref/config.py" in usage else usage)  # its options are keys
        return 0
    code = errors.run(name, task, argv)
    if code == 0 or ranks.is_single():  # after a fault, other ranks may wait in a collective
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
