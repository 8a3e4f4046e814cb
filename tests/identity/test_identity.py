"""Policy `vllm` takes the decisions of the real vLLM scheduler, step for step, in every corner we
could think of: asynchronous scheduling, pipeline stages and clients that leave included.

Each case must show that what it is for happened. The nightly part `identity` runs a million steps
of each class of scenarios.
"""

import dataclasses

import pytest

from tests.identity import regimes
from tests.identity.compare import Report, compare
from tests.identity.draft_scenarios import drafted
from tests.identity.drafts import OurDrafts, compare_drafts
from tests.identity.mutations import Mutation, mutations
from tests.identity.ours import OurScheduler
from tests.identity.real_scheduler import RealScheduler
from tests.parameters import mostly_nightly
from twinserve.profiles.ranks import layers_of_stages
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("vllm")]

LEAVING = 0.05  # of the steps, where clients leave
FOUR = ("preemption", "partial_chunks", "priority", "mixed")
# (class of scenarios, seed, stages, share of the steps before which a client leaves)
STAGES = (
    ("preemption", 1, 2, 0.0), ("preemption", 3, 4, 0.0), ("partial_chunks", 5, 4, 0.0),
    ("partial_chunks", 3, 2, 0.05), ("priority", 3, 3, 0.0), ("mixed", 3, 2, 0.05),
    ("mixed", 4, 4, 0.0), ("short_outputs", 0, 3, 0.0),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """runs   arguments of `compare`
    least  steps and counters of all runs together; each: of each run; never: counters that stay 0
    """

    runs: tuple[tuple, ...]
    least: dict[str, int]
    each: dict[str, int] = dataclasses.field(default_factory=dict)
    never: tuple[str, ...] = ()
    asynchronous: bool = False
    most: int | None = None  # steps of a run

    def check(self) -> None:
        total = Report()
        for run in self.runs:
            report = compare(*run, asynchronous=self.asynchronous, max_steps=self.most)
            assert report.mismatches == 0, f"{run}: {report.first_mismatch}"
            self._seen(report, self.each, str(run))
            total += report
        self._seen(total, self.least, "all")

    def _seen(self, report: Report, least: dict[str, int], of: str) -> None:
        few = {name: getattr(report, name) for name in least if getattr(report, name) < least[name]}
        assert not few, f"too few of {of}: {few}"
        assert not any(getattr(report, name) for name in self.never), of


def leaving(asynchronous: bool) -> Case:
    """Waiting, running, in the middle of a prompt, preempted, with a token on its way."""
    runs = zip(FOUR, (3, 5, 3, 3) if asynchronous else (1, 5, 3, 3), strict=True)
    flight = "withdrawn_in_flight"
    return Case(
        tuple((*run, 1, LEAVING) for run in runs),
        {"steps": 7_500, "withdrawn_returning": 1, "withdrawn_in_chunk": 1}
        | ({"withdrawn_at_end": 1} if asynchronous else {}),
        {"withdrawn_running": 21, "withdrawn_new": 6} | ({flight: 6} if asynchronous else {}),
        () if asynchronous else (flight,),
        asynchronous,
    )


# With stages: victims for which a batch under way computed, and those whose last token comes late.
STAGED = {
    "steps": 15_001, "drained_preemptions": 31, "ended_victims": 1, "partial_chunks": 301,
    "resumed_hit_tokens": 1, "withdrawn_running": 21,
}  # fmt: skip
CASES = {
    # fcfs: the victim is always the last of the batch, and finds blocks of its own when it is back
    "preemption": Case(
        (("preemption", 0), ("preemption", 1)),
        {"steps": 5_000, "preemptions": 501, "resumed_hit_tokens": 1},
        never=("priority_preemptions",),
    ),
    # requests compute the same text side by side
    "partial chunks": Case(
        (("partial_chunks", 1), ("partial_chunks", 2)),
        {"steps": 5_000, "partial_chunks": 5_001, "duplicates": 1},
    ),
    # victims from the middle of the batch, served earlier in the same step: their tokens go back
    "priority": Case(
        (("priority", 0), ("priority", 1)),
        {"steps": 5_000, "priority_preemptions": 101, "granted_victims": 26},
    ),
    "everything at once": Case(
        (("mixed", 0), ("mixed", 1), ("mixed", 2)),
        {"steps": 5_000, "preemptions": 1, "priority_preemptions": 1, "evictions": 1}
        | {"partial_chunks": 1, "resumed_hit_tokens": 1},
    ),
    # the last token came while they waited, and they were left out while it was computed
    "ahead": Case(
        (("preemption", 1), ("preemption", 3), ("partial_chunks", 5), ("priority", 3),
         ("mixed", 3)),
        {"steps": 20_000, "in_flight_preemptions": 501, "ended_victims": 6, "held_back": 1_001}
        | {"resumed_hit_tokens": 1, "partial_chunks": 1_001, "granted_victims": 1},
        asynchronous=True,
    ),
    "clients leave": leaving(False),
    "clients leave, ahead": leaving(True),
    "stages": Case(STAGES, STAGED, most=2_500),
    "stages, ahead": Case(STAGES, STAGED, asynchronous=True, most=2_500),
}  # fmt: skip
TRACE = {
    "prefix eviction": Case(
        (("prefix_eviction", 0),),
        {"steps": 5_000, "evictions": 25_001, "hit_tokens": 250_001, "resumed_hit_tokens": 1}
        | {"duplicates": 1},
    ),
    "ahead": Case(
        (("prefix_eviction", 1),),
        {"evictions": 100_001, "resumed_hit_tokens": 1, "in_flight_preemptions": 101}
        | {"ended_victims": 1},
        asynchronous=True,
    ),
    **{
        f"clients leave{', ahead' * asynchronous}": Case(
            (("prefix_eviction", 1, 1, LEAVING),),
            {"withdrawn_running": 21, "evictions": 10_001, "hit_tokens": 1},
            asynchronous=asynchronous,
        )
        for asynchronous in (False, True)
    },
}


@pytest.mark.parametrize("name", mostly_nightly(CASES, *[n for n in CASES if n != "stages, ahead"]))
def test_decisions_are_vllms(name, request):
    if "stages" in name:
        request.getfixturevalue("newest")
    CASES[name].check()


@pytest.mark.usefixtures("mooncake")
@pytest.mark.traces
@pytest.mark.parametrize("name", mostly_nightly(TRACE, "ahead", "clients leave"))
def test_decisions_are_vllms_on_a_real_trace(name):
    TRACE[name].check()


# -- broken rules ----------------------------------------------------------------------------------
REMOTE = {
    "synchronous": regimes.Regime("decode", False),
    "ahead": regimes.Regime("decode", True),
    "failing": regimes.Regime("decode", True, recompute=False),
    "prefill": regimes.Regime("prefill", True),
}


def broken(section: str, rule: Mutation) -> list[Report]:
    """Runs of the rule's witness in which one side has it broken."""
    side = RealScheduler if section.startswith("vllm") else OurScheduler
    make = lambda settings: side(settings, mutation=rule)  # noqa: E731
    ahead = section.endswith("ahead") or rule.setting == "ahead"
    if section == "drafts":
        ours = lambda settings: OurDrafts(settings, rule)  # noqa: E731
        return [compare_drafts(drafted(*rule.witness, ahead), ours)[0]]
    if section == "remote":
        return [regimes.compare(REMOTE[rule.setting], *rule.witness, rule)[0]]
    if section == "withdrawals":
        both = (False, True)
        return [compare(*rule.witness, 1, LEAVING, asynchronous=a, make=make) for a in both]
    stages = 4 if section == "pipeline" else 1
    return [compare(*rule.witness, stages, asynchronous=ahead, make=make)]


SECTIONS = (
    "ours", "vllm", "ours_ahead", "vllm_ahead", "drafts", "withdrawals", "pipeline", "remote",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(
    ("section", "rule"),
    [
        pytest.param(section, rule, id=f"{section}: {rule.name} {rule.setting}".strip())
        for section in SECTIONS
        for rule in mutations(section)
    ],
)
def test_a_broken_rule_is_caught(section, rule):
    for report in broken(section, rule):
        assert report.mismatches == 1
        if section.startswith("vllm"):  # seen in what it decided, not because it broke down
            assert "raised" not in report.first_mismatch


@pytest.mark.nightly
@pytest.mark.usefixtures("newest")
def test_vllm_that_resumes_too_early_is_seen_in_the_decisions():
    """Its own rule broken: a dropped request comes back while its old batch is under way."""
    rule = "if request.num_stale_output_tokens and not request.drop_stale_output:"
    early = Mutation("", "", ("", 0), (("", "schedule", rule, "if False:"),))
    real = lambda settings: RealScheduler(settings, mutation=early)  # noqa: E731
    assert compare("preemption", 3, 4, make_real=real).mismatches == 1


# -- the comparison itself -------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.parametrize("witness", sorted({m.witness for m in mutations("vllm")}), ids=str)
def test_no_false_alarm(witness):
    report = compare(*witness, make=RealScheduler, max_steps=1500)
    assert report.mismatches == 0 and report.steps == 1500


@pytest.mark.parametrize(("seed", "ahead"), [(0, False), (1, False), (3, True)])
def test_vllms_own_block_hashes_lead_to_the_same_decisions(seed, ahead):
    make = OurScheduler if ahead else RealScheduler
    report = compare("mixed", seed, asynchronous=ahead, make=make, hashing="vllm", max_steps=1500)
    assert report.mismatches == 0, report.first_mismatch
    assert report.hit_tokens > 0 and report.resumed_hit_tokens > 0 and report.duplicates > 0


def test_both_sides_agree_with_themselves_ahead():
    report = compare("preemption", 3, asynchronous=True, make=RealScheduler, max_steps=1000)
    assert report.mismatches == 0 and report.steps == 1000


@pytest.mark.parametrize(
    ("stages", "ahead", "change"),
    [(1, True, {"async_scheduling": False}), (2, False, {"pipeline_stages": 1})],
)
def test_an_engine_of_another_depth_decides_otherwise(stages, ahead, change):
    """The comparison sees what is under way at all."""
    make = lambda settings: OurScheduler(dataclasses.replace(settings, **change))  # noqa: E731
    assert compare("preemption", 3, stages, asynchronous=ahead, make=make).mismatches == 1


# -- what beside its decisions is vLLM's -----------------------------------------------------------
def test_an_override_leaves_as_many_blocks_as_in_vllms_pool():
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(100, enable_caching=False, hash_block_size=16)
    config = SimulationConfig(num_gpu_blocks_override=pool.num_gpu_blocks)
    assert resolve_hardware(config).num_blocks == pool.get_num_free_blocks() == 99


def test_layers_lie_where_vllm_puts_them():
    from vllm.distributed.utils import get_pp_indices

    for pp in range(1, 9):
        for layers in range(pp, 101, 3):
            bounds = [get_pp_indices(layers, rank, pp) for rank in range(pp)]
            assert layers_of_stages(layers, pp) == [end - start for start, end in bounds]
