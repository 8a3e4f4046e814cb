"""Echo's loads: questions on long shared documents, and a day's tide of online requests."""

import numpy as np
import pytest

from tests.traces.workload_strategies import assert_same
from twinserve.traces.generators.longdoc import SHAPES, DocumentShape, longdoc
from twinserve.traces.generators.synth import SHAPES as LENGTHS
from twinserve.traces.generators.synth import LengthShape
from twinserve.traces.generators.tidal import DAY_S, TIDE, tidal, tide
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.workload import BEST_EFFORT, WorkloadError

SMALL = {"requests": 200}


# -- documents -------------------------------------------------------------------------------------
@pytest.mark.slow
def test_loogle_short_has_the_published_size_length_and_sharing():
    w = longdoc("loogle-short", seed=3)
    check_workload(w)
    assert len(w) == 1951
    # 105 documents: a draw of few lengths
    assert w.prompt_tokens.mean() == pytest.approx(23_474, rel=0.1)
    assert shared_part(w) == pytest.approx(0.91, abs=0.01)
    lengths = [longdoc("loogle-short", seed=s).prompt_tokens.mean() for s in range(12)]
    assert np.mean(lengths) == pytest.approx(23_474, rel=0.04)


def shared_part(workload) -> float:
    """Share of prompt tokens in blocks that two or more requests have: the paper's shared rate."""
    prefix = workload.prefix
    if prefix is None or not len(prefix.ids):
        return 0.0
    users = np.bincount(prefix.ids, minlength=prefix.distinct)
    tokens = np.minimum(prefix.block_tokens, _tokens_of(workload))
    return float(tokens[users[prefix.ids] > 1].sum() / workload.prompt_tokens.sum())


def _tokens_of(workload) -> np.ndarray:
    """int64[blocks]: prompt tokens from the start of each block to the end of its prompt."""
    prefix = workload.prefix
    counts = np.diff(prefix.offsets)
    place = np.arange(len(prefix.ids)) - np.repeat(prefix.offsets[:-1], counts)
    return np.repeat(workload.prompt_tokens, counts) - place * prefix.block_tokens


@pytest.mark.parametrize("name", SHAPES)
def test_every_pool_is_offline_shared_and_submitted_at_once(name):
    w = longdoc(name, requests=300)
    check_workload(w)
    assert (w.arrival_s == 0).all() and (w.service_class == BEST_EFFORT).all()
    assert np.isnan(w.slo_ttft_s).all() and np.isnan(w.slo_tpot_s).all()
    assert shared_part(w) > 0.8
    shape = SHAPES[name]
    assert shape.output.low <= w.output_tokens.min() and w.output_tokens.max() <= shape.output.high


