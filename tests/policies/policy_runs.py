"""Small runs of policies: without a clock for worked examples, with one for comparing paths."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from tests.moves import way
from tests.sim.stepper import SteppedPlan, Stepper, granted
from twinserve.backends.links import PcieLink
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.base import EngineLimits
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.parts.estimators import LinearEstimator
from twinserve.policies.plan import StepPlan
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.prefix_index import shared_contents
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.fleet.source import RequestSource
from twinserve.sim.results.recorder import StepRecorder, request_columns
from twinserve.sim.results.steps import RecordedGaps, RecordedSteps
from twinserve.traces.workload import BestEffortPool, PrefixBlocks, Workload

RT, BE = 0, 1

# 1 ms a prompt token, 10 ms a decode, nothing else: worked examples can be added up by hand.
BY_HAND = LinearEstimator(
    BrosLinearModel(PhaseCost(0.001, 0.0, 0.0), PhaseCost(0.010, 0.0, 0.0)),
    SwapTimeModel(seconds_per_byte=1e-3),
)


def ledger_of(
    kind: str, table: RequestTable, blocks: int, size: int, host: int = 0, shared: int = 0
):
    """kind: paged, cached (paged with prefix caching) or bidirectional."""
    if kind == "bidirectional":
        return BidirectionalLedger(table, blocks, size, host)
    cached = kind == "cached"
    return PagedLedger(table, blocks, size, host, prefix_caching=cached, shared_contents=shared)


class Desk:
    """A stepper whose ledger is checked after every step. Blocks of four tokens."""

    def __init__(
        self,
        policy: str,
        blocks: int,
        *,
        kind: str = "paged",
        host: int = 0,
        limits: EngineLimits | None = None,
        estimator=BY_HAND,
    ) -> None:
        self.table = RequestTable()
        self.ledger = self._ledger(kind, blocks, host)
        limits = limits or EngineLimits(max_num_seqs=8, max_model_len=64, kv_bytes_per_token=1)
        self.policy = parse_policy(policy).build(limits, estimator)
        self.stepper = Stepper(self.table, self.policy, self.ledger)
        self.plan: StepPlan | None = None  # the last one
        decide = self.policy.plan

        def plan(view, ledger):
            self.plan = decide(view, ledger)
            return self.plan

        self.policy.plan = plan

    def _ledger(self, kind: str, blocks: int, host: int):
        return ledger_of(kind, self.table, blocks, 4, host)

    def submit(self, name: str, prompt: int, output: int, **values) -> int:
        return self.stepper.submit(name, prompt, output, **values)

    def step(self) -> SteppedPlan:
        seen = self.stepper.step()
        self.ledger.check()
        return seen

    def arriving(self, requests: Sequence[tuple[int, int, int]], steps: int) -> Iterator[None]:
        """Submits `requests` (prompt, output, step of arrival) as r0, r1, ... and hands over before
        each step that has work; whoever iterates takes the step. All of them end within `steps`."""
        later = sorted(enumerate(requests), key=lambda item: item[1][2])
        for step in range(steps):
            while later and later[0][1][2] <= step:
                number, (prompt, output, _) = later.pop(0)
                self.submit(f"r{number}", prompt, output)
            if self.stepper.core.active:
                yield
            elif not later:
                break
        assert not self.stepper.core.active and not later

    def scheduled(self, steps: int) -> list[dict[str, int]]:
        return [self.step().scheduled for _ in range(steps)]

    def granted(self) -> dict[str, int]:
        """{name: tokens} of the last plan, in order."""
        return granted(self.plan, self.table.ids)

    def preempted(self) -> list[tuple[str, str]]:
        """(name, kind) of the last plan, in order."""
        return [(self.table.ids[row], kind.value) for row, kind in self.plan.preempted]

    def moves(self) -> list[tuple[str, str, int, str]]:
        """(name, direction, tokens, who waits) of the last plan."""
        names = self.table.ids
        return [(names[m.row], way(m), m.tokens, m.hold.value) for m in self.plan.moves]

    def held(self, name: str) -> int:
        return self.ledger.held_blocks(self.table.ids.index(name))


# The clock carries on where a step ended, so arrivals on a coarse grid fall between and onto steps.
_REQUESTS = st.tuples(
    st.integers(0, 40),  # arrival, in hundredths of a second
    st.integers(1, 20),  # prompt tokens
    st.integers(1, 28),  # output tokens
    st.booleans(),  # best effort
    st.integers(0, 2),  # priority
    st.integers(0, 2),  # whose text its prompt starts with
)


@st.composite
def crowds(draw, ttft_s: Sequence[float], tpot_s: Sequence[float]) -> Workload:
    """Up to seven requests of both classes, each of up to 48 tokens, perhaps a pool; objectives in
    seconds, one of each for all."""
    rows = sorted(draw(st.lists(_REQUESTS, min_size=1, max_size=7)))
    arrival, prompt, output, effort, priority, text = (np.array(c) for c in zip(*rows, strict=True))
    blocks = -(-prompt // 4)
    ids = np.concatenate([6 * t + np.arange(n) for t, n in zip(text, blocks, strict=True)])
    pool = None
    if draw(st.booleans()):
        pool = BestEffortPool(draw(st.integers(1, 3)), (4, 16), (2, 12), until_s=0.3)
    real_time = effort == 0
    return Workload.build(
        arrival / 100,
        prompt,
        output,
        service_class=effort.astype(np.int8),
        priority=priority.astype(np.int64),
        slo_ttft_s=np.where(real_time, draw(st.sampled_from(ttft_s)), np.nan),
        slo_tpot_s=np.where(real_time, draw(st.sampled_from(tpot_s)), np.nan),
        prefix=PrefixBlocks(ids.astype(np.int64), np.cumsum([0, *blocks]), 4),
        pool=pool,
    )


MODEL = BrosLinearModel(PhaseCost(2e-4, 1e-8, 1e-3), PhaseCost(5e-5, 3e-7, 2e-3))


def simulate(
    workload,
    policy: str,
    kind: str,
    blocks: int,
    *,
    size: int = 4,
    host: int = 0,
    limits: EngineLimits | None = None,
    fast: bool = True,
    check: bool = False,
):
    """Run to the end. Returns steps, gaps and requests as frames, and the engine."""
    limits = limits or EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    table = RequestTable()
    ledger = ledger_of(kind, table, blocks, size, host, shared_contents(workload, size))
    estimator = LinearEstimator(MODEL, SwapTimeModel(seconds_per_byte=1e-9))
    core = EngineCore(table, parse_policy(policy).build(limits, estimator), ledger)
    if check:
        watch(core)
    return run_core(workload, core, MODEL, PcieLink(5e9), limits, fast=fast)


def run_core(workload: Workload, core: EngineCore, model, link: PcieLink, limits, **backend):
    """Run an engine by itself to the end. Returns steps, gaps and requests as frames, and the
    engine. backend: further arguments of SimulatedBackend."""
    clock, recorder, table = Clock(), StepRecorder(), core.requests
    engine = Engine(clock, core, SimulatedBackend(table, model, link, limits, **backend), recorder)
    source = RequestSource(clock, workload, Fleet(clock, [Replica(engine)]))
    clock.run()
    gaps = RecordedGaps([recorder.gap_pools()]).frame()
    requests = request_columns(table, 0, source.group_names).frame()
    return RecordedSteps([recorder]).frame(), gaps, requests, engine


def watch(core: EngineCore, seen: Callable[[StepPlan, EngineCore], None] | None = None) -> None:
    """The ledger adds up around each step, and every grant of a plan has its memory. seen: is
    given every plan."""
    decide, complete, ledger, table = core.plan, core.complete, core.ledger, core.requests

    def plan(now: float) -> StepPlan:
        made = decide(now)
        ledger.check()
        rows = made.rows
        assert len(np.unique(rows)) == len(rows) and (made.tokens > 0).all()
        assert not ledger.missing_tokens(rows).any(), "a row runs without all of its memory"
        room = ledger.slack_tokens(rows) >= made.tokens
        assert room.all(), f"rows {rows[~room]} were granted tokens without memory"
        assert not np.isin(rows, [row for row, _ in made.preempted]).any()
        assert (table.state[rows] == 1).all()
        if seen is not None:
            seen(made, core)
        return made

    def completed(made: StepPlan, outcome) -> np.ndarray:
        gaps = complete(made, outcome)
        ledger.check()
        return gaps

    core.plan, core.complete = plan, completed
