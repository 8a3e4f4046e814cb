"""`twinserve report DIR...`: one self-contained HTML page that compares runs, and figures as PNG.

The page needs no network, and the same runs give the same bytes (under one version of matplotlib).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path

from twinserve.sim.report.figures import draw_all
from twinserve.sim.report.table import overloaded, table_rows, warmup_line
from twinserve.sim.results.files import (
    ResultsError,
    RunResult,
    dump_json,
    find_runs,
    plain,
    read_run,
)
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import check_free, write_together

_NOISY = 0.1  # of a live run's time, disturbed by others: said above this
_CAPTIONS = {
    "latency": (
        "Latency",
        "Share of requests served within a time; a curve further left is better. TPOT is the mean "
        "gap between tokens of one request; requests with a single token have none.",
    ),
    "load": (
        "Queue and KV cache over time",
        "Time-weighted means, summed over replicas. Below the queue: the share of KV blocks held "
        "by each class.",
    ),
    "windows": (
        "Windows of arrivals",
        "Latency and attainment are of the requests that arrived in a window, whenever they ended; "
        "served and in the system of all requests.",
    ),
    "attainment": (
        "Objectives and best-effort work",
        "Requests that never got a token, or never ended, count as missed. Best-effort tokens are "
        "of requests that ended while real-time requests arrived.",
    ),
    "completion": (
        "Completion of applications and sessions",
        "From the first arrival to the last token of the requests that belong together.",
    ),
}
_STYLE = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:#1f2933;
  max-width:1080px;margin:32px auto;padding:0 20px}
h1{font-size:24px;margin-bottom:4px}
h2{font-size:18px;margin:36px 0 6px}
p{margin:4px 0 12px;color:#52606d}
img{width:100%;height:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid #edf0f3}
th:first-child,td:first-child{text-align:left}
tr.section td{font-weight:600;padding-top:12px;border-bottom-color:#c5ccd3}
td.best{font-weight:600;color:#1b7a43}
.settings td{text-align:left;overflow-wrap:anywhere}
.note{background:#fff7e0;padding:6px 10px;border-radius:4px;color:#5c4a12}
pre{background:#f6f8fa;padding:10px;overflow:auto;font-size:12px}
summary{cursor:pointer}
""".strip()


def write_report(
    dirs: Iterable[str | os.PathLike],
    out: str | os.PathLike,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Path:
    """Compare the runs in `dirs` in `out`: an .html file, or a folder that gets report.html.

    A folder without a run of its own stands for the runs below it. Figures go beside the page as
    <page>-<figure>.png. Returns the page. Raises ResultsError for a run that cannot be read, a page
    that cannot be written, or one that is there already and nobody said `overwrite`.
    progress(done, total, of what) is called for each run that is read and each figure drawn.
    """
    folders = find_runs(dirs)
    if not folders:
        raise ResultsError("report: no runs given; name the --out folders of one or more runs")
    runs = {}
    for label, folder in zip(_labels(folders), folders, strict=True):
        runs[label] = read_run(folder)
        progress(len(runs), len(folders), "runs read")
    page = Path(out)
    if page.suffix.lower() not in (".html", ".htm"):
        page = page / "report.html"
    images = draw_all(runs, progress)
    files = {page.with_name(f"{page.stem}-{name}.png"): png for name, png in images.items()}
    for file in (page, *files):
        check_free(file, overwrite, ResultsError)
    try:
        write_together([*files.items(), (page, render_html(runs, images).encode())])
    except WorkloadError as error:
        raise ResultsError(str(error)) from None
    return page


def render_html(runs: Mapping[str, RunResult], images: Mapping[str, bytes]) -> str:
    """The page as text; `images` are PNG bytes by figure name."""
    title = " against ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_about(runs))}</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in _notes(runs)),
        "<h2>Summary</h2>",
        _summary_table(runs),
    ]
    for name, (heading, caption) in _CAPTIONS.items():
        if name in images:
            data = base64.b64encode(images[name]).decode("ascii")
            parts += [
                f"<h2>{heading}</h2><p>{caption}</p>",
                f'<img alt="{heading}" src="data:image/png;base64,{data}">',
            ]
    parts += ["<h2>Configuration</h2>", _settings(runs), "</body></html>", ""]
    return "\n".join(parts)


