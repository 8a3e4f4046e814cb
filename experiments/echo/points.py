"""The grids of the Echo study.

The paper's trace, the scale of its rates and the sizes of its pools are not public. Figure `day`
is of a whole day, the other runs are of some minutes from each part of a day (`runs.day`). Figure
`settings` varies what the paper leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from twinserve.experiments.echo.runs import HISTORY_S, LADDER, POOLS
from twinserve.experiments.study.study import Scale, points_over
from twinserve.sim.sweep.grid import Point

SHORT = "loogle-short"
BASE = "as in Fig. 6"
# what Echo believes -> how it is bounded: as printed with the paper's forms, by gaps (Fig. 7) with
# the others
ESTIMATORS = {"paper": "", "echo-printed": "", "echo-sum": ":slo=gap", "perfect": ":slo=gap"}
ENDS = (LADDER[0], LADDER[-1])
# rungs that are run beside each pool; with exactly known step times runs take longest
RUNGS = {
    "paper": dict.fromkeys(POOLS, LADDER),
    "echo-printed": dict.fromkeys(POOLS, ENDS),
    "echo-sum": {pool: LADDER if pool == SHORT else ENDS for pool in POOLS},
    "perfect": {SHORT: LADDER, "toolbench": ENDS, "next-qa": ENDS},
}
SERIES = ((LADDER[2], "paper"), (LADDER[3], "paper"), (LADDER[3], "echo-sum"))  # with estimator
# Figs. 8 to 10 show so many minutes of a day, and figure `day` all of them; the history of the
# threshold is as large a part of the day in both
SHOWN_MINUTES, DAY_MINUTES = 24, 1440
SHOWN_HISTORY_S = HISTORY_S * SHOWN_MINUTES / DAY_MINUTES
SHOWN_BIN_S, DAY_BIN_S = 60.0, 300.0
# BS as an engine of the paper's time runs it: tokens of a step
BS_512, BUDGET_512 = f"{LADDER[0]}, 512 tokens a step", 512
HALF = 4985  # blocks
ALONE = "online alone"
PRINTED = f"{LADDER[-1]}:slo=cumulative"

# what is changed -> arguments of a run, for BS and Echo; `options` and `estimator` concern Echo
# alone
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    BASE: {},
    "TPOT bounds gaps": {"options": "slo=gap"},
    "climb": {"options": "offline=climb"},
    "eq. 8 as printed": {"estimator": "echo-printed"},
    "cached text counts": {"options": "b_hit=1"},
    "total context in eq. 7": {"estimator": "echo-total"},
    "total context in eq. 7, TPOT bounds gaps": {"estimator": "echo-total", "options": "slo=gap"},
    "sums": {"estimator": "echo-sum"},
    "sums, TPOT bounds gaps": {"estimator": "echo-sum", "options": "slo=gap"},
    "estimate corrected, TPOT bounds gaps": {"options": "slo=gap,feedback=0.2"},
    "exact step times": {"estimator": "perfect"},
    "exact step times, TPOT bounds gaps": {"estimator": "perfect", "options": "slo=gap"},
    "sums, TPOT bounds gaps, no threshold": {
        "estimator": "echo-sum",
        "options": "slo=gap,threshold=false",
    },
    "sums, TPOT bounds gaps, pool listed by document": {
        "estimator": "echo-sum",
        "options": "slo=gap",
        "order": "by-document",
    },
    "sums, TPOT bounds gaps, one and a half of the online rate": {
        "estimator": "echo-sum",
        "options": "slo=gap",
        "peak_rate": 12.0,
    },
    "sums, TPOT bounds gaps, half of the KV memory": {
        "estimator": "echo-sum",
        "options": "slo=gap",
        "num_blocks": HALF,
    },
    "sums, TPOT bounds gaps, 512 tokens a step": {
        "estimator": "echo-sum",
        "options": "slo=gap",
        "budget": 512,
    },
}
# M in parts: an LRU cache, its eviction order, and its threshold too. In what order offline
# requests are begun -> policies
PARTS = ("LRU", "eviction order", "and threshold")
BY_REWARD = ("echo-bs-e-s", "echo:threshold=false", "echo")
ARRIVAL, AT_ONCE, OVER_TIME = (
    "first come, first served",
    "by reward",
    "by reward, submitted one by one",
)
ORDERS: Mapping[str, tuple[str, ...]] = {
    ARRIVAL: ("echo-bs-e", "echo-bs-e:kv=task-aware", "echo:kv_aware=false"),
    AT_ONCE: BY_REWARD,
    OVER_TIME: BY_REWARD,
}
# name -> policy of figure `shared`
SHARING = {
    "BS": LADDER[0],
    "Echo": f"{LADDER[-1]}:slo=gap",
    "Echo, estimate corrected": f"{LADDER[-1]}:slo=gap,feedback=0.2",
}
DOCUMENTS = 12  # by half more than the memory holds
SUBMITTED = 600  # one by one, questions of a run: more than can be answered
# figure `memory`: from what hour of the day on, by how the tide goes then; the other history, s
HOURS_FORETOLD = {"level": 12.0, "rising": 7.0}
SHORT_HISTORY_S = 300.0
QUICK_HISTORY_S = 60.0
QUICK_BUSY = 17.0  # one minute of seed 0
QUICK_VARIANTS = (BASE, "sums, TPOT bounds gaps", "exact step times")


def minutes(scale: Scale, full: int) -> int:
    return 1 if scale.quick else full


_over = partial(points_over, unchanged={"estimator": "paper"})


def _small(pool: str | None, scale: Scale) -> dict[str, Any]:
    """Arguments that make a run short, for tests."""
    if not scale.quick:
        return {}
    return {
        "requests": 25 if pool != "sharegpt" else 100,
        "peak_rate": 2.0,
        "history_s": QUICK_HISTORY_S,
    }


def days(scale: Scale) -> list[Point]:
    """Fig. 2."""
    return _over(scale, [{}], ())


def throughput(scale: Scale) -> list[Point]:
    """Fig. 6. BS asks no estimator: its run stands beside all. BS_512 stands beside the paper's."""
    pools = (SHORT, "sharegpt") if scale.quick else tuple(POOLS)
    bs_512 = {"policy": LADDER[0], "_policy": BS_512, "_estimator": "paper", "budget": BUDGET_512}
    settings = [
        bs_512 | {"pool": pool, "minutes": minutes(scale, 6)} | _small(pool, scale)
        for pool in pools
    ]
    settings += [
        {"_policy": p, "pool": pool, "_estimator": estimator, "minutes": minutes(scale, 6)}
        | ({"policy": p} if p == LADDER[0] else {"policy": p + slo, "estimator": estimator})
        | _small(pool, scale)
        for pool in pools
        for estimator, slo in ESTIMATORS.items()
        for p in RUNGS[estimator].get(pool, ())
    ]
    return _over(scale, settings, ("pool", "estimator", "policy"))


