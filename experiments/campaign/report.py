"""Stage `report` of a campaign: what was measured as one page of Markdown with plots. Needs neither
GPU nor vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from twinserve.experiments.attention.main import KERNELS
from twinserve.experiments.campaign import plots
from twinserve.experiments.campaign.host import host_path
from twinserve.experiments.campaign.kernel import KERNEL
from twinserve.experiments.campaign.runs import Cell, Finished, finished, inputs_of
from twinserve.experiments.campaign.setup import MODEL_SIZES, STEPS, StageError, Store, mode_name
from twinserve.experiments.campaign.steps import PROFILES, make_profile, raw_path
from twinserve.experiments.study.output import markdown_table
from twinserve.profiles.measured.fit import point_errors
from twinserve.profiles.measured.samples import (
    LEAVING,
    SWAP_OUT,
    Measurement,
    StepSample,
    by_point,
    read_samples,
    settled,
)
from twinserve.profiles.profile import load_profile
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.replay import LockedReplay
from twinserve.traces.write import write_atomically

REPORT = "report"
_SHOWN = (64, 1024, 16384)  # contexts in the table of host times
KINDS = ("decode", "skewed", "prefill", "prefills", "chunk", "mixed", "check")


def write_report(store: Store, traces_of: Path | None = None) -> Path:
    """DIR/report/campaign.md and its plots, from whatever is in DIR. traces_of: folder of the
    traces, to simulate the runs with the shipped profiles as well. Returns the page's path."""
    page = store.path(REPORT, "campaign.md")
    parts = ["# Campaign\n", _machine(store)]
    modes = [(key, graphs) for key in MODEL_SIZES for graphs in (True, False)]
    for key, graphs in modes:
        if raw_path(store, key, graphs).exists():
            parts += _steps(store, key, graphs)
    parts += _eager(store, modes)
    for key, graphs in modes:
        if raw_path(store, key, graphs, "-swap").exists():
            parts += _swaps(store, key, graphs)
    for key, graphs in modes:
        if found := finished(store, key, graphs):
            parts += _runs(store, key, graphs, found, traces_of)
    parts += _kernel(store)
    write_atomically(page, ("\n".join(part for part in parts if part) + "\n").encode())
    store.saved(REPORT)
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
def _usable(measured: Measurement) -> list[StepSample]:
    return settled([s for s in measured.steps if s.kind != LEAVING and not s.first])


def _steps(store: Store, key: str, graphs: bool) -> list[str]:
    mode, size = mode_name(key, graphs), MODEL_SIZES[key]
    measured = read_samples(raw_path(store, key, graphs))
    facts = measured.provenance
    starts = (store.read(STEPS, f"{mode}-starts.json") or {"starts": []})["starts"]
    lines = [f"## {size.name}, {'CUDA graphs' if graphs else 'eager'}\n"]
    for start in starts:
        lines.append(
            f"Start: {start['start_s']:.0f} s (compilation {start.get('compile_s', 0.0):.0f} s), "
            f"{start['num_blocks']:,} blocks"
            f"{', with swapping' if start.get('swap') else ''}{_answers(start)}.\n"
        )
    lines.append(
        f"{len(measured.steps):,} steps in {facts['rounds']} rounds, {facts['elapsed_s']:.0f} s. "
        f"Medians: an empty step takes {1e6 * facts['empty_s']:.0f} us, "
        f"handing over a request {1e6 * facts['submit_s']:.0f} us.\n"
    )
    try:
        target = make_profile(store, key, graphs)
    except StageError as error:
        target = None
        lines.append(f"{error}.\n")
    samples = _usable(measured)
    if target is not None:
        fit = load_profile(target).step_model.fit
        lines.append("Error of the profile, cross-validated (check: steps that no fit saw):\n")
        rows = [(kind, f"{error:.1%}") for kind, error in fit.errors.items()]
        rows += [("check", f"{fit.check_error:.1%}")] if fit.check_error is not None else []
        lines.append(table(("kind", "error"), [*rows, ("spread of repeats", f"{fit.spread:.1%}")]))
    lines += _shipped(samples, size.shipped, size.max_num_seqs)
    lines += [_host(samples), _scheduling(store, key, graphs, samples)]
    model = load_profile(target).model(size.max_num_seqs) if target is not None else None
    others = {name: load_profile(name).model(size.max_num_seqs) for name in size.shipped}
    for name, image in plots.step_plots(samples, model, others).items():
        store.path(REPORT, f"{mode}-{name}.png").write_bytes(image)
        lines.append(f"![{name}]({mode}-{name}.png)\n")
    return lines


def _answers(start: dict) -> str:
    if "repeatable" not in start:  # it died, or was another stage's
        return ""
    parts = (start.get("model_runner", "?"), *start.get("attention", ()))
    again = "repeat" if start["repeatable"] else "do not repeat"
    return f", {', '.join(parts)}, {start.get('cudagraph_mode', '?')}, answers {again}"


