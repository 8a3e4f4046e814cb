"""The figures of the BROS paper: `twinserve study bros [FIGURE ...]`. docs/bros.md
says what comes out.

Figure numbers are those of the IEEE version; the ACM version counts each one higher, has
OPT-13B, OPT-30B and Llama-3-70B in place of Qwen2.5, and adds LMSYS lengths. Both print the same
improvements, so all five models are run.

Models, lengths and objectives are the paper's: lengths of its Table II, Poisson arrivals,
best-effort requests in closed-loop batches, 0.4 s and 0.2 s (Sec. VII-A). Of the rates it gives
only the highest, and the size of a best-effort batch not at all. Traces are of ten minutes, as
printed. Step times are those of derived profiles, nothing is measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from twinserve.experiments.bros.headline import (
    ACM,
    CACHE_CLAIMS,
    OPT,
    PART_CLAIMS,
    QWEN,
    TEXTS,
    TGI,
    headline,
    hybrid_claims,
    overhead_claims,
    preemption_claims,
    pure_claims,
    short,
)
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.curves import Bars, lines_of, ylog
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.runs import run
from twinserve.experiments.study.study import Figure, Study, titled
from twinserve.experiments.study.tables import Table
from twinserve.sim.setup.config import PAPERS_ENGINE

SLO = "ttft=0.4,tpot=0.2"
RATES = (5.0, 10.0, 15.0)
RATE = 10.0  # of ablations (Sec. VII-D)
HIGH = 15.0  # near the highest rate that BROS is stable at
POOL, SECONDS = 128, 600.0  # of arrivals (Sec. VII-A: "10-minute traces")
# the first: vLLM of the paper's time
POLICIES = ("vllm-v0", "round-robin", "bros")
REAL_TIME_ONLY = "bros:best_effort=false,kv=paged"
DATA = texts(__file__, "data.yaml")
CACHES, PARTS, COLUMNS = DATA.CACHES, DATA.PARTS, DATA.COLUMNS
OVERHEAD, LOOKS = DATA.OVERHEAD, DATA.LOOKS


# -- grids -----------------------------------------------------------------------------------------
def models(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    # the context of OPT
    capped = {name: {"cap_length": 2048} for name in OPT}
    return {name: {"profile": name, **capped.get(name, {})} for name in names}


def grid(
    names: Sequence[str],
    vary: Mapping[Any, Any],
    common: Mapping[str, Any],
    few: Mapping[Any, Any] | None = None,
    columns: Mapping[str, str] = COLUMNS,
    quick_pool: int = 12,
) -> Grid:
    """Runs on the models `names`."""
    base = {"trace": "sharegpt", "slo": SLO, **PAPERS_ENGINE}
    quick = {"duration": 6.0, "pool": quick_pool, "requests": 60}
    few = {"profile": 1} | (few or {})
    return Grid({"profile": models(names), **vary}, base | common, columns, few=few, quick=quick)


def hybrid(names: Sequence[str], lengths: str = "sharegpt", **more: Any) -> Grid:
    """Figs. 9 and 10."""
    vary = {"lengths": {lengths: {"trace": lengths}}, "rate": RATES, "policy": POLICIES}
    return grid(names, vary, {"duration": SECONDS, "pool": POOL, **more}, {"rate": RATES[1:]})


def parts_at(rate: float) -> Grid:
    vary = {"rate": (rate,), "variant": {name: {"policy": p} for name, p in PARTS.items()}}
    return grid(QWEN[:1], vary, {"duration": SECONDS, "pool": POOL})


SOME = {"trace": "sharegpt", "rate": RATE, "duration": SECONDS, "pool": POOL}
ALONE = ("vllm-v0", "vllm", *TGI)
PREEMPTION = ("vllm-v0", "vllm", "preemptive-wait", "preemptive-wait:newcomers_preempt=false")
PREEMPTIVE = grid(
    (QWEN[0], OPT[0]),
    {"rate": tuple(map(float, (4, 8, 12, 16, 24, 32, 48, 64))), "policy": PREEMPTION},
    {"requests": 512},
    {"rate": (24.0, 64.0)},
)
PURE = grid(
    (*QWEN, *OPT),
    {
        "lengths": {"sharegpt": {}},
        "rate": (9.0, 12.0, 15.0, 20.0),
        "policy": {name: name for name in ALONE} | {"bros": REAL_TIME_ONLY},
    },
    {"duration": SECONDS},
    {"rate": (12.0,)},
)
CACHED = grid(
    (QWEN[1], *OPT),
    {"cache": {name: {"policy": policy} for name, policy in CACHES.items()}},
    SOME,
    {"profile": OPT[1:]},
    quick_pool=60,  # enough to fill the memory
)
# Wall-clock seconds of our own planning beside simulated step times; every step is planned by
# itself. Not reproducible.
OVERHEADS = grid(
    QWEN,
    {"rate": (6.0, 10.0)},
    {"policy": "bros", "duration": SECONDS, "pool": POOL, "exact": True},
    {"rate": 1},
    OVERHEAD,
)

# -- tables and plots ------------------------------------------------------------------------------
LATENCY = {"normalized_ms": ("normalised latency, ms", 1.0)}
BEST_EFFORT = {"be_rps": ("best-effort requests/s", 1.0)}
ATTAINMENTS = {
    "ttft_attainment": ("TTFT attainment, %", 100.0),
    "tpot_attainment": ("TPOT attainment, %", 100.0),
}
ALL = {**LATENCY, **ATTAINMENTS, **BEST_EFFORT}
# Fig. 10 by both readings of TPOT: the mean of a request's gaps, and every gap
READINGS = {
    "ttft_attainment": ("TTFT attainment, %", 100.0),
    "tpot_attainment": ("mean TPOT kept, %", 100.0),
    "every_gap_attainment": ("every gap kept, %", 100.0),
}


def _percent(axes, metric: str) -> None:
    axes.set_ylim(-3, 103)


def _from_zero(axes, metric: str) -> None:
    axes.set_ylim(bottom=0)


def _log_latency(axes, metric: str) -> None:
    if metric in LATENCY:
        ylog(axes, metric)


def curves(metrics: Mapping[str, tuple[str, float]], finish=_from_zero, hybrid: bool = True):
    x = "real-time requests/s" if hybrid else "requests/s"
    return lines_of("profile", metrics, "rate", "policy", LOOKS, finish, short, x)


def bars(part: str, series: str, metrics: Mapping[str, tuple[str, float]]) -> Bars:
    return Bars(
        part, series, {name: label.removesuffix(", %") for name, (label, _) in metrics.items()}
    )


RELATIVE = ("normalized_ms", "be_rps", "be_ttft_s", "ttft_p99_s", "tpot_s", "step_ms")
SHARES = ("ttft_attainment", "tpot_attainment", "token_attainment", "slo_attainment")
OF_POLICIES = Table(("profile", "lengths", "rate", "policy"), COLUMNS)
# Fig. 2: NAME_lower, than with first come, first served
LOWER = Table(
    ("profile", "rate", "policy"),
    COLUMNS,
    {f"{name}_lower": (name, "saving") for name in ("normalized_ms", "queueing")},
    {"policy": "vllm-v0"},
    ("profile", "rate"),
)
# NAME_gain: bi-cache's attainment over that of the row's cache
BI_CACHE = Table(
    ("profile", "cache"),
    COLUMNS,
    {f"{name}_gain": (name, "factor") for name in ATTAINMENTS},
    {"cache": "bi-cache"},
    ("profile",),
)
# NAME_change against BROS as it is: relative, but of shares the difference
CHANGED = Table(
    ("profile", "rate", "variant"),
    COLUMNS,
    {f"{name}_change": (name, "change") for name in RELATIVE}
    | {f"{name}_change": (name, "difference") for name in SHARES},
    {"variant": "bros"},
    ("profile", "rate"),
)
OVERHEAD_BARS = Bars(
    "profile",
    "rate",
    {"step_ms": "step (simulated), ms", "decision_ms": "planning (measured), ms"},
    legend=("6 requests/s", "10 requests/s"),
)
PART_BARS = bars("variant", "profile", ALL)


# -- figures ---------------------------------------------------------------------------------------
_figure = titled(TEXTS.TITLES)


def figure(name: str, points, table, plot=None, claims=lambda table: ()) -> Figure:
    return _figure(name, points, run, table, plot, claims)


STUDY = Study(
    "bros",
    "Wan et al., BROS, IEEE version; figures with LMSYS lengths and all means over 15 settings: "
    "ACM version",
    [
        figure(
            "fig2",
            PREEMPTIVE,
            LOWER,
            curves(LATENCY | {"queueing": ("queueing proportion, %", 100.0)}, _log_latency, False),
            preemption_claims,
        ),
        figure("fig9", hybrid(QWEN), OF_POLICIES, curves(LATENCY | BEST_EFFORT)),
        figure("fig10", hybrid(QWEN), OF_POLICIES, curves(READINGS, _percent)),
        figure("hybrid", hybrid(QWEN), headline, claims=hybrid_claims(TEXTS.HYBRID, TEXTS.MEANS)),
        figure("acm", hybrid(ACM), headline, claims=hybrid_claims(TEXTS.ACM, TEXTS.ACM_MEANS)),
        figure(
            "lmsys",
            hybrid(ACM, "lmsys"),
            headline,
            claims=hybrid_claims(TEXTS.LMSYS, TEXTS.LMSYS["tpot_attainment"], in_time=False),
        ),
        figure(
            "fig11",
            PURE,
            OF_POLICIES,
            curves(LATENCY | {"rt_rps": ("requests/s served", 1.0)}, lambda *_: None, False),
        ),
        figure("pure", PURE, headline, claims=pure_claims),
        figure("fig12", CACHED, BI_CACHE, bars("profile", "cache", ATTAINMENTS), CACHE_CLAIMS),
        figure(
            "fig13",
            OVERHEADS,
            Table(("profile", "rate"), tuple(OVERHEAD)),
            OVERHEAD_BARS,
            overhead_claims,
        ),
        figure("parts", parts_at(RATE), CHANGED, PART_BARS, PART_CLAIMS[RATE]),
        figure("parts_high", parts_at(HIGH), CHANGED, PART_BARS, PART_CLAIMS[HIGH]),
    ],
)
