"""Brings the output that README.md and other pages show up to what their commands print now.

    python -m tests.refresh_pages [README.md] [docs/terminal.md] [docs/plan.md] [docs/sweep.md]

A shown line that is no longer printed gives way to the printed line that is most like it; read the
difference before you commit it. Commands that need a live engine are left alone.
"""

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import test_readme

_LIKE = 0.6  # of two lines, for one to be the other's successor


def printed(page: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """(what is shown, what is printed) for each command of the page."""
    for command, shown in test_readme.commands(page):
        if command.startswith(test_readme.ELSEWHERE) or test_readme.LIVE.search(command):
            continue
        print(f"$ {command}", file=sys.stderr)
        done = test_readme.carried_out(command, folder)
        yield shown, done.stdout + done.stderr


def refreshed(shown: str, said: str) -> str:
    """`shown` with the lines that are printed now."""
    lines = [line.rstrip() for line in said.splitlines()]
    there = {" ".join(line.split()) for line in lines}
    known = {" ".join(line.split()) for line in shown.splitlines()}
    new = [line for line in lines if " ".join(line.split()) not in known]
    out = []
    for line in shown.splitlines():
        if not test_readme.comparable(line) or " ".join(line.split()) in there:
            out.append(line)
            continue
        like = {" ".join(test_readme.words([one])): one for one in reversed(new)}
        (wanted,) = test_readme.words([line])
        close = difflib.get_close_matches(wanted, like, n=1, cutoff=_LIKE)
        if close:
            new.remove(like[close[0]])
            out.append(like[close[0]])
        else:
            print(f"no longer printed: {line}", file=sys.stderr)
            out.append(line)
    return "\n".join(out)


def main(pages: list[Path]) -> None:
    for page in pages:
        text = page.read_text(encoding="utf-8")
        with TemporaryDirectory() as name:
            folder = Path(name)
            test_readme.provide(page, folder)
            for shown, said in printed(page, folder):
                if shown.strip():
                    text = text.replace(shown.strip("\n"), refreshed(shown.strip("\n"), said))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or [*test_readme.PAGES])
