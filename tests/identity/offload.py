"""Both sides of the comparison with a host tier: vLLM's scheduler with its OffloadingConnector, and
policy `vllm` on a ledger with a tier.

vLLM's connector decides as shipped; its workers are not there. How many steps a transfer takes is a
function of its number. One that its step waits for (`jobs_to_flush`) ends with that step. vLLM goes
through the requests that have ended in the order of a set; here both sides take them by number.
"""

import dataclasses
from collections import Counter, deque

import numpy as np

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.ours import OurScheduler
from tests.identity.protocol import EngineSettings, Observed
from tests.identity.real_scheduler import RealScheduler
from twinserve.policies.kv.offload.store import HostStore

LONGEST = 8  # steps of a transfer


@dataclasses.dataclass(frozen=True)
class Tier:
    """As vLLM's `kv_connector_extra_config`; chunks: of host memory."""

    chunks: int
    eviction_policy: str = "lru"
    store_threshold: int = 0
    blocks_per_chunk: int = 1
    offload_prompt_only: bool = False

    def transfer_settings(self, block_bytes: int) -> dict:
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

        page = CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT
        chunk = -(-block_bytes * self.blocks_per_chunk // page) * page
        extra = dataclasses.asdict(self) | {"cpu_bytes_to_use": self.chunks * chunk}
        del extra["chunks"]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


class _Transfers:
    """Jobs by the step that they end with."""

    def __init__(self) -> None:
        self._step = 0
        self._due: dict[int, int] = {}

    def step(self, begun: list[int], flushed: list[int]) -> list[int]:
        """Numbers of the jobs that end with this step, in order."""
        for number in begun:
            rng = np.random.default_rng([26, number])
            self._due[number] = self._step + int(rng.integers(0, LONGEST + 1))
        for number in flushed:
            if number in self._due:  # else it has ended, and the scheduler is to hear of it
                self._due[number] = self._step
        ended = sorted(number for number, due in self._due.items() if due <= self._step)
        for number in ended:
            del self._due[number]
        self._step += 1
        return ended


def _number(request_id: str) -> int:
    return int(request_id.removeprefix("r"))


class OffloadReal(RealScheduler):
    """seen   how often what the comparison is for has happened
    began  of the last step: (number, request, slots on the host, is a store) of its jobs, and
           the numbers of those that it waits for
    """

    def __init__(self, settings: EngineSettings, tier: Tier) -> None:
        self.seen: Counter[str] = Counter()
        self.began: tuple = ()
        self._transfers = _Transfers()
        self._rows: dict[int, tuple[str, bool]] = {}  # jobs under way
        bytes_of_block = 2 * 2 * 32 * 4 * settings.block_tokens  # of build_vllm's tiny Llama
        super().__init__(settings, kv_transfer=tier.transfer_settings(bytes_of_block))
        self.side = self.scheduler.connector.connector_scheduler
        if (chunks := self.side.manager._num_chunks) != tier.chunks:
            raise RuntimeError(f"vLLM has {chunks} chunks, not {tier.chunks}")
        self._order_ended()

    def _order_ended(self) -> None:
        connector = self.scheduler.connector
        build, lookup = connector.build_connector_meta, connector.get_num_new_matched_tokens

        def ordered(output):
            output.finished_req_ids = sorted(output.finished_req_ids, key=_number)
            return build(output)

        def note(request, computed):
            pending = bool(self.side._req_status[request.request_id].transfer_jobs)
            found = lookup(request, computed)
            if found[0] is None:
                self.seen["waits for its own transfers" if pending else "look-up deferred"] += 1
            self.seen["hit in host"] += bool(found[0])
            self.seen["hit in host behind a device hit"] += bool(found[0] and computed)
            return found

        connector.build_connector_meta, connector.get_num_new_matched_tokens = ordered, note

    def withdraw(self, request_id: str) -> None:
        for name, store in self._rows.values():
            if name == request_id:
                self.seen["aborted while storing" if store else "aborted while loading"] += 1
        super().withdraw(request_id)

    def step(self) -> Observed:
        scheduler = self.scheduler
        self.seen["load pending"] += len(scheduler.kv_holding_waiting)
        storing = {name for name, store in self._rows.values() if store}
        seen = super().step()
        self.seen["preempted while storing"] += len(storing & set(seen.preempted))
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        return dataclasses.replace(seen, waiting=waiting)

    def _sampled(self, plan):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        output = super()._sampled(plan)
        meta = plan.kv_connector_metadata
        jobs = [(n, j, False) for n, j in meta.load_jobs.items()]
        jobs += [(n, j, True) for n, j in meta.store_jobs.items()]
        flushed = sorted(meta.jobs_to_flush)
        self.began = (
            [
                (n, j.req_id, tuple((j.dst_spec if store else j.src_spec).block_ids), store)
                for n, j, store in jobs
            ],
            flushed,
        )
        self._rows |= {n: (job.req_id, store) for n, job, store in jobs}
        self.seen["loads"] += len(meta.load_jobs)
        self.seen["stores"] += len(meta.store_jobs)
        self.seen["flushed"] += len(flushed)
        stats = self.side.get_stats()
        if stats is not None:
            self.seen["tier full"] += stats.data.get("counters", stats.data).get(
                "vllm:kv_offload_allocation_failure", 0
            )
        ended = self._transfers.step([n for n, _, _ in jobs], flushed)
        loaded = [name for name, store in map(self._rows.pop, ended) if not store]
        output.kv_connector_output = KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=OffloadingWorkerMetadata(dict.fromkeys(ended, 1)),
        )
        return output