def test_blocks_say_who_shares_what():
    """Two prompts on one document have its blocks in common, and nothing else; others have nothing
    in common."""
    w = longdoc("toolbench", **SMALL)
    document = [name.split("-")[1] for name in w.ids]
    blocks = [w.prefix.of(i) for i in range(len(w))]
    assert len(set(document)) == 20
    for i in range(0, 40):
        for j in range(i):
            common = np.intersect1d(blocks[i], blocks[j])
            if document[i] != document[j]:
                assert not len(common)
            else:
                n = len(common)
                assert n and np.array_equal(blocks[i][:n], blocks[j][:n])
                assert 16 * n < min(w.prompt_tokens[i], w.prompt_tokens[j])
    for i, own in enumerate(blocks):
        assert len(own) == -(-w.prompt_tokens[i] // 16)


def test_order_is_a_permutation():
    shuffled = longdoc("next-qa", **SMALL)
    listed = longdoc("next-qa", order="by-document", **SMALL)
    assert sorted(shuffled.prompt_tokens) == sorted(listed.prompt_tokens)
    documents = [int(name.split("-doc")[1]) for name in listed.ids]
    # whoever breaks ties by them keeps the order of submission
    assert list(shuffled.ids) == sorted(shuffled.ids)
    assert documents == sorted(documents)
    assert [int(name.split("-doc")[1]) for name in shuffled.ids] != documents


@pytest.mark.slow
def test_a_seed_fixes_everything_and_the_block_size_may_change():
    assert_same(longdoc("toolbench", seed=4, **SMALL), longdoc("toolbench", seed=4, **SMALL))
    assert longdoc("toolbench", seed=5, **SMALL).prompt_tokens.tolist() != (
        longdoc("toolbench", seed=4, **SMALL).prompt_tokens.tolist()
    )
    for size in (1, 32, 512):
        w = longdoc("next-qa", block_tokens=size, **SMALL)
        check_workload(w)
        assert w.prefix.block_tokens == size and shared_part(w) > 0.8


# -- the tide --------------------------------------------------------------------------------------
def test_the_peak_is_six_times_the_trough():
    hours = np.arange(0, 24, 0.01)
    rate = tide(hours * 3600)
    assert rate.max() / rate.min() == pytest.approx(6.0)
    assert hours[rate == rate.max()].min() == pytest.approx(12) and hours[
        rate == rate.max()
    ].max() == pytest.approx(14)
    assert hours[rate < 1.001 / 6].min() == pytest.approx(4, abs=0.02)
    assert hours[rate < 1.001 / 6].max() == pytest.approx(6, abs=0.02)
    assert tide(DAY_S) == tide(0.0) == TIDE[0][1]


@pytest.mark.slow
def test_arrivals_follow_the_tide():
    w = tidal(peak_rate=5.0, seed=1)
    check_workload(w)
    per_hour = np.histogram(w.arrival_s / 3600, np.arange(25))[0]
    expected = 5.0 * tide((np.arange(24 * 60) + 0.5) * 60).reshape(24, 60).mean(1) * 3600
    assert np.abs(per_hour / expected - 1).max() < 0.15  # 60 gusts of deviation 0.3 an hour: 4 %
    assert per_hour[12:14].mean() / per_hour[4:6].mean() == pytest.approx(6.0, rel=0.15)


@pytest.mark.slow
def test_bursts_are_what_was_asked_for():
    """Counts of a minute at the peak: their variance is the Poisson one plus that of the gusts."""
    from scipy import stats  # a second to import

    flat, gusty = (tidal(peak_rate=20.0, burstiness=b, seed=3) for b in (0.0, 0.5))
    for w, deviation in ((flat, 0.0), (gusty, 0.5)):
        noon = w.arrival_s[(w.arrival_s >= 12 * 3600) & (w.arrival_s < 14 * 3600)] - 12 * 3600
        counts = np.histogram(noon, np.arange(0, 7201, 60))[0]
        expected = np.sqrt(1200 + (1200 * deviation) ** 2)
        assert counts.std() == pytest.approx(expected, rel=0.25)
    inside = np.sort(flat.arrival_s % 60) / 60
    assert stats.kstest(inside, "uniform").pvalue > 0.01


def test_a_day_can_be_pressed_and_turned():
    short = tidal(peak_rate=5.0, duration_s=2400.0, seed=1)
    assert short.arrival_s.max() < 2400
    per_hour = np.histogram(short.arrival_s, np.linspace(0, 2400, 25))[0]
    assert per_hour[12:14].mean() / per_hour[4:6].mean() == pytest.approx(6.0, rel=0.35)
    turned = tidal(peak_rate=5.0, duration_s=2400.0, start_hour=12.0, seed=1)
    assert np.histogram(turned.arrival_s, np.linspace(0, 2400, 25))[0][:2].mean() > 400


def test_lengths_are_those_of_sharegpt():
    w = tidal(peak_rate=2.0, seed=1)
    prompt, output = LENGTHS["sharegpt"]
    assert w.prompt_tokens.mean() == pytest.approx(prompt.mean, rel=0.03)
    assert w.output_tokens.mean() == pytest.approx(output.mean, rel=0.03)
    assert_same(w, tidal(peak_rate=2.0, seed=1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: longdoc("loogle"),
        lambda: longdoc(requests=0),
        lambda: longdoc(requests=10, documents=11),
        lambda: longdoc(documents=0),
        lambda: longdoc(order="sorted"),
        lambda: longdoc(block_tokens=0),
        lambda: longdoc(seed=-1),
        lambda: longdoc(
            DocumentShape(3, 2, LengthShape(80, 1, 70, 90), 1.0, LengthShape(5, 1, 1, 10))
        ),
        lambda: tidal(peak_rate=0),
        lambda: tidal(duration_s=float("nan")),
        lambda: tidal(start_hour=24),
        lambda: tidal(burstiness=-1),
        lambda: tidal(lengths="gpt"),
        lambda: tidal(peak_rate=1e9),
        lambda: tidal(seed=-1),
        lambda: tidal(peak_rate=1e-9),
    ],
)
def test_impossible_requests_are_one_line(make):
    with pytest.raises(WorkloadError) as e:
        make()
    assert "\n" not in str(e.value)
