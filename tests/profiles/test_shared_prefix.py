"""Attention that reads shared prefixes once: times by hand, never slower, the same where nothing is
shared; runs of it, and who refuses it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from tests.examples import examples
from tests.parameters import SOME_POLICIES, mostly_nightly
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.registry import parse_policy, policy_names
from twinserve.policies.requests import RequestTable
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.echo import EchoModel
from twinserve.profiles.forms.shared_prefix import SharedPrefixModel
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.simulate import headline
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve, resolve_hardware
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.synth import synth
from twinserve.traces.transform import merge

ROOFLINE = load_profile("llama-3.1-8b@a100-40g")
MODELS = {
    "roofline": ROOFLINE.model(),
    "scaled": ROOFLINE.scaled(decode=1.3, host=0.5).model(),
    "operators": load_profile("llama-3.1-8b@rtxpro6000").model(),
    "operators, kernels": load_profile("llama-3.1-8b@h100/operators").model(),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@st.composite
def shared_steps(draw):
    """Up to 200 decodes, groups of them on prefixes of up to 30,000 tokens, and what they share."""
    groups = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30_000)), min_size=1, max_size=5)
    )
    own = draw(st.integers(0, 2000))
    contexts = [prefix + own for count, prefix in groups for _ in range(count)]
    chunk = draw(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 20_000)), max_size=2))
    work = StepComposition(
        len(contexts),
        sum(contexts),
        max(contexts),
        np.array([new for new, _ in chunk], np.int64),
        np.array([resident for _, resident in chunk], np.int64),
    )
    return work, sum((count - 1) * prefix for count, prefix in groups)


@every_model
@given(step=shared_steps(), share=st.floats(0, 1))
@examples(60)
def test_reading_once_is_never_slower_and_more_sharing_never_is(model, step, share):
    work, shared = step
    once = SharedPrefixModel(model)
    assert once.step_seconds(work) == model.step_seconds(work)  # nothing is shared
    once.shared = shared
    seconds = once.step_seconds(work)
    assert 0 < seconds <= model.step_seconds(work)
    if len(work.prefill_new) == 0 and not isinstance(model, type(MODELS["operators"])):
        once.shared = int(share * shared)
        assert seconds <= once.step_seconds(work)


@every_model
@given(step=shared_steps(), steps=st.integers(1, 30))
@examples(40)
def test_a_run_is_its_single_steps(model, step, steps):
    work, shared = step
    n, context, longest = work.decode_requests, work.decode_context, work.decode_context_max
    once = SharedPrefixModel(model)
    once.shared = shared
    run = once.decode_run_seconds(n, context, longest, steps)
    single = [
        once.step_seconds(StepComposition(n, context + n * j, longest + j)) for j in range(steps)
    ]
    assert run.tolist() == single


def test_bytes_saved_by_hand():
    """Eight decodes on a document of 24,000 tokens and 500 of their own: 7 x 24,000 tokens of KV at
    128 KiB a token are not read, at the memory rate that the GPU's family reaches."""
    model, llm = MODELS["roofline"], ROOFLINE.llm
    assert llm.layers * 2 * llm.kv_heads * llm.head_dim * llm.dtype_bytes == 128 * 1024
    saved_bytes = 7 * 24_000 * 128 * 1024
    rate = ROOFLINE.gpu.memory_bytes_per_s * ROOFLINE.step_model.efficiency.kv_mbu
    work = StepComposition(8, 8 * 24_500, 24_500)
    once = SharedPrefixModel(model)
    once.shared = 7 * 24_000
    saved = model.step_seconds(work) - once.step_seconds(work)
    assert saved == pytest.approx(saved_bytes / rate)


def table_of(*prefixes: int) -> RequestTable:
    """A request of 100 tokens for each of `prefixes`, with so many leading blocks of one text."""
    table = RequestTable()
    for i, shared in enumerate(prefixes):
        contents = np.concatenate([np.arange(shared), 100 * (i + 1) + np.arange(6 - shared)])
        table.submit(f"r{i}", prompt_tokens=100, prefix=contents)
    return table


