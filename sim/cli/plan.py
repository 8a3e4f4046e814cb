"""`twinserve plan`: which GPUs, and how many, for a trace and its objectives."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from twinserve.sim.cli.options import (
    MISSED,
    Doing,
    FailOnMiss,
    Flag,
    Human,
    Json,
    Out,
    Quiet,
    Starting,
    Whole,
    Writing,
)
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup import option_groups as groups
from twinserve.sim.setup.config import SettingsError, SimulationConfig, StepTimesName

_DEFAULTS = SimulationConfig.model_construct()
_Candidates = Parameter(group=groups.HARDWARE)
_Limits = Parameter(group=groups.MEMORY, help="As of simulate.")
_SAME = Parameter(help="As of simulate.")
_Scheduling = Parameter(group=groups.POLICIES)
_Failing = Parameter(group=groups.FAILURES)
_Traffic = Parameter(group=groups.REQUESTS)


def plan(
    *,
    model: Annotated[str | None, Starting] = None,
    trace: Annotated[list[str], Parameter(name=["--trace", "-t"], negative=""), Starting],
    slo: Annotated[str, Starting],
    from_vllm: Annotated[str | None, Starting] = None,
    gpus: Annotated[str, _Candidates] = "h100,h200,l40s,a100",
    tp: Annotated[
        str, Parameter(name=["--tp", "-tp", "--tensor-parallel-size"]), _Candidates
    ] = "1,2,4,8",
    policy: Annotated[
        list[str] | None, Parameter(name=["--policy", "-p"], negative=""), _Scheduling
    ] = None,
    router: Annotated[
        list[str] | None, Parameter(name=["--router", "-r"], negative=""), _Scheduling
    ] = None,
    prices: Annotated[Path | None, _Candidates] = None,
    grow: Annotated[float, _Traffic] = 1.0,
    rate: Annotated[float | None, _Traffic] = None,
    format: Annotated[str | None, _Traffic, _SAME] = None,
    columns: Annotated[str | None, _Traffic] = None,
    peak: Annotated[float, _Traffic] = 300.0,
    lead: Annotated[float, _Traffic] = 30.0,
    seeds: Annotated[Whole, _Traffic] = 1,
    most_gpus: Annotated[Whole, _Candidates] = 512,
    pool: Annotated[Whole, _Traffic] = 0,
    survive: Annotated[Whole, _Failing] = 0,
    on_failure: Annotated[Literal["error", "retry", "migrate"], _Failing] = "error",
    detection: Annotated[float, _Failing, _SAME] = 0.0,
    step_times: Annotated[StepTimesName, _Candidates, _SAME] = "auto",
    front_end: Annotated[str, _Candidates, _SAME] = "none",
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], _Limits] = "auto",
    gpu_memory_utilization: Annotated[float | None, _Limits] = None,
    engine_version: Annotated[str | None, _Limits] = None,
    enforce_eager: Annotated[Flag, _Limits] = False,
    max_model_len: Annotated[Human | None, _Limits] = None,
    max_num_seqs: Annotated[int | None, _Limits] = None,
    max_num_batched_tokens: Annotated[Human | None, _Limits] = None,
    async_scheduling: Annotated[bool, _Scheduling, _SAME] = True,
    prefill_decode: Annotated[Flag, _Candidates] = False,
    all_sizes: Annotated[Flag, Parameter(name="--all"), Doing] = False,
    workers: Annotated[int | None, Doing] = None,
    emit: Annotated[Literal["vllm", "kubernetes", "llm-d", "compose"] | None, Writing] = None,
    out: Out = None,
    fail_on_miss: FailOnMiss = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the cheapest GPUs that meet objectives at the peak of a recorded trace, ranked, with
    start commands.

    For example:

    $ twinserve plan --model llama-3.1-8b -t azure-2023:conv --slo "ttft p90 < 1 s"
    $ twinserve plan --model llama-3.1-8b -t day.csv --slo "tpot p90 < 50 ms" --gpus h100,l40s

    Args:
        model: Model of the catalogue, a config.json, or an id in the local Hugging Face cache; or
            the file of a profile, as calibrate writes it: then its GPUs are the only ones.
        from_vllm: As of simulate: model and limits of that server, if it states them. Flags win.
        trace: Recorded trace, name or file, or a generated one at --rate; given again, the plan
            holds on the peak of each.
        slo: Objectives with percentiles: "ttft p90 < 1 s, tpot p90 < 50 ms".
        gpus: GPU kinds to choose from.
        tp: Tensor-parallel degrees of a replica.
        policy: Policy, with options after a colon; several are compared. [default: vllm]
        router: Router of requests to replicas; several are compared. [default: least-requests]
        prices: CSV with columns gpu and usd_per_hour, instead of the table that ships
            (docs/plan.md).
        grow: Factor on the rate of the recording.
        rate: Requests a second of a generated trace (fixed:1024,128, sharegpt, lmsys). [default:
            10]
        columns: As of simulate: columns of a CSV file, arrival=ts,prompt=in,output=out.
        peak: Seconds of the peak that are judged.
        lead: Seconds before the peak that fill the engines.
        seeds: Draws of the peak for each sized row: as recorded, and with lengths dealt anew.
        most_gpus: Most GPUs of a candidate.
        pool: Offline requests in each batch of a closed loop: also plan a day with this loop on the
            same GPUs. 0: none.
        survive: Replicas that fail when the peak begins and stay down. The plan keeps the
            objectives without them.
        on_failure: As of simulate: what happens to their requests.
        prefill_decode: For each row, also try prefill apart from decode on the same GPUs.
        all_sizes: Size every candidate, even if another one is certainly cheaper.
        workers: Processes; by default one for each core.
        emit: Also write into --out a file that starts the servers: serve.sh (one replica),
            kubernetes.yaml, values.yaml (of llm-d's modelservice chart) or compose.yaml.
        out: Folder for plan.json, pareto.png and start.sh.
        fail_on_miss: Exit with status 3 if no GPUs keep the objectives.
        as_json: Print plan.json and nothing else.
        quiet: No progress.
    """
    given = dict(locals())
    from twinserve.sim.plan.document import described
    from twinserve.sim.plan.planner import make_plan
    from twinserve.sim.plan.prices import load_prices
    from twinserve.sim.plan.question import SETTINGS, question_of
    from twinserve.sim.plan.show import print_plan
    from twinserve.sim.plan.start import emitted_file, script
    from twinserve.sim.plan.waves import WAVE
    from twinserve.sim.results.files import dump_json, plain
    from twinserve.sim.results.folders import resolved, try_to_write
    from twinserve.sim.sweep.executors import at_work, check_count, local
    from twinserve.traces.write import write_together

    check_count("--workers", workers)
    if emit is not None and out is None:
        raise SettingsError("--emit writes a file into the results; name their folder with --out")
    given |= {"gpus": _list("gpus", gpus), "tp": _counts("tp", tp)}
    given |= {"prices": None if prices is None else str(prices)}
    settings = {n: given[n] for n in SETTINGS if given[n] != getattr(_DEFAULTS, n)}
    question, lines = question_of(given, settings)
    if lines and not (quiet or as_json):
        print("\n".join(lines), file=sys.stderr)
    table = load_prices(prices)
    file = None if out is None else resolved(out) / "plan.json"
    if file is not None:
        try_to_write(file.parent)
    with RunProgress(shown=not (quiet or as_json)) as progress:
        progress.begin("plan")
        with at_work(local(workers, WAVE)) as processes:
            found = make_plan(
                question,
                table,
                processes,
                lambda trials, left: progress.part(0.0, f"{trials} trials, {left} candidates left"),
            )
    document = plain(described(found, table))
    text = dump_json(document)
    if file is not None:
        start = script(found)
        scripts = [] if start is None else [(file.parent / "start.sh", start.encode())]
        if emit is not None:
            name, content = emitted_file(emit, found)
            scripts.append((file.parent / name, content.encode()))
        pictures = _pictures(document, file.parent)
        write_together([*pictures, *scripts, (file, text.encode())])
    if as_json:
        sys.stdout.write(text)
    else:
        print_plan(found, table)
    if fail_on_miss and not any(row.status == "enough" for row in found.rows):
        sys.exit(MISSED)


def _pictures(document: dict, folder: Path) -> list[tuple[Path, bytes]]:
    """Of what plan.json says: cost against slack, where some row is enough."""
    from twinserve.sim.report.plan_part import page_charts
    from twinserve.sim.report.static import picture

    charts = {chart.key: chart for chart in page_charts(document)}
    return [(folder / "pareto.png", picture(charts[k])) for k in charts if k == "plan-front"]


def _list(flag: str, text: str) -> list[str]:
    """Names between commas. Raises SettingsError for an empty one."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise SettingsError(f"--{flag} {text!r}: a name is empty; write names with commas between")
    return names


def _counts(flag: str, text: str) -> list[int]:
    counts = []
    for word in _list(flag, text):
        if not (word.isascii() and word.isdigit()) or len(word) > 4:
            raise SettingsError(
                f"--{flag} {text!r}: {word!r} is no count; write whole numbers, as 1,2,4,8"
            )
        counts.append(int(word))
    return counts
