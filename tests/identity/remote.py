"""Both sides of the comparison with a pull connector: vLLM's scheduler with `PullConnector`, and
the decode side of policy `vllm`, or policy `vllm` on an engine that hands over.

Which requests are remote, when their transfers end and which of them fail is a function of the
request's number, so that both sides see the same. A transfer that ends with a step is known when
that step's output is taken in, as vLLM's workers report it.
"""

import dataclasses
from collections import Counter, deque

import numpy as np

from tests.identity.ours import OurScheduler
from tests.identity.protocol import EngineSettings, Observed
from tests.identity.real_scheduler import RealScheduler
from twinserve.policies.requests import End

SHARE = 0.75  # of the requests whose prompts are computed elsewhere
FAILING = 0.2  # of their transfers
LONGEST = 6  # steps of a transfer


@dataclasses.dataclass(frozen=True)
class Fate:
    remote: bool
    steps: int
    fails: bool


def fate(request_id: str) -> Fate:
    rng = np.random.default_rng([25, int(request_id.removeprefix("r"))])
    return Fate(
        bool(rng.random() < SHARE), int(rng.integers(0, LONGEST + 1)), bool(rng.random() < FAILING)
    )


def transfer_settings(
    role: str, recompute: bool = True, connector: str = "PullConnector", lease_s: int = 30
) -> dict:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "tests.identity.pull_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute" if recompute else "fail",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }


class _Due:
    """Transfers by the step that they end with."""

    def __init__(self) -> None:
        self.step = 0
        self._due: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        self._due[request_id] = self.step + fate(request_id).steps

    def ended(self) -> list[str]:
        """With this step; the next one is to come."""
        ended = [name for name, due in self._due.items() if due <= self.step]
        for name in ended:
            del self._due[name]
        self.step += 1
        return ended

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._due


class RemoteReal(RealScheduler):
    """seen  how often what the comparison is for has happened"""

    def __init__(self, settings: EngineSettings, role: str = "kv_consumer", **more) -> None:
        self.seen: Counter[str] = Counter()
        self.role = role
        self.due = _Due()
        self._blocks: dict[str, list[int]] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()  # by a load, under policy `fail`
        super().__init__(settings, kv_transfer=transfer_settings(role, **more))
        self._watch_loads()

    def _watch_loads(self) -> None:
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        allocate, schedule = manager.allocate_slots, scheduler.schedule
        may_go = scheduler._request_blocks_can_be_freed

        def note_allocate(request, *args, **kwargs):
            found = allocate(request, *args, **kwargs)
            self.seen["short of blocks"] += found is None and bool(kwargs.get("delay_cache_blocks"))
            return found

        def note_victims():
            def note(request):
                self.seen["no victim, since computed"] += not may_go(request)
                return may_go(request)

            scheduler._request_blocks_can_be_freed = note
            plan = schedule()
            scheduler._request_blocks_can_be_freed = may_go
            return plan

        manager.allocate_slots, scheduler.schedule = note_allocate, note_victims

    def submit(self, request_id, prompt_tokens, output_tokens, *more, **named) -> None:
        super().submit(request_id, prompt_tokens, output_tokens, *more, **named)
        if fate(request_id).remote:
            asked = "do_remote_prefill" if self.role == "kv_consumer" else "do_remote_decode"
            self.scheduler.requests[request_id].kv_transfer_params = {asked: True}

    def withdraw(self, request_id: str) -> None:
        request = self.scheduler.requests[request_id]
        waits = request in self.scheduler.kv_holding_waiting
        pending = request_id in self.due
        self.seen["aborted while pending"] += waits and pending
        self.seen["aborted when it had come"] += waits and not pending
        before = len(self.scheduler.deferred_frees)
        super().withdraw(request_id)
        self.seen["freed a step later"] += len(self.scheduler.deferred_frees) - before

    def step(self) -> Observed:
        scheduler = self.scheduler
        self.seen["pending"] += len(scheduler.kv_holding_waiting)
        seen = super().step()
        self.seen["preempted after a load"] += len(self._loaded & set(seen.preempted))
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        finished = tuple(name for name in seen.finished if name not in self._failed)
        self.seen["ended by a failed load"] += len(seen.finished) - len(finished)
        return dataclasses.replace(seen, waiting=waiting, finished=finished)

    def _sampled(self, plan):
        from vllm.v1.outputs import KVConnectorOutput

        output = super()._sampled(plan)  # ids in lists: in sets their order would be anything
        connector = self.scheduler.connector
        for name, blocks in connector.begun:
            self.due.begin(name)
            self._blocks[name] = blocks
            self.seen["loads"] += 1
        connector.begun.clear()
        ended = self._ended(plan)
        if self.role != "kv_consumer":
            output.kv_connector_output = KVConnectorOutput(finished_sending=ended)
            return output
        failed = [name for name in ended if fate(name).fails]
        if not self.scheduler.recompute_kv_load_failures:
            self._failed.update(failed)
        self._loaded.update(set(ended) - set(failed))
        self.seen["arrived"] += len(ended) - len(failed)
        self.seen["failed"] += len(failed)
        for name in failed:
            local = len(self.scheduler.kv_cache_manager.get_block_ids(name)[0])
            self.seen["failed with a local hit"] += local > len(self._blocks[name])
        output.kv_connector_output = KVConnectorOutput(
            finished_recving=ended,
            invalid_block_ids={block for name in failed for block in self._blocks[name]},
        )
        return output

    def _ended(self, plan) -> list[str]:
        """Transfers that end with this step."""
        for name in self.scheduler.connector.kept:  # those that ended with the step before
            self.due.begin(name)
            self.seen["kept"] += 1
        self.scheduler.connector.kept.clear()
        return self.due.ended()


