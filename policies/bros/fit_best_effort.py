"""Best-effort requests under `chunk=fit` (docs/bros.md): time for their decodes before real-time
prompts are cut, memory after them, and what is left for their prompts."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from twinserve.native.chosen import batch as kernels
from twinserve.policies.base import Traits
from twinserve.policies.bros.fit_cost import Load, cost_of, fit_estimator
from twinserve.policies.bros.fit_step import NO_ROWS, Feedback, FitStep, Rows
from twinserve.policies.bros.memory import acquire, find, place_plain, take_from
from twinserve.policies.bros.options import BrosOptions
from twinserve.policies.bros.parts import least
from twinserve.policies.bros.policy import BrosPolicy
from twinserve.policies.plan import StepOutcome
from twinserve.policies.requests import RequestClass, RequestTable, State


class BrosFitOptions(BrosOptions):
    """Those of `bros`, and

    fit_order      of real-time prompts. savable: residual time, those that can no longer be kept
                   last; residual: residual time alone, as printed; arrival: arrival
    fit_estimator  what step times are estimated by, where `--estimator` names nothing else. step:
                   beta once a step, chunks by what they attend to; printed: the paper's form
    fit_feedback   weight of the newest iteration with a prompt in a factor, actual over estimated
                   time, that corrects the estimate; 0: none
    fit_margin     share of a bound that is left free
    fit_least      tokens of the shortest chunk, but for the end of a prompt
    fit_share      share of the least TTFT objective that an iteration with a best-effort prompt
                   takes at most
    fit_age_s      seconds after which a best-effort request that got no token goes first, with a
                   shortest chunk an iteration
    """

    chunk: Literal["fit"] = "fit"  # type: ignore[assignment]
    adaptive_batch: bool = False
    fit_order: Literal["savable", "residual", "arrival"] = "savable"
    fit_estimator: Literal["step", "printed"] = "step"
    fit_feedback: float = Field(0.1, ge=0, le=1)
    fit_margin: float = Field(0.02, ge=0, lt=1)
    fit_least: int = Field(64, ge=1)
    fit_share: float = Field(0.25, gt=0, le=1)
    fit_age_s: float = Field(30.0, gt=0)

    @model_validator(mode="after")
    def _batch_of_some_use(self) -> BrosFitOptions:
        if "base_batch" in self.model_fields_set and not self.adaptive_batch:
            raise ValueError("base_batch needs adaptive_batch=true with chunk=fit; add it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_replacement(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"replacement": False, **given}

    @field_validator("order")
    @classmethod
    def _is_fit_order(cls, value: str) -> str:
        if value != "residual":
            raise ValueError("chunk=fit uses fit_order instead; drop it")
        return value

    @field_validator("replacement", "late_drops", "reserve")
    @classmethod
    def _off(cls, value: Any) -> Any:
        if value not in (False, "none"):
            raise ValueError("chunk=fit has none; drop one of the two")
        return value


_REAL_TIME = int(RequestClass.REAL_TIME)
_RUNNING = int(State.RUNNING)
NOBODY = np.zeros(0, np.int64)
# of fit_age_s, after which real-time newcomers leave memory to requests that wait so long
_PATIENCE = 4
REACH = 512  # waiting requests that are looked at: of real-time ones first those not late yet


class FitBestEffort(BrosPolicy):
    """State of `chunk=fit`, and its rules for one class."""

    Options = BrosFitOptions
    options: BrosFitOptions
    fit_estimator = staticmethod(fit_estimator)
    traits = Traits(
        no_drafts=(
            "cuts prompts by an estimate for decodes of one token, without verification; bros "
            "without chunk=fit plans with drafts"
        )
    )

    def setup(self) -> None:
        super().setup()
        self.cost = cost_of(self.estimator, self.options.fit_estimator == "printed")
        self.feedback = Feedback(self.options.fit_feedback)
        self._least_ttft = np.inf  # seconds, of the real-time requests so far
        self._last: tuple[np.ndarray, float] | None = None  # rows, seconds of the last plan
        self._hits: dict[int, int] = {}  # tokens of waiting rows found in the cache when they came
        if not self.options.adaptive_batch:
            self.batch_size = self.limits.max_num_seqs

    # -- events ------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        super().on_arrival(row, requests)
        if requests.service_class[row] == _REAL_TIME:
            self._least_ttft = min(self._least_ttft, least(requests.slo_ttft_s[row : row + 1]))

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        self._hits.pop(row, None)

    def on_outcome(self, outcome: StepOutcome) -> None:
        super().on_outcome(outcome)
        self.feedback.happened(outcome)

    # -- estimates ---------------------------------------------------------------------------------
    def _until_due(
        self, rows: np.ndarray, requests: RequestTable, now: float, lead: float = 0.0
    ) -> np.ndarray:
        """`_residual`, less `lead` seconds for rows without a token under way."""
        if self.options.group_size == 1:
            return kernels.residual(requests, rows, now, lead)
        late = np.where(requests.in_flight[rows] > 0, 0.0, lead)
        return self.queues.residual(rows, requests, now) - late

    def _allowed(self, seconds):
        """Of an iteration that should take at most so many seconds, the estimate."""
        return seconds * ((1.0 - self.options.fit_margin) / self.feedback.factor)

    def _swap_seconds(self, swapped: int) -> float:
        return self.estimator.swap.seconds(swapped)

    def _longest_step(self) -> float:
        """Estimated seconds of one with a best-effort prompt: a share of the least TTFT objective,
        since a request that arrives in it waits for its end; never so little that nothing could be
        done."""
        if self._least_ttft == np.inf:
            return np.inf
        shortest = self.cost.seconds(Load(decodes=1, context=1, longest=1))
        return max(self._allowed(self.options.fit_share * self._least_ttft), 2.0 * shortest)

    # -- seats that are left -----------------------------------------------------------------------
    def _holding(self, step: FitStep, decodes: Rows) -> np.ndarray:
        """bool[n]: the decodes that hold all their KV on the device."""
        holding = (step.view.requests.state[decodes.rows] == _RUNNING) & (decodes.missing == 0)
        return holding & step.keeps(decodes.rows) if step.dropped else holding

    def _seated(self, step: FitStep, decodes: Rows, seats: int) -> np.ndarray:
        """int64[n]: indices of the first `seats` decodes that hold their KV and have, or find
        without a victim, a place for the next token."""
        found: list[int] = []
        for i in np.flatnonzero(self._holding(step, decodes)).tolist():
            if len(found) >= seats:
                break
            if find(step, int(decodes.rows[i]), int(decodes.resident[i]) + 1):
                found.append(i)
        return np.array(found, np.int64)

    def _serve_left_out(self, step: FitStep, to: list, decodes: Rows) -> None:
        """Grant idle seats to decodes that hold their KV, in order, while the bound has time."""
        if not len(decodes):
            return
        decodes = decodes[self._holding(step, decodes)]
        if len(decodes):
            fits = self.cost.decodes(step.load, decodes.resident, step.bound)
            seats = min(step.seats, step.tokens, fits)
            step.grant_decodes(to, decodes[self._seated(step, decodes, seats)])

    # -- best-effort decodes -----------------------------------------------------------------------
    def _reserve(self, step: FitStep, theirs: Rows, prompts: Rows) -> tuple[Rows, Rows]:
        """Best-effort decodes that the bound has time for, those without transfers first; the first
        real-time prompt keeps its shortest chunk. Returns these decodes, and the others."""
        if not len(theirs):
            return theirs, theirs
        missing = np.count_nonzero(theirs.missing)
        if missing:
            theirs = theirs[np.lexsort((theirs.rows, theirs.missing))]
        room = min(step.seats, step.tokens) - min(
            len(prompts), step.tokens // self.options.fit_least
        )
        bound = step.bound
        if len(prompts) and bound < np.inf:
            shortest = np.minimum(prompts.left[:1], self.options.fit_least)
            bound -= float(self.cost.own(shortest, prompts.resident[:1])[0])
        fits = min(max(room, 0), self.cost.decodes(step.load, theirs.resident, bound))
        if missing and fits:
            swapped = theirs.missing[:fits].cumsum() * self.limits.kv_bytes_per_token
            swap = self.estimator.swap
            seconds = np.where(swapped > 0, swap.base_s + swapped * swap.seconds_per_byte, 0.0)
            limit = max(bound, self.cost.seconds(step.load))
            fits = int(seconds.searchsorted(limit, side="right"))
        reserved, others = (
            (theirs, NO_ROWS) if fits == len(theirs) else (theirs[:fits], theirs[fits:])
        )
        step.reserve(reserved)
        return reserved, others

    def _place_reserved(self, step: FitStep, reserved: Rows) -> None:
        """Memory for them, after the real-time requests; time that they cannot use is free."""
        if not len(reserved):
            return
        step.reserve(reserved, -1)
        if step.dropped:
            reserved = reserved[step.keeps(reserved.rows)]
        elif not np.count_nonzero(reserved.missing) and step.ledger.grow_all(
            reserved.rows, reserved.resident + 1
        ):
            step.grant_decodes(step.best_effort, reserved)
            return
        batch = reserved.batch(self.limits.kv_bytes_per_token)
        done, others = place_plain(step, batch)
        for i in others:
            row = int(batch.rows[i])
            if row in step.dropped:
                continue
            whole = not batch.swapped[i]
            victims = NOBODY
            if whole:
                victims = self.placer.later_ones(
                    row, np.array(list(step.granted), np.int64), reserved.rows[done]
                )
            done[i] = acquire(step, row, int(batch.context[i]), victims)
        if len(others):
            reserved = reserved[done]
        step.grant_decodes(step.best_effort, reserved)

    # -- best-effort prompts -----------------------------------------------------------------------
    def _serve_best_effort_prompts(self, step: FitStep, begun: Rows, begun_rt: Rows) -> None:
        if not len(self.queues.be_waiting) and not len(begun):
            return
        waiting = self.queues.be_waiting.first(REACH)
        bound = min(step.bound, self._longest_step())
        if len(begun) and np.count_nonzero(begun.missing):
            begun = begun[begun.missing.argsort(kind="stable")]
        for row, left, resident in zip(
            begun.rows.tolist(), begun.left.tolist(), begun.resident.tolist(), strict=True
        ):
            if row in step.dropped or row in step.granted:
                continue
            new = step.chunk(left, resident, self.options.fit_least, step.load, bound)
            if not new:
                return
            if not find(step, row, resident + new):
                placed = (np.array(list(step.granted), np.int64), *(r for r, _ in step.best_effort))
                if not take_from(step, row, resident + new, self.placer.later_ones(row, *placed)):
                    continue
            step.grant_chunk(step.best_effort, row, new, resident)
        if not len(waiting):
            return
        promised = step.promised_blocks(begun) + step.promised_blocks(begun_rt)
        for row in waiting.tolist():
            if row in step.granted:
                continue
            hit = step.hit(row)
            known = int(step.view.requests.known_tokens(row))
            new = step.chunk(known - hit, hit, self.options.fit_least, step.load, bound)
            if not new or not step.ledger.admit(row, hit + new, hit, promised, known):
                return
            step.plan.admitted.append((row, hit))
            step.grant_chunk(step.best_effort, row, new, hit)
            size, held = step.ledger.block_tokens, step.ledger.held_blocks(row)
            promised += max(0, -(-known // size) - held)

    # -- best-effort requests that have waited long ------------------------------------------------
    def _aged(self, step: FitStep, theirs: Rows, begun: Rows) -> int | None:
        """The best-effort request that has waited longest for a token, if for too long."""
        if not len(self.queues.be_pending) and not len(self.queues.be_waiting):
            return None
        requests = step.view.requests
        rows = np.concatenate([theirs.rows, begun.rows, self.queues.be_waiting.first(1)])
        since = self._waits_since(rows, requests)
        first = int(since.argmin())
        if step.view.now - since[first] <= self.options.fit_age_s:
            return None
        return int(rows[first])

    def _waits_since(self, rows: np.ndarray, requests: RequestTable) -> np.ndarray:
        """float64[n], seconds: for its next token."""
        return np.fmax(requests.placed_s[rows], requests.last_token_s[rows])

    def _keeps_others_out(self, step: FitStep, aged: int) -> bool:
        """Whether newcomers must leave memory to the one that has waited longest and found none."""
        since = self._waits_since(np.array([aged]), step.view.requests)[0]
        late = step.view.now - since > _PATIENCE * self.options.fit_age_s
        return late and aged not in step.granted

    def _serve_aged(self, step: FitStep, row: int, theirs: Rows, begun: Rows) -> tuple[Rows, Rows]:
        """It goes before real-time prompts, and takes the memory of best-effort requests that came
        later. Returns the others."""
        others = theirs[theirs.rows != row], begun[begun.rows != row]
        if row in step.dropped:  # a real-time decode has just taken its memory
            return others
        requests = step.view.requests
        known, computed = int(requests.known_tokens(row)), int(requests.computed_tokens[row])
        victims = self.queues.be_pending.rows[::-1]
        if row in self.queues.be_pending:
            victims = self.placer.later_ones(row, NOBODY)
        victims = victims[victims > row]
        fresh = row in self.queues.be_waiting
        hit = step.hit(row) if fresh else computed
        new = min(known - hit, self.options.fit_least, step.tokens)
        if new > 0 and step.seats > 0:
            done = (
                step.admit(row, new, hit, victims)
                if fresh
                else acquire(step, row, hit + new, victims)
            )
            if done:
                step.grant_chunk(step.best_effort, row, new, hit)
        return others
