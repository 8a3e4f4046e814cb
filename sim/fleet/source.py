"""Submits a workload's requests to the replicas, in time: arrivals, closed-loop stages, the
best-effort pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from simpy.events import Event

from twinserve.policies.requests import Application, End
from twinserve.sim.engine.clock import BEFORE_STEPS, Clock
from twinserve.sim.engine.loop import Engine
from twinserve.sim.results.files import POOL_GROUP, pool_request_id
from twinserve.traces.workload import BEST_EFFORT, BestEffortPool, Workload, WorkloadError


def content_ids(workload: Workload, row: int, block_tokens: int) -> np.ndarray | None:
    """int64[n]: ids of the row's full KV blocks of `block_tokens` tokens, from the trace's prefix
    blocks.

    Trace ids name everything up to their block's end. A KV block inside a trace block is named by
    (trace block, place in it); one that spans several is named by the last of them.
    """
    prefix = workload.prefix
    if prefix is None or not _nest(prefix.block_tokens, block_tokens):
        return None  # a ledger that would use them has refused already (shared_contents)
    blocks = prefix.of(row)
    full = int(workload.prompt_tokens[row]) // block_tokens
    if prefix.block_tokens % block_tokens == 0:
        parts = prefix.block_tokens // block_tokens
        return (blocks[:, None] * parts + np.arange(parts)).ravel()[:full]
    parts = block_tokens // prefix.block_tokens
    return blocks[parts - 1 :: parts][:full]


def _nest(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def shared_contents(workload: Workload, block_tokens: int) -> int:
    """How many content ids `content_ids` can give. Raises WorkloadError where the block sizes do
    not fit together."""
    prefix = workload.prefix
    if prefix is None:
        return 0
    if not _nest(prefix.block_tokens, block_tokens):
        raise WorkloadError(
            f"{workload.provenance.name}: prefix blocks of {prefix.block_tokens} tokens and KV "
            "blocks of "
            f"{block_tokens} tokens do not nest; choose --block-tokens so that one divides the "
            "other"
        )
    return prefix.distinct * max(1, prefix.block_tokens // block_tokens)


class RequestSource:
    """Feeds `engines` from `workload`. Requests of one session stay on one replica (their prefix is
    there); others go to the replica with the fewest unfinished requests, the first of them on a
    tie.

    on_submit(count): progress. `submitted` lists, in order, the workload row of each request (-1:
    from the pool).
    """

    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        engines: Sequence[Engine],
        block_tokens: int,
        on_submit: Callable[[int], None] = lambda count: None,
        client_timeout_s: float | None = None,
    ) -> None:
        self.clock = clock
        self.workload = workload
        self.engines = engines
        self.block_tokens = block_tokens
        self.on_submit = on_submit
        self.client_timeout_s = client_timeout_s
        self.submitted = 0
        self.never_sent = 0  # requests that wait for one that failed
        self._announced: set[int] = set()  # groups; only asked, never walked through
        self.group_names = list(workload.group_names)
        self._group_of: dict[tuple[int, int], int] = {}  # (replica, row) -> group
        # group -> its unfinished requests, as (replica, row), in order of submission
        self._members: dict[int, dict[tuple[int, int], None]] = {}
        self._failed: set[int] = set()  # groups of which a client gave up; only asked
        # when clients give up, with their requests as (replica, row); in order of time
        self._patience: deque[tuple[float, int, int]] = deque()
        self._deadline: Event | None = None  # the next time at which a client may give up
        # group -> stage -> workload rows still to release
        self._stages: dict[int, dict[int, list[int]]] = {}
        # group -> unfinished requests of the stages released so far
        self._open: dict[int, int] = {}
        self._home: dict[int, int] = {}  # group -> replica
        self._pool: _PoolFeed | None = None
        for i, engine in enumerate(engines):
            engine.on_finish = self._finisher(i)
        self._start()

    def _start(self) -> None:
        workload = self.workload
        first = ~np.isnan(workload.arrival_s)
        for group in workload.group[first & (workload.group >= 0)].tolist():
            self._open[group] = self._open.get(group, 0) + 1
        for row in np.flatnonzero(~first).tolist():
            stages = self._stages.setdefault(int(workload.group[row]), {})
            stages.setdefault(int(workload.stage[row]), []).append(row)
        order = np.flatnonzero(first)
        order = order[np.argsort(workload.arrival_s[order], kind="stable")]
        self.clock.process(self._arrivals(order))
        if workload.pool is not None:
            self.group_names.append(POOL_GROUP)
            self._pool = _PoolFeed(self, workload.pool, len(self.group_names) - 1)

    def _finisher(self, replica: int) -> Callable[[int], None]:
        return lambda row: self._finished(replica, row)

    def _arrivals(self, order: np.ndarray):
        times = self.workload.arrival_s
        for row in order.tolist():
            if times[row] > self.clock.now:
                yield self.clock.at(times[row], BEFORE_STEPS)
            self._submit_row(row)

    def _submit_row(self, row: int) -> None:
        workload = self.workload
        if int(workload.group[row]) in self._failed:
            self.never_sent += 1
            return
        self.submit(
            workload.ids[row],
            int(workload.output_tokens[row]),
            group=int(workload.group[row]),
            prefix=content_ids(workload, row, self.block_tokens),
            prompt_tokens=int(workload.prompt_tokens[row]),
            service_class=int(workload.service_class[row]),
            priority=int(workload.priority[row]),
            slo_ttft_s=workload.slo_ttft_s[row],
            slo_tpot_s=workload.slo_tpot_s[row],
            stage=int(workload.stage[row]),
            text=self._told(int(workload.group[row]))[1],
        )

    def submit(self, request_id: str, output_tokens: int, *, group: int = -1, **values) -> None:
        replica = self._route(group)
        if group >= 0 and group not in self._announced:
            self._announced.add(group)
            self.engines[replica].core.announce(self._application(group))
        row = self.engines[replica].submit(
            request_id, output_tokens, arrival_s=self.clock.now, group=group, **values
        )
        if group >= 0:
            self._group_of[replica, row] = group
            self._members.setdefault(group, {})[replica, row] = None
        if self.client_timeout_s is not None:
            self._patience.append((self.clock.now + self.client_timeout_s, replica, row))
            if self._deadline is None:
                self.clock.process(self._give_up())
        self.submitted += 1
        self.on_submit(self.submitted)

    def _application(self, group: int) -> Application:
        return Application(group, self.group_names[group], self.clock.now, *self._told(group))

    def _told(self, group: int) -> tuple[str | None, str | None]:
        """Kind and input text of an application; None where the workload has none."""
        info = self.workload.applications.get(group)
        return (None, None) if info is None else (info.kind, info.text)

    def _route(self, group: int) -> int:
        if len(self.engines) == 1:
            return 0
        # by name: a pool that was exported as a group of stages is spread over the replicas again
        pooled = group >= 0 and self.group_names[group] == POOL_GROUP
        if group in self._home and not pooled:
            return self._home[group]
        replica = min(range(len(self.engines)), key=lambda i: self.engines[i].core.active)
        if group >= 0:
            self._home[group] = replica
        return replica

    def _finished(self, replica: int, row: int) -> None:
        if self._deadline is not None and not any(e.core.active for e in self.engines):
            self.clock.cancel(self._deadline)  # nobody waits: the run need not last until then
            self._deadline = None
            self._patience.clear()
        group = self._group_of.pop((replica, row), -1)
        if group < 0:
            return
        del self._members[group][replica, row]
        if self._pool is not None and group == self._pool.group:
            self._pool.finished()
            return
        self._open[group] -= 1
        stages = self._stages.get(group)
        if self._open[group] == 0 and stages:
            self._release(group, min(stages))

    # -- clients that wait no longer ---------------------------------------------------------------
    def _give_up(self):
        """Withdraws what has not ended in time. All clients wait as long, so they give up in the
        order in which they came."""
        while self._patience:
            due, replica, row = self._patience.popleft()
            if self.engines[replica].core.requests.end[row] != End.NONE:
                continue
            self._deadline = self.clock.at(due, BEFORE_STEPS)
            yield self._deadline
            if self.engines[replica].withdraw(row, End.TIMED_OUT):
                self._fail(self._group_of.get((replica, row), -1))
        self._deadline = None

    def _fail(self, group: int) -> None:
        """A request of the group was given up: a session ends with it, an application fails, and
        what it has under way is withdrawn. The pool goes on."""
        if group < 0 or group in self._failed or (self._pool and group == self._pool.group):
            return
        self._failed.add(group)
        for replica, row in self._members[group]:
            self.engines[replica].withdraw(row, End.FAILED)
        self.never_sent += sum(map(len, self._stages.pop(group, {}).values()))

    def _release(self, group: int, stage: int) -> None:
        """The next stage of a session or application, after its rows' delay (seconds since the
        stage before ended)."""
        rows = self._stages[group].pop(stage)
        self._open[group] = len(rows)
        delays = self.workload.delay_s[rows]
        for i in np.argsort(delays, kind="stable").tolist():
            if delays[i] > 0:
                self.clock.process(self._submit_later(rows[i], self.clock.now + float(delays[i])))
            else:
                self._submit_row(rows[i])

    def _submit_later(self, row: int, due: float):
        yield self.clock.at(due, BEFORE_STEPS)
        self._submit_row(row)


class _PoolFeed:
    """The closed loop of best-effort batches: the next one when all of the last one have ended."""

    def __init__(self, source: RequestSource, pool: BestEffortPool, group: int) -> None:
        self.source = source
        self.pool = pool
        self.group = group
        self.batch = 0
        self.open = 0
        until = pool.until_s
        self.until_s = source.workload.last_arrival_s if until is None else until
        source.clock.process(self._begin())

    def _begin(self):
        yield self.source.clock.at(0.0, BEFORE_STEPS)
        self._submit()

    def finished(self) -> None:
        self.open -= 1
        if self.open == 0 and self.source.clock.now < self.until_s:
            self._submit()

    def _submit(self) -> None:
        prompts, outputs = self.pool.draw(self.batch)
        self.open = self.pool.batch
        for i, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
            self.source.submit(
                pool_request_id(self.batch, i),
                output,
                group=self.group,
                prompt_tokens=prompt,
                service_class=BEST_EFFORT,
                stage=self.batch,
            )
        self.batch += 1