def latencies(scale: Scale) -> list[Point]:
    """Fig. 7: those of Fig. 6 beside questions on LooGLE's short set, Echo with exact step times
    and the SLO as printed, and online requests alone."""
    mine = [p for p in throughput(scale) if p.axes["pool"] == SHORT]
    alone = {"policy": LADDER[0], "pool": None, "minutes": minutes(scale, 6)}
    alone |= {k: v for k, v in _small(None, scale).items() if k != "requests"}
    alone |= {"_policy": ALONE, "_pool": SHORT, "_estimator": "paper"}
    printed = {"policy": PRINTED, "pool": SHORT, "minutes": minutes(scale, 6)}
    printed |= {"estimator": "perfect"} | _small(SHORT, scale)
    return mine + _over(scale, [printed, alone], ("pool", "estimator", "policy"))


def series(scale: Scale) -> list[Point]:
    """Figs. 8 to 10: a minute of each hour of a day, beside a pool that is refilled."""
    size = {"minutes": SHOWN_MINUTES, "bin_s": SHOWN_BIN_S, "requests": 5_000}
    return _series(scale, size | {"history_s": SHOWN_HISTORY_S}, f"history_s={SHOWN_HISTORY_S:g}")


def whole_day(scale: Scale) -> list[Point]:
    """The same over all minutes of the day."""
    return _series(scale, {"minutes": DAY_MINUTES, "bin_s": DAY_BIN_S}, "")


