"""`twinserve trace`: list, fetch, inspect, convert, anonymise and make request traces."""

from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from twinserve.sim.cli.options import Flag, Whole
from twinserve.sim.cli.progress import RunProgress

trace_app = cyclopts.App(
    name="trace", help="Request traces: list, fetch, inspect, convert, anonymise, make."
)


@trace_app.command(name="list")
def list_() -> None:
    """List the traces known by name, and the source of each."""
    from twinserve.sim.report.table import print_rows
    from twinserve.traces import verbs

    rows = []
    for entry in verbs.list_traces():
        where = "local copy" if entry["where"].endswith((".jsonl", ".csv")) else entry["where"]
        names = " = ".join([entry["name"], *entry["aliases"]])
        count = f"{entry['rows']:,}" if entry["rows"] else ""
        rows.append([names, count, where, entry["description"]])
    print_rows(["name", "requests", "from", "what"], rows)


@trace_app.command
def fetch(name: str) -> None:
    """Download a recorded trace once, checked by its sha256, and print its path.

    Args:
        name: Name from `trace list`.
    """
    from twinserve.traces import load

    with RunProgress(shown=True) as progress:
        path = load.fetch(name, progress=progress.download)
    print(path)


@trace_app.command
def inspect(
    trace: str,
    *,
    format: str | None = None,
    columns: str | None = None,
    benchmark: Whole | None = None,
    seed: int = 0,
    rate: float | None = None,
    offline: Flag = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show what a trace holds: source, rate, lengths, prefix sharing.

    Args:
        trace: Name or file.
        format: Format of a file whose content does not show it.
        columns: Columns of any CSV file: arrival=ts,prompt=in,output=out (docs/traces.md).
        benchmark: Which benchmark of a report of guidellm with several, from 1.
        seed: Seed of generated arrivals and lengths.
        rate: Requests a second of generated arrivals.
        offline: Never download.
        as_json: Everything, as JSON.
    """
    from twinserve.sim.results.files import dump_json
    from twinserve.traces import load, verbs

    with RunProgress(shown=not as_json) as progress:
        workload = load.load_trace(
            trace,
            format=format,
            columns=columns,
            benchmark=benchmark,
            seed=seed,
            rate=rate,
            offline=offline,
            progress=progress.download,
        )
    found = verbs.inspect(workload)
    if as_json:
        print(dump_json(found), end="")
        return
    print(found["summary"])
    for notice in found["notices"]:
        print(f"note: {notice}")
    for name, value in found.items():
        if name not in ("summary", "notices", "name"):
            print(f"{name:>16}  {_shown(value)}")


def _shown(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


@trace_app.command
def convert(
    source: str,
    target: Path,
    *,
    format: str | None = None,
    columns: str | None = None,
    benchmark: Whole | None = None,
    rate: float | None = None,
    raw_arrivals: Flag = False,
    overwrite: Flag = False,
) -> None:
    """Write a trace as Mooncake JSONL with its sidecar, for this and other tools.

    Args:
        source: Name or file.
        target: The .jsonl file to write.
        format: Format of a source whose content does not show it.
        columns: Columns of any CSV file: arrival=ts,prompt=in,output=out (docs/traces.md).
        benchmark: Which benchmark of a report of guidellm with several, from 1.
        rate: Requests a second, for sources that have lengths only.
        raw_arrivals: Keep arrivals on the ticks of the recording.
        overwrite: Replace the target if it exists.
    """
    from twinserve.traces import verbs

    options = {"format": format, "columns": columns, "benchmark": benchmark}
    options |= {"rate": rate, "raw_arrivals": raw_arrivals}
    workload = verbs.convert(source, target, overwrite=overwrite, **options)
    print(verbs.describe(workload))
    for notice in workload.provenance.notices:
        print(f"note: {notice}")


@trace_app.command
def anonymise(
    source: str,
    target: Path,
    *,
    format: str | None = None,
    columns: str | None = None,
    salt: str | None = None,
    jitter: float = 0.0,
    overwrite: Flag = False,
) -> None:
    """Write a trace without names, texts and dates, and show which statistics are kept.

    Args:
        source: Name or file.
        target: The .jsonl file to write.
        format: Format of a source whose content does not tell.
        columns: Columns of any CSV file: arrival=ts,prompt=in,output=out (docs/traces.md).
        salt: Secret from which names of blocks and the jitter are drawn. [default: a new one, not
            kept]
        jitter: Seconds by which each arrival moves at most, either way.
        overwrite: Replace the target if it is there already.
    """
    from twinserve.traces import anonymise as anonymous
    from twinserve.traces import verbs
    from twinserve.traces.load import load_trace
    from twinserve.traces.write import check_target, write_trace

    check_target(target, overwrite, source)
    found = load_trace(source, format=format, columns=columns, raw_arrivals=True)
    check_target(target, overwrite, found.provenance.path)
    shared = anonymous.anonymise(found, salt=salt, jitter_s=jitter)
    write_trace(shared, target)
    print(verbs.describe(shared))
    for name, before, after in anonymous.kept(found, shared):
        change = "kept" if before == after else f"was {_shown(before)}"
        print(f"{name:>24}  {_shown(after):>12}  {change}")
    print("lengths in tokens are exact, and so are gaps between arrivals without --jitter")


@trace_app.command
def synth(
    target: Path,
    *,
    lengths: str = "sharegpt",
    rate: float = 1.0,
    duration: float | None = None,
    requests: int | None = None,
    seed: int = 0,
    overwrite: Flag = False,
) -> None:
    """Make a trace with Poisson arrivals and write it.

    Args:
        target: The .jsonl file to write.
        lengths: sharegpt, lmsys, or fixed:PROMPT,OUTPUT in tokens.
        rate: Requests a second.
        duration: Seconds of arrivals.
        requests: Number of requests.
        seed: Same seed, same trace.
        overwrite: Replace the target if it is there already.
    """
    from twinserve.traces import verbs
    from twinserve.traces.generators.synth import synth as generate
    from twinserve.traces.write import check_target, write_trace

    check_target(target, overwrite)
    workload = generate(lengths, rate=rate, duration_s=duration, count=requests, seed=seed)
    write_trace(workload, target)
    print(verbs.describe(workload))
