"""What the plots of the studies share: panels, and one line with error bars for each series."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas


def panels(
    canvas: Canvas, rows: int, columns: int, width: float = 3.0, height: float = 2.4
) -> np.ndarray:
    """Axes[rows, columns] on a canvas made as large as they need, inches each."""
    canvas.set_size_inches(max(width * columns, 4.0), height * rows + 0.5)
    return canvas.subplots(rows, columns, squeeze=False)


Looks = Mapping[Any, Mapping[str, Any]]  # of a series: arguments of matplotlib


def lines(
    axes: Axes, table: pd.DataFrame, x: str, y: str, series: str, looks: Looks, scale: float = 1.0
) -> None:
    """y over x with its interval (NAME_ci, if there is one), a line for each value of `series`."""
    for value, part in table.groupby(series, sort=False):
        part = part.sort_values(x)
        error = _error(part, y) * scale if f"{y}_ci" in part else None
        style = {
            "marker": "o",
            "markersize": 3,
            "capsize": 2,
            "linewidth": 1.2,
            "label": str(value),
            **looks.get(value, {}),
        }
        axes.errorbar(part[x], part[y] * scale, yerr=error, **style)
    axes.grid(alpha=0.3)


def grid(
    canvas: Canvas,
    table: pd.DataFrame,
    column: str,
    metrics: Mapping[str, tuple[str, float]],
    x: str,
    series: str,
    looks: Looks = MappingProxyType({}),
    finish: Callable[[Axes, str], None] = lambda axes, metric: None,
    title: Callable[[Any], str] = str,
    xlabel: str = "",
    split: str | None = None,
) -> None:
    """A column of panels for each value of `column`, a row for each of `metrics` (name -> label,
    factor), one legend.

    split: the rows are repeated for each value of this column, which is named in their labels.
    """
    values = list(dict.fromkeys(table[column]))
    parts = (
        [("", table)]
        if split is None
        else [(f"{name}\n", part) for name, part in table.groupby(split, sort=False)]
    )
    rows = [(name, part, metric) for metric in metrics for name, part in parts]
    axes = panels(canvas, len(rows), len(values))
    for i, (name, part, metric) in enumerate(rows):
        label, factor = metrics[metric]
        for j, value in enumerate(values):
            here = part[part[column] == value]
            if here.empty:
                axes[i, j].axis("off")
            lines(axes[i, j], here, x, metric, series, looks, factor)
            finish(axes[i, j], metric)
            axes[0, j].set_title(title(value), fontsize=9)
            axes[-1, j].set_xlabel(xlabel or x)
        axes[i, 0].set_ylabel(name + label)
    if table[series].nunique() > 1:
        legend(canvas, axes)


def lines_of(
    column: str | None,
    metrics: Mapping[str, tuple[str, float]],
    x: str,
    series: str | None,
    *given: Any,
    only: Mapping[str, Any] | None = None,
    **how: Any,
) -> Callable[..., None]:
    """`grid` with these arguments, as the plot of a figure. column: None: one column of panels;
    series: None: one line; only: of the rows with these values."""

    def draw(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
        for name, value in (only or {}).items():
            table = table[table[name] == value]
        table = table.assign(_all="")
        grid(canvas, table, column or "_all", metrics, x, series or "_all", *given, **how)

    return draw


def of_runs(
    draw: Callable[..., None], prepared: Callable[[pd.DataFrame], pd.DataFrame]
) -> Callable[..., None]:
    """A plot of what the runs become, instead of the table."""
    return lambda canvas, table, points: draw(canvas, prepared(points), points)


def one_seed(points: pd.DataFrame) -> pd.DataFrame:
    """The runs of the first seed."""
    return points[points.seed == points.seed.min()]


def _error(rows: pd.DataFrame, metric: str) -> np.ndarray:
    """float64[rows], half widths of intervals; 0 without one."""
    return np.nan_to_num(rows.get(f"{metric}_ci", pd.Series(0.0, rows.index)).to_numpy(float))


def legend(canvas: Canvas, axes: Axes | np.ndarray, names: Sequence[str] = ()) -> None:
    """One legend for all panels, above them. names: of the series, if as many."""
    found = {
        label: handle
        for one in np.ravel(axes)
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    labels = list(names) if len(names) == len(found) else list(found)
    inches = max(1.4, 0.4 + 0.06 * max(map(len, labels)))  # of a label, about
    canvas.legend(
        found.values(),
        labels,
        loc="outside upper center",
        ncols=max(1, min(len(found), 6, int(canvas.get_figwidth() / inches))),
        frameon=False,
        fontsize=8,
    )


def ylog(axes: Axes, metric: str) -> None:
    axes.set_yscale("log")


# -- bars and dots ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Bars:
    """A row of panels for each value of `group` (none: one row), a column for each metric. In each
    panel a bar for each value of `part` and of `series` (None: one), the first on top.

    metrics  column of the table -> label
    split    columns of panels are repeated for each value of this column, and named after it
    legend   names of the series, if there are as many
    finish   called with each panel and its metric
    """

    part: str
    series: str | None
    metrics: Mapping[str, str]
    group: str | None = None
    split: str | None = None
    legend: Sequence[str] = ()
    finish: Callable[[Axes, str], None] = lambda axes, metric: None

    def __call__(self, canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
        table, group = table.assign(_all=""), self.group or "_all"
        series = self.series or "_all"
        groups = list(dict.fromkeys(table[group]))
        columns = self._columns(table)
        most = max(table[table[group] == name][self.part].nunique() for name in groups)
        axes = panels(canvas, len(groups), len(columns), 2.6, max(1.7, 0.25 * most))
        for i, name in enumerate(groups):
            mine = list(dict.fromkeys(table[self.part][table[group] == name]))
            for j, (rows, metric, label) in enumerate(columns):
                everywhere = list(dict.fromkeys(rows[series]))
                here = rows[rows[group] == name]
                self._panel(axes[i, j], here, mine, metric, everywhere, names=j == 0)
                axes[-1, j].set_xlabel(label, fontsize=8)
                self.finish(axes[i, j], metric)
            axes[i, 0].set_title(name, fontsize=9, loc="left")
        if table[series].nunique() > 1:
            legend(canvas, axes if self.split is None else axes[0, 0], self.legend)

    def _columns(self, table: pd.DataFrame) -> list[tuple[pd.DataFrame, str, str]]:
        """Rows, metric and label of each column of panels."""
        if self.split is None:
            return [(table, metric, label) for metric, label in self.metrics.items()]
        return [
            (rows, metric, f"{value}, {self.series} {values}\n{label}")
            for value, rows in table.groupby(self.split, sort=False)
            for values in [" / ".join(_short(x) for x in dict.fromkeys(rows[self.series]))]
            for metric, label in self.metrics.items()
        ]

    def _panel(
        self,
        axes: Axes,
        rows: pd.DataFrame,
        parts: Sequence[Any],
        metric: str,
        everywhere: Sequence[Any],
        names: bool,
    ) -> None:
        """parts: of the group, from the top; everywhere: values of the series, which have the same
        colours in all groups."""
        series = self.series or "_all"
        values = list(dict.fromkeys(rows[series]))
        height = 0.8 / max(len(values), 1)
        for k, value in enumerate(values):
            colour = f"C{everywhere.index(value) % 10}"
            mine = rows[rows[series] == value].set_index(self.part).reindex(parts)
            where = np.arange(len(parts)) + (k - (len(values) - 1) / 2) * height
            spread = {"xerr": _error(mine, metric), "error_kw": {"linewidth": 0.8}}
            axes.barh(where, mine[metric], height, label=str(value), color=colour, **spread)
        axes.set_yticks(range(len(parts)), parts if names else [""] * len(parts), fontsize=7)
        axes.invert_yaxis()
        if not (rows[metric] < 0).any():
            axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
        axes.tick_params(axis="x", labelsize=7)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
