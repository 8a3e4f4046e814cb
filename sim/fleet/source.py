"""Sends a workload's requests to a fleet over time: arrivals, later stages of closed loops, the
best-effort pool, and clients that give up."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from simpy.events import Event

from twinserve.policies.requests import Application, End
from twinserve.profiles.front_end import NO_DELAYS, Delays
from twinserve.sim.engine.clock import BEFORE_STEPS, Clock
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.front_end import Between
from twinserve.sim.fleet.prefix_index import content_ids
from twinserve.sim.fleet.request import Request
from twinserve.sim.results.files import POOL_GROUP, pool_request_id
from twinserve.traces.workload import BEST_EFFORT, BestEffortPool, Workload


class RequestSource:
    """Feeds `fleet` from `workload`.

    on_submit(count): progress; `submitted` counts requests, also of the pool. client_timeout_s:
    seconds that clients wait for the end of their request. pool_objectives: TTFT and TPOT in
    seconds of each request of the pool; NaN: none. front_end: between clients and fleet. Clients
    use their own clock: they wait from sending a request, and send the next one when they have seen
    its end.
    """

    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        fleet: Fleet,
        on_submit: Callable[[int], None] = lambda count: None,
        client_timeout_s: float | None = None,
        pool_objectives: tuple[float, float] = (math.nan, math.nan),
        front_end: Delays = NO_DELAYS,
    ) -> None:
        self.clock = clock
        self.workload = workload
        self.fleet = fleet
        self.on_submit = on_submit
        self.client_timeout_s = client_timeout_s
        self.pool_objectives = pool_objectives
        self.between = Between(front_end, clock, fleet)
        self._under_way = 0  # requests and ends in the front end
        self.submitted = 0
        self._unsent = len(workload)  # rows that have not been sent, nor are never to be
        self.group_names = list(workload.group_names)
        self._first_s: dict[int, float] = {}  # group -> when its first request came
        # group -> its unfinished requests by number, in order of submission
        self._members: dict[int, dict[int, Request]] = {}
        self._failed: set[int] = set()  # groups of which a request did not complete; only asked
        # when clients give up, in order of time
        self._patience: deque[tuple[float, Request]] = deque()
        self._deadline: Event | None = None  # the next time at which a client may give up
        # group -> stage -> workload rows still to release
        self._stages: dict[int, dict[int, list[int]]] = {}
        # group -> unfinished requests of the stages released so far
        self._open: dict[int, int] = {}
        # of a closed loop: requests of the list under way, and rows that wait for one to end
        self._busy = 0
        self._waiting: deque[int] = deque()
        self._filling = False
        self._pool: _PoolFeed | None = None
        self.pool_group = -2  # group of the pool's requests; -2: no request has it
        # what ended does not change any more, and clients sent it when it arrived
        fleet.settles = front_end is NO_DELAYS and not fleet.has_roles
        fleet.on_ended = self._ended
        fleet.on_leaving = lambda request: self._fail(request.group)
        fleet.application = self._application
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
            self.pool_group = len(self.group_names) - 1
            self._pool = _PoolFeed(self, workload.pool, self.pool_group)

    def _arrivals(self, order: np.ndarray):
        times = self.workload.arrival_s
        for row in order.tolist():
            if times[row] > self.clock.now:
                yield self.clock.at(times[row], BEFORE_STEPS)
            self._submit_row(row)

    def _submit_row(self, row: int) -> None:
        limit = self.workload.concurrency
        if limit is None:
            self._send_row(row)
        elif self._busy < limit and not self._waiting:
            self._send_in_loop(row)
        else:
            self._waiting.append(row)

    def _send_in_loop(self, row: int) -> None:
        if int(self.workload.group[row]) not in self._failed:  # else it is never sent
            self._busy += 1
        self._send_row(row)

    @property
    def over(self) -> bool:
        """Return whether no further request will be sent."""
        looping = self._pool is not None and not self._pool.over
        return not (self._unsent or self._under_way or looping)

    def _send_row(self, row: int) -> None:
        self._unsent -= 1
        if int(self.workload.group[row]) in self._failed:
            self.fleet.never_sent(self._request(row, math.nan))
        else:
            self.send(self._request(row, self.clock.now))

    def _request(self, row: int, arrival_s: float) -> Request:
        workload, group = self.workload, int(self.workload.group[row])
        return Request(
            workload.ids[row],
            int(workload.output_tokens[row]),
            arrival_s,
            {
                "prompt_tokens": int(workload.prompt_tokens[row]),
                "service_class": int(workload.service_class[row]),
                "priority": int(workload.priority[row]),
                "slo_ttft_s": workload.slo_ttft_s[row],
                "slo_tpot_s": workload.slo_tpot_s[row],
                "stage": int(workload.stage[row]),
                "text": self._told(group)[1],
            },
            partial(content_ids, workload, row),
            group,
            # by name: a pool that was exported as a group of stages is spread over replicas again
            -1 if group < 0 or self.group_names[group] == POOL_GROUP else group,
        )

    def send(self, request: Request) -> None:
        """A client sends the request now."""
        request.sent_s = self.clock.now
        on_the_way = self.between.sends(request)
        if on_the_way is None:
            self._submit(request)
        else:
            self._under_way += 1
            self.clock.process(self._arrive_later(request, on_the_way))
        if self.client_timeout_s is not None:
            self._patience.append((self.clock.now + self.client_timeout_s, request))
            if self._deadline is None and len(self._patience) == 1:  # one watch, of all of them
                self.clock.process(self._give_up())

    def _arrive_later(self, request: Request, on_the_way: Iterator[Event]):
        yield from on_the_way
        self._under_way -= 1
        request.arrival_s = self.clock.now
        self._submit(request)
        # its client left, or its application failed, while it was in the front end
        if request.group in self._failed:
            self.fleet.withdraw(request, End.FAILED)
        elif self.clock.now >= self._waits_until(request):
            self.fleet.withdraw(request, End.TIMED_OUT)

    def _submit(self, request: Request) -> None:
        if request.group >= 0:
            self._first_s.setdefault(request.group, self.clock.now)
        self.fleet.submit(request)
        if request.group >= 0 and request.end is End.NONE:
            self._members.setdefault(request.group, {})[request.number] = request
        self.submitted += 1
        self.on_submit(self.submitted)

    def _application(self, group: int) -> Application:
        return Application(group, self.group_names[group], self._first_s[group], *self._told(group))

    def _told(self, group: int) -> tuple[str | None, str | None]:
        """Return kind and input text of an application; None if the workload has none."""
        info = self.workload.applications.get(group)
        return (None, None) if info is None else (info.kind, info.text)

    def _ended(self, requests: list[Request]) -> None:
        """Clients see it when the front end has brought it to them; what they ended themselves they
        know."""
        if self.between.instant or self.fleet.over:  # then no event would follow
            self._seen(requests)
            return
        theirs = [request for request in requests if request.end is End.TIMED_OUT]
        others = [request for request in requests if request.end is not End.TIMED_OUT]
        if theirs:
            self._seen(theirs)
        if others:
            self._under_way += len(others)
            self.clock.process(self._see_later(others))

    def _see_later(self, requests: list[Request]):
        yield from self.between.brings(requests[0])
        due = self.clock.now
        self._under_way -= len(requests)
        for request in requests:
            until_s = self._waits_until(request)
            if request.end is End.COMPLETED and due >= until_s:
                # the last token was on its way to a client that had left
                request.end, request.ended_s = End.TIMED_OUT, until_s
        self._seen(requests)

    def _seen(self, requests: list[Request]) -> None:
        for request in requests:
            self._stop_watch()
            group = request.group
            if self.workload.concurrency is not None and group != self.pool_group:
                self._busy -= 1
            if group < 0:
                continue
            self._members.get(group, {}).pop(request.number, None)
            if self._pool is not None and group == self._pool.group:
                self._pool.ended(request)
                continue
            if request.end is not End.COMPLETED:
                self._fail(group)
            self._open[group] -= 1
            stages = self._stages.get(group)
            if self._open[group] == 0 and stages:
                self._release(group, min(stages))
            elif self._over(group):
                self.fleet.close(group)
        if self._waiting:
            self._fill()

    def _fill(self) -> None:
        """Those of a closed loop that waited are sent. What no replica takes ends at once, and must
        not fill again from within."""
        limit = self.workload.concurrency
        if self._filling or limit is None:
            return
        self._filling = True
        while self._waiting and self._busy < limit:
            self._send_in_loop(self._waiting.popleft())
        self._filling = False

    # -- what does not complete --------------------------------------------------------------------
    def _give_up(self):
        """Withdraws what has not ended in time. All clients wait as long, so they give up in the
        order in which they came."""
        while self._patience:
            due, request = self._patience.popleft()
            if request.leaving:
                continue
            self._deadline = self.clock.at(due, BEFORE_STEPS)
            yield self._deadline
            if request.number >= 0:  # else it leaves when it arrives
                self.fleet.withdraw(request, End.TIMED_OUT)
        self._deadline = None

    def _waits_until(self, request: Request) -> float:
        """When its client gives up; inf: never."""
        waits_s = self.client_timeout_s
        return math.inf if waits_s is None else request.sent_s + waits_s

    def _stop_watch(self) -> None:
        """If no request waits: the run need not last until the next deadline."""
        watch = self._deadline
        idle = not self.fleet.active and not self._under_way
        if watch is not None and not watch.processed and idle:
            self.clock.cancel(watch)
            self._deadline = None
            self._patience.clear()

    def _fail(self, group: int) -> None:
        """A request of the group does not complete: a session ends with it, an application fails,
        and what it has under way is withdrawn. The pool goes on."""
        if group < 0 or group in self._failed or (self._pool and group == self._pool.group):
            return
        self._failed.add(group)
        for request in list(self._members.get(group, {}).values()):
            self.fleet.withdraw(request, End.FAILED)
        for rows in self._stages.pop(group, {}).values():
            self._unsent -= len(rows)
            for row in rows:
                self.fleet.never_sent(self._request(row, math.nan))

    def _over(self, group: int) -> bool:
        """Whether the fleet will get no request of the group any more."""
        if group in self._failed:  # some of it may be on their way to the fleet
            return not (self._members.get(group) or self._under_way)
        return self._open[group] == 0

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
        self.open, self.taken = 0, False
        until = pool.until_s
        self.until_s = source.workload.last_arrival_s if until is None else until
        source.clock.process(self._begin())

    def _begin(self):
        yield self.source.clock.at(0.0, BEFORE_STEPS)
        self._submit()

    @property
    def over(self) -> bool:
        return self.batch > 0 and self.open == 0

    def ended(self, request: Request) -> None:
        """One of the batch, however it did. Where no replica got any of a batch, or none is left,
        the loop ends: the next batch would fare no better, at the same instant."""
        self.open -= 1
        self.taken |= bool(request.placements)
        on = self.taken and not self.source.fleet.over and self.source.clock.now < self.until_s
        if self.open == 0 and on:
            self._submit()

    def _submit(self) -> None:
        prompts, outputs = self.pool.draw(self.batch)
        slo_ttft_s, slo_tpot_s = self.source.pool_objectives
        self.open, self.taken = self.pool.batch, False
        for i, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
            self.source.send(
                Request(
                    pool_request_id(self.batch, i),
                    output,
                    self.source.clock.now,
                    {
                        "prompt_tokens": prompt,
                        "service_class": BEST_EFFORT,
                        "slo_ttft_s": slo_ttft_s,
                        "slo_tpot_s": slo_tpot_s,
                        "stage": self.batch,
                    },
                    group=self.group,
                )
            )
        self.batch += 1
