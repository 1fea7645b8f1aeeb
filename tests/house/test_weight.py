"""How much each folder holds, by what a reader must understand: expressions, statements, arguments and names.

Docstrings, comments and the breaking of lines weigh nothing, so packing lines wins nothing. Show it with
PYTHONPATH=.:tests python tests/house/test_weight.py
"""

import ast

from conftest import ROOT

COUNTED = (ast.expr, ast.stmt, ast.arg, ast.keyword, ast.alias, ast.ExceptHandler, ast.comprehension)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LIMITS = {"flux_ref": 31_300, "tools": 18_740, "bench": 4_430, "tests": 74_300}


def weight(text):
    """The nodes of a syntax tree that a reader must understand."""
    nodes = list(ast.walk(ast.parse(text)))
    documented = [node for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None]
    return sum(isinstance(node, COUNTED) for node in nodes) - 2 * len(documented)  # a statement and its constant


def weights():
    """By folder."""
    return {name: sum(weight(path.read_text()) for path in (ROOT / name).rglob("*.py")) for name in LIMITS}


def test_no_folder_is_heavier_than_its_limit():
    heavy = {name: found for name, found in weights().items() if found > LIMITS[name]}
    limits = {name: LIMITS[name] for name in heavy}
    remedy = "find a form with fewer ideas, or raise the limit and say why"
    assert not heavy, f"{heavy} is above {limits}, LIMITS of {__file__}: {remedy}"


def test_only_what_a_reader_must_understand_has_weight():
    one = "a = b + 1"
    assert weight(one) == 1 + 4  # the statement; two names, a sum, a constant
    assert weight(f'"""What it does."""\n# why\n{one}') == weight(one) and weight(f"{one}; c = d") > weight(one) + 2
    assert weight("a, b = 1, 2") > weight("a = 1\nb = 2"), "packing wins nothing"


if __name__ == "__main__":
    for name, found in weights().items():
        print(f"{name:<10}{found:>9,}  limit {LIMITS[name]:,}")
