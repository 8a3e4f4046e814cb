"""Measure a GPU host that is at hand for minutes: `python -m twinserve.experiments.campaign STAGES
--out DIR`.

STAGES are names joined by commas, each with its own limit in seconds if you like:
steps:240,validate:150. They share one engine as far as they can. Everything is written as it is
measured; call it again to continue.

    plan      the runs of validate, simulated; needs no GPU        (DIR/runs)
    steps     time steps of chosen composition                     (DIR/steps)
    traffic   steps of whole requests, and our loop between them   (DIR/steps)
    validate  locked and free runs of traces                       (DIR/runs)
    swap      KV to the host and back                              (DIR/steps)
    host      planning beside the running step, and without that   (DIR/steps)
    profile   the profile that these make; needs no GPU            (DIR/profiles)
    report    tables of all that is there; needs no GPU            (DIR/report)
    free      free runs, simulated with each profile; needs no GPU (DIR/report)

docs/calibrate.md says what each measures, and how to read the report.
"""

import argparse
import faulthandler
import os
import signal
import sys
from pathlib import Path

from twinserve.backends.live.versions import LiveEngineError
from twinserve.errors import worded
from twinserve.experiments.campaign.setup import (
    MODEL_SIZES,
    Deadline,
    Engines,
    OutOfTime,
    StageError,
    Store,
    default_policies,
)
from twinserve.policies.names import RegistryError
from twinserve.sim.cli.live import engine_arguments
from twinserve.sim.setup.config import SettingsError

STAGES = ("plan", "steps", "traffic", "validate", "swap", "host", "profile", "report", "free")
ON_ENGINE = ("steps", "traffic", "validate", "swap", "host")
ON_TRACES = ("plan", "validate", "free")
LOADS = (0.8, 1.1, 0.5)
GRACE_S = 20.0  # after the limit, to save and to stop; then the process ends as it is
# Engine arguments that a campaign sets itself, and what says them.
OWN_ARGUMENTS = {
    "model": "--model",
    "enforce_eager": "--eager",
    **dict.fromkeys(
        ("dtype", "load_format", "block_size", "max_num_seqs", "max_num_batched_tokens",
         "max_model_len", "enable_prefix_caching", "scheduler_cls", "async_scheduling",
         "kv_transfer_config"),
        "the sizes in experiments/campaign/setup.py",
    ),
}  # fmt: skip


