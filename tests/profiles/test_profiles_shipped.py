"""The shipped operator profiles: what they say of their error, and that no kernel beats its GPU's
data sheet."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls

from tests.parameters import each
from tests.truth import truth
from twinserve.experiments.validation.left_out import MARKS
from twinserve.experiments.validation.runs import CASES, read_run, simulate, simulated_samples
from twinserve.profiles.composition import decode_work, prefill_work
from twinserve.profiles.forms.efficiency import BORROWED_ERROR, FAMILIES
from twinserve.profiles.names import ProfileName, list_profiles
from twinserve.profiles.operators.model import OperatorModel
from twinserve.profiles.operators.shipped import (
    AIC,
    MARKED,
    MARKS_ERROR,
    RUN_ERROR,
    UNMARKED,
    UNSEEN_ERROR,
    operator_profile,
    shipped_operators,
)
from twinserve.profiles.profile import Profile, derive_profile, load_profile
from twinserve.profiles.shipped import REPLACED, SHIPPED


def _shipped(key: tuple[str, str, int]) -> Profile:
    form = "operators" if key in SHIPPED and key not in REPLACED else ""
    return load_profile(str(ProfileName(*key, form)))


def _kernels(profile: Profile, work) -> float:
    """Seconds of the step without host and all-reduces."""
    terms = profile.model().terms(work)
    return sum(
        seconds for name, seconds in terms.items() if name not in ("host", "comm", "allreduce")
    )


def _prompt_share(profile: Profile, tokens: int) -> float:
    """FLOP/s of a whole prompt over the data sheet's, without the output projection."""
    llm = profile.llm
    active = llm.layers * (
        llm.attention_parameters + max(llm.experts_per_token, 1) * llm.mlp_parameters
    )
    flops = 2 * active * tokens + llm.attention_flops_per_pair * tokens**2 / 2
    return flops / _kernels(profile, prefill_work(tokens)) / (profile.tp * profile.gpu.peak_flops)


def _decode_bound(profile: Profile, requests: int, context: int) -> float:
    """Seconds of the data sheet's rates: weights (of a mixture, the experts expected to be chosen)
    read or multiplied, whichever takes longer, then KV read. EP2: of the experts that the requests
    of two ranks choose, a rank has half."""
    llm, gpu, ranks = profile.llm, profile.gpu, 2 if profile.name.endswith("/ep2") else 1
    chosen = 1.0
    if llm.experts:
        chosen = (
            llm.experts
            / ranks
            * (1 - (1 - llm.experts_per_token / llm.experts) ** (ranks * requests))
        )
    used = max(llm.experts_per_token, 1)
    read, multiplied = (
        llm.layers * (llm.attention_parameters + n * llm.mlp_parameters) + llm.head_parameters
        for n in (chosen, used)
    )
    weights = max(
        read * llm.dtype_bytes / gpu.memory_bytes_per_s, 2 * multiplied * requests / gpu.peak_flops
    )
    return (
        weights + requests * context * llm.kv_bytes_per_token / gpu.memory_bytes_per_s
    ) / profile.tp


@each("key", AIC)
def test_no_decode_beats_the_data_sheet_or_is_far_from_it(key):
    """From one to 256 requests, kernels take 1 to 2 times the bound; few requests of a mixture,
    whose experts are small, more."""
    profile = _shipped(key)
    slowest = 3.3 if profile.llm.experts else 2.0
    for requests, context in ((1, 700), (16, 700), (64, 700), (256, 1000)):
        ratio = _kernels(profile, decode_work(requests, context)) / _decode_bound(
            profile, requests, context
        )
        assert 1.0 < ratio < slowest, (requests, ratio)


@each("key", AIC)
def test_prompts_reach_a_realistic_share_of_the_compute_rate(key):
    profile = _shipped(key)
    assert (0.2 if profile.llm.experts else 0.4) < _prompt_share(profile, 2048) < 0.85


@each("name", list_profiles())
def test_no_shipped_profile_computes_or_reads_faster_than_its_gpu(name):
    """Prompts of 2k to 16k tokens against peak FLOP/s, decodes against memory; also past the end of
    the tables."""
    profile = load_profile(name)
    shares = [_prompt_share(profile, tokens) for tokens in (2048, 3000, 4096, 8192, 16384)]
    assert max(shares) < 1.0
    for requests, context in (
        (1, 700),
        (16, 700),
        (64, 700),
        (256, 1000),
        (512, 1000),
        (1, 16_000),
        (64, 8000),
    ):
        assert _kernels(profile, decode_work(requests, context)) > _decode_bound(
            profile, requests, context
        )


