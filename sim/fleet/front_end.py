"""The delays between clients and a fleet: the API server's thread, and the client's own.

Nearly all work of vLLM's API server between HTTP and its engine runs on one thread, in order of
arrival. The thread accepts requests, forwards tokenised ones, and handles step outputs
(vllm/v1/engine/async_llm.py, `output_handler`). So requests wait for outputs and outputs for
requests. A client in one process has one such thread too.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from simpy.events import Event

from twinserve.profiles.front_end import Delays, Service
from twinserve.sim.engine.clock import BEFORE_STEPS, Clock
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.request import Request

# Turns of the event loop that hardly take time, between a request's first work and its tokenising,
# and between that and its last work: entries into its tasks, counted in vLLM 0.32 with a streamed
# completion, less those of tasks that go on at the same time.
SHORT_TURNS = 5


class Between:
    """Delays of clients' requests to `fleet`, and of tokens to them; queues if the delays have
    service times."""

    def __init__(self, delays: Delays, clock: Clock, fleet: Fleet) -> None:
        self.delays, self.clock, self.fleet = delays, clock, fleet
        service = delays.service
        self._service = service
        self._servers: list[list[ServerThread]] = []  # by replica
        self._sent = 0
        one_process = service is not None and service.client == "one-process"
        self._client = Thread() if one_process else None

    @property
    def instant(self) -> bool:
        """Return whether clients see an end at the moment when it happens."""
        return self._service is None and not self.delays.response_s

    def sends(self, request: Request):
        """Return a process that ends when the request, sent now, is in the fleet's queue. None if
        it is there already."""
        if self._service is not None:
            return self._through(request, self._service)
        due = self.clock.now + self.delays.request_side(request.prompt_tokens)
        return self._until(due) if due > self.clock.now else None

    def brings(self, request: Request):
        """Return a process that ends when the client of `request`, which ended now, has seen the
        end."""
        if self._service is None:
            return self._until(self.clock.now + self.delays.response_s)
        return self._back(request)

    def seen_s(self, end_s: np.ndarray, replica: np.ndarray, number: np.ndarray) -> np.ndarray:
        """float64[n]: when clients saw tokens of steps that ended at `end_s` (seconds; NaN stays),
        by replica and by the request's number. When the run is over."""
        if self._service is None:
            return end_s + self.delays.response_s
        self._advance(math.inf)
        found = end_s.copy()
        for index, threads in enumerate(self._servers):
            for which, thread in enumerate(threads):
                chosen = (replica == index) & (number % len(threads) == which) & ~np.isnan(end_s)
                if chosen.any():
                    found[chosen] = thread.at_clients(end_s[chosen])
        return found + self.delays.response_s

    def _until(self, due: float):
        yield self.clock.at(due, BEFORE_STEPS)

    def _through(self, request: Request, service: Service):
        clock, tokens = self.clock, request.prompt_tokens
        self._advance(clock.now)
        reaches_s = clock.now + service.client_request_s
        if self._client is not None:
            reaches_s = self._client.serve(clock.now, service.client_request_s)
        yield clock.at(reaches_s, BEFORE_STEPS)
        which, self._sent = self._sent, self._sent + 1
        replica, which = which % len(self._servers), which // len(self._servers)
        thread = self._servers[replica][which % service.servers]
        yield self._asks(thread, 0, service.accept_s, SHORT_TURNS)
        work_s = service.chat_s + service.tokenise_s * tokens
        tokenised_s = thread.tokeniser.serve(clock.now, work_s) + service.batch_wait_s
        yield clock.at(tokenised_s, BEFORE_STEPS)
        submit_s = service.submit_s + service.prompt_token_s * tokens
        yield self._asks(thread, SHORT_TURNS, submit_s, 0)
        yield clock.at(clock.now + self.delays.request_side(tokens), BEFORE_STEPS)

    def _asks(self, thread: ServerThread, before: int, work_s: float, after: int) -> Event:
        """What happens when the thread has done this work for a request, with so many short turns
        of the event loop before it and after it."""
        done = Event(self.clock)
        thread.asked.append((before, work_s, after, done))
        if not thread.turning:
            thread.turning = True
            self.clock.process(self._turns(thread))
        return done

    def _turns(self, thread: ServerThread):
        """Turns of the event loop, while requests are there. Each request has its turn, so it waits
        for all that come meanwhile. Before each piece of work outputs that have come are handled:
        requests come back from the tokeniser one by one."""
        while thread.asked:
            yield from self._outputs_first(thread)
            jobs, thread.asked = thread.asked, []
            for before, work_s, after, done in jobs:
                if before:
                    thread.asked.append((before - 1, work_s, after, done))
                    continue
                if work_s:
                    yield from self._outputs_first(thread)
                    yield self.clock.at(thread.serve(self.clock.now, work_s), BEFORE_STEPS)
                if after:
                    thread.asked.append((0, 0.0, after - 1, done))
                    continue
                done._ok, done._value = True, None
                self.clock.schedule(done, BEFORE_STEPS)
        thread.turning = False

    def _outputs_first(self, thread: ServerThread):
        """Until the thread has handled outputs; those that come meanwhile are taken."""
        self._take_outputs(thread.replica, self.clock.now)
        if thread.free_s > self.clock.now:
            yield self.clock.at(thread.free_s, BEFORE_STEPS)
            self._take_outputs(thread.replica, self.clock.now)

    def _back(self, request: Request):
        clock, end_s = self.clock, self.clock.now
        if request.placements:
            index = request.placements[-1].replica.index
            self._advance(end_s)
            threads = self._servers[index]
            thread = threads[request.number % len(threads)]
            # more outputs may come before these are written, and are written with them
            while (written_s := thread.written(end_s)) > clock.now:
                yield clock.at(written_s, BEFORE_STEPS)
                self._take_outputs(index, clock.now)
            self._advance(clock.now)
            yield clock.at(max(thread.at_client(end_s), clock.now), BEFORE_STEPS)
        yield clock.at(clock.now + self.delays.response_s, BEFORE_STEPS)

    def _take_outputs(self, index: int, until_s: float) -> None:
        """Outputs of the replica's steps that ended by then are in the queues of its threads."""
        threads = self._servers[index]
        engine = self.fleet.replicas[index].engine
        ends_s, tokens, prompts = engine.ended(threads[0].last_s, until_s)
        if len(ends_s):
            for thread in threads:
                thread.outputs(ends_s, tokens / len(threads), prompts / len(threads))

    def _advance(self, until_s: float) -> None:
        """Outputs of steps that ended by then are in the queues of servers, and what these had
        handled by then in the client's."""
        if (service := self._service) is None:
            return
        for index in range(len(self.fleet.replicas)):
            if index == len(self._servers):
                threads = [ServerThread(service, index) for _ in range(service.servers)]
                self._servers.append(threads)
                if service.detokenise_s:
                    self.fleet.replicas[index].engine.recorder.first_prompts = {}
            self._take_outputs(index, until_s)
        every = [thread for threads in self._servers for thread in threads]
        new = [thread.handled(until_s) for thread in every]
        if self._client is None:
            for thread, (seen_s, _) in zip(every, new, strict=True):
                thread.client_s.extend((seen_s + service.client_chunk_s).tolist())
            return
        seen_s = np.concatenate([seen for seen, _ in new])
        if not len(seen_s):
            return
        work_s = service.client_chunk_s * np.concatenate([chunks for _, chunks in new])
        order = np.argsort(seen_s, kind="stable")
        at_client = np.empty(len(seen_s))
        at_client[order] = self._client.serve_all(seen_s[order], work_s[order])
        at_client -= 0.5 * work_s
        first = 0
        for thread, (seen, _) in zip(every, new, strict=True):
            thread.client_s.extend(at_client[first : first + len(seen)].tolist())
            first += len(seen)


