"""Tables and plots of the validation experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from twinserve.experiments.study.output import table_lines, write_plot

STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def markdown(report: dict) -> str:
    """The error table of every run with the peer's errors, and that of single steps."""
    lines = []
    for run in report["runs"]:
        blocks = run["num_blocks"]
        lines += [
            f"### {run['run']}",
            "",
            f"Profile `{run['profile']}` ({run['form']}), {blocks['value']} KV blocks "
            f"({blocks['source']}),"
            f" {run['preemptions']} preemptions,"
            f" {run['duration_s']['ours']:.1f} s (real {run['duration_s']['real']:.1f} s).",
            "Mean distance from the real curve over time: "
            + ", ".join(
                f"{name.replace('_pct', ' %')} {value:.1f}"
                for name, value in run["mean_distance"].items()
            )
            + ".",
            "",
        ]
        rows = []
        for metric, found in run["errors"].items():
            ours = (f"{found[name]:+.1%}" for name in STATISTICS)
            peer = run["peer_errors"].get(metric, {})
            theirs = (
                ", ".join(f"{peer[name]:+.1%}" for name in ("mean", "p50", "p99") if name in peer)
                or "-"
            )
            rows.append([metric, _time(run["real_s"][metric]["mean"]), *ours, theirs])
        lines += [
            *table_lines(["", "real mean", *STATISTICS, "LLMServingSim 2: mean, p50, p99"], rows),
            "",
        ]
    steps = [
        [
            row["model"],
            row["steps"],
            form,
            *(f"{row[form][part]:.1%}" for part in ("all", "decode", "other")),
        ]
        for row in report["steps"]
        for form in ("operators", "roofline")
    ]
    header = ["model", "steps", "form", "all", "decode only", "with prompt tokens"]
    lines += ["### Single steps of vLLM 0.15.1 on H100", "", *table_lines(header, steps)]
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def plot_run(run: dict, path: Path) -> None:
    """Distributions of the three latencies, and running, waiting and KV use over time, real and
    simulated; a PNG."""
    real, ours = run["_samples"]
    measured, simulated = run["_series"]
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3)
    for axis, metric in zip(axes[0], real, strict=True):
        for values, label, style in (
            (real[metric], "measured", "-"),
            (ours[metric], "simulated", "--"),
        ):
            axis.plot(np.sort(values), np.linspace(0, 1, len(values)), style, label=label)
        axis.set(
            xlabel=f"{metric} (s)",
            ylabel="share of requests",
            title=f"{metric}: mean {run['errors'][metric]['mean']:+.1%}",
        )
    names = (
        ("running", "requests running"),
        ("waiting", "requests waiting"),
        ("kv_cache_pct", "KV blocks used (%)"),
    )
    for axis, (name, label) in zip(axes[1], names, strict=True):
        if name in run["mean_distance"]:
            axis.plot(measured.t, measured[name], "-", label="measured")
        axis.plot(simulated.t, simulated[name], "--", label="simulated")
        axis.set(xlabel="time (s)", ylabel=label)
    axes[0][0].legend()
    figure.suptitle(run["run"])
    write_plot(path, figure, dpi=110)