def _shipped(samples: list[StepSample], names: Sequence[str], seqs: int) -> list[str]:
    """Profiles that were made without this machine, against its steps."""
    rows = []
    for name in names:
        model = load_profile(name).model(seqs)
        row = [name]
        for kind in KINDS:
            errors = np.array(
                list(point_errors(model, [s for s in samples if s.kind == kind]).values())
            )
            row.append(
                f"{errors.mean():+.0%} / {np.abs(errors).mean():.0%}" if len(errors) else "-"
            )
        rows.append(row)
    note = (
        "Shipped profiles, made without this machine: mean error / mean absolute error over "
        "points.\n"
    )
    return [note, table(("profile", *KINDS), rows)] if rows else []


def _host(samples: list[StepSample]) -> str:
    """What a step takes outside of the executor, and outside of the GPU."""
    rows = []
    for of_point in by_point([s for s in samples if s.kind in ("decode", "prefill")]).values():
        work = of_point[0].work
        n, context = (
            work.decode_requests,
            _power(work.decode_context / max(work.decode_requests, 1)),
        )
        if n and context not in _SHOWN:
            continue
        device = np.median([s.device_s for s in of_point])
        whole, host = (np.median([value(s) for s in of_point]) for value in (_whole, _outside))
        what = f"decode {n} x {context}" if n else f"prefill {_power(int(work.prefill_new.sum()))}"
        rows.append((what, _ms(whole), "-" if np.isnan(device) else _ms(device), _ms(host)))
    note = (
        "Medians in ms: the whole step, between events on the GPU, and outside of the executor.\n\n"
    )
    return note + table(("step", "whole", "GPU", "host"), rows)


def _scheduling(store: Store, key: str, graphs: bool, samples: list[StepSample]) -> str:
    """Both ways of vLLM's own loop, beside the steps of the test bench."""
    found = store.read(*host_path(key, graphs))
    if not found:
        return ""
    bench = _medians(samples)
    context = next(iter(found.values()))["context"]
    times: dict[int, dict[str, float]] = {}
    for way, of_way in found.items():
        for row in of_way["rows"]:
            times.setdefault(row["batch"], {})[way] = row["median_s"]
    rows = []
    for batch, of_batch in times.items():
        of_batch["bench"] = bench.get(("decode", batch, _power(context)), np.nan)
        rows.append((f"decode {batch} x {context}", *(
            _ms(of_batch[way]) if np.isfinite(of_batch.get(way, np.nan)) else "-"
            for way in ("async", "sync", "bench")
        )))  # fmt: skip
    note = "Medians in ms, from output to output of vLLM's own loop, and of the bench above.\n\n"
    return note + table(("step", "asynchronous", "synchronous", "bench"), rows)


def _whole(sample: StepSample) -> float:
    return sample.seconds


def _outside(sample: StepSample) -> float:
    return sample.seconds - sample.exec_s


def _power(value: float) -> int:
    return 2 ** int(np.round(np.log2(max(value, 1))))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def _eager(store: Store, modes) -> list[str]:
    lines = []
    for key in MODEL_SIZES:
        files = [raw_path(store, key, graphs) for graphs in (True, False)]
        if not all(path.exists() for path in files):
            continue
        with_graphs, without = (_medians(_usable(read_samples(path))) for path in files)
        rows = [
            (
                f"{kind} {n} x {c}" if n else f"prefill {c}",
                _ms(with_graphs[kind, n, c]),
                _ms(without[kind, n, c]),
                f"{without[kind, n, c] / with_graphs[kind, n, c]:.2f}",
            )
            for kind, n, c in sorted(set(with_graphs) & set(without))
        ]
        if rows:
            lines += [
                f"## {MODEL_SIZES[key].name}: graphs against eager\n",
                table(("step", "graphs, ms", "eager, ms", "ratio"), rows),
            ]
    return lines


def _medians(samples: list[StepSample]) -> dict[tuple[str, int, int], float]:
    """(kind, requests, context or new tokens) -> median seconds, of decode and prefill points."""
    found = {}
    for of_point in by_point([s for s in samples if s.kind in ("decode", "prefill")]).values():
        work = of_point[0].work
        n = work.decode_requests
        length = _power(work.decode_context / n if n else int(work.prefill_new.sum()))
        found[of_point[0].kind, n, length] = float(np.median([s.seconds for s in of_point]))
    return found


def _swaps(store: Store, key: str, graphs: bool) -> list[str]:
    measured = read_samples(raw_path(store, key, graphs, "-swap"))
    lines = [f"## {MODEL_SIZES[key].name}: KV to the host and back\n"]
    if not measured.swaps:
        return [*lines, f"Nothing was measured: {measured.provenance['swap']}.\n"]
    rows = []
    for tokens in sorted({s.tokens for s in measured.swaps}):
        row: list[object] = [f"{tokens:,} tokens"]
        for out in (True, False):
            times = [
                s for s in measured.swaps if s.tokens == tokens and (s.direction == SWAP_OUT) == out
            ]
            seconds = np.median([s.seconds for s in times]) if times else np.nan
            row += (
                [_ms(seconds), f"{times[0].nbytes / seconds / 1e9:.1f}"]
                if times and seconds > 0
                else ["-", "-"]
            )
        rows.append(row)
    return [*lines, table(("copy", "out, ms", "GB/s", "in, ms", "GB/s"), rows)]


