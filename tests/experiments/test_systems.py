"""The comparison of the systems: every figure at its smallest size, and what must hold in it."""

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.study.study import Scale
from twinserve.experiments.systems import main as systems
from twinserve.experiments.systems.runs import generated
from twinserve.experiments.systems.tables import applications_table, before, first, table_of, told
from twinserve.policies.registry import parse_policy, policy_class, policy_names

GROUPS = {
    "ladder": systems.LADDERS,
    "ledgers": systems.LEDGERS,
    "documents": systems.DOCUMENTS,
    "documents-ledgers": systems.DOCUMENT_LEDGERS,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("systems")
    systems.STUDY.run([], Scale(quick=True, seeds=(0,)), out, workers=2)
    return out


def table(found, name: str) -> pd.DataFrame:
    return pd.read_csv(found / name / "table.csv")


# -- what is compared ------------------------------------------------------------------------------
def parts_of(groups: systems.Parts) -> list[tuple[str, str, str, bool | None]]:
    """(system, part, policy, caching) of every part."""
    rows = [
        (system, name, part) for system, parts in groups.items() for name, part in parts.items()
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
            if spec.kv in ("task-aware", "paged-rc"):
                assert caches and figure.startswith("documents"), name


def test_combinations_run_at_two_loads_and_six_windows_that_do_not_overlap():
    scale = Scale()
    for name in (*GROUPS, "applications"):
        figure = next(figure for figure in systems.STUDY.figures if figure.name == name)
        axes = pd.DataFrame([point.axes for point in figure.points(scale)])
        pace = "pace" if name == "applications" else "load"
        keys = [k for k in ("trace", "system", "part") if k in axes]
        sizes = axes.groupby([*keys, pace])["seed"].nunique()
        assert (sizes == 6).all()
        if keys:
            assert (axes.groupby(keys)[pace].nunique() == 2).all()
    begins = sorted(systems.BEGINS[: systems.A_SEED * len(scale.seeds)])
    assert min(np.diff(begins)) >= max(systems.WINDOWS.values())
    assert min(np.diff(sorted(systems.BEGINS))) >= max(systems.WINDOWS.values())


def test_each_system_is_tried_on_another_ledger():
    for system in ("bros", "echo", "layerkv", "justitia"):
        own = policy_class(system).default_kv
        kinds = {
            parse_policy(policy).kv_name
            for _, _, policy, _ in parts_of({system: systems.LEDGERS[system]})
        }
        assert own in kinds and len(kinds) > 1


# -- tables ----------------------------------------------------------------------------------------
def _points() -> pd.DataFrame:
    """Two windows, three parts: the second keeps 0.2 and 0.4 more than the first, the third as much
    as the second."""
    kept = {"a": (0.1, 0.5), "b": (0.3, 0.9), "c": (0.3, 0.9)}
    return pd.DataFrame(
        [
            {
                "part": p,
                "window": w,
                "seed": w,
                "slo_attainment": kept[p][w],
                "be_tokens_per_s": 100.0 * (1 + (p == "c")),
            }
            for p in kept
            for w in (0, 1)
        ]
    )


def test_gains_are_paired_over_windows():
    rows = table_of(("part",), (), before)(_points()).set_index("part")
    assert np.isnan(rows.slo_gain["a"]) and rows.slo_gain["b"] == pytest.approx(0.3)
    # t(0.975, 1) x sd / sqrt(2) of 0.2 and 0.4
    assert rows.slo_gain_ci["b"] == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert rows.be_gain["c"] == pytest.approx(1.0)
    assert list(rows.verdict.fillna("")) == ["", "within the spread", "the same"]
    rows = table_of(("part",), (), first)(_points()).set_index("part")
    assert rows.slo_gain["c"] == pytest.approx(0.3) and np.isnan(rows.slo_gain["a"])


def test_verdicts_in_words():
    assert [told(g, h) for g, h in ((0.3, 0.1), (-0.3, 0.1), (0.1, 0.3), (0.1, np.nan))] == [
        "more",
        "less",
        "within the spread",
        "within the spread",
    ]


def test_applications_are_compared_with_the_step_before_and_with_the_first():
    mean = {"vllm": 100.0, "parrot": 50.0, "justitia": 40.0}
    columns = {"pace": "2x", "p90_s": 1.0, "not_delayed": 1.0, "worst": 1.0}
    points = pd.DataFrame(
        [{"policy": p, "mean_s": m, "seed": s, **columns} for p, m in mean.items() for s in (0, 1)]
    )
    parts = {p: p for p in mean}
    rows = applications_table({"ladder": parts, "others": parts})(points).set_index(
        ["group", "part"]
    )
    assert rows.jct_gain["ladder", "justitia"] == pytest.approx(-0.2)
    assert rows.jct_gain["others", "justitia"] == pytest.approx(-0.6)


# -- runs ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_system_is_on_every_trace(found):
    rows = table(found, "loads")
    assert set(zip(rows.trace, rows.policy, strict=True)) == {
        (t, p) for t in systems.WINDOWS for p in systems.SYSTEMS
    }
    assert (
        rows.slo_attainment.between(0, 1).all()
        and (rows.be_tokens_per_s > 0).all()
        and (rows.ttft_s > 0).all()
    )
    vllm = rows[rows.policy == "vllm"].set_index("trace")
    bros = rows[rows.policy == systems.CHUNK].set_index("trace")
    assert (bros.slo_attainment >= vllm.slo_attainment).all()  # deadlines are what it is for


@pytest.mark.slow
@pytest.mark.parametrize("figure", GROUPS)
def test_parts_of_a_figure_are_those_it_names(found, figure):
    rows = table(found, figure)
    assert set(rows.trace) == set(systems.WINDOWS) and (rows.be_tokens_per_s > 0).all()
    for system, parts in GROUPS[figure].items():
        assert list(
            dict.fromkeys(rows[(rows.system == system) & (rows.trace == "mooncake")].part)
        ) == list(parts)
    assert (found / figure / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_what_has_a_prefix_cache_finds_prefixes(found):
    rows = pd.concat([table(found, "ledgers"), table(found, "documents-ledgers")])
    rows = rows[rows.trace == "mooncake"]
    cached = rows.part.isin(["paged, prefix cache", "task-aware"])
    assert cached.any() and (rows.prefix_hit_rate[cached] > 0).all()
    assert (rows.prefix_hit_rate[rows.part == "no prefix cache"] == 0).all()
    assert (table(found, "documents").prefix_hit_rate > 0).all()


@pytest.mark.slow
def test_applications_and_everyone_are_there_and_the_report_shows_them(found):
    rows = table(found, "applications")
    assert set(rows.policy) == {
        policy for parts in systems.APPLICATIONS.values() for policy in parts.values()
    }
    assert (rows.mean_s > 0).all() and (rows.p90_s > rows.mean_s).all()
    everyone = set(policy_names()) - {systems.BOUND}
    assert set(table(found, "everyone").policy) == everyone
    report = (found / "tables.md").read_text()
    assert all(f"| {name} |" in report for name in everyone)
    assert (found / "loads" / "plot.png").stat().st_size > 10_000 and (
        found / "applications" / "plot.png"
    ).is_file()


@pytest.mark.slow
def test_applications_have_completion_times():
    row = generated("applications", "vtc", seed=0, quick=True)
    assert 0 < row["jct_s"] < row["jct_p90_s"]
