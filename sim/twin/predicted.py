"""A measured server at another rate: a profile is fitted to the measurement, and the requests are
simulated at that rate, also with step times off. In a sentence: whether to believe it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.front_end import save_front_end
from twinserve.sim.report.metric_names import METRIC_NAMES, SECONDS
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.error_bars import run_with_steps_off
from twinserve.sim.setup.hardware import most_decodes
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Report, run_policy
from twinserve.sim.twin.compare import TOLERANCE, Row, table
from twinserve.sim.twin.compare_report import timed
from twinserve.sim.twin.queues import OVERLOADED, queue_words, run_queue
from twinserve.sim.twin.served import from_server, of_run
from twinserve.sim.twin.server_fit import ServerFit, early, fit_server, on_profile

_SHOWN = ("mean", "p90", "p99", "output tokens/s")


@dataclass(frozen=True)
class Prediction:
    """found    the fit to the measurement
    factor   on the measured rate
    rows     of each number: measured, then simulated as measured, at the other rate, and there
             with step times off by their expected error
    verdict  whether to believe it
    """

    found: ServerFit
    factor: float
    rows: Sequence[Row]
    verdict: str

    def lines(self) -> list[str]:
        """The table, and what is to be known beside it."""
        return [*_table(self.rows, f"{self.factor:g}x"), "", *self.found.notices()]

    def document(self) -> dict:
        return _document(self.found, self.rows, self.verdict, self.factor)


def predict(
    files: Sequence[Path],
    settings: Mapping,
    at: str,
    config: Path | None = None,
    saturated: bool = False,
    simulations: Callable[[int], None] = lambda count: None,
    report: Report | None = None,
    begin: Callable[[str], None] = lambda label: None,
) -> Prediction:
    """settings, config, saturated: as of `fit_server`. at: a factor, as `2x`. simulations, report,
    begin: called as the fit and the runs go on. Raises TwinserveError."""
    if "profile" not in settings and config is None:
        raise SettingsError("--profile is needed: the one to begin with, as llama-3.1-8b@h100")
    factor = _factor(at)
    begin("fit")
    found = fit_server(files, settings, config, saturated, simulations, "check")
    as_measured, predicted = _runs(found, factor, report, begin)
    rows = _rows(found, [as_measured, *predicted])
    return Prediction(found, factor, rows, verdict(found, predicted, f"{factor:g}x", rows))


def _factor(text: str) -> float:
    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise SettingsError(f"--at {text}: give a factor on the measured rate, such as 2x")
    return factor


def _runs(
    found: ServerFit, factor: float, report: Report | None, begin: Callable[[str], None]
) -> tuple[RunResult, list[RunResult]]:
    """The first file's requests on the fitted profile at the measured rate; and at the other one,
    first with the step times as they are, then with these off by the expected error."""
    base, profile = found.inputs[0], found.profile()
    spec = base.policies[0]
    with tempfile.TemporaryDirectory(prefix="twinserve-") as scratch:
        file = None
        if (front_end := found.front_end()) is not None:
            file = str(Path(scratch) / "f.json")
            save_front_end(front_end, file)
        scaled = resolve(base.config.model_copy(update={"rate_scale": factor}))
        inputs = on_profile(replace(base, workload=scaled.workload), profile, file)
        begin("predict")
        as_measured = run_policy(on_profile(base, profile, file), spec)
        run = run_policy(inputs, spec, report)
        errors = expected_errors(profile, decodes=most_decodes(run.rows.step_columns))
        off = run_with_steps_off(inputs, spec, errors, report, begin=begin)
        return as_measured, [run, *off]


def _rows(found: ServerFit, runs: Sequence[RunResult]) -> list[Row]:
    """Numbers of the first file, and of the runs in their order."""
    server = from_server(found.found[0])
    served = [of_run("", run, server) for run in runs]
    served[0] = early(served[0], found.until_s[0])
    return [
        row
        for row in table(found.measured()[:1], served)
        if row.service_class == "all"
        and row.metric not in ("prompt", "output", "itl")
        and row.statistic in _SHOWN
    ]


def verdict(found: ServerFit, predicted: Sequence[RunResult], at: str, rows: Sequence[Row]) -> str:
    """Whether to believe the prediction, in a sentence; and which latencies not to believe, as they
    are off at the measured rate already."""
    said = _believed(found, predicted, at)
    for metric in ("ttft", "tpot", "e2el"):
        off = [abs(row.errors()[0]) for row in rows if row.metric == metric]
        if off and sum(off) / len(off) > TOLERANCE:
            said = (
                f"{said.removesuffix('.')}; not its {METRIC_NAMES[metric]}, "
                f"{sum(off) / len(off):.0%} off at the measured rate."
            )
    return said


def _believed(found: ServerFit, predicted: Sequence[RunResult], at: str) -> str:
    run, profile = predicted[0], found.profile()
    off = f"the simulation is {found.error:.1%} off on requests that the fit had not seen"
    queues = [run_queue(one.summary) for one in predicted]
    over = [queue is not None and queue["verdict"] in OVERLOADED for queue in queues]
    most, known = most_decodes(run.rows.step_columns), profile.fitted_requests
    if found.error > TOLERANCE:
        return f"Do not believe it: {off}, more than {TOLERANCE:.0%}."
    if all(over):
        return (
            f"Believe that {at} is too much: {queue_words(queues[0])}, with slow and fast steps "
            f"alike ({off}); the latencies say only how long the load lasts."
        )
    if any(over):
        return (
            f"Do not rely on it: {off}, and within the expected error of step times the server may "
            f"or may not keep up at {at}."
        )
    if known is not None and most > known:
        error = expected_errors(profile, decodes=most).decode.error
        return (
            f"Believe the range, not the number: {off}, but at {at} up to {most:,} requests decode "
            f"at once and {known:,} were measured, so steps may be {error:.0%} off."
        )
    within = f"its batches are within those measured (up to {most:,} of {known:,} requests)"
    if queues[0] is None or queues[0]["verdict"] != "keeps up":
        return (
            f"Believe it for a load of this length: {off}, and {within}; whether the server keeps "
            "up for longer cannot be said."
        )
    return f"Believe it: {off}, the server keeps up at {at}, and {within}."


def _table(rows: Sequence[Row], at: str) -> list[str]:
    lines = [f"{'':>22}{'measured':>12}{'simulated':>12}{'at ' + at:>12}   low to high"]
    for row in rows:
        seconds = row.metric in SECONDS

        def show(value: float, seconds: bool = seconds) -> str:
            return timed(value) if seconds else f"{value:,.4g}"

        now, then, *others = row.simulated
        ends = f"{show(min(then, *others))} to {show(max(then, *others))}"
        title = f"{METRIC_NAMES[row.metric]} {row.statistic}"
        if row.metric == "throughput":
            title = row.statistic
        lines.append(f"{title:>22}{show(row.measured):>12}{show(now):>12}{show(then):>12}   {ends}")
    return lines


def _document(found: ServerFit, rows: Sequence[Row], said: str, factor: float) -> dict:
    return {
        "version": 1,
        "verdict": said,
        "rate_scale": factor,
        "error": found.error,
        "error_before": found.fitted.before,
        "fitted_requests": found.most_under_way(),
        "numbers": [
            {
                "metric": row.metric,
                "statistic": row.statistic,
                "measured": row.measured,
                "simulated": row.simulated[0],
                "predicted": row.simulated[1],
                "low": min(row.simulated[1:]),
                "high": max(row.simulated[1:]),
            }
            for row in rows
        ],
        "notices": list(found.notices()),
    }
