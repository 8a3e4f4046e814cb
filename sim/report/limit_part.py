"""The chapter of limits: what each server keeps, latency over load, and what users get of a GPU."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from twinserve.sim.report.chart import Chart, Curve, best, spans_decades
from twinserve.sim.report.found import Found, read_document
from twinserve.sim.report.page import Block, Part, note, paragraph, table
from twinserve.sim.report.run_charts import pareto
from twinserve.sim.results.checked import SHAPES, check_shape
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.versions import LIMITS


def limit_part(found: Found) -> Part:
    """Raises ResultsError for a file that is none of limits."""
    file = found.folder / "limit.json"
    document = LIMITS.read(read_document(file), file, ResultsError)
    check_shape(document, SHAPES["limits"], file)
    blocks: list[Block] = [paragraph(line) for line in document["lines"]]
    blocks += [note(line) for line in document["notices"]]
    blocks.append(table(document["table"]["head"], document["table"]["rows"]))
    blocks += [chart for chart in limit_charts(document) if chart.curves]
    return Part(found.title, tuple(blocks))


def limit_charts(document: Mapping) -> Iterator[Chart]:
    """Return a chart of latency over load for each objective, then tokens of a GPU against a
    user's."""
    unit, limits = document["unit"], document["limits"]
    ends = [(one["setting"], np.nan if one["load"] is None else one["load"]) for one in limits]
    for objective, bound in zip(document["objectives"], document["bounds"], strict=True):
        curves = []
        for colour, limit in enumerate(limits):
            known = [
                (point["load"], one["value_s"])
                for point in limit["points"]
                for one in point["attained"]
                if one["objective"] == objective and one["value_s"] is not None
            ]
            xy = np.array(known, np.float64).reshape(-1, 2)
            curves.append(
                Curve(limit["setting"], xy[:, 0], xy[:, 1], colour, "points", joined=True)
            )
        name = bound["name"]
        yield Chart(
            f"limit-{bound['metric']}",
            f"{name} over load (objective {bound['bound']})",
            unit,
            f"{name}, seconds",
            tuple(curves),
            f"{name} of the judged requests over the load. Kept up to {best(ends, unit, True)}.",
            log_y=spans_decades([c.y for c in curves]),
            marks=tuple((load, "limit") for _, load in ends if np.isfinite(load)),
        )
    ahead = [(one["setting"], one["load"]) for one in document["front"]]
    points = [
        (limit["setting"], point)
        for limit in limits
        for point in limit["points"]
        if not point.get("grows") and point["tokens_per_s_user"] is not None
    ]
    if ahead:
        on = [(name, p) for name, p in points if (name, p["load"]) in ahead]
        on.sort(key=lambda pair: pair[1]["tokens_per_s_user"])
        off = [(name, p) for name, p in points if (name, p["load"]) not in ahead]
        several = len(limits) > 1
        yield pareto(
            "limit-front",
            "Throughput of a GPU against interactivity",
            "output tokens/s of a user (1 / median TPOT)",
            "output tokens/s of a GPU",
            _marks(on, several),
            _marks(off, several),
            share=False,
            what="load",
        )


def _marks(points: Sequence[tuple[str, Mapping]], several: bool):
    """As `pareto` takes them: x, y and a label of each."""
    x, y = (
        np.array([p[name] for _, p in points], np.float64)
        for name in ("tokens_per_s_user", "tokens_per_s_gpu")
    )
    labels = [f"{name}, {p['load']:g}" if several else f"{p['load']:g}" for name, p in points]
    return x, y, labels
