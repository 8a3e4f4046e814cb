"""The figures of `serving` as a table."""

from __future__ import annotations

import statistics

from twinserve.experiments.benchmark.tables import Table

HEADER = (
    "served with",
    "ledger, blocks",
    "whole, s",
    "x vLLM",
    "TTFT rt, s",
    "latest, s",
    "sooner, x",
    "TTFT be, s",
    "steps",
    "batch",
    "preempted",
    "again",
    "plan, ms",
)


def price_table(report: dict) -> Table:
    """A row a case, vLLM's own scheduler first: the median of the runs, and in brackets the
    smallest and largest.

    whole     until the last request has ended
    x vLLM    times what vLLM's own scheduler takes; sooner, x: than with that, the mean TTFT
    TTFT      mean of the real-time requests (rt; latest: the longest) and of the flood (be)
    batch     requests a step
    again     tokens computed once more after a preemption
    plan      the policy's decision, a step
    """
    flood, stock = report["flood"], report["stock"]
    rows = [_row("vLLM's own scheduler", stock, stock)]
    for case in report["cases"]:
        name = case["name"]
        if case["fault"]:
            rows.append((name, case["fault"], *[""] * (len(HEADER) - 2)))
        else:
            rows.append(_row(name, case["runs"], stock))
    title = (
        f"{flood['real_time']} real-time requests in a flood of {flood['best_effort']}, model "
        f"{report['engine']['model']}, {len(stock)} runs of vLLM's own scheduler beside them"
    )
    return Table(title, HEADER, rows)


def _row(name: str, runs: list[dict], stock: list[dict]) -> tuple[str, ...]:
    def middle(key: str, of: list[dict] = runs) -> float:
        return statistics.median(run[key] for run in of)

    def spread(key: str, digits: int) -> str:
        values = [run[key] for run in runs]
        return f"{middle(key):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    blocks = f"{runs[0]['ledger']} {runs[0]['blocks']}".strip()
    return (
        name,
        blocks,
        spread("whole_s", 2),
        f"{middle('whole_s') / middle('whole_s', stock):.2f}",
        spread("ttft_mean_s", 3),
        f"{middle('ttft_max_s'):.3f}",
        f"{middle('ttft_mean_s', stock) / middle('ttft_mean_s'):.1f}",
        f"{middle('flood_ttft_mean_s'):.2f}",
        f"{middle('steps'):,.0f}",
        f"{middle('batch'):.1f}",
        f"{middle('preemptions'):,.0f}",
        f"{middle('computed_again'):,.0f}",
        f"{1000 * middle('decision_s') / middle('steps'):.2f}",
    )
