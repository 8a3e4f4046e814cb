"""`twinserve validate`: the simulator against a live engine, in one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from twinserve.sim.cli.live import TINY, engine_arguments, live_engine
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup.config import SettingsError, SimulationConfig

_Flag = Annotated[bool, Parameter(negative="")]
_DEFAULTS = SimulationConfig.model_construct()  # nothing to check: help need not wait for that


def validate(
    *,
    config: SimulationConfig = _DEFAULTS,
    model: str = TINY,
    repeats: int = 3,
    pace: Literal["wall", "measured"] = "wall",
    weights: Literal["safetensors", "dummy", "auto"] = "safetensors",
    dtype: str = "auto",
    graphs: _Flag = False,
    engine_arg: Annotated[list[str] | None, Parameter(name="--engine-arg", negative="")] = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    overwrite: _Flag = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> None:
    """Run one workload simulated and live, policy by policy, and compare.

    Give the engine's own profile with --profile (twinserve calibrate writes one). Errors stand
    beside the spread of the live engine's repeated runs.

    Parameters
    ----------
    config: SimulationConfig
        Settings of the run.
    model: str
        Folder of a model, or `tiny` or `small`.
    repeats: int
        Live runs of each policy.
    pace: str
        wall: requests arrive in wall time. measured: the clock advances by each step's measured
        time.
    weights: str
        safetensors, dummy (random) or auto.
    dtype: str
        Of weights and KV; auto: float32 for tiny and small, else the model's.
    graphs: bool
        CUDA graphs and compilation.
    engine_arg: list[str]
        NAME=VALUE, further vLLM engine arguments; may be repeated.
    out: Path
        Folder for the comparison: validation.json, validation.md, plots, the rows of all runs.
    overwrite: bool
        Replace the former comparison in --out.
    as_json: bool
        Print the comparison as JSON and nothing else.
    quiet: bool
        No progress.
    """
    from twinserve.sim.report.table import print_lines
    from twinserve.sim.results.files import dump_json
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.twin.live import blank_settings, live_settings
    from twinserve.sim.twin.validate import validate_policy
    from twinserve.sim.twin.validate_report import check_folder, metric_lines, write_validation

    if repeats < 1:
        raise SettingsError("--repeats: at least one live run is needed")
    if out is not None:
        check_folder(out, overwrite)
    if "async_scheduling" not in config.model_fields_set:  # the live engine steps synchronously
        config = config.model_copy(update={"async_scheduling": False})
    inputs = resolve(config)
    options = {
        "weights": weights,
        "dtype": dtype,
        "graphs": graphs,
        "extra": engine_arguments(engine_arg),
    }
    found = []
    with RunProgress(shown=not (quiet or as_json)) as progress:
        for spec in inputs.policies:
            progress.say(f"{spec.label}: starting the engine")
            settings = live_settings(inputs, spec, blank_settings(**options))
            with live_engine(settings, model) as engine:
                engine.warm_up()
                found.append(
                    validate_policy(
                        inputs, spec, engine, repeats, pace == "wall", progress.say, progress
                    )
                )
                version = engine.version
    if out is not None:
        write_validation(out, found, inputs, version, overwrite)
    if as_json:
        sys.stdout.write(dump_json({v.spec.label: v.summary() for v in found}))
        return
    for validation in found:
        print_lines(
            f"{validation.spec.label}: simulated against vLLM {version}", metric_lines(validation)
        )
