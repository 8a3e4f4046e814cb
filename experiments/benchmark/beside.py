"""Beside Dynamo's simulator: `python -m twinserve.experiments.benchmark.beside --dynamo PYTHON`.

The same recorded trace, whole commands, in turns: ours and `python -m dynamo.replay` (ai-dynamo
1.4.2), with one replica and with eight. Both route round robin and have the same KV memory, seats
and token budget; step times are each one's own. PYTHON is the interpreter of an environment with
ai-dynamo. docs/benchmark.md has the figures.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.console import Console

from twinserve.experiments.benchmark.measure import (
    BenchmarkError,
    ProcessFigures,
    kept_bytecode,
    machine,
    one_core,
    run_command,
    run_process,
)
from twinserve.experiments.benchmark.tables import Table, machine_lines, markdown, show
from twinserve.experiments.study.output import check_target
from twinserve.sim.cli.main import run_app
from twinserve.sim.results.files import dump_json
from twinserve.traces.catalog import resolve
from twinserve.traces.download import cache_folder, find_local, search_folders
from twinserve.traces.write import write_atomically

REPLICAS = (1, 8)
# What `simulate` may take of Dynamo's CPU time, by replicas, and of its memory.
CPU_LIMITS = {1: 0.7, 8: 0.95}
MEMORY_LIMIT = 0.5
ENGINE = {
    "block_size": 64,
    "num_gpu_blocks": 16384,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}
OURS = (
    "--policy=vllm", "--profile=llama-3.1-8b@h100", "--rate-scale=1", "--block-tokens=64",
    "--num-blocks=16384", "--router=round-robin", "--quiet",
)  # fmt: skip


def ours(trace: Path, replicas: int) -> ProcessFigures:
    return run_command(["--trace", str(trace), "--replicas", str(replicas), *OURS])


def theirs(python: str, trace: Path, replicas: int) -> ProcessFigures:
    """It writes a report into the folder that it runs in."""
    with tempfile.TemporaryDirectory() as folder:
        return run_process(
            [
                python, "-m", "dynamo.replay", str(trace.resolve()), "--replay-mode=offline",
                "--router-mode=round_robin", "--trace-block-size=512",
                f"--num-workers={replicas}", f"--extra-engine-args={json.dumps(ENGINE)}",
            ],
            Path(folder),
        )  # fmt: skip


def measure(
    run: dict[str, Callable[[int], ProcessFigures]], repeats: int, progress: Callable[[str], None]
) -> list[dict]:
    """Rows of figures, in turns: both get the same moments of a busy machine. The first run of each
    is not measured: it may have to compile its modules."""
    found = []
    for name, command in run.items():
        progress(f"{name}, before the measured runs")
        command(REPLICAS[0])
    for replicas in REPLICAS:
        for repeat in range(repeats):
            for name, command in run.items():
                progress(f"{name}, {replicas} replica{'s' * (replicas > 1)}, run {repeat + 1}")
                figures = asdict(command(replicas))
                found.append({"simulator": name, "replicas": replicas, **figures})
    return found


def tables(rows: Sequence[dict]) -> list[Table]:
    """The figures; and ours over Dynamo's with the limits, where both were run."""

    def of(name: str, replicas: int) -> tuple[list[float], float]:
        mine = [r for r in rows if (r["simulator"], r["replicas"]) == (name, replicas)]
        return sorted(row["cpu_s"] for row in mine), max(row["peak_rss_bytes"] for row in mine)

    def cells(name: str, replicas: int) -> tuple[str, ...]:
        cpu, peak = of(name, replicas)
        seconds = (cpu[0], statistics.median(cpu), cpu[-1])
        return (name, f"{replicas:,}", *(f"{s:.2f}" for s in seconds), f"{peak / 1e6:,.0f}")

    names = list(dict.fromkeys(row["simulator"] for row in rows))
    header = ("simulator", "replicas", "CPU min, s", "CPU median, s", "CPU max, s", "peak, MB")
    body = [cells(name, replicas) for replicas in REPLICAS for name in names]
    repeats = len(rows) // len(body)
    found = [Table(f"The whole Mooncake trace, in turns, runs: {repeats}", header, body)]
    if len(names) > 1:
        found.append(_limits({n: [of(name, n) for name in names] for n in REPLICAS}))
    return found


def _limits(found: dict[int, list[tuple[list[float], float]]]) -> Table:
    """found: by replicas, CPU seconds (ascending) and peak bytes of ours and of theirs."""
    body = []
    for replicas, ((our_cpu, our_peak), (their_cpu, their_peak)) in found.items():
        for what, ratio, limit in (
            ("CPU min", our_cpu[0] / their_cpu[0], CPU_LIMITS[replicas]),
            ("peak memory", our_peak / their_peak, MEMORY_LIMIT),
        ):
            kept = "yes" if ratio <= limit else "no"
            body.append((what, f"{replicas:,}", f"{ratio:.2f}", f"{limit:.2f}", kept))
    header = ("simulate over dynamo.replay", "replicas", "ratio", "limit", "kept")
    return Table("Limits", header, body)


def beside(
    *,
    dynamo: str | None = None,
    trace: Path | None = None,
    repeats: int = 3,
    out: Path | None = None,
    markdown_: Annotated[bool, Parameter(name="--markdown", negative="")] = False,
) -> None:
    """Measure whole commands beside Dynamo's simulator.

    Parameters
    ----------
    dynamo: str
        Interpreter of an environment with ai-dynamo. [default: ours alone]
    trace: Path
        File in Mooncake's format. [default: the recorded conversations]
    repeats: int
        Runs of each command.
    out: Path
        Write all figures as JSON.
    markdown_: bool
        Print the tables as Markdown.
    """
    check_target(out)
    if repeats < 1:
        raise BenchmarkError(f"--repeats {repeats}: at least 1")
    file = trace or find_local(resolve("mooncake"), search_folders(), cache_folder())
    if file is None or not file.is_file():
        where = "the Mooncake trace is not here: `twinserve trace fetch mooncake`"
        raise BenchmarkError(where if file is None else f"--trace {file}: there is no such file")
    run: dict[str, Callable[[int], ProcessFigures]] = {"twinserve": lambda n: ours(file, n)}
    if dynamo is not None:
        run["dynamo.replay"] = lambda n: theirs(dynamo, file, n)
    progress = Console(stderr=True, highlight=False)
    report: dict = {"machine": machine(), "trace": file.name}
    with one_core() as core, kept_bytecode():
        report["machine"]["core"] = core
        report["rows"] = measure(
            run, repeats, lambda text: progress.print(text, style="dim", soft_wrap=True)
        )
    if out is not None:
        write_atomically(out, dump_json(report, out.name).encode())
    lines, found = machine_lines(report["machine"]), tables(report["rows"])
    if markdown_:
        print(markdown(lines, found), end="")
    else:
        show(lines, found, Console(highlight=False))


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="beside", help=beside.__doc__)
    app.default(beside)
    run_app(app, arguments)


if __name__ == "__main__":
    main()
