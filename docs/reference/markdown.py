"""Plain text of the code as Markdown: nothing in it is markup but what is made so here."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
_MARKUP = re.compile(r"([\\*_\[\]<>|#~$])")
_PAGE = re.compile(r"\bdocs/([\w-]+\.md)")
_NAMED = re.compile(r"^(\S(?:[^\s]|, )*?) {2,}(\S.*)$")  # `name, name   what it is`


def text(plain: str) -> str:
    """Words in backticks stay code, and pages of docs/ become links."""
    parts = re.split(r"(``?[^`]+``?)", plain)
    return "".join(part if part.startswith("`") else _linked(part) for part in parts)


def cell(plain: str) -> str:
    """`text` in one line, for a table."""
    line = " ".join(plain.split())
    parts = re.split(r"(`[^`]+`)", text(line))
    return "".join(part.replace("|", "\\|") if part[:1] == "`" else part for part in parts)


def code(plain: str) -> str:
    """As code in a table."""
    return f"`{' '.join(plain.split())}`".replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def docstring(said: str) -> str:
    """Paragraphs, listings, and blocks of `name  text` lines as tables."""
    return "\n\n".join(_block(block) for block in re.split(r"\n[ \t]*\n", said.strip("\n")))


def _linked(plain: str) -> str:
    out, last = [], 0
    for found in _PAGE.finditer(plain):
        if (DOCS / found[1]).is_file():
            out += [_escaped(plain[last : found.start()]), f"[{found[1]}](../{found[1]})"]
            last = found.end()
    return "".join([*out, _escaped(plain[last:])])


def _escaped(plain: str) -> str:
    return _MARKUP.sub(r"\\\1", plain)


def _block(block: str) -> str:
    lines = block.split("\n")
    if all(line.startswith("    ") for line in lines):
        body = "\n".join(line[4:] for line in lines)
        return f"```python\n{body}\n```"
    before, named, after = _named([line.rstrip() for line in lines])
    rows = [(code(name), cell(said)) for name, said in named]
    listed = table(("name", "what"), rows) if rows else ""
    around = [text(" ".join(" ".join(part).split())) for part in (before, after)]
    return "\n\n".join(filter(None, [around[0], listed, around[1]]))


def _named(lines: list[str]) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """The lines before the first `name  text`, what is named from there on, and the lines after."""
    before: list[str] = []
    after: list[str] = []
    named: list[tuple[str, str]] = []
    # where what they are begins; the longest name has one space before that
    column = next((found.start(2) for line in lines if (found := _NAMED.match(line))), 0)
    for line in lines:
        found = _NAMED.match(line)
        name = line[: column - 1].strip() if column else ""
        aligned = line[column - 1 : column] == " " and line[column : column + 1].strip()
        if found:
            named.append((found[1], found[2]))
        elif aligned and not line.startswith(" ") and " " not in name.replace(", ", ","):
            named.append((name, line[column:]))
        elif named and line.startswith(" "):
            named[-1] = (named[-1][0], f"{named[-1][1]} {line.strip()}")
        else:
            (after if named else before).append(line)
    return before, named, after
