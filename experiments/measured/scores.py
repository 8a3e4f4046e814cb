"""Score simulated times against measured ones: signed errors in, numbers by group out. And print
these numbers as Markdown."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from twinserve.experiments.study.output import table_lines

MISSED = 0.1  # of the points a range may miss
RANGED = ("points", "sources", "median", "p90", "mean", "held", "width", "interval")


def scores(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """A row for each combination of `by`, in order; numbers but counts are per cent.

    rows    `off`, ours / measured - 1; of ranges `low` and `high` over the measured time, and then
            `source`
    points, sources  how many
    median, p90, size, mean  of the size of the error; mean size; mean error
    held    share of points that their range holds
    width   median of high / low - 1
    interval  mean of its logarithm and 2 / MISSED times what lies outside
    """
    rows, of = rows.assign(size=rows.off.abs()), {}
    if "low" in rows:
        low, high = np.log(rows.low), np.log(rows.high)
        outside = low.clip(lower=0) - high.clip(upper=0)
        rows = rows.assign(
            held=outside == 0,
            width=rows.high / rows.low - 1,
            interval=high - low + 2 / MISSED * outside,
        )
        of = {"held": "mean", "width": "median", "interval": "mean"}
    groups = rows.groupby(list(by), sort=True)
    found = {
        "median": groups["size"].median(),
        "p90": groups["size"].quantile(0.9),
        "size": groups["size"].mean(),
        "mean": groups["off"].mean(),
        **{name: getattr(groups[name], how)() for name, how in of.items()},
    }
    table = 100 * pd.DataFrame(found)
    if "source" in rows:
        table.insert(0, "sources", groups.source.nunique())
    table.insert(0, "points", groups["size"].size())
    return table.reset_index()


def score_lines(rows: pd.DataFrame, by: Sequence[str]) -> list[str]:
    """Lines of a Markdown table of `scores`."""
    cells = scores(rows, by)[[*by, *RANGED]].astype({name: str for name in by})
    cells[[*RANGED]] = cells[[*RANGED]].map("{:.0f}".format)
    return table_lines((*by, *RANGED), cells.to_numpy())


def sections(parts: Mapping[str, Iterable[str]], why: pd.Series | None = None) -> str:
    """Markdown: lines below each heading. why: of rows, the reason against scoring them, counted
    below; empty: scored."""
    if why is not None:
        counts = why[why != ""].str[:100].value_counts()
        parts = {**parts, "Not scored": [f"- {count} x {text}" for text, count in counts.items()]}
    return "\n".join(line for title in parts for line in (f"### {title}", "", *parts[title], ""))


def whole(points: pd.DataFrame) -> pd.DataFrame:
    """Nothing is random here: the points are the table."""
    found = points.drop(columns="seed")
    return found.assign(why=found.why.fillna("")) if "why" in found else found
