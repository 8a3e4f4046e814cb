"""Whose estimator wins: `twinserve study estimators`. Echo, BROS and LayerKV run on the same loads.
Each has the form of its own paper, the simulator's own step times, or one form for all.
docs/studies.md has what came out.

The engine's step times are composed from kernel tables, so that every form of a paper errs.
"""

from twinserve.experiments.study.curves import Bars
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.runs import run
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import Table
from twinserve.sim.setup.config import PAPERS_ENGINE

POLICIES = {"Echo": "echo:slo=gap", "BROS": "bros", "LayerKV": "layerkv:savable_only=true"}
EXACT = "perfect"
BELIEFS = ("paper", "echo-sum", EXACT)  # its own form, one form for all, exact
# column -> what it is, and how a belief changes it: shares of requests as a difference
METRICS = {
    "kept": ("classes.rt.slo_attainment", "difference"),
    "ttft_ms": ("classes.rt.mean_ttft_ms", "ratio"),
    "tpot_ms": ("classes.rt.mean_tpot_ms", "ratio"),
    "offline_tps": ("classes.be.window_total_token_throughput", "ratio"),
    "all_tps": ("total_token_throughput", "ratio"),
}
# chats with objectives, and what comes beside them
LOADS = {
    "chats, 16/s, beside batches": {"rate": 16.0, "pool": 64},
    "chats, 4/s, beside documents": {
        "rate": 4.0,
        "beside": {"documents": "toolbench", "requests": 1000},
    },
}
GRID = Grid(
    {
        "load": LOADS,
        "system": {name: {"policy": policy} for name, policy in POLICIES.items()},
        "estimator": BELIEFS,
    },
    common={
        "trace": "sharegpt",
        "profile": "llama-3.1-8b@a100-80g",  # operator tables
        "duration": 60.0,
        "num_blocks": 10_000,
        "slo": "ttft=1,tpot=0.05",
        "until_online": 5.0,
        **PAPERS_ENGINE,
    },
    columns={name: path for name, (path, _) in METRICS.items()},
    quick={"duration": 5.0, "pool": 8, "beside": {"documents": "toolbench", "requests": 8}},
)
# seed by seed, what each belief changes against exact step times
TABLE = Table(
    ("load", "system", "estimator"),
    tuple(METRICS),
    {f"cost_{name}": (name, kind) for name, (_, kind) in METRICS.items()},
    base={"estimator": EXACT},
    pair=("load", "system"),
)
PLOT = Bars(
    "system",
    "estimator",
    {"kept": "objectives kept", "offline_tps": "best-effort tokens/s"},
    group="load",
    legend=("its own form", "one form", "exact"),
)

STUDY = Study(
    "estimators",
    "",
    [Figure("loads", "what each system gets with each estimator", GRID, run, TABLE, PLOT)],
)
