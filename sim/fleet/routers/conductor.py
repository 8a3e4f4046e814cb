"""Mooncake's conductor (Qin et al., FAST 2025, Algorithm 1).

For every prefill replica it predicts the time to first token: the queued prefills one after
another, and this prompt's uncached part. For every decode replica it predicts the time between
tokens (TBT) with all requests sent there and this one. The request gets the replicas with the
shortest times, both chosen on arrival. If even the first breaks its TTFT objective, or the second
its TPOT objective (the paper's TBT), the request is rejected, as with HTTP 429. A replica with both
roles is chosen by the first time, and checked by the second.

Times come from a model of the replica that was fitted beforehand, as in the paper; here it is the
simulator's own. KV events tell what is cached.

Differences. Prefixes are not fetched from other replicas, and so none are replicated: there is no
such transfer between replicas yet (the paper's branch above `kvcache_balancing_threshold`). A
prompt counts whole until its first token. A request counts at its decode replica from its arrival
on; the paper predicts when it gets there, with one decode time for all. TTFT excludes the transfer
of KV to the decode replica: the paper sends KV layer by layer, during the prefill.
"""

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from twinserve.policies.errors import PolicyError
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Shedding, Verdict
from twinserve.sim.fleet.routers.prefixes import OfPrefixes, Prefixes
from twinserve.sim.fleet.view import FleetView, Signals


class ConductorOptions(Shedding):
    """reject  requests whose objectives would be broken; else they are placed all the same
    events_age, events_lost  of KV events: seconds until they come, share that does not
    """

    reject: bool = True
    events_age: float = Field(0.0, ge=0, le=3600)
    events_lost: float = Field(0.0, ge=0, lt=1)
    seed: int = Field(0, ge=0)


@dataclass(slots=True)
class _Queue:
    """Of a replica.

    prefill_s  request without a first token -> predicted seconds of its prompt
    decoding   request with one -> its prompt's tokens
    queued_s   sum of the former; None: to be added up anew (adding and subtracting would drift)
    tokens     sum of the latter
    """

    prefill_s: dict[Request, float] = field(default_factory=dict)
    decoding: dict[Request, int] = field(default_factory=dict)
    queued_s: float | None = 0.0
    tokens: int = 0

    def computed(self, request: Request) -> bool:
        """Record that the prompt is computed, or no longer needed. Returns False if it was
        already."""
        if self.prefill_s.pop(request, None) is None:
            return False
        self.queued_s = None
        return True

    def seconds(self) -> float:
        if self.queued_s is None:
            self.queued_s = sum(self.prefill_s.values())
        return self.queued_s


class Conductor(OfPrefixes[ConductorOptions]):
    name = "conductor"
    Options = ConductorOptions
    chooses_both = True
    predicts_times = True

    def setup(self) -> None:
        options = self.options
        self.signals = Signals(
            events_age_s=options.events_age, events_lost=options.events_lost, seed=options.seed
        )
        self._prefixes = Prefixes(exact=True)
        self._queues: dict[int, _Queue] = {}

    def on_came(self, replica: int) -> None:
        super().on_came(replica)
        self._queues[replica] = _Queue()

    def on_dispatched(self, request: Request, replica: int) -> None:
        blocks = self._prefixes.matched_at(request, replica, self.view)
        queue = self._queues[replica]
        queue.prefill_s[request] = self._prefill_s(request, replica, blocks)
        queue.queued_s = None
        if self.stage is Role.DECODE:
            self.on_first_token(request, replica)

    def on_first_token(self, request: Request, replica: int) -> None:
        queue = self._queues[replica]
        if queue.computed(request):
            queue.decoding[request] = request.prompt_tokens
            queue.tokens += request.prompt_tokens

    def on_ended(self, request: Request, replica: int) -> None:
        queue = self._queues[replica]
        queue.computed(request)
        queue.tokens -= queue.decoding.pop(request, 0)

    def place(self, request: Request, stage: Role, view: FleetView) -> int | Verdict:
        slo_ttft_s = request.values.get("slo_ttft_s", np.nan)  # NaN: no objective
        slo_tbt_s = request.values.get("slo_tpot_s", np.nan)
        if stage is Role.DECODE:
            tbt_s = {i: self.tbt_s(request, i) for i in view.up}
            best = min(view.up, key=tbt_s.__getitem__)
            late = tbt_s[best] > slo_tbt_s
        else:
            matched = self._prefixes.matched(request, view)
            ttft_s = {i: self.ttft_s(request, i, matched[i]) for i in view.up}
            best = min(view.up, key=ttft_s.__getitem__)
            late = ttft_s[best] > slo_ttft_s
            if stage is Role.SERVE:
                late |= self.tbt_s(request, best) > slo_tbt_s
        return Verdict.REJECT if late and self.options.reject else best

    def ttft_s(self, request: Request, replica: int, matched: int) -> float:
        """Predicted seconds to its first token there, with so many leading blocks cached."""
        return self._queues[replica].seconds() + self._prefill_s(request, replica, matched)

    def tbt_s(self, request: Request, replica: int) -> float:
        """Predicted seconds of a step there in which all that have begun decode, and this one."""
        queue, tokens = self._queues[replica], request.prompt_tokens
        longest = max(queue.decoding.values(), default=0)
        work = StepComposition(len(queue.decoding) + 1, queue.tokens + tokens, max(longest, tokens))
        return self._model(replica).step_seconds(work)

    def _prefill_s(self, request: Request, replica: int, matched: int) -> float:
        """Its last token is computed at least."""
        cached = min(matched * self.view.block_tokens[replica], request.prompt_tokens - 1)
        new = np.array([request.prompt_tokens - cached])
        work = StepComposition(prefill_new=new, prefill_resident=np.array([cached]))
        return self._model(replica).step_seconds(work)

    def _model(self, replica: int) -> StepTimeModel:
        model = self.view.models[replica]
        if model is None:
            raise PolicyError(
                f"router 'conductor': the step times of replica {replica} are unknown; use "
                "another router"
            )
        return model
