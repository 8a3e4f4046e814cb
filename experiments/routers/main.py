"""Routers side by side: `twinserve study routers`.

loads, documents   every router at several loads: Mooncake's conversations, and questions on shared
                   documents
policies           routers under several policies, with best-effort requests
stale              what old and lost signals cost
one-text           when a cache-aware router loses to round robin: prompts that begin with one text,
                   or with one of several

docs/routers.md says what came out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.curves import Bars, lines_of
from twinserve.experiments.study.grid import Grid, windows
from twinserve.experiments.study.runs import column, run
from twinserve.experiments.study.study import Study, titled
from twinserve.experiments.study.tables import FIRST, Table, Text, mean, plain
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve, with_objectives
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.setup.offered_load import service_seconds
from twinserve.sim.setup.run import run_policy
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.stated import with_shared_text
from twinserve.traces.workload import REAL_TIME, Workload

# Single runs of the comparison of routers: settings in, plain rows out. Engines schedule
# asynchronously, as vLLM does by default.
REPLICAS = 8
COMMON = {"profile": "llama-3.1-8b@h100", "prefix_caching": True}  # asynchronous, as vLLM is
DATA = texts(__file__, "data.yaml")
COLUMNS = DATA.COLUMNS
DOCUMENTS = "next-qa"  # prompts of 9,900 tokens on average, 88 % of them text of a document
BLOCK_TOKENS = 16


def questions(router: str, load: float, requests: int, seed: int, policy: str = "vllm") -> dict:
    """Questions on shared documents that arrive at random, at `load` times the estimated capacity
    without a prefix cache."""
    asked = longdoc(DOCUMENTS, requests=requests, block_tokens=BLOCK_TOKENS, seed=seed)
    return _serve(asked, router, policy, REPLICAS, seed, load=load)


def one_text(
    router: str, share: float, texts: int, concurrency: int | None, rate: float, seed: int
) -> dict:
    """400 prompts of 9,800 tokens that begin with one of `texts` texts, `share` of each, and
    answers of 430 tokens, on two replicas. It is the benchmark of sglang#21199, with other shares,
    other numbers of texts, and our hardware.

    concurrency  most requests that clients have under way; rate: a second, until then
    """
    count, tokens = 400, 9_800
    group = np.arange(count) % texts
    prompts = np.full(count, tokens)
    shared = np.full(count, round(share * tokens))
    workload = Workload.build(
        np.zeros(count),
        prompts,
        np.full(count, 430),
        prefix=with_shared_text(prompts, group, shared, BLOCK_TOKENS),
        concurrency=concurrency,
    )
    return _serve(workload, router, "vllm", 2, seed, rate=rate)


def _serve(
    workload: Workload,
    router: str,
    policy: str,
    replicas: int,
    seed: int,
    load: float | None = None,
    rate: float | None = None,
) -> dict:
    """These requests as real-time ones with Poisson arrivals, at a rate (requests a second) or a
    load."""
    config = SimulationConfig(
        trace="fixed:100,10",  # the settings need one; its requests are replaced
        rate=1.0,
        requests=1,
        policy=(policy,),
        router=router,
        replicas=replicas,
        seed=seed,
        **COMMON,
    )
    inputs = resolve(config)
    if rate is None:
        capacity = replicas * len(workload) / service_seconds(workload, inputs.hardware)
        rate = load * capacity
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x2F,)))
    workload = replace(
        workload,
        arrival_s=np.cumsum(rng.exponential(1 / rate, len(workload))),
        service_class=np.full(len(workload), REAL_TIME, np.int8),
    )
    workload = with_objectives(workload, inputs.hardware, parse_objectives(config.slo))
    inputs = replace(inputs, workload=workload)
    result = run_policy(inputs, inputs.policies[0])
    return {name: column(result, text) for name, text in COLUMNS.items()}


BASE = "round-robin"
CACHE_AWARE = ("sglang", "dynamo-kv", "llm-d", "conductor")
ROUTERS = (BASE, "random", "least-requests", "least-tokens", "vllm-dp", *CACHE_AWARE)
LOADS = (0.75, 1.0)
# of the estimate that knows no cache: two thirds of all prompt tokens can be found in one
DOCUMENT_LOADS = (1.0, 1.5)
UNDER_POLICIES = (BASE, "class-aware", "dynamo-kv", "llm-d")
POLICIES = ("vllm", "bros:chunk=fit,kv=paged", "echo:slo=gap")
POOL = 8 * REPLICAS  # best-effort requests in a closed loop
# where the window of each seed begins: ten minutes of the recording each, none twice
BEGINS, SECONDS = (0, 600, 1200, 1800, 2400, 3000), 600.0
QUESTIONS = 3_000
AGES = (0.0, 1.0, 10.0)  # seconds
LOST = (0.5,)
STALE, METRICS = DATA.STALE, DATA.METRICS
SHARES = (0.26, 0.35, 0.75)
TEXTS = (1, 16)
CONCURRENCY, RATE = 36, 3.0  # requests, requests a second
ONE_TEXT = (BASE, "least-requests", "sglang", "sglang:balance_abs=8", "dynamo-kv", "llm-d")


GAINS = {"slo_gain": ("slo_attainment", "difference"), "ttft_gain": ("ttft_s", "change")}
WORDS = ("more", "less", "within the spread", "the same")


# -- grids -----------------------------------------------------------------------------------------
FEW = (BASE, "sglang", "llm-d")  # routers of the smallest grids


def conversations(vary: Mapping[str, Any], **more: Any) -> Grid:
    """Windows of Mooncake's conversations, at shares of the estimated capacity of the fleet."""
    return Grid(
        vary,
        COMMON
        | {
            "trace": "mooncake",
            "replicas": REPLICAS,
            "windows": windows(BEGINS, SECONDS),
            "policy": "vllm",
        }
        | more,
        COLUMNS,
        few={"load": 2, "policy": 2, "router": FEW},
        quick={"windows": windows(BEGINS, SECONDS / 20)},
    )


