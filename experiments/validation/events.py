"""Real step times read off the events of a measured run.

A run records when each request was queued, first scheduled, and got its first and last token. The
engine stamps all tokens of a step with one time, and looks at new requests once a step, right after
those tokens. So every recorded time is the end of some step, and what the requests did tells how
many steps lie between two of them:

    first -> last token      output tokens - 1, for a request that was never preempted
    scheduled -> first token 2 under asynchronous scheduling (one step runs already), and 1 more for
    each further chunk two times less apart than twice the time to read the weights: 1

Times that are linked so, directly or over others, form a component with one count. Between two
neighbouring times of a component nothing starts or ends, so the batch is known, and the time
divided by the steps is comparable to a model's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd

from twinserve.experiments.validation.runs import BLOCK_TOKENS, MeasuredRun
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.profile import Profile

# tokens are handed on and new requests looked at within this; steps are ten times as long
SAME_STEP_S = 0.002
SAMPLE_S = 0.25  # the time series is that much off the events: it counts once a step
SCARCE_PCT = 95.0
AHEAD = 2  # asynchronous: what is planned when step j has ended is step j + 2


class Offsets:
    """Union-find over nodes with differences: `link` says that v is so many steps after u."""

    def __init__(self, n: int) -> None:
        self._parent, self._offset = list(range(n)), [0] * n

    def find(self, node: int) -> tuple[int, int]:
        """(component, steps of the node in its count)."""
        parent = self._parent[node]
        if parent == node:
            return node, 0
        root, above = self.find(parent)
        self._parent[node], self._offset[node] = root, self._offset[node] + above
        return root, self._offset[node]

    def link(self, u: int, v: int, steps: int) -> bool | None:
        """None: news; else whether it agrees with what is known already, which stays."""
        (a, at_u), (b, at_v) = self.find(u), self.find(v)
        if a == b:
            return at_v - at_u == steps
        self._parent[b], self._offset[b] = a, at_u + steps - at_v
        return None


@dataclass(frozen=True)
class Events:
    """What the events of a run say of its steps.

    ends      float64[e], seconds: the known ends of steps
    component, step   int64[e]: its count, and the number in it
    scheduled, first, last   int64[r]: index into `ends`, per request
    chunks    int64[r]: steps of the prompt; 0: not known
    prompt, computed  int64[r]: tokens, and those that no earlier request left in the prefix cache
    calm      bool[e]: not between the first and the last sample at which a preemption is possible
    links     Counter: news, agrees, contradicts
    """

    ends: np.ndarray
    component: np.ndarray
    step: np.ndarray
    scheduled: np.ndarray
    first: np.ndarray
    last: np.ndarray
    chunks: np.ndarray
    prompt: np.ndarray
    computed: np.ndarray
    calm: np.ndarray
    links: Counter


def step_ends(requests: pd.DataFrame) -> np.ndarray:
    """float64[e], seconds: all ends of steps that the events show. Those known only from what was
    planned right after are moved back by what this takes elsewhere."""
    tokens = np.unique(np.r_[requests.first_token_s, requests.last_token_s])
    marks = np.unique(np.r_[requests.queued_s, requests.scheduled_s])
    marks = marks[(marks > tokens[0]) & (marks < tokens[-1])]
    after = marks - tokens[np.searchsorted(tokens, marks, side="right") - 1]
    later = float(np.median(after[after < SAME_STEP_S])) if (after < SAME_STEP_S).any() else 0.0
    own = marks[after >= SAME_STEP_S]
    own = own[np.diff(own, prepend=-np.inf) > SAME_STEP_S]
    return np.sort(np.r_[tokens, own - later])


def shortage(run: MeasuredRun) -> np.ndarray:
    """Seconds of the time series at which requests may have been preempted: more had begun than
    ran, or blocks were scarce."""
    r, t = run.requests, run.series.t.to_numpy(float)
    alive = np.array(
        [((r.first_token_s < x - SAMPLE_S) & (r.last_token_s > x + SAMPLE_S)).sum() for x in t]
    )
    return t[
        (alive > run.series.running.to_numpy()) | (run.series.kv_cache_pct.to_numpy() > SCARCE_PCT)
    ]


def read_events(run: MeasuredRun, profile: Profile) -> Events:
    r = run.requests
    ends = step_ends(r)
    scheduled, first, last = (
        np.searchsorted(ends, r[name].to_numpy() + 1e-7, side="right") - 1
        for name in ("scheduled_s", "first_token_s", "last_token_s")
    )
    prompt = r.input_toks.to_numpy()
    computed = prompt - BLOCK_TOKENS * np.minimum(
        r.prefix_blocks_seen_before.to_numpy(), (prompt - 1) // BLOCK_TOKENS
    )
    short = shortage(run)
    from_s, to_s = (short.min() - 1.0, short.max() + 1.0) if len(short) else (np.inf, -np.inf)
    calm = (ends < from_s) | (ends > to_s)
    settled = ((r.last_token_s < from_s) | (r.scheduled_s > to_s)).to_numpy()
    chunks = _chunks(
        ends, scheduled, first, last, computed, run.arguments["max_num_batched_tokens"]
    )
    counts, links = Offsets(len(ends)), Counter()
    floor = profile.llm.weight_bytes / profile.tp / profile.gpu.memory_bytes_per_s
    found = [(i, i + 1, 1) for i in np.flatnonzero(np.diff(ends) < 2 * floor)]
    found += [
        (scheduled[i], first[i], AHEAD - 1 + chunks[i])
        for i in np.flatnonzero((chunks > 0) & calm[scheduled] & calm[first])
    ]
    steps = r.output_toks.to_numpy() - 1
    found += [(first[i], last[i], steps[i]) for i in np.flatnonzero(settled)]
    for link in found:
        links[{None: "news", True: "agrees", False: "contradicts"}[counts.link(*link)]] += 1
    component, step = np.array([counts.find(i) for i in range(len(ends))]).T
    return Events(
        ends, component, step, scheduled, first, last, chunks, prompt, computed, calm, links
    )


def _chunks(ends, scheduled, first, last, computed, budget: int) -> np.ndarray:
    """int64[r]: into how many chunks the engine cut each prompt; 0 if the events leave it open.

    New requests join in the order of arrival while the step has room. So only the last of those
    scheduled together is cut, and its rest goes before those of the next step. Each way to explain
    a group is held against the times of the first tokens (equal in the same step) and the room.
    """
    found = np.zeros(len(first), np.int64)
    # what the prompt cut last may have left for its last chunk; the end of the step that has it
    rests: set[int] = {0}
    rest_end = -1
    order = np.lexsort((np.arange(len(first)), scheduled))
    for group in np.split(order, np.flatnonzero(np.diff(scheduled[order])) + 1):
        at = scheduled[group[0]]
        if at < 1:  # nothing ran yet
            continue
        decodes = int(((first <= at + 1) & (last > at + 1)).sum())
        whole, tail = computed[group[:-1]].sum(), int(computed[group[-1]])
        ends_together = len(set(first[group[:-1]])) <= 1
        ways = set()
        for rest in (rests | {0}) if rest_end > at else {0}:
            room = budget - decodes - rest - whole
            for cut in (False, True):
                fits = tail <= room + 4 if not cut else 0 < room - 4 < tail
                mine = set(first[group if not cut else group[:-1]])
                if rest:
                    mine.add(rest_end)
                later = first[group[-1]] > max(mine) if cut and mine else True
                apart = rest or rest_end <= at or first[group[0]] != rest_end
                if fits and ends_together and len(mine) <= 1 and later and apart:
                    left = tail - room if cut else 0
                    full = budget - decodes
                    ways.add(
                        (1 + -(-left // full), left - (-(-left // full) - 1) * full if left else 0)
                    )
        found[group[:-1]] = 1 if ends_together else 0
        if len({n for n, _ in ways}) == 1:
            found[group[-1]] = next(iter(ways))[0]
        rests = {left for _, left in ways} or {0, tail}
        rest_end = int(first[group[-1]]) if any(rests) else -1
    return found


@dataclass(frozen=True)
class Interval:
    """Between two neighbouring ends of steps with one count. real_s: seconds; works: its steps, in
    order."""

    start_s: float
    real_s: float
    works: list[StepComposition]

    @property
    def prompts(self) -> list[StepComposition]:
        return [work for work in self.works if len(work.prefill_new)]


def intervals(run: MeasuredRun, events: Events) -> list[Interval]:
    """All stretches whose steps and batches the events tell, in order of time."""
    e, r = events, run.requests
    prompt, output = r.input_toks.to_numpy(), r.output_toks.to_numpy()
    of_first, of_last = e.component[e.first], e.component[e.last]
    pace = (r.last_token_s - r.first_token_s).to_numpy() / (output - 1)
    pieces = _pieces(events, run.arguments["max_num_batched_tokens"])
    found = []
    for i in range(len(e.ends) - 1):
        if e.component[i] != e.component[i + 1] or not (e.calm[i] and e.calm[i + 1]):
            continue
        here = e.component[i]
        coming = (e.first > i) & (e.scheduled <= i)
        # a cut prompt that is not in this count, or one cut in an unknown way, may have a chunk in
        # here
        if (coming & ((e.chunks == 0) | ((e.chunks > 1) & (of_first != here)))).any():
            continue
        running = (e.first <= i) & (e.last > i)
        left = np.where(
            of_last == here, e.step[e.last] - e.step[i], (r.last_token_s - e.ends[i]) / pace
        )
        resident = np.round(prompt + output - 2 - left)[running].astype(np.int64)
        n, works = int(running.sum()), []
        for j in range(1, e.step[i + 1] - e.step[i] + 1):
            chunks = pieces.get((here, e.step[i] + j), [])
            new, before = (
                np.array(c, np.int64) for c in (zip(*chunks, strict=True) if chunks else ((), ()))
            )
            held = (int(resident.sum()) + n * j, int(resident.max()) + j) if n else (0, 0)
            works.append(StepComposition(n, *held, new, before))
        found.append(Interval(float(e.ends[i]), float(e.ends[i + 1] - e.ends[i]), works))
    return found


def _pieces(events: Events, budget: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(component, step) -> the chunks in it: tokens now and before. A prompt is cut when the step
    is full."""
    e, found = events, {}
    for i in np.lexsort((np.arange(len(e.first)), e.scheduled)):
        here, end, chunks = e.component[e.first[i]], e.step[e.first[i]], max(int(e.chunks[i]), 1)
        done, total = 0, int(e.computed[i])
        hit = int(e.prompt[i]) - total
        for step in range(end - chunks + 1, end + 1):
            held = found.setdefault((here, step), [])
            full = budget - _decodes(e, here, step) - sum(new for new, _ in held)
            now = total - done if step == end else min(full, total - done - 1)
            held.append((now, hit + done))
            done += now
    return found


def _decodes(e: Events, component: int, step: int) -> int:
    """Requests that decode in the step."""
    listed = np.flatnonzero(e.component == component)
    # the last end before that step's own
    before = listed[np.searchsorted(e.step[listed], step) - 1]
    return int(((e.first <= before) & (e.last > before)).sum())
