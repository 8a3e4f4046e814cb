"""Limits as tables with sentences, as limit.json, and as charts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from twinserve.sim.plan.limit import STEP, Limit, Limits, Point
from twinserve.sim.plan.verdicts import Attained
from twinserve.sim.results.options import LATENCIES, Objective, spoken
from twinserve.sim.results.parts import front
from twinserve.sim.results.paths import text_of
from twinserve.sim.results.versions import LIMITS

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
    for line in lines_of(found):
        console.print(line, markup=False)
    console.print(_table(*_cells_of(found)))
    for notice in _notices(found):
        console.print(f"note: {notice}", markup=False)


def _notices(found: Limits) -> list[str]:
    return list(dict.fromkeys(n for limit in found.limits for n in limit.notices))


def lines_of(found: Limits) -> list[str]:
    """Return the lines that state the question and what each server keeps."""
    said = ", ".join(map(str, found.objectives))
    step = "" if found.closed else f"; steps of {STEP:.0%}"
    count = found.limits[0].setting.requests
    lines = [f"objectives: {said}; {count:,} requests a run{step}"]
    return lines + [line for limit in found.limits for line in _lines(limit, found)]


def _lines(limit: Limit, found: Limits) -> Iterator[str]:
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
    """None if no request has it."""
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


def _cells_of(found: Limits) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: of one server each load, of several each at its limit."""
    unit, heads = unit_of(found), _heads(found)
    if len(found.limits) == 1:
        (limit,) = found.limits
        points = [(p, _cells(p, limit.setting.gpus, found.objectives)) for p in limit.points]
        rows = [[f"{p.load:g}", *cells, p.answer, p.queue[0] or "-"] for p, cells in points]
        return [unit, *heads, "answer", "queue"], rows
    rows, ahead = [], {label for label, *_ in on_front(found)}
    for limit in found.limits:
        point, gpus = limit.point, limit.setting.gpus
        cells = ["-"] * len(heads)
        if point is not None:
            cells = _cells(point, gpus, found.objectives)
        load = "-" if limit.load is None else f"{limit.load:g}"
        mark = "yes" if name_of(limit) in ahead else "no"
        rows.append([name_of(limit), load, f"{gpus}", *cells, mark])
    return ["setting", unit, "GPUs", *heads, "on the front"], rows


# -- for programs ----------------------------------------------------------------------------------
def described(found: Limits) -> dict[str, Any]:
    """Return the content of limit.json."""
    head, rows = _cells_of(found)
    document = {
        "objectives": [str(one) for one in found.objectives],
        "bounds": [
            {"name": f"{LATENCIES[o.metric]} {o.statistic}", "metric": o.metric}
            | {"bound_s": o.bound_s, "bound": spoken(o.bound_s)}
            for o in found.objectives
        ],
        "lines": lines_of(found),
        "table": {"head": head, "rows": rows},
        "notices": _notices(found),
        "unit": unit_of(found),
        "runs": found.runs,
        "limits": [_limit(limit) for limit in found.limits],
        "front": [
            {"setting": name, "load": load, "tokens_per_s_user": x, "tokens_per_s_gpu": y}
            for name, load, x, y in on_front(found)
        ],
    }
    return LIMITS.numbered(document)


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
                "grows": p.grows,
                **p.numbers,
                "tokens_per_s_gpu": _per_gpu(p, gpus),
            }
            for p in limit.points
        ],
    }


def on_front(found: Limits) -> list[tuple[str, float, float, float]]:
    """Return (setting, load, tokens/s of a user, output tokens/s of a GPU) of each point that no
    other beats in both. Only loads whose queue does not grow count."""
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
