"""Numbers of a sweep over one setting: a line for each combination of the others. Bars are 95 %
intervals over seeds, bands error bars of the step times. Pages and plot files draw the same."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from twinserve.sim.report.chart import MOST_CURVES, Chart, Curve, best
from twinserve.sim.report.metric_names import label
from twinserve.sim.results.paths import text_of

CI = "_ci"  # of a half width: behind its number's name
QUEUES = {"keeps up": "steady", "saturated": "grows"}  # as simulate says them
LOW, HIGH = ".low", ".high"  # of a number with an error bar: behind its name


def is_number(column: pd.Series) -> bool:
    """Whether an axis has a scale."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def told_by(table: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """Return axes that tell lines apart: neither constant ones nor those a combination's name
    says."""
    named = table["name"] if "name" in axes else pd.Series("", table.index)

    def said(name: str) -> bool:
        return bool((table[name].groupby(named, dropna=False).nunique(dropna=False) == 1).all())

    return [name for name in axes if name == "name" or not said(name)]


def names_of(table: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """What each row is called by these settings."""
    return [
        ", ".join(
            cell if name in ("policy", "name") else f"{name}={cell}"
            for name in axes
            if (cell := cell_of(row[name]))
        )
        for row in table.to_dict("records")
    ]


def cell_of(value: object) -> str:
    return "" if pd.isna(value) else text_of(value)


def with_digits(mean: float, half: float, digits: int = 3) -> str:
    """`12.3 ± 0.4`: the value with the decimals of its interval, which has two significant digits
    or is a whole number; with `digits` significant ones if there is no interval."""
    if not np.isfinite(mean):
        return "-"
    if not np.isfinite(half):
        short = f"{mean:.{digits}g}"
        return f"{mean:,.0f}" if abs(mean) >= 10**digits or "e+" in short else short
    if not half:
        return f"{with_digits(mean, np.nan, digits)} ± 0"
    decimals = min(max(1 - math.floor(math.log10(half)), 0), 9)
    return f"{mean:z,.{decimals}f} ± {half:,.{decimals}f}"


def queues(said: str) -> str:
    """`steady 4, unclear 1` of verdicts on a queue."""
    for verdict, word in QUEUES.items():
        said = said.replace(verdict, word)
    return said


def values(table: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, half width) of each combination; half width 0 for one seed."""
    if name not in table or f"{name}{CI}" not in table:
        return np.full(len(table), np.nan), np.zeros(len(table))
    half = table[f"{name}{CI}"].to_numpy(np.float64)
    return table[name].to_numpy(np.float64), np.where(np.isfinite(half), half, 0.0)


def over(
    table: pd.DataFrame, axes: Sequence[str], x: str, name: str, along: str | None = None
) -> Chart:
    """A number over a setting; or over another number of `table`, in lines along a setting."""
    title, unit = label(name)
    lines = names_of(table, told_by(table, [one for one in axes if one not in (x, along)]))
    whole = names_of(table, axes)
    scale = x not in axes or is_number(table[x])
    places = [] if scale else list(dict.fromkeys(table[x]))
    xs = table[x].to_numpy(np.float64) if scale else table[x].map(places.index).to_numpy(np.float64)
    order = xs if x in axes else table[along].to_numpy() if along else None
    mean, half = values(table, name)
    share = unit.startswith("share")
    every = list(dict.fromkeys(lines))
    curves = []
    for colour, line in enumerate(every[:MOST_CURVES]):
        at = np.array([i for i, one in enumerate(lines) if one == line])
        at = at[np.isfinite(mean[at]) & np.isfinite(xs[at])]
        if not len(at):
            continue
        if order is not None:
            at = at[np.argsort(order[at], kind="stable")]
        low, high = mean[at] - half[at], mean[at] + half[at]
        if share:
            low, high = np.maximum(low, 0.0), np.minimum(high, 1.0)
        band = None
        if f"{name}{LOW}" in table:
            band = tuple(table[f"{name}{end}"].to_numpy(np.float64)[at] for end in (LOW, HIGH))
        about = tuple(whole[i] for i in at)
        curves.append(
            Curve(
                *(line, xs[at], mean[at], colour, "points", low, high, about),
                joined=scale,
                band=band,
            )
        )
    labelled = [(c.about[i], float(c.y[i])) for c in curves for i in range(len(c.y))]
    across, of_x = (x, "") if x in axes else label(x)
    title = title[0].upper() + title[1:] if title[1:2].islower() else title
    seen = best(labelled, "" if share else unit, high=share)
    return Chart(
        f"sweep-{name}" if x in axes else f"sweep-throughput-{name.rpartition('.')[2]}",
        f"{title} over {across}",
        across + (f" ({of_x})" if of_x else ""),
        f"{title} ({unit})" if unit and not share else unit or title,
        tuple(curves),
        f"{title} over {across}, a point a combination, mean of its runs: {seen}.",
        f"The first {MOST_CURVES} of {len(every)} lines are drawn." * (len(every) > MOST_CURVES),
        share=share,
        ticks=tuple(map(text_of, places)),
    )
