"""Collects what happened as flat columns, and hands it out as data frames. One entry a macro-step:
a run of identical decode steps stays one entry until the end, and is spread into its rows then."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from twinserve.backends.base import Executed
from twinserve.native.chosen import columns
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.runs import growth_of
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import End, RequestTable
from twinserve.sim.results.schemas import OUTCOMES

_CLASSES = np.array(["rt", "be"])
_OUTCOMES = np.array([None, *OUTCOMES], dtype=object)


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine had at `at_s` (seconds): requests with and without KV on the device, and KV
    blocks that requests held, of how many."""

    at_s: float
    running: int
    waiting: int
    used: int
    total: int


class StepRecorder:
    """Steps and inter-token gaps of one replica. timed: keep when gaps were, for `gap_frame`."""

    def __init__(self, replica: int = 0, timed: bool = False) -> None:
        self.replica = replica
        self._scalars: list[tuple] = []  # one a macro-step, in the order of _STEP_COLUMNS
        self._starts: list[float] = []
        self._ends: list[np.ndarray] = []
        # macro-step, whose blocks, how many newly taken by step
        self._growth: list[tuple[int, str, np.ndarray]] = []
        # gaps, how many rt and be tokens had each
        self._gaps: list[tuple[np.ndarray, int, int]] = []
        # starts of the steps of their later tokens, one or as many as gaps; None: not asked for
        self._gap_starts: list[float | np.ndarray] | None = [] if timed else None
        # of plans without a step: preempted (recompute, swap), bytes (to host, to device)
        self._pending = [0, 0, 0, 0]
        self.steps = 0
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
    _ONCE = {
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
    ) -> None:
        """Before the outcome is booked: memory is as the plan left it. running, waiting: requests,
        at planning."""
        steps = len(executed.outcome.ends_s)
        usage = ledger.usage()
        work = executed.work
        if plan.preempted or plan.moves:
            self.without_step(plan, executed.to_host_bytes, executed.to_device_bytes)
        once, self._pending = self._pending, [0, 0, 0, 0]
        if steps > 1:
            best_effort = requests.service_class[plan.rows] == 1
            n_be = np.count_nonzero(best_effort)
            parts = (
                ("kv_rt_blocks", ~best_effort, len(plan.rows) - n_be),
                ("kv_be_blocks", best_effort, n_be),
            )
            for column, mine, n in parts:
                if n:
                    chosen = None if n == len(plan.rows) else mine
                    growth = growth_of(plan, ledger, steps, chosen)
                    self._growth.append((len(self._scalars), column, growth))
        self._scalars.append(
            (
                len(work.prefill_new),
                sum(work.prefill_new.tolist()),
                work.decode_requests,
                running,
                waiting,
                usage.real_time,
                usage.best_effort,
                usage.free,
                usage.cached,
                *once,
                sum([hit for _, hit in plan.admitted]),
            )
        )
        self._starts.append(executed.outcome.start_s)
        self._ends.append(executed.outcome.ends_s)
        self.steps += steps

    def void(self) -> None:
        """The step planned last, a single one, never ended."""
        for column in (self._scalars, self._starts, self._ends):
            column.pop()
        self.steps -= 1

    def idle(self, now: float, running: int, waiting: int, used: int) -> None:
        """Nothing is computed from `now` on; what is held stays."""
        self._idle.append((now, running, waiting, used))

    def load(self, at_s: float, total: int) -> Load:
        """What the recorded steps say of an instant: as of the last that had begun."""
        idle = bisect_right(self._idle, at_s, key=lambda entry: entry[0]) - 1
        step = bisect_right(self._starts, at_s) - 1
        if step < 0 or (idle >= 0 and self._idle[idle][0] > self._starts[step]):
            since = self._idle[idle] if idle >= 0 else (0.0, 0, 0, 0)
            return Load(at_s, *since[1:], total)
        _, _, _, running, waiting, real_time, best_effort, *_ = self._scalars[step]
        begun = 1 + int(self._ends[step][:-1].searchsorted(at_s, side="right"))
        first = bisect_left(self._growth, step, key=lambda entry: entry[0])
        grown = sum(
            int(growth[:begun].sum())
            for of, _, growth in self._growth[first : first + 2]
            if of == step
        )
        return Load(at_s, running, waiting, real_time + best_effort + grown, total)

    def withdrawn(self, row: int) -> None:
        """A request left before its end; its row says so (`request_frame`)."""

    def without_step(self, plan: StepPlan, to_host_bytes: int, to_device_bytes: int) -> None:
        """A plan that moved or dropped KV and computed nothing: what it did is booked with the next
        step."""
        swapped = sum(kind is Preemption.SWAP for _, kind in plan.preempted)
        for i, n in enumerate(
            (len(plan.preempted) - swapped, swapped, to_host_bytes, to_device_bytes)
        ):
            self._pending[i] += n

    def completed(self, executed: Executed, first_gaps: np.ndarray, requests: RequestTable) -> None:
        """After the outcome is booked. first_gaps: as EngineCore.complete returns them."""
        rows, ends = executed.outcome.emitted, executed.outcome.ends_s
        n_be, found = columns.split_gaps(rows, first_gaps, requests.service_class)
        self._gaps += found
        if len(ends) > 1:
            self._gaps.append((ends[1:] - ends[:-1], len(rows) - n_be, n_be))
        if (starts := self._gap_starts) is not None:
            new = len(self._gaps) - len(starts)  # the last one of a run: its further steps
            starts += [executed.outcome.start_s] * new
            if len(ends) > 1:
                starts[-1] = ends[:-1]

    def step_columns(self) -> dict[str, np.ndarray]:
        """One entry a step, in order; columns as docs/metrics.md lists them."""
        return _spread([self])

    def step_frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.step_columns(), copy=False)  # long, and nobody else has them

    @property
    def recorded_steps(self) -> int:
        return sum(map(len, self._ends))

    def gap_frame(self, warmup_end_s: float | None = None) -> pd.DataFrame:
        """Inter-token gaps pooled: service_class, gap_s, count; one row a distinct gap and class.

        warmup_end_s  pool apart, with a column `warmup`, the gaps whose later token is of a step
                      that began before; seconds, of a recorder that is `timed`
        """
        if warmup_end_s is None:
            return self._pooled(self._gaps)
        assert self._gap_starts is not None, "nobody asked the recorder for times"
        sides: dict[bool, list] = {True: [], False: []}
        for (gaps, *counts), starts in zip(self._gaps, self._gap_starts, strict=True):
            # steps of a run follow each other: the first ones are of the warm-up
            early = (
                int(starts.searchsorted(warmup_end_s))
                if isinstance(starts, np.ndarray)
                else len(gaps) * (starts < warmup_end_s)
            )
            for warmup, part in ((True, gaps[:early]), (False, gaps[early:])):
                if len(part):
                    sides[warmup].append((part, *counts))
        frames = [self._pooled(found).assign(warmup=warmup) for warmup, found in sides.items()]
        return pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)

    @staticmethod
    def _pooled(found: list[tuple[np.ndarray, int, int]]) -> pd.DataFrame:
        parts = []
        if found:
            arrays, *counts = zip(*found, strict=True)
            lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
            everything = np.concatenate(arrays)
            for name, times in zip(_CLASSES, np.array(counts, np.int64), strict=True):
                chosen, gaps = times > 0, everything
                if not chosen.any():
                    continue
                if not chosen.all():
                    gaps = everything[chosen.repeat(lengths)]
                distinct, where = np.unique(gaps, return_inverse=True)
                weights = times[chosen].repeat(lengths[chosen])
                total = np.bincount(where, weights=weights).astype(np.int64)
                parts.append(
                    pd.DataFrame({"service_class": name, "gap_s": distinct, "count": total})
                )
        if not parts:
            return pd.DataFrame(
                {
                    "service_class": pd.Series(dtype=str),
                    "gap_s": [],
                    "count": pd.Series(dtype=np.int64),
                }
            )
        return pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]


