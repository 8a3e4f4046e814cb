"""Record a run as flat columns. A macro-step (a run of identical decode steps) is one entry, and
becomes rows at the end.

Python objects are packed into arrays every thousand entries, to save memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from struct import Struct
from typing import NamedTuple

import numpy as np

from twinserve.backends.base import Executed
from twinserve.native.chosen import columns
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.runs import growth_of
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import End, RequestTable
from twinserve.sim.results.columns import OUTCOMES, REQUESTS, Columns
from twinserve.sim.results.steps import GapPool, narrow

_CLASSES = np.array(["rt", "be"])
_PACK = 1024  # entries
TAKERS = ("kv_rt_blocks", "kv_be_blocks")
_OUTCOMES = np.array([None, *OUTCOMES], dtype=object)


@dataclass(frozen=True, slots=True)
class Load:
    """Load at `at_s` (seconds): requests with and without KV on the device; KV blocks used, all."""

    at_s: float
    running: int
    waiting: int
    used: int
    total: int


class StepRecorder:
    """Record a replica's steps and gaps. timed: keep gap times, for `gap_pools`."""

    def __init__(self, replica: int = 0, timed: bool = False) -> None:
        self.replica = replica
        # of each macro-step the values in the order of _STEP_COLUMNS (`_ENTRY`: numpy takes long to
        # read tuples), and the ends of its steps
        self._scalars = bytearray()
        self._ends: list[np.ndarray] = []
        # the same of those before: a column of each value, and ends
        self._packed: list[tuple[list[np.ndarray], np.ndarray]] = []
        self.starts = array("d")
        self.firsts = array("q")  # number of its first step
        # macro-step, whose blocks, how many newly taken by step
        self.growth: list[tuple[int, str, np.ndarray]] = []
        # macro-step, cached blocks that leave by step, where blank ones do not go first
        self.evicted: list[tuple[int, np.ndarray]] = []
        # gaps before the first token of an outcome, how many rt and be tokens had each; packed with
        # their lengths
        self._gaps: list[tuple[np.ndarray, int, int]] = []
        self._packed_gaps: list[Gaps] = []
        # starts of the steps of their later tokens; None: not asked for
        self._gap_starts: list[float] | None = [] if timed else None
        # number of the first of a run's steps, between whose ends all gaps of its rows lie, and how
        # many steps; how many rt and be rows
        self._runs: list[tuple[int, int, int, int]] = []
        # of plans without a step: preempted (recompute, swap), bytes (to host, to device)
        self._pending = [0, 0, 0, 0]
        self.steps = 0
        # prompt tokens of requests with their first token, by the step's end; None: not asked for
        self.first_prompts: dict[float, int] | None = None
        self._idle: list[tuple[float, int, int, int]] = []  # since, running, waiting, used blocks

    _STEP_COLUMNS = (
        "prefill_requests",
        "prefill_tokens",
        "decode_requests",
        "running",
        "waiting",
        "kv_rt_blocks",
        "kv_be_blocks",
        "kv_free_blocks",
        "kv_cached_blocks",
        "preempted_recompute",
        "preempted_swap",
        "to_host_bytes",
        "to_device_bytes",
        "hit_tokens",
    )
    # what happens once, with the first step of a run
    ONCE = {
        "preempted_recompute",
        "preempted_swap",
        "to_host_bytes",
        "to_device_bytes",
        "hit_tokens",
    }

    def planned(
        self,
        plan: StepPlan,
        executed: Executed,
        running: int,
        waiting: int,
        requests: RequestTable,
        ledger: KvLedger,
        goes_on: bool = False,
    ) -> None:
        """Record a plan before its outcome is booked: memory is as the plan left it. running,
        waiting: requests when planned. goes_on: one more step of the run may follow (`went_on`)."""
        taken = len(executed.outcome.ends_s)
        steps = taken + goes_on
        usage = ledger.usage()
        work = executed.work
        if plan.preempted or plan.moves:
            self.without_step(plan, executed.to_host_bytes, executed.to_device_bytes)
        once, self._pending = self._pending, [0, 0, 0, 0]
        if len(self._ends) == 2 * _PACK:
            ends = np.concatenate(self._ends[:_PACK])
            self._packed.append((_columns(self._scalars[: _PACK * _ENTRY.size]), ends))
            del self._scalars[: _PACK * _ENTRY.size], self._ends[:_PACK]
        if steps > 1:
            self._plan_growth(plan, steps, requests, ledger)
        prefills = len(work.prefill_new)
        self._scalars += _ENTRY.pack(
            prefills,
            sum(work.prefill_new.tolist()) if prefills else 0,
            work.decode_requests,
            running,
            waiting,
            usage.real_time,
            usage.best_effort,
            usage.free,
            usage.cached,
            *once,
            sum([hit for _, hit in plan.admitted]) if plan.admitted else 0,
        )
        self.starts.append(executed.outcome.start_s)
        self.firsts.append(self.steps)
        self._ends.append(executed.outcome.ends_s)
        self.steps += taken

    def _plan_growth(
        self, plan: StepPlan, steps: int, requests: RequestTable, ledger: KvLedger
    ) -> None:
        run, n_be = len(self.starts), columns.best_effort(requests, plan.rows)
        taken = np.zeros(steps, np.int64)
        for column, kind, n in zip(TAKERS, (0, 1), (len(plan.rows) - n_be, n_be), strict=True):
            if n:
                alone = n == len(plan.rows)
                chosen = None if alone else requests.service_class[plan.rows] == kind
                growth = growth_of(plan, ledger, steps, chosen).astype(np.int32)
                self.growth.append((run, column, growth))
                taken += growth
        evicted = ledger.evicted_by(taken.cumsum())
        if evicted is not None and evicted[-1]:
            self.evicted.append((run, np.diff(evicted, prepend=0).astype(np.int32)))

    def went_on(self, ends_s: np.ndarray, running: int, waiting: int) -> bool:
        """Extend the last run by one step that ends at `ends_s`. Returns False, and changes
        nothing, if other counts have changed since the run began; then call `planned`."""
        before = _ENTRY.unpack_from(self._scalars, len(self._scalars) - _ENTRY.size)
        if before[3:5] != (running, waiting) or any(self._pending):
            return False
        self._ends[-1] = ends_s
        self.steps += 1
        return True

    def void(self) -> None:
        """Remove the last planned step (single, or last of a run), which never ended."""
        self._ends[-1] = self._ends[-1][:-1]
        self.steps -= 1
        if self.firsts[-1] == self.steps:
            del self._scalars[-_ENTRY.size :]
            for column in (self._ends, self.starts, self.firsts):
                column.pop()

    def idle(self, now: float, running: int, waiting: int, used: int) -> None:
        """Nothing is computed from `now` on; memory in use stays."""
        self._idle.append((now, running, waiting, used))

    def load(self, at_s: float, total: int) -> Load:
        """Return the load at an instant, from the last step that had begun."""
        idle = bisect_right(self._idle, at_s, key=lambda entry: entry[0]) - 1
        step = bisect_right(self.starts, at_s) - 1
        if step < 0 or (idle >= 0 and self._idle[idle][0] > self.starts[step]):
            since = self._idle[idle] if idle >= 0 else (0.0, 0, 0, 0)
            return Load(at_s, *since[1:], total)
        _, _, _, running, waiting, real_time, best_effort, *_ = self._entry(step)
        begun = 1 + int(self._ends_of(step)[:-1].searchsorted(at_s, side="right"))
        first = bisect_left(self.growth, step, key=lambda entry: entry[0])
        grown = sum(
            int(growth[:begun].sum())
            for of, _, growth in self.growth[first : first + 2]
            if of == step
        )
        return Load(at_s, running, waiting, real_time + best_effort + grown, total)

    def ended(self, after_s: float, until_s: float) -> tuple[list[float], list[int]]:
        """Return the ends of recorded steps after `after_s` and by `until_s` (seconds), and the
        number of requests in each."""
        first = len(self.starts)
        while first and self._ends_of(first - 1)[-1] > after_s:
            first -= 1
        found: list[float] = []
        requests: list[int] = []
        for step in range(first, len(self.starts)):
            ends_s, scalars = self._ends_of(step), self._entry(step)
            inside = ends_s[(ends_s > after_s) & (ends_s <= until_s)].tolist()
            found += inside
            requests += [scalars[0] + scalars[2]] * len(inside)
        return found, requests

    def _ends_of(self, step: int) -> np.ndarray:
        """Return the ends of a macro-step's steps."""
        pack = step // _PACK
        if pack >= len(self._packed):
            return self._ends[step - _PACK * len(self._packed)]
        before = self.firsts[pack * _PACK]
        return self._packed[pack][1][self.firsts[step] - before : self.firsts[step + 1] - before]

    def _entry(self, step: int) -> Sequence[int]:
        """Return the record of a macro-step, in the order of _STEP_COLUMNS."""
        pack, place = divmod(step, _PACK)
        if pack < len(self._packed):
            return [int(column[place]) for column in self._packed[pack][0]]
        return _ENTRY.unpack_from(self._scalars, _ENTRY.size * (step - _PACK * len(self._packed)))

    def withdrawn(self, row: int) -> None:
        """A request was cancelled; its row records the end (`request_columns`)."""

    def without_step(self, plan: StepPlan, to_host_bytes: int, to_device_bytes: int) -> None:
        """Record a plan that moved or dropped KV and computed nothing, with the next step."""
        swapped = sum(kind is Preemption.SWAP for _, kind in plan.preempted)
        for i, n in enumerate(
            (len(plan.preempted) - swapped, swapped, to_host_bytes, to_device_bytes)
        ):
            self._pending[i] += n

    def completed(self, executed: Executed, first_gaps: np.ndarray, requests: RequestTable) -> None:
        """Record a booked outcome. first_gaps: from EngineCore.complete."""
        rows, ends = executed.outcome.emitted, executed.outcome.ends_s
        if self.first_prompts is not None and len(first := rows[np.isnan(first_gaps)]):
            self.first_prompts[float(ends[0])] = int(requests.prompt_tokens[first].sum())
        n_be, found = columns.split_gaps(rows, first_gaps, requests.service_class)
        self._gaps += found
        if len(self._gaps) >= _PACK:
            self._packed_gaps.append(_packed(self._gaps))
            self._gaps.clear()
        if len(ends) > 1:  # of the macro-step planned last
            self._runs.append((self.firsts[-1], len(ends), len(rows) - n_be, n_be))
        if self._gap_starts is not None:
            self._gap_starts += [executed.outcome.start_s] * len(found)

    def ends(self) -> list[np.ndarray]:
        """Return when each step ended, in seconds, in consecutive pieces."""
        return [*(ends for _, ends in self._packed), np.concatenate([np.zeros(0), *self._ends])]

    def run_columns(self) -> dict[str, np.ndarray]:
        """Return integers[r] each: for each run of steps, the values of its first step."""
        last = [_columns(self._scalars)] if self._scalars else []
        packed = zip(*(values for values, _ in self._packed), *last, strict=True)
        columns = map(np.concatenate, packed) if self.starts else repeat(np.zeros(0, np.int64))
        return dict(zip(self._STEP_COLUMNS, columns, strict=False))

    def gap_pools(self, warmup_end_s: float | None = None) -> list[GapPool]:
        """Return inter-token gaps by class.

        warmup_end_s  seconds: pool separately the gaps whose later token is of an earlier step;
                      needs `timed`
        """
        gaps = [*self._packed_gaps, _packed(self._gaps)]
        seconds, *counts = (np.concatenate(parts) for parts in zip(*gaps, strict=True))
        found = Gaps(seconds, *(count.astype(np.int64) for count in counts))
        runs = np.array(self._runs, np.int64).reshape(-1, 4).T
        if warmup_end_s is None:
            return _pooled(found, self._between(*runs))
        assert self._gap_starts is not None, "the recorder was not asked for times"
        early = np.array(self._gap_starts, np.float64) < warmup_end_s
        ends, (place, number, *counts) = np.concatenate(self.ends()), runs
        # steps of a run follow each other: the first ones are of the warm-up
        cut = np.array(
            [int(ends[p : p + n - 1].searchsorted(warmup_end_s)) for p, n, _, _ in self._runs],
            np.int64,
        )
        return [
            pool
            for warmup, mine, first, steps in (
                (True, early, place, cut + 1),
                (False, ~early, place + cut, number - cut),
            )
            for pool in _pooled(found.only(mine), self._between(first, steps, *counts), warmup)
        ]

    def _between(
        self, place: np.ndarray, number: np.ndarray, rt: np.ndarray, be: np.ndarray
    ) -> Gaps:
        """Return the gaps between the ends of each run (int64[r] each, as in `_runs`)."""
        ends, steps = np.concatenate(self.ends()), number - 1
        at = np.arange(steps.sum()) + (place - (steps.cumsum() - steps)).repeat(steps)
        return Gaps(ends[at + 1] - ends[at], steps, rt, be)


