"""The application workload: its mix, its sizes, its arrivals, and that text comes before demand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.traces.apps import generate as apps
from twinserve.traces.apps.classes import (
    CLASSES,
    KINDS,
    LONGEST,
    Sample,
    TopicEffects,
    breadth,
    difficulty,
    draw,
    draw_text,
    training_samples,
)
from twinserve.traces.apps.generate import (
    DESCRIPTIONS,
    SHARES,
    applications,
    from_samples,
    kinds,
    load,
)
from twinserve.traces.load import load_trace
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.transform import head, merge
from twinserve.traces.verbs import list_traces
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_trace

SIZE = {c.kind: c.size for c in CLASSES}


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Arrivals of the embedded replica, wherever the tests run."""
    monkeypatch.delenv("TWINSERVE_TRACES", raising=False)


@pytest.fixture
def workload(tmp_path):
    return load("apps:3x", offline=True, cache_dir=tmp_path, seed=1)


def test_a_workload_of_the_papers_shape(workload):
    check_workload(workload)
    assert len(workload.group_names) == len(workload.applications) == 300
    found = [SIZE[info.kind] for info in workload.applications.values()]
    assert {size: found.count(size) for size in SHARES} == {"small": 216, "medium": 78, "large": 6}
    assert set(KINDS) >= {info.kind for info in workload.applications.values()}
    assert workload.longest <= LONGEST
    assert "replica" in workload.provenance.notices[0] and workload.provenance.replica
    names = [f"{info.kind}-{g}" for g, info in workload.applications.items()]
    assert names == workload.group_names


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, minutes", [("apps:1x", 18), ("apps:2x", 9), ("apps:3x", 6), ("apps", 9)]
)
def test_arrivals_fill_the_window(name, minutes, tmp_path):
    w = load(name, offline=True, cache_dir=tmp_path, count=150)
    first = [w.arrival_s[(w.group == g) & (w.stage == 0)] for g in range(150)]
    assert all(len(set(times.tolist())) == 1 for times in first)
    assert 0.95 * 60 * minutes < w.span_s <= 60 * minutes
    assert w.provenance.name == ("apps:2x" if name == "apps" else name)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_workload(workload, tmp_path):
    again, other = (load("apps:3x", offline=True, cache_dir=tmp_path, seed=seed) for seed in (1, 2))
    assert again.ids == workload.ids and np.array_equal(
        again.arrival_s, workload.arrival_s, equal_nan=True
    )
    assert np.array_equal(again.output_tokens, workload.output_tokens)
    assert again.applications == workload.applications
    assert other.applications != workload.applications


def test_an_application_does_not_depend_on_how_many_there_are():
    few, many = (applications(np.arange(float(n)), 3, ["EV", "SC", "CC", "PE"][:n]) for n in (2, 4))
    assert few.applications[1] == many.applications[1]
    assert (
        few.output_tokens[few.group == 1].tolist() == many.output_tokens[many.group == 1].tolist()
    )


def test_shares_are_as_exact_as_whole_numbers_allow():
    for count in (1, 7, 50, 300):
        sizes = [SIZE[kind] for kind in kinds(count, 0)]
        assert len(sizes) == count
        for size, share in SHARES.items():
            assert abs(sizes.count(size) - share * count) < 1


# Justitia, Fig. 3: blocks of LLaMA-2-7B on one A100-PCIe-40G
REFERENCE_KV_TOKENS, REFERENCE_ITERATION_S = 459 * 16, 0.05


