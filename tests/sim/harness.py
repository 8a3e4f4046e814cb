"""Small simulations for the tests: one call assembles clock, replicas and source, and an auditor
beside every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import pandas as pd

from twinserve.backends.links import PcieLink, evenly
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.base import EngineLimits, Policy
from twinserve.policies.parts.estimators import LinearEstimator
from twinserve.policies.plan import KvMove, Preemption, StepOutcome, StepPlan
from twinserve.policies.registry import ledger_class, parse_policy, policy_names
from twinserve.policies.requests import RequestTable
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel, SwapTimeModel
from twinserve.profiles.front_end import NO_DELAYS, Delays
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.prefix_index import shared_contents
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.rows import fleet_rows
from twinserve.sim.fleet.source import RequestSource
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.recorder import StepRecorder
from twinserve.sim.setup.audit import Auditor
from twinserve.traces.workload import BestEffortPool, PrefixBlocks, Workload

ROW_TABLES = ("requests", "steps", "gaps")
# TGI sets memory aside for all that a request may generate: with little of that, memory is fought
# for here too.
CROWDED = {"tgi": "tgi:max_new_tokens=12"}
POLICIES = [
    *(CROWDED.get(name, name) for name in policy_names()),
    "vllm:scheduling=priority",
    "bros:kv=paged",
    "bros:chunk=64",
]


@dataclass(frozen=True)
class Affine(StepTimeModel):
    """Step seconds: base + prefill * new prompt tokens + decode * decoding requests + context *
    resident tokens."""

    base: float = 0.004
    prefill: float = 2e-5
    decode: float = 1e-4
    context: float = 1e-7

    def step_seconds(self, work) -> float:
        return float(
            self._seconds(work.decode_requests, work.decode_context, int(work.prefill_new.sum()))
        )

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        return self._seconds(n, context + n * np.arange(steps), 0)

    def _seconds(self, n, context, new):
        return self.base + self.prefill * new + self.decode * n + self.context * context


@lru_cache
def estimator_of(model) -> LinearEstimator:
    return LinearEstimator(BrosLinearModel.fit(model), SwapTimeModel(1 / 25e9))


@dataclass
class Decision:
    """One plan as the auditor saw it, in request ids. `seen`: rows in the table then."""

    now: float
    grants: tuple[tuple[str, int], ...]
    preempted: tuple[tuple[str, str], ...]
    seen: int


class Toy(Policy):
    """Admits everything and runs it; `script`: number of a plan -> transfers that it starts.

    Rows with a transfer under way are left out.
    """

    name = "toy"
    script: Mapping[int, list[KvMove]] = MappingProxyType({})

    def setup(self):
        self.new, self.rows, self.plans = [], [], 0

    def on_arrival(self, row, requests):
        self.new.append(row)

    def on_finish(self, row):
        self.rows.remove(row)

    def plan(self, view, ledger):
        ledger.begin_step()
        requests, plan = view.requests, StepPlan()
        for row in self.new:
            assert ledger.admit(row, int(requests.prompt_tokens[row]))
            plan.admitted.append((row, 0))
        self.rows += self.new
        self.new = []
        plan.moves = list(self.script.get(self.plans, ()))
        ready = [r for r in self.rows if r not in view.ready_s]
        rows = np.array(ready, np.int64)
        tokens = requests.known_tokens(rows) - requests.computed_tokens[rows]
        if len(rows):
            assert ledger.grow_all(rows, requests.computed_tokens[rows] + tokens)
        plan.rows, plan.tokens = rows, tokens
        self.plans += 1
        return plan


class Audit(Auditor):
    """Also: what an engine promises (time, seats, tokens), and sums of what rows do not show."""

    def __init__(self, engine: Engine, limits: EngineLimits, recount: bool = True) -> None:
        super().__init__(engine.core, recount=recount)
        self.engine, self.limits = engine, limits
        self.decisions: list[Decision] = []
        self.dropped_tokens = 0  # computed, then thrown away by preemptions
        self.hit_tokens = 0
        self.granted_tokens = 0

    def plan(self, now: float) -> StepPlan:
        requests = self.core.requests
        assert (requests.arrival_s <= now).all(), "a request is in the table before it arrived"
        computed = requests.computed_tokens.copy()
        plan = super().plan(now)
        rows, tokens, ids = plan.rows, plan.tokens, requests.ids
        assert len(rows) <= self.limits.max_num_seqs
        assert self.within_tokens(tokens), "a step beyond the token budget"
        self.decisions.append(
            Decision(
                now,
                tuple((ids[r], int(t)) for r, t in zip(rows, tokens, strict=True)),
                tuple((ids[r], kind.value) for r, kind in plan.preempted),
                len(requests),
            )
        )
        self.dropped_tokens += sum(
            int(computed[r]) for r, kind in plan.preempted if kind is Preemption.RECOMPUTE
        )
        self.hit_tokens += sum(hit for _, hit in plan.admitted)
        return plan

    def within_tokens(self, tokens: np.ndarray) -> bool:
        """What docs/invariants.md, 6, says of max_num_batched_tokens, policy by policy."""
        policy, budget, total = (
            self.core.policy,
            self.limits.max_num_batched_tokens,
            int(tokens.sum()),
        )
        if policy.name == "vllm" or policy.name.startswith("echo"):
            return total <= budget
        if policy.name in ("vllm-v0", "layerkv"):
            return total <= policy.token_budget
        if policy.name in ("sarathi", "conserve"):
            # of sarathi's own limits: chunk_size
            return total <= policy.limits.max_num_batched_tokens
        if policy.name == "tgi":
            return total <= policy.prefill_budget + self.core.ledger.block_tokens
        if policy.name in ("preemptive-wait", "mlfq"):
            return total <= budget or len(tokens) == 1
        if policy.name == "bros":
            return total - int(tokens.max(initial=0)) <= budget
        return True

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        assert (np.diff(outcome.ends_s) > 0).all() and outcome.ends_s[0] > outcome.start_s
        self.granted_tokens += int(plan.tokens.sum()) * len(outcome.ends_s)
        gaps = super().complete(plan, outcome)
        assert not self.core.requests.in_flight.any(), "something is ahead of its time"
        return gaps


@dataclass
class Small:
    """An assembled simulation. After `run()`: rows of all replicas in `rows`."""

    clock: Clock
    engines: list[Engine]
    source: RequestSource
    audits: list[Audit] = field(default_factory=list)
    spares: list[Replica] = field(default_factory=list)
    front_end: Delays | None = None

    def run(self, until: float | None = None) -> Small:
        self.clock.run(until)
        return self

    @property
    def rows(self) -> RunRows:
        between = None if self.front_end is None else self.source.between
        return fleet_rows(self.source.fleet, self.source.group_names, front_end=between)

    @property
    def requests(self) -> pd.DataFrame:
        return self.rows.requests

    @property
    def steps(self) -> pd.DataFrame:
        return self.rows.steps


def build(
    workload: Workload,
    policy: str | type[Policy] = "vllm",
    *,
    model=None,
    limits: EngineLimits | None = None,
    blocks: int = 512,
    block_tokens: int = 16,
    host_blocks: int = 0,
    replicas: int = 1,
    fast: bool = True,
    asynchronous: bool = False,
    bytes_per_s: float = 25e9,
    layers: int = 1,
    overhead: float | None = 0.0,
    caching: bool | None = None,
    audit: bool = True,
    recount: bool = True,
    estimator: bool = True,
    allreduces=None,
    router: Router | None = None,
    migrates: bool = False,
    spares: int = 0,
    client_timeout: float | None = None,
    front_end: Delays | None = None,
) -> Small:
    """policy: as on the command line ("bros:kv=paged"), or a Policy class for a toy. estimator: fit
    one to the model. allreduces: seconds of a step's all-reduces on the link, by its
    composition. spares: of the replicas, that are not in the fleet yet."""
    model = model or Affine()
    limits = limits or EngineLimits(max_num_seqs=16, max_num_batched_tokens=2048)
    clock, engines, audits = Clock(), [], []
    for replica in range(replicas):
        requests = RequestTable()
        kv = None
        if isinstance(policy, str):
            spec = parse_policy(policy)
            kv = spec.kv
            one = spec.build(limits, estimator_of(model) if estimator else None)
        else:
            one = policy(limits)
        kv = kv or one.default_kv
        cached = one.prefix_caching if caching is None else caching
        options = {}
        if ledger_class(kv).caches_prefixes:
            options = {
                "prefix_caching": cached,
                "shared_contents": shared_contents(workload, block_tokens),
            }
        ledger = ledger_class(kv)(requests, blocks, block_tokens, host_blocks, **options)
        link = PcieLink(bytes_per_s, sharing=one.traits.link_sharing or evenly)
        backend = SimulatedBackend(requests, model, link, limits, layers, fast, allreduces)
        core = EngineCore(requests, one, ledger, asynchronous)
        engines.append(
            Engine(clock, core, backend, StepRecorder(replica), decision_overhead=overhead)
        )
        if audit:
            audits.append(Audit(engines[-1], limits, recount))
    made = [Replica(engine, model=model) for engine in engines]
    fleet = Fleet(clock, made[: replicas - spares], router, migrates)
    between = front_end or NO_DELAYS
    source = RequestSource(
        clock, workload, fleet, client_timeout_s=client_timeout, front_end=between
    )
    return Small(clock, engines, source, audits, made[replicas - spares :], front_end)


def simulate(workload: Workload, policy="vllm", **settings) -> Small:
    return build(workload, policy, **settings).run()


def same_rows(a: RunRows, b: RunRows) -> None:
    """Equal to the last bit, and in the same order."""
    for name in ROW_TABLES:
        pd.testing.assert_frame_equal(
            getattr(a, name), getattr(b, name), check_exact=True, obj=name
        )


def hybrid(
    seed: int = 0,
    n: int = 60,
    rate: float = 30.0,
    sessions: int = 4,
    applications: int = 2,
    prefix_block: int | None = 32,
    pool: int = 0,
    be_share: float = 0.3,
    until_s: float | None = 1.5,
) -> Workload:
    """Everything a trace can have: both classes, objectives, sessions with delays, applications
    with several rows a stage, shared prefixes, a closed-loop pool."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    group, stage, delay = [-1] * n, [0] * n, [0.0] * n
    for g in range(sessions):
        group[g] = g
        for turn in range(1, 4):
            group.append(g), stage.append(turn), delay.append(float(rng.choice([0.0, 0.05, 0.4])))
    for a in range(applications):
        g = sessions + a
        group[sessions + a] = g
        for depth, width in ((1, 3), (2, 2), (3, 1)):
            for _ in range(width):
                group.append(g), stage.append(depth), delay.append(0.0)
    total = len(group)
    prompt = rng.integers(8, 400, total)
    output = rng.integers(1, 60, total)
    rt = rng.random(total) >= be_share
    workload = Workload.build(
        np.concatenate([arrival, np.full(total - n, np.nan)]),
        prompt,
        output,
        service_class=np.where(rt, 0, 1).astype(np.int8),
        priority=rng.integers(0, 3, total),
        slo_ttft_s=np.where(rt, 0.4, np.nan),
        slo_tpot_s=np.where(rt, 0.05, np.nan),
        group=np.array(group),
        stage=np.array(stage),
        delay_s=np.array(delay),
        group_names=[f"s{i}" for i in range(sessions)] + [f"app{i}" for i in range(applications)],
        prefix=prefixes(rng, prompt, prefix_block) if prefix_block else None,
        pool=BestEffortPool(pool, (50, 200), (5, 40), seed, until_s) if pool else None,
    )
    return workload


def prefixes(rng: np.random.Generator, prompt: np.ndarray, block: int) -> PrefixBlocks:
    """A few documents; every prompt starts with some blocks of one of them, the rest is its own."""
    counts = -(-prompt // block)
    names, own = [], 1_000_000
    for count in counts.tolist():
        document, shared = int(rng.integers(3)), int(rng.integers(0, count + 1))
        # the last block may be part of a block, and so is nobody else's
        shared = min(shared, count - 1)
        names += [1000 * document + i for i in range(shared)]
        names += range(own, own + count - shared)
        own += count - shared
    ids = np.unique(np.array(names), return_inverse=True)[1]
    return PrefixBlocks(ids.astype(np.int64), np.concatenate([[0], np.cumsum(counts)]), block)


def of_rows(summary: dict) -> dict:
    """What rows alone say of a run: they do not know how wrong its step times may be."""
    assert summary["step_times"]
    return {name: value for name, value in summary.items() if name != "step_times"}
