"""Our policy inside vLLM's own loop and process: scheduler classes for `vllm serve --scheduler-cls`
(docs/serving.md).

vLLM loads a class by name in its engine process and calls `add_request`, `schedule`,
`update_from_output` and `finish_requests`. Here each of them also tells the Decider, and `schedule`
shows vLLM's scheduler what the policy planned (Steering). Imports vLLM: name it by path.
"""

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from twinserve.backends.counts import LAYERS_STAY_TOGETHER
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.backends.live.serving.attributes import (
    BadAttributeError,
    RequestAttributes,
    read_attributes,
)
from twinserve.backends.live.serving.decider import Decider, EngineState
from twinserve.backends.live.serving.engine import engine_facts, unsupported
from twinserve.backends.live.serving.names import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
    Steering,
)
from twinserve.backends.live.serving.options import (
    ServingOptions,
    build_core,
    clients_of,
    read_options,
)
from twinserve.backends.live.serving.stats import ServingStats
from twinserve.backends.live.transfer.host import HostFull
from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.errors import worded
from twinserve.policies.plan import Preemption

logger = logging.getLogger("vllm.twinserve")  # below vLLM's own, for its format and level

_STUCK_S = 10.0  # nothing planned for so long, though requests wait: say so
_NAP_S = 0.001  # between two steps of which the first had nothing to do


@dataclass(slots=True)
class _Plan:
    """A plan that the engine executes in some steps. drift: counted when it was made."""

    names: list[str]
    drift: int
    emitted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _EngineStep:
    """last: of its plan."""

    plan: _Plan | None
    last: bool
    grants: dict[str, int]


