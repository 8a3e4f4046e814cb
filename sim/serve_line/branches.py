"""Which commands of a script run: the branches that tests with known values choose."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinserve.sim.serve_line.words import lacking

OPENS, SHUTS = {"if", "for", "while", "until", "case", "select"}, {"fi", "done", "esac"}
_TESTS = {"[", "[[", "test"}
_NAMED = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge,
    "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip


def verdict(words: Sequence[str]) -> bool | None:
    """What `[`, `[[` or `test` says of these words; None: it looks at files, or at what is not
    known. A variable that the script gives no value is empty, but may be any in a comparison."""
    if not words or words[0] not in _TESTS:
        return None
    asked = [word for word in words[1:] if word not in ("]", "]]")]
    if asked[:1] == ["!"]:
        found = verdict([words[0], *asked[1:]])
        return None if found is None else not found
    unset = [any(map(_NAMED.fullmatch, lacking(word))) for word in asked]
    if any(lacking(word) and not said for word, said in zip(asked, unset, strict=True)):
        return None  # what a command prints, or an argument
    match asked:
        case ["-n", text] | [text] if not text.startswith("-"):
            return bool(text) and not unset[-1]
        case ["-z", text]:
            return not text or unset[-1]
        case [a, "=" | "==" | "!=" as sign, b] if not any(unset) and not re.search(r"[*?\[]", b):
            return (a == b) == (sign != "!=")
        case [a, sign, b] if sign in _COMPARE and re.fullmatch(r"-?\d+ -?\d+", f"{a} {b}"):
            return _COMPARE[sign](int(a), int(b))
    return None


@dataclass
class _Block:
    """runs: the branch under way does. done: one before it did. None: not known."""

    opened: str
    runs: bool | None
    done: bool | None = False


@dataclass
class Blocks:
    """Where in a script's blocks a command stands."""

    open: list[_Block] = field(default_factory=list)
    _asks: bool = False  # the command before was a whole condition
    _tested: bool | None = True  # what a test before `&&` or `||` lets run
    _run: bool | None = True  # the same of the command under way

    def see(self, first: str, words: Sequence[str], says: bool, ended: str) -> None:
        """first: the next command's first word; says: it is no mere sign; ended: the sign at its
        end."""
        if self._asks and self.open and says and first != "then":
            self.open[-1].runs = None  # `[ a ] && [ b ]`
        self._asks = self._asks and not says and first != "then"
        if first in OPENS:
            self.open.append(_Block(first, verdict(words) if first == "if" else None))
            self._asks = first == "if"
        elif first in SHUTS and self.open:
            self.open.pop()
        elif first in ("elif", "else") and self.open:
            block = self.open[-1]
            block.done = block.done or (None if block.runs is None else block.runs)
            known = None if block.done is None else not block.done
            block.runs = known
            if known and first == "elif":
                block.runs = verdict(words)
                self._asks = True
        if says:
            self._run = self._tested
            self._tested = True
            if words and words[0] in _TESTS and ended in "&|" and not self._asks:
                found = verdict(words)
                self._tested = found if ended == "&" or found is None else not found

    @property
    def _states(self) -> list[bool | None]:
        return [*(block.runs for block in self.open), self._run]

    @property
    def passed_over(self) -> bool:
        """The command does not run."""
        return False in self._states

    @property
    def sure(self) -> bool:
        """It does."""
        return all(self._states)

    @property
    def in_loop(self) -> bool:
        return any(block.opened == "for" for block in self.open)
