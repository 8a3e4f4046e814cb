"""`simulate`: run policies over a trace and print one table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from twinserve.sim.cli.options import (
    MISSED,
    ConfigFile,
    FailOnMiss,
    Flag,
    Goodput,
    Json,
    Measured,
    Out,
    Overwrite,
    Percentiles,
    Quiet,
    Starting,
    Writing,
)
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup.config import SettingsError, SimulationConfig

if TYPE_CHECKING:
    from twinserve.sim.results.files import RunResult
    from twinserve.sim.results.options import MetricsOptions
    from twinserve.sim.setup.hardware import Hardware
    from twinserve.sim.setup.inputs import Inputs

_DEFAULTS = SimulationConfig.model_construct()  # nothing to check: help need not wait for that


def simulate(
    *,
    config: SimulationConfig = _DEFAULTS,
    preset: Annotated[str | None, Starting] = None,
    config_file: ConfigFile = None,
    goodput: Goodput = None,
    warmup: Annotated[str | None, Measured] = None,
    metrics_every: Annotated[float | None, Measured] = None,
    percentiles: Percentiles = None,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Annotated[Flag, Writing] = False,
    timeline: Annotated[Flag, Writing] = False,
    decisions: Annotated[Flag, Writing] = False,
    error_bars: Annotated[Flag, Measured] = False,
    spare: Annotated[Flag, Measured] = False,
    export: Annotated[Path | None, Writing] = None,
    bench_json: Annotated[Path | None, Writing] = None,
    fail_on_miss: FailOnMiss = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate scheduling and KV-cache policies on a trace; several --policy give one side-by-side
    table.

    For example:

    $ simulate -p vllm -p bros -t sharegpt --requests 400 --load 0.8 --pool 64
    $ simulate -t azure-2023:conv --window 0 900 --slo "ttft=1,tpot=0.05"
    $ simulate --profile llama-3.1-8b@h100 --replicas 4 --rate-scale 8 --out run
    $ simulate --config run/run.json --seed 1

    Args:
        config: Settings of the run.
        preset: A published setting, which other flags modify: bros-hybrid.
        config_file: Settings from a former run's run.json; flags given here win.
        goodput: Objectives for goodput in milliseconds, as in vLLM: ttft:500 tpot:50.
        warmup: Leave out of the metrics the first requests (500) or seconds (60s).
        metrics_every: Also metrics of each window of so many seconds.
        percentiles: Percentiles of the latencies in table and JSON: 50,90,99.9.
        out: Folder for the results; with several policies, one folder in it for each.
        overwrite: Replace the earlier run in --out, and the files of --export and --bench-json.
        resume: Keep the runs of the same settings that --out holds already, and run the other
            policies.
        timeline: Also write trace.json.gz, a timeline that opens in Perfetto.
        decisions: Also write decisions.jsonl.gz, every plan of the run, for twinserve replay.
        error_bars: Run four times more with step times off by their expected error, and show how
            far each metric moves.
        spare: Run twice more, without failures and with one more replica, and show what each keeps.
        export: Write the requests that were submitted, best-effort pool included, as a trace file.
        bench_json: Write the results as vllm bench serve --save-detailed does (.json), for tools
            that read such files.
        fail_on_miss: Exit with status 3 if a run misses an objective.
        as_json: Print the summaries as JSON and nothing else: a list of runs.
        quiet: No progress.
    """
    from twinserve.sim.report.fleet import notes_of, print_beside, print_pools, print_windows
    from twinserve.sim.report.table import print_table
    from twinserve.sim.results.files import check_target, printed_runs, write_run
    from twinserve.sim.results.metrics_objectives import parse_goodput
    from twinserve.sim.setup.hardware import most_decodes
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.objectives import metrics_options, parse_objectives
    from twinserve.sim.setup.presets import with_defaults
    from twinserve.sim.setup.run import run_each

    config = with_defaults(config, preset, config_file)
    objectives = None if goodput is None else parse_goodput(goodput)
    options = metrics_options(objectives, warmup, metrics_every, percentiles)
    if timeline and out is None:
        raise SettingsError(
            "--timeline writes trace.json.gz into the results; name their folder with --out"
        )
    if decisions and out is None:
        raise SettingsError(
            "--decisions writes the plans into the results; name their folder with --out"
        )
    if decisions and (config.replicas > 1 or config.fleet is not None):
        drop = "--fleet" if config.fleet is not None else "--replicas"
        raise SettingsError(f"--decisions writes the plans of one engine; drop {drop}")
    if decisions and (changing := config.changes_replicas):
        raise SettingsError(f"--decisions writes the plans of one engine; drop {changing}")
    if fail_on_miss and not any(one.statistic for one in parse_objectives(config.slo)):
        raise SettingsError(
            "--fail-on-miss: no objective is of the whole run; give one, as --slo 'ttft p90 < 1 s'"
        )
    if error_bars and config.fleet is not None:
        raise SettingsError("--error-bars changes the step times of one profile; drop --fleet")
    if overwrite and out is None and export is None and bench_json is None:
        raise SettingsError(
            "--overwrite is for --out, --export and --bench-json, none of which is given"
        )
    if resume and (out is None or overwrite or export is not None):
        drop = "name it" if out is None else "drop --export" if export else "drop --overwrite"
        raise SettingsError(f"--resume keeps the runs that --out holds; {drop}")
    if export is not None and len(config.policy) > 1:
        raise SettingsError("--export writes the requests of one run; give one --policy")
    with RunProgress(shown=not (quiet or as_json)) as progress:
        inputs = resolve(config, progress.download)
        if error_bars or spare:
            from twinserve.sim.setup import error_bars as more_runs
        if error_bars:
            more_runs.check_error_bars(inputs)
        if spare:
            more_runs.check_beside(inputs)
        targets = _targets(out, inputs)
        done: dict[str, RunResult] = {}
        if resume:
            asked = {"--timeline": timeline, "--decisions": decisions, "--error-bars": error_bars}
            done = _finished(targets, inputs, options, asked | {"--spare": spare})
        go_on = ", or keep what is there with --resume" if len(targets) > 1 else ""
        for label, target in targets.items():
            if label not in done:
                check_target(target, overwrite, go_on)
        if export is not None or bench_json is not None:
            from twinserve.sim.results.export import check_export, export_requests, write_bench
        if export is not None:
            _check_apart("--export", export, targets.values())
            check_export(export, inputs.workload, overwrite)
        if bench_json is not None:
            _check_apart("--bench-json", bench_json, targets.values())
            from twinserve.sim.cli.profiles import check_target as check_file

            check_file(bench_json, overwrite)
        if not as_json:
            progress.say(headline(inputs))
            for label in done:
                progress.say(f"{label}: kept unchanged in {targets[label]}")
        missing = tuple(spec for spec in inputs.policies if spec.label not in done)
        results = dict(done)
        for spec, result in run_each(
            replace(inputs, policies=missing),
            None if quiet or as_json else progress.report,
            options,
            decisions,
            begin=progress.begin,
        ):
            if error_bars:
                more_runs.add_error_bars(
                    inputs, spec, result, progress.report, options, progress.begin
                )
            if spare:
                more_runs.add_beside(inputs, spec, result, progress.report, options, progress.begin)
            progress.end(result)
            if out is not None:
                if len(targets) > 1:
                    # beside the run: repeated alone, its run.json is the same bytes
                    result.timing["place"] = list(targets).index(spec.label)
                write_run(targets[spec.label], result, overwrite, timeline)
            if export is not None:
                export_requests(result, inputs.workload, export)
            results[spec.label] = result
        results = {spec.label: results[spec.label] for spec in inputs.policies}
    if bench_json is not None:
        write_bench(bench_json, results)
    if as_json:
        found = [
            (label, {**result.summary, "notices": result.config["notices"]})
            for label, result in results.items()
        ]
        sys.stdout.write(printed_runs(found))
    else:
        said = [*inputs.notices, *(n for r in results.values() for n in r.config["notices"])]
        notes = [*dict.fromkeys(said), *notes_of(results)]
        most = max(most_decodes(result.rows.step_columns) for result in results.values())
        bars = [more_runs.said_of_bars(inputs, most)] if error_bars else []
        print_table(results, [*notes, *bars])
        print_pools(results)
        print_beside(results)
        print_windows(results)
    if fail_on_miss and not all(result.summary["objectives_met"] for result in results.values()):
        sys.exit(MISSED)


