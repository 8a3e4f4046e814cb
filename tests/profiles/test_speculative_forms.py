"""Steps that verify drafts, as each form of step times has them."""

import numpy as np
import pytest

from tests.sim.harness import same_rows
from tests.sim.test_speculation import SMALL, run
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.scaled import ScaledModel, StepScale
from twinserve.profiles.forms.speculative import (
    NgramDrafter,
    SpeculativeModel,
    VerifyingComposition,
)
from twinserve.profiles.forms.table import TableModel
from twinserve.profiles.measured.model import MeasuredModel, TrafficTimes
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.step_times import choose

CONTEXT = 1000


def verification(requests: int, drafts: int, prompt: int = 0) -> VerifyingComposition:
    """Of requests at CONTEXT, beside a prompt of so many tokens."""
    new = np.array([prompt] if prompt else [], np.int64)
    return VerifyingComposition(
        requests,
        requests * CONTEXT,
        CONTEXT,
        new,
        np.zeros_like(new),
        verify_new=np.full(requests, 1 + drafts),
        verify_resident=np.full(requests, CONTEXT),
        drafters=requests,
        drafts=drafts,
    )


@pytest.fixture(scope="module")
def kernels():
    return choose("llama-3.1-8b@h100", "operators").profile.model(256)


def seconds(model, work: VerifyingComposition) -> float:
    return SpeculativeModel(model, NgramDrafter()).step_seconds(work)


@pytest.mark.parametrize("prompt", [0, 512])
@pytest.mark.parametrize("requests", [1, 8, 64, 256])
def test_verifying_takes_no_less_than_the_same_requests_without_drafts(kernels, requests, prompt):
    took = [seconds(kernels, verification(requests, drafts, prompt)) for drafts in (0, 1, 3, 7)]
    assert took == sorted(took)
    work = verification(requests, 0, prompt)
    alone = StepComposition(
        requests, requests * CONTEXT, CONTEXT, work.prefill_new, work.prefill_resident
    )
    assert took[0] == kernels.step_seconds(alone)


def test_attention_reads_kv_once_and_matrices_see_all_drafts(kernels):
    found = kernels.verifying_terms(verification(64, 3))
    decodes = kernels.terms(StepComposition(64, 64 * CONTEXT, CONTEXT))
    attention = found["decode"] + found["verify"]
    assert decodes["decode"] <= attention < 1.5 * decodes["decode"]
    assert found["tokens"] == kernels.terms(StepComposition(256, 256 * CONTEXT, CONTEXT))["tokens"]
    assert found["head"] > decodes["head"] and found["host"] == decodes["host"]


def test_long_drafts_cost_what_such_chunks_cost(kernels):
    """One request with as many tokens as a prompt's chunk takes as long as that chunk."""
    work = verification(1, 511)
    chunk = StepComposition(prefill_new=np.array([512]), prefill_resident=np.array([CONTEXT]))
    terms, theirs = kernels.verifying_terms(work), kernels.terms(chunk)
    attention = terms["decode"] + terms["verify"] + terms["skew"]
    assert attention == pytest.approx(theirs["chunks"])
    assert terms["tokens"] == theirs["tokens"]


@pytest.mark.parametrize("profile", ["llama-3.1-8b@h100", "llama-3.1-70b@h100:tp4"])
@pytest.mark.parametrize("requests", [1, 16, 64, 256])
def test_kernel_tables_and_roofline_agree_on_what_drafts_add(profile, requests):
    """Two forms that share no number: how much longer a step with three drafts is."""
    longer = []
    for form in ("roofline", "operators"):
        model = choose(profile, form).profile.model(256)
        longer.append(
            seconds(model, verification(requests, 3)) / seconds(model, verification(requests, 0))
        )
    assert longer[0] == pytest.approx(longer[1], rel=0.15)


def test_a_scaled_profile_scales_what_verifying_takes(kernels):
    scaled = ScaledModel(kernels, StepScale(step=2.0))
    work = verification(16, 3)
    assert seconds(scaled, work) == pytest.approx(2 * seconds(kernels, work))


FITS = {
    "measured": MeasuredModel(
        batches=(1, 16),
        contexts=(16, 4096),
        decode_s=((2**-8, 2**-8), (2**-7, 2**-6)),
        tokens=(16, 512),
        token_s=(2**-8, 2**-5),
        prefill_request_s=0.0,
        decode_request_s=0.0,
        pair_s=0.0,
        attended_s=0.0,
        decode_share=0.0,
        traffic=TrafficTimes(2**-14, 2**-17, 2**-9, 2**-11, 2**-8, 2**-7),
    ),
    "table": TableModel((16, 512), (2**-8, 2**-5), 2**-12, 2**-24, 2**-30),
}


@pytest.mark.parametrize("form", FITS)
def test_a_fit_to_whole_steps_takes_chunks_and_no_less_than_without_drafts(form):
    model = FITS[form]
    for requests in (1, 16, 128):
        work = verification(requests, 3)
        chunks = StepComposition(prefill_new=work.verify_new, prefill_resident=work.verify_resident)
        bounds = [model.step_seconds(one) for one in (chunks, work.undrafted())]
        assert seconds(model, work) == max(bounds)


@pytest.mark.parametrize("form", FITS)
def test_a_run_with_a_fit_to_whole_steps_is_exact(form, tmp_path):
    path = tmp_path / "fit.json"
    own = load_profile("llama-3.1-8b@h100").model_copy(update={"step_model": FITS[form]})
    save_profile(own, path)
    settings = {
        "speculate": "k=3,acceptance=0.7",
        "profile": str(path),
        "step_times": "auto",
        "num_blocks": 60,
    }
    fast, exact = (run(**settings, exact=exact) for exact in (False, True))
    same_rows(fast.rows, exact.rows)
    assert fast.rows.requests["finished"].all()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_with_kernel_tables_ends_and_is_exact(asynchronous):
    settings = {
        "speculate": "k=3,acceptance=0.7",
        "step_times": "operators",
        "num_blocks": 60,
        "async_scheduling": asynchronous,
    }
    fast, exact = (run(**settings, exact=exact) for exact in (False, True))
    same_rows(fast.rows, exact.rows)
    plain = run(**(settings | {"speculate": None}))
    assert fast.rows.requests["finished"].all()
    assert fast.summary["mean_tpot_ms"] < 0.8 * plain.summary["mean_tpot_ms"]
    assert SMALL["requests"] == fast.summary["completed"]
