"""Routers side by side: `twinserve study routers`.

loads, documents   every router at several loads: Mooncake's conversations, and questions on shared
                   documents
policies           routers under several policies, beside best-effort requests
stale              what old and lost signals cost
one-text           when a cache-aware router loses to round robin: prompts that begin with one text,
                   or with one of several

docs/routers.md says what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.routers.runs import REPLICAS, conversations, one_text, questions
from twinserve.experiments.study.curves import grid
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.experiments.systems.tables import compared, told
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import over_seeds

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
LOST = (0.0, 0.5)
# router -> option that makes what it hears older, option that makes it lose some, with what else
STALE: Mapping[str, tuple[str, str | None, str]] = {
    "vllm-dp": ("age", "lost", ""),
    "llm-d": ("age", None, ""),
    "llm-d:index=exact": ("events_age", "events_lost", ","),
    "dynamo-kv": ("events_age", "events_lost", ""),
}
SHARES = (0.26, 0.35, 0.75)
TEXTS = (1, 16)
CONCURRENCY, RATE = 36, 3.0  # requests, requests a second
ONE_TEXT = (BASE, "least-requests", "sglang", "sglang:balance_abs=8", "dynamo-kv", "llm-d")
METRICS = {
    "slo_attainment": ("both objectives kept", 1.0),
    "ttft_s": ("mean TTFT, s", 1.0),
    "prefix_hit_rate": ("prefix hits", 1.0),
    "busiest": ("busiest / mean", 1.0),
}


# -- grids -----------------------------------------------------------------------------------------
def _windows(scale: Scale) -> list[dict[str, Any]]:
    seconds = SECONDS / 20 if scale.quick else SECONDS
    return [
        {"begin_s": float(BEGINS[seed % len(BEGINS)]), "seconds": seconds, "seed": seed}
        for seed in scale.seeds
    ]


def _few(scale: Scale, values: Sequence) -> Sequence:
    return values[:2] if scale.quick else values


def _routers(scale: Scale, names: Sequence[str]) -> Sequence[str]:
    return [name for name in names if name in (BASE, "sglang", "llm-d")] if scale.quick else names


def loads(scale: Scale) -> list[Point]:
    return [
        Point({"load": load, "router": router, "seed": window["seed"]},
              {"router": router, "policy": "vllm", "load": load, **window})
        for load in _few(scale, LOADS) for router in _routers(scale, ROUTERS)
        for window in _windows(scale)
    ]  # fmt: skip


def documents(scale: Scale) -> list[Point]:
    requests = QUESTIONS // 20 if scale.quick else QUESTIONS
    return [
        Point({"load": load, "router": router, "seed": seed},
              {"router": router, "load": load, "requests": requests, "seed": seed})
        for load in _few(scale, DOCUMENT_LOADS) for router in _routers(scale, ROUTERS)
        for seed in scale.seeds
    ]  # fmt: skip


def policies(scale: Scale) -> list[Point]:
    return [
        Point({"policy": policy, "router": router, "seed": window["seed"]},
              {"router": router, "policy": policy, "load": 1.0, "pool": POOL, **window})
        for policy in _few(scale, POLICIES) for router in _routers(scale, UNDER_POLICIES)
        for window in _windows(scale)
    ]  # fmt: skip


def aged() -> list[tuple[str, str, float, str]]:
    """(router, what is wrong with its signals, how much, its text with options)."""
    found = []
    for router, (age, lost, comma) in STALE.items():
        colon = comma or ":"
        found += [(router, "age", s, f"{router}{colon}{age}={s:g}") for s in AGES]
        if lost:
            more = "interval=1," if lost == "lost" else ""
            found += [(router, "lost", p, f"{router}{colon}{more}{lost}={p:g}") for p in LOST[1:]]
    return found


def stale(scale: Scale) -> list[Point]:
    requests = QUESTIONS // 20 if scale.quick else QUESTIONS
    return [
        Point({"fault": fault, "amount": amount, "router": router, "seed": seed},
              {"router": text, "load": 1.5, "requests": requests, "seed": seed})
        for router, fault, amount, text in _few(scale, aged()) for seed in scale.seeds
    ]  # fmt: skip


def one_texts(scale: Scale) -> list[Point]:
    return [
        Point({"texts": texts, "share": share, "router": router, "seed": seed},
              {"router": router, "share": share, "texts": texts, "concurrency": CONCURRENCY,
               "rate": RATE, "seed": seed})
        for texts in TEXTS for share in _few(scale, SHARES) for router in _routers(scale, ONE_TEXT)
        for seed in scale.seeds
    ]  # fmt: skip


# -- tables and plots ------------------------------------------------------------------------------
def against(
    within: Sequence[str], base: Callable[[pd.Series], pd.Series]
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A row for each combination of `within` and router. slo_gain: objectives kept, minus those of
    what `base` names of the same repeat; ttft_gain: mean TTFT over that one's, minus 1; verdicts on
    both."""

    def table(points: pd.DataFrame) -> pd.DataFrame:
        by = [name for name in points if name in (*within, "router", "amount")]
        kept = compared(points, within, base, "slo_attainment")
        ttft = compared(points, within, base, "ttft_s", share=True)
        points = points.assign(slo_gain=kept, ttft_gain=ttft)
        values = [name for name in points if name not in (*by, "seed")]
        rows = over_seeds(points, by, values)
        for gain in ("ttft_gain", "slo_gain"):
            half = rows[f"{gain}_ci"]
            said = [told(*pair) for pair in zip(rows[gain], half, strict=True)]
            rows.insert(len(by), gain.replace("gain", "verdict"), said)
        return rows

    return table


