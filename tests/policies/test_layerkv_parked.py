"""Requests that wait on the host after their first token: how many, and what it is to have none."""

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.layerkv_runs import LayerDesk, simulate
from tests.policies.test_fast_path import workloads


@examples(40, suppress_health_check=list(HealthCheck))
@given(
    case=workloads(),
    most=st.integers(0, 3),
    host=st.sampled_from([6, 40, 200]),
    other=st.sampled_from(["", ",park=false", ",proactive=false", ",slo_aware=false,x=0"]),
)
def test_no_more_requests_have_layers_on_the_host_than_may(case, most, host, other):
    workload, blocks, _ = case
    seen = []

    def watch(plan, core):
        running = core.policy.queues.rows
        seen.append(int((core.ledger.host_layers(running) > 0).sum()))

    policy = f"layerkv:max_parked={most}{other}"
    requests = simulate(workload, policy, blocks, host=host, seen=watch, check=True)[2]
    assert max(seen) <= most
    assert requests.finished.all()


def three_prompts(policy: str) -> LayerDesk:
    """Three prompts of two blocks, of which memory holds two; a layer of eight tokens is 2 s on the
    link, a step takes 1 s."""
    desk = LayerDesk(policy, 4)
    for name in "abc":
        desk.submit(name, 8, 6)
    return desk


def test_one_begins_without_memory_for_it_unless_none_may_be_parked():
    assert set(three_prompts("layerkv:x=0,threshold=0").step().scheduled) == set("abc")
    assert set(three_prompts("layerkv:threshold=0,max_parked=0").step().scheduled) == set("ab")
