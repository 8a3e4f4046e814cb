"""`simulate`: run policies over a trace and print one table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..profiles.catalog import nearest
from ..traces.workload import WorkloadError
from .config import PRESETS, SettingsError, SimulationConfig
from .export import check_export, export_requests
from .inputs import Inputs, resolve
from .metrics_goodput import parse_goodput
from .progress import RunProgress
from .results import RunResult, check_target, dump_json, write_run
from .run import run_policy
from .table import print_table

_Flag = Annotated[bool, Parameter(negative="")]


def simulate(
    config: SimulationConfig = SimulationConfig(),
    *,
    preset: str | None = None,
    config_file: Annotated[Path | None, Parameter(name="--config")] = None,
    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")] = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    overwrite: _Flag = False,
    timeline: _Flag = False,
    decisions: _Flag = False,
    export: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> None:
    """Simulate scheduling and KV-cache policies on a trace; several --policy give one side-by-side table.

    Parameters
    ----------
    config: SimulationConfig
        Settings of the run.
    preset: str
        A published setting, which other flags modify: bros-hybrid.
    config_file: Path
        Settings from a former run's run.json; flags given here win.
    goodput: list[str]
        Objectives for goodput in milliseconds, as in vLLM: ttft:500 tpot:50.
    out: Path
        Folder for the results; with several policies, one folder in it for each.
    overwrite: bool
        Replace the former run in --out.
    timeline: bool
        Also write trace.json.gz, a timeline that opens in Perfetto.
    decisions: bool
        Also write decisions.jsonl.gz, every plan of the run, for twinserve replay.
    export: Path
        Write the requests that were submitted, best-effort pool included, as a trace file.
    as_json: bool
        Print the summary as JSON and nothing else.
    quiet: bool
        No progress bar.
    """
    config = with_defaults(config, preset, config_file)
    if goodput is not None and not goodput:
        raise SettingsError("--goodput: no objective; write NAME:MILLISECONDS, as ttft:500")
    objectives = parse_goodput(goodput) if goodput else None
    if timeline and out is None:
        raise SettingsError("--timeline writes trace.json.gz into the results; say where with --out")
    if decisions and (out is None or config.replicas > 1):
        wrong = "say where with --out" if out is None else "of one engine; drop --replicas"
        raise SettingsError(f"--decisions writes the plans into the results; {wrong}")
    if overwrite and out is None:
        raise SettingsError("--overwrite is for --out, which is not given")
    if export is not None and len(config.policy) > 1:
        raise SettingsError("--export writes the requests of one run; give one --policy")
    with RunProgress(shown=not (quiet or as_json)) as progress:
        inputs = resolve(config, progress.download)
        targets = _targets(out, inputs)
        for target in targets.values():
            check_target(target, overwrite)
        if export is not None:
            check_export(export)
        if not as_json:
            progress.say(headline(inputs))
        results: dict[str, RunResult] = {}
        for spec in inputs.policies:
            progress.begin(spec.label)
            result = run_policy(inputs, spec, progress.report, objectives, decisions)
            progress.end(result)
            if out is not None:
                write_run(targets[spec.label], result, overwrite, timeline)
            if export is not None:
                export_requests(result, inputs, export)
            results[spec.label] = result
    if as_json:
        summaries = {label: result.summary for label, result in results.items()}
        sys.stdout.write(dump_json(summaries if len(summaries) > 1 else next(iter(summaries.values()))))
    else:
        print_table(results, list(inputs.notices))


def _targets(out: Path | None, inputs: Inputs) -> dict[str, Path]:
    """Where each policy's results go."""
    if out is None:
        return {}
    if len(inputs.policies) == 1:
        return {inputs.policies[0].label: out}
    return {spec.label: out / folder(spec.label) for spec in inputs.policies}


def folder(label: str) -> str:
    """A policy's label as a folder name."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in label)


def with_defaults(config: SimulationConfig, preset: str | None, file: Path | None) -> SimulationConfig:
    """Settings given as flags, over those of a former run, over those of a preset."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    base: dict = {}
    if preset is not None:
        if preset not in PRESETS:
            raise SettingsError(f"--preset {preset!r} is unknown{nearest(preset, PRESETS)}; there is: {', '.join(PRESETS)}")
        base.update(PRESETS[preset])
    if file is not None:
        base.update(_from_file(file))
    if "load" in given:
        base.pop("rate", None)
        base.pop("rate_scale", None)
    elif given.get("rate") or given.get("rate_scale"):
        base.pop("load", None)
    return SimulationConfig(**{**base, **given})


def _from_file(file: Path) -> dict:
    try:
        stored = json.loads(file.read_text())
        settings = stored["config"]
        if not isinstance(settings, dict):
            raise KeyError("config")
    except FileNotFoundError:
        raise SettingsError(f"--config {file}: there is no such file; name a run.json") from None
    except OSError as error:
        raise SettingsError(f"--config {file}: cannot be read ({error.strerror}); name a run.json") from None
    except (ValueError, KeyError, TypeError):
        raise SettingsError(f"--config {file}: this is not a run.json (no settings under 'config')") from None
    unknown = set(settings) - set(SimulationConfig.model_fields)
    if unknown:
        raise WorkloadError(f"--config {file}: unknown setting {min(unknown)!r}; was it written by another version?")
    return settings


def headline(inputs: Inputs) -> str:
    """What is run, in two lines: requests and hardware."""
    workload, config = inputs.workload, inputs.config
    span = workload.last_arrival_s
    rate = len(workload) / span if span else float("nan")
    pool = f", best-effort pool of {config.pool}" if config.pool else ""
    source = workload.provenance.name + (" (embedded replica)" if workload.provenance.replica else "")
    lines = [f"{source}: {len(workload):,} requests over {span:,.0f} s, {rate:.2f} requests/s{pool}"]
    engines = f"{config.replicas} x " if config.replicas > 1 else ""
    lines.append(engines + inputs.hardware.profile.describe())
    rules = [t for t in workload.provenance.transforms if t.startswith("slo ")]
    return "\n".join(lines + rules)
