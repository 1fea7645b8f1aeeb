"""The keys of a config as text for --help: option, default and comment. The comments are those in config.py."""

import inspect
import re
import textwrap

from flux_ref import config, config_file

FIELD = re.compile(r" {4}(\w+): [^=]+ = .*  # (.*)")
COLUMNS, COMMENT_AT = 100, 44


def text() -> str:
    """One line for each key; longer comments go on in the next line. At most COLUMNS wide."""
    defaults = dict(line.split(" = ", 1) for line in config_file.dump(config.Config()).splitlines())
    lines = ["", "Every key, with the default for configs that do not set it:"]
    for section, default in config.SECTIONS.items():
        source = type(default)
        comments = {
            match[1]: match[2] for match in map(FIELD.fullmatch, inspect.getsource(source).splitlines()) if match
        }
        about = (
            "" if source.__doc__.startswith(source.__name__) else f": {source.__doc__}"
        )  # dataclasses write their own
        lines += ["", *textwrap.wrap(section + about, COLUMNS)]
        for key in (key for key in defaults if key.startswith(f"{section}.")):
            option, comment = f"  --{key}={defaults[key]}", comments.get(key.partition(".")[2], "")
            lines += textwrap.wrap(
                comment, COLUMNS, initial_indent=option.ljust(COMMENT_AT), subsequent_indent=" " * COMMENT_AT
            ) or [option]
    return "\n".join(lines)