# -- runs ------------------------------------------------------------------------------------------
def _runs(
    store: Store, key: str, graphs: bool, found: list[Finished], traces: Path | None
) -> list[str]:
    mode, size = mode_name(key, graphs), MODEL_SIZES[key]
    lines = [
        f"## {size.name}, {'CUDA graphs' if graphs else 'eager'}: simulated against live\n",
        "Locked: error of a step's time (mean absolute, of the sum), of the profile that planned "
        "the run and of the one measured. Free: error of the simulated mean, and in brackets how "
        "far the live repeats lie from their own mean.\n",
    ]
    rows, others = [], []
    path = store.folder / PROFILES / f"{mode}.json"
    measured = load_profile(path).model(size.max_num_seqs) if path.exists() else None
    for one in found:
        row: list[object] = [one.folder.name, one.cell["requests"]]
        if one.locked is not None:
            again = None if measured is None else one.locked_on(one.locked, measured)
            row += [_error(one.locked), "-" if again is None else _error(again), one.locked.drift]
        else:
            row += ["-", "-", "-"]
        metrics = one.validation().table().set_index(["metric", "statistic"]) if one.live else None
        for metric in ("ttft", "tpot", "e2el"):
            known = metrics is not None and (metric, "mean") in metrics.index
            value = metrics.loc[(metric, "mean")] if known else None
            row.append(f"{value['error_pct']:+.1f} % ({value['spread_pct']:.1f})" if known else "-")
        rows.append([*row, len(one.live)])
        if one.live and traces is not None:
            others += _with_others(key, one, traces, path)
    head = ("run", "requests", "locked, plan", "locked, measured", "drift", "TTFT", "TPOT", "E2E",
            "live runs")  # fmt: skip
    lines.append(table(head, rows))
    if others:
        lines += [
            "The same runs simulated with other profiles, error of the means:\n",
            table(("run", "TTFT", "TPOT", "E2E"), others),
        ]
    for name, image in plots.run_plots(found).items():
        store.path(REPORT, f"{mode}-{name}.png").write_bytes(image)
        lines.append(f"![{name}]({mode}-{name}.png)\n")
    return lines


def _error(locked: LockedReplay) -> str:
    error = locked.error()
    return f"{error['mean_absolute_error_pct']:.1f} %, {error['total_error_pct']:+.1f} %"


def _with_others(key: str, one: Finished, traces: Path, measured: Path) -> list[list[object]]:
    """Free runs simulated with the shipped profiles, and with the measured one."""
    files = [
        path
        for path in sorted(traces.iterdir())
        if path.stem.partition("_")[0] == one.cell["trace"]
    ]
    rows = []
    profiles = [*MODEL_SIZES[key].shipped, *([str(measured)] if measured.exists() else [])]
    for name in profiles if files else ():
        cell = Cell(one.cell["trace"], one.cell["load"], one.cell["policy"], one.cell["seconds"])
        inputs = inputs_of(key, cell, files[0], name, one.cell["rate_scale"], one.cell["requests"])
        summary = run_policy(inputs, inputs.policies[0]).summary
        row: list[object] = [f"{one.folder.name}, {'measured' if name == str(measured) else name}"]
        for metric in ("ttft", "tpot", "e2el"):
            real = [result.summary.get(f"mean_{metric}_ms") for result in one.live]
            ours = summary.get(f"mean_{metric}_ms")
            row.append(
                f"{100 * (ours / np.mean(real) - 1):+.1f} %"
                if ours is not None and None not in real
                else "-"
            )
        rows.append(row)
    return rows


# -- kernel ----------------------------------------------------------------------------------------
def _kernel(store: Store) -> list[str]:
    lines = []
    for folder in sorted((store.folder / KERNEL).glob("*")):
        found = store.read(KERNEL, folder.name, "attention_kernel.json", form=KERNELS)
        if not found:
            continue
        wrong = sum(not check["fine"] for check in found["checks"])
        lines += [
            f"## Attention kernels: {folder.name}\n",
            f"{found['device']}; {len(found['checks'])} checks, {wrong} wrong.\n",
        ]
        cases: dict[tuple, dict[str, float]] = {}
        for row in found["times"]:
            if "median_us" in row:
                case = (
                    row["shape"],
                    row["kind"],
                    row["sequences"],
                    row["context"],
                    row["new_tokens"],
                )
                cases.setdefault(case, {})[row["kernel"]] = row["median_us"]
        kernels = sorted({name for times in cases.values() for name in times})
        rows = [
            (
                f"{kind} {n} x {context}, {new} new",
                *(f"{times[name]:.0f}" if name in times else "-" for name in kernels),
            )
            for (_, kind, n, context, new), times in cases.items()
        ]
        if rows:
            lines += ["Medians in us:\n", table(("case", *kernels), rows)]
        if found["tuning"]:
            best = sorted(
                (row for row in found["tuning"] if "median_us" in row),
                key=lambda row: row["median_us"],
            )
            lines += [f"Fastest tilings: {best[:4]}\n"]
    return lines
