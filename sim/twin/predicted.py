"""A measured server at another rate: a profile is fitted to the measurement, and the requests are
simulated at that rate, also with step times off. In a sentence: whether to believe it."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.front_end import save_front_end
from twinserve.profiles.profile import Profile, ProfileError
from twinserve.sim.report.metric_names import METRIC_NAMES, SECONDS
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.error_bars import run_with_steps_off
from twinserve.sim.setup.hardware import most_decodes
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.presets import from_file
from twinserve.sim.setup.run import Report, run_policy
from twinserve.sim.twin.compare import TOLERANCE, Row, error, table
from twinserve.sim.twin.compare_report import timed
from twinserve.sim.twin.queues import OVERLOADED, queue_words, run_queue
from twinserve.sim.twin.served import OF_REQUESTS, Served, from_server, of_measurement, of_run
from twinserve.sim.twin.server_fit import (
    NoTimesError,
    ServerFit,
    beyond,
    early,
    fit_server,
    on_profile,
)
from twinserve.traces.measurement import Measurement

NO_RATE = "{}: all requests are due at once, so there is no rate to change; measure at a rate"
_NEEDED = ("completed", "total_input_tokens", "total_output_tokens")


def check_summary(found: Measurement) -> None:
    """Raise SettingsError if the file states too little to make a load of it."""
    needed = [*_NEEDED, *["request_rate"] * ("max_concurrency" not in found.stated)]
    if lacks := [name for name in needed if not found.stated.get(name, 0.0) > 0]:
        raise SettingsError(
            f"check {found.path}: has no single requests, and as a summary it lacks "
            f"{', '.join(lacks)}: run vllm bench serve with --save-detailed"
        )


def stated_load(found: Measurement, factor: float = 1.0) -> str:
    """Return the name of a load with the stated number of requests, their mean lengths, the stated
    rate and limit of requests at once. factor: on the rate; on the limit if all are due at once.
    Raises SettingsError if there is nothing that the factor can change."""
    stated = found.stated
    rate, limit = stated.get("request_rate", math.inf), stated.get("max_concurrency")
    count = stated["completed"]
    if math.isinf(rate) and limit is None and factor != 1:
        raise SettingsError(f"--at {factor:g}x: {NO_RATE.format(found.path)}")
    options = {"num_prompts": stated.get("num_prompts", count), "request_rate": factor * rate}
    if limit is not None:
        at_once = limit * (factor if math.isinf(rate) else 1.0)
        options["max_concurrency"] = max(round(at_once), 1)
    options["burstiness"] = stated.get("burstiness", 1.0)
    options["random_input_len"] = max(round(stated["total_input_tokens"] / count), 1)
    options["random_output_len"] = max(round(stated["total_output_tokens"] / count), 1)
    return "vllm:" + ",".join(f"{name}={value:.15g}" for name, value in options.items())


def stated_inputs(
    found: Measurement, settings: Mapping, config: Path | None, factor: float
) -> Sequence[Inputs]:
    """Return the stated load on the profile as it is, at the measured rate and `factor` times it.
    settings, config: as of `server_fit.fit_server`. Raises SettingsError."""
    given = {**(from_file(config, dict(settings)) if config else {}), **settings}
    given = {name: value for name, value in given.items() if name not in OF_REQUESTS}
    loads = [stated_load(found, at) for at in (1.0, factor)]
    return [resolve(SimulationConfig(**given | {"trace": load, "slo": "none"})) for load in loads]


def summary_notices(found: Measurement) -> list[str]:
    """Return what cannot be said from such a file."""
    return [
        *(f"{found.path}: {notice}" for notice in found.notices),
        f"{found.path}: simulated with requests of its mean lengths, `{stated_load(found)}`; "
        "step times were not fitted. What lengths, arrivals and step times each add is not known, "
        "nor whether the server's queue grew",
    ]


_SHOWN = ("mean", "p90", "p99", "output tokens/s")
NOT = "Do not believe it"
_OF_SUMMARY = ("ttft", "tpot", "e2el", "throughput")


@dataclass(frozen=True)
class Prediction:
    """factor   on the measured rate
    rows     of each number: measured, then simulated as measured, at the other rate, and there
             with step times off by their expected error
    verdict  on the prediction
    error    of the simulation at the measured rate: on requests that the fit had not seen
    notices  printed below the table
    fit      to the measurement; None of a summary, to which nothing can be fitted"""

    factor: float
    rows: Sequence[Row]
    verdict: str
    error: float
    notices: Sequence[str]
    fit: ServerFit | None

    def lines(self) -> list[str]:
        """Return the table and its notices."""
        return [*_table(self.rows, f"{self.factor:g}x"), "", *(f"note: {n}" for n in self.notices)]

    def document(self) -> dict:
        return _document(self)


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
        raise SettingsError(
            "--profile is needed: name the profile to begin with, as llama-3.1-8b@h100"
        )
    factor = _factor(at)
    begin("fit")
    try:
        found = fit_server(files, settings, config, saturated, simulations, "check")
    except NoTimesError as bare:
        if len(files) > 1 or len(bare.found) or not bare.found.stated:
            raise
        check_summary(bare.found)
        return _of_summary(bare.found, settings, config, factor, report, begin)
    with tempfile.TemporaryDirectory(prefix="twinserve-") as scratch:
        file = None
        if (front_end := found.front_end()) is not None:
            file = str(Path(scratch) / "f.json")
            save_front_end(front_end, file)
        base = found.inputs[0]
        loads = [on_profile(one, found.profile(), file) for one in (base, _scaled(base, factor))]
        try:
            as_measured, predicted = _runs(loads, report, begin)
        except ProfileError:  # step times off by their error, on top of the fit
            raise beyond(found.found, found.inputs, "check") from None
    server = from_server(found.found[0])
    now = early(of_run("", as_measured, server), found.until_s[0])
    rows = _rows(found.measured()[:1], [now, *(of_run("", run, server) for run in predicted)])
    off = f"the simulation is {found.error:.1%} off on requests that the fit had not seen"
    said = _believed(found.error, off, found.profile(), predicted, f"{factor:g}x")
    notices = [*found.notices(), *_clients(loads)]
    return Prediction(factor, rows, _without(said, rows), found.error, notices, found)


def _of_summary(
    found: Measurement,
    settings: Mapping,
    config: Path | None,
    factor: float,
    report: Report | None,
    begin: Callable[[str], None],
) -> Prediction:
    """Of a file without single requests: step times are those of the profile as it is."""
    loads = stated_inputs(found, settings, config, factor)
    as_measured, predicted = _runs(loads, report, begin)
    every = table([of_measurement(found)], [of_run("", run) for run in (as_measured, *predicted)])
    off_by = error(every, 0)
    off = f"the simulation of the load that the summary states is {off_by:.1%} off"
    said = _believed(off_by, off, loads[0].hardware.profile, predicted, f"{factor:g}x")
    rows = [row for row in every if row.service_class == "all" and row.metric in _OF_SUMMARY]
    notices = [*summary_notices(found), *_clients(loads)]
    return Prediction(factor, rows, _without(said, rows), off_by, notices, None)


def _factor(text: str) -> float:
    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise SettingsError(f"--at {text}: give a factor on the measured rate, such as 2x")
    return factor


def _scaled(base: Inputs, factor: float) -> Inputs:
    """The first file's requests at the other rate; of a closed loop, from other clients too."""
    workload = resolve(base.config.model_copy(update={"rate_scale": factor})).workload
    if workload.concurrency is not None:
        clients = max(round(factor * workload.concurrency), 1)
        workload = replace(workload, concurrency=clients)
    elif factor != 1 and not workload.span_s:
        raise SettingsError(f"--at {factor:g}x: {NO_RATE.format(base.config.trace)}")
    return replace(base, workload=workload)


