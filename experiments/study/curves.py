"""What the plots of the studies share: panels, and one line with error bars for each series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """y over x with its interval (NAME_ci), a line for each value of `series`."""
    for value, part in table.groupby(series, sort=False):
        part = part.sort_values(x)
        error = np.nan_to_num(part[f"{y}_ci"].to_numpy(float)) * scale
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
    looks: Looks,
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
            lines(axes[i, j], part[part[column] == value], x, metric, series, looks, factor)
            finish(axes[i, j], metric)
            axes[0, j].set_title(title(value), fontsize=9)
            axes[-1, j].set_xlabel(xlabel or x)
        axes[i, 0].set_ylabel(name + label)
    legend(canvas, axes[0, 0])


def legend(canvas: Canvas, axes: Axes) -> None:
    """One legend for all panels, above them."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=min(len(labels), 6, int(canvas.get_figwidth() / 1.4)),
        frameon=False,
        fontsize=8,
    )


def ylog(axes: Axes, metric: str) -> None:
    axes.set_yscale("log")
