"""Errors of simulated closed loops, by what they depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from twinserve.experiments.silicon.loops import FORMS, STARTS
from twinserve.experiments.study.output import table_lines

METRICS = ("TTFT", "TPOT", "throughput")
ENGINE = ("model", "gpu", "precision")
# of a loop: what it was, how it was simulated, and its errors
ERRORS = [*ENGINE, "tp", "ep", "input", "output", "concurrency", "form", "start", *METRICS]
KINDS: dict[str, tuple[str, ...]] = {
    "By engine": ENGINE,
    "By engine and concurrency": (*ENGINE, "concurrency"),
    "By engine and lengths": (*ENGINE, "input", "output"),
    "By engine and ranks": (*ENGINE, "tp", "ep"),
}


def summary(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """A row a group, form and start: points, and of each metric the mean of the relative errors,
    their mean size, and the largest one."""
    by = [*keys, "form", "start"]
    found = rows.groupby(by, sort=True).size().rename("points").to_frame()
    for metric in METRICS:
        errors = rows[[*by, metric]].assign(size=rows[metric].abs())
        groups = errors.groupby(by, sort=True)
        found[metric, "mean"] = groups[metric].mean()
        found[metric, "size"] = groups["size"].mean()
        found[metric, "largest"] = groups["size"].max()
    return found.reset_index()


def markdown(rows: pd.DataFrame, failed: pd.DataFrame, kinds: Sequence[str]) -> str:
    """Tables of `kinds`; "mean (size)" of each error, operators and roofline side by side."""
    lines = []
    for kind in kinds:
        lines += [f"### {kind}", "", *table(rows, KINDS[kind]), ""]
    if len(failed):
        lines += ["### Without step times", ""]
        counts = failed.groupby(["model", "gpu", "tp", "form", "why"]).size()
        lines += [f"- {n} x {' '.join(map(str, key))}" for key, n in counts.items()]
    return "\n".join(lines) + "\n"


def table(rows: pd.DataFrame, keys: Sequence[str]) -> Iterator[str]:
    """Lines of a Markdown table of `rows` (columns `ERRORS`): one for each of `keys` and start."""
    head = [*keys, "points", "start"]
    head += [f"{metric}: {form}" for metric in METRICS for form in FORMS]
    found = summary(rows, keys).set_index([*keys, "start", "form"])
    cells = []
    for key, group in found.groupby(level=[*keys, "start"], sort=True):
        *of, start = key
        said = []
        for metric in METRICS:
            for form in FORMS:
                one = group[group.index.get_level_values("form") == form]
                said.append(_said(one.iloc[0], metric) if len(one) else "-")
        cells.append([*of, int(group.points.max()), start, *said])
    order = {start: i for i, start in enumerate(STARTS)}
    cells.sort(key=lambda row: (row[: len(keys)], order[row[len(keys) + 1]]))
    yield from table_lines(head, cells)


def _said(row: pd.Series, metric: str) -> str:
    return f"{100 * row[metric, 'mean']:+.0f} ({100 * row[metric, 'size']:.0f}) %"
