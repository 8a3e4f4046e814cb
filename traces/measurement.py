"""Measurements of requests that were served: the rows of a benchmark's result, of a
server's log or spans, or the histograms of a monitoring system. Units: seconds, tokens.

A reader of `traces/readers/measured` makes a Measurement of a file, by the rule in `rows.py` there.
`workload_of` makes a workload of it, if it says when requests came and how long they were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinserve.traces.readers.columns import Rows, assemble
from twinserve.traces.workload import Workload, WorkloadError

CLIENT, SERVER = "client", "server"
LEAST_TURNS = 8  # requests that a closed loop sends after its first ones, for it to be seen
LOOP_SLACK = 0.1  # of its requests, of those under way, and of a latency between two requests
IN_A_LOOP = "requests are sent when others end"  # a notice begins so
SENT = "record when requests were sent"


@dataclass(frozen=True)
class Histogram:
    """Counts of values by bucket, over windows of time, as Prometheus keeps them.

    times_s   float64[w + 1], from the first sample; window i is times_s[i] .. times_s[i + 1]
    edges     float64[b], upper bounds of the buckets, ascending, the last one infinite
    counts    float64[w, b], values that fell into each bucket in each window
    sums      float64[w], the sum of the values in each window
    """

    times_s: np.ndarray
    edges: np.ndarray
    counts: np.ndarray
    sums: np.ndarray

    @property
    def count(self) -> float:
        return float(self.counts.sum())

    def mean(self) -> float:
        """Return the mean of all values; NaN if there are none."""
        return float(self.sums.sum() / self.count) if self.count else float("nan")

    def share_below(self) -> np.ndarray:
        """float64[b]: the share of all values that are at or below each edge."""
        total = np.cumsum(self.counts.sum(axis=0))
        return total / total[-1] if total[-1] else np.full(len(total), np.nan)


@dataclass(frozen=True)
class Measurement:
    """Requests and how they were served. Arrays have one entry a request, failed ones too, in the
    order of the file.

    arrival_s   from the first request on; NaN if the file does not say
    due_s       when it would have been sent if the client had no limit on how many it has under
                way; None: at `arrival_s`
    prompt_tokens, output_tokens   int64; -1 if the file does not say
    ttft_s, e2el_s, tpot_s, queued_s   NaN if not measured; tpot_s is the time from the first
                token to the last by the tokens after the first
    gaps_s      inter-token gaps of all requests, pooled; None: not measured
    errors      "" of a request that did not fail; else why it did
    impossible  bool[n], rows without what every request has: neither served nor failed
    ids, session, service_class, priority   names and classes; empty lists if there are none
    turn        int64, place in the session
    concurrency most requests that the client had under way at once; None: no limit
    where       CLIENT, or SERVER if times begin in the engine
    stated      numbers that the file states itself, as mean_ttft_ms
    histograms  by metric: ttft, tpot, itl, e2el, queued (seconds); prompt_tokens, output_tokens
    notices     what is not in here, or is an estimate
    """

    name: str
    path: str
    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    ttft_s: np.ndarray
    e2el_s: np.ndarray
    tpot_s: np.ndarray
    queued_s: np.ndarray
    gaps_s: np.ndarray | None = None
    errors: Sequence[str] = ()
    impossible: Sequence[bool] | np.ndarray = ()
    ids: Sequence[str] = ()
    session: Sequence[str | None] = ()
    turn: np.ndarray | None = None
    service_class: Sequence[str] = ()
    priority: np.ndarray | None = None
    concurrency: int | None = None
    due_s: np.ndarray | None = None
    where: str = CLIENT
    stated: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def served(self) -> np.ndarray:
        """Return bool[n]: the requests that can be used."""
        return np.array([not error for error in self.errors], bool) & ~np.asarray(
            self.impossible, bool
        )

    @property
    def torn(self) -> bool:
        """Whether tokens or ends are missing within the time of the served requests."""
        at, served = self.arrival_s, self.served
        ends = (at + self.e2el_s)[served]
        if np.isnan(ends).all():
            return False
        first, last = np.nanmin(at[served]), np.nanmax(at[served])
        outside = (at < first) | (at > last) | ~np.asarray(self.impossible, bool)
        return bool(not outside.all() or last > np.nanmax(ends))

    @property
    def failed(self) -> int:
        return sum(map(bool, self.errors))


def workload_of(found: Measurement) -> Workload:
    """Return the served requests of a measurement as a workload, at their send times. Turns of a
    session wait for the turn before them, as long as they did.

    Raises WorkloadError if the measurement does not say when requests came, or how long they were.
    """
    rows = Rows(found.path, range(1, len(found) + 1), "request")
    _need_rows(found)
    served = np.flatnonzero(found.served)
    for column, what in ((found.prompt_tokens, "prompt"), (found.output_tokens, "output")):
        if (column[served] < 0).any():
            row = int(served[(column[served] < 0).argmax()])
            name, hint = f"{what} tokens", "record with token counts"
            if found.name == "vllm-bench":
                name, hint = "output_lens", "measure again with vllm bench serve --save-detailed"
            rows.fail(row, name, "is missing", hint)
    if np.isnan(found.arrival_s[served]).any():
        row = int(served[np.isnan(found.arrival_s[served]).argmax()])
        rows.fail(row, "arrival", "is missing", "; ".join((SENT, *found.notices)))
    notices = list(found.notices)
    group, stage, delay, names = _sessions(found, notices)
    sent = found.arrival_s if found.due_s is None else found.due_s
    arrival = np.where(stage > 0, np.nan, sent)
    if (clients := clients_of(found)) is not None:
        notices.append(
            f"{IN_A_LOOP}, as from {clients} clients in a loop. Their recorded times are "
            "replayed, so a slower server has more requests at once: simulate similar speeds, "
            "or state max_concurrency in a file of vllm bench serve"
        )
    notices.append("the file has no prompt texts: prompts share no blocks")
    return assemble(
        rows.kept(served),
        name=found.name,
        arrival_s=arrival[served] - np.nanmin(arrival[served]),
        prompt_tokens=found.prompt_tokens[served],
        output_tokens=found.output_tokens[served],
        ids=[found.ids[i] for i in served] if len(found.ids) else None,
        group=group[served] if names else None,
        concurrency=found.concurrency,
        notices=notices,
        **_columns(found, served, stage, delay, names),
    )


def clients_of(found: Measurement) -> int | None:
    """Return how many clients in a closed loop sent the requests, or None. A loop is assumed if the
    file states no limit. Nearly every request after the first ones must come right after the end of
    another one, with as many under way as ever."""
    known = found.served & ~np.isnan(found.arrival_s) & ~np.isnan(found.e2el_s)
    if found.concurrency is not None or not known.any():
        return None
    took = found.e2el_s[known]
    begin, end = np.sort(found.arrival_s[known]), np.sort(found.arrival_s[known] + took)
    ended = np.searchsorted(end, begin, "right")
    under_way = np.arange(1, len(begin) + 1) - ended
    most = int(under_way.max())
    later = slice(most, None)
    if len(begin) - most < max(LEAST_TURNS, most) or not ended[later].all():
        return None
    full = np.mean(under_way[later] >= (1 - LOOP_SLACK) * most)
    waited = np.median(begin[later] - end[ended[later] - 1])
    return most if full >= 1 - LOOP_SLACK and waited <= LOOP_SLACK * took.mean() else None


def _columns(found: Measurement, served, stage, delay, names) -> dict:
    columns: dict = {}
    if names:
        columns |= {"stage": stage[served], "delay_s": delay[served], "group_names": names}
    if len(found.service_class):
        best_effort = np.array([name == "be" for name in found.service_class])
        columns["service_class"] = best_effort[served].astype(np.int8)
    if found.priority is not None:
        columns["priority"] = found.priority[served]
    return columns


def _need_rows(found: Measurement) -> None:
    if len(found):
        return
    hint = "give the file with one entry a request"
    if found.name == "vllm-bench":
        hint = "run vllm bench serve with --save-detailed"
    raise WorkloadError(f"{found.path}: has no single requests: {hint}")


def _sessions(found: Measurement, notices: list[str]):
    """Group, stage and delay of each request, and the groups' names: sessions of which every turn
    was served and timed. Requests of other sessions keep the times at which they were sent."""
    n = len(found)
    group, stage, delay = np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n)
    members: dict[str, list[int]] = {}
    for row, name in enumerate(found.session):
        if name is not None:
            members.setdefault(name, []).append(row)
    names: list[str] = []
    broken = 0
    served = found.served
    for name, rows in members.items():
        if len(rows) < 2:
            continue
        if found.turn is not None:
            rows = sorted(rows, key=lambda row: (found.turn[row], found.arrival_s[row]))
        ends = found.arrival_s[rows] + found.e2el_s[rows]
        if not served[rows].all() or np.isnan(ends).any() or np.isnan(found.arrival_s[rows]).any():
            broken += 1
            continue
        group[rows], stage[rows] = len(names), np.arange(len(rows))
        delay[rows[1:]] = np.maximum(found.arrival_s[rows[1:]] - ends[:-1], 0)
        names.append(name)
    if broken:
        notices.append(
            f"{broken} sessions with failed or untimed turns: their turns keep their send times"
        )
    return group, stage, delay, names
