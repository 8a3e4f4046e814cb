"""Small runs watched step by step: who begins, who runs, who gives way, and who is left waiting. A
step takes a second."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tests.policies.policy_runs import Desk
from twinserve.policies.requests import Application, State

LONGEST = 32  # tokens of a request: eight blocks of four


@dataclass(frozen=True)
class Arrival:
    """group: of an application, or -1"""

    step: int
    prompt: int
    output: int
    group: int = -1
    service_class: int = 0
    slo_ttft_s: float = np.nan
    slo_tpot_s: float = np.nan


@dataclass(frozen=True)
class Step:
    """One step, by row number.

    now      seconds at its start
    active   everybody who was here
    holders  of these, those that held KV on the device before it
    begun    those that were admitted for the first time, in order
    running  those that computed something, in order
    lost     those whose memory was taken
    waiting  those that have not begun yet, and still have not with this step
    """

    now: int
    active: list[int]
    holders: list[int]
    begun: list[int]
    running: list[int]
    lost: list[int]
    waiting: list[int]


def watched(desk: Desk, arrivals: Sequence[Arrival], steps: int = 3000) -> Iterator[Step]:
    """Submits the arrivals in order of their steps, as rows 0, 1, ..., and yields after each step.
    All end within `steps`. Groups are announced as applications of class X when their first request
    comes."""
    coming = sorted(arrivals, key=lambda arrival: arrival.step)
    stepper, table = desk.stepper, desk.table
    begun: set[int] = set()
    announced: set[int] = set()
    for _ in range(steps):
        if not stepper.core.active:
            if len(table) == len(coming):
                return
            stepper._steps = max(stepper._steps, coming[len(table)].step)
        now = stepper._steps
        while len(table) < len(coming) and coming[len(table)].step <= now:
            one = coming[len(table)]
            if one.group >= 0 and one.group not in announced:
                announced.add(one.group)
                stepper.core.announce(
                    Application(one.group, f"app{one.group}", float(one.step), "X")
                )
            values = {
                name: getattr(one, name)
                for name in ("group", "service_class", "slo_ttft_s", "slo_tpot_s")
            }
            desk.submit(
                f"r{len(table):03d}", one.prompt, one.output, arrival_s=float(one.step), **values
            )
        state = table.state[: len(table)].copy()
        active = np.flatnonzero(state != State.FINISHED).tolist()
        desk.step()
        plan = desk.plan
        first = [row for row, _ in plan.admitted if row not in begun]
        begun.update(first)
        yield Step(
            now,
            active,
            np.flatnonzero(state == State.RUNNING).tolist(),
            first,
            plan.rows.tolist(),
            [row for row, _ in plan.preempted],
            [row for row in active if row not in begun],
        )
    raise AssertionError(f"{stepper.core.active} requests have not ended after {steps} steps")


lengths = {"step": st.integers(0, 15), "prompt": st.integers(1, 20), "output": st.integers(1, 12)}


def arrivals(
    groups: int = 0, classes: bool = False, most: int = 10
) -> st.SearchStrategy[list[Arrival]]:
    """Up to `most` requests: of so many applications (0: of none), of both classes or real-time
    ones."""
    group = st.integers(0, groups - 1) if groups else st.just(-1)
    service_class = st.integers(0, 1) if classes else st.just(0)
    one = st.builds(Arrival, **lengths, group=group, service_class=service_class)
    return st.lists(one, min_size=2, max_size=most).map(
        lambda many: sorted(many, key=lambda arrival: arrival.step)
    )
