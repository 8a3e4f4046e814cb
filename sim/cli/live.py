"""`twinserve replay`: a simulated run, executed by a live vLLM engine."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from twinserve.formats import parse_json, whole_file
from twinserve.sim.cli.options import (
    Engine,
    EngineArgs,
    Flag,
    Json,
    Out,
    Overwrite,
    Quiet,
    Starting,
    Writing,
)
from twinserve.sim.cli.progress import RunProgress

if TYPE_CHECKING:
    from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
    from twinserve.sim.results.decisions import DecisionLog
    from twinserve.sim.twin.replay import LockedReplay

TINY = "tiny"
# models that come with the package: backends/live/engine/tiny_model.py
SEEDED = (TINY, "deep", "small")


def replay(
    run: Path,
    *,
    model: Annotated[str, Starting],
    mode: Annotated[Literal["locked", "free", "apart"], Starting] = "locked",
    pace: Annotated[Literal["wall", "measured"], Engine] = "wall",
    weights: Annotated[Literal["safetensors", "dummy", "auto"], Engine] = "safetensors",
    dtype: Annotated[str, Engine] = "auto",
    graphs: Annotated[Flag, Engine] = False,
    physical: Annotated[Flag, Engine] = False,
    engine_arg: EngineArgs = None,
    steps: Annotated[Path | None, Writing] = None,
    decisions: Annotated[Flag, Writing] = False,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Execute a simulated run on a live vLLM engine in this process.

    A locked replay follows the run's decision log step by step; vLLM must schedule exactly the
    plans. In a free replay the requests arrive again, the policy decides on the live state, and
    metrics are compared with the simulated ones. If the engine departs from a plan, or an answer
    lacks tokens, the command writes all results and then fails.

    For example:

    $ simulate --profile cpu.json -t poisson --rate 20 --requests 40 --decisions --out run
    $ twinserve replay run --model tiny
    $ twinserve replay run --model tiny --mode free --out live

    Args:
        run: Folder that `simulate --out` wrote; for a locked replay with --decisions.
        model: Folder of a model (config.json, weights), or `tiny`, `deep` or `small`: Llamas of
            0.4, 1.4 and 18 M parameters and 2, 8 and 8 layers, seeded weights.
        mode: locked, free or apart. apart: for a fleet with prefill apart from decode. Each replica
            is a live engine, which decides by itself and hands real KV over (docs/kv_transfer.md).
        pace: Of a free replay. wall: requests arrive in wall time. measured: the clock advances by
            each step's measured time and jumps over idle time.
        weights: safetensors, dummy (random) or auto.
        dtype: Of weights and KV; auto: float32 for tiny, deep and small, else the model's.
        graphs: CUDA graphs and compilation.
        physical: Keep KV at the ledger's own places: in its blocks and slots (bidirectional), or
            in its cells, layer by layer (layerwise). By default vLLM keeps KV in a larger pool
            of its own, and the ledger only accounts for it.
        engine_arg: NAME=VALUE, further vLLM engine arguments; may be repeated.
        steps: Write the steps of a locked replay, predicted and measured, to this parquet file.
        decisions: Also write decisions.jsonl.gz, every plan of a free replay, for a locked one.
        out: Folder for the results of a free replay.
        overwrite: Replace the earlier run in --out.
        as_json: Print the result as JSON and nothing else.
        quiet: No progress.
    """
    from twinserve.sim.setup.config import SettingsError

    if mode == "apart" and (given := [n for n, v in (("--out", out), ("--steps", steps)) if v]):
        raise SettingsError(f"{given[0]}: --mode apart writes no files; give --json, or drop it")
    if mode == "locked" and out is not None:
        raise SettingsError(
            "--out is for a free replay; a locked one writes its steps with --steps FILE.parquet"
        )
    if mode == "free" and steps is not None:
        raise SettingsError(
            "--steps is for a locked replay; a free one writes a whole run with --out DIR"
        )
    if decisions and (mode == "locked" or out is None):
        raise SettingsError(
            "--decisions writes the plans of a free replay into its results: give --mode free and "
            "--out DIR, or drop it"
        )
    options = {
        "weights": weights,
        "dtype": dtype,
        "graphs": graphs,
        "physical": physical,
        "extra": engine_arguments(engine_arg),
    }
    if mode == "apart":
        replay_apart(run, model, options, as_json, quiet)
    elif mode == "locked":
        _locked(run, model, options, steps, as_json, quiet)
    else:
        _free(run, model, options, pace == "wall", out, overwrite, as_json, quiet, decisions)


@contextlib.contextmanager
def live_engine(settings: LiveSettings, model: str) -> Iterator[VllmEngine]:
    """Provide a running engine with `model` (a folder, or one of SEEDED)."""
    from twinserve.backends.live.engine.engine import VllmEngine
    from twinserve.backends.live.versions import installed_vllm

    installed_vllm()
    with with_model(settings, model) as found:
        with contextlib.closing(VllmEngine(found)) as engine:
            yield engine


