"""Measured step times: what the tables promise the simulator, what the fit recovers from noisy
samples, and the files."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.profiles.test_profiles_step_models import DECODE_RUNS, check_decode_run
from twinserve.profiles.catalog import find_model
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.forms.table import TableModel
from twinserve.profiles.measured.fit import fit_steps, point_errors
from twinserve.profiles.measured.model import HiddenTimes, HostTimes, MeasuredModel, noise_lines
from twinserve.profiles.measured.profile import measured_profile
from twinserve.profiles.measured.samples import (
    SWAP_IN,
    SWAP_OUT,
    Measurement,
    StepSample,
    SwapSample,
    read_samples,
    settled,
    write_samples,
)
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.specs import ProfileError

TRUTH = load_profile("llama-3.1-8b@h200").model()
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (128, 512, 2048, 8192)


def decodes(n, c):
    return StepComposition(n, n * c, c)


def step(n, c, *prefills):
    new, resident = (np.array([p[i] for p in prefills], np.int64) for i in (0, 1))
    return StepComposition(n, n * c, c if n else 0, new, resident)


def works(seed=1):
    """(kind, work) of a whole calibration of an engine with room for 900,000 tokens."""
    rng = np.random.default_rng(seed)
    for n in BATCHES:
        for c in CONTEXTS:
            if n * c <= 900_000:
                yield "decode", decodes(n, c)
    for length in (16, 64, 256, 1024, 4096, 8192):
        yield "prefill", step(0, 0, (length, 0))
        for count in (2, 8, 32):
            if count * length <= 8192:
                yield "prefills", step(0, 0, *[(length, 0)] * count)
        for resident in (512, 2048, 8192):
            yield "chunk", step(0, 0, (length, resident))
    for kind, count in (("mixed", 30), ("check", 15)):
        for _ in range(count):
            n, c, new = (int(2 ** rng.uniform(*span)) for span in ((0, 8), (7, 11), (5, 12)))
            yield kind, step(n, c, (new, int(rng.choice([0, 2048]))))


def samples(noise=0.03, repeats=7, seed=0, truth=TRUTH):
    rng = np.random.default_rng(seed)
    return [
        StepSample(kind, i, r, work, truth.step_seconds(work) * (1 + abs(rng.normal(0, noise))))
        for i, (kind, work) in enumerate(works())
        for r in range(repeats)
    ]


@cache
def fitted() -> MeasuredModel:
    return fit_steps(samples())


BY_HAND = MeasuredModel(
    batches=(1, 3, 10), contexts=(16, 100, 1000),
    decode_s=((1.0, 1.5, 2.0), (1.0, 1.6, 3.0), (2.0, 4.0, 9.0)), tokens=(16, 100),
    token_s=(2.0, 4.0), prefill_request_s=0.1, decode_request_s=0.01, pair_s=1e-4, attended_s=1e-3,
    decode_share=0.5, skew=0.25,
)  # fmt: skip


@pytest.fixture(scope="module", params=["fitted", "by hand"])
def model(request) -> MeasuredModel:
    return fitted() if request.param == "fitted" else BY_HAND


@examples(200)
@given(run=st.fixed_dictionaries(DECODE_RUNS))
def test_a_run_of_decodes_is_the_single_steps_bit_for_bit(model, run):
    check_decode_run(model, **run)


def test_a_run_across_a_knot_is_bit_identical_too(model):
    for knot in model.contexts:
        run = model.decode_run_seconds(3, 3 * (knot - 2), knot - 2, 5)
        single = [model.step_seconds(decodes(3, knot - 2 + j)) for j in range(5)]
        assert run.tolist() == single


@examples(150)
@given(
    n=st.integers(0, 600),
    mean=st.integers(1, 60_000),
    skewed=st.integers(0, 60_000),
    prefills=st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 100_000)), max_size=3),
    more=st.integers(1, 5000),
)
def test_more_work_never_takes_less_time(model, n, mean, skewed, prefills, more):
    new, resident = (np.array([p[i] for p in prefills], np.int64) for i in (0, 1))

    def seconds(n=n, mean=mean, longest=mean + skewed, new=new, resident=resident):
        found = model.step_seconds(StepComposition(n, n * mean, longest if n else 0, new, resident))
        assert isinstance(found, float) and np.isfinite(found) and found >= 0
        return found

    # bit-exact order is not promised across different sums
    floor = seconds() * (1 - 1e-9)
    if n:
        assert seconds(n=n + 1) >= floor  # of the same mean context
        assert seconds(mean=mean + more, longest=mean + skewed + more) >= floor
        assert seconds(longest=mean + skewed + more) >= floor
    if prefills:
        assert seconds(new=new + more) >= floor
        assert seconds(resident=resident + more) >= floor
        assert floor <= seconds(new=np.append(new, more), resident=np.append(resident, 0))
        alone = model.step_seconds(StepComposition(n, n * mean, mean + skewed if n else 0))
        assert floor >= alone * (1 - 1e-8)


def test_the_form_by_hand():
    # half way in both
    assert BY_HAND.step_seconds(decodes(2, 58)) == pytest.approx((1.25 + 1.3) / 2)
    assert BY_HAND.step_seconds(decodes(1, 1)) == 1.0  # flat below the first context
    # on with the last slope
    assert BY_HAND.step_seconds(decodes(17, 100)) == pytest.approx(4.0 + 2.4)
    assert BY_HAND.step_seconds(decodes(1, 1900)) == pytest.approx(2.5)
    # contexts 10 and 190: mean 100, a quarter of the way to the longest
    assert BY_HAND.step_seconds(StepComposition(2, 200, 190)) == BY_HAND.step_seconds(
        decodes(2, 122.5)
    )
    f = 2.0 + 2.0 * (58 - 16) / 84
    attention = 1e-4 * (58 * (2 * 32 + 59) / 2) + 1e-3 * (58 + 32)
    assert BY_HAND.step_seconds(step(0, 0, (58, 32))) == pytest.approx(f + 0.1 + attention)
    mixed = 2.0 + 2.0 * (68 - 16) / 84 + 0.1 + 10 * 0.01 + attention + 0.5 * (4.0 - 2.0)
    assert BY_HAND.step_seconds(step(10, 100, (58, 32))) == pytest.approx(mixed)
    assert BY_HAND.step_seconds(step(10, 1000, (1, 0))) == 9.0  # never less than the decodes alone
    assert BY_HAND.step_seconds(StepComposition()) == 0.0


def test_the_fit_recovers_a_known_engine():
    fit = fitted().fit
    assert fit.check_error < 0.03
    assert {"all", "decode", "prefill", "prefills", "chunk", "mixed"} == set(fit.errors)
    # a table's corners are predicted from one side
    assert fit.residual < 0.03 and fit.errors["all"] < 0.12
    assert fit.points == len({i for i, (kind, _) in enumerate(works()) if kind != "check"})
    unseen = [
        StepSample("x", i, 0, work, TRUTH.step_seconds(work))
        for i, (_, work) in enumerate(works(seed=5))
    ]
    assert np.mean(np.abs(list(point_errors(fitted(), unseen).values()))) < 0.04
    assert fitted().pair_s > 0 and fitted().decode_share == pytest.approx(1.0, abs=0.15)


def test_on_an_engine_with_whole_graphs_it_beats_the_one_table():
    """Pure decode steps of this engine lack 4 ms that all others have."""

    class Graphs:
        def step_seconds(self, work):
            return TRUTH.step_seconds(work) + (4e-3 if len(work.prefill_new) else 0.0)

    taken = samples(truth=Graphs())
    fitted, held = ([s for s in taken if (s.kind == "check") is check] for check in (False, True))
    one = TableModel.fit([s.work for s in fitted], [s.seconds for s in fitted])
    error = {
        m.form: np.mean(np.abs(list(point_errors(m, held).values())))
        for m in (one, fit_steps(taken))
    }
    assert error["measured"] < 0.03 < error["table"]


def test_a_few_delayed_repeats_do_not_move_the_fit():
    rng = np.random.default_rng(3)
    delayed = [replace(s, seconds=s.seconds * 4) if rng.random() < 0.2 else s for s in samples()]
    held = [s for s in samples() if s.kind == "check"]
    assert np.mean(np.abs(list(point_errors(fit_steps(delayed), held).values()))) < 0.04


def test_a_machine_that_others_use():
    """Two thirds of the steps wait for the core: no median survives that, so they are set aside or
    corrected."""
    rng = np.random.default_rng(4)
    taken = []
    for s in samples():
        off = s.seconds * rng.uniform(0.2, 3) if rng.random() < 0.67 else 0.0
        taken.append(replace(s, seconds=s.seconds + off, off_core_s=off))
    model = fit_steps(taken)
    held = [s for s in samples() if s.kind == "check"]
    assert np.mean(np.abs(list(point_errors(model, held).values()))) < 0.03
    held_up = sum(s.seconds for s in taken if s.off_core_s)
    share = held_up / sum(s.seconds for s in taken)
    assert share > 0.8 and model.fit.disturbed == pytest.approx(share, abs=0.03)


def test_few_steps_that_wait_for_long_are_said():
    """One in a hundred loses the core, for thirty times its own length."""
    taken = [
        replace(s, seconds=31 * s.seconds, off_core_s=30 * s.seconds) if i % 100 == 0 else s
        for i, s in enumerate(samples())
    ]
    model = fit_steps(taken)
    assert model.fit.disturbed > 0.15
    assert "of the measured time" in " ".join(noise_lines(model.fit))


def test_calm_repeats_are_taken_as_they_are():
    work = decodes(1, 16)
    times = [(1.0, 0.01), (1.0, 0.0), (1.02, 0.05), (3.0, 2.0)]
    taken = [
        StepSample("decode", 0, r, work, seconds, off_core_s=off)
        for r, (seconds, off) in enumerate(times)
    ]
    assert [s.seconds for s in settled(taken)] == [1.0, 1.0, 1.02]
    # two calm ones: the third is corrected
    assert [s.seconds for s in settled(taken[1:])] == [1.0, 1.02, 1.0]
    unknown = [replace(s, off_core_s=float("nan")) for s in taken]
    assert [s.seconds for s in settled(unknown)] == [1.0, 1.0, 1.02, 3.0]


def test_first_steps_are_kept_apart():
    first = [replace(s, first=True, seconds=9.0) for s in samples() if s.round == 0]
    assert fit_steps([*samples(), *first]) == fitted()


def test_uneven_contexts_cost_more_where_they_do():
    class Skewed:
        def step_seconds(self, work):
            mean = work.decode_context / max(work.decode_requests, 1)
            x = mean + 0.3 * (work.decode_context_max - mean)
            even = replace(
                work, decode_context=int(x * work.decode_requests), decode_context_max=int(x)
            )
            return TRUTH.step_seconds(even)

    truth, taken = Skewed(), samples(truth=Skewed())
    for i, (n, c) in enumerate([(4, 1024), (16, 1024), (64, 512), (16, 256)]):
        work = StepComposition(n, n * c, n * c // 2)
        taken += [
            StepSample("skewed", 900 + i, r, work, truth.step_seconds(work)) for r in range(3)
        ]
    assert fit_steps(taken).skew == pytest.approx(0.3, abs=0.05)
    assert fitted().skew == 0.0


def test_steps_beyond_the_graphs_wait_for_their_launches():
    least_s = 3 * TRUTH.step_seconds(step(0, 0, (256, 0)))

    class Launched:
        def step_seconds(self, work):
            larger = len(work.prefill_new) and work.new_tokens > 256
            return max(TRUTH.step_seconds(work), least_s if larger else 0.0)

    taken = samples(truth=Launched())
    model = fit_steps(taken, captured=256)
    assert model.captured == 256 and model.launch_s == pytest.approx(least_s, rel=0.05)
    assert model.step_seconds(step(0, 0, (257, 0))) == model.launch_s
    assert model.step_seconds(step(0, 0, (256, 0))) < least_s / 2
    assert model.fit.errors["all"] < fit_steps(taken).fit.errors["all"]
    assert fit_steps(samples(), captured=256) == fitted()  # none is worth it


def test_graphs_are_those_of_the_runs_seats():
    model = replace(BY_HAND, captured=512, launch_s=9.0)
    profile = load_profile("llama-3.1-8b@h200").model_copy(update={"step_model": model})
    assert profile.model() == model
    assert [profile.model(n).captured for n in (64, 256)] == [128, 512]


def test_a_step_takes_longer_than_what_is_hidden_of_it():
    """At the shortest context one of 10 requests takes 2 s, and each further request 1/7 s."""
    hidden = {"requests": (1, 10), "seconds": (0.5, 1.7)}
    model = replace(BY_HAND, hidden=HiddenTimes(**hidden), overlaps=True)
    assert model.step_seconds(decodes(10, 16)) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="hidden: 2.1 s of a decode step of 10 requests, .* 2 s"):
        replace(BY_HAND, hidden=HiddenTimes(**hidden | {"seconds": (0.5, 2.1)}))
    with pytest.raises(ValueError, match="hidden: .* of a decode step of 20 requests"):
        replace(BY_HAND, hidden=HiddenTimes(requests=(1, 9, 10), seconds=(0.5, 1.6, 1.9)))


@pytest.mark.parametrize(
    ("kinds", "words"),
    [((), "batch sizes"), (("decode",), "prompt tokens"), (("prefill", "mixed"), "batch sizes")],
)
def test_too_few_samples_are_one_line(kinds, words):
    with pytest.raises(ProfileError, match=words) as raised:
        fit_steps([s for s in samples(repeats=1) if s.kind in kinds])
    assert "\n" not in str(raised.value)


# -- files -----------------------------------------------------------------------------------------
FACTS = {
    "vllm": "0.25.1", "torch": "2.11.0", "date": "2026-01-01T00:00:00+00:00",
    "device": "NVIDIA H200", "device_type": "gpu", "memory_bytes": 150e9, "matmul_flops": 7e14,
    "memory_bytes_per_s": 4e12, "link_bytes_per_s": 5e10, "settings": {"graphs": True, "threads": 1,
    "prefix_caching": True, "max_model_len": 32768, "max_step_tokens": 8192, "max_num_seqs": 256},
    "tensor_parallel_size": 1, "gpu_memory_utilization": 0.92, "dtype": "bfloat16",
    "num_blocks": 58000, "block_tokens": 16, "seed": 0, "rounds": 6, "elapsed_s": 180.0,
    "empty_s": 1e-4, "submit_s": 1e-5, "swap": "the engine was built without host memory",
}  # fmt: skip
SWAPS = [
    SwapSample(d, n * 16, n * 2**21, 1e-4 + n * 2**21 / 40e9)
    for n in (1, 8, 64)
    for d in (SWAP_OUT, SWAP_IN)
]


def measurement(swaps=(), **facts):
    """Host time of a step: 1 ms and 20 us a request."""
    steps = [
        replace(
            s, exec_s=s.seconds - 1e-3 - 20e-6 * (s.work.decode_requests + len(s.work.prefill_new))
        )
        for s in samples(repeats=3)
    ]
    leaving = decodes(10, 64)
    steps += [StepSample("leaving", 990, 0, leaving, seconds) for seconds in (0.01, 0.0102)]
    return Measurement(steps, list(swaps), FACTS | facts)


def test_a_measured_profile_is_as_sure_as_its_fit_on_steps_left_out():
    profile = measured_profile(measurement(SWAPS), find_model("llama-3.1-8b"))
    known, found = profile.step_model.fit.errors, expected_errors(profile)
    assert found.decode.error == known["decode"] and found.decode.known
    assert found.prefill.error >= known["prefill"] and "left out" in found.prefill.source
    bare = profile.model_copy(
        update={"step_model": replace(profile.step_model, fit=None), "fit_error": None}
    )
    assert not expected_errors(bare).decode.known


def test_a_measured_profile_loads_as_it_was(tmp_path):
    profile = measured_profile(measurement(SWAPS), find_model("llama-3.1-8b"))
    save_profile(profile, tmp_path / "mine.json")
    again = load_profile(tmp_path / "mine.json")
    assert again == profile and again.model() == profile.step_model
    assert (profile.name, profile.gpu.name, profile.source) == (
        "llama-3.1-8b@h200",
        "h200",
        "measured",
    )
    assert (profile.num_gpu_blocks, profile.num_gpu_blocks_source) == (58000, "measured")
    assert profile.pcie_bytes_per_s == pytest.approx(40e9, rel=0.01)
    assert profile.fit_error == profile.step_model.fit.errors["all"]
    assert "measured (measured" in profile.describe() and "6 rounds" in profile.notes
    host = profile.step_model.host
    assert (host.step_s, host.request_s) == (
        pytest.approx(1e-3, rel=0.01),
        pytest.approx(20e-6, rel=0.01),
    )
    assert host.leave_s == pytest.approx(20e-6)


def test_what_was_not_measured_is_said():
    profile = measured_profile(measurement(), find_model("llama-3.1-8b"))
    assert "Swapping was not measured" in profile.notes and profile.pcie_bytes_per_s == 5e10


def test_a_machine_without_a_data_sheet():
    profile = measured_profile(
        measurement(device="Some CPU", device_type="cpu", memory_bytes=32e9),
        find_model("llama-3.1-8b"),
    )
    assert profile.gpu.name == "cpu" and profile.gpu.peak_flops == 7e14
    assert "no data sheet" in profile.notes


def test_samples_come_back_from_their_file(tmp_path):
    path = tmp_path / "deep" / "samples.parquet"
    before = measurement(SWAPS)
    write_samples(before, path)
    after = read_samples(path)
    assert after.provenance == before.provenance and after.swaps == before.swaps
    assert len(after.steps) == len(before.steps)
    assert fit_steps(after.steps) == fit_steps(before.steps)
    assert [p.name for p in path.parent.iterdir()] == ["samples.parquet"]


def test_another_file_is_one_clear_line(tmp_path):
    path = tmp_path / "x.parquet"
    with pytest.raises(ProfileError, match=r"x\.parquet"):
        read_samples(path)
    path.write_text("no parquet")
    with pytest.raises(
        ProfileError, match=r"x\.parquet: not a file of calibration samples"
    ) as raised:
        read_samples(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batches": (1, 1, 3)}, "batches must rise"),
        ({"contexts": (16, 100)}, "3 rows of 2"),
        ({"decode_s": ((1.0, 1.5, 2.0), (0.5, 1.6, 3.0), (2.0, 4.0, 9.0))}, "must not fall"),
        ({"decode_s": ((1.0, 1.5, 2.0), (1.0, 1.6, 9.0), (2.0, 4.0, 9.0))}, "more slowly"),
        ({"token_s": (2.0, 1.0)}, "token_s must not fall"),
        ({"token_s": (2.0, 3.0, 4.0)}, "2 token counts but 3"),
        ({"skew": 1.5}, "skew"),
    ],
)
def test_a_bad_table_is_refused(tmp_path, change, words):
    table = replace(BY_HAND, host=HostTimes(0, 0, 0, 0, 0))
    profile = load_profile("llama-3.1-8b@h100").model_copy(update={"step_model": table})
    data = profile.model_dump(mode="json")
    data["step_model"] |= change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=words) as raised:
        load_profile(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)
