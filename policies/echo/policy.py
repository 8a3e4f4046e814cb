"""Echo: online requests first, offline ones by reward, on KV memory that knows what will be used
again.

Source: Wang et al., "Echo: Efficient Co-Scheduling of Hybrid Online-Offline Tasks for Large
Language Model Serving", Sec. 4.1 (scheduler), 4.2 (threshold), 5 (estimator), 6 (implementation).
Online requests are those of class real-time, offline ones those of class best-effort. docs/echo.md
has our choices for the paper's open points.

An iteration starts from the online requests, first come first served. Offline decodes whose KV is
there follow, as many as the online deadlines and memory allow. Then come the prompts that rank
first by tokens made available a second, while both hold (`offline=rank`). With `offline=climb` a
batch is changed by one request at a time, leaving out included, while that raises the tokens a
second.
"""

from collections import deque

import numpy as np

from twinserve.policies.base import Policy, SystemView, Traits
from twinserve.policies.echo.cost import StepCost, Unasked, echo_estimator, step_cost
from twinserve.policies.echo.offline import OfflineRequests
from twinserve.policies.echo.online import OnlineRequests
from twinserve.policies.echo.options import (
    EchoBsEOptions,
    EchoBsESOptions,
    EchoBsOptions,
    EchoOptions,
)
from twinserve.policies.echo.parts import StepInProgress
from twinserve.policies.echo.plain import PlainPlans
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.runs import LONGEST_RUN, decodes_only, further_steps
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import RequestClass, RequestTable

_ONLINE = int(RequestClass.REAL_TIME)
_CLOCK_SLACK_S = 1e-6  # a run of steps ends this much before a deadline binds, and is planned anew