def reference_seconds(sample) -> float:
    """How long an application takes alone, in seconds: the longer of its critical path and its KV
    token-time over the memory of the paper's Fig. 3, at 50 ms an iteration. What the sizes of
    classes refer to."""
    critical = sum(max(output for _, output in stage) for stage in sample.stages)
    token_time = sum(p * d + d * (d + 1) // 2 for p, d in sample.requests)
    return max(critical, token_time / REFERENCE_KV_TOKENS) * REFERENCE_ITERATION_S


@pytest.mark.slow
def test_classes_are_as_large_as_the_paper_says():
    """Small below a minute, medium 1 to 10, large above 10 (`usually`): here their medians."""
    for kind, size in SIZE.items():
        minutes = np.median([reference_seconds(s) for s in training_samples(kind, 60, seed=5)]) / 60
        low, high = {"small": (0, 1), "medium": (1, 10), "large": (10, 60)}[size]
        assert low < minutes < high, kind


def test_the_queries_of_fact_verification_are_as_in_figure_4():
    prompts = [s.stages[0][0][0] for s in training_samples("FV", 60)]
    assert 360 <= min(prompts) and max(prompts) <= 380


def test_a_harder_text_asks_for_more():
    """What a text says, without anything else, explains most of the demand of the class; texts do
    differ."""
    effects, rng = TopicEffects.of(KINDS.index("SC")), np.random.default_rng(0)
    samples = [draw("SC", rng) for _ in range(300)]
    # The graph's exponents: a cost grows about with the square of the length of outputs, and with
    # their number.
    scores = [0.7 * difficulty(s.text, effects) + 0.45 * breadth(s.text, effects) for s in samples]
    demands = [np.log(sum(p * d + d * d / 2 for p, d in s.requests)) for s in samples]
    assert np.std(scores) > 0.2
    assert np.corrcoef(scores, demands)[0, 1] > 0.7


def test_what_a_text_says_is_its_words_alone():
    """Not their order, and not the words that say nothing."""
    effects = TopicEffects.of(0)
    text = draw_text(np.random.default_rng(3), 100)
    words = text.split()
    for score in (difficulty, breadth):
        assert score(" ".join(reversed(words)), effects) == pytest.approx(score(text, effects))
        assert score(text + " please answer", effects) == pytest.approx(score(text, effects))
    assert difficulty("detailed thorough", effects) == 1 and difficulty("brief", effects) == -1
    assert breadth("many several", effects) == 1 and breadth("only one", effects) == -1


def test_training_samples_are_in_no_workload():
    texts = {s.text for kind in KINDS for s in training_samples(kind, 20, seed=1)}
    w = applications(np.arange(60.0), 1)
    assert not texts & {info.text for info in w.applications.values()}


def test_rows_follow_the_task_graph():
    w = from_samples(
        [0.0, 0.5],
        [Sample("A", "x", (((1, 2), (3, 4)), ((5, 6),))), Sample("B", "y", (((7, 8),),))],
    )
    assert w.ids == ["A-0/0.0", "A-0/0.1", "B-1/0.0", "A-0/1.0"]
    assert w.stage.tolist() == [0, 0, 0, 1] and w.prompt_tokens.tolist() == [1, 3, 7, 5]
    assert np.isnan(w.arrival_s[3]) and w.arrival_s[:3].tolist() == [0.0, 0.0, 0.5]
    check_workload(w)


def test_bad_requests_are_one_clear_line(tmp_path):
    for wrong in ({"name": "apps:9x"}, {"count": 0}, {"count": 10**6}):
        with pytest.raises(WorkloadError) as error:
            load(**{"name": "apps", "offline": True, "cache_dir": tmp_path, **wrong})
        assert "\n" not in str(error.value)
    assert apps.is_apps("apps") and not apps.is_apps("mooncake")
    assert set(DESCRIPTIONS) == {"apps", "apps:1x", "apps:2x", "apps:3x"}


@pytest.mark.slow
def test_it_goes_by_its_name(tmp_path, workload):
    by_name = load_trace("apps:3x", offline=True, cache_dir=tmp_path, seed=1)
    assert by_name.ids == workload.ids and by_name.applications == workload.applications
    assert set(DESCRIPTIONS) <= {row["name"] for row in list_traces(cache_dir=tmp_path)}
    with pytest.raises(WorkloadError, match="does not take rate"):
        load_trace("apps", rate=2.0, offline=True, cache_dir=tmp_path)


@pytest.mark.slow
def test_what_is_known_of_an_application_stays_with_it(workload):
    some = head(workload, 120)
    for w in (some, merge(some, workload)):
        assert len(w.applications) == len(w.group_names) > 20
        assert all(w.group_names[g].startswith(info.kind) for g, info in w.applications.items())


def test_classes_and_texts_survive_the_disk(tmp_path):
    """Group order is that of arrival in the file and not in the workload; half of the groups have
    no class."""
    w = applications(np.array([0.0, 9.0, 4.0, 2.0]), 5, ["CC", "EV", "FV", "SC"])
    w = replace(w, applications={g: info for g, info in w.applications.items() if g % 2})
    again = load_trace(write_trace(w, tmp_path / "apps.jsonl"))
    assert again.applications == w.applications and again.group_names == w.group_names
    assert all(info.text for info in again.applications.values())


def test_an_edited_file_keeps_the_classes_of_the_groups_that_are_left(tmp_path):
    w = applications(np.arange(3.0), 5, ["CC", "EV", "FV"])
    path = write_trace(w, tmp_path / "apps.jsonl")
    lines = [line for line in path.read_text().splitlines(True) if '"CC-0"' not in line]
    path.write_text("".join(lines))
    again = load_trace(path)
    assert {again.group_names[g]: info.kind for g, info in again.applications.items()} == {
        "EV-1": "EV",
        "FV-2": "FV",
    }


@pytest.mark.slow
def test_a_replayed_export_is_predicted_as_the_run_was(tmp_path):
    settings = {
        "policy": ("justitia:predictor=class-mean",),
        "profile": "llama-7b@a100-pcie-40g",
        "num_blocks": 300,
    }
    listed = load("apps:3x", offline=True, cache_dir=tmp_path, count=12)
    path = write_trace(listed, tmp_path / "apps.jsonl")
    again = resolve(SimulationConfig(trace=str(path), slo="none", **settings))
    first, second = (
        run_policy(replace(again, workload=w), again.policies[0]).rows
        for w in (listed, again.workload)
    )
    pd.testing.assert_frame_equal(first.requests, second.requests)
    without = run_policy(
        replace(again, workload=replace(listed, applications={})), again.policies[0]
    ).rows
    assert not first.requests.equals(without.requests)