def _targets(out: Path | None, inputs: Inputs) -> dict[str, Path]:
    """Where each policy's results go. Raises ResultsError if that would put runs into a run."""
    from twinserve.sim.results.folders import ResultsError, folders

    if out is None:
        return {}
    if len(inputs.policies) == 1:
        return {inputs.policies[0].label: out}
    if (out / "run.json").exists():
        # `report` takes such a folder for one run, and would not see those below it
        raise ResultsError(
            f"--out {out}: is the folder of one run; name another folder for the runs of several "
            "policies"
        )
    names = folders(spec.label for spec in inputs.policies)
    return {label: out / name for label, name in names.items()}


def _finished(
    targets: dict[str, Path], inputs: Inputs, options: MetricsOptions, asked: dict[str, bool]
) -> dict[str, RunResult]:
    """What a former command wrote, by policy. Raises ResultsError for runs of other settings."""
    from twinserve.sim.setup.finished import finished_run

    found = {}
    for spec in inputs.policies:
        folder = targets[spec.label]
        result = finished_run(folder, inputs, spec, options, asked)
        if result is not None:
            found[spec.label] = result
    return found


def _check_apart(flag: str, file: Path, targets: Iterable[Path]) -> None:
    """Raises ResultsError if `flag` names a folder of --out, or a file in one."""
    from twinserve.sim.results.folders import ResultsError, resolved

    place = resolved(file)
    for target in map(resolved, targets):
        if place == target or target in place.parents:
            raise ResultsError(
                f"{flag} {file}: --out writes its results there; name a file elsewhere"
            )


