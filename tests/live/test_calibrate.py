"""`twinserve calibrate` on the CPU engine: the profile loads, predicts steps that it has not seen,
and the bench measures what it says it does. A busy machine is expected: bounds are on medians of
undisturbed steps."""

import json
from dataclasses import replace

import numpy as np
import pytest

from twinserve.profiles.measured.fit import point_errors
from twinserve.profiles.measured.samples import (
    SWAP_IN,
    SWAP_OUT,
    StepSample,
    by_point,
    read_samples,
    settled,
)
from twinserve.profiles.profile import load_profile
from twinserve.sim.cli.calibrate import calibrate

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.usefixtures("vllm")]
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def written(vllm, tmp_path_factory):
    """Folder of one quick calibration of the tiny model."""
    folder = tmp_path_factory.mktemp("calibrated")
    calibrate(
        model="tiny",
        out=folder / "tiny.json",
        raw=folder / "tiny.parquet",
        quick=True,
        num_blocks=2000,
        max_num_seqs=16,
        max_step_tokens=1024,
        max_model_len=2048,
        swap_blocks=40,
        limit=LIMIT_S,  # a busy machine measures again what was disturbed
    )
    return folder


@pytest.fixture(scope="module")
def profile(written):
    return load_profile(written / "tiny.json")


@pytest.fixture(scope="module")
def measurement(written):
    return read_samples(written / "tiny.parquet")


def test_the_profile_is_the_engine(profile):
    assert (profile.source, profile.num_gpu_blocks_source, profile.num_gpu_blocks) == (
        "measured",
        "measured",
        2000,
    )
    assert (profile.block_tokens, profile.max_num_seqs, profile.max_num_batched_tokens) == (
        32,
        16,
        1024,
    )
    assert profile.max_model_len == 2048 and profile.engine_version.count(".") == 2
    assert profile.llm.name == "tiny" and profile.llm.dtype_bytes == 4 and profile.llm.layers == 2
    host = profile.step_model.host
    assert min(host.empty_s, host.submit_s, host.step_s) > 0


@pytest.mark.nightly
@pytest.mark.alone
def test_steps_of_random_composition_are_predicted(profile, measurement):
    """None of them was fitted. On a quiet machine the error is 2 to 4 %; the bound leaves room for
    a noisy one."""
    held = [s for s in settled([s for s in measurement.steps if not s.first]) if s.kind == "check"]
    assert len(by_point(held)) >= 4
    # these steps were repeated, as those of the tables
    tables = replace(profile.model(), traffic=None)
    errors = np.abs(list(point_errors(tables, held).values()))
    assert np.median(errors) < 0.2 and errors.mean() < 0.3
    fit = profile.step_model.fit
    assert fit.check_error == pytest.approx(errors.mean())
    assert profile.fit_error == fit.errors["all"] < 0.3
    assert set(fit.errors) >= {"all", "decode", "prefill", "prefills", "chunk", "mixed"}


def test_every_kind_was_measured_in_shuffled_rounds(measurement):
    traffic = [s for s in measurement.steps if s.kind == "traffic"]
    rounds, facts = {s.round for s in traffic}, measurement.provenance
    if facts["elapsed_s"] <= LIMIT_S or "traffic" not in facts["partial"]:
        assert rounds == {1, 2, 3, 4} and any(s.work.churn.swapped_out for s in traffic)
    else:  # so slow a machine that the time was up
        assert rounds == set(range(1, 1 + len(rounds))) and rounds
    steps = [s for s in measurement.steps if s.kind != "traffic"]
    assert {s.kind for s in steps} == {
        "decode", "prefill", "prefills", "chunk", "mixed", "skewed", "check", "leaving",
    }  # fmt: skip
    orders = [list(dict.fromkeys(s.point for s in steps if s.round == r)) for r in (0, 1)]
    assert (
        set(orders[0]) == set(orders[1])
        and orders[0] != orders[1]
        and orders[0] != sorted(orders[0])
    )
    for of_point in by_point(steps).values():
        planned = measurement.provenance["rounds"]  # and others where a point was disturbed
        assert planned >= 2 and {s.round for s in of_point} >= set(range(planned))
        assert all(0 < s.exec_s < s.seconds for s in of_point)
    decode = [s for s in measurement.steps if s.kind == "decode" and s.work.decode_requests == 16]
    means = sorted({round(np.log2(s.work.decode_context / 16)) for s in decode})
    assert means[0] <= 5 and means[-1] >= 10


