"""One trial of a plan: a stretch of a trace on so many replicas, and which objectives it keeps.

A trial is a run of `simulate` with the same settings that may end early. It ends as soon as more
requests have missed an objective than may. A trial for its verdict alone also ends once as many
have kept each objective as must. The verdict of the whole run is the same, since counts only grow.

Memory predictions against later use: Echo, Sec. 5.3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd

from twinserve.policies.registry import PolicySpec
from twinserve.policies.requests import End, State
from twinserve.profiles.step_times import choose
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_requests import RequestColumns, largest
from twinserve.sim.results.options import Objective
from twinserve.sim.results.parts import by_parts
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.error_bars import StepsOff, with_steps_off
from twinserve.sim.setup.hardware import Sources, most_decodes, outside
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.setup.run import Simulation
from twinserve.traces.load import load_trace
from twinserve.traces.workload import REAL_TIME, Workload


def predicted_memory(
    steps: pd.DataFrame, sigmas: float, history_s: float, sample_s: float, ahead_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] blocks predicted, int64[n] blocks held `ahead_s` later) of one replica's steps, for
    every sample that has a full history before it; n is 0 in a run that is too short.

    The prediction is mu + sigmas * sigma of samples taken every `sample_s` seconds for `history_s`
    seconds, in whole blocks, as the threshold of policy `echo` has it."""
    window, ahead = round(history_s / sample_s), round(ahead_s / sample_s)
    held = _held(steps, sample_s)
    if len(held) < window + ahead:
        return held[:0], held[:0]
    # Sums of whole numbers are exact; around the mean their squares stay small.
    middle = int(held.mean())
    around = held - middle
    sums, squares = (np.concatenate([[0], np.cumsum(v)]) for v in (around, around * around))
    s, q = sums[window:] - sums[:-window], squares[window:] - squares[:-window]
    deviation = np.sqrt(window * q - s * s) / window
    predicted = np.ceil((s + window * middle) / window + sigmas * deviation).astype(np.int64)
    later = held[window - 1 + ahead :]
    return predicted[: len(later)], later


def _held(steps: pd.DataFrame, sample_s: float) -> np.ndarray:
    """int64[n]: blocks that online requests hold at 0, sample_s, ...; none while no step runs."""
    start, end = steps.start_s.to_numpy(np.float64), steps.end_s.to_numpy(np.float64)
    at = np.arange(0.0, float(end[-1]), sample_s)
    step = np.searchsorted(start, at, side="right") - 1
    runs = (step >= 0) & (at < end[step])
    return np.where(runs, steps.kv_rt_blocks.to_numpy(np.int64)[step], 0)


_DRAINS_S = 20.0
SIGMAS = 2.0  # of the prediction of memory
# Of a worker: trials that follow each other have these in common.
SOURCES = Sources(lru_cache(maxsize=8)(load_trace), lru_cache(maxsize=64)(choose))


@dataclass(frozen=True)
class TrialSpec:
    """settings  of a SimulationConfig with one policy, as JSON has them; arrivals at `since_s`
                 seconds of the run or later are judged, those before fill the engines
    draw         0: the requests as recorded; k: their lengths dealt anew among the judged ones,
                 if no texts tie a length to its request
    early        the run may end as soon as an objective is lost
    verdict      the run may also end as soon as all objectives are kept; `keeps` is then all that
                 is known of the trial
    off          factors on the step times of decodes and of prompts
    """

    settings: Mapping[str, Any]
    since_s: float = 0.0
    draw: int = 0
    early: bool = True
    verdict: bool = False
    off: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Kept:
    """An objective in a trial.

    due, kept  judged requests that have it, and those of them that kept it
    windows    (due, kept) of each of ten parts of the time, by arrival
    value_s    what the share that is asked for keeps, seconds; None: some of them never ended
    """

    due: int
    kept: int
    windows: tuple[tuple[int, int], ...]
    value_s: float | None

    @property
    def share(self) -> float | None:
        return self.kept / self.due if self.due else None


@dataclass(frozen=True)
class Memory:
    """Echo's memory prediction (Sec. 5.3) compared with what happened. The prediction is mu + 2
    sigma of what requests held in a fifth of the judged time. It is compared with what they held a
    thirtieth of that time later. predicted_share, held_share: means over all samples and replicas,
    of a replica's KV blocks; exceeded: share of the samples with more held than predicted."""

    predicted_share: float
    held_share: float
    exceeded: float