@contextlib.contextmanager
def with_model(settings: LiveSettings, model: str) -> Iterator[LiveSettings]:
    """Provide `settings` of engines with `model` (a folder, or one of SEEDED); a seeded model
    exists only within the context. Raises SettingsError if there is no such model."""
    from twinserve.sim.setup.config import SettingsError

    if model not in SEEDED:
        if not (Path(model) / "config.json").exists():
            raise SettingsError(
                f"--model {model}: no folder with a config.json; name one, or {' or '.join(SEEDED)}"
            )
        yield replace(settings, model=Path(model))
        return
    from twinserve.backends.live.engine.tiny_model import write_model

    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    with tempfile.TemporaryDirectory(prefix="twinserve-") as folder:
        write_model(Path(folder), name=model)
        yield replace(settings, model=Path(folder), dtype=dtype, weights="safetensors")


def engine_arguments(given: list[str] | None) -> dict:
    """Return NAME=VALUE pairs as vLLM engine arguments; values are JSON if possible."""
    from twinserve.sim.setup.config import SettingsError

    arguments: dict = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SettingsError(
                f"--engine-arg {text!r}: write NAME=VALUE, as gpu_memory_utilization=0.9"
            )
        try:
            found = parse_json(value.lower() if value in ("True", "False") else value)
        except ValueError:
            found = value
        arguments[name.replace("-", "_")] = found
    return arguments


def _locked(
    run: Path, model: str, options: dict, steps: Path | None, as_json: bool, quiet: bool
) -> None:
    from twinserve.backends.live.engine.prompts import PromptTexts
    from twinserve.backends.live.versions import LiveEngineError
    from twinserve.sim.report.table import print_lines
    from twinserve.sim.results.decisions import FILE, read_log
    from twinserve.sim.results.files import dump_json
    from twinserve.sim.twin.live import (
        blank_settings,
        blocks_of_drafts,
        check_synchronous,
        settings_for,
    )
    from twinserve.sim.twin.replay import replay_locked
    from twinserve.sim.twin.replay_physical import replay_physical

    log = read_log(run / FILE)
    physical = options["physical"]
    config = log.run["config"]
    check_synchronous(config["async_scheduling"], physical)
    blank = blank_settings(**options)
    blocks = log.blocks + blocks_of_drafts(
        config.get("speculate"), len(log.requests), log.run["kv"]["block_tokens"]
    )
    settings = settings_for(log.run, log.longest, log.step_tokens, blank, blocks)
    with (
        RunProgress(shown=not (quiet or as_json)) as progress,
        live_engine(settings, model) as engine,
    ):
        progress.begin("locked replay")
        texts = PromptTexts(engine.vocab, engine.settings.block_tokens, config["seed"])
        found = (replay_physical if physical else replay_locked)(log, engine, texts, progress.steps)
        version = engine.version
    if steps is not None:
        with whole_file(steps) as partial:
            found.steps.to_parquet(partial, index=False)
    if as_json:
        sys.stdout.write(dump_json(locked_summary(found, log, version, physical)))
    else:
        print_lines(
            f"Locked replay of {log.run['label']} on vLLM {version}",
            locked_lines(found, log, physical),
        )
    if found.parted:
        raise LiveEngineError(f"{log.run['label']}: {found.parted}")


def locked_summary(
    found: LockedReplay, log: DecisionLog, version: str, physical: bool = False
) -> dict:
    """Return plain values; seconds, percent. physical: KV was at the ledger's places."""
    from twinserve.backends.counts import not_made
    from twinserve.sim.twin.live import owns_pool

    run = log.run
    ahead = run["config"]["async_scheduling"]
    return {
        "policy": run["label"],
        "ledger": run["kv"]["ledger"],
        "memory": "physical" if physical or owns_pool(run) else "accounted",
        "not_made": not_made(log.moved, physical),
        "vllm": version,
        "steps": len(found.steps),
        "drift": found.drift,
        "first_drift": found.first_drift,
        "parted": found.parted,
        "free_blocks_differ": found.free_blocks_differ if owns_pool(run) and not ahead else None,
        "planned_ahead": ahead,
        "evictions": found.evictions,
        "step_time": found.error(),
        "predicted_s": float(found.steps["predicted_s"].sum()),
        "measured_s": float(found.steps["measured_s"].sum()),
    }