def _spread(recorders: Sequence[StepRecorder]) -> dict[str, np.ndarray]:
    """`StepRecorder.step_columns` of one recorder after another. All runs are spread at once: each
    column is one call of numpy, and is written once."""
    names, once = StepRecorder._STEP_COLUMNS, StepRecorder._ONCE
    runs = [ends for recorder in recorders for ends in recorder._ends]
    lengths = np.fromiter(map(len, runs), np.int64, len(runs))
    first = np.cumsum(lengths) - lengths
    ends = np.concatenate(runs) if runs else np.zeros(0)
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1]  # inside a run a step starts when the one before it ended
    starts[first] = [start_s for recorder in recorders for start_s in recorder._starts]
    replicas = [recorder.replica for recorder in recorders]
    steps = [recorder.recorded_steps for recorder in recorders]
    frame = {"replica": np.repeat(replicas, steps), "start_s": starts, "end_s": ends}
    scalars = [entry for recorder in recorders for entry in recorder._scalars]
    columns = np.array(scalars, np.int64).reshape(-1, len(names)).T
    for name, column in zip(names, columns, strict=True):
        if name not in once and column.any():
            frame[name] = column.repeat(lengths)
            continue
        frame[name] = np.zeros(len(ends), np.int64)  # pages that nothing is written to take no time
        if column.any():
            frame[name][first] = column
    _add_growth(frame, recorders, first, lengths)
    free = frame.pop("kv_free_blocks")
    np.minimum(frame["kv_cached_blocks"], free, out=frame["kv_cached_blocks"])
    frame["kv_used_blocks"] = frame["kv_rt_blocks"] + frame["kv_be_blocks"]
    return frame


