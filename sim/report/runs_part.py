"""The chapter of runs: one table over all, charts, replicas, settings, how to run each again."""

import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path

from twinserve.sim.report.chart import best, plain
from twinserve.sim.report.page import (
    MANY,
    Block,
    Html,
    Part,
    folded,
    heading,
    listing,
    note,
    paragraph,
    table,
    text,
    verdict,
    wide,
)
from twinserve.sim.report.run_charts import run_charts
from twinserve.sim.report.seen import Seen
from twinserve.sim.report.table import (
    NONE,
    count,
    number,
    overloaded,
    percent,
    table_rows,
    warmup_line,
)
from twinserve.sim.results.command import command
from twinserve.sim.results.files import dump_json
from twinserve.sim.results.files import plain as plain_values
from twinserve.sim.results.options import measured_again, read_options
from twinserve.traces.measurement import IN_A_LOOP

_NOISY = 0.1  # of a live run's time, disturbed by others: said above this
_OF_A_REPLICA = (
    ("requests", "requests", count),
    ("completed", "completed", count),
    ("output_tokens", "output tokens", count),
    ("mean_ttft_ms", "TTFT mean, ms", number),
    ("p99_ttft_ms", "TTFT p99, ms", number),
    ("mean_tpot_ms", "TPOT mean, ms", number),
    ("busy", "busy", percent),
    ("peak_use", "KV peak", percent),
)


def runs_part(runs: Sequence[Seen], title: str = "Runs") -> Part:
    blocks: list[Block] = [*verdict(_verdict(runs)), paragraph(_about(runs))]
    blocks += [*map(note, _notes(runs)), _summary(runs)]
    blocks += _kinds_of_steps(runs)
    blocks += run_charts(runs)
    blocks += _fleets(runs)
    blocks += [heading("Settings"), *_settings(runs), heading("To run them again"), *_again(runs)]
    return Part(title, tuple(blocks))


def _verdict(runs: Sequence[Seen]) -> list[str]:
    """Return which runs keep the objectives of the whole run, else how many requests keep theirs,
    else mean TTFT; then the objectives."""
    met = {run.label: run.summary.get("objectives_met") for run in runs}
    judged = [
        f"objectives {word}: {', '.join(label for label in met if met[label] is kept)}"
        for word, kept in (("kept", True), ("missed", False))
        if kept in met.values()
    ]
    shares = [(run.label, 100 * run.attained["rt"][0]) for run in runs if "rt" in run.attained]
    ttft = [(run.label, run.summary.get("mean_ttft_ms") or nan) for run in runs]
    said = "; ".join(judged) or (
        f"requests that keep their objectives: {best(shares, '%', high=True)}"
        if shares
        else f"mean TTFT: {best(ttft, 'ms')}"
    )
    asked = {", ".join(map(str, read_options(run.config).objectives)) for run in runs}
    objectives = [f"Objectives: {one}." for one in asked if one and len(asked) == 1]
    return [said[0].upper() + said[1:], *objectives]


def _about(runs: Sequence[Seen]) -> str:
    counts = sorted({run.requests for run in runs})
    requests = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    several = "s" * (len(runs) > 1)
    return f"{len(runs)} run{several}, {requests} requests each. Times are of the simulated clock."


def _notes(runs: Sequence[Seen]) -> list[str]:
    """What a reader has to know before comparing."""
    notes = []
    if len({run.same for run in runs}) > 1:
        notes.append(
            "These runs do not share one list of real-time requests: compare them with care."
        )
    for run in runs:
        unfinished = run.summary.get("unfinished")
        if unfinished:
            of = run.summary.get("submitted")
            many = f"{unfinished:,}" + (f" of {of:,}" if of is not None else "")
            notes.append(
                f"{run.label}: {many} requests did not finish; latencies are of those that did."
            )
        if "warmup" in run.summary:
            line = warmup_line(run.summary["warmup"])
            notes.append(f"{run.label}: {line} of the summary; the charts show the whole run.")
        notes += overloaded(run.summary, run.label)
        notes += [f"{run.label}: {line}." for line in _noise(run.config)]
    for said in (
        lambda run: _on_step_times(run.config.get("step_times") or ()),
        lambda run: _on_bars(run.config.get("error_bars")),
    ):
        by_line: dict[str, list[str]] = {}
        for run in runs:
            for line in said(run):
                by_line.setdefault(line, []).append(run.label)
        notes += [f"{', '.join(labels)}: {line}" for line, labels in by_line.items()]
    return notes


def _noise(config: Mapping) -> list[str]:
    """What was disturbed, or cut short, while a run's profile or the run itself was measured; and
    requests whose times are those of another server."""
    notices, live = config.get("notices"), config.get("live")
    lines = [
        notice
        for notice in (notices if isinstance(notices, list) else [])
        if isinstance(notice, str) and notice.startswith(("profile ", IN_A_LOOP))
    ]
    share = live.get("disturbed_share") if isinstance(live, dict) else None
    if isinstance(share, float) and share > _NOISY:
        lines.append(
            f"other programs disturbed steps that took {share:.0%} of this live run's time"
        )
    return lines


def _on_step_times(machines: Sequence[Mapping]) -> list[str]:
    """How far off the step times of a run's machines may be; one line each."""
    return [
        f"expected error of the step times of {one['profile']} ({one['form']}): {_errors(one)}."
        for one in machines
    ]


