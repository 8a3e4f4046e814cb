"""Measure a GPU host that is at hand for minutes: `python -m twinserve.experiments.campaign STAGES --out DIR`.

STAGES are names joined by commas, each with its own limit in seconds if you like: steps:240,profile,validate:150. They
share one engine as far as they can. Everything is written as it is measured; call it again and it goes on where it was.

    steps     time steps of chosen composition                     (DIR/steps)
    swap      KV to the host and back                              (DIR/steps)
    profile   the profile that these make                          (DIR/profiles)
    validate  simulated, locked and free runs of traces            (DIR/runs)
    kernel    attention over blocks filled from either end         (DIR/kernel)
    report    tables and plots of all that is there; needs no GPU  (DIR/report)

docs/campaign.md says what each measures, and how to read the report.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from .campaign_setup import LOG, MODEL_SIZES, Deadline, Engines, Store

STAGES = ("steps", "swap", "profile", "validate", "kernel", "report")
POLICIES = ("vllm", "bros:chunk=2048")
LOADS = (0.8, 1.1, 0.5)


class Bad(ValueError):
    """Arguments that make no sense; one line."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 if a stage failed; 2 for wrong arguments."""
    try:
        options = _parser().parse_args(arguments)
        stages = _stages(options.stages)
        extra = _extra(options.engine_arg)
        traces = _traces(options.traces) if any(name == "validate" for name, _ in stages) else {}
    except Bad as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    store = Store(options.out, options.mirror)
    deadline = Deadline(options.time_limit)
    engines = Engines(store)
    before = signal.signal(signal.SIGTERM, _interrupted)  # what is measured is saved on the way out
    wrong = 0
    try:
        for name, limit in stages:
            own = deadline if limit is None else deadline.within(limit)
            if own.left <= 0:
                store.say(f"{name}: no time is left")
                continue
            store.say(f"== {name}, {own.left:.0f} s")
            try:
                _run(name, options, store, engines, own, extra, traces)
            except Exception as error:  # noqa: BLE001 - the other stages may still do their work
                store.failed(name, error)
                wrong += 1
                if _lost(error):
                    engines.forget()
    except KeyboardInterrupt:
        store.say("interrupted")
        wrong += 1
    finally:
        signal.signal(signal.SIGTERM, before)
        store.saved(LOG)
        if options.close:
            engines.close()
    return int(wrong > 0)


def _run(name: str, options, store: Store, engines: Engines, deadline: Deadline, extra: dict, traces: dict) -> None:
    key, graphs = options.model, not options.eager
    if name == "report":
        from .campaign_report import write_report

        store.say(f"report: {write_report(store, traces_of=options.traces)}")
        return
    if name == "kernel":
        from .campaign_kernel import measure_kernels

        measure_kernels(store, engines, key, deadline)
        return
    from . import campaign_steps as steps

    if name == "steps":
        steps.measure_steps(store, engines, key, graphs, deadline, options.rounds, options.seed, options.quick, **extra)
    elif name == "swap":
        steps.measure_swaps(store, engines, key, graphs, deadline, options.seed, **extra)
    elif name == "profile":
        steps.make_profile(store, key, graphs)
    else:
        from .campaign_runs import Plan, validate

        loads, policies = tuple(options.loads), tuple(options.policies)
        plan = Plan(traces, loads, policies, options.seconds, options.repeats)
        validate(store, engines, key, graphs, deadline, plan, not options.no_swap, **extra)


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
            raise Bad(f"{name!r} is no stage; there are {', '.join(STAGES)}")
        try:
            found.append((name, float(limit) if limit else None))
        except ValueError:
            raise Bad(f"{part!r}: write NAME or NAME:SECONDS") from None
    return found


def _extra(given: list[str]) -> dict:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Bad(f"--engine-arg {text}: give NAME=VALUE, for example gpu_memory_utilization=0.85")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found


def _traces(folder: Path | None) -> dict[str, Path]:
    """Name -> file, of all traces in `folder`."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".jsonl", ".csv")) if folder and folder.is_dir() else []
    if not files:
        raise Bad(f"--traces {folder}: stage validate needs a folder with .jsonl or .csv traces")
    return {path.stem.partition("_")[0]: path for path in files}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", metavar="STAGES")
    add("--out", type=Path, required=True, help="folder of the campaign")
    add("--time-limit", type=float, default=540.0, help="seconds for all stages together")
    add("--model", choices=sorted(MODEL_SIZES), default="8b")
    add("--eager", action="store_true", help="without CUDA graphs and compilation")
    add("--mirror", type=Path, help="folder that gets each part as one tar, renewed whenever something is written")
    add("--traces", type=Path, help="folder of trace files for validate")
    add("--policies", nargs="+", default=list(POLICIES))
    add("--loads", nargs="+", type=float, default=list(LOADS), help="shares of capacity, the most important first")
    add("--seconds", type=float, default=20.0, help="length of each window of a trace")
    add("--repeats", type=int, default=2, help="free runs of each")
    add("--rounds", type=int, default=8, help="over all points of stage steps, at most")
    add(
        "--no-swap",
        action="store_true",
        help="validate on an engine without host memory, for policies that do not swap",
    )
    add("--engine-arg", action="append", default=[], metavar="NAME=VALUE", help="further vLLM engine argument")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="fewer points for stage steps: powers of four")
    add(
        "--no-close",
        dest="close",
        action="store_false",
        help="end without an orderly stop of the engine, which takes seconds",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
