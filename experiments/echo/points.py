"""The grids of the Echo study.

The paper's trace, the scale of its rates and the sizes of its pools are not public. Figure `day`
is of a whole day, the other runs are of some minutes from each part of a day (`runs.day`). Figure
`settings` varies what the paper leaves out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from twinserve.experiments.echo.runs import HISTORY_S, LADDER, PEAK_RATE, POOLS, WARM_S
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.grid import Grid, joined

SHORT = "loogle-short"
BASE = "as in Fig. 6"
BS, ECHO = ENDS = (LADDER[0], LADDER[-1])
# what Echo believes -> how it is bounded: as printed with the paper's forms, by gaps (Fig. 7) with
# the others
ESTIMATORS = {"paper": "", "echo-printed": "", "echo-sum": ":slo=gap", "perfect": ":slo=gap"}
DATA = texts(__file__, "data.yaml")
QUICK, ORDERS, VARIANTS = DATA.QUICK, DATA.ORDERS, DATA.VARIANTS
# rungs that are run beside each pool; with exactly known step times runs take longest
RUNGS = {
    "paper": dict.fromkeys(POOLS, LADDER),
    "echo-printed": dict.fromkeys(POOLS, ENDS),
    "echo-sum": {pool: LADDER if pool == SHORT else ENDS for pool in POOLS},
    "perfect": {SHORT: LADDER, "toolbench": ENDS, "next-qa": ENDS},
}
SERIES = ((LADDER[2], "paper"), (ECHO, "paper"), (ECHO, "echo-sum"))  # with estimator
# Figs. 8 to 10 show so many minutes of a day, and figure `day` all of them; the history of the
# threshold is as large a part of the day in both
SHOWN_MINUTES, DAY_MINUTES = 24, 1440
SHOWN_HISTORY_S = HISTORY_S * SHOWN_MINUTES / DAY_MINUTES
# BS as an engine of the paper's time runs it: tokens of a step
BS_512 = f"{BS}, 512 tokens a step"
ALONE = "online alone"
PRINTED = f"{ECHO}:slo=cumulative"
DOCUMENTS = 12  # by half more than the memory holds


def grid(
    vary: Mapping[Any, Any], few: Mapping[Any, Any] | None = None, where=lambda at: True, **more
) -> Grid:
    """Runs of six minutes of a day."""
    common = {"minutes": 6, "requests": None, "peak_rate": PEAK_RATE, "history_s": HISTORY_S}
    return Grid(vary, common | more, where=where, few=few or {}, quick=QUICK)


def _rung(estimator: str, policy: str) -> dict[str, str]:
    """BS asks no estimator: its run is compared with all."""
    if policy == BS:
        return {"policy": policy}
    return {"policy": policy + ESTIMATORS[estimator], "estimator": estimator}


# -- Figs. 6 and 7 ---------------------------------------------------------------------------------
OF_BELIEF = ("estimator", "policy")


def ladder(pools: Sequence[str]):
    """Fig. 6 with these pools. BS_512 is listed under the paper's estimator."""
    rungs = {(e, p): _rung(e, p) for e in ESTIMATORS for p in LADDER}
    few = {"pool": (SHORT, "sharegpt")}
    return joined(
        grid({"pool": pools, OF_BELIEF: {("paper", BS_512): {"policy": BS, "budget": 512}}}, few),
        grid(
            {"pool": pools, OF_BELIEF: rungs},
            few,
            lambda at: at["policy"] in RUNGS[at["estimator"]].get(at["pool"], ()),
        ),
    )


THROUGHPUT = ladder(tuple(POOLS))
# Fig. 7: Echo with exact step times and the SLO as printed, and online requests alone, too
LATENCIES = joined(
    ladder((SHORT,)),
    grid(
        {
            "pool": (SHORT,),
            OF_BELIEF: {
                ("perfect", PRINTED): {"policy": PRINTED, "estimator": "perfect"},
                ("paper", ALONE): {"policy": BS, "pool": None},
            },
        }
    ),
)


# -- Figs. 8 to 10, Fig. 11 and Sec. 5.3 -----------------------------------------------------------
def _series(option: str, **more: Any) -> Grid:
    """With a pool that is refilled. option: one more of each policy."""
    policies = {(p, e): p + ESTIMATORS[e] for p, e in SERIES}
    made = {
        at: {"policy": f"{policy}{',' if ':' in policy else ':'}{option}" if option else policy}
        | {"estimator": at[1]}
        for at, policy in policies.items()
    }
    return grid({("policy", "estimator"): made}, pool=SHORT, refill=True, **more)


ACTIVE = _series(
    f"history_s={SHOWN_HISTORY_S:g}",
    minutes=SHOWN_MINUTES,
    bin_s=60.0,
    requests=5_000,
    history_s=SHOWN_HISTORY_S,
)
WHOLE_DAY = _series("", minutes=DAY_MINUTES, bin_s=300.0)
BURSTS = (0.3, 0.0)
# from what hour of the day on, by how the tide goes then
HOURS_FORETOLD = {"level": {"hour": 12.0}, "rising": {"hour": 7.0}}
MEMORY = Grid(
    {"tide": HOURS_FORETOLD, "burstiness": BURSTS},
    {"minutes": 30, "histories_s": [HISTORY_S, 300.0], "warm_s": WARM_S},
    quick={"minutes": 2, "histories_s": [60.0, 30.0], "warm_s": 0.0},
)

# -- M in parts ------------------------------------------------------------------------------------
# an LRU cache, its eviction order, and its threshold too. Documents are asked about in turns
# (shuffled, first come first served), or the scheduler chooses one after another, or it cannot
# finish a document because questions on it are still to come -> policies
PARTS = ("LRU", "eviction order", "and threshold")
ARRIVAL, AT_ONCE, OVER_TIME = (
    "first come, first served",
    "by reward",
    "by reward, submitted one by one",
)
# one by one: more questions than can be answered
SUBMITTED = {OVER_TIME: {"submitted_s": 360.0, "requests": 600}}
CACHES = grid(
    {
        ("order", "part"): {
            (order, part): {"policy": policy, **SUBMITTED.get(order, {})}
            for order, policies in ORDERS.items()
            for part, policy in zip(PARTS, policies, strict=True)
        }
    },
    pool=SHORT,
    documents=DOCUMENTS,
)
# -- one setting at a time -------------------------------------------------------------------------
GAP = "TPOT bounds gaps"
SUMS = f"sums, {GAP}"
VARIED = {
    (change, policy): {"policy": policy, **more}
    if policy == BS  # what concerns the bound and the estimate does not change it
    else {"policy": policy + options, "estimator": estimator, **more}
    for change, (options, estimator, more) in VARIANTS.items()
    for policy in ENDS
}
SETTINGS = grid(
    {("change", "policy"): VARIED},
    {("change", "policy"): [(c, p) for c in (BASE, SUMS, "exact step times") for p in ENDS]},
    pool=SHORT,
)