class Thread:
    """A thread that does its jobs one after another, in the order in which they are ready."""

    def __init__(self) -> None:
        self.free_s = 0.0  # when all jobs given so far are done

    def serve(self, ready_s: float, work_s: float) -> float:
        """Return when a job is done that is ready at the given time, which is not before earlier
        jobs (seconds)."""
        self.free_s = max(self.free_s, ready_s) + work_s
        return self.free_s

    def serve_all(self, ready_s: np.ndarray, work_s: np.ndarray) -> np.ndarray:
        """Return float64[n]: when each of `n` jobs is done. Jobs are given in the order in which
        they are ready."""
        done_s = work_s.cumsum()
        waits_s = np.maximum.accumulate(ready_s - (done_s - work_s))
        done_s += np.maximum(waits_s, self.free_s)
        self.free_s = float(done_s[-1])
        return done_s


class ServerThread(Thread):
    """The event loop of an API server. It also handles the outputs of its engine's steps."""

    def __init__(self, service: Service, replica: int) -> None:
        super().__init__()
        self.replica, self.tokeniser = replica, Thread()
        # for requests: short turns, seconds of work, short turns, what happens after them
        self.asked: list[tuple[int, float, int, Event]] = []
        self.turning = False  # some are asked for
        self._step_s, self._prompt_s = service.step_s, service.detokenise_s
        self._token_s, self._chunk_s = service.token_s, service.chunk_s
        self._interval = service.stream_interval
        self.last_s = -1.0  # end of the last step given
        self._begun_s, self._first = -1.0, 0  # newest outputs that are written together
        # by step, seconds: when it ended; when its tokens were written; when its clients saw them
        self.ends_s: list[float] = []
        self.seen_s: list[float] = []
        self.client_s: list[float] = []
        self._chunks: list[float] = []

    def outputs(self, ends_s: np.ndarray, tokens: np.ndarray, prompts: np.ndarray) -> None:
        """Steps ended at these times (float64[n]), each with so many tokens of requests, and first
        ones of prompts of so many tokens (float64[n])."""
        chunks = tokens / self._interval
        fixed_s, stream_s = self._step_s + self._token_s * tokens, self._chunk_s * chunks
        fixed_s += self._prompt_s * prompts
        before, free_s = len(self.ends_s), self.free_s
        self.last_s = float(ends_s[-1])
        self.ends_s += ends_s.tolist()
        done_s = self.serve_all(ends_s, fixed_s + stream_s)
        begun_s = done_s - fixed_s - stream_s
        if self._begun_s > ends_s[0] or (begun_s[:-1] > ends_s[1:]).any():
            self.free_s = free_s
            self._outputs_merged(ends_s, fixed_s, stream_s, chunks)
            return
        self._begun_s, self._first = float(begun_s[-1]), before + len(ends_s) - 1
        self.seen_s += (done_s - 0.5 * stream_s).tolist()
        self._chunks += chunks.tolist()

    def _outputs_merged(self, ends_s, fixed_s, stream_s, chunks) -> None:
        """The same where outputs come before those of the last step are begun: both are written
        together, one message a request (`RequestOutputCollector.put`)."""
        columns = (ends_s.tolist(), fixed_s.tolist(), stream_s.tolist(), chunks.tolist())
        for end_s, fixed, stream, count in zip(*columns, strict=True):
            if self._begun_s > end_s:
                self.free_s += fixed
                written_s = self.seen_s[-1] + fixed
                self.seen_s += [written_s]
                for at in range(self._first, len(self.seen_s)):
                    self.seen_s[at] = written_s
                self._chunks.append(0.0)
                continue
            self._begun_s, self._first = max(self.free_s, end_s), len(self.seen_s)
            self.free_s = self._begun_s + fixed + stream
            self.seen_s.append(self.free_s - 0.5 * stream)
            self._chunks.append(count)

    def handled(self, until_s: float) -> tuple[np.ndarray, np.ndarray]:
        """Return when outputs were written by `until_s` that the client has not seen yet, and their
        chunks."""
        first, last = len(self.client_s), len(self.seen_s)
        while last > first and self.seen_s[last - 1] > until_s:
            last -= 1
        return np.array(self.seen_s[first:last]), np.array(self._chunks[first:last])

    def written(self, end_s: float) -> float:
        """Return when the outputs of the step that ended at `end_s` are written. Without such a
        step, return when the thread is free."""
        at = bisect_left(self.ends_s, end_s)
        return self.seen_s[at] if at < len(self.seen_s) else self.free_s

    def at_client(self, end_s: float) -> float:
        """Return when the client has seen the written outputs of a step."""
        at = min(bisect_left(self.ends_s, end_s), len(self.client_s) - 1)
        return self.client_s[at] if at >= 0 else end_s

    def at_clients(self, end_s: np.ndarray) -> np.ndarray:
        """Return float64[n]: `at_client` for steps that ended at `end_s` (float64[n])."""
        at = np.searchsorted(self.ends_s, end_s).clip(0, len(self.client_s) - 1)
        return np.maximum(np.array(self.client_s)[at], end_s)