def _series(scale: Scale, size: Mapping[str, Any], option: str) -> list[Point]:
    if scale.quick:
        size = {"minutes": 1} | _small(SHORT, scale)
    settings = [
        {"policy": _with(p + ESTIMATORS[e], option), "_policy": p, "estimator": e}
        | {"pool": SHORT, "refill": True, **size}
        for p, e in SERIES
    ]
    return _over(scale, settings, ("policy", "estimator"))


def _with(policy: str, option: str) -> str:
    """The policy with one more option; empty: as it is."""
    return policy if not option else f"{policy}{',' if ':' in policy else ':'}{option}"


def busy(scale: Scale) -> list[Point]:
    """The busiest minutes of a day: online requests alone, and beside Echo whose step times add
    up."""
    estimator = "echo-sum"
    beside = {"policy": LADDER[-1] + ESTIMATORS[estimator], "pool": SHORT, "estimator": estimator}
    settings = [
        {"policy": LADDER[0], "pool": None, "_policy": ALONE},
        {"_policy": LADDER[-1], **beside},
    ]
    fewer = {"above": QUICK_BUSY} if scale.quick else {}
    return _over(scale, [one | fewer for one in settings], ("policy",))


def arrivals(scale: Scale) -> list[Point]:
    """Fig. 11."""
    return _over(scale, [{"burstiness": b} for b in (0.3, 0.0)], ("burstiness",))


def memory(scale: Scale) -> list[Point]:
    """Sec. 5.3, with the paper's hour of history and with a short one, where the tide is level and
    where it rises."""
    size: dict[str, Any] = {"minutes": 30, "histories_s": [HISTORY_S, SHORT_HISTORY_S]}
    if scale.quick:
        size = {"minutes": 2, "histories_s": [60.0, 30.0], "warm_s": 0.0}
    settings = [
        size | {"hour": HOURS_FORETOLD[tide], "_tide": tide, "burstiness": b}
        for tide in HOURS_FORETOLD
        for b in (0.3, 0.0)
    ]
    return _over(scale, settings, ("tide", "burstiness"))


def caches(scale: Scale) -> list[Point]:
    """What M keeps, where several documents are asked about in turns (shuffled, first come first
    served), where the scheduler chooses one after another, and where it cannot finish a document
    because questions on it are still to come."""
    size = {"minutes": minutes(scale, 6), "documents": DOCUMENTS}
    one_by_one = {"submitted_s": 60.0 * size["minutes"], "requests": SUBMITTED}
    settings = [
        {"policy": policy, "pool": SHORT, "_order": order, "_part": part, **size}
        | (one_by_one if order == OVER_TIME else {})
        | (_small(SHORT, scale) if scale.quick else {})
        for order, policies in ORDERS.items()
        for part, policy in zip(PARTS, policies, strict=True)
    ]
    return _over(scale, settings, ("order", "part"))


def shared(scale: Scale) -> list[Point]:
    """What reading a document once for all decodes on it changes; without it the runs are those of
    Fig. 6, but for the estimate that is corrected."""
    settings = [
        {"policy": p, "_policy": name, "pool": pool, "minutes": minutes(scale, 6)}
        | ({"estimator": "echo-sum"} if p != LADDER[0] else {})
        | {"shared_prefix": once}
        | _small(pool, scale)
        for pool in ((SHORT,) if scale.quick else (SHORT, "toolbench"))
        for name, p in SHARING.items()
        for once in (False, True)
    ]
    axes = ("pool", "policy", "shared_prefix")
    return points_over(scale, settings, axes, {"shared_prefix": False})


def varied(scale: Scale) -> list[Point]:
    """One setting at a time is changed."""
    settings = []
    for name, changed in VARIANTS.items():
        if scale.quick and name not in QUICK_VARIANTS:
            continue
        work = {k: v for k, v in changed.items() if k != "options"}
        options = f":{changed['options']}" if "options" in changed else ""
        for p in ENDS:
            bs = p == LADDER[0]  # what concerns the bound and the estimate does not change it
            mine = {k: v for k, v in work.items() if not (bs and k == "estimator")}
            one = {"policy": p if bs else p + options, "_policy": p, "_change": name}
            one |= {"pool": SHORT, "minutes": minutes(scale, 6)}
            settings.append(one | _small(SHORT, scale) | mine)
    return _over(scale, settings, ("change", "policy"))