def _errors(of: Mapping) -> str:
    return "; ".join(
        f"{name} {of[kind]['error']:.0%}"
        + ("" if of[kind]["known"] else " (not known, assumed)")
        + f", {of[kind]['source']}"
        for kind, name in (("decode", "decodes"), ("prefill", "prompts"))
    )


def _on_bars(errors: Mapping | None) -> list[str]:
    """Describe the ranges of a run, if it has some."""
    if not errors:
        return []
    ranges = "small print below a number is its range with step times off: "
    front_end = f"; {errors['front_end']}" if "front_end" in errors else ""
    return [f"{ranges}{_errors(errors)}{front_end}."]


def _summary(runs: Sequence[Seen]) -> Html:
    named = {run.label: {**run.summary, "timing": run.timing} for run in runs}
    head = "".join(f'<th scope="col">{text(label)}</th>' for label in named)
    many = len(runs) >= MANY
    kind = ' class="many"' * many
    lines = [f"<table{kind}><thead><tr><th></th>{head}</tr></thead><tbody>"]
    of = [f' data-name="{text(label)}"' * many for label in named]
    for section, rows in table_rows(named):
        lines.append(f'<tr class="section"><td colspan="{len(runs) + 1}">{text(section)}</td></tr>')
        for row in rows:
            cells = "".join(
                f"<td{' class=best' if best else ''}{named}>{text(cell)}{_bars(ends)}</td>"
                for cell, best, ends, named in zip(row.cells, row.best, row.ends, of, strict=True)
            )
            lines.append(f"<tr><td>{text(row.title)}</td>{cells}</tr>")
    return wide("\n".join([*lines, "</tbody></table>"]))


def _bars(ends: tuple[str, str] | None) -> str:
    """The range of a cell, below it."""
    if ends is None or not any(ends):
        return ""
    return f"<br><small>{text(ends[0])} .. {text(ends[1])}</small>"


def _kinds_of_steps(runs: Sequence[Seen]) -> list[Block]:
    found = [(run, run.summary.get("scheduler", {}).get("steps_by_kind")) for run in runs]
    rows = [
        [run.label, *(count(kinds.get(k) or 0) for k in ("prefill", "decode", "mixed"))]
        for run, kinds in found
        if kinds
    ]
    if not rows:
        return []
    return [folded("Steps by what they compute", [table(["", "prompts", "decodes", "both"], rows)])]


def _fleets(runs: Sequence[Seen]) -> list[Block]:
    blocks: list[Block] = []
    for run in runs:
        replicas = run.summary.get("replicas") or []
        pools = run.summary.get("pools") or {}
        named = [(f"replica {one.get('replica', i):g}", one) for i, one in enumerate(replicas)]
        named += [(f"pool {name}", one) for name, one in pools.items()]
        if named:
            head = ["", *(title for _, title, _ in _OF_A_REPLICA)]
            rows = [
                [name, *(_cell(one.get(key), show) for key, _, show in _OF_A_REPLICA)]
                for name, one in named
            ]
            blocks += [heading(f"{run.label}: parts of the fleet"), table(head, rows)]
    return blocks


def _cell(value, show) -> str:
    return NONE if value is None else show(value)


def _settings(runs: Sequence[Seen]) -> list[Html]:
    """Settings that differ, as a table, and each run's whole configuration, folded."""
    flat = [_flatten(plain_values(run.config)) for run in runs]
    names = sorted(set().union(*flat))
    differing = [n for n in names if len({one.get(n, "") for one in flat}) > 1]
    blocks = []
    if len(runs) > 1 and not differing:
        blocks.append(paragraph("The runs have the same configuration."))
    if differing:
        blocks.append(paragraph("Settings that differ; the others are the same in all runs."))
        rows = [[name, *(one.get(name, "-") for one in flat)] for name in differing]
        blocks.append(table(["setting", *(run.label for run in runs)], rows, "settings"))
    return blocks + [folded(f"{r.label}: run.json", [listing(dump_json(r.config))]) for r in runs]


def _flatten(value: object, prefix: str = "") -> dict[str, str]:
    """{"a.b": "1"} of nested settings; lists stay whole."""
    if isinstance(value, Mapping) and value:
        items: dict[str, str] = {}
        for key, inner in value.items():
            items |= _flatten(inner, f"{prefix}.{key}" if prefix else key)
        return items
    return {prefix: value if isinstance(value, str) else json.dumps(value, sort_keys=True)}


def _again(runs: Sequence[Seen]) -> list[Html]:
    said = [
        again(
            run.folder,
            run.config,
            run.summary,
            "again" if len(runs) == 1 else f"again/{run.folder.name}",
        )
        for run in runs
    ]
    traces = [_trace(run) for run in runs]
    return [
        paragraph("The same settings, seed and versions give the same numbers."),
        listing("\n".join(said)),
        *map(paragraph, dict.fromkeys(filter(None, traces))),
    ]


def again(folder: Path, config: Mapping, summary: Mapping, out: str) -> str:
    """The command that runs it again into the folder `out`, for a shell."""
    asked = measured_again(config.get("metrics"))
    spare = "beside" in (summary.get("failures") or {})
    bars = bool(config.get("error_bars"))
    further = {"error_bars": bars, "spare": spare, "out": out}
    return command("simulate", {"config": plain(folder / "run.json"), **asked, **further})


def _trace(run: Seen) -> str:
    found = run.config.get("trace")
    found = found if isinstance(found, Mapping) else {}
    name, sha256 = found.get("name"), found.get("sha256")
    return f"Trace {name}, sha256 {sha256}." if name and sha256 else ""
