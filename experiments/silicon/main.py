"""The simulator against closed loops that others measured: `twinserve study silicon`.

The points ship with aiconfigurator-core. Each is simulated with both forms of step times, with
clients that start all at once and staggered. docs/validation.md has the results and what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import product

import pandas as pd

from twinserve.experiments.silicon.loops import FORMS, STARTS, loop
from twinserve.experiments.silicon.points import DATA, read_points
from twinserve.experiments.study import points as grid
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.output import table_lines
from twinserve.experiments.study.study import Figure, Scale, Study

METRICS = ("TTFT", "TPOT", "throughput")
ENGINE = ("model", "gpu", "precision")
# of a loop: what it was, how it was simulated, and its errors
ERRORS = [*ENGINE, "tp", "ep", "input", "output", "concurrency", "form", "start", *METRICS]
KINDS = texts(__file__, "data.yaml").KINDS


def points(scale: Scale) -> list[grid.Point]:
    """Every measured loop; of the smallest grid each 90th, with few requests."""
    few = {"rounds": 3, "fewer": 8} if scale.quick else {}
    found = []
    for point in read_points()[:: 90 if scale.quick else 1]:
        work = {"point": point.name, "data": metadata.version(DATA), **few}
        named = {name: getattr(point, name) for name in ("model", "gpu", "concurrency")}
        for form, start, seed in product(FORMS, STARTS, scale.seeds):
            settings = {"form": form, "start": start, "seed": seed}
            found.append(grid.Point({**named, **settings}, work | settings))
    return found


def errors(loops: pd.DataFrame) -> pd.DataFrame:
    """Errors of every loop that has step times, to four digits."""
    good = loops[loops.why.isna()] if "why" in loops else loops
    found = good[ERRORS].sort_values(ERRORS)
    return found.assign(**{name: found[name].map(_short) for name in METRICS})


def _short(error: float) -> float:
    return float(f"{error:.4g}")


def summary(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """A row a group, form and start: points, and of each metric the mean of the relative errors and
    their mean size."""
    by = [*keys, "form", "start"]
    groups = rows.groupby(by, sort=True)
    found = groups.size().rename("points").to_frame()
    for metric in METRICS:
        found[metric, "mean"] = groups[metric].mean()
        found[metric, "size"] = groups[metric].agg(lambda errors: errors.abs().mean())
    return found.reset_index()


def table(rows: pd.DataFrame, keys: Sequence[str]) -> Iterator[str]:
    """Lines of a Markdown table of `rows` (columns `ERRORS`): one for each of `keys` and start.
    "mean (size)" of each error, operators and roofline side by side."""
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


def by_kind(rows: pd.DataFrame) -> str:
    """Tables of `KINDS`, and how many points have no step times."""
    parts = [line for kind in KINDS for line in (f"### {kind}", "", *table(rows, KINDS[kind]), "")]
    return "\n".join([*parts, ""])


STUDY = Study(
    "silicon",
    "",
    [Figure("errors", "Every measured loop", points, loop, errors, text=by_kind)],
    seeds=1,
    intro="Relative errors of simulated closed loops: the mean, and in brackets the mean size.",
)
