"""What each rung of Echo's ladder adds, in whole runs of a small hybrid load: the paper's
directions, not its numbers."""

import numpy as np
import pytest

from tests.policies.echo_runs import BY_HAND, LADDER, echo_ledgers, ledger_of
from tests.policies.policy_runs import simulate
from tests.sim.stepper import Stepper
from twinserve.policies.base import EngineLimits
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.traces.workload import PrefixBlocks, Workload

LIMITS = EngineLimits(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=400)
BLOCKS = 140


def hybrid(seed: int) -> Workload:
    """40 online requests that come in bursts, and 40 questions on eight documents of 200 tokens,
    shuffled, at time 0."""
    rng = np.random.default_rng(seed)
    bursts = np.sort(rng.uniform(0.2, 4.0, 8))
    online = np.sort(np.repeat(bursts, 5) + rng.exponential(0.01, 40))
    of = rng.permutation(np.repeat(np.arange(8), 5))
    prompt = np.concatenate([rng.integers(30, 90, 40), 200 + rng.integers(5, 15, 40)])
    output = np.concatenate([rng.integers(10, 30, 40), rng.integers(30, 80, 40)])
    blocks = -(-prompt // 4)
    names, own = [], 1000
    for i, n in enumerate(blocks.tolist()):
        shared = [100 * of[i - 40] + j for j in range(50)] if i >= 40 else []
        names += [*shared, *range(own, own + n - len(shared))]
        own += n
    ids = np.unique(np.array(names), return_inverse=True)[1].astype(np.int64)
    order = np.argsort(np.concatenate([online, np.zeros(40)]), kind="stable")
    offsets = np.cumsum([0, *blocks])
    ordered = [ids[offsets[i] : offsets[i + 1]] for i in order]
    service_class = np.repeat([0, 1], 40).astype(np.int8)[order]
    return Workload.build(
        np.concatenate([online, np.zeros(40)])[order],
        prompt[order],
        output[order],
        service_class=service_class,
        slo_ttft_s=np.where(service_class == 0, 0.15, np.nan),
        slo_tpot_s=np.where(service_class == 0, 0.012, np.nan),
        prefix=PrefixBlocks(np.concatenate(ordered), np.cumsum([0, *map(len, ordered)]), 4),
    )


def measure(policy: str, seeds: int) -> dict[str, float]:
    """Means over the seeds."""
    found = []
    kind = {"echo-bs": "cached", "echo-bs-e": "cached", "echo-bs-e-s": "paged-rc"}.get(
        policy.split(":")[0], "task-aware"
    )
    with echo_ledgers():
        for seed in range(seeds):
            _, gaps, ended, engine = simulate(hybrid(seed), policy, kind, BLOCKS, limits=LIMITS)
            online = ended[ended.service_class == "rt"]
            offline = ended[ended.service_class == "be"]
            found.append(
                {
                    "late tokens": online.late_tokens.sum() / online.output_tokens.sum(),
                    "slowest first token": (online.first_token_s - online.arrival_s).max(),
                    "hits": offline.hit_tokens.sum() / offline.prompt_tokens.sum(),
                    "offline ends": offline.last_token_s.max(),
                    "preempted": offline.recomputes.sum(),
                    "evicted": engine.core.ledger.pool.evicted,
                }
            )
    return {name: float(np.mean([run[name] for run in found])) for name in found[0]}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, float]]:
    # Under the paper's SLO_r a request that got its first token early may be slow later: no token
    # is late for it, though gaps exceed TPOT. What is measured here are gaps, so deadlines are too.
    names = [name if name == "echo-bs" else f"{name}:slo=gap" for name in LADDER]
    found = {name.split(":")[0]: measure(name, 3) for name in names}
    return {**found, "no threshold": measure("echo:slo=gap,threshold=false", 3)}


def check_the_estimator(bs: dict[str, float], e: dict[str, float]) -> None:
    assert bs["late tokens"] > 0.05 and e["late tokens"] < 0.01
    assert e["offline ends"] > bs["offline ends"]


def test_the_estimator_keeps_the_online_pace_of_one_load():
    check_the_estimator(measure("echo-bs", 1), measure("echo-bs-e:slo=gap", 1))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_estimator_keeps_the_online_pace_and_costs_a_little(runs):
    check_the_estimator(runs["echo-bs"], runs["echo-bs-e"])


@pytest.mark.slow
def test_the_scheduler_finds_shared_text(runs):
    e, s = runs["echo-bs-e"], runs["echo-bs-e-s"]
    assert s["hits"] > 2 * e["hits"]
    assert s["offline ends"] < 0.95 * e["offline ends"]
    assert s["late tokens"] < 0.01
    # 32 of 40 questions can find their document, 50 of its 52 or 53 blocks
    assert s["hits"] < 0.8


@pytest.mark.slow
def test_the_manager_keeps_what_is_wanted_and_preempts_less(runs):
    s, echo = runs["echo-bs-e-s"], runs["echo"]
    assert echo["evicted"] < s["evicted"]
    assert echo["preempted"] < 0.8 * s["preempted"]
    assert echo["preempted"] < runs["no threshold"]["preempted"]
    assert echo["late tokens"] < 0.01


@pytest.mark.slow
def test_nobody_is_late_with_the_first_token(runs):
    assert max(run["slowest first token"] for run in runs.values()) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["echo", "echo-bs-e-s"])
def test_a_plan_does_not_look_at_the_whole_pool(policy):
    """Cache look-ups a plan, once the queue has been taken in: as many for 400 queued requests as
    for 1,500."""
    few, many = _lookups(policy, 400), _lookups(policy, 1500)
    assert 0 < few == many < 20


def _lookups(policy: str, n: int) -> float:
    table = RequestTable()
    ledger = ledger_of("task-aware", table, 400, 4, shared=100_000)
    stepper = Stepper(table, parse_policy(policy).build(LIMITS, BY_HAND), ledger)
    for i in range(n):
        document = i % (n // 10)
        prefix = np.append(60 * document + np.arange(50), 60 * document + 50 + i // (n // 10))
        stepper.submit(str(i), 205, 3, service_class=1, prefix=prefix)
    for _ in range(3):
        stepper.step()
    counted = 0
    hit_tokens = ledger.hit_tokens

    def counting(row: int) -> int:
        nonlocal counted
        counted += 1
        return hit_tokens(row)

    ledger.hit_tokens = counting
    for _ in range(40):
        stepper.step()
        ledger.check()
    return counted / 40
