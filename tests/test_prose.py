"""Pages and docstrings keep the rules of docs/prose, which Vale reads too. Comments and messages
keep those on words that hide the actor."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "docs" / "prose" / "twinserve"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
NOT_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|^#.*?$|^\s*\|.*?$|^!!!.*?$|^ {4}.*?$", re.S | re.M)
ITEM = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", re.M)
ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z\d\"'(`]|vLLM)")


def rule(name: str) -> dict:
    return yaml.safe_load((RULES / name).read_text())


WORDS, LENGTH = rule("Words.yml"), rule("Length.yml")
ROOMS = "policies sim backends profiles traces native src/twinserve experiments".split()
ACTORS = re.compile(r"\b(?:whoever|whom|nobody|everybody|somebody|anybody|is no more)\b")
WHERE = re.compile(r"\bwhere (?:that|it|there|they|an?|the|no|any|one|not)\b[^.]*")
ARGUMENT = re.compile(r"^(\w\S*(?:, \w+)*)  +|^\$ .*|; |\. (?=\w+(?:, \w+)*: )", re.M)
BANNED = re.compile(rf"\b(?:{'|'.join(WORDS['tokens'])})\b", re.I)


def sentences(markdown: str) -> Iterator[str]:
    """Sentences of paragraphs and items of lists. Listings, tables and headings are none, and what
    is quoted as code counts as one word."""
    text = NOT_PROSE.sub("\n\n", markdown)
    text = re.sub(r"`[^`]*`", "`code`", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in ITEM.split(text):
        yield from ENDS.split(" ".join(paragraph.replace("*", "").split()))


def faults(markdown: str) -> list[str]:
    found = []
    for sentence in sentences(markdown):
        if word := BANNED.search(sentence):
            found.append(f"{WORDS['message'] % word[0]}: {sentence}")
        if len(re.findall(LENGTH["token"], sentence)) > LENGTH["max"]:
            found.append(f"{LENGTH['message']}: {sentence}")
    return found


def test_every_page_keeps_the_rules():
    assert {page.name: found for page in PAGES if (found := faults(page.read_text()))} == {}


def test_docstrings_comments_and_messages_name_the_actor():
    files = [file for room in ROOMS for file in (ROOT / room).glob("**/*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    assert {name: found for name, text in texts.items() if (found := ACTORS.findall(text))} == {}
    assert len(texts) > 400


def docstrings(source: str) -> Iterator[str]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    todo: list[ast.AST] = [ast.parse(source)]
    for node in todo:  # statements: walking all expressions, too, takes twice as long
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield found
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, part, ())


def test_docstrings_keep_the_rules():
    found = [
        f"{file.name}: {fault}"
        for room in ROOMS
        for file in (ROOT / room).glob("**/*.py")
        for text in docstrings(file.read_text())
        for fault in faults(ARGUMENT.sub(".\n\n", text)) + WHERE.findall(" ".join(text.split()))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("A request ends. " * 20, 0),
        ("Nobody is served. It runs\nbeside others.\n\n- as told", 3),
        ("word " * 28 + "`of code that counts once`.", 1),
        ("word " * 27 + "`of code that counts once`.", 0),
        ("# Who\n\n```console\n$ who\n```\n| who |\n|---|\n<!-- who -->\nThose whose names.", 0),
    ],
)
def test_the_rules_find_what_they_should(text, number):
    assert len(faults(text)) == number
