"""What runs become: means over seeds, gains paired by seed, verdicts; and Markdown of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.study.grid import REPEATS
from twinserve.experiments.study.output import markdown_table
from twinserve.sim.report.over import with_digits as shown
from twinserve.sim.sweep.baseline import KINDS, Gains, baseline_of, told
from twinserve.sim.sweep.statistics import over_seeds

FIRST, BEFORE = "first", "before"


@dataclass(frozen=True)
class Against:
    """What runs are compared with, see `Table`."""

    gains: Gains
    base: Mapping[str, Any] | str
    pair: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A row for each combination of `by`: means over seeds and, as NAME_ci, half of the 95 %
    interval.

    by        columns that tell rows apart
    values    columns whose mean is shown, those that there are (kept runs can be older than a
              metric); None: all others. Gains that are not among them are shown before them
    gains     new column -> (column that is compared, kind of `baseline.KINDS`), seed by seed; of
              columns that there are. A name with a `_` first is for `derived` alone
    base      what gains are against: rows with these values (a mapping has, by a run's own value,
              its baseline's); or of those with the same values in `pair` the first one, or the one
              before, in the order of the runs
    pair      columns with equal values in a run and its baseline, in addition to the seed and the
              window
    own       False: the rows of the baseline itself are left out
    also      gains against other baselines
    derived   new column -> function of the compared runs
    verdicts  new column -> (gain, no effect, words above, below and across it); see `paired.told`.
              A fourth word is of runs that differ in no seed
    prepared  what runs become first
    pooled    one of `by`: further rows, in which it is `all`, hold means over its values, by seed
    """

    by: Sequence[str]
    values: Sequence[str] | None = None
    gains: Gains = field(default_factory=dict)
    base: Mapping[str, Any] | str = FIRST
    pair: Sequence[str] = ()
    own: bool = True
    also: Sequence[Against] = ()
    derived: Mapping[str, Callable[[pd.DataFrame], pd.Series]] = field(default_factory=dict)
    verdicts: Mapping[str, tuple[str, float, Sequence[str]]] = field(default_factory=dict)
    prepared: Callable[[pd.DataFrame], pd.DataFrame] = lambda points: points
    pooled: str | None = None

    def __call__(self, points: pd.DataFrame) -> pd.DataFrame:
        points = self.prepared(points)
        rows, values = self.compared(points), self.values
        if values is None:
            values = [name for name in points if name not in (*self.by, *REPEATS)]
        values = [name for name in values if name in rows]
        new = [name for against in self._against() for name in against.gains if name[0] != "_"]
        new = [name for name in (*new, *self.derived) if name in rows and name not in values]
        found = over_seeds(self._with_pooled(rows, [*new, *values]), self.by, [*new, *values])
        for name, (gain, neutral, words) in self.verdicts.items():
            pairs = zip(found[gain], found[f"{gain}_ci"], strict=True)
            found.insert(len(self.by), name, [_verdict(*pair, words, neutral) for pair in pairs])
        return found

    def _with_pooled(self, rows: pd.DataFrame, shown: Sequence[str]) -> pd.DataFrame:
        if self.pooled is None:
            return rows
        keys = [name for name in (*self.by, *REPEATS) if name in rows and name != self.pooled]
        means = rows.groupby(keys, sort=False)[[*shown]].mean().reset_index()
        return pd.concat([rows, means.assign(**{self.pooled: "all"})], ignore_index=True)

    def compared(self, points: pd.DataFrame) -> pd.DataFrame:
        """Runs with a column for each gain."""
        found = points.assign(
            **{
                name: KINDS[kind](points[of], theirs[of]).where(_finite(kind, theirs[of]))
                for against in self._against()
                if against.gains
                for theirs in [_baseline(points, against)]
                for name, (of, kind) in against.gains.items()
                if of in points
            }
        )
        if not self.own:
            found = found[~_has(found, self.base)]
        return found.assign(**{name: of(found) for name, of in self.derived.items()})

    def _against(self) -> Sequence[Against]:
        return (Against(self.gains, self.base, self.pair), *self.also)


MEDIANS = "Medians of the repeats."


@dataclass(frozen=True)
class Medians:
    """A row for each combination of `by`: medians over the repeats, for measured times.

    spread  columns that also have the least and the most, as NAME_least and NAME_most
    """

    by: Sequence[str]
    spread: Sequence[str] = ()

    def __call__(self, points: pd.DataFrame) -> pd.DataFrame:
        numbers = points.drop(columns=[name for name in REPEATS if name in points])
        groups = numbers.groupby(list(self.by), sort=False, dropna=False)
        found = groups.median()
        for name in self.spread:
            at = found.columns.get_loc(name) + 1
            found.insert(at, f"{name}_most", groups[name].max())
            found.insert(at, f"{name}_least", groups[name].min())
        return found.reset_index()