OPTIONS: dict[str, dict] = {
    "stages": {"metavar": "STAGES"},
    "--out": {"type": Path, "required": True, "help": "folder of the campaign"},
    "--time-limit": {"type": float, "default": 540.0, "help": "seconds for all stages together"},
    "--model": {"choices": sorted(MODEL_SIZES), "default": "8b"},
    "--eager": {"action": "store_true", "help": "without CUDA graphs and compilation"},
    "--traces": {"type": Path, "help": "folder of trace files for plan, validate and free"},
    "--policies": {"nargs": "+", "help": "the two most important first; vllm, bros, others"},
    "--loads": {"nargs": "+", "type": float, "default": list(LOADS),
                "help": "shares of capacity, the most important first"},
    "--seconds": {"type": float, "default": 15.0, "help": "length of each window of a trace"},
    "--repeats": {"type": int, "default": 2, "help": "free runs of each"},
    "--rounds": {"type": int, "default": 8, "help": "over all points of stage steps, at most"},
    "--no-swap": {"action": "store_true", "help": "validate on an engine without host memory"},
    "--engine-arg": {"action": "append", "default": [], "metavar": "NAME=VALUE",
                     "help": "further vLLM engine argument"},
    "--seed": {"type": int, "default": 0},
    "--quick": {"action": "store_true", "help": "fewer points for stage steps"},
    "--no-close": {"dest": "close", "action": "store_false",
                   "help": "end without an orderly stop of the engine, which takes seconds"},
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 if a stage failed; 2 for wrong arguments, or a package that is missing."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    options = _parser().parse_args(arguments)
    deadline = Deadline(options.time_limit)  # what is imported takes its time, too
    # What hangs outside of Python hears no signal.
    faulthandler.dump_traceback_later(
        options.time_limit + GRACE_S, exit=True, file=sys.__stderr__ or 2
    )
    try:
        stages = _stages(options.stages)
        extra = engine_arguments(options.engine_arg)
        on_traces = any(name in ON_TRACES for name, _ in stages)
        traces = _traces(options.traces) if on_traces else {}
        _check(options, [name for name, _ in stages], extra)
        store = Store(options.out)
        return _go(options, stages, store, deadline, extra, traces)
    except (LiveEngineError, RegistryError, SettingsError, StageError) as error:
        print(f"error: {worded(error)}", file=sys.stderr)
        return 2
    finally:
        faulthandler.cancel_dump_traceback_later()


def _go(
    options: argparse.Namespace,
    stages: list[tuple[str, float | None]],
    store: Store,
    deadline: Deadline,
    extra: dict,
    traces: dict[str, Path],
) -> int:
    engines = Engines(store)
    before = signal.signal(signal.SIGTERM, _interrupted)  # what is measured is saved on the way out
    wrong = 0
    try:
        for name, limit in stages:
            own = deadline if limit is None else deadline.within(limit)
            if own.near:
                store.say(f"{name}: skipped, {max(own.left, 0.0):.0f} s left are too few")
                continue
            store.say(f"== {name}, {own.left:.0f} s")
            try:
                _run(name, options, store, engines, own, extra, traces)
            except OutOfTime as error:
                store.say(f"{name}: {error or 'out of time'}")
            except Exception as error:  # noqa: BLE001 - the other stages may still do their work
                store.failed(name, error)
                wrong += 1
                if _lost(error):
                    engines.close()
    except KeyboardInterrupt:
        store.say("interrupted")
        wrong += 1
    finally:
        signal.signal(signal.SIGTERM, before)
        if options.close and deadline.left > 0:
            engines.close()
    return int(wrong > 0)


def _check(options: argparse.Namespace, stages: list[str], extra: dict) -> None:
    """Everything that can be known to be wrong before the first engine starts. Raises what `main`
    catches."""
    try:
        from twinserve.backends.live.measure.measure import check_engine_arguments
        from twinserve.experiments.campaign.needs import require
    except Exception as error:  # noqa: BLE001 - whatever happens at an import
        said = " ".join(str(error).split())
        raise SettingsError(
            f"the campaign cannot be imported: {type(error).__name__}: {said}"
        ) from error

    options.policies = options.policies or list(default_policies(options.model))
    require(stages, options.policies)
    if any(stage in ON_ENGINE for stage in stages):
        check_engine_arguments(extra, OWN_ARGUMENTS)
        import torch

        if not torch.cuda.is_available() and (options.model != "tiny" or not options.eager):
            raise SettingsError("torch finds no GPU; try a CPU with --model tiny --eager")


def _run(
    name: str,
    options: argparse.Namespace,
    store: Store,
    engines: Engines,
    deadline: Deadline,
    extra: dict,
    traces: dict[str, Path],
) -> None:
    from twinserve.experiments.campaign import runs, steps

    key, graphs = options.model, not options.eager
    where = store, engines, key, graphs, deadline
    loads, policies = tuple(options.loads), tuple(options.policies)
    plan = runs.Plan(traces, loads, policies, options.seconds, options.repeats)
    if name == "plan":
        runs.plan_runs(store, key, graphs, plan)
    elif name == "validate":
        runs.validate(*where, plan, not options.no_swap, **extra)
    elif name == "steps":
        steps.measure_steps(*where, options.rounds, options.seed, options.quick, **extra)
    elif name == "traffic":
        steps.measure_traffic(*where, options.seed, options.quick, **extra)
    elif name == "swap":
        steps.measure_swaps(*where, options.seed, **extra)
    elif name == "profile":
        steps.make_profile(store, key, graphs)
    elif name == "host":
        from twinserve.experiments.campaign.host import measure_host

        measure_host(*where, **extra)
    elif name == "free":
        from twinserve.experiments.campaign.free import compare_free

        compare_free(store, key, graphs, traces)
    else:
        from twinserve.experiments.campaign.report import write_report

        store.say(f"report: {write_report(store)}")


def _interrupted(number, frame) -> None:
    raise KeyboardInterrupt


def _lost(error: BaseException) -> bool:
    """Whether the engine cannot be used any more: CUDA errors stay."""
    return "CUDA" in str(error) or type(error).__name__ == "EngineDeadError"


def _stages(text: str) -> list[tuple[str, float | None]]:
    found = []
    for part in text.split(","):
        name, _, limit = part.partition(":")
        if name not in STAGES:
            raise SettingsError(f"{name!r} is no stage; there are {', '.join(STAGES)}")
        try:
            found.append((name, float(limit) if limit else None))
        except ValueError:
            raise SettingsError(f"{part!r}: write NAME or NAME:SECONDS") from None
    return found


def _traces(folder: Path | None) -> dict[str, Path]:
    """Name -> file, of all traces in `folder`."""
    files = (
        sorted(p for p in folder.iterdir() if p.suffix in (".jsonl", ".csv"))
        if folder and folder.is_dir()
        else []
    )
    if not files:
        raise SettingsError(
            f"--traces {folder}: these stages need a folder with .jsonl or .csv traces"
        )
    return {path.stem.partition("_")[0]: path for path in files}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for name, how in OPTIONS.items():
        add(name, **how)
    return parser
