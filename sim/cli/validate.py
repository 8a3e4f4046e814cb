"""`twinserve validate`: the simulator against a live engine, in one command."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from twinserve.sim.cli.live import TINY, engine_arguments, live_engine
from twinserve.sim.cli.options import (
    Doing,
    Engine,
    EngineArgs,
    Flag,
    Json,
    Out,
    Overwrite,
    Quiet,
    Starting,
)
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup.config import SettingsError, SimulationConfig

if TYPE_CHECKING:
    from twinserve.backends.live.engine.engine import VllmEngine
    from twinserve.policies.registry import PolicySpec

_DEFAULTS = SimulationConfig.model_construct()  # nothing to check: help need not wait for that


def validate(
    *,
    config: SimulationConfig = _DEFAULTS,
    model: Annotated[str, Starting] = TINY,
    repeats: Annotated[int, Starting] = 3,
    pace: Annotated[Literal["wall", "measured"], Engine] = "wall",
    weights: Annotated[Literal["safetensors", "dummy", "auto"], Engine] = "safetensors",
    dtype: Annotated[str, Engine] = "auto",
    graphs: Annotated[Flag, Engine] = False,
    engine_arg: EngineArgs = None,
    emulated: Annotated[Flag, Engine] = False,
    served: Annotated[Flag, Engine] = False,
    limit: Annotated[float | None, Doing] = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run one workload simulated and live, policy by policy, and compare.

    Give the engine's own profile with --profile (twinserve calibrate writes one). Errors are shown
    with the spread of the live engine's repeated runs. A policy fails if its replay drifts, or if
    an answer is lost or shortened. The others go on, their results are written, and the command
    fails at its end.

    For example:

    $ twinserve validate --profile cpu.json -t poisson --rate 20 --requests 40 --out checked
    $ twinserve validate --emulated --profile llama-3.1-8b@h100 -t mooncake --requests 200 --load 1

    Args:
        config: Settings of the run.
        model: Folder of a model, or `tiny`, `deep` or `small`.
        repeats: Live runs of each policy.
        pace: wall: requests arrive in wall time. measured: the clock advances by each step's
            measured time.
        weights: safetensors, dummy (random) or auto.
        dtype: Of weights and KV; auto: float32 for tiny, deep and small, else the model's.
        graphs: CUDA graphs and compilation.
        engine_arg: NAME=VALUE, further vLLM engine arguments; may be repeated.
        emulated: The engine has an emulated GPU, of --profile, and virtual time: vLLM's own loop
            must decide what was simulated, step by step. No model, no repeats.
        served: With --emulated: then also before a real server, in wall time, with clients over
            HTTP.
        limit: Stop all runs after so many seconds; finished runs are compared and marked as
            partial. Starting engines does not count.
        out: Folder for the comparison: validation.json, validation.md, plots, the rows of all runs.
            The steps of each run are kept next to it (FOLDER.steps) until all is written.
        overwrite: Replace the earlier comparison in --out.
        as_json: Print the comparison as JSON and nothing else.
        quiet: No progress.
    """
    from twinserve.backends.live.versions import LiveEngineError, installed_vllm
    from twinserve.sim.report.table import print_lines
    from twinserve.sim.results.command import command
    from twinserve.sim.results.files import printed_runs
    from twinserve.sim.results.folders import check_folder
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.speculation import parse_speculation
    from twinserve.sim.twin.limit import TimeLimit, check_limit
    from twinserve.sim.twin.live import blank_settings, live_settings
    from twinserve.sim.twin.validate import KeptSteps, validate_each
    from twinserve.sim.twin.validate_report import MARKER, metric_lines, write_validation

    if emulated:
        _emulated(config, served, out, overwrite, as_json, quiet)
        return
    if served:
        raise SettingsError("--served needs an emulated engine; add --emulated")
    if repeats < 1:
        raise SettingsError(f"--repeats {repeats}: give 1 live run or more")
    check_limit(limit)
    if out is not None:
        check_folder(out, overwrite, MARKER)
    given = {name: getattr(config, name) for name in sorted(config.model_fields_set)}
    given |= {"model": model, "repeats": repeats, "pace": pace, "weights": weights}
    given |= {"dtype": dtype, "graphs": graphs, "engine_arg": engine_arg, "out": "again"}
    kept = KeptSteps(out)
    if "async_scheduling" not in config.model_fields_set:  # the live engine steps synchronously
        config = config.model_copy(update={"async_scheduling": False})
    if config.async_scheduling:
        raise SettingsError(
            "--async-scheduling: the engine in this process plans synchronously, so its times "
            "would not compare; drop it"
        )
    if config.speculate is not None and parse_speculation(config.speculate).recorded is None:
        raise SettingsError(
            "--speculate: the engine executes the simulated drafts, and cannot find drafts drawn "
            "at random; give recorded=DIR of a free replay, or drop it"
        )
    inputs = resolve(config)
    options = {
        "weights": weights,
        "dtype": dtype,
        "graphs": graphs,
        "extra": engine_arguments(engine_arg),
    }
    version = installed_vllm()

    def open_engine(spec: PolicySpec) -> AbstractContextManager[VllmEngine]:
        return live_engine(live_settings(inputs, spec, blank_settings(**options)), model)

    with RunProgress(shown=not (quiet or as_json)) as progress, kept.told_where():
        found, failed = validate_each(
            inputs,
            open_engine,
            repeats,
            pace == "wall",
            progress.say,
            progress,
            TimeLimit(limit),
            kept.keep,
        )
        if out is not None and found:
            said = command("twinserve validate", given)
            write_validation(out, found, failed, inputs, version, overwrite, kept.files, said)
            kept.drop()
    if as_json:
        sys.stdout.write(printed_runs((v.spec.label, v.summary()) for v in found))
    else:
        for validation in found:
            label = validation.spec.label
            print_lines(f"{label}: simulated against vLLM {version}", metric_lines(validation))
    if failed:
        lines = "; ".join(f"{label}: {line}" for label, line in failed.items())
        raise LiveEngineError(f"{len(failed)} of {len(inputs.policies)} policies failed: {lines}")


def _emulated(
    config: SimulationConfig,
    served: bool,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Each policy simulated, decided by vLLM in virtual time and, if asked for, served."""
    from twinserve.backends.live.needs import require
    from twinserve.backends.live.versions import installed_vllm
    from twinserve.sim.report.table import print_lines
    from twinserve.sim.results.files import printed_runs
    from twinserve.sim.results.folders import check_folder
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.twin.validate_emulated import MARKER, compare_each, refuse, write_emulated

    if out is not None:
        check_folder(out, overwrite, MARKER)
    require("engine", "emulating")
    if config.host_blocks is None:  # an emulated GPU swaps nothing
        config = config.model_copy(update={"host_blocks": 0})
    inputs = resolve(config)
    with RunProgress(shown=not (quiet or as_json)) as progress:
        found = list(compare_each(inputs, progress.begin, progress.report, served))
    if out is not None:
        write_emulated(out, found, inputs, installed_vllm(), overwrite)
    if as_json:
        sys.stdout.write(printed_runs((one.spec.label, one.summary()) for one in found))
    else:
        for one in found:
            print_lines(f"{one.spec.label}: simulated / vLLM in virtual time", one.lines())
    refuse(found)
