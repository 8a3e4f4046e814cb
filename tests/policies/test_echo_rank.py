"""Echo's default choice of offline work, `offline=rank`: who leaves, who is begun, and that nobody
waits for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.echo_runs import BY_HAND, echo_ledgers, estimator_of
from tests.policies.policy_runs import BE, RT, Desk
from twinserve.policies.base import EngineLimits
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=400, kv_bytes_per_token=1
)


@pytest.fixture(autouse=True)
def ledgers():
    with echo_ledgers():
        yield


def desk(policy: str, blocks: int, limits: EngineLimits = LIMITS, estimator=BY_HAND) -> Desk:
    made = Desk(policy, blocks, kind="task-aware", limits=limits, estimator=estimator)
    made.ledger.pool.new_contents(9000)  # of shared texts
    return made


def text(document: int, blocks: int) -> np.ndarray:
    return 20 * document + np.arange(blocks)


def test_a_decode_leaves_for_the_bound_and_comes_back_before_anybody_is_begun():
    """The online pace leaves 0.5 s. Contexts of 20 tokens take 0.42 s, of 300 tokens 0.7 s: the
    long one waits with its memory, and nobody takes its place. It goes on when the online request
    has ended."""
    d = desk("echo:slo=gap", blocks=300)
    d.submit("long", 299, 9, service_class=BE)
    for _ in range(5):
        d.step()
    d.submit("short", 20, 9, service_class=BE)
    d.step()
    d.submit("on", 4, 3, service_class=RT, slo_ttft_s=9.0, slo_tpot_s=0.5)
    d.step()
    d.submit("new", 20, 9, service_class=BE)
    assert d.scheduled(2) == [{"on": 1, "short": 1}] * 2
    assert d.held("long") and not d.held("new") and not d.preempted()
    assert d.scheduled(1) == [{"short": 1, "long": 1, "new": 20}]


models = st.builds(
    lambda token, base, decode, pair: BrosLinearModel(
        PhaseCost(token, 0.0, base), PhaseCost(decode, pair, base)
    ),
    token=st.sampled_from([1e-4, 1e-3]),
    base=st.sampled_from([0.0, 0.01]),
    decode=st.sampled_from([1e-4, 1e-2]),
    pair=st.sampled_from([0.0, 1e-6, 1e-4]),
)
loads = st.lists(
    st.tuples(
        st.integers(0, 4),  # document; 4: none
        st.integers(1, 90),  # prompt tokens, of a question behind 40 of its document
        st.integers(1, 12),  # output
    ),
    min_size=1,
    max_size=8,
)


@examples(40)
@given(
    model=models,
    load=loads,
    blocks=st.sampled_from([40, 60, 200]),
    tokens=st.sampled_from([20, 40]),
    online=st.booleans(),
    policy=st.sampled_from(["echo", "echo:slo=gap", "echo-bs-e-s", "echo:benefit=offline"]),
)
def test_no_offline_request_waits_for_ever(model, load, blocks, tokens, online, policy):
    """Though others come in every step, on one cached document, and an online request decodes for
    ever. Its pace leaves time for any one offline request beside it."""
    limits = EngineLimits(
        max_num_seqs=6, max_num_batched_tokens=tokens, max_model_len=5000, kv_bytes_per_token=1
    )
    joint = "," if ":" in policy else ":"
    d = desk(f"{policy}{joint}patience_s=5", blocks + 100, limits, estimator_of(model))
    if online:
        d.submit("on", 3, 300, service_class=RT, slo_ttft_s=1.5, slo_tpot_s=1.2)
    mine = []
    for i, (document, prompt, output) in enumerate(load):
        prefix = None if document == 4 else text(document, 10)
        mine.append(d.submit(f"r{i}", 40 + prompt, output, service_class=BE, prefix=prefix))
    for i in range(280):
        hot = {"prefix": text(9, 10), "arrival_s": float(i)}
        d.submit(f"hot{i}", 44, 6, service_class=BE, **hot)
        d.step()
        if all(d.table.state[row] == 3 for row in mine):
            return
    raise AssertionError("somebody waits")
