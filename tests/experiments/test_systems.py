"""The comparison of the systems: every figure at its smallest size, and what must hold in it."""

import pandas as pd
import pytest
from twinserve.experiments import systems
from twinserve.experiments.study import Scale
from twinserve.policies.registry import parse_policy, policy_names

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("systems")
    systems.STUDY.run([], Scale(quick=True, seeds=(0,)), out, workers=2)
    return out


def table(found, name: str) -> pd.DataFrame:
    return pd.read_csv(found / name / "table.csv")


def test_every_system_is_on_every_trace(found):
    rows = table(found, "loads")
    assert set(zip(rows.trace, rows.policy, strict=True)) == {(t, p) for t in systems.WINDOWS for p in systems.SYSTEMS}
    assert rows.slo_attainment.between(0, 1).all() and (rows.be_tokens_per_s > 0).all() and (rows.ttft_s > 0).all()
    vllm = rows[rows.policy == "vllm"].set_index("trace")
    bros = rows[rows.policy == systems.CHUNK].set_index("trace")
    assert (bros.slo_attainment >= vllm.slo_attainment).all()  # deadlines are what it is for


def test_parts_of_a_ladder_are_those_it_names(found):
    rows = table(found, "ladder")
    for system, parts in systems.LADDERS.items():
        assert list(dict.fromkeys(rows[rows.system == system].part)) == list(parts)
        for text in parts.values():
            assert parse_policy(text).label == text
    cached = rows[rows.policy.isin(systems.CACHED) & (rows.trace == "mooncake")]
    alone = rows[(rows.policy == "justitia") & (rows.trace == "mooncake")]
    assert (cached.prefix_hit_rate > 0).all() and (alone.prefix_hit_rate == 0).all()


def test_everyone_is_there_and_the_report_shows_it(found):
    rows = table(found, "everyone")
    everyone = set(policy_names()) - {systems.BOUND}
    assert set(rows.policy) == everyone
    report = (found / "tables.md").read_text()
    assert all(f"| {name} |" in report for name in everyone)
    assert (found / "loads" / "plot.png").stat().st_size > 10_000 and (found / "ladder" / "plot.png").is_file()


def test_applications_have_completion_times():
    row = systems.generated("applications", "vtc", seed=0, quick=True)
    assert 0 < row["jct_s"] < row["jct_p90_s"]
