"""The figures of the BROS paper: `twinserve study bros [FIGURE ...]`. docs/bros.md
says what comes out.

Figure numbers are those of the IEEE version; the ACM version counts each one higher, has
OPT-13B, OPT-30B and Llama-3-70B in place of Qwen2.5, and adds LMSYS lengths. Both print the same
improvements, so all five models are run.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.bros import points
from twinserve.experiments.bros.claims import (
    acm_claims,
    bi_cache_claims,
    hybrid_claims,
    lmsys_claims,
    overhead_claims,
    part_claims,
    preemption_claims,
    pure_claims,
)
from twinserve.experiments.bros.runs import overhead, serve
from twinserve.experiments.bros.tables import (
    caches,
    headline,
    parts,
    per_setting,
    preemption,
    short,
)
from twinserve.experiments.study.curves import grid, legend, panels, ylog
from twinserve.experiments.study.study import Figure, Study
from twinserve.sim.sweep.statistics import over_seeds

LOOKS = {
    "vllm-v0": {"color": "tab:blue"},
    "vllm": {"color": "tab:cyan"},
    "round-robin": {"color": "tab:orange"},
    "tgi": {"color": "tab:green"},
    "tgi:max_new_tokens=256": {"color": "tab:green", "linestyle": "--"},
    "bros": {"color": "tab:red"},
    "preemptive-wait": {"color": "tab:red"},
    "preemptive-wait:newcomers_preempt=false": {"color": "tab:purple", "linestyle": "--"},
}
RATE = "real-time requests/s"
LATENCY = ("normalised latency, ms", 1.0)
ATTAINMENTS = {
    "ttft_attainment": ("TTFT attainment, %", 100.0),
    "tpot_attainment": ("TPOT attainment, %", 100.0),
}
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


def _plot_latency(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"normalized_ms": LATENCY, "be_rps": ("best-effort requests/s", 1.0)}
    grid(canvas, table, "profile", metrics, "rate", "policy", LOOKS, _from_zero, short, RATE)


def _plot_attainment(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    grid(canvas, table, "profile", READINGS, "rate", "policy", LOOKS, _percent, short, RATE)


def _plot_both(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    grid(canvas, table, "profile", BARS, "rate", "policy", LOOKS, _from_zero, short, RATE)


def _plot_pure(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"normalized_ms": LATENCY, "rt_rps": ("requests/s served", 1.0)}
    grid(
        canvas, table, "profile", metrics, "rate", "policy", LOOKS, title=short, xlabel="requests/s"
    )


def _plot_preemption(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"normalized_ms": LATENCY, "queueing": ("queueing proportion, %", 100.0)}

    def finish(axes, metric):
        if metric == "normalized_ms":
            ylog(axes, metric)

    grid(
        canvas,
        table,
        "profile",
        metrics,
        "rate",
        "policy",
        LOOKS,
        finish,
        title=short,
        xlabel="requests/s",
    )


def _plot_varied(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    names = {"pool": "requests in a best-effort batch", "slow": "factor on step times"}
    names |= {"memory": "factor on KV blocks", "duration": "seconds of arrivals"}
    metrics = {"normalized_ms": LATENCY, **ATTAINMENTS, "be_rps": ("best-effort requests/s", 1.0)}
    grid(canvas, table, "varied", metrics, "value", "policy", LOOKS, _from_zero, names.get, " ")


def _bars(labels: str, metrics: dict[str, tuple[str, float]], by: str):
    """Bars of `metrics` for each of `labels`, a row of panels for each of `by`."""

    def plot(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
        groups = list(table.groupby(by, sort=False))
        axes = panels(
            canvas, len(groups), len(metrics), height=0.35 * table[labels].nunique() + 0.9
        )
        for i, (name, part) in enumerate(groups):
            for j, (metric, (label, factor)) in enumerate(metrics.items()):
                error = part[f"{metric}_ci"].fillna(0.0) * factor
                axes[i, j].barh(
                    part[labels].astype(str),
                    part[metric] * factor,
                    xerr=error,
                    color="tab:gray",
                    capsize=2,
                )
                axes[i, j].invert_yaxis()
                axes[i, j].set_xlabel(label)
                axes[i, j].tick_params(axis="y", labelleft=j == 0)
            axes[i, 0].set_title(short(str(name)), fontsize=9, loc="left")

    return plot


def _plot_overhead(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    (axes,) = panels(canvas, 1, 1, width=5)[0]
    settings = zip(table.profile, table.rate, strict=True)
    names = [f"{short(p)}\n{r:g} requests/s" for p, r in settings]
    axes.bar(names, table.step_ms, color="tab:gray", label="step (simulated)")
    axes.bar(
        names, table.decision_ms, bottom=table.step_ms, color="tab:red", label="planning (measured)"
    )
    axes.set_ylabel("ms an iteration")
    legend(canvas, axes)


def _plot_parts(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    settings = [
        f"{short(p)}, {r:g} requests/s" for p, r in zip(table.profile, table.rate, strict=True)
    ]
    _bars("variant", BARS, "setting")(canvas, table.assign(setting=settings), found)


BARS = {"normalized_ms": LATENCY, **ATTAINMENTS, "be_rps": ("best-effort requests/s", 1.0)}
HYBRID = per_setting(["profile", "lengths", "rate", "policy"])
STUDY = Study(
    "bros",
    "Wan et al., BROS, IEEE version; figures with LMSYS lengths and all means over 15 settings: "
    "ACM version",
    [
        Figure(
            "fig2",
            "first come, first served against preemption at every iteration",
            points.preemptive,
            serve,
            preemption,
            _plot_preemption,
            preemption_claims,
        ),
        Figure(
            "fig9",
            "latency and best-effort throughput, hybrid loads",
            points.hybrid,
            serve,
            HYBRID,
            _plot_latency,
        ),
        Figure(
            "fig10",
            "attainment of objectives, hybrid loads",
            points.hybrid,
            serve,
            HYBRID,
            _plot_attainment,
        ),
        Figure(
            "hybrid",
            "Figs. 9 and 10 over all settings, models of the IEEE version",
            points.hybrid,
            serve,
            headline,
            None,
            hybrid_claims,
        ),
        Figure(
            "acm",
            "the same with the models of the ACM version, over all settings",
            points.acm,
            serve,
            headline,
            None,
            acm_claims,
        ),
        Figure(
            "lmsys",
            "the same with LMSYS lengths, over all settings",
            points.lmsys,
            serve,
            headline,
            None,
            lmsys_claims,
        ),
        Figure(
            "fig11",
            "real-time requests alone",
            points.pure,
            serve,
            per_setting(["profile", "lengths", "rate", "policy"]),
            _plot_pure,
        ),
        Figure(
            "pure", "Fig. 11 over all settings", points.pure, serve, headline, None, pure_claims
        ),
        Figure(
            "fig12",
            "with and without the bidirectional cache, 10 requests/s",
            points.caches,
            serve,
            caches,
            _bars("cache", ATTAINMENTS, "profile"),
            bi_cache_claims,
        ),
        Figure(
            "fig13",
            "scheduling overhead (wall-clock time of planning: differs from run to run)",
            points.overheads,
            overhead,
            lambda found: over_seeds(
                found, ["profile", "rate"], ["step_ms", "decision_ms", "share"]
            ),
            _plot_overhead,
            overhead_claims,
        ),
        Figure(
            "parts",
            "BROS with and without its parts, Qwen2.5-14B, 10 requests/s",
            points.parts,
            serve,
            parts,
            _plot_parts,
            part_claims,
        ),
        Figure(
            "parts_high",
            "the same at 15 requests/s",
            points.parts_high,
            serve,
            parts,
            _plot_parts,
            part_claims,
        ),
        Figure(
            "settings",
            "ours: one setting at a time, Qwen2.5-14B, ShareGPT lengths, 10 requests/s",
            points.varied,
            serve,
            per_setting(["varied", "value", "policy"]),
            _plot_varied,
        ),
        Figure(
            "slow",
            "ours: OPT on an engine whose steps take three times as long",
            points.slow,
            serve,
            HYBRID,
            _plot_both,
        ),
        Figure("slow_means", "ours: the same over all settings", points.slow, serve, headline),
    ],
)
