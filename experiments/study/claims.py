"""Numbers of a paper as data, each compared with a row of our table; and rows of a table as numbers
that know their intervals, for claims that take a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import yaml

from twinserve.experiments.study.verdict import Claim, Verdict, judge, judge_bound, judge_direction
from twinserve.sim.report.over import with_digits as shown


@dataclass(frozen=True)
class Said:
    """What a paper says.

    where    figure, table or section of the paper
    what     the quantity, with its unit and its setting
    paper    as printed
    number   the same as a number; None: only a direction, and `paper` is `higher` or `lower`; a
             function of mean and half width that judges them
    row      column -> value: the row of the table that speaks to it
    column   of that row, with its interval
    why      what makes the difference if ours is another: the run that shows it, or `not known`
    neutral  what would be no effect (0 for a change, 1 for a ratio); None: an amount
    factor   of the paper's unit over ours
    text     how ours is printed: a format of mean and interval, and of the mean alone ({1})
    whole    what a change of 100 % is, in the paper's unit; None: `factor`
    """

    where: str
    what: str
    paper: str
    number: float | Callable[[float, float], Verdict] | None
    row: Mapping[str, Any]
    column: str
    why: str
    neutral: float | None = None
    factor: float = 1.0
    text: str = "{}"
    whole: float | None = None

    def beside(self, table: pd.DataFrame) -> Claim | None:
        """This claim with our number and the verdict; None if the table lacks the row, as that of a
        smaller grid may."""
        found = table
        for name, value in self.row.items():
            found = found[found[name] == value]
        if found.empty:
            return None
        ours, half = (self.factor * found.iloc[0][n] for n in (self.column, f"{self.column}_ci"))
        verdict = self._judged(ours, half)
        text = self.text.format(shown(ours, half), ours)
        directed = self.neutral is not None
        return Claim.judged(self.where, self.what, self.paper, text, verdict, self.why, directed)

    def _judged(self, ours: float, half: float) -> Verdict:
        whole = abs(self.factor) if self.whole is None else self.whole
        if callable(self.number):
            return self.number(ours, half)
        if self.number is not None:
            return judge(ours, half, self.number, self.neutral, whole)
        sign = {"higher": 1.0, "lower": -1.0}[self.paper]
        return judge_direction(sign * (ours - (self.neutral or 0.0)), half, whole)


def claims(*said: Said) -> Callable[[pd.DataFrame], list[Claim]]:
    """The claims of a figure, from its table."""
    return lambda table: [claim for one in said if (claim := one.beside(table)) is not None]


def texts(module: str, file: str = "texts.yaml") -> SimpleNamespace:
    """A YAML file in a module's folder, as an object; `texts.yaml` has figures' titles, and why our
    numbers are not a paper's. {NAME} in a text stands for the text of that name; lists are
    tuples."""
    text = Path(module).with_name(file).read_text(encoding="utf-8")
    found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: whole(part) for name, part in value.items()}
        if isinstance(value, list):
            return tuple(map(whole, value))
        if isinstance(value, str):
            return re.sub(r"{([A-Z_0-9]+)}", lambda name: whole(found[name[1]]), value)
        return value

    return SimpleNamespace(**{name: whole(text) for name, text in found.items()})


def teller(data: SimpleNamespace) -> Callable[..., Claim]:
    """Makes claims whose words are data: data.CLAIMS has `where`, `what`, `paper`, `ours` and `why`
    of each, with names of a row, or of what is given, in braces; {NAME:%} is in per cent."""

    def tell(name: str, verdict: Verdict, row: Row | None = None, **named: Any) -> Claim:
        known = {} if row is None else vars(row)
        words = data.CLAIMS[name] | {n: named[n] for n in ("why", "directed") if n in named}
        said = [words[n].format_map(known | named) for n in ("where", "what", "paper", "ours")]
        return Claim.judged(*said, verdict, words["why"], words.get("directed", True))

    return tell


# -- rows ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Number:
    """A mean over seeds and the half width of its interval. It prints as `12.3 ± 0.4`, and grows
    and shrinks by what is certain. A format is a number of digits, `%`, `points`, or one of
    numbers: of the mean alone."""

    mean: float
    half: float

    def __format__(self, spec: str) -> str:
        if spec in ("%", "points"):
            return f"{100 * self} {spec}"
        if spec and not spec.isdigit():
            return format(self.mean, spec)
        return shown(self.mean, self.half, int(spec or 3))

    def __rmul__(self, factor: float) -> Number:
        return Number(factor * self.mean, abs(factor) * self.half)

    def __sub__(self, other: float) -> Number:
        return Number(self.mean - other, self.half)

    def __rsub__(self, other: float) -> Number:
        return Number(other - self.mean, self.half)

    def __abs__(self) -> Number:
        return Number(abs(self.mean), self.half)

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.mean))

    def above(self, bound: float = 0.0) -> Verdict:
        """See `judge_bound`."""
        return judge_bound(self.mean - bound, self.half)

    def below(self, bound: float = 0.0) -> Verdict:
        return judge_bound(bound - self.mean, self.half)

    def beside(self, paper: float, neutral: float | None = None) -> Verdict:
        """See `judge`."""
        return judge(self.mean, self.half, paper, neutral)

    def more(self, than: float = 0.0, whole: float = 1.0) -> Verdict:
        """See `judge_direction`."""
        return judge_direction(self.mean - than, self.half, whole)


class Row:
    """A row of a table: its columns, those with an interval as `Number`."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            half = row.get(f"{name}_ci")
            setattr(self, str(name), value if half is None else Number(value, half))


def rows_of(table: pd.DataFrame, **values: Any) -> list[Row]:
    """The rows with these values, in their order."""
    for name, value in values.items():
        table = table[table[name] == value]
    return [Row(row) for row in table.to_dict("records")]


def most(rows: Iterable[Row], column: str, sign: int = 1) -> Row:
    """The row with the largest mean of a column, the first of several; sign: -1: the smallest."""
    return max(rows, key=lambda row: _rank(sign * getattr(row, column).mean))


def _rank(value: float) -> float:
    return -np.inf if value != value else value
