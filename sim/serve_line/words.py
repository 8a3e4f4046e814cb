"""Words of a command line, with line and variables without value; values as vLLM reads them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from twinserve.errors import TwinserveError

# An expansion without a value stays in its word between these: whether it matters is told later.
OPEN, SHUT = "\ue000", "\ue001"
_LACKING = re.compile(f"{OPEN}([^{SHUT}]*){SHUT}")
# Names that are not in a file because a cluster fills them in (`{{ .Values.x }}`, `<model>`).
TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ServeLineError(TwinserveError, ValueError):
    """No server can be read. One line: file, line, what is wrong, what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(plain(text).split()))


class Word(str):
    """A word, and the line of its file (from 1)."""

    line: int

    def __new__(cls, text: str, line: int = 1) -> Word:
        word = super().__new__(cls, text)
        word.line = line
        return word


def without_value(text: str) -> str:
    """What a word keeps of an expansion that has no value."""
    return f"{OPEN}{text}{SHUT}"


def lacking(text: str) -> list[str]:
    """Expansions of a word that have no value, as the file has them."""
    return _LACKING.findall(text)


def plain(text: str) -> str:
    """The word as the file has it."""
    return text.replace(OPEN, "").replace(SHUT, "")


def line_of(word: object, default: int = 1) -> int:
    return getattr(word, "line", default)


def split(text: str) -> list[str]:
    """As a shell splits it. A quote that is left open is one of the text."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def find_line(words: Iterable[str], text: str, default: int = 1) -> int:
    """The line of the first word that holds `text`."""
    return next((line_of(word, default) for word in words if text in word), default)


def human_integer(text: str) -> int:
    """As `vllm.utils.argparse_utils.human_readable_int`: k, m, g, t are powers of 1,000, with
    decimals; K, M, G, T are powers of 1,024 of whole numbers. Raises ValueError."""
    said = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT])", text.strip())
    if said is None:
        if not re.fullmatch(r"\s*[+-]?[0-9_]+\s*", text):
            raise ValueError(f"{text!r} is no number; write digits, or 32k, 32K, 1.5m, 2G")
        return int(text)
    number, suffix = said.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise ValueError(f"{text}: {suffix} takes whole numbers; write {number}{suffix.lower()}")
    return int(number) * _BINARY[suffix]


def human_length(text: str) -> int:
    """The same, with -1 for the longest that fits: `auto` and -1."""
    return -1 if text.strip().lower() in ("-1", "auto") else human_integer(text)