def documents(vary: Mapping[Any, Any], few: Mapping[Any, Any], **more: Any) -> Grid:
    """Questions on documents, at shares of the capacity without a prefix cache."""
    common = {"requests": QUESTIONS, **more}
    return Grid(vary, common, few=few, quick={"requests": QUESTIONS // 20})


def aged() -> dict[tuple[str, float, str], dict[str, str]]:
    """What is wrong with a router's signals, how much, the router -> the router with options."""
    found = {}
    for router, (age, lost, comma) in STALE.items():
        begin = f"{router}{comma or ':'}"
        found |= {("age", s, router): {"router": f"{begin}{age}={s:g}"} for s in AGES}
        if lost:
            more = "interval=1," if lost == "lost" else ""
            found |= {("lost", p, router): {"router": f"{begin}{more}{lost}={p:g}"} for p in LOST}
    return found


# -- tables and plots ------------------------------------------------------------------------------
def against(*by: str, pair: Sequence[str]) -> Table:
    """slo_gain: objectives kept, minus those of the first of the same repeat, round robin;
    ttft_gain: mean TTFT over that one's, minus 1; verdicts on both."""
    verdicts = {
        gain.replace("gain", "verdict"): (gain, 0.0, WORDS) for gain in ("ttft_gain", "slo_gain")
    }
    return Table(by, None, GAINS, FIRST, pair, verdicts=verdicts)


def of_fresh(points: pd.DataFrame) -> pd.DataFrame:
    """The table of aged signals: each router compared with none aged and none lost."""
    fresh = points[(points.fault == "age") & (points.amount == 0)]
    lost = fresh.assign(fault="lost")
    rows = pd.concat([fresh, lost, points.drop(fresh.index)], ignore_index=True)
    rows = rows[rows.router.isin(points[points.fault == "lost"].router) | (rows.fault == "age")]
    table = against("fault", "amount", "router", pair=("fault", "router"))
    return table(rows.sort_values("fault", kind="stable"))


def lines_over(x: str, column: str | None = None) -> Callable[..., None]:
    """A line for each router over `x`; a column of panels for each value of `column`."""
    draw = lines_of(column, METRICS, x, "router", {BASE: BLACK})
    return lambda canvas, table, points: draw(
        canvas, table.assign(**{x: table[x].astype(float)}), points
    )


BLACK = {"color": "black", "linewidth": 2.0}


def shown(*by: str, than: str = "round robin") -> Text:
    """The rows of docs/routers.md. than: what gains are over."""
    cells = {
        "mean TTFT, s": mean("ttft_s"),
        f"more than {than}, %": mean("ttft_gain", 100.0),
        "P99 TTFT, s": mean("ttft_p99_s"),
        "objectives kept, %": mean("slo_attainment", 100.0),
        "prefix hits, %": mean("prefix_hit_rate", 100.0),
        "busiest / mean": plain("busiest", ".2f"),
    }
    return Text("Means over {seeds} seeds, ± half of the 95 % interval.", {n: n for n in by}, cells)


figure = titled(texts(__file__).TITLES)
STUDY = Study(
    "routers",
    "",
    [
        figure(
            "loads",
            conversations({"load": LOADS, "router": ROUTERS}),
            run,
            against("load", "router", pair=("load",)),
            lines_over("load"),
            text=shown("load", "router"),
        ),
        figure(
            "documents",
            documents({"load": DOCUMENT_LOADS, "router": ROUTERS}, {"router": FEW}),
            questions,
            against("load", "router", pair=("load",)),
            lines_over("load"),
            text=shown("load", "router"),
        ),
        figure(
            "one-text",
            Grid(
                {"texts": TEXTS, "share": SHARES, "router": ONE_TEXT},
                {"concurrency": CONCURRENCY, "rate": RATE},
                few={"share": 2, "router": FEW},
            ),
            one_text,
            against("texts", "share", "router", pair=("texts", "share")),
            lines_over("share", "texts"),
            text=shown("texts", "share", "router"),
        ),
        figure(
            "stale",
            documents(
                {("fault", "amount", "router"): aged()},
                {("fault", "amount", "router"): 2},
                load=1.5,
            ),
            questions,
            of_fresh,
            lines_over("amount", "fault"),
            text=shown("fault", "amount", "router", than="with fresh signals"),
        ),
        figure(
            "policies",
            conversations({"policy": POLICIES, "router": UNDER_POLICIES}, load=1.0, pool=POOL),
            run,
            against("policy", "router", pair=("policy",)),
            Bars("router", "policy", {name: label for name, (label, _) in METRICS.items()}),
            text=shown("policy", "router"),
        ),
    ],
)
