"""Echo: online requests first, offline ones by reward, on KV memory that knows what will be used again.

Source: Wang et al., "Echo: Efficient Co-Scheduling of Hybrid Online-Offline Tasks for Large Language Model Serving",
Sec. 4.1 (scheduler), 4.2 (threshold), 5 (estimator), 6 (implementation). Online requests are those of class real-time,
offline ones those of class best-effort. docs/echo.md says what was decided where the paper is open.

An iteration starts from the online requests, first come first served, then from the offline decodes of the iteration
before, and is changed by one request at a time (leave one out, add a prompt, add a decode whose KV is there) while that
raises the tokens made available a second and the online deadlines hold.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np
from pydantic import Field

from .base import EngineLimits, Options, Policy, SystemView
from .deadlines import RowSet
from .echo_cost import echo_estimator, step_cost
from .echo_forecast import MemoryForecast
from .echo_offline import OfflinePart
from .echo_online import OnlinePart
from .echo_parts import StepInProgress
from .echo_pool import FcfsPool, OfflinePool
from .kv.base import KvLedger
from .plan import StepOutcome, StepPlan
from .requests import RequestClass, RequestTable
from .runs import LONGEST_RUN, decodes_only

_ONLINE = int(RequestClass.REAL_TIME)
_CLOCK_SLACK_S = 1e-6  # a run of steps ends this much before a deadline binds, and is planned anew


class EchoOptions(Options):
    """The parts of the paper, each of which can be switched off; its ladder BS, +E, +S, +M goes from all off to all on.

    slo_aware       E: iterations are bounded by the online requests' SLO, by estimate
    kv_aware        S: offline requests by reward (eq. 4); off: first come, first served
    threshold       M, with the ledger `task-aware`: offline requests are begun only where mu + sigmas * sigma of online
                    memory stays free for the online ones
    sigmas          2 in the paper ("a hyperparameter that can be tuned")
    history_s       seconds of the past that mu and sigma are of
    sample_s        seconds between two samples of it
    slo             cumulative: token i is due at arrival + TTFT + i * TPOT, as in the paper; gap: TPOT after the last one
    length_buckets  the pool is divided by prompt length
    b_decode        b of a decoded token (eq. 1); that of a prompt's token is 1
    benefit         whose tokens count in eq. 4. all: everybody's, as printed; offline: ours, only those of offline requests,
                    since how many tokens online ones get is for their arrivals to say, not for a plan
    edits           all: requests are added and left out until no single edit pays, as in the paper; adding: decodes are
                    chosen first, then prompts are added, and nothing that was chosen is left out again
    feedback        ours: weight of the newest iteration in a factor, actual over estimated time, that corrects the
                    estimate; 0: none, as in the paper
    """

    slo_aware: bool = True
    kv_aware: bool = True
    threshold: bool = True
    sigmas: float = Field(2.0, ge=0, le=1e6)
    history_s: float = Field(3600.0, gt=0, le=1e7)
    sample_s: float = Field(1.0, ge=1e-3)
    slo: Literal["cumulative", "gap"] = "cumulative"
    length_buckets: bool = True
    b_decode: float = Field(1.0, gt=0)
    benefit: Literal["all", "offline"] = "all"
    edits: Literal["all", "adding"] = "all"
    feedback: float = Field(0.0, ge=0, le=1)


class EchoPolicy(OnlinePart, OfflinePart, Policy):
    name = "echo"
    Options = EchoOptions
    default_kv = "task-aware"
    prefix_caching = True

    @staticmethod
    def fit_estimator(profile, truth):
        """The form of its own paper, from what steps really take."""
        return echo_estimator(truth)

    @classmethod
    def estimates(cls, options: EchoOptions) -> bool:
        return options.slo_aware or options.kv_aware

    def __init__(self, limits: EngineLimits, options: EchoOptions | None = None, estimator=None) -> None:
        super().__init__(limits, options, estimator)
        options = self.options
        self.cost = step_cost(estimator, self.name) if self.estimates(options) else None
        self.waiting = RowSet()  # online, without KV
        self.online = RowSet()  # with KV
        self.offline = RowSet()
        self.pool = OfflinePool(options.length_buckets) if options.kv_aware else FcfsPool()
        self.forecast = (
            MemoryForecast(options.sigmas, options.history_s, options.sample_s) if options.threshold else None
        )
        self._requests: RequestTable | None = None
        self._last = np.zeros(0, np.int64)  # offline rows of the last plan
        self.factor = 1.0  # actual over estimated time of an iteration, where `feedback` asks for it
        self._estimated: deque[float] = deque()  # seconds of the plans whose outcome is to come

    def step_tokens(self, longest: int) -> int:
        return self.limits.max_num_batched_tokens

    # -- events ------------------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self._requests = requests
        if requests.klass[row] == _ONLINE:
            self.waiting.add(row)
        else:
            self.pool.add(row, requests)

    def on_finish(self, row: int) -> None:
        if self._requests.klass[row] == _ONLINE:
            self.online.discard(row)
            self.waiting.discard(row)
        else:
            self.offline.discard(row)
            self.pool.remove(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        if self.options.feedback and self.cost is not None:
            estimated = self._estimated.popleft()
            if estimated > 0:
                actual = float(outcome.seconds.sum())
                self.factor += self.options.feedback * (actual / estimated - self.factor)

    # -- the iteration -----------------------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        if self.forecast is not None:
            self.forecast.observe(view.now, ledger.usage().real_time)
        limits = self.limits
        seats, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        step = StepInProgress(view, ledger, self.cost, seats, tokens, self.options.b_decode)
        blocked = self._serve_online(step)
        online = len(step)
        if self.options.benefit == "offline":
            step.forget_benefit()
        shut = self._serve_offline(step)
        plan = step.finish()
        self._last = plan.rows[online:]
        if not self.options.feedback:
            self._stands(step, online, blocked, shut)
        elif plan and self.cost is not None:
            self._estimated.append(step.seconds())
        return plan

    def _chunk(self, step: StepInProgress, left: int, resident: int) -> int:
        """Prompt tokens that the iteration still has room and time for, of `left` on `resident` ones."""
        return self._longest(step.prefills, step, resident, min(left, step.tokens))

    def _longest(self, prefills: list[tuple[int, int]], step: StepInProgress, resident: int, limit: int) -> int:
        """As many as `limit` tokens on `resident` ones, beside these prefills and the decodes of the step."""
        if limit <= 0 or not self.options.slo_aware or step.bound == np.inf:
            return max(limit, 0)
        return self.cost.longest_chunk(prefills, step.decodes, resident, limit, step.bound)

    @staticmethod
    def _here(rows: np.ndarray, step: StepInProgress) -> np.ndarray:
        """Rows with something to compute whose transfers have landed, as far as they were not dropped in this step."""
        requests = step.requests
        rows = rows[requests.known_tokens(rows) > requests.computed_tokens[rows]]
        gone = step.dropped or step.view.ready_s
        if gone:
            ready = step.view.ready_s
            rows = rows[np.array([r not in step.dropped and r not in ready for r in rows.tolist()], bool)]
        return rows

    @staticmethod
    def _decoding(rows: np.ndarray, requests: RequestTable) -> np.ndarray:
        """bool[n]: which compute the one token after their last emitted one."""
        left = requests.known_tokens(rows) - requests.computed_tokens[rows]
        return (left == 1) & (requests.output_tokens[rows] > 0)

    @staticmethod
    def _promised_blocks(step: StepInProgress, *rows: np.ndarray) -> int:
        """Blocks that prompts which have been begun still need."""
        everyone = np.concatenate(rows)
        computed = step.requests.computed_tokens[everyone]
        unfinished = everyone[step.requests.known_tokens(everyone) - computed > 1]
        size, ledger = step.ledger.block_tokens, step.ledger
        known = step.requests.known_tokens(unfinished).tolist()
        return sum(
            max(0, -(-tokens // size) - ledger.held_blocks(row))
            for row, tokens in zip(unfinished.tolist(), known, strict=True)
            if row not in step.dropped
        )

    # -- how long the decision stands --------------------------------------------------------------------------
    def _stands(self, step: StepInProgress, online: int, blocked: bool, shut: bool) -> None:
        """`valid_for`: everybody who holds memory decodes, nobody else can get in, and no edit or deadline changes that.

        blocked, shut: no waiting online, no queued offline request can be admitted while memory only gets less.
        """
        plan, requests = step.plan, step.requests
        if len(plan.rows) != len(self.online) + len(self.offline) or not decodes_only(plan, requests):
            return
        full = step.seats <= 0 or step.tokens <= 0
        if not full and ((len(self.waiting) and not blocked) or (len(self.pool) and not shut)):
            return
        until = np.inf
        if self.forecast is not None:
            until = self.forecast.next_s
        steps = step.ledger.decode_steps(plan.rows, LONGEST_RUN)
        if steps <= 1:
            return
        offline = plan.rows[online:]
        if self.cost is not None and len(offline):
            resident = requests.computed_tokens[plan.rows].tolist()
            total, longest = sum(resident), max(resident)
            takes = self.cost.decode_run(len(resident), total, longest, steps)
            if self.options.kv_aware:
                steps = self._keeps_paying(resident, online, takes, steps)
            if self.options.slo_aware and online and steps > 1:
                alone = self.cost.decode_run(online, sum(resident[:online]), max(resident[:online]), steps)
                most = float(np.maximum(takes[:steps], alone).max())
                # In a run each step gives everybody a token, so that deadlines move on by a TPOT and never come nearer.
                due = self._due(plan.rows[:online], requests)
                if self.options.slo == "gap":
                    if most > float(np.nanmin(np.append(requests.slo_tpot_s[plan.rows[:online]], np.inf))) - _CLOCK_SLACK_S:
                        return
                else:
                    until = min(until, float(due.min()) - most - _CLOCK_SLACK_S)
        plan.valid_for = max(0, steps - 1)
        plan.valid_until_s = until

    def _keeps_paying(self, resident: list[int], online: int, takes: np.ndarray, steps: int) -> int:
        """For how many of the steps leaving out the longest offline decode would not raise the reward."""
        n = len(resident)
        if n == 1:
            return steps
        shorter = resident[:-1]  # offline ones come shortest first
        without = self.cost.decode_run(n - 1, sum(shorter), max(shorter), steps)
        b, offline = self.options.b_decode, n - online
        others = b * online if self.options.benefit == "all" else 0.0
        # in the terms of the climb, to the last bit
        worse = (others + b * (offline - 1)) / without > (others + b * offline) / takes
        return int(worse.argmax()) if worse.any() else steps


class EchoBsOptions(EchoOptions):
    slo_aware: bool = False
    kv_aware: bool = False
    threshold: bool = False


class EchoBsEOptions(EchoOptions):
    kv_aware: bool = False
    threshold: bool = False


class EchoBsESOptions(EchoOptions):
    threshold: bool = False


class EchoBsPolicy(EchoPolicy):
    """BS: online requests preempt offline ones, first come first served, on an LRU prefix cache."""

    name = "echo-bs"
    Options = EchoBsOptions
    default_kv = "paged"


class EchoBsEPolicy(EchoPolicy):
    """BS+E: iterations keep the online SLO."""

    name = "echo-bs-e"
    Options = EchoBsEOptions
    default_kv = "paged"


class EchoBsESPolicy(EchoPolicy):
    """BS+E+S: and offline requests are chosen by reward."""

    name = "echo-bs-e-s"
    Options = EchoBsESOptions
    default_kv = "paged-rc"
