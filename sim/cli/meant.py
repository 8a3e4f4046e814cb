"""Suggestions for an unknown option or command: near in meaning, or else in spelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from twinserve.formats import shipped_rows

_LIKE = 0.6  # of two words, for one to be a slip of the other

_ROWS = shipped_rows(__package__, "meant.csv")
_OPTIONS = [(r["name"], r["words"], r["how"]) for r in _ROWS if r["kind"] == "option"]
_COMMANDS = {r["name"]: r["words"] for r in _ROWS if r["kind"] == "command"}


def option_meant(word: str, known: Collection[str]) -> str:
    """Return a suggestion for an unknown option, `--qps=3` or `--qps`, as ` Did you mean --rate?`;
    empty if no option is near.

    known  the options that the command has
    """
    name = word.split("=", 1)[0].lstrip("-").replace("_", "-").lower()
    for option, words, how in _OPTIONS:
        if option in known and name in words.split():
            return f" Did you mean {option}{f' ({how})' if how else ''}?"
    if name == "title":
        how = " --plot title=TEXT names the plot;" if "--plot" in known else ""
        return f"{how} twinserve report has it, for the page."
    return _slip(f"--{name}", known)


def command_meant(word: str, known: Collection[str]) -> str:
    """Return a suggestion for an unknown command, as `option_meant`."""
    for command, words in _COMMANDS.items():
        if command in known and word.lower() in words.split():
            return f" Did you mean {command}?"
    return _slip(word, known)


def _slip(word: str, known: Collection[str]) -> str:
    """The word whose letters are nearest. Dashes before it are no likeness."""
    bare = {name.lstrip("-"): name for name in known if name.startswith("--") == (word[:2] == "--")}
    found = difflib.get_close_matches(word.lstrip("-"), list(bare), n=1, cutoff=_LIKE)
    return f" Did you mean {bare[found[0]]}?" if found else ""


def without_guess(line: str) -> str:
    """Return a parser's complaint without the parser's own suggestion."""
    return re.sub(r" Did you mean \S+\?.*$", "", line)