class Gaps(NamedTuple):
    """Gaps between tokens: seconds of successive outcomes or runs, the number of gaps of each, and
    the tokens of each class with these gaps."""

    seconds: np.ndarray
    number: np.ndarray
    rt: np.ndarray
    be: np.ndarray

    def only(self, chosen: np.ndarray) -> Gaps:
        """Return the gaps of these outcomes (bool[r])."""
        kept = (self.number[chosen], self.rt[chosen], self.be[chosen])
        return Gaps(self.seconds[chosen.repeat(self.number)], *kept)


_ENTRY = Struct(f"{len(StepRecorder._STEP_COLUMNS)}q")


def _columns(entries: bytearray) -> list[np.ndarray]:
    table = np.frombuffer(entries, np.int64).reshape(-1, len(StepRecorder._STEP_COLUMNS))
    return [narrow(column) for column in table.T]


def _packed(gaps: list[tuple[np.ndarray, int, int]]) -> Gaps:
    if not gaps:
        return Gaps(np.zeros(0), *np.zeros((3, 0), np.int64))
    arrays, *counts = zip(*gaps, strict=True)
    number = np.fromiter(map(len, arrays), np.int64, len(arrays))
    return Gaps(np.concatenate(arrays), *map(narrow, (number, *np.array(counts, np.int64))))


