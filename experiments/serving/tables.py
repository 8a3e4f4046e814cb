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
    x vLLM    times what vLLM's own scheduler takes for the same flood at the same time; sooner, x:
              than with that, the mean TTFT of real-time requests
    TTFT      mean of the real-time requests (rt; latest: the longest) and of the flood (be)
    batch     requests a step
    again     tokens computed once more after a preemption
    plan      the policy's decision, a step
    """
    flood = report["flood"]
    stock = [run for case in report["cases"] for run in case["beside"]]
    rows = [_row("vLLM's own scheduler", stock, stock)] if stock else []
    for case in report["cases"]:
        if case["runs"]:
            rows.append(_row(case["name"], case["runs"], case["beside"]))
        else:
            rows.append((case["name"], case["fault"], *[""] * (len(HEADER) - 2)))
    title = (
        f"{flood['real_time']} real-time requests in a flood of {flood['best_effort']}, model "
        f"{report['engine']['model']}"
    )
    return Table(title, HEADER, rows)


def _row(name: str, runs: list[dict], beside: list[dict]) -> tuple[str, ...]:
    def middle(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    def spread(values: list[float], digits: int) -> str:
        middle = statistics.median(values)
        return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    def of(key: str) -> list[float]:
        return [run[key] for run in runs]

    def against(key: str) -> list[float]:
        return [run[key] / other[key] for run, other in zip(runs, beside, strict=True)]

    return (
        name,
        f"{runs[0]['ledger']} {runs[0]['blocks']}".strip(),
        spread(of("whole_s"), 2),
        spread(against("whole_s"), 2),
        spread(of("ttft_mean_s"), 3),
        f"{middle('ttft_max_s'):.3f}",
        f"{1 / statistics.median(against('ttft_mean_s')):.1f}",
        f"{middle('flood_ttft_mean_s'):.2f}",
        f"{middle('steps'):,.0f}",
        f"{middle('batch'):.1f}",
        f"{middle('preemptions'):,.0f}",
        f"{middle('computed_again'):,.0f}",
        f"{1000 * middle('decision_s') / middle('steps'):.2f}",
    )
