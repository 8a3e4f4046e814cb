"""Stage `report` of a campaign: what was measured as one page of Markdown. Needs neither GPU nor
vLLM."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from twinserve.experiments.campaign.host import host_path
from twinserve.experiments.campaign.runs import Finished, finished
from twinserve.experiments.campaign.setup import MODEL_SIZES, STEPS, StageError, Store, mode_name
from twinserve.experiments.campaign.steps import make_profile, raw_path
from twinserve.experiments.study.output import markdown_table
from twinserve.profiles.measured.fit import point_errors
from twinserve.profiles.measured.samples import (
    LEAVING,
    SWAP_IN,
    SWAP_OUT,
    StepSample,
    by_point,
    read_samples,
    settled,
)
from twinserve.profiles.profile import load_profile
from twinserve.traces.write import write_atomically

REPORT = "report"
_CONTEXTS = (64, 1024, 16384)  # of the decode steps that are shown
_METRICS = ("ttft", "tpot", "e2el")


def write_report(store: Store) -> Path:
    """DIR/report/campaign.md, from whatever is in DIR. Returns the page's path."""
    page = store.path(REPORT, "campaign.md")
    parts = ["# Campaign\n", _machine(store)]
    modes = [(key, graphs) for key in MODEL_SIZES for graphs in (True, False)]
    for key, graphs in modes:
        parts.append(f"## {MODEL_SIZES[key].name}, {mode_name(key, graphs)}\n")
        of_mode = []
        if raw_path(store, key, graphs).exists():
            of_mode += _steps(store, key, graphs)
        if raw_path(store, key, graphs, "-swap").exists():
            of_mode += _swaps(store, key, graphs)
        if found := finished(store, key, graphs):
            of_mode += _runs(found)
        parts += of_mode
        if not of_mode:
            parts.pop()
    write_atomically(page, ("\n".join(part for part in parts if part) + "\n").encode())
    return page


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    return markdown_table(head, rows, ["---", *["---:"] * (len(head) - 1)])


def _machine(store: Store) -> str:
    facts = store.read(STEPS, "machine.json")
    if facts is None:
        return ""
    return (
        f"{facts['device']}, vLLM {facts['vllm']}, torch {facts['torch']}, Python "
        f"{facts['python']}, {facts['date']}. "
        f"Bare rates: {facts['matmul_flops'] / 1e12:.1f} TFLOP/s, "
        f"{facts['memory_bytes_per_s'] / 1e9:.0f} GB/s read and written, "
        f"{facts['link_bytes_per_s'] / 1e9:.1f} GB/s from the host.\n"
    )


# -- steps -----------------------------------------------------------------------------------------
def _steps(store: Store, key: str, graphs: bool) -> list[str]:
    measured, size = read_samples(raw_path(store, key, graphs)), MODEL_SIZES[key]
    facts = measured.provenance
    starts = store.read(STEPS, f"{mode_name(key, graphs)}-starts.json") or {"starts": []}
    lines = [
        f"Start: {start['start_s']:.0f} s, {start['num_blocks']:,} blocks"
        f"{', with swapping' if start.get('swap') else ''}"
        f"{', '.join(('', *start.get('attention', ())))}.\n"
        for start in starts["starts"]
    ]
    lines.append(
        f"{len(measured.steps):,} steps in {facts['rounds']} rounds, {facts['elapsed_s']:.0f} s. "
        f"Medians: an empty step takes {1e6 * facts['empty_s']:.0f} us, "
        f"handing over a request {1e6 * facts['submit_s']:.0f} us.\n"
    )
    samples = settled([s for s in measured.steps if s.kind != LEAVING and not s.first])
    models = {name: load_profile(name).model(size.max_num_seqs) for name in size.shipped}
    try:
        profile = load_profile(make_profile(store, key, graphs))
    except StageError as error:
        lines.append(f"{error}.\n")
    else:
        models = {"measured": profile.model(size.max_num_seqs), **models}
        fit = profile.step_model.fit
        lines.append(
            f"Error of the measured profile: {fit.errors.get('all', np.nan):.1%} cross-validated, "
            f"{fit.check_error or np.nan:.1%} on steps outside the fit; repeats differ by "
            f"{fit.spread:.1%}.\n"
        )
    lines.append("Profiles: mean error / mean absolute error over points.\n")
    kinds = list(dict.fromkeys(s.kind for s in samples))
    lines.append(table(("profile", *kinds), [(n, *_errors(m, samples)) for n, m in models.items()]))
    lines.append(_single(samples, models, store.read(*host_path(key, graphs)) or {}))
    return lines