def locked_lines(
    found: LockedReplay, log: DecisionLog, physical: bool = False
) -> list[tuple[str, str]]:
    from twinserve.backends.counts import not_made, not_made_lines
    from twinserve.sim.twin.live import owns_pool

    run, error = log.run, found.error()
    lines = [
        ("steps executed", f"{len(found.steps):,}"),
        (
            "steps that drifted",
            f"{found.drift:,}" + (f" ({found.first_drift})" if found.drift else ""),
        ),
    ]
    if physical:
        unit = "cells" if run["kv"]["ledger"] == "layerwise" else "slots"
        lines.append(
            (
                "KV memory",
                f"physical: in the ledger's own {unit}, {run['kv']['num_blocks']:,} blocks in all",
            )
        )
    elif owns_pool(run):
        if not run["config"]["async_scheduling"]:
            lines.append(("free blocks differ after", f"{found.free_blocks_differ:,} steps"))
        lines.append(("cached blocks evicted", f"{found.evictions:,}"))
        lines.append(("KV memory", "physical: vLLM's pool is the ledger's, to the block"))
    else:
        lines.append(
            (
                "KV memory",
                f"accounted: ledger {run['kv']['ledger']} decides, vLLM's pool has "
                "room for all that it can hold",
            )
        )
    lines += not_made_lines(not_made(log.moved, physical))
    lines += [
        (
            "predicted / measured",
            f"{found.steps['predicted_s'].sum():.3f} / {found.steps['measured_s'].sum():.3f} s",
        ),
        ("error of the sum", f"{error['total_error_pct']:+.1f} %"),
        ("mean absolute error a step", f"{error['mean_absolute_error_pct']:.1f} %"),
    ]
    left_out = len(found.steps) - error["steps"]
    if left_out:
        lines.append(("left out of the errors", f"{left_out:,} steps with swaps"))
    return lines


def _free(
    run: Path,
    model: str,
    options: dict,
    wall: bool,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    decisions: bool,
) -> None:
    from twinserve.backends.counts import not_made_lines
    from twinserve.backends.live.versions import LiveEngineError
    from twinserve.sim.report.table import print_table
    from twinserve.sim.results.files import check_target, dump_json, read_run, write_run
    from twinserve.sim.setup.config import SimulationConfig
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.presets import from_file
    from twinserve.sim.setup.run import run_simulation
    from twinserve.sim.twin.live import LiveRun, blank_settings, check_synchronous, live_settings

    if out is not None:
        check_target(out, overwrite)
    simulated = read_run(run)
    inputs = resolve(SimulationConfig(**from_file(run / "run.json")))
    check_synchronous(inputs.config.async_scheduling, options["physical"])
    (spec,) = inputs.policies
    settings = live_settings(inputs, spec, blank_settings(**options))
    with (
        RunProgress(shown=not (quiet or as_json)) as progress,
        live_engine(settings, model) as engine,
    ):
        progress.begin(f"{spec.label} live")
        live = LiveRun(inputs, spec, engine, progress.report, wall, decisions=decisions)
        result = run_simulation(live)
        result.config["live"] = live.described()
        drift = live.backend.drift()
        progress.end(result)
    if out is not None:
        write_run(out, result, overwrite)
    if as_json:
        sys.stdout.write(
            dump_json(
                {
                    "simulated": simulated.summary,
                    "live": result.summary,
                    "engine": result.config["live"],
                }
            )
        )
    else:
        label = simulated.config["label"]
        memory = f"KV memory of the live run: {result.config['live']['memory']}"
        notes = [drift, memory, *map(": ".join, not_made_lines(result.config["live"]["not_made"]))]
        print_table({f"{label} simulated": simulated, f"{label} live": result}, notes)
    parted = result.config["live"]["parted"]
    if parted:
        raise LiveEngineError(f"{simulated.config['label']}: {parted}")


def replay_apart(run: Path, model: str, options: dict, as_json: bool, quiet: bool) -> None:
    """options weights, dtype, physical, extra: as `replay` has them. Raises SettingsError for runs
    that live engines cannot follow, and LiveEngineError if they departed from the run."""
    from twinserve.backends.live.apart.shelf import shared_folder
    from twinserve.backends.live.versions import LiveEngineError, installed_vllm
    from twinserve.sim.report.table import print_lines
    from twinserve.sim.results.files import dump_json
    from twinserve.sim.setup.config import SettingsError, SimulationConfig
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.presets import from_file
    from twinserve.sim.twin.apart import Recorded, run_apart
    from twinserve.sim.twin.live import blank_settings

    if options["physical"]:
        raise SettingsError("--physical: engines that hand KV over use their own layout; drop it")
    simulated = Recorded(resolve(SimulationConfig(**from_file(run / "run.json"))))
    with with_model(blank_settings(**options), model) as settings, shared_folder() as folder:
        version = installed_vllm()
        with RunProgress(shown=not (quiet or as_json)) as progress:
            progress.begin("live replay, prefill apart from decode")
            found = run_apart(simulated, settings, Path(folder), report=progress.steps)
    if as_json:
        sys.stdout.write(dump_json(found.described() | {"vllm": version}))
    else:
        print_lines(f"Prefill apart from decode on vLLM {version}", found.lines())
    if not found.held:
        raise LiveEngineError(
            "the live engines decided differently from the simulated fleet; see the lines above"
        )
