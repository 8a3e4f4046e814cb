"""The figures of `decision_time` as tables."""

from __future__ import annotations

import math

from twinserve.experiments.benchmark.tables import Table, machine_lines

ITERATION_S = 0.010  # of the aim: 2 % of it, better 1 %


def lines_and_tables(report: dict) -> tuple[list[str], list[Table]]:
    """What was measured where, and all tables of a report."""
    sizes = report["sizes"]
    lines = [
        *machine_lines(report["machine"]),
        f"Batch {report['batch']}; {sizes['decisions']} decisions after {sizes['warm_up']}, runs "
        f"a case: {sizes['repeats']}",
    ]
    tables = [_growth(report), _thousand(report), _short(report)]
    if report["hybrid"]:
        tables.append(_hybrid(report))
    if "table_iii" in report:
        tables.append(_table_iii(report))
    if "whole" in report:
        tables.append(_whole(report))
        if report["day"]:
            tables.append(_day(report))
    return lines, tables


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def _by_policy(runs: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for run in runs:
        found.setdefault(run["policy"], []).append(run)
    return found


def _growth(report: dict) -> Table:
    queues = report["sizes"]["queued"]
    return Table(
        "CPU time of a decision, median / p99, ms, by requests queued",
        ("policy", *(f"{n:,}" for n in queues)),
        [
            (f"`{policy}`", *(f"{_ms(run['median_s'])} / {_ms(run['p99_s'])}" for run in runs))
            for policy, runs in _by_policy(report["growth"]).items()
        ],
    )


def _thousand(report: dict) -> Table:
    """The length of the queue that the aim is for, or the nearest one that was measured."""
    queued = min(report["sizes"]["queued"], key=lambda n: abs(n - 1_000))
    return Table(
        f"With {queued:,} queued",
        (
            "policy",
            "of a 10 ms iteration, %",
            "medians of the runs, ms",
            "wall, ms",
            "first, ms",
            "mean batch",
            "mean queue",
        ),
        [
            (
                f"`{run['policy']}`",
                f"{100 * run['median_s'] / ITERATION_S:.2f}",
                " ".join(_ms(s) for s in run["medians_s"]),
                _ms(run["wall_median_s"]),
                _ms(run["first_s"]),
                f"{run['batch']:.1f}",
                f"{run['waiting']:,.0f}",
            )
            for run in report["growth"]
            if run["queued"] == queued
        ],
    )


def _short(report: dict) -> Table:
    run = report["short"][0]
    return Table(
        f"With {run['queued']:,} queued and memory for three quarters of a batch "
        f"({run['num_blocks']:,} blocks)",
        ("policy", "median, ms", "p99, ms", "mean batch", "preemptions"),
        [
            (
                f"`{r['policy']}`",
                _ms(r["median_s"]),
                _ms(r["p99_s"]),
                f"{r['batch']:.1f}",
                f"{r['preemptions']:,}",
            )
            for r in report["short"]
        ],
    )


def _hybrid(report: dict) -> Table:
    return Table(
        "BROS's hybrid setting: a decision as a part of the iteration (BROS's paper: 7.6-9.5 %)",
        ("policy", "decision mean, ms", "p99, ms", "iteration mean, ms", "part, %", "mean batch"),
        [
            (
                f"`{run['policy']}`",
                _ms(run["decision_s"]),
                _ms(run["p99_s"]),
                f"{1000 * run['iteration_s']:.1f}",
                f"{100 * run['decision_s'] / run['iteration_s']:.2f}",
                f"{run['batch']:.0f}",
            )
            for run in report["hybrid"]
        ],
    )


def _table_iii(report: dict) -> Table:
    return Table(
        "Justitia, Table III: a scheduling decision by applications a minute, mean, ms",
        (
            "applications a minute",
            "paper",
            "ours",
            "ours, p99",
            "decisions",
            "most requests waiting",
        ),
        [
            (
                f"{run['rate']}",
                "-"
                if run["paper_s"] is None or math.isnan(run["paper_s"])
                else _ms(run["paper_s"]),
                _ms(run["mean_s"]),
                _ms(run["p99_s"]),
                f"{run['decisions']:,}",
                f"{run['most_waiting']:,}",
            )
            for run in report["table_iii"]
        ],
    )


def _whole(report: dict) -> Table:
    return Table(
        "`simulate --policy P --trace mooncake`, whole process (aim: 30 s)",
        ("policy", "wall, s", "CPU, s", "peak memory, MB"),
        [
            (f"`{run['policy']}`", "refused", run["refused"], "")
            if run["refused"]
            else (
                f"`{run['policy']}`",
                f"{run['wall_s']:.1f}",
                f"{run['cpu_s']:.1f}",
                f"{run['peak_rss_bytes'] / 1e6:,.0f}",
            )
            for run in report["whole"]
        ],
    )


def _day(report: dict) -> Table:
    return Table(
        "A tidal day with an offline pool (aim: 120 s)",
        ("policy", "online", "offline", "steps", "decisions", "simulated, s", "wall, s"),
        [
            (
                f"`{run['policy']}`",
                f"{run['online']:,}",
                f"{run['offline']:,}",
                f"{run['steps']:,}",
                f"{run['decisions']:,}",
                f"{run['simulated_s']:,.0f}",
                f"{run['wall_s']:.1f}",
            )
            for run in report["day"]
        ],
    )
