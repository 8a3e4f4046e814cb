"""Numbers of a paper as data, each beside a row of our table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from twinserve.experiments.study.verdict import Claim, Verdict, judge, judge_direction
from twinserve.sim.sweep.statistics import shown


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
        """This claim with our number and the verdict; None where the table lacks the row, as that
        of a smaller grid may."""
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
