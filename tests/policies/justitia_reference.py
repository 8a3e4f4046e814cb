"""GPS by itself, for the tests of Justitia: rates and events in fractions, no virtual time. And
small runs in which an iteration takes one second."""

from fractions import Fraction

from tests.policies.policy_runs import ledger_of, run_core
from tests.sim.harness import Affine
from twinserve.backends.links import PcieLink
from twinserve.policies.base import EngineLimits
from twinserve.policies.parts.predictors import Predictor
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.sim.engine.core import EngineCore
from twinserve.traces.apps.classes import Sample
from twinserve.traces.apps.generate import from_samples
from twinserve.traces.apps.truth import TrueDemand


def gps(arrivals, demands, capacity) -> list[Fraction]:
    """When each application ends if all that are active are served at the same rate, `capacity`
    together."""
    left = {i: Fraction(d) for i, d in enumerate(demands)}
    active, ends, now = set(), {}, Fraction(0)
    coming = sorted(range(len(arrivals)), key=lambda i: arrivals[i])
    while len(ends) < len(left):
        until = Fraction(arrivals[coming[0]]) if coming else None
        if active:
            least = min(left[i] for i in active)
            end = now + least * len(active) / Fraction(capacity)
            until = end if until is None else min(until, end)
            served = (until - now) * Fraction(capacity) / len(active)
            for i in active:
                left[i] -= served
        now = until
        for i in sorted(active):
            if left[i] == 0:
                ends[i] = now
                active.discard(i)
        while coming and arrivals[coming[0]] <= now:
            active.add(coming.pop(0))
    return [ends[i] for i in range(len(ends))]


ONE_SECOND = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)  # whatever is in a step


class BlockTruth(Predictor):
    """An oracle that charges what requests really hold: their blocks, from the first iteration to
    the last."""

    def __init__(self, options, demands: list[int]) -> None:
        super().__init__(options)
        self.demands = demands

    def application(self, application, cost):
        return self.demands[application.group]


def app(stages, kind: str = "X") -> Sample:
    """An application of (prompt, output) pairs, stage by stage."""
    return Sample(kind, "", tuple(tuple(stage) for stage in stages))


def run(
    policy,
    arrivals,
    samples,
    blocks,
    *,
    size=4,
    host=0,
    seats=10_000,
    demands=None,
    fast=True,
    kind="paged",
    watched=None,
):
    """Applications of given stages, to the end. Returns when each application ended (seconds:
    iterations), the requests, the engine. The policy is told the truth; with `demands`, these are
    what it predicts of applications. watched: called with its core before it begins."""
    workload = from_samples(arrivals, samples)
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    limits = EngineLimits(max_num_seqs=seats, max_num_batched_tokens=100_000, max_model_len=longest)
    table = RequestTable()
    ledger = ledger_of(kind, table, blocks, size, host)
    one = parse_policy(policy).build(limits)
    if demands is not None:
        one.predictor = BlockTruth(one.options, demands)
    elif one.predictor is not None:
        one.predictor.truth = TrueDemand(workload)
    core = EngineCore(table, one, ledger)
    if watched is not None:
        watched(core)
    _, _, requests, engine = run_core(workload, core, ONE_SECOND, PcieLink(1e15), limits, fast=fast)
    ends = requests.groupby("group").last_token_s.max()
    return [float(ends[name]) for name in workload.group_names], requests, engine