def of_round_robin(values: pd.Series) -> pd.Series:
    """Of each router of one repeat: the first, which has none itself."""
    return pd.Series([np.nan, *[values.iloc[0]] * (len(values) - 1)], values.index)


def of_fresh(points: pd.DataFrame) -> pd.DataFrame:
    """The table of aged signals: each router beside itself with none aged and none lost."""
    fresh = points[(points.fault == "age") & (points.amount == 0)]
    lost = fresh.assign(fault="lost")
    rows = pd.concat([fresh, lost, points.drop(fresh.index)], ignore_index=True)
    rows = rows[rows.router.isin(points[points.fault == "lost"].router) | (rows.fault == "age")]
    return against(("fault", "router"), of_round_robin)(rows.sort_values("fault", kind="stable"))


def _draw(column: str, x: str):
    def draw(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
        shown = table.assign(**{x: table[x].astype(float)})
        looks = {BASE: {"color": "black", "linewidth": 2.0}}
        grid(canvas, shown, column, METRICS, x, "router", looks)

    return draw


def draw_loads(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    _draw("", "load")(canvas, table.assign(**{"": ""}), points)


def draw_policies(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    names = list(dict.fromkeys(table.router))
    rows = table.assign(place=table.router.map(names.index))
    looks = {"vllm": {"color": "black", "linewidth": 2.0}}
    grid(
        canvas, rows.assign(**{"": ""}), "", METRICS, "place", "policy", looks,
        lambda axes, metric: axes.set_xticks(range(len(names)), names, rotation=60, fontsize=7),
    )  # fmt: skip


STUDY = Study(
    "routers",
    "",
    [
        Figure(
            "loads", "Mooncake's conversations, eight replicas, several loads",
            loads, conversations, against(("load",), of_round_robin), draw_loads,
        ),
        Figure(
            "documents", "questions on shared documents, eight replicas, several loads",
            documents, questions, against(("load",), of_round_robin), draw_loads,
        ),
        Figure(
            "one-text", "prompts that begin with one of a few texts, two replicas",
            one_texts, one_text, against(("texts", "share"), of_round_robin),
            _draw("texts", "share"),
        ),
        Figure(
            "stale", "documents at load 1.5: signals that come late or never",
            stale, questions, of_fresh, _draw("fault", "amount"),
        ),
        Figure(
            "policies", "Mooncake at load 1 beside best-effort requests: routers under policies",
            policies, conversations, against(("policy",), of_round_robin), draw_policies,
        ),
    ],
)  # fmt: skip
