"""What a policy costs, and gains, when a live engine is served with it:
`python -m twinserve.experiments.serving`.

Real-time requests arrive in a flood of best-effort ones. For every policy: how long the former wait
for their first token, and how long the whole takes, compared with vLLM's own scheduler in the same
run. docs/serving.md has the table.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.experiments.benchmark.measure import machine
from twinserve.experiments.benchmark.tables import machine_lines
from twinserve.experiments.serving.flood import STOCK, Case, Engine, Flood, cases
from twinserve.experiments.study.output import markdown_table
from twinserve.sim.cli.main import run_app
from twinserve.sim.setup.config import SettingsError

HEADER = (
    "served with",
    "whole, s",
    "x vLLM",
    "mean TTFT rt, s",
    "sooner, x",
    "steps",
    "preempted",
    "computed again",
)


class Processes:
    """A process for each kind of engine, for its own CPU time and memory: vLLM's own scheduler, and
    ours with each size of host memory."""

    def __init__(self, engine: Engine, flood: Flood) -> None:
        self._engine, self._flood = engine, flood
        self._open: dict[tuple[bool, int], ProcessPoolExecutor] = {}

    def run(self, chosen: Sequence[Case], seed: int) -> list[dict]:
        """The same flood with each case, at the same time: whatever else the machine does slows all
        of them. Raises LiveEngineError; the engines are then made anew for the next case."""
        from twinserve.experiments.serving.served import flooded

        spawn = multiprocessing.get_context("spawn")
        waiting = []
        for case in chosen:
            kind = case.policy is None, case.host_blocks
            if kind not in self._open:
                self._open[kind] = ProcessPoolExecutor(1, spawn)
            task = self._open[kind].submit(flooded, case, self._engine, self._flood, seed)
            waiting.append(task)
        try:
            return [task.result() for task in waiting]
        except BrokenExecutor:
            self.close()
            raise LiveEngineError("the engine's process ended") from None
        except Exception as error:  # whatever it is, the other cases go on
            self.close()
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise LiveEngineError(said) from error

    def close(self) -> None:
        for process in self._open.values():
            process.shutdown(cancel_futures=True)
        self._open.clear()


@dataclass
class Found:
    """runs: of a case, a seed each; stock: of the same flood with vLLM's own scheduler at the same
    time; fault: why there are no more."""

    case: Case
    runs: list[dict] = field(default_factory=list)
    stock: list[dict] = field(default_factory=list)
    fault: str = ""


def measure(chosen: list[Case], engine: Engine, flood: Flood, repeats: int) -> list[Found]:
    """The runs of each case. If a case fails, the others go on."""
    say = partial(print, file=sys.stderr, flush=True)
    engines = Processes(engine, flood)
    report = [Found(case) for case in chosen]
    for found in report:
        say(found.case.name)
        try:
            for seed in range(repeats):
                one, stock = engines.run((found.case, STOCK), seed)
                answers, others = one.pop("answers"), stock.pop("answers")
                differing = sum(answers[name] != others[name] for name in others)
                found.runs.append(one)
                found.stock.append(stock)
                say(
                    f"  {one['whole_s']:.2f} s, vLLM's own {stock['whole_s']:.2f} s, answers that "
                    f"differ: {differing}"
                )
        except LiveEngineError as error:
            found.fault = str(error)
            say(f"  {error}")
    engines.close()
    return report


def price_rows(report: Sequence[Found]) -> list[Sequence[str]]:
    """A row a case, vLLM's own scheduler first: the median of the runs, and in brackets the
    smallest and largest. `x vLLM` and `sooner` compare a run with that of vLLM's own scheduler at
    the same time: seconds until the last request has ended, mean TTFT of real-time requests."""
    stock = [run for found in report for run in found.stock]
    rows = [_row("vLLM's own scheduler", stock, stock)] if stock else []
    for found in report:
        if found.runs:
            rows.append(_row(found.case.name, found.runs, found.stock))
        else:
            rows.append((found.case.name, found.fault, *[""] * (len(HEADER) - 2)))
    return rows


def _row(name: str, runs: list[dict], stock: list[dict]) -> tuple[str, ...]:
    def spread(values: list[float], digits: int) -> str:
        middle = statistics.median(values)
        return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    def against(key: str) -> list[float]:
        return [run[key] / other[key] for run, other in zip(runs, stock, strict=True)]

    counts = [
        f"{statistics.median(run[key] for run in runs):,.0f}"
        for key in ("steps", "preemptions", "computed_again")
    ]
    return (
        name,
        spread([run["whole_s"] for run in runs], 2),
        spread(against("whole_s"), 2),
        spread([run["ttft_mean_s"] for run in runs], 3),
        f"{1 / statistics.median(against('ttft_mean_s')):.1f}",
        *counts,
    )


def serving(
    *,
    policy: Annotated[list[str] | None, Parameter(name=["--policy", "-p"], negative="")] = None,
    model: Literal["tiny", "deep", "small"] = "tiny",
    profile: str = Engine.profile,
    best_effort: int = Flood.best_effort,
    repeats: int = 3,
) -> None:
    """Measure what policies cost and gain when a live engine is served with them.

    Parameters
    ----------
    policy: list[str]
        Only these; by default all there are, and BROS with several settings.
    model: str
        tiny, deep or small, as of `twinserve replay`.
    profile: str
        What policies believe a step takes.
    best_effort: int
        Requests of the flood.
    repeats: int
        Runs of each case, a seed each.
    """
    if repeats < 1 or best_effort < 1:
        raise SettingsError("--repeats and --best-effort: at least 1")
    engine, flood = Engine(model=model, profile=profile), Flood(best_effort=best_effort)
    lines = [*machine_lines({**machine(), "core": None}), f"vLLM {installed_vllm()}, CPU engine"]
    rows = price_rows(measure(cases(policy), engine, flood, repeats))
    print("\n".join(lines), "", markdown_table(HEADER, rows), sep="\n", end="")


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="serving", help=serving.__doc__, version_flags=[])
    app.default(serving)
    run_app(app, arguments)