@dataclass(frozen=True)
class Trial:
    """The result of a trial. objectives: as in the settings, empty if it ended early; missed: those
    with too many misses; requests: judged ones; offline_tokens_per_s: of best-effort requests that
    ended in the judged time; memory: None if it ended early or is too short; notices: of its
    settings and requests; most_decodes: requests in one step."""

    keeps: bool
    early: bool
    missed: tuple[int, ...]
    objectives: tuple[Kept, ...] = ()
    requests: int = 0
    offline_tokens_per_s: float = 0.0
    peak_kv_share: float = 0.0
    preemptions: int = 0
    memory: Memory | None = None
    notices: tuple[str, ...] = ()
    most_decodes: int = 0


def needed(objective: Objective, due: int) -> int:
    """Return how many of `due` requests must keep an objective with a percentile. Computed in whole
    numbers: 99.9 % of 1,000 are 999."""
    share = Fraction(str(objective.statistic)[1:]) / 100
    return math.ceil(share * due)


def run_trial(spec: TrialSpec) -> Trial:
    """Run the trial. Raises what `resolve` does."""
    config = SimulationConfig(**spec.settings)
    inputs = resolve(config, sources=SOURCES)
    objectives = parse_objectives(config.slo)
    if spec.draw:
        inputs = replace(inputs, workload=dealt(inputs.workload, spec.since_s, spec.draw))
    if spec.off != (1.0, 1.0):
        inputs = with_steps_off(inputs, StepsOff("", *spec.off))
    run = UntilKnown(inputs, inputs.policies[0], objectives, spec.since_s, spec.early, spec.verdict)
    run.run()
    if run.missed or run.kept:
        return Trial(run.kept, True, run.missed, notices=inputs.notices)
    return judged(run.rows(), objectives, spec.since_s, inputs)


def can_deal(workload: Workload) -> bool:
    """Return whether no session, application or text ties lengths to their requests."""
    return workload.prefix is None and not (workload.group >= 0).any()


def dealt(workload: Workload, since_s: float, draw: int) -> Workload:
    """Return the workload with lengths (and their objectives) of the requests from `since_s` on
    dealt anew among these. Sessions, applications and texts stay."""
    if not can_deal(workload):
        return workload
    rows = np.flatnonzero(workload.arrival_s >= since_s)
    rng = np.random.default_rng(np.random.SeedSequence(draw, spawn_key=(0x91,)))
    order = rng.permutation(rows)
    names = ("prompt_tokens", "output_tokens", "slo_ttft_s", "slo_tpot_s")
    columns = {name: getattr(workload, name).copy() for name in names}
    for name, column in columns.items():
        column[rows] = getattr(workload, name)[order]
    return replace(workload, **columns)


class UntilKnown(Simulation):
    """End a run once an objective cannot be kept: `missed` then says which, by position. With
    `verdict`, also end if no objective can be lost, and `kept` is then true.

    since_s  requests that arrive from then on are judged
    early    if not set, the run goes to its end
    slice_s  simulated seconds from one look to the next
    """

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        objectives: Sequence[Objective],
        since_s: float = 0.0,
        early: bool = True,
        verdict: bool = False,
        slice_s: float = 2.0,
    ) -> None:
        super().__init__(inputs, spec)
        self._objectives, self._since_s, self._slice_s = objectives, since_s, slice_s
        # clients behind a front end see other times than the engines' tables have
        self._early = early and inputs.front_end is None
        self._verdict = verdict
        due = [_due(one, inputs.workload, since_s) for one in objectives]
        self._needed = np.array([needed(o, n) for o, n in zip(objectives, due, strict=True)])
        self._allowed = np.array(due) - self._needed
        self.missed: tuple[int, ...] = ()
        self.kept = False
        # what is late by then has mostly been seen
        self._last_look_s = inputs.workload.last_arrival_s + _DRAINS_S

    def _advance(self) -> None:
        until = self._since_s + self._slice_s
        while self._early and until < self._last_look_s:
            self.clock.run(until)
            misses, kept = self._counts()
            self.missed = tuple(np.flatnonzero(misses > self._allowed).tolist())
            self.kept = self._verdict and not self.missed and bool((kept >= self._needed).all())
            if self.missed or self.kept:
                return
            until += self._slice_s
        self.clock.run()

    def _counts(self) -> np.ndarray:
        """int64[2, objectives]: judged requests that have missed each one for certain, and those
        that have kept it. A request that waits too long has missed; a running one is counted when
        it ends."""
        total = np.zeros((2, len(self._objectives)), np.int64)
        now = self.clock.now
        for engine in self.engines:
            table = engine.core.requests
            arrival = table.arrival_s
            judged = (arrival >= self._since_s) & (table.service_class == REAL_TIME)
            # it goes on elsewhere
            judged &= (table.end != int(End.MOVED)) & (table.end != int(End.HANDED_OVER))
            done = (table.state == int(State.FINISHED)) & (table.end == int(End.COMPLETED))
            first = table.first_token_s - arrival
            waited = np.isnan(table.first_scheduled_s)
            late = np.where(waited & np.isnan(first), now - arrival, first)  # it may have come so
            whole = table.last_token_s - arrival
            later = table.output_tokens - 1
            tpot = np.where(later > 0, (whole - first) / np.maximum(later, 1), 0.0)
            for i, objective in enumerate(self._objectives):
                if objective.metric == "ttft":
                    missed = late > table.slo_ttft_s
                    kept = first <= table.slo_ttft_s
                elif objective.metric == "tpot":
                    missed = done & (tpot > table.slo_tpot_s)
                    kept = tpot <= table.slo_tpot_s
                else:
                    missed = np.where(done, whole, np.where(waited, now - arrival, 0.0)) > (
                        objective.bound_s
                    )
                    kept = whole <= objective.bound_s
                total[0, i] += np.count_nonzero(judged & missed)
                total[1, i] += np.count_nonzero(judged & done & kept)
        return total


