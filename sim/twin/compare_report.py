"""A comparison in words, numbers and curves: for the terminal, and as a folder of files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from twinserve.policies.errors import PolicyError
from twinserve.policies.names import RegistryError
from twinserve.profiles.specs import ProfileError
from twinserve.sim.report.metric_names import METRIC_NAMES, SECONDS
from twinserve.sim.report.static import panels, png
from twinserve.sim.report.twin_parts import measured_curves
from twinserve.sim.results.files import RunResult, dump_json, printed_runs
from twinserve.sim.results.folders import ResultsError, may_replace, resolved, whole_folder
from twinserve.sim.results.options import spoken
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.error_bars import StepsOff, with_steps_off
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin import compare
from twinserve.sim.twin.compare import Row, Window, error, table, windows
from twinserve.sim.twin.queues import overload, queue_of, run_queue
from twinserve.sim.twin.served import METRICS, Served, from_server, of_measurement, of_run
from twinserve.traces.measurement import Measurement

# Which term of a simulation to look at: the run again with one term changed, and how far it is
# from the measurement then. A term is named only where its run came closer.
STEP = 1.2  # by which times and sizes are changed
CLOSER = 0.05  # of its error that a run must lose for its term to be named


@dataclass(frozen=True)
class Term:
    """One change. inputs: those of the run as it is -> those of the run with it."""

    term: str
    change: str
    inputs: Callable[[Inputs], Inputs]


@dataclass(frozen=True)
class Rerun:
    """A run with one term changed, and its error (`compare.error`)."""

    term: str
    change: str
    error: float
    before: float

    @property
    def closer(self) -> bool:
        return self.error < self.before * (1 - CLOSER)


def terms(config: SimulationConfig) -> list[Term]:
    """What can be changed of a run with these settings."""

    def setting(term: str, change: str, **changed) -> Term:
        return Term(term, change, lambda inputs: _again(inputs, changed))

    def memory(factor: float, said: str) -> Term:
        return Term(
            "memory",
            said,
            lambda inputs: _again(
                inputs, {"num_blocks": max(1, int(inputs.hardware.num_blocks * factor))}
            ),
        )

    def queue(factor: float, said: str) -> Term:
        return Term(
            "queueing",
            said,
            lambda inputs: _again(
                inputs, {"max_num_seqs": max(1, int(inputs.hardware.limits.max_num_seqs * factor))}
            ),
        )

    found = [
        queue(0.5, "half the seats (max_num_seqs)"),
        queue(2.0, "twice the seats (max_num_seqs)"),
    ]
    if config.fleet is None:
        found += [
            _steps("decodes 20 % longer", STEP, 1.0),
            _steps("decodes 20 % shorter", 1 / STEP, 1.0),
            _steps("prompts 20 % longer", 1.0, STEP),
            _steps("prompts 20 % shorter", 1.0, 1 / STEP),
            memory(1 / STEP, "20 % less KV memory"),
            memory(STEP, "20 % more KV memory"),
        ]
    found.append(
        setting("front end", "without front end", front_end="none")
        if config.front_end != "none"
        else setting("front end", "with that of vllm serve (--front-end vllm)", front_end="vllm")
    )
    found += [
        setting("hit rate", f"prefix caching {'on' if on else 'off'}", prefix_caching=on)
        for on in ((True, False) if config.prefix_caching is None else (not config.prefix_caching,))
    ]
    scheduling = "synchronous" if config.async_scheduling else "asynchronous"
    found.append(
        setting(
            "host time", f"{scheduling} scheduling", async_scheduling=not config.async_scheduling
        )
    )
    return found


def _steps(said: str, decode: float, prefill: float) -> Term:
    return Term(
        "step times", said, lambda inputs: with_steps_off(inputs, StepsOff(said, decode, prefill))
    )


def _again(inputs: Inputs, changed: dict) -> Inputs:
    """The same requests with other settings."""
    settings = inputs.config.model_dump(exclude_unset=True) | changed
    other = resolve(SimulationConfig(**settings))
    return replace(other, workload=inputs.workload)


def config_of(result: RunResult) -> SimulationConfig:
    """The settings of a run, from its run.json. Raises SettingsError."""
    settings = result.config.get("config")
    if not isinstance(settings, dict):
        raise SettingsError("the run has no settings in its run.json: simulate it again")
    return SimulationConfig(**settings)


def run_again(
    result: RunResult,
    measured: Sequence[Served],
    server: bool,
    begin: Callable[[str], None] = lambda what: None,
) -> Iterator[Rerun]:
    """The run again as it is and with each of its terms changed, and each one's error. Terms that
    its settings refuse are passed over. Raises SettingsError, WorkloadError if the run cannot
    be repeated."""
    config = config_of(result)
    inputs = resolve(config)
    (spec, *_) = inputs.policies

    def error_of(changed: Inputs, label: str) -> float:
        begin(label)
        again = run_policy(changed, spec)
        return error(table(measured, [of_run(label, again, server)]), 0)

    before = error(table(measured, [of_run("run", result, server)]), 0)
    for term in terms(config):
        try:
            found = error_of(term.inputs(inputs), term.change)
        except (SettingsError, PolicyError, RegistryError, ProfileError):
            continue  # this run cannot be without it
        yield Rerun(term.term, term.change, found, before)


FILES = ("compare.json", "compare.md", "cdf.png")
DRAWN = ("ttft", "tpot", "itl", "e2el")
_KEPT = 400  # points of a distribution in compare.json


@dataclass(frozen=True)
class Comparison:
    """Both sides, and what was found. reruns: by run, in their order; empty if none were asked
    for. notices: of the measured files. measured_queues, run_queues: what `saturation` found of
    each; None if it cannot be said."""

    measured: Sequence[Served]
    runs: Sequence[Served]
    rows: Sequence[Row]
    windows: Sequence[Window]
    reruns: Sequence[Sequence[Rerun]] = ()
    notices: Sequence[str] = field(default_factory=tuple)
    measured_queues: Sequence[dict | None] = ()
    run_queues: Sequence[dict | None] = ()


def verdicts(found: Comparison) -> list[str]:
    """Return which side was overloaded, and whether each run agrees."""
    sides = (found.measured, found.measured_queues), (found.runs, found.run_queues)
    named = ([(s.name, q) for s, q in zip(*side, strict=True)] for side in sides)
    return [*overload(*named), *(verdict(found, number) for number in range(len(found.runs)))]


def lines(found: Comparison) -> Iterator[str]:
    """The comparison as Markdown, which reads as text too: verdicts first."""
    yield from (*verdicts(found), "")
    yield (
        "| class | metric | | measured | spread | "
        + " | ".join(f"{run.name} | error" for run in found.runs)
        + " |"
    )
    yield "|---|---|---|---:|---:|" + "---:|---:|" * len(found.runs)
    for row in found.rows:
        spread = "-" if row.spread is None else f"{row.spread:.1%}"
        cells = [
            f"{_shown(row, value)} | {off:+.1%}"
            for value, off in zip(row.simulated, row.errors(), strict=True)
        ]
        yield (
            f"| {row.service_class} | {METRIC_NAMES[row.metric]} | {row.statistic} | "
            f"{_shown(row, row.measured)} | {spread} | {' | '.join(cells)} |"
        )
    yield ""
    if len(found.measured) == 1:
        yield (
            f"One measurement: its spread is unknown. Differences below {compare.TOLERANCE:.0%} "
            "do not count."
        )
    for number, run in enumerate(found.runs):
        yield from _of_run(found, number, run)
    for notice in found.notices:
        yield f"note: {notice}"


def _of_run(found: Comparison, number: int, run: Served) -> Iterator[str]:
    for metric in DRAWN:
        apart = compare.distance(metric, found.measured, run)
        if apart is not None:
            yield (
                f"{run.name}: {METRIC_NAMES[metric]} is furthest apart at {timed(apart.seconds)}: "
                f"{apart.measured:.0%} measured are at or below it, {apart.simulated:.0%} simulated"
            )
    window = compare.parting(found.windows, number)
    if window is not None:
        yield (
            f"{run.name}: first differs from the measurement in {window.start_s:,.4g} .. "
            f"{window.end_s:,.4g} s, by {METRIC_NAMES[window.metric]}: mean "
            f"{timed(window.simulated[number])}, measured {timed(window.measured)} "
            f"({window.requests} requests)"
        )
    elif found.windows:
        yield f"{run.name}: differs from the measurement in no window of time"
    if number < len(found.reruns):
        yield from _suggestions(run.name, found.reruns[number])


def _suggestions(name: str, reruns: Sequence[Rerun]) -> Iterator[str]:
    closer = sorted((r for r in reruns if r.closer), key=lambda r: r.error)
    for found in closer:
        yield (
            f"{name}: check {found.term}: with {found.change} the mean error is "
            f"{found.error:.1%} instead of {found.before:.1%}"
        )
    if reruns and not closer:
        yield (
            f"{name}: none of {len(reruns)} runs with one term changed came closer by "
            f"{CLOSER:.0%} of the error: no term stands out"
        )


def verdict(found: Comparison, number: int) -> str:
    """Whether a run agrees with the measurement, in a sentence."""
    run, rows = found.runs[number], compare.latency_rows(found.rows)
    served = [len(s) for s in found.measured]
    if not rows:
        return f"{run.name}: no latencies to compare"
    mean, worst = compare.error(rows, number), max(rows, key=lambda r: abs(r.errors()[number]))
    said = "agrees" if mean <= compare.tolerance(rows) else "does not agree"
    said += " with the measurement"
    if all(served) and any(len(run) != n for n in served):
        theirs = ", ".join(f"{n:,}" for n in served)
        one = "s" * (len(run) != 1)
        said = f"is not the same load, {len(run):,} request{one} served and {theirs} measured"
    return (
        f"{run.name} {said}: latencies are {mean:.1%} off on average, most the "
        f"{worst.statistic} {METRIC_NAMES[worst.metric]}: {_shown(worst, worst.simulated[number])}"
        f", measured {_shown(worst, worst.measured)} ({worst.errors()[number]:+.1%})"
    )


def _shown(row: Row, value: float) -> str:
    return timed(value) if row.metric in SECONDS else f"{value:,.4g}"


def timed(seconds: float) -> str:
    """Three digits of a time: 25.3 s, 13.0 ms."""
    value, unit = spoken(float(f"{seconds:.3g}")).split(" ")
    digits = f"{float(value):#.3g}".rstrip(".") if float(value) < 1000 else value
    return f"{digits} {unit}"


def printed(found: Comparison) -> str:
    """Return the output of `--json`: verdict and numbers of each run."""
    runs = []
    for i, run in enumerate(found.runs):
        numbers = [
            asdict(row) | {"simulated": row.simulated[i], "error": row.errors()[i]}
            for row in found.rows
        ]
        about = {"verdict": verdict(found, i), "error": compare.error(found.rows, i)}
        runs.append((run.name, about | {"queue": found.run_queues[i], "numbers": numbers}))
    measured = [
        {"name": one.name, "queue": queue}
        for one, queue in zip(found.measured, found.measured_queues, strict=True)
    ]
    return printed_runs(runs, measured=measured, notices=found.notices)


def check_target(out: Path, overwrite: bool) -> None:
    """Raises ResultsError if `write` could not write."""
    may_replace(resolved(out), FILES, overwrite)


def write(out: Path, found: Comparison, overwrite: bool = False, again: str = "") -> Path:
    """compare.json, compare.md and cdf.png in a folder. again: the command that compares once more,
    if there is one. Raises ResultsError."""
    target = resolved(out)
    may_replace(target, FILES, overwrite)
    document = {
        "verdicts": verdicts(found),
        "measured": [served.name for served in found.measured],
        "runs": [run.name for run in found.runs],
        "rows": [asdict(row) | {"errors": row.errors()} for row in found.rows],
        "windows": [asdict(window) for window in found.windows],
        "reruns": [[asdict(one) for one in of_run] for of_run in found.reruns],
        "notices": list(found.notices),
        "curves": list(_thinned(found)),
        "again": again,
        "queues": {"measured": found.measured_queues, "runs": found.run_queues},
    }
    text, charts = "\n".join(lines(found)) + "\n", list(measured_curves(document))
    with whole_folder(target) as partial:
        (partial / "compare.json").write_text(dump_json(document), encoding="utf-8")
        if charts:
            text += "\n![distributions](cdf.png)\n"
            figure = panels(charts, min(len(charts), 2), title="Measured and simulated latencies")
            (partial / "cdf.png").write_bytes(png(figure))
        (partial / "compare.md").write_text(text, encoding="utf-8")
    return target


def _thinned(found: Comparison) -> Iterator[dict]:
    """For drawing them again: distributions by metric and side, a few hundred ranks each."""
    for metric in DRAWN:
        for number, served in enumerate((*found.measured, *found.runs)):
            at, below = _curve(served, metric)
            if len(at):
                kept = np.unique(np.linspace(0, len(at) - 1, min(len(at), _KEPT)).astype(int))
                side = "measured" if number < len(found.measured) else "simulated"
                yield {
                    "metric": metric,
                    "name": f"{side} {Path(served.name).name}",
                    "seconds": at[kept].tolist(),
                    "share": below[kept].tolist(),
                }


def _curve(served: Served, metric: str) -> tuple[np.ndarray, np.ndarray]:
    if served.histograms is not None:
        histogram = served.histograms.get(metric)
        if histogram is None:
            return np.zeros(0), np.zeros(0)
        return histogram.edges[:-1], histogram.share_below()[:-1]
    values, counts = served.values(metric)
    if not len(values):
        return values, counts
    return values, np.cumsum(counts) / counts.sum()


def compared(
    results: Mapping[str, RunResult],
    found: Sequence[Measurement],
    every_s: float | None = None,
    rerun: bool = False,
    begin: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Compare simulated runs, by name, with repeats of one measured load.

    every_s  seconds of a window in which they may differ; None: a tenth of the measurement
    rerun    simulate again with one term changed after another; begin(what) before each

    Raises ResultsError if the two sides have nothing in common.
    """
    server = _server(found)
    measured = [of_measurement(one) for one in found]
    runs = [of_run(name, result, server) for name, result in results.items()]
    rows = table(measured, runs)
    _need_common(rows, found)
    again = [list(run_again(r, measured, server, begin)) for r in results.values() if rerun]
    notices = dict.fromkeys(f"{one.path}: {line}" for one in found for line in one.notices)
    return Comparison(
        measured,
        runs,
        rows,
        windows(measured, runs, every_s),
        again,
        tuple(notices),
        [queue_of(one) for one in found],
        [run_queue(result.summary) for result in results.values()],
    )


def _server(found: Sequence[Measurement]) -> bool:
    """Whether they were measured in the server. Raises ResultsError if some were and some not,
    or some have no single requests."""
    sides = {from_server(one) for one in found}
    kinds = {bool(one.histograms) for one in found}
    if len(sides) > 1 or len(kinds) > 1:
        raise ResultsError(
            "measurements of clients, of servers and of histograms cannot be repeats of each "
            "other: compare them one by one"
        )
    return sides.pop()


def _need_common(rows: Sequence[Row], found: Sequence[Measurement]) -> None:
    """Raises ResultsError unless there are latencies, or lengths of histograms."""
    if any(row.metric in METRICS for row in rows) or (rows and found[0].histograms):
        return
    why = "".join(f"; {one.path}: {line}" for one in found for line in one.notices)
    raise ResultsError(
        "the two sides share no metric: give measurements with latencies of single requests, as "
        f"vllm bench serve --save-detailed writes, or histograms{why}"
    )