class OffloadOurs(OurScheduler):
    """real: the other side, whose jobs ours must equal."""

    def __init__(self, settings: EngineSettings, tier: Tier, real: OffloadReal, mutation=None):
        from twinserve.policies.kv.offload.ledger import TieredLedger

        self.real = real
        self._transfers = _Transfers()
        self._known: deque[list] = deque([[]] if settings.async_scheduling else [])
        super().__init__(
            settings, policy="vllm_offloading:VllmOffloading", ledger_class=TieredLedger
        )
        store = HostStore(tier.chunks, tier.eviction_policy, tier.store_threshold)
        self.ledger.put_behind(store, tier.blocks_per_chunk, tier.offload_prompt_only)
        self.offload, self.store = self.ledger.offload, store
        self.eviction = store.eviction
        self.core = core = self.stepper.core
        if mutation is not None:
            mutation.apply(self)
        plan = core.plan

        def note(now):
            made = plan(now)
            table, jobs = core.requests, made.offload
            ids = table.ids
            joined = dict(made.admitted) | {
                row: int(table.computed_tokens[row]) for row in made.begun
            }
            self._hits = {ids[r]: joined[r] for r in made.rows.tolist() if r in joined}
            begun = [*jobs.loads, *jobs.stores]
            self._began = (
                [(j.number, ids[j.row], tuple(j.slots), j.store) for j in begun],
                sorted(jobs.flush),
            )
            for job in jobs.loads:
                core.ready_s[job.row] = np.inf
                core.transferring({job.row: np.inf})
            self._under_way = dict(self.offload.jobs)
            return made

        core.plan = note

    def step(self) -> Observed:
        seen = super().step()
        jobs, flushed = self._began
        ended = self._transfers.step([n for n, *_ in jobs], flushed)
        self._known.append([self._under_way[n] for n in ended])
        for job in self._known.popleft():
            self.offload.complete(job)
            if not job.store:
                del self.core.ready_s[job.row]
                self.core.loaded(job.row, job.upto)
        if self._began != self.real.began:
            raise AssertionError(f"jobs: vLLM {self.real.began}, ours {self._began}")
        waiting = len(self.policy.waiting) + len(self.policy.fetching)
        return dataclasses.replace(seen, waiting=waiting, hits=self._hits)


@dataclasses.dataclass(frozen=True)
class TierRegime:
    """size: chunks of the tier, for each device block; 1: as much memory."""

    asynchronous: bool
    tier: Tier
    size: float

    @property
    def name(self) -> str:
        tier, more = self.tier, []
        more += [f"threshold {tier.store_threshold}"] * (tier.store_threshold > 1)
        more += [f"{tier.blocks_per_chunk} blocks a chunk"] * (tier.blocks_per_chunk > 1)
        more += ["prompts only"] * tier.offload_prompt_only
        scheduling = "asynchronous" if self.asynchronous else "synchronous"
        return ", ".join((scheduling, tier.eviction_policy, *more))

    @property
    def phenomena(self) -> tuple[str, ...]:
        own = ("waits for its own transfers",) * self.asynchronous
        late = ("not yet admitted",) * (self.tier.store_threshold > 1)
        return (*PHENOMENA, *own, *late)


TIERS = (
    (Tier(1, "lru"), 1.5),
    (Tier(1, "arc"), 1.5),
    (Tier(1, "lru", store_threshold=2), 0.3),
    (Tier(1, "arc", blocks_per_chunk=3), 1.0),
    (Tier(1, "lru", offload_prompt_only=True), 0.4),
)
TIER_REGIMES = tuple(
    TierRegime(asynchronous, tier, size) for asynchronous in (False, True) for tier, size in TIERS
)
PHENOMENA = (
    "hit in host", "hit in host behind a device hit", "loads", "stores", "load pending",
    "look-up deferred", "flushed", "evicted",
    "preempted while storing", "aborted while storing", "aborted while loading",
)  # fmt: skip
LEAVING = 0.05


def compare_tiers(
    regime: TierRegime, generate: str, seed: int, mutation=None
) -> tuple[Report, Counter]:
    """What happened is counted on vLLM's side, but for what the tier itself admits and gives up.

    mutation  of our side
    """
    scenario = getattr(scenarios, generate)(seed)
    settings = dataclasses.replace(
        scenario.settings, async_scheduling=regime.asynchronous, enable_prefix_caching=True
    )
    chunks = int(regime.size * settings.num_blocks / regime.tier.blocks_per_chunk)
    tier = dataclasses.replace(regime.tier, chunks=max(chunks, 2))
    sides: list = []

    def real(settings):
        sides.append(OffloadReal(settings, tier))
        return sides[0]

    def ours(settings):
        sides.append(OffloadOurs(settings, tier, sides[0], mutation))
        return sides[1]

    report = run_identity(settings, scenario.requests, ours, leaving=LEAVING, make_real=real)
    seen = sides[0].seen
    seen["evicted"] += sides[1].store.counts["evicted"]
    seen["not yet admitted"] += sides[1].store.counts["not yet admitted"]
    seen["tier full"] = sides[1].store.counts["full"]
    return report, seen