def _due(objective: Objective, workload: Workload, since_s: float) -> int:
    """Judged requests that have the objective, or more: turns of sessions count as judged, whenever
    they come. Of fewer no more may miss, and no more need to keep."""
    judged = (workload.service_class == REAL_TIME) & ~(workload.arrival_s < since_s)
    bound = {"ttft": workload.slo_ttft_s, "tpot": workload.slo_tpot_s}.get(objective.metric)
    return int((judged if bound is None else judged & ~np.isnan(bound)).sum())


def judged(rows: RunRows, objectives: Sequence[Objective], since_s: float, inputs: Inputs) -> Trial:
    """Return what requests that arrived from `since_s` on kept, in a run that went to its end."""
    r = RequestColumns.of(rows.requests)
    mine = (r.service_class == "rt") & (r.arrival >= since_s)
    found = tuple(_kept(r, mine, objective) for objective in objectives)
    missed = tuple(
        i
        for i, (o, k) in enumerate(zip(objectives, found, strict=True))
        if k.kept < needed(o, k.due)
    )
    steps = rows.step_columns
    blocks = partial(steps.each, "kv_used_blocks")
    used = float(largest(blocks, 0, len(steps))) if len(steps) else 0.0
    return Trial(
        keeps=not missed,
        early=False,
        missed=missed,
        objectives=found,
        requests=int(mine.sum()),
        offline_tokens_per_s=_offline(r, since_s, float(r.arrival[mine].max())),
        peak_kv_share=used / rows.kv_total_blocks,
        preemptions=int(rows.requests[["recomputes", "swaps"]].to_numpy().sum()),
        memory=_memory(rows, r.arrival[mine]),
        notices=(*inputs.notices, *outside(inputs.hardware.profile, steps)),
        most_decodes=most_decodes(steps),
    )


def _memory(rows: RunRows, arrival_s: np.ndarray) -> Memory | None:
    """While judged requests arrive; the lead before them is history too."""
    span = float(np.ptp(arrival_s))
    if not span > 0:
        return None
    while_arriving = rows.steps[rows.steps["start_s"] <= arrival_s.max()]
    both = [
        predicted_memory(of, SIGMAS, span / 5, span / 300, span / 30)
        for _, of in while_arriving.groupby("replica")
    ]
    if not sum(len(held) for _, held in both):  # too short, or all replicas failed before a step
        return None
    predicted, held = (np.concatenate([one[i] for one in both]) for i in (0, 1))
    total = rows.kv_total_blocks
    return Memory(
        float(predicted.mean()) / total,
        float(held.mean()) / total,
        float((held > predicted).mean()),
    )


def _offline(r: RequestColumns, begin_s: float, end_s: float) -> float:
    ended = (r.service_class == "be") & r.finished & (r.last >= begin_s) & (r.last <= end_s)
    return float((r.prompt + r.output)[ended].sum() / (end_s - begin_s)) if end_s > begin_s else 0.0


def _kept(r: RequestColumns, judged: np.ndarray, objective: Objective) -> Kept:
    """As `metrics_objectives.judge` has it, of the judged requests."""
    everyone = np.full(len(r.e2el), objective.bound_s)
    bound = {"ttft": r.slo_ttft, "tpot": r.slo_tpot}.get(objective.metric, everyone)
    latency = {"ttft": r.ttft, "tpot": r.tpot, "e2el": r.e2el}[objective.metric]
    due = judged & ~np.isnan(bound)
    kept = due & r.finished & (latency <= bound)
    n = int(due.sum())
    if not n:
        return Kept(0, 0, (), None)
    ordered = np.sort(np.where(r.finished, latency, np.inf)[due])
    value = float(ordered[max(needed(objective, n), 1) - 1])
    return Kept(
        n, int(kept.sum()), by_parts(r.arrival, due, kept), value if math.isfinite(value) else None
    )
