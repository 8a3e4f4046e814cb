"""`twinserve check`: a measured server at another rate, and whether to believe the prediction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from twinserve.sim.cli.options import Engine, Flag, Json, Quiet
from twinserve.sim.cli.progress import RunProgress

if TYPE_CHECKING:
    from twinserve.sim.results.files import RunResult
    from twinserve.sim.twin.compare import Row
    from twinserve.sim.twin.server_fit import ServerFit

_SHOWN = ("mean", "p90", "p99", "output tokens/s")
_OVERLOADED = ("saturated", "sheds")


def check(
    bench: Annotated[list[Path], Parameter(negative="")],
    *,
    profile: str | None = None,
    at: str = "1x",
    config: Path | None = None,
    num_blocks: Annotated[int | None, Engine] = None,
    block_tokens: Annotated[int | None, Engine] = None,
    max_num_seqs: Annotated[int | None, Engine] = None,
    max_step_tokens: Annotated[
        int | None, Parameter(name=["--max-step-tokens", "--max-num-batched-tokens"]), Engine
    ] = None,
    max_model_len: Annotated[int | None, Engine] = None,
    saturated: Flag = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict a measured server at another rate, and say whether to believe it.

    The command fits the profile to the measurement, simulates the requests of the first file at
    the other rate, and again with step times off by their expected error.

    For example:

    $ twinserve check bench.json --profile llama-3.1-8b@h100 --at 2x

    Args:
        bench: Results of vllm bench serve --save-detailed, or other files with times of single
            requests; several files are loads of the same server.
        profile: The profile to begin with; take one of similar hardware.
        at: Factor on the measured rate of requests, such as 2x.
        config: A run.json with the server's settings.
        num_blocks: KV blocks of the server.
        block_tokens: Tokens of one of its KV blocks.
        max_num_seqs: Its largest batch.
        max_step_tokens: Most tokens of one of its steps.
        max_model_len: Longest request in tokens.
        saturated: Fit all of a file, even if the server's queue grew.
        as_json: Print verdict and table as JSON and nothing else.
        quiet: No progress.
    """
    from twinserve.sim.results.files import dump_json
    from twinserve.sim.setup.config import SettingsError
    from twinserve.sim.twin.server_fit import fit_server

    if profile is None and config is None:
        raise SettingsError("--profile is needed: the one to begin with, as llama-3.1-8b@h100")
    settings = {
        "profile": profile,
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_step_tokens,
        "max_model_len": max_model_len,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    factor = _factor(at)
    with RunProgress(shown=not (quiet or as_json)) as progress:
        progress.begin("fit")
        found = fit_server(bench, settings, config, saturated, progress.simulations, "check")
        as_measured, predicted = _runs(found, factor, progress)
    rows = _rows(found, [as_measured, *predicted])
    said = verdict(found, predicted, f"{factor:g}x", rows)
    if as_json:
        sys.stdout.write(dump_json(_document(found, rows, said, factor)))
        return
    print(said)
    print("\n".join(["", *_table(rows, f"{factor:g}x"), "", *found.notices()]).rstrip())


def _factor(text: str) -> float:
    from twinserve.sim.setup.config import SettingsError

    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise SettingsError(f"--at {text}: give a factor on the measured rate, such as 2x")
    return factor


def _runs(
    found: ServerFit, factor: float, progress: RunProgress
) -> tuple[RunResult, list[RunResult]]:
    """The first file's requests on the fitted profile at the measured rate; and at the other one,
    first with the step times as they are, then with these off by the expected error."""
    import tempfile
    from dataclasses import replace

    from twinserve.profiles.evidence import expected_errors
    from twinserve.profiles.front_end import save_front_end
    from twinserve.sim.setup.error_bars import run_with_steps_off
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.measured_range import most_decodes
    from twinserve.sim.setup.run import run_policy
    from twinserve.sim.twin.server_fit import on_profile

    base, profile = found.inputs[0], found.profile()
    spec = base.policies[0]
    with tempfile.TemporaryDirectory(prefix="twinserve-") as scratch:
        file = None
        if (front_end := found.front_end()) is not None:
            file = str(Path(scratch) / "f.json")
            save_front_end(front_end, file)
        scaled = resolve(base.config.model_copy(update={"rate_scale": factor}))
        inputs = on_profile(replace(base, workload=scaled.workload), profile, file)
        progress.begin("predict")
        as_measured = run_policy(on_profile(base, profile, file), spec)
        run = run_policy(inputs, spec, progress.report)
        errors = expected_errors(profile, decodes=most_decodes(run.rows.step_columns))
        off = run_with_steps_off(inputs, spec, errors, progress.report, begin=progress.begin)
        return as_measured, [run, *off]


def _rows(found: ServerFit, runs: Sequence[RunResult]) -> list[Row]:
    """Numbers of the first file, and of the runs in their order."""
    from twinserve.sim.twin.compare import table
    from twinserve.sim.twin.served import from_server, of_run
    from twinserve.sim.twin.server_fit import early

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
    from twinserve.sim.report.metric_names import METRIC_NAMES
    from twinserve.sim.twin.compare import TOLERANCE

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
    from twinserve.profiles.evidence import expected_errors
    from twinserve.sim.setup.measured_range import most_decodes
    from twinserve.sim.twin.compare import TOLERANCE
    from twinserve.sim.twin.queues import queue_words, run_queue

    run, profile = predicted[0], found.profile()
    off = f"the simulation is {found.error:.1%} off on requests that the fit had not seen"
    queues = [run_queue(one.summary) for one in predicted]
    over = [queue is not None and queue["verdict"] in _OVERLOADED for queue in queues]
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
    from twinserve.sim.report.metric_names import METRIC_NAMES, SECONDS
    from twinserve.sim.twin.compare_report import timed

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
