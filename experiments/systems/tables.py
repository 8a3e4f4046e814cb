"""Tables and plots of the comparison of the systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.study.curves import grid, panels
from twinserve.experiments.study.verdict import judge_bound
from twinserve.sim.sweep.statistics import over_seeds

REPEATS = ("seed", "window")  # what tells the repeats of a setting apart
METRICS = {
    "slo_attainment": ("both objectives kept", 1.0),
    "ttft_s": ("mean TTFT, s", 1.0),
    "tpot_s": ("mean TPOT, s", 1.0),
    "be_tokens_per_s": ("best-effort tokens/s", 1.0),
}
LOOKS = {
    "vllm": {"color": "black"},
    "vllm-v0": {"color": "grey"},
    "bros": {"color": "C3", "linestyle": ":"},
    "bros:chunk=2048": {"color": "C3", "linestyle": "--"},
    "bros:chunk=fit": {"color": "C3", "linewidth": 2.2},
    "echo": {"color": "C0", "linestyle": "--"},
    "echo:slo=gap": {"color": "C0"},
    "layerkv": {"color": "C1"},
    "justitia": {"color": "C2"},
    "conserve": {"color": "C4"},
}
WORDS = {"agrees": "more", "cannot be told": "within the spread", "differs": "less"}
_Base = Callable[[pd.Series], pd.Series]


def before(values: pd.Series) -> pd.Series:
    """Of each part of a ladder: the part before."""
    return values.shift()


def first(values: pd.Series) -> pd.Series:
    """Of each one of a group: the first, which has none itself."""
    return pd.Series([np.nan, *[values.iloc[0]] * (len(values) - 1)], values.index)


def told(gain: float, half: float) -> str:
    """What an interval of paired differences says: more, less, within the spread; `the same` where
    no repeat differs."""
    if np.isnan(gain):
        return ""
    return "the same" if gain == half == 0 else WORDS[judge_bound(gain, half)]


def compared(
    points: pd.DataFrame, within: Sequence[str], base: _Base, metric: str, share: bool = False
) -> pd.Series:
    """`metric` minus that of the run which `base` finds among those of the same repeat (share: over
    it, minus 1).

    within  columns that, with the repeat, tell apart what is compared
    """
    keys = [name for name in (*within, *REPEATS) if name in points]
    against = points.groupby(keys, sort=False)[metric].transform(base)
    return (points[metric] / against.where(against > 0) - 1) if share else points[metric] - against


def table_of(
    by: Sequence[str], within: Sequence[str], base: _Base
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A row for each combination of `by`. slo_gain: objectives kept, minus those of what it is
    compared with; be_gain: best-effort tokens, over those of that, minus 1; both paired over
    repeats, and `verdict` on the first."""

    def table(points: pd.DataFrame) -> pd.DataFrame:
        gains = {
            "slo_gain": compared(points, within, base, "slo_attainment"),
            "be_gain": compared(points, within, base, "be_tokens_per_s", share=True),
        }
        points = points.assign(**gains)
        values = [*gains, *(name for name in points if name not in (*by, *REPEATS, *gains))]
        rows = over_seeds(points, by, values)
        rows.insert(
            len(by),
            "verdict",
            [told(*pair) for pair in zip(rows.slo_gain, rows.slo_gain_ci, strict=True)],
        )
        return rows

    return table