class EchoPolicy(Policy[EchoOptions]):
    name = "echo"
    Options: type[EchoOptions] = EchoOptions
    default_kv = "task-aware"
    prefix_caching = True
    fit_estimator = staticmethod(echo_estimator)  # the form of its own paper
    traits = Traits(
        no_drafts=(
            "weighs offline work by estimates of steps in which a request decodes one token, and "
            "plans memory for one token a step"
        )
    )

    @classmethod
    def estimates(cls, options: EchoOptions) -> bool:
        return options.slo_aware or options.kv_aware

    def setup(self) -> None:
        options = self.options
        self.cost: StepCost = (
            step_cost(self.estimator, self.name) if self.estimates(options) else Unasked()
        )
        self.offline = OfflineRequests(options)
        self.online = OnlineRequests(options, self.offline)
        self.plain = PlainPlans(self.online, self.offline, self.cost, self.limits)
        self._requests: RequestTable  # from the first arrival on
        self._estimated: deque[float] = deque()  # seconds of the plans whose outcome is to come

    def step_tokens(self, longest: int) -> int:
        return self.limits.max_num_batched_tokens

    # -- events ------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self._requests = requests
        if requests.service_class[row] == _ONLINE:
            self.online.waiting.add(row)
        else:
            self.offline.pool.add(row, requests)

    def on_finish(self, row: int) -> None:
        if self._requests.service_class[row] == _ONLINE:
            self.online.running.discard(row)
            self.online.waiting.discard(row)
        else:
            self.offline.running.discard(row)
            self.offline.pool.remove(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        if self.options.feedback:
            estimated = self._estimated.popleft()
            if estimated > 0:
                actual = float(outcome.seconds.sum())
                error = actual / estimated - self.online.factor
                self.online.factor += self.options.feedback * error

    # -- the iteration -----------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        forecast = self.offline.forecast
        if forecast is not None and view.now >= forecast.next_s:
            forecast.observe(view.now, ledger.usage().real_time)
        if not self.options.feedback and (plan := self.plain.plan(view, ledger)) is not None:
            self.offline.last = plan.rows[len(self.online.running) :]
            return plan
        limits = self.limits
        seats, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        step = StepInProgress(
            view, ledger, self.cost, seats, tokens, self.options.b_decode, self.options.b_hit
        )
        blocked = self.online.serve(step)
        online, step.online = len(step), self.online.running.rows
        if self.options.benefit == "offline":
            step.forget_benefit()
        shut = self.offline.serve(step)
        plan = step.finish()
        self.offline.last = plan.rows[online:]
        if not self.options.feedback:
            self._stands(step, online, blocked, shut)
        elif plan:
            self._estimated.append(step.seconds())
        return plan

    # -- how long the decision stands --------------------------------------------------------------
    def _stands(self, step: StepInProgress, online: int, blocked: bool, shut: bool) -> None:
        """`valid_for`: all rows with memory decode, no other row can get in, and no edit or
        deadline changes that.

        blocked, shut: no waiting online, no queued offline request can be admitted while memory
        only gets less.
        """
        plan, requests = step.plan, step.requests
        holders = len(self.online.running) + len(self.offline.running)
        if len(plan.rows) != holders:
            return
        if not decodes_only(plan, requests):
            self._chunks_stand(step)
            return
        full = step.seats <= 0 or step.tokens <= 0
        waiting, queued = len(self.online.waiting), len(self.offline.pool)
        if not full and ((waiting and not blocked) or (queued and not shut)):
            return
        until = np.inf
        if self.offline.forecast is not None:
            until = self.offline.forecast.next_s
        steps = step.ledger.decode_steps(plan.rows, LONGEST_RUN)
        if steps <= 1:
            return
        offline = plan.rows[online:]
        if len(offline) and self.estimates(self.options):
            resident = requests.computed_tokens[plan.rows].tolist()
            total, longest = sum(resident), max(resident)
            takes = self.cost.decode_run(len(resident), total, longest, steps)
            if self.options.kv_aware and self.options.offline == "climb":
                steps = self._keeps_paying(resident, online, takes, steps)
            if self.options.slo_aware and online and steps > 1:
                alone = self.cost.decode_run(
                    online, sum(resident[:online]), max(resident[:online]), steps
                )
                most = float(np.maximum(takes[:steps], alone).max())
                # In a run each step gives every row a token, so that deadlines move on by a TPOT
                # and never come nearer.
                due = self.online.due(plan.rows[:online], requests)
                if self.options.slo == "gap":
                    if (
                        most
                        > float(
                            np.nanmin(np.append(requests.slo_tpot_s[plan.rows[:online]], np.inf))
                        )
                        - _CLOCK_SLACK_S
                    ):
                        return
                else:
                    until = min(until, float(due.min()) - most - _CLOCK_SLACK_S)
        plan.valid_for = max(0, steps - 1)
        plan.valid_until_s = until

    def _chunks_stand(self, step: StepInProgress) -> None:
        """The same with prompts in chunks: while their size is what the token budget leaves, and
        nothing else decides."""
        if step.tokens <= 0 and not self.estimates(self.options):
            plan = step.plan
            plan.valid_for = further_steps(plan, step.requests, step.ledger, shut=True)
            if self.offline.forecast is not None:
                plan.valid_until_s = self.offline.forecast.next_s

    def _keeps_paying(self, resident: list[int], online: int, takes: np.ndarray, steps: int) -> int:
        """For how many of the steps no smaller number of offline decodes would have a higher
        reward; in the terms of the climb, to the last bit."""
        b, n = self.options.b_decode, len(resident)
        others = b * online if self.options.benefit == "all" else 0.0
        rate_of_all = (others + b * (n - online)) / takes
        for k in range(online or 1, n):  # offline ones come shortest first
            kept = resident[:k]
            seconds = self.cost.decode_run(k, sum(kept), max(kept), steps)
            worse = (others + b * (k - online)) / seconds > rate_of_all[:steps]
            if worse.any():
                steps = int(worse.argmax())
                if not steps:
                    break
        return steps


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