class _Reports:
    """What ended with a step is known when its outcome is: at once, or a step later."""

    def __init__(self, asynchronous: bool) -> None:
        self._waiting: deque[list[str]] = deque([[]] if asynchronous else [])

    def known(self, ended: list[str]) -> list[str]:
        self._waiting.append(ended)
        return self._waiting.popleft()


class RemoteOurs(OurScheduler):
    """The decode side. recompute: what follows a failed load; else its request ends."""

    def __init__(self, settings: EngineSettings, mutation=None, recompute: bool = True) -> None:
        self.due = _Due()
        self.recompute = recompute
        self._reports = _Reports(settings.async_scheduling)
        super().__init__(settings, policy="vllm_offloading:VllmDecode")
        core = self.stepper.core
        if mutation is not None:
            mutation.apply(self)
        plan = core.plan

        def note(now):
            held = set(self.policy.fetching)
            made = plan(now)
            table = core.requests
            joined = dict(made.admitted) | {
                row: int(table.computed_tokens[row]) for row in made.begun
            }
            ids = table.ids
            self._hits = {ids[r]: joined[r] for r in made.rows.tolist() if r in joined}
            self._victims = tuple(ids[r] for r, _ in made.preempted if r not in held)
            for row, _ in made.fetched:
                core.ready_s[row] = np.inf
                core.transferring({row: np.inf})
                self.due.begin(ids[row])
            return made

        core.plan = note

    def more(self, request_id: str, prompt_tokens: int) -> dict[str, int]:
        return {"remote_tokens": prompt_tokens} if fate(request_id).remote else {}

    def step(self) -> Observed:
        seen = super().step()
        core, failed = self.stepper.core, 0
        for name in self._reports.known(self.due.ended()):
            row = core.requests.ids.index(name)
            del core.ready_s[row]
            core.fetched(row, not fate(name).fails)
            if fate(name).fails and not self.recompute:
                failed += core.withdraw(row, End.FAILED, seen.free_blocks)
        waiting = len(self.policy.waiting) + len(self.policy.fetching) - failed
        return dataclasses.replace(seen, waiting=waiting, hits=self._hits, preempted=self._victims)


class HandingOver(OurScheduler):
    """The prefill side: all requests but those that are not remote are kept when they end."""

    def __init__(self, settings: EngineSettings, mutation=None) -> None:
        self.due = _Due()
        self._reports = _Reports(settings.async_scheduling)
        super().__init__(settings, mutation)
        self.stepper.core.hands_over = True

    def step(self) -> Observed:
        core = self.stepper.core
        seen = super().step()
        ids = core.requests.ids
        ended = self._reports.known(self.due.ended())
        for name in seen.finished:
            if fate(name).remote:
                self.due.begin(name)
            else:
                core.release(ids.index(name))
        for name in ended:
            core.release(ids.index(name))
        return seen