def _baseline(points: pd.DataFrame, against: Against) -> pd.DataFrame:
    """Of each run what it is compared with; nan if that is itself the first one, or was not run."""
    base, keys = against.base, [name for name in (*against.pair, *REPEATS) if name in points]
    if isinstance(base, str):
        columns = [of for of, _ in against.gains.values() if of in points]
        groups = points.groupby(keys, sort=False)
        if base == BEFORE:
            return groups[columns].shift()
        firsts = groups[columns].transform(lambda values: values.iloc[0])
        return firsts.where(groups.cumcount() > 0)
    own = {name: points[name].map(of) for name, of in base.items() if isinstance(of, Mapping)}
    return baseline_of(points.assign(**own), points[_has(points, base)], [*keys, *own])


def _has(points: pd.DataFrame, values: Mapping[str, Any]) -> pd.Series:
    """Whether a run has these values (a mapping: one of its values)."""
    found = pd.Series(True, points.index)
    for name, value in values.items():
        found &= points[name].isin(value.values() if isinstance(value, Mapping) else [value])
    return found


def _finite(kind: str, theirs: pd.Series) -> pd.Series:
    """Where a gain is a number: of ratios, if the baseline is not 0."""
    return theirs != 0 if kind in ("ratio", "change", "per cent", "factor") else theirs.notna()


def _verdict(gain: float, half: float, words: Sequence[str], neutral: float) -> str:
    """`told`; nothing without a gain, the fourth word if no seed differs."""
    if np.isnan(gain):
        return ""
    above, below, open_, *same = words
    if same and gain == neutral and half == 0:
        return same[0]
    return told(gain, half, (above, below, open_), neutral)


# -- Markdown --------------------------------------------------------------------------------------
Cell = Callable[[pd.Series], str]  # of a row of a table


def mean(name: str, factor: float = 1.0, digits: int = 3) -> Cell:
    """`12.3 ± 0.4` of a column and its interval."""
    return lambda row: shown(factor * row[name], factor * row[f"{name}_ci"], digits)


def plain(name: str, form: str) -> Cell:
    """A column in this format; nothing if it is not known."""
    return lambda row: "" if pd.isna(row[name]) else format(row[name], form)


@dataclass(frozen=True)
class Text:
    """Markdown of a table of a figure, for its report.md.

    intro    the sentence before; `{seeds}` in it is the least number of seeds of a row
    rows     heading -> column that names the rows
    cells    heading -> cell
    over     a column whose values are the headings instead, as `over_heading` has them; `cells` has
             one entry then
    each     a column: a Markdown table for each of its values
    heading  of each: a format of the value, or by value
    """

    intro: str
    rows: Mapping[str, str]
    cells: Mapping[str, Cell]
    over: str | None = None
    over_heading: str = "{}"
    each: str | None = None
    heading: str | Mapping[Any, str] = "**{}**"

    def __call__(self, table: pd.DataFrame) -> str:
        seeds = int(table.seeds.min()) if "seeds" in table else 0
        parts = [self.intro.format(seeds=seeds) + "\n"]
        for value, rows in [("", table)] if self.each is None else _groups(table, [self.each]):
            if self.each is not None:
                parts.append(f"{self._heading(value)}\n")
            parts.append(self.markdown(rows))
        return "\n".join(parts)

    def markdown(self, table: pd.DataFrame) -> str:
        """The Markdown table of these rows."""
        if self.over is None:
            lines = [
                [*(_plain(row[name]) for name in self.rows.values()), *self._cells(row)]
                for _, row in table.iterrows()
            ]
            return markdown_table([*self.rows, *self.cells], lines)
        values, (cell,) = list(dict.fromkeys(table[self.over])), self.cells.values()
        lines = []
        for key, rows in _groups(table, [*self.rows.values()]):
            found = {row[self.over]: cell(row) for _, row in rows.iterrows()}
            key = key if isinstance(key, tuple) else (key,)
            lines.append([*map(_plain, key), *(found.get(value, "") for value in values)])
        return markdown_table([*self.rows, *map(self.over_heading.format, values)], lines)

    def _cells(self, row: pd.Series) -> list[str]:
        return [cell(row) for cell in self.cells.values()]

    def _heading(self, value: Any) -> str:
        by = self.heading
        return by[value] if isinstance(by, Mapping) else by.format(value)


def _groups(table: pd.DataFrame, by: Sequence[str]):
    return table.groupby(by[0] if len(by) == 1 else list(by), sort=False)


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, np.integer)) else str(value)
