"""Echo's plans that are plain to see are those that its search over plans makes, beside all loads,
on every memory, synchronously or not."""

from contextlib import nullcontext
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.sim.harness import Affine, build, same_rows
from tests.sim.test_mixed_runs import workload_of
from twinserve.policies.base import EngineLimits
from twinserve.policies.echo.plain import PlainPlans

POLICIES = (
    "echo", "echo:slo=gap", "echo-bs-e-s", "echo:kv=paged",
    "echo:length_buckets=false,b_decode=0.3", "echo:patience_s=0.05",
    "echo:slo_aware=false,benefit=offline", "echo:sample_s=0.01,history_s=0.2",
)  # fmt: skip
MODELS = (
    Affine(base=0.006, prefill=2e-4, decode=5e-4, context=1e-5),
    Affine(base=0.01, prefill=7e-4, decode=5e-4, context=2e-6),  # TPOT leaves time for a few tokens
)
# (arrival in hundredths of a second, prompt, output, class, text)
_ONLINE = st.tuples(
    st.integers(0, 60), st.integers(1, 20), st.integers(5, 60), st.just(0), st.just(0)
)
_OFFLINE = st.tuples(
    st.integers(0, 30), st.integers(60, 200), st.integers(1, 12), st.just(1), st.integers(1, 3)
)


@st.composite
def cases(draw):
    """A workload, what `build` is to be told, and whether plans are made ahead."""
    limits = EngineLimits(
        max_num_seqs=draw(st.integers(2, 8)),
        max_num_batched_tokens=draw(st.integers(8, 60)),
        max_model_len=240,
    )
    settings = {
        "limits": limits,
        "model": draw(st.sampled_from(MODELS)),
        "blocks": draw(st.sampled_from([61, 90, 400])),
        "client_timeout": draw(st.sampled_from([None, None, 0.31])),
        "caching": draw(st.booleans()),
    }
    rows = draw(st.lists(_ONLINE, min_size=1, max_size=4))
    rows += draw(st.lists(_OFFLINE, min_size=1, max_size=8))
    return workload_of(rows), settings, draw(st.booleans())


def run(policy: str, workload, settings: dict, ahead: bool, searched: bool):
    """searched: no plan is plain."""
    more = {"block_tokens": 4, "audit": not searched, "asynchronous": ahead}
    search = mock.patch.object(PlainPlans, "plan", lambda *_: None)
    with search if searched else nullcontext():
        return build(workload, policy, **more, **settings).run()


LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=40, max_model_len=240)
SETTINGS = {"limits": LIMITS, "model": MODELS[0], "blocks": 90, "caching": True}
# long documents, three questions on each, beside an online request that decodes
POOL = workload_of([(0, 8, 60, 0, 0), *[(0, 150 + 9 * i, 4, 1, 1 + i % 3) for i in range(9)]])


@pytest.mark.nightly
@pytest.mark.parametrize("policy", mostly_nightly(POLICIES, *POLICIES[:3]))
@examples(60, suppress_health_check=list(HealthCheck))
@example(case=(POOL, SETTINGS, False))
@example(case=(POOL, SETTINGS, True))
@given(case=cases())
def test_the_search_gives_the_same_rows(policy, case):
    plain, searched = (run(policy, *case, searched=searched) for searched in (False, True))
    same_rows(plain.rows, searched.rows)


@pytest.mark.parametrize("ahead", [False, True])
def test_beside_a_pool_most_plans_are_plain(ahead):
    found, plan = [], PlainPlans.plan

    def watched(self, view, ledger):
        made = plan(self, view, ledger)
        found.append(made is not None)
        return made

    tight = SETTINGS | {"model": MODELS[1], "blocks": 400}
    with mock.patch.object(PlainPlans, "plan", watched):
        run("echo:slo=gap", POOL, tight, ahead, searched=False)
    assert sum(found) > len(found) / 2
