"""The benchmark's figures as tables: on the terminal, and as Markdown for docs/benchmark.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from twinserve.experiments.study.output import table_lines


@dataclass(frozen=True)
class Table:
    """rows hold text; the first column is a name, the others are numbers."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def headlines(report: dict) -> list[str]:
    """What was measured where, a line each."""
    trace = report["trace"]
    return [
        *machine_lines(report["machine"]),
        f"Trace: {trace['name']} ({trace['source']}); scheduling: {report['scheduling']}",
    ]


def machine_lines(computer: dict) -> list[str]:
    """What a report's `machine` says."""
    libraries = ", ".join(f"{name} {number}" for name, number in computer["versions"].items())
    load = computer["load_average_1min"]
    return [
        f"Machine: {computer['cpu']}, {computer['cores']} cores, {computer['system']}; "
        + ("on one core" if computer["core"] is not None else "not pinned to a core")
        + ("" if load is None else f"; load average at the start {load:.2f}"),
        f"Python {computer['python']}; {libraries}",
    ]


def tables(report: dict) -> list[Table]:
    """All tables of a report, as `measure` returns it."""
    return [
        *(
            Table(
                f"`{run['command']}`, runs: {len(run['runs'])}",
                ("whole process", "min", "median", "max"),
                [
                    ("wall time, s", *_spread(run["wall_s"])),
                    ("CPU time, s", *_spread(run["cpu_s"])),
                    ("peak memory, MB", *_spread(run["peak_rss_bytes"], 1e-6, 0)),
                ],
            )
            for run in report["process"]
        ),
        Table(
            "Start-up, whole process",
            ("command", "runs", "wall min, s", "wall median, s", "wall max, s"),
            [
                (f"`{run['command']}`", str(len(run["runs"])), *_spread(run["wall_s"], digits=3))
                for run in report["pages"]
            ],
        ),
        Table(
            "Fleets, whole process",
            ("policy", "replicas", "requests", "CPU time, s", "peak memory, MB"),
            [
                (
                    run["policy"],
                    f"{run['replicas']:,}",
                    "all" if run["requests"] is None else f"{run['requests']:,}",
                    f"{run['cpu_s']:.2f}",
                    f"{run['peak_rss_bytes'] * 1e-6:,.0f}",
                )
                for run in report["fleets"]
            ],
        ),
        Table(
            "Inside these runs",
            (
                "policy",
                "requests",
                "steps",
                "steps/s",
                "requests/s",
                "decision mean, us",
                "decision p99, us",
            ),
            [
                (
                    run["policy"],
                    f"{run['requests']:,}",
                    f"{run['steps']:,}",
                    f"{run['steps_per_s']:,.0f}",
                    f"{run['requests_per_s']:,.0f}",
                    *_decision(run),
                )
                for run in report["speed"]
            ],
        ),
        Table(
            "Growth with the number of requests (generated, load 0.65)",
            ("policy", "requests", "steps", "wall, s", "wall a request, us"),
            [
                (
                    run["policy"],
                    f"{run['requests']:,}",
                    f"{run['steps']:,}",
                    f"{run['wall_s'] + run['metrics_s']:.2f}",
                    f"{run['wall_per_request_s'] * 1e6:,.0f}",
                )
                for run in report["growth"]
            ],
        ),
        Table(
            "Growth with the queue (all requests submitted at once)",
            ("policy", "requests", "decisions", "decision mean, us", "decision p99, us"),
            [
                (run["policy"], f"{run['requests']:,}", f"{run['decisions']:,}", *_decision(run))
                for run in report["queue"]
            ],
        ),
        Table(
            "Fast path against exact path, same results",
            ("policy", "requests", "steps", "fast, s", "exact, s", "exact / fast"),
            [
                (
                    run["policy"],
                    f"{run['requests']:,}",
                    f"{run['steps']:,}",
                    f"{run['fast_s']:.2f}",
                    f"{run['exact_s']:.2f}",
                    f"{run['ratio']:.1f}",
                )
                for run in report["paths"]
            ],
        ),
    ]


def rich_tables(report: dict, console: Console) -> None:
    """Print everything on `console`."""
    show(headlines(report), tables(report), console)


def show(lines: Iterable[str], found: Iterable[Table], console: Console) -> None:
    """Lines and tables on `console`."""
    for line in lines:
        console.print(line, soft_wrap=True)
    for table in found:
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i, column in enumerate(table.header):
            shown.add_column(column, justify="right" if i else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*row)
        console.print()
        console.print(table.title, style="bold", soft_wrap=True)
        console.print(shown)


def markdown_tables(report: dict) -> str:
    """Everything as Markdown."""
    return markdown(headlines(report), tables(report))


def markdown(lines: Iterable[str], found: Iterable[Table]) -> str:
    """Lines and tables as Markdown."""
    parts = ["\n".join(f"- {line}" for line in lines)]
    for table in found:
        rules = [" :-- ", *(" --: " for _ in table.header[1:])]
        parts += [f"### {table.title}", "\n".join(table_lines(table.header, table.rows, rules))]
    return "\n\n".join(parts) + "\n"


def _spread(figure: dict, scale: float = 1.0, digits: int = 2) -> list[str]:
    return [f"{figure[name] * scale:,.{digits}f}" for name in ("min", "median", "max")]


def _decision(run: dict) -> tuple[str, str]:
    return f"{run['decision_mean_s'] * 1e6:,.0f}", f"{run['decision_p99_s'] * 1e6:,.0f}"
