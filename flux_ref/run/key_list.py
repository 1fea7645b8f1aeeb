"""The keys of a config as text for --help: option, default and comment. The comments are those in config.py."""

import inspect
import re
import textwrap

from flux_ref import config, config_file

FIELD = re.compile(r"^ {4}(\w+): [^=\n]+ = .*  # (.*)$", re.M)
COLUMNS = 100
COMMENT_AT = 44


def text() -> str:
    """One line for each key; longer comments go on in the next line. At most COLUMNS wide."""
    defaults = dict(line.split(" = ", 1) for line in config_file.dump(config.Config()).splitlines())
    lines = ["", "Every key, with the default for configs that do not set it:"]
    for section, default in config.SECTIONS.items():
        source = inspect.getsource(type(default))
        comments = dict(FIELD.findall(source))
        about = inspect.getdoc(default) if '"""' in source else ""
        lines += ["", *textwrap.wrap(f"{section}: {about}".removesuffix(": "), COLUMNS)]
        for name in vars(default):
            option = f"  --{section}.{name}={defaults[f'{section}.{name}']}"
            comment = textwrap.wrap(comments.get(name, ""), COLUMNS - COMMENT_AT) or [""]
            lines.append(f"{option:<{COMMENT_AT}}{comment[0]}".rstrip())
            lines += [" " * COMMENT_AT + more for more in comment[1:]]
    return "\n".join(lines)
