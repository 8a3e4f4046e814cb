"""`twinserve sweep`: many runs, over combinations of settings, and their tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from twinserve.sim.cli.options import (
    ConfigFile,
    Doing,
    Flag,
    Goodput,
    Json,
    Measured,
    Out,
    Percentiles,
    Quiet,
    Starting,
    Writing,
)
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup.config import SettingsError, SimulationConfig

if TYPE_CHECKING:
    from twinserve.sim.sweep.combinations import Run
    from twinserve.sim.sweep.executors import Workers
    from twinserve.sim.sweep.repeats import Repeat
    from twinserve.sim.sweep.sweep import Sweep

_Several = Annotated[list[str] | None, Parameter(negative=""), Starting]
_DEFAULTS = SimulationConfig.model_construct()  # nothing to check: help need not wait for that
_RESUMABLE = "interrupted; finished runs are kept: the same command goes on from there"
_LEAST_ENDED, _LEAST_SHARE = 4, 0.05  # of the runs, after the first: before a time left is said
_SOME_FAILED = 1  # exit status


def sweep(
    *,
    config: SimulationConfig = _DEFAULTS,
    params: Annotated[list[Path] | None, Parameter(negative=""), Starting] = None,
    grid: _Several = None,
    link_vars: Annotated[str, Starting] = "",
    seeds: Annotated[int, Starting] = 1,
    repeat: Annotated[str | None, Starting] = None,
    baseline: Annotated[str | None, Measured] = None,
    preset: Annotated[str | None, Starting] = None,
    config_file: ConfigFile = None,
    goodput: Goodput = None,
    warmup: Annotated[str | None, Measured] = None,
    percentiles: Percentiles = None,
    error_bars: Annotated[Flag, Measured] = False,
    out: Out = None,
    workers: Annotated[int | None, Doing] = None,
    executor: Annotated[Literal["local", "ray"], Doing] = "local",
    plot: Annotated[
        list[str] | None, Parameter(consume_multiple=True, negative=""), Writing
    ] = None,
    retry_failed: Annotated[Flag, Doing] = False,
    any_version: Annotated[Flag, Doing] = False,
    dry_run: Annotated[Flag, Doing] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run simulate over combinations of its settings: files and grids are crossed. Finished runs
    are kept; the same command continues.

    For example:

    $ twinserve sweep -t sharegpt --grid load=0.5,0.7,0.9 -p vllm -p bros --out swept
    $ twinserve sweep --preset bros-hybrid --grid rate=4,8 --seeds 3 --out hybrid
    $ twinserve sweep --params settings.json --dry-run

    Args:
        config: Settings of all runs; those of a combination win.
        params: JSON file of combinations, as of vllm bench sweep: [{"policy": "bros", "load": 0.7},
            ...] or {"NAME": {...}, ...}.
        grid: NAME=VALUE,VALUE of one setting; policy=vllm,bros:chunk=2048,kv=paged has two values,
            as option=value goes with what is before it; a JSON list, NAME=["...", "..."], where
            values have other commas. Given again, a name gets further values.
        link_vars: Only combinations in which these settings have equal values: SETTING=SETTING,...
        seeds: Runs of each combination, with --seed, --seed + 1, ...
        repeat: Instead of --seeds, of a recorded trace: windows=5 runs each combination in five
            windows of the trace, blocks=20 once, with intervals from a bootstrap over twenty blocks
            of its time.
        baseline: Show differences to the runs with this value, as policy=vllm, paired and tested.
        preset: A published setting, which other flags modify: bros-hybrid.
        config_file: Settings from a former run's run.json; flags given here win.
        goodput: Objectives for goodput in milliseconds, as in vLLM: ttft:500 tpot:50.
        warmup: Leave out of the metrics the first requests (500) or seconds (60s).
        percentiles: Percentiles of the latencies: 50,90,99.9.
        error_bars: Each run four times more with step times off by their expected error: tables and
            plots show how far its numbers move.
        out: Folder for tables and plots; finished runs are kept there.
        workers: Processes. [default: one for each core]
        executor: Processes of this machine, or a Ray cluster: that of RAY_ADDRESS, else one of this
            machine.
        plot: What to draw: x=load y=classes.rt.mean_ttft_ms,output_throughput; names as in
            table.csv; size=column for one column of a paper; title=TEXT above the plot.
        retry_failed: Run failed runs again.
        any_version: Also use finished runs of other versions of the code.
        dry_run: List the runs, and run nothing.
        as_json: Print the table as JSON and nothing else: a list of combinations, with the names of
            table.csv.
        quiet: No progress.
    """
    from twinserve.sim.results.metrics_objectives import parse_goodput
    from twinserve.sim.setup.objectives import metrics_options
    from twinserve.sim.sweep.baseline import check_baseline, read_baseline
    from twinserve.sim.sweep.draw import check_x, parse_plot
    from twinserve.sim.sweep.executors import check_count
    from twinserve.sim.sweep.output import axes_of, own_names
    from twinserve.sim.sweep.repeats import parse_repeat
    from twinserve.sim.sweep.sweep import Sweep

    check_count("--seeds", seeds)
    check_count("--workers", workers)
    objectives = None if goodput is None else parse_goodput(goodput)
    options = metrics_options(objectives, warmup, None, percentiles)
    x, names, *look = parse_plot(plot or [])
    copies = parse_repeat(repeat, seeds)
    runs = runs_of_flags(config, params or [], grid or [], link_vars, copies, preset, config_file)
    check_x(axes_of(runs), x)
    base = None if baseline is None else read_baseline(baseline, axes_of(runs))
    if base is not None:
        values = [getattr(r.config, base[0], r.axes.get(base[0])) for r in runs]
        check_baseline(base, [*values, *own_names(runs).values()], copies)
    if dry_run:
        _list(
            runs, out and Sweep(runs, out, any_version, retry_failed, options, error_bars, copies)
        )
        return
    if out is None:
        raise SettingsError("--out DIR is needed: finished runs are kept there")
    if (out / "run.json").exists():
        raise SettingsError(f"--out {out}: is the folder of a run; name another one")
    found = Sweep(runs, out, any_version, retry_failed, options, error_bars, copies)
    progress, before = RunProgress(shown=not (quiet or as_json)), len(found.kept)
    progress.begin("sweep", before / len(runs))
    enough = max(_LEAST_ENDED, _LEAST_SHARE * (len(runs) - before))

    def report(done: int, failed: int) -> None:
        if done == before + 1:  # processes have started and read their traces
            progress.pace_from(done / len(runs))
        lost = f", {failed:,} failed" if failed else ""
        said = f"{done:,} of {len(runs):,} runs{lost}"
        progress.part(done / len(runs), said, known=done - before - 1 >= enough)

    try:
        with progress:
            found.run(lambda count: _executor(executor, workers, count), report)
    except Exception:
        raise
    except BaseException as ended:  # Ctrl-C or SIGTERM: what it says is what the user is told
        ended.args = (_RESUMABLE,)
        raise
    _write(found, out, x, names, base, look, as_json)


