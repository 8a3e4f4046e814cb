"""The simulator against closed loops that others measured: `twinserve study silicon`.

The points ship with aiconfigurator-core. Each is simulated with both forms of step times, with
clients that start all at once and staggered. docs/validation.md has the results and what they mean.
"""

from collections.abc import Sequence
from importlib import metadata
from itertools import product

import pandas as pd

from twinserve.experiments.measured.points import DATA
from twinserve.experiments.measured.scores import scores, sections
from twinserve.experiments.silicon.loops import FORMS, STARTS, loop, points_by_name
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
    for point in list(points_by_name().values())[:: 90 if scale.quick else 1]:
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


def table(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Lines of a Markdown table of `rows` (columns `ERRORS`): one for each of `keys` and start.
    "mean (size)" of each error, operators and roofline side by side."""
    by = [*keys, "start"]
    long = rows.melt([*by, "form"], [*METRICS], "metric", "off")
    found = scores(long, [*by, "metric", "form"])
    said = found["mean"].map("{:+.0f}".format) + found["size"].map(" ({:.0f}) %".format)
    columns = list(product(METRICS, FORMS))
    cells = found.assign(said=said).pivot(index=by, columns=["metric", "form"], values="said")
    points = found.groupby(by).points.max()
    lines = [
        [*key[:-1], points[key], key[-1], *row]
        for key, row in zip(
            cells.index, cells.reindex(columns=columns).fillna("-").to_numpy(), strict=True
        )
    ]
    return table_lines([*keys, "points", "start", *map(": ".join, columns)], lines)


def by_kind(rows: pd.DataFrame) -> str:
    """Tables of `KINDS`."""
    return sections({kind: table(rows, keys) for kind, keys in KINDS.items()})


STUDY = Study(
    "silicon",
    "",
    [Figure("errors", "Every measured loop", points, loop, errors, text=by_kind)],
    seeds=1,
    intro="Relative errors of simulated closed loops: the mean, and in brackets the mean size.",
)