def _clients(loads: Sequence[Inputs]) -> list[str]:
    now, then = (load.workload.concurrency for load in loads)
    return [f"a closed loop: {then} requests at once, measured {now}"] * (now != then)


def _runs(
    loads: Sequence[Inputs], report: Report | None, begin: Callable[[str], None]
) -> tuple[RunResult, list[RunResult]]:
    """Of the load as measured; and of that at the other rate, first with step times as they are,
    then with these off by the expected error."""
    base, inputs = loads
    spec = base.policies[0]
    begin("predict")
    as_measured = run_policy(base, spec)
    run = run_policy(inputs, spec, report)
    profile = inputs.hardware.profile
    errors = expected_errors(profile, decodes=most_decodes(run.rows.step_columns))
    off = run_with_steps_off(inputs, spec, errors, report, begin=begin)
    return as_measured, [run, *off]


def _rows(measured: Sequence[Served], served: Sequence[Served]) -> list[Row]:
    """Numbers of the first file, and of the runs in their order."""
    return [
        row
        for row in table(measured, served)
        if row.service_class == "all"
        and row.metric not in ("prompt", "output", "itl")
        and row.statistic in _SHOWN
    ]


def _without(said: str, rows: Sequence[Row]) -> str:
    """Return the sentence, with latencies that are off at the measured rate already."""
    if said.startswith(NOT):
        return said
    for metric in ("ttft", "tpot", "e2el"):
        off = [abs(row.errors()[0]) for row in rows if row.metric == metric]
        if off and sum(off) / len(off) > TOLERANCE:
            said = (
                f"{said.removesuffix('.')}; not its {METRIC_NAMES[metric]}, "
                f"{sum(off) / len(off):.0%} off at the measured rate."
            )
    return said


def _believed(
    off_by: float, off: str, profile: Profile, predicted: Sequence[RunResult], at: str
) -> str:
    """Return whether to believe the prediction. off: what the measured rate's error is of."""
    run = predicted[0]
    queues = [run_queue(one.summary) for one in predicted]
    over = [queue is not None and queue["verdict"] in OVERLOADED for queue in queues]
    most, known = most_decodes(run.rows.step_columns), profile.fitted_requests
    if off_by > TOLERANCE:
        return f"{NOT}: {off}, more than {TOLERANCE:.0%}."
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
    if known is None or most > known:
        error = expected_errors(profile, decodes=most).decode.error
        measured = "a summary does not say how many" if known is None else f"{known:,}"
        return (
            f"Believe the range, not the number: {off}, but at {at} up to {most:,} requests decode "
            f"at once and {measured} were measured, so steps may be {error:.0%} off."
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


def _document(found: Prediction) -> dict:
    return {
        "version": 1,
        "verdict": found.verdict,
        "rate_scale": found.factor,
        "error": found.error,
        "error_before": found.fit.fitted.before if found.fit else None,
        "fitted_requests": found.fit.most_under_way() if found.fit else None,
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
            for row in found.rows
        ],
        "notices": list(found.notices),
    }
