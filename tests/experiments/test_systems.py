"""The comparison of the systems: every figure at its smallest size, and what must hold in it."""

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.study.runs import run
from twinserve.experiments.study.study import Scale
from twinserve.experiments.systems import main as systems
from twinserve.experiments.systems import saturated
from twinserve.policies.registry import parse_policy, policy_names
from twinserve.sim.setup.objectives import parse_objectives

PARTS = systems.PARTS
GROUPS = {
    "ladder-fit": PARTS.FIT_LADDER, "ladder": PARTS.LADDERS, "prefixes": systems.PREFIXES,
    "documents": PARTS.DOCUMENTS, "documents-systems": PARTS.DOCUMENT_SYSTEMS,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("systems")
    systems.STUDY.run([], Scale(quick=True, seeds=(0,)), out, workers=2)
    return out


LOAD_FIGURES = ("loads", "loads-tight", "four-gpus", "four-gpus-tight", "overload")
SAME = ("trace", "window", "seed", "policy")


def table(found, name: str) -> pd.DataFrame:
    return pd.read_csv(found / name / "table.csv")


# -- what is compared ------------------------------------------------------------------------------
def parts_of(groups: systems.Parts) -> list[tuple[str, str, str, bool | None]]:
    """(system, part, policy, caching) of every part."""
    rows = [
        (system, name, part) for system, group in groups.items() for name, part in group.items()
    ]
    return [(s, n, *((part, None) if isinstance(part, str) else part)) for s, n, part in rows]


@pytest.mark.parametrize("figure", GROUPS)
def test_no_two_parts_are_the_same_memory_by_construction(figure):
    """A layer-wise ledger is a paged one without cache to all but LayerKV, a task-aware one a paged
    one where nothing is looked up, and no part is there twice."""
    for system in GROUPS[figure]:
        seen = set()
        for _, name, policy, caching in parts_of({system: GROUPS[figure][system]}):
            spec = parse_policy(policy)
            caches = spec.policy.prefix_caching if caching is None else caching
            assert spec.label == policy and (policy, caching) not in seen, name
            seen.add((policy, caching))
            if spec.kv_name == "layerwise":
                assert spec.name == "layerkv", name
            if spec.kv in ("task-aware", "paged-rc") and figure != "prefixes":
                assert caches and figure.startswith("documents"), name


def axes_of(name: str, scale: Scale) -> pd.DataFrame:
    figure = next(figure for figure in systems.STUDY.figures if figure.name == name)
    return pd.DataFrame([point.axes for point in figure.points(scale)])


def test_combinations_run_at_two_loads_and_in_a_window_for_each_seed():
    for name in (*GROUPS, "applications"):
        axes = axes_of(name, Scale(seeds=tuple(range(5))))
        pace = "pace" if name == "applications" else "load"
        keys = [k for k in ("trace", "system", "part") if k in axes]
        sizes = axes.groupby([*keys, pace])["seed"].nunique()
        assert (sizes == 5).all()
        if keys:
            assert (axes.groupby(keys)[pace].nunique() == 2).all()


def test_windows_do_not_overlap_and_the_first_ones_span_the_recording():
    assert min(np.diff(sorted(systems.BEGINS))) >= max(systems.WINDOWS.values())
    assert len(set(systems.BEGINS)) == len(systems.BEGINS)
    for name in LOAD_FIGURES:
        axes = axes_of(name, Scale(seeds=tuple(range(6))))
        assert sorted(set(axes["window"])) == [0, 600, 1200, 1800, 2400, 3000]


def work_of(name: str) -> list[dict]:
    figure = next(figure for figure in systems.STUDY.figures if figure.name == name)
    return [dict(point.arguments) for point in figure.points(Scale(quick=True, seeds=(0,)))]


def test_objectives_and_gpus_are_all_that_the_variants_of_loads_change():
    """Each is a run of its own, since policies read objectives: none is judged afterwards."""
    plain = work_of("loads")
    assert {point["settings"]["policy"] for point in plain} == set(systems.SYSTEMS)
    changed = {}
    for name in LOAD_FIGURES:
        for point in (work := work_of(name)):
            (was,) = [
                p for p in plain if all(p["settings"][k] == point["settings"][k] for k in SAME)
            ]
            more = {k: v for k, v in point["settings"].items() if was["settings"].get(k) != v}
            assert changed.setdefault(name, more) == more and was["columns"] == point["columns"]
        asked = {p["settings"]["policy"] for p in work if p["settings"]["trace"] == "azure-2023"}
        assert set(systems.SYSTEMS) - asked <= {"bros", PARTS.CHUNK}
    loose, tight, four = {}, {"slo": systems.TIGHT}, {"profile": systems.FOUR_GPUS}
    assert list(changed.values()) == [loose, tight, four, four | tight, {"load": 1.25}]
    # only the objective on TPOT is tighter
    loose, tight = parse_objectives(None), parse_objectives(systems.TIGHT)
    assert tight[0] == loose[0] and tight[1].bound_s == 0.05 < loose[1].bound_s


def test_each_system_is_there_with_a_prefix_cache_and_without():
    assert list(systems.PREFIXES["prefix cache"]) == list(systems.PREFIXES["no prefix cache"])
    for name, group in systems.PREFIXES.items():
        assert {part[1] for part in group.values()} == {name == "prefix cache"}
    # only a trace that names prefixes can tell the difference
    assert set(axes_of("prefixes", Scale())["trace"]) == {"mooncake"}


# -- tables ----------------------------------------------------------------------------------------
def test_applications_are_compared_with_the_step_before_and_with_the_first():
    means = dict(zip(systems.PARTS_OF_APPLICATIONS, (100.0, 50.0, 40.0, 30.0), strict=False))
    columns = {"pace": "2x", "p90_s": 1.0, "not_delayed": 1.0, "worst": 1.0}
    points = pd.DataFrame(
        [
            {"policy": policy, "mean_s": means.get(policy, 60.0), "seed": seed, **columns}
            for policy in systems.PARTS_OF_APPLICATIONS
            for seed in (0, 1)
        ]
    )
    rows = systems.applications_table(points).set_index(["group", "policy"])
    third = list(means)[2]
    assert rows.jct_gain["ladder", third] == pytest.approx(-0.2)
    assert rows.jct_gain["one part exchanged", "srjf"] == pytest.approx(0.0)
    assert rows.verdict["ladder", third] == "less" and rows.verdict["ladder", "vllm"] == ""


# -- past saturation -------------------------------------------------------------------------------
def test_throughput_past_saturation_is_over_that_of_vllm():
    common = {"memory": "tight", "pool": 0, "load": 2.0, "slo_attainment": 0.5, "span_s": 30.0}
    rate = {"vllm": 100.0, PARTS.FIT: 110.0, "preemptive-wait": 2.0}
    points = pd.DataFrame(
        {**common, "policy": policy, "seed": seed, "tokens_per_s": (1 + seed) * tokens}
        for policy, tokens in rate.items()
        for seed in (0, 1)
    )
    rows = saturated.SATURATED(points)
    assert rows["share"].to_list() == pytest.approx([1.0, 1.1, 0.02])
    assert f"| {PARTS.FIT} |  | 1.1 ± 0 | 50 ± 0 | 0 ± 0 |" in saturated.TEXT(rows)


def test_all_but_our_own_bounds_are_run_past_saturation():
    asked = axes_of("saturated", Scale(seeds=tuple(range(5))))
    assert set(saturated.POLICIES) == {*policy_names(), PARTS.FIT} - {systems.BOUND}
    assert set(asked.policy) == {*saturated.POLICIES, *saturated.RULES.values()}
    plain = asked[asked.policy.isin(saturated.POLICIES)]
    cells = len(saturated.MEMORY) * len(saturated.LOADS) * len(saturated.POOLS)
    assert (plain.groupby("policy").size() == 5 * cells).all()


@pytest.mark.slow
def test_quick_run_past_saturation(tmp_path):
    systems.STUDY.run(["saturated"], Scale(quick=True, seeds=(0, 1)), tmp_path, workers=1)
    rows = table(tmp_path, "saturated").set_index("policy")
    assert rows["share"]["vllm"] == 1.0 and rows.slo_gain["vllm"] == 0.0
    assert len(rows) == 4
    report = (tmp_path / "tables.md").read_text()
    assert "| preemptive-wait:newcomers_preempt=false |" in report


# -- runs ------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_a_tighter_objective_is_judged_and_is_what_policies_plan_with():
    """Attainment of TPOT falls for who plans nothing; who plans with it decodes faster."""
    one = systems.grid("mooncake", (1.0,), {"policy": ("vllm", PARTS.FIT)}, systems.POOL)
    quick = Scale(quick=True, seeds=(0,))
    runs = {
        (point.axes["policy"], slo): run({**point.arguments["settings"], "slo": slo}, one.columns)
        for point in one(quick)
        for slo in (None, systems.TIGHT)
    }
    vllm, tight = runs["vllm", None], runs["vllm", systems.TIGHT]
    assert tight["tpot_attainment"] < vllm["tpot_attainment"]
    assert tight["tpot_s"] == vllm["tpot_s"] and tight["ttft_attainment"] == vllm["ttft_attainment"]
    assert runs[PARTS.FIT, systems.TIGHT]["tpot_s"] < runs[PARTS.FIT, None]["tpot_s"]


@pytest.mark.nightly
@pytest.mark.parametrize("figure", LOAD_FIGURES)
def test_every_system_is_on_every_trace(found, figure):
    rows = table(found, figure)
    assert set(zip(rows.trace, rows.policy, strict=True)) == {
        (point["settings"]["trace"], point["settings"]["policy"]) for point in work_of(figure)
    }
    assert (found / figure / "plot.png").stat().st_size > 10_000
    assert (
        rows.slo_attainment.between(0, 1).all()
        and (rows.be_tokens_per_s > 0).all()
        and (rows.ttft_s > 0).all()
    )
    vllm = rows[rows.policy == "vllm"].set_index("trace")
    bros = rows[rows.policy == PARTS.FIT].set_index("trace")
    assert (bros.slo_attainment >= vllm.slo_attainment).all()  # deadlines are what it is for


@pytest.mark.nightly
@pytest.mark.parametrize("figure", GROUPS)
def test_parts_of_a_figure_are_those_it_names(found, figure):
    rows = table(found, figure)
    # without named prefixes a cache makes no difference, so these traces are not asked
    unasked = set(systems.UNNAMED) if figure == "prefixes" else set()
    assert set(rows.trace) == set(systems.WINDOWS) - unasked and (rows.be_tokens_per_s > 0).all()
    for system, group in GROUPS[figure].items():
        assert list(
            dict.fromkeys(rows[(rows.system == system) & (rows.trace == "mooncake")].part)
        ) == list(group)
    assert (found / figure / "plot.png").stat().st_size > 10_000


@pytest.mark.nightly
def test_what_has_a_prefix_cache_finds_prefixes(found):
    prefixes = table(found, "prefixes")
    hits = prefixes.set_index("system").prefix_hit_rate
    assert (hits["prefix cache"] > 0).all() and (hits["no prefix cache"] == 0).all()
    assert (table(found, "documents").prefix_hit_rate > 0).all()


@pytest.mark.nightly
def test_applications_and_everyone_are_there_and_the_report_shows_them(found):
    rows = table(found, "applications")
    assert set(rows.policy) == {
        policy for group in PARTS.APPLICATIONS.values() for policy in group.values()
    }
    assert (rows.mean_s > 0).all() and (rows.p90_s > rows.mean_s).all()
    everyone = {*policy_names(), PARTS.FIT} - {systems.BOUND}
    assert set(table(found, "everyone").policy) == everyone
    report = (found / "tables.md").read_text()
    assert all(f"| {name} |" in report for name in everyone)
    assert (found / "applications" / "plot.png").is_file()


@pytest.mark.nightly
def test_applications_have_completion_times():
    (point,) = [
        point
        for point in systems.everyone(Scale(seeds=(0,)))
        if tuple(point.axes.values())[:2] == ("applications", "vtc")
    ]
    row = run(**point.arguments)
    assert 0 < row["jct_s"] < row["jct_p90_s"]