def _host_line(inputs: Inputs) -> list[str]:
    """Describe the host's time, if it differs from vLLM's default."""
    from twinserve.profiles.host import NO_HOST_TIME
    from twinserve.sim.setup.hardware import host_of

    config, profile = inputs.config, inputs.hardware.profile
    host = host_of(profile, config)
    if config.async_scheduling and host == NO_HOST_TIME:
        model, of_server = profile.step_model, profile.fitted_requests is not None
        if model.form != "measured" or model.hidden is not None or of_server:
            return []
        why = "the profile's steps are synchronous, and long for this"
        return [f"scheduling: asynchronous; {why} (docs/profiles.md)"]
    mode = "asynchronous" if config.async_scheduling else "synchronous"
    waits = f"the GPU waits {host} for the host"
    if host == NO_HOST_TIME:
        waits = "no host time on top" if profile.knows_host_time else "host time is in the steps"
    return [f"scheduling: {mode}, {waits} (docs/profiles.md)"]


def _drafting(inputs: Inputs) -> dict[str, Hardware]:
    """What may speculate, by what a line about it begins with."""
    return {f"{pool.name}: ": pool.hardware for pool in inputs.pools} or {"": inputs.hardware}


def headline(inputs: Inputs) -> str:
    """Return lines on requests, hardware, offered share of its capacity, objectives."""
    from twinserve.profiles.evidence import describe_step_times
    from twinserve.sim.setup.offered_load import offered_load_of

    workload, config = inputs.workload, inputs.config
    span = workload.span_s
    when = f"over {span:,.0f} s, {len(workload) / span:.2f} requests/s" if span else "all at once"
    pool = f", best-effort pool of {config.pool}" if config.pool else ""
    source = workload.provenance.name + (
        " (embedded replica)" if workload.provenance.replica else ""
    )
    lines = [f"{source}: {len(workload):,} requests {when}{pool}"]
    if config.from_vllm is not None:
        from twinserve.sim.serve_line.settings import from_vllm

        lines = [*from_vllm(config.from_vllm, vars(config)).lines, *lines]
    for hardware, count in inputs.machines:
        engines = f"{count} x " if count > 1 else ""
        lines.append(engines + hardware.describe())
        lines.append(describe_step_times(hardware.profile, hardware.why))
    lines += _host_line(inputs)
    if config.shared_prefix:
        lines.append("attention: decodes read a shared prefix once (docs/profiles.md)")
    for name, hardware in _drafting(inputs).items():
        if (speculation := hardware.speculation) is not None:
            lines.append(name + speculation.describe(config.async_scheduling))
    apart = inputs.hand_over is not None  # how much such a fleet can serve is not known beforehand
    load = None if apart else offered_load_of(workload, inputs.machines)
    if load is not None:
        beside = ", the pool not counted" if config.pool else ""
        lines.append(f"requests ask for about {load:.0%} of estimated capacity{beside}")
    if inputs.front_end is not None:
        lines.append(inputs.front_end_said())
    rules = [t for t in workload.provenance.transforms if t.startswith("slo ")]
    return "\n".join(lines + rules)
