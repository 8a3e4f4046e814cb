"""docs/papers.md: whatever it names is there, and no numbered part of a paper is missing."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "papers.md"
TEXT = PAGE.read_text()
QUOTED = re.compile(r"`([\w/]+\.py)(?:(::?)([\w.]+))?`")
LINK = re.compile(r"\]\(([^)#]*)#?([^)]*)\)")

# What each paper numbers: all equations and algorithms, and the figures and tables that show
# something measured. Sources: BROS, IEEE version; Echo; LayerKV; Justitia, as cited on the page.
PRINTED = {
    "BROS": {"Eq": range(1, 9), "Alg": [1], "Fig": [2, *range(9, 14)], "Table": ["I", "II"]},
    "Echo": {"Eq": range(1, 9), "Alg": [], "Fig": [2, *range(6, 12)], "Table": [1]},
    "LayerKV": {"Eq": range(1, 6), "Alg": [1], "Fig": [1, *range(4, 9)], "Table": [1]},
    "Justitia": {
        "Eq": range(1, 9),
        "Alg": [],
        "Fig": [3, 4, *range(8, 13)],
        "Table": ["I", "II", "III"],
    },
}
LINES_OF_ALGORITHM = {"BROS": range(3, 37), "LayerKV": range(1, 9)}  # that do something


def sections() -> dict[str, str]:
    """The text below each second heading."""
    parts = re.split(r"^## (.+)$", TEXT, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(section: str) -> list[list[str]]:
    """Cells of every row of a section's tables, without headings."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "where" and set(row[0]) != {"-"}]


def numbers(where: str, kind: str) -> set[str]:
    """`Eqs. 5-8` and `Eq. 1, Fig. 5`: the numbers of `kind` in a first cell."""
    found = set()
    for first, last in re.findall(rf"\b{kind}s?\.? ([IVX\d]+)(?:-(\d+))?", where):
        found |= {str(n) for n in range(int(first), int(last) + 1)} if last else {first}
    return found


@cache
def defined(path: str) -> frozenset[str]:
    """Functions, classes and constants of a file, methods with their class's name before them."""
    found: set[str] = set()

    def walk(node: ast.AST, before: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = before
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                found.add(f"{before}{child.name}")
                name = f"{before}{child.name}."
            elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
                found.add(f"{before}{child.targets[0].id}")
            walk(child, name)

    walk(ast.parse((ROOT / path).read_text()), "")
    return frozenset(found)


def headings(page: Path) -> set[str]:
    """Anchors of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.slow
def test_every_name_on_the_page_is_defined_in_its_file():
    named = QUOTED.findall(TEXT)
    assert len(named) > 200
    assert [path for path, _, _ in named if not (ROOT / path).is_file()] == []
    assert [f"{path}:{name}" for path, _, name in named if name and name not in defined(path)] == []
    for path, colons, name in named:
        is_test = path.startswith("tests/") and name.startswith("test_")
        assert (colons == "::") == is_test, f"{path}{colons}{name}"


def test_every_link_leads_somewhere():
    links = LINK.findall(TEXT)
    assert len(links) > 80
    for target, anchor in links:
        page = PAGE.parent / target
        claims = page.name == "paper_vs_ours.md"  # made when the site is built
        assert page.parent.is_dir() if claims else page.is_file(), target
        assert not anchor or anchor in headings(page), f"{target}#{anchor}"


@pytest.mark.parametrize("paper", PRINTED)
@pytest.mark.parametrize("kind", ["Eq", "Alg", "Fig", "Table"])
def test_no_numbered_part_of_a_paper_is_missing(paper, kind):
    there = set().union(*(numbers(row[0], kind) for row in rows(sections()[paper])))
    assert {str(n) for n in PRINTED[paper][kind]} <= there


@pytest.mark.parametrize("paper", LINES_OF_ALGORITHM)
def test_every_line_of_an_algorithm_has_a_row(paper):
    there: set[int] = set()
    for row in rows(sections()[paper]):
        for first, last in re.findall(r"^Alg\. 1, lines? (\d+)(?:-(\d+))?", row[0]):
            there |= set(range(int(first), int(last or first) + 1))
    assert there == set(LINES_OF_ALGORITHM[paper])


@pytest.mark.parametrize("paper", PRINTED)
def test_every_row_names_code_with_a_test_or_says_that_there_is_none(paper):
    for row in rows(sections()[paper]):
        assert len(row) == 5, row[0]
        missing = row[2] in ("not implemented", "not reproduced")
        assert missing or (QUOTED.search(row[2]) and QUOTED.search(row[3])), row[0]
