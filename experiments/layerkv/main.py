"""The figures of the LayerKV paper: `twinserve study layerkv [FIGURE ...]`. What
comes out: docs/layerkv.md."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.layerkv import points
from twinserve.experiments.layerkv.claims import (
    beside_vllm,
    breakdown_claims,
    context_claims,
    degree_claims,
    link_claims,
    of_contexts,
    of_degrees,
    of_links,
    of_rates,
    rate_claims,
    tail_claims,
    violation_claims,
)
from twinserve.experiments.layerkv.runs import (
    BOTH,
    CELLS,
    HISTORY,
    KNOWN,
    NO_SLO,
    SAVABLE,
    UNBOUND,
    VLLM,
    serve,
)
from twinserve.experiments.study.curves import grid, legend, panels, ylog
from twinserve.experiments.study.study import Figure, Study

LOOKS = {
    VLLM: {"color": "tab:blue"},
    "layerkv": {"color": "tab:red"},
    SAVABLE: {"color": "tab:purple"},
    NO_SLO: {"color": "tab:green", "linestyle": "--"},
    HISTORY: {"color": "tab:orange"},
    KNOWN: {"color": "tab:brown", "linestyle": ":"},
    UNBOUND: {"color": "tab:red", "linestyle": "--"},
    BOTH: {"color": "tab:purple", "linestyle": "--"},
}
TTFT = ("mean TTFT, s", 1.0)
TPOT = ("mean TPOT, s", 1.0)
THROUGHPUT = ("output tokens/s", 1.0)
RATE = "requests/s"


def _finish(axes, metric: str) -> None:
    if metric.startswith("ttft") and "violations" not in metric:
        ylog(axes, metric)


def _by_context(axes, metric: str) -> None:
    axes.set_xscale("log", base=2)
    _finish(axes, metric)


def _plot_breakdown(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    rows = table[(table.policy == VLLM) & (table.model == "llama-2-7b")].sort_values("context")
    axes = panels(canvas, 1, 2, width=4, height=3.2)[0]
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        axes[0].errorbar(
            rows.context,
            rows[name],
            yerr=np.nan_to_num(rows[f"{name}_ci"]),
            marker="o",
            capsize=2,
            label=label,
        )
    axes[0].set(xscale="log", yscale="log", xlabel="tokens of prompt", ylabel="mean, s")
    axes[0].legend()
    names = [f"{c:,}" for c in rows.context]
    share = rows.queueing_s / rows.ttft_s * 100
    axes[1].bar(names, share, label="queueing")
    axes[1].bar(names, 100 - share, bottom=share, label="prefill")
    axes[1].set(xlabel="tokens of prompt", ylabel="share of TTFT, %")
    axes[1].tick_params(axis="x", rotation=45)
    axes[1].legend()


def _plot_contexts(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tpot_s": TPOT, "tokens_per_s": THROUGHPUT}
    grid(
        canvas,
        table,
        "model",
        metrics,
        "context",
        "policy",
        LOOKS,
        _by_context,
        xlabel="tokens of prompt",
    )


def _plot_degrees(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tokens_per_s": THROUGHPUT}
    grid(
        canvas,
        table,
        "context",
        metrics,
        "tp",
        "policy",
        LOOKS,
        _finish,
        "{:,} tokens".format,
        "degree of parallelism",
    )


def _plot_rates(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tpot_s": TPOT, "tokens_per_s": THROUGHPUT}
    grid(canvas, table, "model", metrics, "rate", "policy", LOOKS, _finish, xlabel=RATE)


def _plot_tails(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    grid(
        canvas,
        table,
        "model",
        {"ttft_p99_s": ("P99 TTFT, s", 1.0)},
        "rate",
        "policy",
        LOOKS,
        _finish,
        xlabel=RATE,
    )


def _plot_violations(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"violations": ("violations, %", 100.0), "ttft_violations": ("by TTFT, %", 100.0)}
    metrics |= {"tpot_violations": ("by TPOT, %", 100.0)}
    axes = panels(canvas, 1, len(metrics), height=3)[0]
    rows = table[table.model == "llama-2-7b"]
    for one, (metric, (label, factor)) in zip(axes, metrics.items(), strict=True):
        for policy, part in rows.groupby("policy", sort=False):
            error = np.nan_to_num(part[f"{metric}_ci"]) * factor
            one.errorbar(
                part.rate,
                part[metric] * factor,
                yerr=error,
                marker="o",
                markersize=3,
                label=policy,
                **LOOKS[policy],
            )
        one.set(ylabel=label, xlabel=RATE, ylim=(-3, None))
        one.grid(alpha=0.3)
    legend(canvas, axes[0])


def _plot_trade(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    """TTFT over TPOT, then its tail over the share that misses TPOT: a line a cell through its
    rates."""
    axes = panels(canvas, 1, 2, width=4.6, height=3.8)[0]
    ways = (("tpot_s", "ttft_s", 1.0), ("tpot_violations", "ttft_p99_s", 100.0))
    for policy in (VLLM, *CELLS, NO_SLO):
        part = table[table.policy == policy].sort_values("rate")
        for one, (x, y, factor) in zip(axes, ways, strict=True):
            one.errorbar(
                part[x] * factor,
                part[y],
                xerr=np.nan_to_num(part[f"{x}_ci"]) * factor,
                marker="o",
                markersize=3,
                elinewidth=0.5,
                label=policy,
                **LOOKS[policy],
            )
            for row in part.itertuples() if policy in (VLLM, SAVABLE, BOTH) else ():
                at = (getattr(row, x) * factor, getattr(row, y))
                one.annotate(f"{row.rate:g}", at, (3, 3), textcoords="offset points", fontsize=6)
    axes[0].set(xlabel="mean TPOT, s", ylabel="mean TTFT, s", yscale="log")
    axes[1].set(xlabel="miss their TPOT objective, %", ylabel="P99 TTFT, s", yscale="log")
    for one in axes:
        one.grid(alpha=0.3)
    axes[1].legend(loc="lower right", fontsize=6)


def _plot_rules(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {
        "ttft_s": TTFT,
        "ttft_violations": ("by TTFT, %", 100.0),
        "tpot_violations": ("by TPOT, %", 100.0),
    }
    _bars(canvas, table, "rate", metrics, f"{{:g}} {RATE}".format)


def _bars(
    canvas: Canvas, table: pd.DataFrame, by: str, metrics: dict, title: Callable[[object], str]
) -> None:
    """A row of panels for each value of `by`, a bar for each variant."""
    values = list(dict.fromkeys(table[by]))
    axes = panels(canvas, len(values), len(metrics), height=2.4)
    for i, value in enumerate(values):
        part = table[table[by] == value]
        for j, (metric, (label, factor)) in enumerate(metrics.items()):
            error = part[f"{metric}_ci"].fillna(0.0) * factor
            axes[i, j].barh(
                part.variant, part[metric] * factor, xerr=error, color="tab:gray", capsize=2
            )
            axes[i, j].invert_yaxis()
            axes[i, j].set_xlabel(label)
            axes[i, j].tick_params(axis="y", labelleft=j == 0)
        axes[i, 0].set_title(title(value), fontsize=9, loc="left")


def _plot_objectives(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tpot_s": TPOT, "violations": ("violations, %", 100.0)}
    grid(
        canvas,
        table,
        "model",
        metrics,
        "objective",
        "policy",
        LOOKS,
        _finish,
        xlabel="TPOT objective, s",
    )


def _plot_contention(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tpot_s": TPOT, "tokens_per_s": THROUGHPUT}
    _bars(canvas, table, "engine", metrics, "{}".format)


def _plot_unshared(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_more": "mean TTFT", "tpot_more": "mean TPOT", "tokens_more": "throughput"}
    rows = table[table.contention & (table.policy != VLLM)]
    names = list(dict.fromkeys(rows.setting))
    policies = list(dict.fromkeys(rows.policy))
    axes = panels(canvas, 1, len(metrics), width=3.4, height=0.36 * len(names) + 1.0)[0]
    for one, (metric, label) in zip(axes, metrics.items(), strict=True):
        for i, policy in enumerate(policies):
            part = rows[rows.policy == policy].set_index("setting").reindex(names)
            one.barh(
                np.arange(len(names)) + 0.28 * i,
                100 * part[metric],
                0.28,
                xerr=100 * np.nan_to_num(part[f"{metric}_ci"]),
                color=LOOKS[policy]["color"],
                label=policy,
            )
        one.set_yticks(np.arange(len(names)) + 0.28, names, fontsize=7)
        one.tick_params(axis="y", labelleft=one is axes[0])
        one.invert_yaxis()
        one.set_xlabel(f"{label}: change by contention, %", fontsize=8)
    legend(canvas, axes[0])


def _plot_links(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tpot_s": TPOT, "tokens_per_s": THROUGHPUT}
    named = table.assign(
        engine=[
            f"{r.tp} GPUs, {r.context:,} tokens, all-reduces x {r.allreduce:g}"
            for r in table.itertuples()
        ]
    )
    _bars(canvas, named, "engine", metrics, "{}".format)


def _plot_parking(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tpot_s": TPOT, "tokens_per_s": THROUGHPUT}
    metrics |= {"parked_most": ("most that are parked", 1.0)}
    _bars(canvas, table, "context", metrics, "{:,} tokens".format)


def _plot_lengths(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "ttft_p99_s": ("P99 TTFT, s", 1.0), "tpot_s": TPOT}
    _bars(canvas, table, "requests", metrics, "{} requests".format)


def _plot_higher(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {
        "tokens_per_s": THROUGHPUT,
        "tpot_s": TPOT,
        "recomputes": ("preempted and recomputed", 1.0),
    }
    _bars(canvas, table, "engine", metrics, "{}".format)


def _plot_varied(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "tpot_s": TPOT, "tokens_per_s": THROUGHPUT}
    grid(canvas, table, "varied", metrics, "value", "policy", LOOKS, _finish, xlabel=" ")


def _plot_requests(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {"ttft_s": TTFT, "ttft_gain": ("vLLM's mean TTFT over it", 1.0), "tpot_s": TPOT}
    grid(canvas, table, "context", metrics, "requests", "policy", LOOKS, _finish, xlabel="requests")


CONTEXTS = beside_vllm(["model", "context", "policy"], along=("context", of_contexts))
RATES = beside_vllm(["model", "rate", "policy"], along=("rate", of_rates))
STUDY = Study(
    "layerkv",
    "Xiong et al., LayerKV",
    [
        Figure(
            "fig1",
            "vLLM's TTFT and TPOT against the context, and the parts of TTFT",
            points.contexts,
            serve,
            CONTEXTS,
            _plot_breakdown,
            breakdown_claims,
        ),
        Figure(
            "fig4",
            "contexts of 128 to 16k tokens",
            points.contexts,
            serve,
            CONTEXTS,
            _plot_contexts,
            context_claims,
        ),
        Figure(
            "fig5",
            "degree of parallelism, Yi-34B-200K",
            points.degrees,
            serve,
            beside_vllm(["context", "tp", "policy"], along=("tp", of_degrees)),
            _plot_degrees,
            degree_claims,
        ),
        Figure(
            "links",
            "ours: Fig. 5 at four and eight GPUs, by the rate of all-reduces",
            points.links,
            serve,
            beside_vllm(["context", "tp", "allreduce", "variant"], "variant", "vLLM"),
            _plot_links,
            link_claims,
        ),
        Figure(
            "parking",
            "ours: how many requests may wait on the host, Llama-2-7B, fixed prompts",
            points.parking,
            serve,
            beside_vllm(["context", "variant"], "variant", "vLLM"),
            _plot_parking,
        ),
        Figure(
            "lengths",
            "ours: what is known of lengths, Llama-2-7B, prompts of 4,096 tokens",
            points.lengths,
            serve,
            beside_vllm(["requests", "variant"], "variant", "vLLM"),
            _plot_lengths,
        ),
        Figure(
            "requests",
            "ours: Fig. 4 with shorter and longer runs, Llama-2-7B",
            points.requests,
            serve,
            beside_vllm(["context", "requests", "policy"]),
            _plot_requests,
        ),
        Figure(
            "fig6", "ShareGPT lengths, rates", points.rates, serve, RATES, _plot_rates, rate_claims
        ),
        Figure(
            "fig7",
            "P99 TTFT of the same runs",
            points.rates,
            serve,
            RATES,
            _plot_tails,
            tail_claims,
        ),
        Figure(
            "fig8",
            "violations of the same runs",
            points.rates,
            serve,
            RATES,
            _plot_violations,
            violation_claims,
        ),
        Figure(
            "trade",
            "ours: late requests counted or left out, times 64 parked or any number; TTFT over "
            "TPOT, Llama-2-7B, ShareGPT lengths",
            points.trade,
            serve,
            beside_vllm(["rate", "policy"]),
            _plot_trade,
        ),
        Figure(
            "rules",
            "ours: variants of Algorithm 1",
            points.rules,
            serve,
            beside_vllm(["rate", "variant"], "variant", "vLLM"),
            _plot_rules,
        ),
        Figure(
            "objective",
            "ours: TPOT objective, larger models, ShareGPT lengths, beyond capacity",
            points.objectives,
            serve,
            beside_vllm(["model", "objective", "policy"]),
            _plot_objectives,
        ),
        Figure(
            "contention",
            "ours: KV transfers and all-reduces on one link, larger models, fixed prompts, "
            "without Algorithm 1",
            points.contention,
            serve,
            beside_vllm(["engine", "variant"], "variant", "vLLM"),
            _plot_contention,
        ),
        Figure(
            "unshared",
            "ours: Figs. 5 to 8 and `objective` on several GPUs, with contention and without",
            points.unshared,
            serve,
            beside_vllm(["setting", "contention", "policy"], along=("contention", of_links)),
            _plot_unshared,
        ),
        Figure(
            "higher",
            "ours: vLLM without recomputing, and with more memory, where LayerKV's throughput is "
            "higher",
            points.higher,
            serve,
            beside_vllm(["engine", "variant"], "variant", "vLLM"),
            _plot_higher,
        ),
        Figure(
            "settings",
            "ours: one setting at a time, Llama-2-7B, fixed prompts",
            points.varied,
            serve,
            beside_vllm(["varied", "value", "policy"]),
            _plot_varied,
        ),
    ],
)