class PolicyScheduling(Steering):
    """What both classes below share. Options come from --additional-config
    (ServingOptions), request attributes from `vllm_xargs` (serving/attributes.py). A
    setting that cannot be stops the server with one line."""

    asynchronous = False

    def __init__(self, vllm_config, *args, **kwargs) -> None:
        try:
            options = read_options(vllm_config.additional_config or {})
            fault = unsupported(vllm_config, self.asynchronous)
            if fault:
                raise LiveEngineError(fault)
            super().__init__(vllm_config, *args, **kwargs)
            self.serve(options)
        except LiveEngineError as error:
            if multiprocessing.parent_process() is None:
                raise
            logger.error("%s", error)
            raise SystemExit(1) from None  # an engine process of its own: the line says it all

    def serve(self, options: ServingOptions) -> None:
        """From now on as `options` say, on a clock of its own; no request may be here. Raises
        LiveEngineError if this engine cannot be served so."""
        facts = engine_facts(self)
        core = build_core(options, facts, self.asynchronous)
        clients = clients_of(options, core.policy)
        self.decider = Decider(
            core, options.slo_ttft_s, options.slo_tpot_s, options.app_idle_s, clients
        )
        ledger = core.ledger
        labels = {
            "policy": options.policy,
            "ledger": ledger.name,
            "num_blocks": ledger.num_blocks,
            "host_blocks": ledger.host_blocks,
            "prefix_caching": ledger.prefix_caching,
            "engine_blocks": facts.num_blocks,
            "vllm": installed_vllm(),
        }
        self.stats = ServingStats(labels, options.stats_path, options.log_every)
        self.forget_counts()
        self._strict = options.strict
        self._started, self._wall_started = time.monotonic(), time.time()
        self._budget = facts.max_step_tokens
        # the policy does not know them yet
        self._newcomers: dict[str, tuple[Request, RequestAttributes]] = {}
        self._refused: set[str] = set()
        self._rest = PlannedStep()  # of the plan, for which the engine's steps so far had no room
        self._plan: _Plan | None = None  # of which a step is still to be scheduled
        # scheduled, and vLLM has not told their output; the oldest first
        self._steps: deque[_EngineStep] = deque()
        self._uncopied: list[str] = []  # victims that found no room on the host
        self._idle_since: float | None = None
        self._nap_s = _NAP_S
        blocks = f"{ledger.num_blocks} of {facts.num_blocks} KV blocks"
        logger.info("policy %s on the %s ledger: %s", options.policy, ledger.name, blocks)
        if ledger.knows_layers:
            logger.warning("layer moves are accounted for but not made: %s", LAYERS_STAY_TOGETHER)

    def now(self) -> float:
        """Seconds since the scheduler was made: the clock of table and policy."""
        return time.monotonic() - self._started

    def keep_time(self, now: Callable[[], float]) -> None:
        """From here on `now` is the clock, also of arrivals: virtual time."""
        self.now = now  # type: ignore[method-assign]
        self._wall_started, self._nap_s = 0.0, 0.0

    # -- arrivals ----------------------------------------------------------------------------------
    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known:
            return
        fault = (
            "streaming input is not supported; send the whole prompt" if request.resumable else ""
        )
        try:
            given = request.sampling_params and request.sampling_params.extra_args
            attributes = read_attributes(given)
        except BadAttributeError as error:
            fault = worded(error)
        self.stats.arrived += 1
        if fault:
            self._refuse(request.request_id, fault)
        else:
            self._newcomers[request.request_id] = request, attributes

    def _refuse(self, name: str, fault: str) -> None:
        self._refused.add(name)
        logger.error("request %s: %s", name, fault)

    def _tell_policy(self, now: float) -> None:
        """Submit the arrived requests; one without its grammar follows when that is ready."""
        if self._pause_state != PauseState.UNPAUSED:
            return
        promote = (
            getattr(self, "_handle_blocked_waiting_request", None)
            or self._try_promote_blocked_waiting_request
        )
        for name, (request, attributes) in list(self._newcomers.items()):
            if request.status != RequestStatus.WAITING and not promote(request):
                continue
            del self._newcomers[name]
            # after those before it, which may have begun its application
            fault = self.decider.refusal(attributes)
            if fault:
                self._refuse(name, fault)
                continue
            arrival = min(max(request.arrival_time - self._wall_started, 0.0), now)
            hashes = () if request.skip_reading_prefix_cache else request.block_hashes
            self.stats.prompt_tokens += request.num_prompt_tokens
            prompt = request.num_prompt_tokens
            most = min(prompt + request.max_tokens, self.max_model_len)
            self.decider.submit(name, prompt, attributes, arrival, request.priority, hashes, most)

    # -- a step ------------------------------------------------------------------------------------
    def schedule(self, *args, **kwargs):
        now = self.now()
        self._tell_policy(now)
        self.planned = self._next_step(now)
        self._watch(self.planned, now)
        paused = self._pause_state
        if paused == PauseState.PAUSED_NEW:
            # newcomers are held back above; the others may go on
            self._pause_state = PauseState.UNPAUSED
        planned = self.planned
        output = super().schedule(*args, **kwargs)
        self._pause_state = paused
        self._stop_where_strict()
        self.stats.steps += 1
        self.stats.preempted += len(planned.preempted)
        self.stats.hit_tokens += sum(planned.hits.values())
        self._steps.append(_EngineStep(self._plan, not self._rest.grants, self.last.grants))
        if not self._rest.grants:
            self._plan = None
        return output

    def _next_step(self, now: float) -> PlannedStep:
        """Return what the engine does now: a plan, or what goes into one step of it."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return PlannedStep()
        if self._plan is None:
            self._give_anew(now)
            plan, alive = self.decider.plan(now), self.requests
            self.stats.decided(self.decider.decision_seconds)
            # A request may have ended in a step before its plan's last one, which the policy hears
            # of with that.
            if plan.preempted:
                preempted = tuple(
                    (name, kind)
                    for name, kind in plan.preempted
                    if name in alive and alive[name].status == RequestStatus.RUNNING
                )
                plan = replace(plan, preempted=preempted)
            self._rest = plan
            self._plan = _Plan(list(plan.grants), self.drift) if plan.grants else None
        planned, self._rest = self._rest.split(self._budget, self.requests)
        return planned

    def _take_memory(self, request, kind: Preemption) -> None:
        """KV that comes back in this step, or is back on paper only, still lies on the host. A
        row that finds no room next to it is computed again."""
        try:
            super()._take_memory(request, kind)
        except HostFull as full:
            super()._take_memory(request, Preemption.RECOMPUTE)
            self._uncopied.append(request.request_id)
            self.drift += 1
            self.first_drift = self.first_drift or f"{request.request_id}: {full}"

    def _give_anew(self, now: float) -> None:
        """Requests that were to be on the host, and are not, to the policy."""
        for name in self._uncopied:
            if name in self.decider.rows:
                request = self.requests[name]
                self.decider.restart(name, request.num_tokens, request.block_hashes, now)
        self._uncopied.clear()

    def _watch(self, planned: PlannedStep, now: float) -> None:
        """Nothing to do though requests wait: do not spin, and say so when it lasts."""
        if (
            planned.grants
            or planned.preempted
            or self._steps
            or not (self.decider.core.active or self._newcomers)
        ):
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
            return
        time.sleep(self._nap_s)
        if now - self._idle_since > _STUCK_S and self._pause_state == PauseState.UNPAUSED:
            self._idle_since = now
            core = self.decider.core
            logger.warning(
                "the policy has planned nothing for %g s: %d requests wait, %d of %d KV blocks "
                "are free",
                _STUCK_S,
                core.active,
                core.ledger.free_blocks,
                core.ledger.num_blocks,
            )

    def update_from_output(self, scheduler_output, model_runner_output):
        step = self._steps.popleft()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if step.plan is not None:
            for client in outputs.values():
                for output in client.outputs:
                    if output.new_token_ids:
                        self.stats.output_tokens += len(output.new_token_ids)
                        step.plan.emitted.add(output.request_id)
                    if output.finish_reason is not None:
                        step.plan.ended.add(output.request_id)
            if step.last:
                self._complete(step.plan)
        if self._refused:
            self._answer_refused(outputs)
        idle = not (self.decider.core.active or self._newcomers)
        if self.stats.line_due or self.stats.file_due or (idle and self.stats.last_word_due):
            self._report(log=self.stats.line_due)
        return outputs

    def _complete(self, plan: _Plan) -> None:
        states = {}
        known, rows, steps = self.requests, self.decider.rows, self._steps
        for name in plan.names:
            request = known.get(name)
            if request is None or name not in rows or request.is_finished():
                continue
            computed = request.num_computed_tokens
            if computed and steps:  # not those under way
                computed -= sum(step.grants.get(name, 0) for step in steps)
            states[name] = EngineState(computed, request.num_tokens, request.block_hashes)
        self.stats.finished += sum(name in self.decider.rows for name in plan.ended)
        found = self.decider.complete(self.now(), plan.emitted, plan.ended, states)
        if found and self.drift == plan.drift:  # the grants were as planned, what they met was not
            self.drift += 1
            self.first_drift = self.first_drift or f"step {self.steps}: {found}"
            self._stop_where_strict()

    def _stop_where_strict(self) -> None:
        if self._strict and self.drift:
            raise LiveEngineError(f"strict: {self.first_drift}")

    # -- ends without a plan -----------------------------------------------------------------------
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ):
        if request_ids is None:
            names = list(self.requests)
        else:
            names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        result = super().finish_requests(None if request_ids is None else names, finished_status)
        for name in names:
            request = self.requests.get(name)
            if request is None or request.is_finished():
                self._forget(name)
        return result

    def _forget(self, name: str) -> None:
        known = name in self._newcomers or name in self._refused
        self._newcomers.pop(name, None)
        self._refused.discard(name)
        self._rest.grants.pop(name, None)
        ended = any(step.plan is not None and name in step.plan.ended for step in self._steps)
        if name in self.decider.rows and not ended:
            self.decider.abort(name, self.now())
            known = True
        self.stats.aborted += known

    def _answer_refused(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """The client gets an error; the line is in the log (and in the answer, where
        CheckAttributes is in use)."""
        refused, self._refused = sorted(self._refused), set()
        for name in refused:
            request = self.requests[name]
            self.stats.refused += 1
            super().finish_requests(name, RequestStatus.FINISHED_ERROR)
            answer = EngineCoreOutput(
                request_id=name, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(answer)

    def reset_prefix_cache(self, *args, **kwargs) -> bool:
        done = super().reset_prefix_cache(*args, **kwargs)
        if done:
            known = {name: self.requests[name] for name in self.decider.rows}
            self.decider.restart_all(
                {name: (r.num_tokens, r.block_hashes) for name, r in known.items()}, self.now()
            )
        return done

    # -- what is seen of it ------------------------------------------------------------------------
    def _report(self, log: bool) -> None:
        values = self.stats.values(self.drift, self.first_drift, self.decider)
        if log:
            logger.info("%s", self.stats.line(values))
        self.stats.write(values)

    def shutdown(self) -> None:
        self._report(log=True)
        super().shutdown()


class PolicyScheduler(PolicyScheduling, Scheduler):
    """For an engine that steps synchronously (--no-async-scheduling)."""


class PolicyAsyncScheduler(PolicyScheduling, AsyncScheduler):
    """For an engine that plans a step before the last one's tokens (--async-scheduling)."""

    asynchronous = True
