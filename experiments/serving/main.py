"""What a policy costs, and gains, when a live engine is served with it:
`python -m twinserve.experiments.serving`.

Real-time requests arrive in a flood of best-effort ones. For every policy: how long the former wait
for their first token, how long the whole takes, and where the time goes, beside vLLM with its own
scheduler in the same run. docs/serving.md has the table.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter
from rich.console import Console

from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.experiments.benchmark.measure import machine
from twinserve.experiments.benchmark.tables import machine_lines, markdown, show
from twinserve.experiments.serving.cases import STOCK, Case, cases
from twinserve.experiments.serving.engine import Engine
from twinserve.experiments.serving.flood import Flood
from twinserve.experiments.serving.tables import price_table
from twinserve.experiments.study.output import check_target
from twinserve.sim.cli.main import run_app
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.write import write_atomically

REPEATS = 3
QUICK = Flood(best_effort=24, output=40, real_time=3, every_s=0.05)


class Process:
    """A served engine in a process of its own, for its own CPU time and memory."""

    def __init__(self, case: Case, engine: Engine, flood: Flood) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, other = context.Pipe()
        arguments = (other, case, engine, flood)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def start(self, case: Case, seed: int) -> None:
        """A flood; `result` waits for it."""
        with suppress(OSError):  # `result` says why
            self._line.send((case, seed))

    def result(self) -> dict:
        """The flood's figures (Served.run). Raises LiveEngineError where the engine failed."""
        try:
            found = self._line.recv()
        except (EOFError, OSError):
            found = "the engine's process ended"
        if isinstance(found, str):
            raise LiveEngineError(found)
        return found

    def close(self) -> None:
        self._line.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


def _serve(line, case: Case, engine: Engine, flood: Flood) -> None:
    """Until the line is closed, or something fails: the line then has one text."""
    from twinserve.experiments.serving.served import Served  # vLLM comes along

    try:
        with tempfile.TemporaryDirectory() as folder, Served(case, engine, Path(folder)) as served:
            served.warm_up(flood)
            while True:
                wanted, seed = line.recv()
                if wanted != served.case:
                    served.serve(wanted)
                    served.warm_up(flood)
                labels = {"ledger": served.ledger, "blocks": served.policy_blocks}
                line.send({**labels, **served.run(flood, seed)})
    except EOFError:
        return
    except (Exception, SystemExit) as error:  # whatever it is, the other cases go on
        with suppress(OSError):
            line.send(f"{type(error).__name__}: {error}".splitlines()[0])


class Processes:
    """An engine for each kind: vLLM's own scheduler, and ours with each size of host memory."""

    def __init__(self, engine: Engine, flood: Flood) -> None:
        self._engine, self._flood = engine, flood
        self._open: dict[tuple[bool, int], Process] = {}

    def run(self, chosen: Sequence[Case], seed: int) -> list[dict]:
        """The same flood with each case, at the same time: whatever else the machine does slows all
        of them. Raises LiveEngineError; an engine that failed is made anew for the next case."""
        for case in chosen:
            if _kind(case) not in self._open:
                self._open[_kind(case)] = Process(case, self._engine, self._flood)
            self._open[_kind(case)].start(case, seed)
        found, faults = [], []
        for case in chosen:
            try:
                found.append(self._open[_kind(case)].result())
            except LiveEngineError as error:
                self._open.pop(_kind(case)).close()
                faults.append(error)
        if faults:
            raise faults[0]
        return found

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_) -> None:
        for process in self._open.values():
            process.close()


def _kind(case: Case) -> tuple[bool, int]:
    return case.policy is None, case.host_blocks


def measure(
    chosen: list[Case],
    engine: Engine,
    flood: Flood,
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict], None] = lambda report: None,
) -> dict:
    """All figures as plain values for JSON: the runs of each case, a seed each, and of the
    same flood with vLLM's own scheduler at the same time. A case that
    fails says why, and the others go on. keep: is given the report after each case."""
    report: dict = {
        "machine": {**machine(), "core": None},
        "vllm": installed_vllm(),
        "engine": asdict(engine),
        "flood": asdict(flood),
        "cases": [],
    }
    with Processes(engine, flood) as engines:
        for case in chosen:
            say(case.name)
            found: dict = {**asdict(case), "name": case.name, "runs": [], "beside": [], "fault": ""}
            try:
                for seed in range(repeats):
                    one, beside = engines.run((case, STOCK), seed)
                    one["differing"] = _differing(one.pop("answers"), beside.pop("answers"))
                    found["runs"].append(one)
                    found["beside"].append(beside)
                    say(f"  {one['whole_s']:.2f} s, vLLM's own {beside['whole_s']:.2f} s")
            except LiveEngineError as error:
                found["fault"] = str(error)
                say(f"  {error}")
            report["cases"].append(found)
            keep(report)
    return report


def _differing(answers: dict, others: dict) -> int:
    """Answers that are not the same to the token."""
    return sum(answers[name] != others[name] for name in others)


def serving(
    *,
    policy: Annotated[list[str] | None, Parameter(name=["--policy", "-p"], negative="")] = None,
    model: Literal["tiny", "deep", "small"] = "tiny",
    profile: str = Engine.profile,
    best_effort: int = Flood.best_effort,
    repeats: int = REPEATS,
    quick: Annotated[bool, Parameter(negative="")] = False,
    markdown: Annotated[bool, Parameter(negative="")] = False,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
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
    quick: bool
        A tiny flood, once: whether it works, not what it takes.
    markdown: bool
        Print the table as Markdown.
    out: Path
        Write all figures as JSON.
    """
    if quick and (repeats != REPEATS or best_effort != Flood.best_effort):
        raise SettingsError("--quick has a flood of its own: drop --best-effort and --repeats")
    if repeats < 1 or best_effort < 1:
        raise SettingsError("--repeats and --best-effort: at least 1")
    check_target(out)
    chosen = cases(policy)
    progress = Console(stderr=True, highlight=False)

    def keep(report: dict) -> None:
        if out is not None:
            write_atomically(out, dump_json(report, out.name).encode())

    report = measure(
        chosen,
        Engine(model=model, profile=profile),
        QUICK if quick else Flood(best_effort=best_effort),
        1 if quick else repeats,
        lambda text: progress.print(text, style="dim", soft_wrap=True),
        keep,
    )
    print_report(report, markdown)


def print_report(report: dict, as_markdown: bool) -> None:
    lines = [*machine_lines(report["machine"]), f"vLLM {report['vllm']}, CPU engine, one thread"]
    tables = [price_table(report)]
    if as_markdown:
        print(markdown(lines, tables), end="")
    else:
        show(lines, tables, Console(highlight=False))


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="serving", help=serving.__doc__, version_flags=[])
    app.default(serving)
    run_app(app, arguments)