def runs_of_flags(
    config: SimulationConfig,
    params: list[Path],
    grid: list[str],
    link_vars: str,
    copies: Repeat,
    preset: str | None,
    config_file: Path | None,
) -> list[Run]:
    """Return all runs, checked as far as possible without running them. Raises SettingsError."""
    from twinserve.sim.setup.presets import defaults, over
    from twinserve.sim.sweep import combinations as of
    from twinserve.sim.sweep.sweep import check_names

    given = {name: getattr(config, name) for name in config.model_fields_set}
    if config.from_vllm is not None:
        from twinserve.sim.serve_line.settings import from_vllm

        # each combination takes them anew: they depend on its GPU
        said = from_vllm(config.from_vllm, vars(config)).settings
        given = {name: value for name, value in given.items() if said.get(name) != value}
    sources = [of.read_params(file) for file in params]
    grids = of.read_grid(grid)
    if len(config.policy) > 1:
        sources.append(of.of_policies(given.pop("policy")))
    crossed = of.crossed([*sources, *grids], of.read_links(link_vars))
    base = defaults(preset, config_file, config.model_fields_set)

    def build(settings: dict) -> SimulationConfig:
        found = over(base, SimulationConfig(**{**given, **settings}))
        check_names(found)
        return found

    return of.runs_of(crossed, copies, build)


def _list(runs: list[Run], found: Sweep | None) -> None:
    for number, run in enumerate(runs, 1):
        print(f"{number}: {run}")
    print(f"{len(runs)} runs" + (f", {len(found.todo())} of them still to be run" if found else ""))


def _executor(kind: str, workers: int | None, count: int) -> Workers:
    from twinserve.sim.sweep.executors import RayWorkers, processes

    if kind == "ray":
        return RayWorkers(workers or os.cpu_count() or 1)
    return processes(workers, count)


def _write(
    found: Sweep,
    out: Path,
    x: str | None,
    names: list[str],
    base: tuple[str, str] | None,
    look: list[str],
    as_json: bool,
) -> None:
    """Write tables and plots, print the table. Raises SystemExit if a run failed."""
    from twinserve.sim.sweep import draw, output
    from twinserve.sim.sweep.baseline import differences
    from twinserve.traces.write import write_atomically

    results, axes = found.results(), output.axes_of(found.runs)
    frame = output.runs_frame(results, axes)
    failures = output.failures_frame(results, axes)
    table = output.seed_table(frame, axes) if len(frame) else frame
    about = output.about(found.runs, found.options, found.error_bars, found.repeat)
    output.write_results(out, frame, table, failures, about)
    compared = frame[:0]
    if len(frame):
        if base is not None:
            shown = [n for n in dict.fromkeys([*output.COLUMNS, *names]) if n in frame]
            own = output.own_names(found.runs)
            compared = differences(frame, axes, (base[0], own.get(base[1], base[1])), shown)
            write_atomically(out / "differences.csv", compared.to_csv(index=False).encode())
        chosen, drawn = x or draw.choose_x(table, axes), draw.choose_y(table, names)
        if chosen is not None and drawn:
            draw.write_plots(out, draw.plot(table, axes, chosen, drawn, *look))
    if as_json:
        sys.stdout.write(output.printed(frame, table, axes, compared, about["objectives"]))
    elif len(frame):
        output.print_all(frame, table, axes, names, compared, about["objectives"])
    if len(failures):
        print(
            f"{len(failures)} of {len(found.runs)} runs failed, the first with: "
            f"{failures['error'].iloc[0]} (all: {out / 'failures.csv'}; --retry-failed runs them "
            "again)",
            file=sys.stderr,
        )
        sys.exit(_SOME_FAILED)