def test_the_file_says_where_the_samples_come_from(measurement):
    facts = measurement.provenance
    assert (
        facts["contexts"] == "adopted"
        and facts["dtype"] == "float32"
        and facts["num_blocks"] == 2000
    )
    assert (
        facts["settings"]["max_num_seqs"] == 16
        and facts["vllm"]
        and facts["torch"]
        and facts["device"]
    )
    assert facts["date"].startswith("20") and facts["seed"] == 0
    assert json.dumps(facts)


def test_swaps_were_measured_with_their_bytes(measurement, profile):
    assert not measurement.provenance["swap"]
    assert {s.direction for s in measurement.swaps} == {SWAP_OUT, SWAP_IN}
    for swap in measurement.swaps:
        assert swap.nbytes == swap.tokens * profile.kv_bytes_per_token and swap.seconds > 0
    assert "transfers measured" in profile.notes


# -- the bench -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bench(written, tmp_path_factory):
    from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
    from twinserve.backends.live.engine.tiny_model import write_model
    from twinserve.backends.live.measure.bench import Bench
    from twinserve.backends.live.measure.measure import SCHEDULER

    model = write_model(tmp_path_factory.mktemp("model"))
    engine = VllmEngine(
        LiveSettings(model, 800, 32, 8, 512, 2048, prefix_caching=True, scheduler=SCHEDULER)
    )
    yield Bench(engine)
    engine.close()


def test_adopted_contexts_are_blocks_of_their_own(bench):
    manager = bench.engine.scheduler.kv_cache_manager
    free = manager.block_pool.get_num_free_blocks()
    names = bench.hold([1000, 70, 20], room=50)
    blocks = [manager.get_block_ids(name)[0] for name in names]
    assert [len(b) for b in blocks] == [32, 3, 1]
    assert len({b for of_one in blocks for b in of_one}) == 36
    assert manager.block_pool.get_num_free_blocks() == free - 36
    timing = bench.step(dict.fromkeys(names, 1))
    assert (
        timing.work.decode_requests,
        timing.work.decode_context,
        timing.work.decode_context_max,
    ) == (3, 1090, 1000)
    bench.drop(names)
    bench.step({})
    assert manager.block_pool.get_num_free_blocks() == free


@pytest.mark.nightly
@pytest.mark.alone
def test_adopted_contexts_cost_what_computed_ones_cost(bench):
    """The shortcut of the whole calibration. Interleaved, so that the machine is the same for
    both."""
    bench.fill_cache(1500)
    seconds = {}
    for number in range(4):
        for adopt in (True, False):
            bench.adopt = adopt
            names = bench.hold([1500] * 8, room=60)
            grants = dict.fromkeys(names, 1)
            bench.step(grants)
            for _ in range(8):
                t = bench.step(grants)
                seconds.setdefault(adopt, []).append(
                    StepSample(
                        "decode", int(adopt), number, t.work, t.seconds, off_core_s=t.off_core_s
                    )
                )
            bench.drop(names)
            bench.step({})
    adopted, computed = (
        np.median([s.seconds for s in settled(seconds[adopt])]) for adopt in (True, False)
    )
    assert adopted / computed == pytest.approx(1.0, abs=0.25)


def test_a_step_that_the_engine_does_not_take_is_an_error(bench):
    from twinserve.backends.live.versions import LiveEngineError

    name = bench.submit(600)
    with pytest.raises(LiveEngineError, match="600 tokens planned, 512 scheduled"):
        bench.step({name: 600})
    bench.drop([name])
    bench.step({})
