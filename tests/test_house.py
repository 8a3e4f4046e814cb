"""How tests are written: names that fit on a line, helpers imported by package."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))
HELPERS = {Path(file).stem for file in FILES} | {Path(file).parts[0] for file in FILES}
LONGEST = 80  # characters of a test's name


@cache
def nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8"))))


def long_names(found: list[ast.AST]) -> list[str]:
    return [
        node.name
        for node in found
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if node.name.startswith("test_") and len(node.name) > LONGEST
    ]


def bare_imports(found: list[ast.AST]) -> list[str]:
    """Modules of this folder that are imported as if they were installed."""
    names = []
    for node in found:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return [name for name in names if name.partition(".")[0] in HELPERS - {"tests"}]


def path_edits(found: list[ast.AST]) -> list[str]:
    """Statements that change where Python looks for modules."""
    edits = []
    for node in found:
        if isinstance(node, ast.Call):
            edits += [ast.unparse(node.func)] if "sys.path." in ast.unparse(node.func) else []
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            edits += [t for t in map(ast.unparse, targets) if t.startswith("sys.path")]
    return edits


@pytest.mark.slow
@pytest.mark.parametrize("look", [long_names, bare_imports, path_edits])
def test_no_test_file_has(look):
    assert {file: said for file in FILES if (said := look(nodes(file)))} == {}


@pytest.mark.parametrize(
    ("look", "line"),
    [
        (long_names, f"def test_{'a' * 76}(): ..."),
        (long_names, f"class Tests:\n    async def test_{'a' * 76}(self): ..."),
        (bare_imports, "from harness import simulate"),
        (bare_imports, "import harness"),
        (bare_imports, "def late():\n    from sim.harness import simulate"),
        (path_edits, "import sys; sys.path.insert(0, 'tests')"),
        (path_edits, "import sys; sys.path.append('tests')"),
        (path_edits, "import sys; sys.path[:0] = ['tests']"),
        (path_edits, "import sys; sys.path += ['tests']"),
    ],
)
def test_what_must_not_be_there_would_be_seen(look, line):
    assert look(list(ast.walk(ast.parse(line))))


def test_what_may_be_there_is_not_objected_to():
    fine = (
        "from tests.sim.harness import simulate; from . import order_runs; import tests.sim.harness"
        f"\ndef test_{'a' * 75}(): ..."
    )
    for look in (long_names, bare_imports, path_edits):
        assert not look(list(ast.walk(ast.parse(fine))))