def _labels(folders: list[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        again = next(p for i, p in enumerate(paths) if p in paths[:i])
        raise ResultsError(f"report: {again} is given twice; name each run once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _about(runs: Mapping[str, RunResult]) -> str:
    counts = sorted({len(run.rows.requests) for run in runs.values()})
    requests = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    several = "s" * (len(runs) > 1)
    return f"{len(runs)} run{several}, {requests} requests each. Times are of the simulated clock."


def _noise(config: Mapping) -> list[str]:
    """What was disturbed, or cut short, while a run's profile or the run itself was measured."""
    notices, live = config.get("notices"), config.get("live")
    lines = [
        notice
        for notice in (notices if isinstance(notices, list) else [])
        if isinstance(notice, str) and notice.startswith("profile ")
    ]
    share = live.get("disturbed_share") if isinstance(live, dict) else None
    if isinstance(share, float) and share > _NOISY:
        lines.append(
            f"other programs disturbed steps that took {share:.0%} of this live run's time"
        )
    return lines


def _notes(runs: Mapping[str, RunResult]) -> list[str]:
    """What a reader has to know before comparing."""
    notes = []
    lists = []
    for run in runs.values():
        mine = run.rows.requests[run.rows.requests["service_class"] == "rt"].sort_values(
            "request_id"
        )
        lists.append((mine["request_id"].tolist(), mine["prompt_tokens"].tolist()))
    if any(other != lists[0] for other in lists[1:]):
        notes.append(
            "These runs do not share one list of real-time requests: compare them with care."
        )
    for label, run in runs.items():
        unfinished = run.summary.get("unfinished")
        if unfinished:
            count = f"{unfinished:,} of {run.summary['submitted']:,} requests"
            notes.append(f"{label}: {count} did not finish; latencies are of those that did.")
        if "warmup" in run.summary:
            line = warmup_line(run.summary["warmup"])
            notes.append(f"{label}: {line} of the summary; the other figures show the whole run.")
        notes += overloaded(run.summary, label)
        notes += [f"{label}: {line}." for line in _noise(run.config)]
        notes += _on_bars(label, run.config.get("error_bars"))
    return notes


def _on_bars(label: str, errors: Mapping | None) -> list[str]:
    """What the ranges of a run stand for, where it has some."""
    if not errors:
        return []
    parts = [
        f"{name} {errors[kind]['error']:.0%}"
        + ("" if errors[kind]["known"] else " (not known, assumed)")
        + f", {errors[kind]['source']}"
        for kind, name in (("decode", "decodes"), ("prefill", "prompts"))
    ]
    return [
        f"{label}: small print below a number is its range with step times off: "
        + "; ".join(parts)
        + "."
    ]


def _summary_table(runs: Mapping[str, RunResult]) -> str:
    head = "".join(f"<th>{escape(label)}</th>" for label in runs)
    lines = [f"<table><thead><tr><th></th>{head}</tr></thead><tbody>"]
    for section, rows in table_rows(runs):
        lines.append(
            f'<tr class="section"><td colspan="{len(runs) + 1}">{escape(section)}</td></tr>'
        )
        for row in rows:
            cells = "".join(
                f"<td{' class=best' if best else ''}>{escape(cell)}{_bars(ends)}</td>"
                for cell, best, ends in zip(row.cells, row.best, row.ends, strict=True)
            )
            lines.append(f"<tr><td>{escape(row.title)}</td>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _bars(ends: tuple[str, str] | None) -> str:
    """The range of a cell, below it."""
    if ends is None or not any(ends):
        return ""
    return f"<br><small>{escape(ends[0])} .. {escape(ends[1])}</small>"


def _settings(runs: Mapping[str, RunResult]) -> str:
    """Settings that differ, as a table, and each run's whole configuration, folded."""
    flat = {label: _flatten(plain(run.config)) for label, run in runs.items()}
    names = sorted(set().union(*flat.values()))
    differing = [n for n in names if len({flat[label].get(n, "") for label in runs}) > 1]
    parts = []
    if len(runs) > 1 and not differing:
        parts.append("<p>The runs have the same configuration.</p>")
    if differing:
        head = "".join(f"<th>{escape(label)}</th>" for label in runs)
        rows = "".join(
            f"<tr><td>{escape(name)}</td>"
            + "".join(f"<td>{escape(flat[label].get(name, '-'))}</td>" for label in runs)
            + "</tr>"
            for name in differing
        )
        parts.append("<p>Settings that differ; the others are the same in all runs.</p>")
        parts.append(f'<table class="settings"><tr><th>setting</th>{head}</tr>{rows}</table>')
    for label, run in runs.items():
        parts.append(
            f"<details><summary>{escape(label)}: run.json</summary>"
            f"<pre>{escape(dump_json(run.config))}</pre></details>"
        )
    return "\n".join(parts)


def _flatten(value: object, prefix: str = "") -> dict[str, str]:
    """{"a.b": "1"} of nested settings; lists stay whole."""
    if isinstance(value, Mapping) and value:
        items: dict[str, str] = {}
        for key, inner in value.items():
            items |= _flatten(inner, f"{prefix}.{key}" if prefix else key)
        return items
    return {prefix: value if isinstance(value, str) else json.dumps(value, sort_keys=True)}
