"""Pipeline stages: policy `vllm` behind as many batches as there are stages takes the decisions of
vLLM's `Scheduler` behind a batch queue of that size."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.mutations import Mutation, mutations
from tests.identity.ours import OurScheduler
from tests.identity.real_scheduler import RealScheduler
from tests.parameters import mostly_nightly
from twinserve.profiles.ranks import layers_of_stages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.live,
    pytest.mark.usefixtures("vllm"),
    pytest.mark.usefixtures("newest"),
]


def short_outputs(seed: int) -> scenarios.Scenario:
    """Many requests end with their first tokens, in little memory: victims with the last token on
    its way."""
    settings = scenarios.EngineSettings(
        num_blocks=60,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=600,
        reserve_full_isl=False,
        policy="priority",
    )
    rng = np.random.default_rng([9, seed])
    return scenarios._build(
        "short outputs", rng, settings, 900, (10, 120), (1, 40), per_step=0.4, levels=3
    )


# (generator of scenarios, seed, stages, share of the steps before which a client leaves)
RUNS = [
    ("preemption", 1, 2, 0.0),
    ("preemption", 3, 4, 0.0),
    ("partial_chunks", 5, 4, 0.0),
    ("partial_chunks", 3, 2, 0.05),
    ("priority", 3, 3, 0.0),
    ("mixed", 3, 2, 0.05),
    ("mixed", 4, 4, 0.0),
    ("short_outputs", 0, 3, 0.0),
]


def compare(
    generate: str,
    seed: int,
    stages: int,
    leaving=0.0,
    make=OurScheduler,
    asynchronous=False,
    **more,
):
    scenario = (getattr(scenarios, generate, None) or short_outputs)(seed)
    settings = dataclasses.replace(
        scenario.settings, pipeline_stages=stages, async_scheduling=asynchronous
    )
    return run_identity(settings, scenario.requests, make, leaving=leaving, **more)


@pytest.mark.parametrize(
    "asynchronous", mostly_nightly([False, True], True), ids=["synchronous", "asynchronous"]
)
def test_decisions_are_vllms_with_several_batches_under_way(asynchronous):
    total = Report()
    for run in RUNS:
        report = compare(*run, asynchronous=asynchronous, max_steps=2_500)
        assert report.mismatches == 0, f"{run}: {report.first_mismatch}"
        total += report
    assert total.steps > 15_000
    # and what is new with stages has happened
    assert total.drained_preemptions > 30 and total.ended_victims > 0
    assert total.partial_chunks > 300 and total.resumed_hit_tokens > 0
    assert total.withdrawn_running > 20


def test_an_engine_without_stages_decides_otherwise():
    def plain(settings):
        return OurScheduler(dataclasses.replace(settings, pipeline_stages=1))

    assert compare("preemption", 3, 2, make=plain).mismatches == 1


def test_layers_lie_where_vllm_puts_them():
    from vllm.distributed.utils import get_pp_indices

    for pp in range(1, 9):
        for layers in range(pp, 101, 3):
            bounds = [get_pp_indices(layers, rank, pp) for rank in range(pp)]
            assert layers_of_stages(layers, pp) == [end - start for start, end in bounds]


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", mutations("pipeline"), ids=lambda m: f"{m.name} {m.setting}")
def test_a_broken_rule_of_ours_is_caught(mutation):
    def broken(settings):
        return OurScheduler(settings, mutation)

    ahead = mutation.setting == "ahead"
    report = compare(*mutation.witness, 4, make=broken, asynchronous=ahead)
    assert report.mismatches == 1


@pytest.mark.nightly
def test_vllm_that_resumes_too_early_is_seen_in_the_decisions():
    """Its own rule broken: a dropped request comes back while its old batch is under way."""
    rule = "if request.num_stale_output_tokens and not request.drop_stale_output:"
    early = Mutation("", "", ("", 0), (("", "schedule", rule, "if False:"),))
    scenario = scenarios.preemption(3)
    settings = dataclasses.replace(scenario.settings, pipeline_stages=4)

    def real(settings):
        return RealScheduler(settings, mutation=early)

    report = run_identity(settings, scenario.requests, OurScheduler, make_real=real)
    assert report.mismatches == 1
