"""What a step of vLLM's scheduler computes, as a step-time model sees it, and the tokens that an
emulated GPU answers with. Imports no vLLM: it reads a SchedulerOutput by its fields."""

from __future__ import annotations

import time
import zlib
from array import array
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twinserve.profiles.composition import STEADY, Churn, StepComposition, StepTimeModel


class Pace(Protocol):
    """launch: a step of so many `seconds` is handed to the GPU; when it will have ended, seconds of
    this pace's own clock. goes_on: the engine had no break since the last step, so that a GPU's
    host would have had none. wait: until then."""

    def launch(self, seconds: float, goes_on: bool) -> float: ...

    def wait(self, end_s: float) -> None: ...


@dataclass
class Lateness:
    """How many steps ended late because of the host, and by how much in all."""

    steps: int = 0
    late: int = 0
    late_s: float = 0.0
    busy_s: float = 0.0

    def line(self) -> str:
        """Return the counts in one line, for a log."""
        share = 100 * self.late / self.steps if self.steps else 0.0
        return (
            f"emulated GPU: {self.steps:,} steps, {self.busy_s:,.1f} s; {share:.1f} % of them "
            f"ended late ({self.late:,}), by {self.late_s:,.2f} s in all, since the host was not "
            "ready"
        )


class WallPace:
    """Wall time. The profile's step includes the host's part. So a step of a busy engine begins
    when the one before it ended, whatever this machine's host took to launch it. If that took
    longer than the whole step, the step ends late, and is counted."""

    TOLERANCE_S = 0.0005  # what a sleep is off by

    def __init__(self) -> None:
        self.lateness = Lateness()
        self._end_s = 0.0

    def launch(self, seconds: float, goes_on: bool) -> float:
        now = time.monotonic()
        start_s = self._end_s if goes_on else max(self._end_s, now)
        counts = self.lateness
        counts.steps += 1
        counts.busy_s += seconds
        behind = now - start_s - seconds
        if behind > self.TOLERANCE_S:
            counts.late += 1
            counts.late_s += behind
            start_s += behind
        self._end_s = start_s + seconds
        return self._end_s

    def wait(self, end_s: float) -> None:
        left = end_s - time.monotonic()
        if left > 0:
            time.sleep(left)


_STRIDE = 7919  # between the made-up tokens of a text: a prime, so that they do not repeat soon


@dataclass(frozen=True)
class TokenRange:
    """Token ids that are made up: `first` and the `count` behind it. named: drawn by the request's
    id, which repeats in process; otherwise by its prompt, since a server's ids are random."""

    first: int
    count: int
    named: bool = False

    @classmethod
    def of_vocab(cls, size: int, named: bool = False) -> TokenRange:
        """Ordinary words: a vocabulary begins with single bytes, and ends with marks."""
        first = min(1000, size // 4)
        return cls(first, max(1, size * 7 // 8 - first), named)


@dataclass(slots=True)
class _Request:
    """prompt: tokens; drawn: where its made-up tokens begin."""

    prompt: int
    drawn: int
    outputs: int = 0
    computed: int = 0


@dataclass(slots=True)
class EmulatedStep:
    """names: request ids in order of the batch; tokens: of each what it emits, one or none;
    computed: of each the tokens before this step; seconds: how long the step takes on the GPU;
    goes_on: requests of earlier steps are in it, so that the engine had no break."""

    names: list[str]
    tokens: list[list[int]]
    computed: list[int]
    work: StepComposition
    seconds: float
    goes_on: bool


class EmulatedSteps:
    """Prices the steps of one engine.

    model         as of the simulator; seconds, host overhead included
    cold_start_s  the first step takes so much longer
    """

    def __init__(self, model: StepTimeModel, tokens: TokenRange, cold_start_s: float = 0.0) -> None:
        self.model = model
        self._range = tokens
        self._cold_s = cold_start_s
        self._requests: dict[str, _Request] = {}
        self._batch: tuple[set[str], bool] = (set(), False)  # of the last step; whether all decoded

    def take(self, scheduled) -> EmulatedStep:
        """Return the step of a SchedulerOutput. Each is taken once, in order."""
        for name in scheduled.finished_req_ids:
            self._requests.pop(name, None)
        joined = self._join(scheduled.scheduled_new_reqs)
        cached = scheduled.scheduled_cached_reqs
        known = self._requests
        counts = zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        )
        for name, computed, outputs in counts:
            request = known[name]
            request.computed, request.outputs = computed, outputs
        joined += len(getattr(cached, "resumed_req_ids", ()))
        names, tokens, starts = [], [], []
        decodes = context = longest = 0
        new, resident = [], []
        first, count = self._range.first, self._range.count
        for name, n in scheduled.num_scheduled_tokens.items():
            request = known[name]
            computed, outputs = request.computed, request.outputs
            emits = computed + n >= request.prompt + outputs
            if emits and n == 1 and outputs:
                decodes += 1
                context += computed
                longest = max(longest, computed)
            else:
                new.append(n)
                resident.append(computed)
            names.append(name)
            starts.append(computed)
            made = [first + (request.drawn + _STRIDE * outputs) % count] if emits else []
            tokens.append(made)
        work = (
            StepComposition(decodes, context, longest, np.array(new), np.array(resident))
            if new
            else StepComposition(decodes, context, longest)
        )
        if self.model.watches_churn:
            work.churn = self._churn(set(names), joined, bool(new))
        seconds = self._seconds(work) if names else 0.0
        return EmulatedStep(names, tokens, starts, work, seconds, bool(cached.req_ids))

    def _join(self, arrived) -> int:
        for data in arrived:
            prompt = data.prompt_token_ids or []
            request = self._requests.get(data.req_id)
            if request is None:
                drawn = data.req_id.encode() if self._range.named else array("q", prompt).tobytes()
                request = self._requests[data.req_id] = _Request(len(prompt), zlib.crc32(drawn))
            # newer runners get a preempted request as a new one, with all that is known of it
            text = getattr(data, "prefill_token_ids", None)
            request.outputs = len(text) - request.prompt if text else 0
            request.computed = data.num_computed_tokens
        return len(arrived)

    def _churn(self, batch: set[str], joined: int, prefills: bool) -> Churn:
        changed = prefills or batch != self._batch[0] or not self._batch[1]
        self._batch = batch, not prefills
        return Churn(joined, changed=changed) if joined or changed else STEADY

    def _seconds(self, work: StepComposition) -> float:
        seconds = self.model.step_seconds(work) + self._cold_s
        self._cold_s = 0.0
        return seconds
