"""`twinserve limit`: the largest load at which a server meets its objectives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from twinserve.sim.cli.options import ConfigFile, Doing, Flag, Json, Out, Quiet, Starting, Whole
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup.config import SettingsError, SimulationConfig

if TYPE_CHECKING:
    from twinserve.sim.sweep.combinations import Run

_Several = Annotated[list[str] | None, Parameter(negative=""), Starting]
_DEFAULTS = SimulationConfig.model_construct()  # nothing to check: help need not wait for that


def limit(
    *,
    config: SimulationConfig = _DEFAULTS,
    concurrency: Annotated[Flag, Starting] = False,
    grid: _Several = None,
    params: Annotated[list[Path] | None, Parameter(negative=""), Starting] = None,
    seeds: Annotated[Whole, Starting] = 1,
    config_file: ConfigFile = None,
    workers: Annotated[int | None, Doing] = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the largest request rate, or number of clients, at which a server meets its objectives.

    The command also says which objective breaks first, and gives latency over load. It compares
    several settings or GPUs.

    For example:

    $ twinserve limit --from-vllm start.sh --gpu h100 -t sharegpt --slo "ttft p90 < 1 s"
    $ twinserve limit --profile llama-3.1-8b@h100 -t sharegpt --slo "tpot p90 < 20 ms" --concurrency
    $ twinserve limit -t sharegpt --slo "ttft p90 < 1 s" --grid profile=qwen3-8b@h100,qwen3-8b@l40s

    Args:
        config: Settings of the server and its requests. --slo needs percentiles. By default,
            --requests last two minutes at the estimated capacity.
        concurrency: Find the largest number of clients. Each sends its next request when its last
            one has ended.
        grid: NAME=VALUE,VALUE of one setting, as of sweep: a limit for each.
        params: JSON file of combinations, as of sweep: a limit for each.
        seeds: Draws of the requests, judged together: the interval gets narrower.
        config_file: Settings from a former run's run.json; flags given here win.
        workers: Processes; by default one for each core.
        out: Folder for limit.json, a picture for each objective, and front.png.
        as_json: Print limit.json and nothing else.
        quiet: No progress.
    """
    from twinserve.sim.cli.sweep import runs_of_flags
    from twinserve.sim.plan.limit import find_limits
    from twinserve.sim.plan.limit_show import described, print_limits
    from twinserve.sim.plan.waves import WAVE
    from twinserve.sim.report.limit_part import limit_charts
    from twinserve.sim.report.static import picture
    from twinserve.sim.results.files import dump_json, plain
    from twinserve.sim.results.folders import resolved, try_to_write
    from twinserve.sim.sweep.executors import at_work, check_count, local
    from twinserve.sim.sweep.repeats import Repeat
    from twinserve.traces.write import write_together

    check_count("--seeds", seeds)
    check_count("--workers", workers)
    if config.slo is None:
        raise SettingsError("no objectives; give --slo, as --slo 'ttft p90 < 1 s'")
    runs = runs_of_flags(config, params or [], grid or [], "", Repeat(), None, config_file)
    if len({run.config.slo for run in runs}) > 1:
        raise SettingsError(
            "--grid slo: limits under different objectives cannot be compared; drop it"
        )
    folder = None if out is None else resolved(out)
    if folder is not None:
        try_to_write(folder)
    with RunProgress(shown=not (quiet or as_json)) as progress:
        for line in _served(runs) if not as_json else ():
            progress.say(line)
        progress.begin("limit")
        with at_work(local(workers, WAVE)) as processes:
            found = find_limits(
                [(run.axes, run.config) for run in runs],
                seeds,
                concurrency,
                processes,
                lambda done, left: progress.part(0.0, f"{done} runs, {left} searches left"),
            )
    document = plain(described(found))
    text = dump_json(document)
    if folder is not None:
        pictures = [
            (folder / f"{chart.key.removeprefix('limit-')}.png", picture(chart))
            for chart in limit_charts(document)
        ]
        write_together([*pictures, (folder / "limit.json", text.encode())])
    if as_json:
        sys.stdout.write(text)
    else:
        print_limits(found)


def _served(runs: list[Run]) -> list[str]:
    """What was taken from the servers' own words."""
    from twinserve.sim.serve_line.settings import from_vllm

    said = [c for c in (run.config for run in runs) if c.from_vllm is not None]
    lines = [line for c in said for line in from_vllm(str(c.from_vllm), vars(c)).lines]
    return list(dict.fromkeys(lines))