def means(*by: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def table(points: pd.DataFrame) -> pd.DataFrame:
        return over_seeds(points, by, [name for name in points if name not in (*by, *REPEATS)])

    return table


def applications_table(
    groups: Mapping[str, Mapping[str, str]],
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """JCT of the policies of each group. jct_gain: mean JCT over that of the part before (`ladder`)
    or of the first of the group (others), minus 1, of the same applications; `verdict`: whether it
    is more."""

    def table(points: pd.DataFrame) -> pd.DataFrame:
        found = []
        for group, parts in groups.items():
            by_policy = points.set_index("policy")
            rows = pd.concat(
                [by_policy.loc[[policy]].assign(part=part) for part, policy in parts.items()]
            ).reset_index()
            base = before if group == "ladder" else first
            gain = compared(rows, ("pace",), base, "mean_s", share=True)
            found.append(rows.assign(group=group, jct_gain=gain))
        by = ("pace", "group", "part", "policy")
        rows = over_seeds(
            pd.concat(found), by, ("jct_gain", "mean_s", "p90_s", "not_delayed", "worst")
        )
        rows.insert(
            len(by),
            "verdict",
            [told(*pair) for pair in zip(rows.jct_gain, rows.jct_gain_ci, strict=True)],
        )
        return rows.sort_values("pace", kind="stable", ignore_index=True)

    return table


# -- plots -----------------------------------------------------------------------------------------
def draw_loads(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    def finish(axes, metric: str) -> None:
        if metric in ("ttft_s", "tpot_s"):
            axes.set_yscale("log")

    grid(
        canvas,
        table,
        "trace",
        METRICS,
        "load",
        "policy",
        LOOKS,
        finish,
        xlabel="online load / estimated capacity",
    )


def draw_parts(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    """A row of panels for each system; objectives kept and best-effort tokens of each trace, a bar
    for each load."""
    metrics = {"slo_attainment": "both objectives kept", "be_tokens_per_s": "best-effort tokens/s"}
    columns = [
        (
            rows,
            metric,
            f"{trace}, load "
            f"{' / '.join(f'{load:g}' for load in dict.fromkeys(rows['load']))}\n{label}",
        )
        for trace, rows in table.groupby("trace", sort=False)
        for metric, label in metrics.items()
    ]
    _bar_panels(canvas, table, "system", "load", columns)


def draw_systems(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    """As `draw_parts`, all systems in one row of panels: for few loads."""
    draw_parts(canvas, table.assign(system="", part=table["policy"]), points)


def draw_applications(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    metrics = {
        "mean_s": "mean JCT, s",
        "p90_s": "90th percentile of JCT, s",
        "not_delayed": "not later than under VTC",
    }
    paces = " / ".join(dict.fromkeys(table["pace"]))
    axes = _bar_panels(
        canvas,
        table,
        "group",
        "pace",
        [(table, name, f"{paces}\n{text}") for name, text in metrics.items()],
    )
    for panel in axes[:, :2].flat:
        panel.set_xscale("log")
        panel.set_xticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
        panel.minorticks_off()
        panel.set_xlim(left=10.0)


def _bar_panels(
    canvas: Canvas,
    table: pd.DataFrame,
    group: str,
    series: str,
    columns: Sequence[tuple[pd.DataFrame, str, str]],
) -> np.ndarray:
    """A row of panels for each value of `group`, a bar for each part and value of `series` (load),
    low first.

    columns: what a column of panels shows: rows of the table, the metric, its label
    """
    groups = list(dict.fromkeys(table[group]))
    most = max(table[table[group] == name]["part"].nunique() for name in groups)
    axes = panels(canvas, len(groups), len(columns), 2.6, max(1.7, 0.25 * most))
    for i, name in enumerate(groups):
        for j, (rows, metric, label) in enumerate(columns):
            steps = list(dict.fromkeys(table["part"][table[group] == name]))
            _bars(axes[i, j], rows[rows[group] == name], steps, series, metric, names=j == 0)
            axes[-1, j].set_xlabel(label, fontsize=8)
        axes[i, 0].set_title(name, fontsize=9, loc="left")
    handles = axes[0, 0].get_legend_handles_labels()[0]
    names = (
        ["lower load", "higher load"]
        if len(handles) == 2
        else [str(value) for value in dict.fromkeys(table[series])]
    )
    canvas.legend(
        handles,
        names[: len(handles)],
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    return axes


def _bars(
    axes, part: pd.DataFrame, steps: Sequence[str], series: str, metric: str, names: bool
) -> None:
    values = list(dict.fromkeys(part[series]))
    height = 0.8 / len(values)
    for k, value in enumerate(values):
        rows = part[part[series] == value].set_index("part").reindex(steps)
        where = np.arange(len(steps)) + (k - (len(values) - 1) / 2) * height
        spread = {"xerr": np.nan_to_num(rows[f"{metric}_ci"]), "error_kw": {"linewidth": 0.8}}
        axes.barh(where, rows[metric], height, label=str(value), **spread)
    axes.set_yticks(range(len(steps)), steps if names else [""] * len(steps), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    axes.tick_params(axis="x", labelsize=7)