def _errors(model, samples: list[StepSample]) -> Iterable[str]:
    for kind in dict.fromkeys(s.kind for s in samples):
        errors = np.array([*point_errors(model, [s for s in samples if s.kind == kind]).values()])
        yield f"{errors.mean():+.0%} / {np.abs(errors).mean():.0%}"


def _single(samples: list[StepSample], models: dict, host: dict) -> str:
    """Single steps: whole, outside of the executor, in vLLM's own loop, and as profiles have
    them."""
    loops: dict[tuple[str, int], float] = {}
    for way, found in host.items():
        loops |= {(way, row["batch"]): row["median_s"] for row in found["rows"]}
    rows = []
    for point in by_point([s for s in samples if s.kind in ("decode", "prefill")]).values():
        work = point[0].work
        n = work.decode_requests
        length = work.decode_context / n if n else work.prefill_new.sum()
        length = 2 ** int(np.round(np.log2(max(length, 1))))
        if n and length not in _CONTEXTS:
            continue
        times = [[s.seconds for s in point], [s.seconds - s.exec_s for s in point]]
        here = [host[way]["context"] == length for way in host]
        own = [loops.get((way, n), np.nan) if all(here) else np.nan for way in ("async", "sync")]
        row = [*np.median(times, axis=1), *own, *(m.step_seconds(work) for m in models.values())]
        what = f"decode {n} x {length}" if n else f"prefill {length}"
        rows.append((what, *("-" if np.isnan(s) else f"{1000 * s:.3g}" for s in row)))
    head = ("step", "whole", "host", "own loop, asynchronous", "synchronous", *models)
    note = "Medians in ms: whole steps, outside of the executor, from output to output of vLLM's "
    return f"{note}own loop, and by profiles.\n\n{table(head, rows)}"


def _swaps(store: Store, key: str, graphs: bool) -> list[str]:
    swaps = read_samples(raw_path(store, key, graphs, "-swap")).swaps
    rows = []
    for tokens in sorted({s.tokens for s in swaps}):
        row: list[object] = [f"{tokens:,} tokens"]
        for direction in (SWAP_OUT, SWAP_IN):
            times = [s for s in swaps if (s.tokens, s.direction) == (tokens, direction)]
            seconds = np.median([s.seconds for s in times]) if times else 0.0
            rate = f"{times[0].nbytes / seconds / 1e9:.1f}" if seconds > 0 else "-"
            row += [f"{1000 * seconds:.3g}", rate]
        rows.append(row)
    head = ("copy", "out, ms", "GB/s", "in, ms", "GB/s")
    return ["KV to the host and back:\n", table(head, rows)]


# -- runs ------------------------------------------------------------------------------------------
def _runs(found: list[Finished]) -> list[str]:
    rows = []
    for one in found:
        row: list[object] = [one.folder.name, one.cell["requests"], "-", "-"]
        if one.locked is not None:
            error = one.locked.error()
            step, total = error["mean_absolute_error_pct"], error["total_error_pct"]
            row[2:] = [f"{step:.1f} %, {total:+.1f} %", one.locked.drift]
        means = {}
        if one.live:
            validated = one.validation().table()
            means = validated[validated["statistic"] == "mean"].set_index("metric").T.to_dict()
        row += [
            f"{means[m]['error_pct']:+.1f} % ({means[m]['spread_pct']:.1f})" if m in means else "-"
            for m in _METRICS
        ]
        rows.append([*row, len(one.live)])
    head = ("run", "requests", "locked", "drift", *(m.upper() for m in _METRICS), "live runs")
    return [
        "Simulated against live. Locked: error of a step's time (mean absolute, of the sum). Free: "
        "error of the simulated mean, and in brackets how far live repeats lie from their mean.\n",
        table(head, rows),
    ]
