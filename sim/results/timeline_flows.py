"""The router's track in a timeline, and requests as flows between it and the replicas: an arrow to
the step in which a replica first computes a request, and one back from the step that ends it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

ROUTER = 10_000  # its process; replicas have 1 to 4,096
_THREAD = 1
_LONGEST_US = 100.0  # of a slice of the router, so that it can be seen


def router_events(
    placements: pd.DataFrame, requests: pd.DataFrame, steps: pd.DataFrame
) -> Iterator[dict]:
    """Of the stays of `requests`: slices on the router's track and flows, in order of time.

    steps  those that are drawn; what is not in them has no arrow
    """
    yield from router_names()
    drawn = placements[placements["request_id"].isin(set(requests["request_id"]))]
    drawn = drawn.sort_values(["placed_s", "request", "placement"], kind="stable")
    marks = [*_sent(drawn), *_ended(drawn)]
    marks.sort(key=lambda mark: mark["ts"])
    yield from _with_lengths(marks)
    yield from _flows(drawn, _Steps(steps))


def router_names() -> Iterator[dict]:
    """That there is a router's track."""
    for kind, tid, args in (
        ("process_name", 0, {"name": "router"}),
        ("process_sort_index", 0, {"sort_index": -1}),
        ("thread_name", _THREAD, {"name": "requests"}),
    ):
        yield {"ph": "M", "name": kind, "pid": ROUTER, "tid": tid, "ts": 0, "args": args}


def _sent(stays: pd.DataFrame) -> Iterator[dict]:
    for stay in stays.itertuples(index=False):
        args = {"replica": int(stay.replica), "placement": int(stay.placement)}
        yield _slice(str(stay.request_id), stay.placed_s, args)


def _ended(stays: pd.DataFrame) -> Iterator[dict]:
    for stay in stays[stays["ended_s"].notna()].itertuples(index=False):
        args = {"replica": int(stay.replica), "output tokens": int(stay.output_tokens)}
        yield _slice(f"{stay.request_id} {stay.outcome}", stay.ended_s, args)


def _slice(name: str, at_s: float, args: dict) -> dict:
    about = {"ph": "X", "cat": "router", "name": name, "pid": ROUTER, "tid": _THREAD}
    return about | {"ts": _us(at_s), "args": args}


def _with_lengths(marks: list[dict]) -> Iterator[dict]:
    """Slices of a thread lie beside or inside each other: each lasts until the next one begins."""
    times = np.array([mark["ts"] for mark in marks])
    later = np.append(np.unique(times)[1:], np.inf)
    until = dict(zip(np.unique(times).tolist(), later.tolist(), strict=True))
    for mark in marks:
        yield mark | {"dur": round(min(_LONGEST_US, until[mark["ts"]] - mark["ts"]), 3)}


def _flows(stays: pd.DataFrame, steps: _Steps) -> Iterator[dict]:
    for number, stay in enumerate(stays.itertuples(index=False)):
        replica = int(stay.replica)
        begun = steps.around(replica, stay.first_scheduled_s, "right")
        if begun is not None and begun >= _us(stay.placed_s):
            yield from _arrow(f"to {number}", (ROUTER, _us(stay.placed_s)), (replica + 1, begun))
        ended = steps.around(replica, stay.ended_s, "left")
        if ended is not None and begun is not None and stay.outcome == "completed":
            yield from _arrow(f"back {number}", (replica + 1, ended), (ROUTER, _us(stay.ended_s)))


def _arrow(name: str, tail: tuple[int, float], head: tuple[int, float]) -> Iterator[dict]:
    """Both ends are bound to the slice that they lie in."""
    flow = {"cat": "flow", "name": "request", "id": name, "tid": _THREAD}
    yield flow | {"ph": "s", "pid": tail[0], "ts": tail[1]}
    yield flow | {"ph": "f", "bp": "e", "pid": head[0], "ts": head[1]}


class _Steps:
    """Of each replica, in order of time."""

    def __init__(self, steps: pd.DataFrame) -> None:
        self._of = {
            int(replica): mine[["start_s", "end_s"]].to_numpy(np.float64)
            for replica, mine in steps.groupby("replica", sort=False)
        }

    def around(self, replica: int, at_s: float, side: str) -> float | None:
        """The middle (microseconds) of the first step that ends after `at_s`, or with "left" then;
        None where none is drawn."""
        steps = self._of.get(replica)
        if steps is None or np.isnan(at_s):
            return None
        place = int(np.searchsorted(steps[:, 1], at_s, side))  # type: ignore[call-overload]
        return None if place == len(steps) else _us(steps[place].mean())


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