def test_blocks_that_several_decodes_hold_are_counted_once():
    table = table_of(6, 6, 4, 0)
    ledger = PagedLedger(table, 100, 16, shared_contents=1000)
    for row in range(4):
        ledger.begin_step()
        assert ledger.admit(row, 100, hit_tokens=ledger.hit_tokens(row))
    rows = np.arange(4)
    # of 100 tokens 6 whole blocks can be found: row 1 has them all of row 0, row 2 four of them
    assert ledger.shared_tokens(rows) == (6 + 4) * 16
    assert ledger.shared_tokens(rows[[0, 2]]) == 4 * 16 == ledger.shared_tokens(rows[1:])
    assert ledger.shared_tokens(rows[:1]) == ledger.shared_tokens(rows[[0, 3]]) == 0
    ledger.free(1)
    assert ledger.shared_tokens(rows) == 4 * 16  # a row that has left holds nothing
    assert BidirectionalLedger(table, 100, 16).shared_tokens(rows) == 0


# -- runs ------------------------------------------------------------------------------------------
def run_of(policy: str, load, **settings):
    config = SimulationConfig(
        policy=(policy,), profile="llama-3.1-8b@a100-40g", **{**PAPERS_ENGINE, **settings}
    )
    inputs = Inputs(config, load, resolve_hardware(config), (parse_policy(policy),), ())
    return Simulation(inputs, inputs.policies[0])


DOCUMENTS = merge(
    synth("fixed:200,20", rate=2.0, count=10, seed=1),
    longdoc("toolbench", requests=24, documents=2, seed=1),
)


@pytest.mark.parametrize("policy", mostly_nightly(policy_names(), *SOME_POLICIES))
def test_without_shared_text_a_run_is_the_same(policy):
    load = synth("fixed:200,20", rate=20.0, count=12, seed=1)
    plain, once = (run_simulation(run_of(policy, load, shared_prefix=on)) for on in (False, True))
    assert_frame_equal(plain.rows.steps, once.rows.steps, check_exact=True)
    assert_frame_equal(plain.rows.requests, once.rows.requests, check_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm", "echo"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_on_documents_steps_at_once_are_single_steps(policy, asynchronous):
    settings = {"shared_prefix": True, "async_scheduling": asynchronous}
    fast, exact = (
        run_simulation(run_of(policy, DOCUMENTS, exact=on, **settings)).rows for on in (False, True)
    )
    assert_frame_equal(fast.steps, exact.steps, check_exact=True)
    plain = run_simulation(run_of(policy, DOCUMENTS, async_scheduling=asynchronous)).rows
    once, each = (
        rows.requests[rows.requests.service_class == "be"].last_token_s for rows in (fast, plain)
    )
    assert once.max() < each.max() and once.mean() < each.mean()


def test_nobody_counts_blocks_where_it_is_off():
    (engine,) = run_of("vllm", DOCUMENTS).engines
    assert type(engine.backend) is SimulatedBackend


def test_step_times_of_whole_steps_are_refused(tmp_path):
    measured = ROOFLINE.model_copy(update={"step_model": EchoModel.fit(ROOFLINE.model())})
    save_profile(measured, tmp_path / "measured.json")
    config = SimulationConfig(profile=str(tmp_path / "measured.json"), shared_prefix=True)
    with pytest.raises(ProfileError, match=r"--shared-prefix: .* \(echo\) are of whole steps.*--"):
        resolve_hardware(config)
    assert resolve_hardware(config.model_copy(update={"shared_prefix": False}))


def test_latent_attention_is_refused_as_it_multiplies_no_less():
    config = SimulationConfig(profile="deepseek-v3@h200:tp8", shared_prefix=True)
    with pytest.raises(ProfileError, match="--shared-prefix: .* latent attention"):
        resolve_hardware(config)


def test_the_headline_says_so():
    config = SimulationConfig(trace="fixed:50,5", requests=3, rate=5.0)
    plain, once = (
        headline(resolve(config.model_copy(update={"shared_prefix": on}))) for on in (False, True)
    )
    assert (
        once.replace("attention: decodes read a shared prefix once (docs/profiles.md)\n", "")
        == plain
    )