def _add_growth(
    frame: dict[str, np.ndarray],
    recorders: Sequence[StepRecorder],
    first: np.ndarray,
    lengths: np.ndarray,
) -> None:
    """The blocks that runs newly take, step by step; first, lengths: of each run, in steps."""
    before = 0
    taken: dict[str, list[tuple[int, np.ndarray]]] = {}
    for recorder in recorders:
        for run, name, growth in recorder._growth:
            taken.setdefault(name, []).append((before + run, growth))
        before += len(recorder._ends)
    for name, found in taken.items():
        runs = np.array([run for run, _ in found])
        most = lengths[runs]
        # an arrival may have cut the run
        growths = [growth[:n] for (_, growth), n in zip(found, most.tolist(), strict=True)]
        total = np.concatenate(growths).cumsum()
        ends = most.cumsum()
        at_start = np.concatenate([[0], total[ends[:-1] - 1]])
        total -= at_start.repeat(most)
        at = np.arange(len(total)) + (first[runs] - (ends - most)).repeat(most)
        frame[name][at] += total
        frame["kv_free_blocks"][at] -= total


def joined_steps(recorders: Sequence[StepRecorder]) -> pd.DataFrame:
    """One row a step, recorder by recorder."""
    if all(type(recorder).step_columns is StepRecorder.step_columns for recorder in recorders):
        return pd.DataFrame(_spread(recorders), copy=False)  # nobody else has the columns
    ends = np.cumsum([recorder.recorded_steps for recorder in recorders])
    frame: dict[str, np.ndarray] = {}
    for end, recorder in zip(ends.tolist(), recorders, strict=True):
        for name, column in recorder.step_columns().items():
            if name not in frame:
                # zero where a replica has no such column: not all of them need speculate
                frame[name] = np.zeros(ends[-1], column.dtype)
            frame[name][end - len(column) : end] = column
    return pd.DataFrame(frame, copy=False)


def request_frame(requests: RequestTable, replica: int, group_names: list[str]) -> pd.DataFrame:
    """One row a submitted request, in order of submission. swapped_tokens: rounded to whole
    ones."""
    group = requests.group
    names = np.array([*group_names, None], dtype=object)  # group -1 is the last: none
    frame = {
        "request_id": list(requests.ids),
        "service_class": _CLASSES[requests.service_class],
        "group": names[group],
        "stage": requests.stage,
        "priority": requests.priority,
        "replica": np.full(len(requests), replica),
    }
    for name in (
        "arrival_s",
        "first_scheduled_s",
        "first_token_s",
        "last_token_s",
        "prompt_tokens",
        "output_tokens",
        "hit_tokens",
        "recomputes",
        "swaps",
        "swapped_tokens",
        "late_tokens",
        "slo_ttft_s",
        "slo_tpot_s",
    ):
        frame[name] = getattr(requests, name).copy()
    frame["swapped_tokens"] = np.rint(frame["swapped_tokens"]).astype(np.int64)
    frame["finished"] = requests.end == End.COMPLETED
    frame["outcome"] = _OUTCOMES[requests.end]
    frame["ended_s"] = requests.ended_s.copy()
    frame["computed_tokens"] = requests.computed_tokens.copy()
    return pd.DataFrame(frame)
