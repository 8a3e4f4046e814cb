"""The figures of the Echo paper: `twinserve study echo [FIGURE ...]`. What comes
out: docs/echo.md."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.echo import points
from twinserve.experiments.echo.claims import (
    BELIEFS,
    arrival_claims,
    busiest_claims,
    cache_claims,
    day_claims,
    hit_claims,
    latency_claims,
    memory_claims,
    occupied_claims,
    opposite_claims,
    setting_claims,
    sharing_claims,
    throughput_claims,
    whole_day_claims,
)
from twinserve.experiments.echo.runs import (
    AIM,
    LADDER,
    TPOT_S,
    TTFT_S,
    busiest,
    foretold_arrivals,
    foretold_memory,
    hours,
    serve,
    watch,
)
from twinserve.experiments.echo.tables import (
    beside_bs,
    beside_each,
    beside_lru,
    of_arrivals,
    of_busiest,
    of_days,
    of_memory,
    of_series,
    profile_of_day,
    quantiles,
)
from twinserve.experiments.study.curves import legend, panels
from twinserve.experiments.study.study import Figure, Study

NAMES = dict(zip(LADDER, ("BS", "BS+E", "BS+E+S", "Echo"), strict=True))
NAMES |= {points.ALONE: "online alone", points.PRINTED: "Echo, SLO as printed"}
NAMES |= {points.BS_512: "BS, 512 tokens a step"}
_TAB = ("tab:blue", "tab:orange", "tab:green", "tab:red", "black", "tab:brown", "tab:cyan")
COLOURS = dict(zip((*LADDER, points.ALONE, points.PRINTED, points.BS_512), _TAB, strict=True))
HOUR = "hour of the day"


def _plot_day(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    axes = canvas.subplots()
    for seed, part in found.groupby("seed"):
        axes.plot(
            part.hour,
            part.rate,
            linewidth=0.6,
            color="tab:gray",
            label="one seed" if seed == 0 else None,
        )
    axes.errorbar(
        table.hour, table.rate, yerr=np.nan_to_num(table.rate_ci), color="tab:blue", label="mean"
    )
    axes.set(xlabel=HOUR, ylabel="requests/s", ylim=(0, None))
    axes.legend()


def _bars(
    axes, rows: pd.DataFrame, names: list[str], groups: str, metric: str, factor: float = 1.0
) -> None:
    """A group of bars for each of `names`, a bar of it for each policy."""
    for i, policy in enumerate(LADDER):
        mine = rows[rows.policy == policy].set_index(groups).reindex(names)
        error = np.nan_to_num(mine[f"{metric}_ci"]) * factor
        axes.bar(
            np.arange(len(names)) + 0.2 * i,
            mine[metric] * factor,
            0.2,
            yerr=error,
            label=NAMES[policy],
            color=COLOURS[policy],
        )
    axes.set_xticks(np.arange(len(names)) + 0.3, names, rotation=25, fontsize=8)


def _plot_throughput(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    rows = {
        "speedup": ("offline tokens/s over BS", 1.0),
        "attainment": ("online objectives kept, %", 100.0),
    }
    axes = panels(canvas, 2, len(BELIEFS), width=4.0, height=2.8)
    for j, (estimator, said) in enumerate(BELIEFS.items()):
        part = table[table.estimator == estimator]
        names = list(dict.fromkeys(part.pool))
        for i, (metric, (label, factor)) in enumerate(rows.items()):
            _bars(axes[i, j], part, names, "pool", metric, factor)
            axes[i, j].set_ylabel(label)
        axes[0, j].axhline(1.0, color="black", linewidth=0.8)
        axes[1, j].axhline(100 * AIM, color="black", linewidth=0.8, linestyle="--")
        axes[1, j].set_ylim(0, 105)
        axes[0, j].set_title(said, fontsize=9)
    legend(canvas, axes[0, 0])


def _plot_latencies(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    axes = panels(canvas, 2, len(BELIEFS), width=3.8, height=2.6)
    for j, (estimator, said) in enumerate(BELIEFS.items()):
        for i, (metric, aim) in enumerate((("ttft_s", TTFT_S), ("tpot_s", TPOT_S))):
            for policy, part in table[table.estimator == estimator].groupby("policy", sort=False):
                error = np.nan_to_num(part[f"{metric}_ci"])
                axes[i, j].errorbar(
                    part[metric],
                    part["quantile"],
                    xerr=error,
                    label=NAMES[policy],
                    color=COLOURS[policy],
                    capsize=2,
                )
            axes[i, j].axvline(aim, color="black", linestyle="--", linewidth=0.8)
            name = "TTFT, s" if i == 0 else "mean TPOT of a request, s"
            axes[i, j].set(xscale="log", xlabel=name, ylabel="share of requests")
            axes[i, j].grid(alpha=0.3)
        axes[0, j].set_title(said, fontsize=9)
    drawn = [dict(zip(*reversed(one.get_legend_handles_labels()), strict=True)) for one in axes[0]]
    handles = {name: line for one in drawn for name, line in one.items()}
    canvas.legend(
        handles.values(), handles, loc="outside upper center", ncols=6, frameon=False, fontsize=8
    )


def _plot_active(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    mine = [one for one in points.SERIES if one[0] == LADDER[-1]]
    axes = panels(canvas, 1, len(mine), width=3.6, height=3.0)[0]
    for one, (policy, estimator) in zip(axes, mine, strict=True):
        series = profile_of_day(found, policy, estimator)
        for name, colour in (("online", "tab:red"), ("offline", "tab:blue")):
            one.plot(series.hour, series[name], label=name, color=colour, linewidth=1)
        one.set(xlabel=HOUR, ylabel="requests with KV")
        one.set_title(f"Echo, {BELIEFS[estimator]}", fontsize=8)
    legend(canvas, axes[0])


def _plot_hits(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    axes = canvas.subplots()
    for policy, estimator in points.SERIES:
        series = profile_of_day(found, policy, estimator)
        axes.plot(
            series.hour,
            100 * series.hit_rate,
            "-" if estimator == "paper" else "--",
            color=COLOURS[policy],
            label=f"{NAMES[policy]}, {BELIEFS[estimator]}",
        )
    rate = axes.twinx()
    rate.fill_between(series.hour, series.arrivals, color="tab:gray", alpha=0.2)
    rate.set_ylabel("online requests/s (grey)")
    axes.axhline(78.6, color="black", linewidth=0.8, label="paper: 78.6 %")
    axes.set(xlabel=HOUR, ylabel="prefix hit rate, %", ylim=(0, 100))
    axes.legend(loc="lower right", fontsize=8)


def _plot_memory(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    axes = panels(canvas, 1, len(points.SERIES), width=3.2, height=3.0)[0]
    for one, (policy, estimator) in zip(axes, points.SERIES, strict=True):
        series = profile_of_day(found, policy, estimator)
        parts = {
            "occupied": series.online_used + series.offline_used,
            "online free": series.online_cached,
            "offline free": series.offline_cached,
        }
        one.stackplot(series.hour, *(100 * v for v in parts.values()), labels=parts)
        one.set(xlabel=HOUR, ylabel="share of memory, %", ylim=(0, 100))
        one.set_title(f"{NAMES[policy]}, {BELIEFS[estimator]}", fontsize=8)
    legend(canvas, axes[0])


def _plot_arrivals(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    axes = panels(canvas, 2, 1, width=8.5, height=2.4)[:, 0]
    for one, (burstiness, part) in zip(axes, found.groupby("burstiness", sort=False), strict=True):
        mine = part[part.seed == 0]
        one.plot(mine.hour, mine.actual, linewidth=0.5, color="tab:gray", label="actual, a minute")
        one.plot(mine.hour, mine["mean"], color="tab:blue", label="mean of 15 minutes")
        one.plot(mine.hour, mine.high, color="tab:red", linewidth=0.8, label="mean + 2 deviations")
        one.set(ylabel="requests/s", xlabel=HOUR, ylim=(0, None))
        one.set_title(f"bursts of a minute: {burstiness:g}; seed 0", fontsize=9)
    legend(canvas, axes[0])


def _plot_forecast(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    parts = list(found[found.seed == 0].groupby(["tide", "burstiness"], sort=False))
    axes = panels(canvas, 2, len(parts) // 2, width=4.2, height=2.6)
    for one, ((tide, burstiness), part) in zip(axes.flat, parts, strict=True):
        for i, (history_s, mine) in enumerate(part.groupby("history_s", sort=False)):
            if i == 0:
                one.plot(
                    mine.minute, 100 * mine.held, color="tab:gray", linewidth=0.8, label="held"
                )
            label = f"foretold by the last {history_s / 60:g} minutes"
            one.plot(mine.minute, 100 * mine.predicted, color=_TAB[i], label=label)
        one.set(xlabel="minute", ylabel="online memory, %", ylim=(0, None))
        one.set_title(f"{tide} tide, bursts of a minute: {burstiness:g}; seed 0", fontsize=9)
    legend(canvas, axes[0, 0])


def _plot_busiest(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    axes = canvas.subplots()
    axes.barh(table.policy, 100 * table.missed, xerr=100 * np.nan_to_num(table.missed_ci))
    axes.set_xlabel("online requests that miss their objectives, % of the day's")


def _plot_varied(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    rows = table[table.policy == "echo"]
    metrics = {
        "speedup": ("offline tokens/s over BS", 1.0),
        "attainment": ("online objectives kept, %", 100.0),
    }
    metrics |= {"hit_rate": ("hit rate, %", 100.0)}
    axes = panels(canvas, 1, len(metrics), width=3.0, height=0.3 * len(rows) + 1.0)[0]
    for one, (metric, (label, factor)) in zip(axes, metrics.items(), strict=True):
        error = np.nan_to_num(rows[f"{metric}_ci"]) * factor
        one.barh(rows.change, rows[metric] * factor, xerr=error, color="tab:red", capsize=2)
        one.invert_yaxis()
        one.set_xlabel(label, fontsize=8)
        one.tick_params(axis="y", labelleft=one is axes[0], labelsize=8)
    axes[0].axvline(3.3, color="black", linestyle="--", linewidth=0.8)
    axes[1].axvline(100 * AIM, color="black", linestyle="--", linewidth=0.8)


def _plot_caches(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    metrics = {
        "gain": ("offline tokens/s over LRU", 1.0),
        "hit_rate_trough": ("hit rate, trough, %", 100.0),
    }
    metrics |= {
        "hit_rate_peak": ("hit rate, peak, %", 100.0),
        "attainment": ("online objectives kept, %", 100.0),
    }
    names = list(points.ORDERS)
    axes = panels(canvas, 1, len(metrics), width=3.0, height=2.8)[0]
    for one, (metric, (label, factor)) in zip(axes, metrics.items(), strict=True):
        for i, (part, colour) in enumerate(zip(points.PARTS, _TAB, strict=False)):
            mine = table[table.part == part].set_index("order").reindex(names)
            error = np.nan_to_num(mine[f"{metric}_ci"]) * factor
            at = np.arange(len(names)) + 0.25 * i
            one.barh(
                at, mine[metric] * factor, 0.25, xerr=error, label=part, color=colour, capsize=2
            )
        one.set_yticks(
            np.arange(len(names)) + 0.25, [name.replace(", ", ",\n") for name in names], fontsize=8
        )
        one.tick_params(axis="y", labelleft=one is axes[0])
        one.invert_yaxis()
        one.set_xlabel(label, fontsize=8)
    axes[0].axvline(1.0, color="black", linewidth=0.8)
    legend(canvas, axes[0])


def _plot_shared(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    axes = canvas.subplots()
    once = table[table.shared_prefix]
    for i, (pool, part) in enumerate(once.groupby("pool", sort=False)):
        at = np.arange(len(part)) + 0.35 * i
        error = np.nan_to_num(part.gain_ci)
        axes.barh(at, part.gain, 0.35, xerr=error, label=pool, color=_TAB[i], capsize=2)
    axes.set_yticks(np.arange(len(points.SHARING)) + 0.175, points.SHARING)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("offline tokens/s over those of attention that reads it for each")
    axes.legend()


FIG6 = beside_bs(["pool", "estimator", "policy"])
STUDY = Study(
    "echo",
    "Wang et al., Echo",
    [
        Figure(
            "fig2", "online requests over a day", points.days, hours, of_days, _plot_day, day_claims
        ),
        Figure(
            "fig6",
            "offline throughput",
            points.throughput,
            serve,
            FIG6,
            _plot_throughput,
            throughput_claims,
        ),
        Figure(
            "fig7",
            "TTFT and TPOT of online requests beside LooGLE short",
            points.latencies,
            serve,
            quantiles,
            _plot_latencies,
            latency_claims,
        ),
        Figure(
            "fig8",
            "active requests",
            points.series,
            watch,
            of_series,
            _plot_active,
            opposite_claims,
        ),
        Figure("fig9", "prefix hit rate", points.series, watch, of_series, _plot_hits, hit_claims),
        Figure(
            "fig10",
            "memory by kind",
            points.series,
            watch,
            of_series,
            _plot_memory,
            occupied_claims,
        ),
        Figure(
            "day",
            "Figs. 8 to 10 over a whole day",
            points.whole_day,
            watch,
            of_series,
            _plot_hits,
            whole_day_claims,
        ),
        Figure(
            "busy",
            "ours: the minutes of that day in which most arrives",
            points.busy,
            busiest,
            of_busiest,
            _plot_busiest,
            busiest_claims,
        ),
        Figure(
            "fig11",
            "expected arrivals",
            points.arrivals,
            foretold_arrivals,
            of_arrivals,
            _plot_arrivals,
            arrival_claims,
        ),
        Figure(
            "memory",
            "expected memory",
            points.memory,
            foretold_memory,
            of_memory,
            _plot_forecast,
            memory_claims,
        ),
        Figure(
            "cache",
            "ours: M in parts, questions on twelve documents that do not fit into memory together",
            points.caches,
            serve,
            beside_lru,
            _plot_caches,
            cache_claims,
        ),
        Figure(
            "shared",
            "ours: attention that reads a document once for all decodes on it; sums, slo=gap",
            points.shared,
            serve,
            beside_each,
            _plot_shared,
            sharing_claims,
        ),
        Figure(
            "settings",
            "ours: one setting at a time, LooGLE short",
            points.varied,
            serve,
            beside_bs(["change", "policy"]),
            _plot_varied,
            setting_claims,
        ),
    ],
)
