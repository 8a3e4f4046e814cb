"""Limits as tables with sentences, as limit.json, and as charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from twinserve.sim.plan.limit import STEP, Limit, Limits, Point
from twinserve.sim.plan.verdicts import Attained
from twinserve.sim.report.chart import Chart, Curve, best, front, spans_decades
from twinserve.sim.report.run_charts import pareto
from twinserve.sim.results.options import LATENCIES, Objective, spoken
from twinserve.sim.results.paths import text_of

_WIDEST = 160  # of a table where it goes into a file


def name_of(limit: Limit) -> str:
    axes = limit.setting.axes
    return (
        " ".join(f"{k}={text_of(v)}" for k, v in axes.items()) or limit.setting.settings["profile"]
    )


def unit_of(found: Limits) -> str:
    return "clients" if found.closed else "requests/s"


# -- for people ------------------------------------------------------------------------------------
def print_limits(found: Limits, console: Console | None = None) -> None:
    console = console or Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDEST)
    said = ", ".join(map(str, found.objectives))
    step = "" if found.closed else f"; steps of {STEP:.0%}"
    count = found.limits[0].setting.requests
    console.print(f"objectives: {said}; {count:,} requests a run{step}", markup=False)
    for limit in found.limits:
        for line in lines_of(limit, found):
            console.print(line, markup=False)
    if len(found.limits) == 1:
        console.print(_curve(found.limits[0], found))
    else:
        console.print(_compared(found))
    for notice in dict.fromkeys(n for limit in found.limits for n in limit.notices):
        console.print(f"note: {notice}", markup=False)


def lines_of(limit: Limit, found: Limits) -> Iterator[str]:
    """Return lines on the load that one server keeps, and on what breaks first."""
    unit, name = unit_of(found), name_of(limit)
    if limit.load is None:
        yield f"{name}: not even {limit.points[0].load:g} {unit} keep the objectives"
    elif limit.open:
        more = "give more --requests" if found.closed else "no load was found that breaks them"
        yield f"{name}: {limit.load:g} {unit} or more keep the objectives; {more}"
    else:
        low = "less" if limit.low is None else f"{limit.low:g}"
        ends = f"95 % interval {low} to {limit.high:g}"
        yield f"{name}: {limit.load:g} {unit} keep the objectives, {ends}"
    if limit.breaks is not None:
        yield f"  at {limit.breaks.load:g} {unit}: {'; '.join(broken(limit.breaks))}"
    below = [p.load for p in limit.points if not p.kept and p.load < (limit.load or 0.0)]
    if below:
        yield f"  not kept at some smaller loads either, as {min(below):g}; give more --requests"
    point = limit.point
    if point is not None and point.queue[0] == "unclear":
        yield f"  whether the queue grows is unclear ({point.queue[1]}); give more --requests"


def broken(point: Point) -> list[str]:
    """Return which objectives break, and by how much."""
    missed = [one for one in point.attained if one.share < (one.objective.share or 0.0)]
    said = [_missed(one) for one in missed]
    return said + [point.queue[1]] * point.grows


def _missed(one: Attained) -> str:
    by = ""
    if one.value_s is not None and one.slack is not None:
        by = f", {one.objective.statistic} {spoken(one.value_s)} ({-one.slack:+.0%})"
    return f"{one.objective} kept by {one.share:.1%}{by}"


def _cells(point: Point, gpus: int, objectives: Sequence[Objective]) -> list[str]:
    n = point.numbers
    cells = []
    for objective in objectives:
        one = _of(point, objective)
        value = None if one is None else one.value_s
        cells.append("-" if value is None else f"{value * 1e3:,.4g}")
        cells.append("-" if one is None else f"{one.share:.1%}")
    return [
        *cells,
        f"{n['output_tokens_per_s']:,.0f}",
        f"{_per_gpu(point, gpus):,.0f}",
        f"{n['tokens_per_s_user']:.1f}",
    ]


def _per_gpu(point: Point, gpus: int) -> float:
    """Output tokens/s."""
    return point.numbers["output_tokens_per_s"] / gpus


def _of(point: Point, objective: Objective) -> Attained | None:
    """None where no request has it."""
    return next((one for one in point.attained if one.objective == objective), None)


def _heads(found: Limits) -> list[str]:
    named = [(LATENCIES[o.metric], o.statistic) for o in found.objectives]
    heads = [h for name, p in named for h in (f"{name} {p}, ms", f"{name} kept")]
    return [*heads, "output tok/s", "tok/s/GPU", "tok/s/user"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _curve(limit: Limit, found: Limits) -> Table:
    rows = [
        [
            f"{p.load:g}",
            *_cells(p, limit.setting.gpus, found.objectives),
            p.answer,
            p.queue[0] or "-",
        ]
        for p in limit.points
    ]
    return _table([unit_of(found), *_heads(found), "answer", "queue"], rows)


def _compared(found: Limits) -> Table:
    """A row for each server at its limit."""
    rows = []
    ahead = {label for label, *_ in on_front(found)}
    for limit in found.limits:
        point = limit.point
        gpus = limit.setting.gpus
        cells = ["-"] * len(_heads(found))
        if point is not None:
            cells = _cells(point, gpus, found.objectives)
        load = "-" if limit.load is None else f"{limit.load:g}"
        mark = "yes" if name_of(limit) in ahead else "no"
        rows.append([name_of(limit), load, f"{gpus}", *cells, mark])
    return _table(["setting", unit_of(found), "GPUs", *_heads(found), "on the front"], rows)


# -- for programs ----------------------------------------------------------------------------------
def described(found: Limits) -> dict[str, Any]:
    """limit.json."""
    return {
        "objectives": [str(one) for one in found.objectives],
        "unit": unit_of(found),
        "runs": found.runs,
        "limits": [_limit(limit) for limit in found.limits],
        "front": [
            {"setting": name, "load": load, "tokens_per_s_user": x, "tokens_per_s_gpu": y}
            for name, load, x, y in on_front(found)
        ],
    }


def _limit(limit: Limit) -> dict[str, Any]:
    gpus = limit.setting.gpus
    return {
        "setting": name_of(limit),
        "axes": {name: text_of(value) for name, value in limit.setting.axes.items()},
        "config": dict(limit.setting.settings),
        "gpus": gpus,
        "requests": limit.setting.requests,
        "draws": limit.setting.draws,
        "notices": list(limit.notices),
        "load": limit.load,
        "low": limit.low,
        "high": limit.high,
        "open": limit.open,
        "breaks": None
        if limit.breaks is None
        else {"load": limit.breaks.load, "by": broken(limit.breaks)},
        "points": [
            {
                "load": p.load,
                "kept": p.kept,
                "answer": p.answer,
                "queue": p.queue[0],
                "attained": [
                    {"objective": str(a.objective), "share": a.share, "low": a.low}
                    | {"high": a.high, "value_s": a.value_s}
                    for a in p.attained
                ],
                **p.numbers,
                "tokens_per_s_gpu": _per_gpu(p, gpus),
            }
            for p in limit.points
        ],
    }


# -- pictures --------------------------------------------------------------------------------------
def on_front(found: Limits) -> list[tuple[str, float, float, float]]:
    """(setting, load, tokens/s of a user, output tokens/s of a GPU) of the points that no other
    point beats in both, of all loads at which the queue does not grow."""
    points = _interactive(found)
    chosen = front([(x, y) for *_, x, y in points], False, False)
    return [points[i] for i in chosen]


def _interactive(found: Limits) -> list[tuple[str, float, float, float]]:
    return [
        (name_of(limit), p.load, p.numbers["tokens_per_s_user"], _per_gpu(p, limit.setting.gpus))
        for limit in found.limits
        for p in limit.points
        if not p.grows and np.isfinite(p.numbers["tokens_per_s_user"])
    ]


def limit_charts(found: Limits) -> Iterator[Chart]:
    """Latency over load, a chart for each objective; tokens of a GPU against those of a user."""
    unit = unit_of(found)
    for objective in found.objectives:
        name = f"{LATENCIES[objective.metric]} {objective.statistic}"
        curves, ends = [], []
        for colour, limit in enumerate(found.limits):
            known = [(p.load, one.value_s) for p in limit.points if (one := _of(p, objective))]
            xy = np.array([(x, y) for x, y in known if y is not None], np.float64).reshape(-1, 2)
            label = name_of(limit)
            curves.append(Curve(label, xy[:, 0], xy[:, 1], colour, "points", joined=True))
            ends.append((label, np.nan if limit.load is None else limit.load))
        yield Chart(
            f"limit-{objective.metric}",
            f"{name} over load (objective {spoken(objective.bound_s)})",
            unit,
            f"{name}, seconds",
            tuple(curves),
            f"{name} of the judged requests over the load. Kept up to {best(ends, unit, True)}.",
            log_y=spans_decades([c.y for c in curves]),
            marks=tuple((load, "limit") for _, load in ends if np.isfinite(load)),
        )
    points = _interactive(found)
    ahead = on_front(found)
    if ahead:
        yield pareto(
            "limit-front",
            "Throughput of a GPU against interactivity",
            "output tokens/s of a user (1 / median TPOT)",
            "output tokens/s of a GPU",
            _marks(ahead, found),
            _marks([p for p in points if p not in ahead], found),
            share=False,
            what="load",
        )


def _marks(points: Sequence[tuple[str, float, float, float]], found: Limits):
    """As `pareto` takes them: x, y and a label of each."""
    several = len(found.limits) > 1
    labels = [f"{p[0]}, {p[1]:g}" if several else f"{p[1]:g}" for p in points]
    return np.array([p[2] for p in points]), np.array([p[3] for p in points]), labels