def test_an_error_is_claimed_only_where_it_is_known():
    for key in AIC:
        profile, gpu = _shipped(key), key[1]
        if key in UNMARKED or profile.llm.experts:
            assert profile.fit_error is None and "No error is claimed" in profile.notes
        elif gpu == "rtxpro6000":
            assert (
                profile.fit_error == RUN_ERROR and "measured run of Llama-3.1-8B" in profile.notes
            )
        else:
            assert profile.fit_error == (MARKS_ERROR if gpu in MARKED else UNSEEN_ERROR)
            assert ("there are none of this GPU" in profile.notes) == (gpu not in MARKED)
    assert UNMARKED.keys() <= set(AIC)


def test_the_error_of_a_gpu_without_marks_is_that_of_one_left_out():
    """Host terms fitted to the marks of two GPUs, asked for those of the third."""
    rows = []
    for name, requests, context, ms in MARKS:
        form = next(
            p
            for p in map(_known, (f"{name}/operators", name))
            if p and p.step_model.form == "operators"
        )
        kernels = OperatorModel(replace(form.step_model, host_s=0.0, host_request_s=0.0))
        rows.append(
            (
                form.gpu.name,
                kernels.step_seconds(decode_work(requests, context)),
                requests,
                ms * 1e-3,
            )
        )
    errors = []
    for gpu in MARKED:
        fitted = [row for row in rows if row[0] != gpu]
        terms, _ = nnls(
            [[1 / s, n / s] for _, _, n, s in fitted], [1 - k / s for _, k, _, s in fitted]
        )
        errors += [
            abs((k + terms[0] + terms[1] * n) / s - 1) for name, k, n, s in rows if name == gpu
        ]
    assert len(errors) == len(MARKS)
    assert np.mean(errors) == pytest.approx(0.045, abs=0.001) and np.mean(errors) <= UNSEEN_ERROR
    assert max(errors) == pytest.approx(0.187, abs=0.005)


def _known(name: str) -> Profile | None:
    return load_profile(name) if name in list_profiles() else None


def test_the_error_of_borrowed_constants_is_that_of_families_with_each_others():
    own = {"h100": "hopper", "a100-80g": "ampere", "l40s": "ada"}
    errors = []
    for name, requests, context, ms in MARKS:
        parts = ProfileName.parse(name)
        for family in {*own.values()} - {own[parts.gpu]}:
            profile = derive_profile(parts.model, parts.gpu, parts.tp, efficiency=FAMILIES[family])
            errors.append(
                abs(profile.model().step_seconds(decode_work(requests, context)) * 1e3 / ms - 1)
            )
    assert np.mean(errors) == pytest.approx(BORROWED_ERROR, abs=0.005)
    assert max(errors) == pytest.approx(0.47, abs=0.005)
    for name in ("llama-2-7b@l20", "llama-13b@v100-16g:tp4"):
        assert (
            load_profile(name).fit_error == BORROWED_ERROR
            and "borrowed" in load_profile(name).notes
        )


def test_eight_l40s_wait_for_their_links():
    """2 to 3 GB/s over PCIe, as UNMARKED says: ring bytes over seconds, 1 + 2 x 80 all-reduces a
    step."""
    profile = load_profile("llama-3.1-70b@l40s:tp8")
    message = 2048 * profile.llm.hidden * 2
    seconds = profile.model().terms(prefill_work(2048))["comm"] / (1 + 2 * profile.llm.layers)
    assert 1.9e9 < 2 * 7 / 8 * message / seconds < 3e9


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(("llama-3.1-70b", "l40s", 8), marks=pytest.mark.slow),
        pytest.param(("qwen3-30b-a3b", "h200", 1), marks=pytest.mark.slow),
        ("qwen3-8b", "rtxpro6000", 1),
    ],
)
def test_files_are_what_aiconfigurator_gives(key):
    pytest.importorskip("aiconfigurator_core")
    assert _shipped(key) == shipped_operators(*key)


@pytest.mark.slow
def test_the_quoted_error_on_rtx_pro_6000_is_that_of_the_run():
    pytest.importorskip("aiconfigurator_core")
    case = next(case for case in CASES if case.folder == "RTXPRO6000__Llama-3.1-8B")
    run = read_run(truth("vllm_runs").parent, case)
    ours = simulated_samples(simulate(run, operator_profile("llama-3.1-8b", "rtxpro6000")))
    error = {name: float(np.mean(ours[name]) / np.mean(run.samples[name]) - 1) for name in ours}
    assert abs(error["TPOT"]) == pytest.approx(RUN_ERROR, abs=0.001)
    assert error["TTFT"] == pytest.approx(-0.043, abs=0.005) and error["E2E"] == pytest.approx(
        -0.023, abs=0.005
    )