def _pooled(gaps: Gaps, runs: Gaps, warmup: bool | None = None) -> list[GapPool]:
    """Pool gaps by class, of single outcomes and within runs."""
    everything, number, *counts = (np.concatenate(parts) for parts in zip(gaps, runs, strict=True))
    pools = []
    for name, times in zip(_CLASSES.tolist(), counts, strict=True):
        chosen, seconds = (times > 0) & (number > 0), everything
        if not chosen.any():
            continue
        if not chosen.all():
            seconds = everything[chosen.repeat(number)]
        order = seconds.argsort(kind="stable")  # the gaps of a run mostly ascend already
        seconds = seconds[order]
        first = np.flatnonzero(np.concatenate([[True], seconds[1:] != seconds[:-1]]))
        weights = times[chosen].repeat(number[chosen])[order]
        pools.append(GapPool(name, seconds[first], np.add.reduceat(weights, first), warmup))
    return pools


def request_columns(requests: RequestTable, replica: int, group_names: list[str]) -> Columns:
    """Return a row for each submitted request, in order of submission. swapped_tokens: rounded."""
    group = requests.group
    names = np.array([*group_names, None], dtype=object)  # group -1 is the last: none
    found = {
        "request_id": np.array(requests.ids, object),
        "service_class": _CLASSES[requests.service_class],
        "group": names[group],
        "stage": requests.stage,
        "priority": requests.priority,
        "replica": np.full(len(requests), replica),
    }
    of_table = list(REQUESTS)
    for name in of_table[of_table.index("arrival_s") : of_table.index("finished")]:
        found[name] = getattr(requests, name).copy()
    found["swapped_tokens"] = np.rint(found["swapped_tokens"]).astype(np.int64)
    found["finished"] = requests.end == End.COMPLETED
    found["outcome"] = _OUTCOMES[requests.end]
    found["ended_s"] = requests.ended_s.copy()
    found["computed_tokens"] = requests.computed_tokens.copy()
    return Columns(found)
