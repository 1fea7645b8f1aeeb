"""Each row of docs/faults.md names the tests that show it, and the tests exist."""

import re

from conftest import ROOT

PAGE = (ROOT / "docs" / "faults.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "::" in line]


def test_each_row_names_tests_that_exist():
    assert len(ROWS) == len(re.findall(r"(?m)^\| (?!what happens)", PAGE)) > 25
    wrong = [row[0] for row in ROWS if len(row) != 5 or not all(row)]
    for *_, tests in ROWS:
        for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", tests):
            path = ROOT / "tests" / file
            if not path.exists() or not re.search(rf"(?m)^def {name}\(", path.read_text()):
                wrong.append(f"{file}::{name}")
    assert wrong == []
