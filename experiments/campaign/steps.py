"""Stages of a campaign that measure an engine's steps: raw steps, swapping, and the profile that
they make."""

import contextlib
from dataclasses import asdict, replace

from twinserve.backends.live.measure.bench import Bench
from twinserve.backends.live.measure.device import bare_rates, describe_machine
from twinserve.backends.live.measure.kept import Kept
from twinserve.backends.live.measure.measure import Effort, _Run, engine_facts
from twinserve.experiments.campaign.host import host_path, with_hidden
from twinserve.experiments.campaign.setup import (
    MODEL_SIZES,
    STEPS,
    Deadline,
    Engines,
    StageError,
    Store,
    clear,
    ignoring_time,
    mode_name,
    model_config,
)
from twinserve.profiles.measured.profile import measured_profile
from twinserve.profiles.measured.samples import Measurement, StepSample, read_samples, write_samples
from twinserve.profiles.models.config import read_config
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.profiles.specs import ProfileError

PROFILES = "profiles"


def raw_path(store: Store, key: str, graphs: bool, what: str = ""):
    """The file of raw steps; what "-swap": of raw transfers."""
    return store.path(STEPS, f"{mode_name(key, graphs)}{what}.parquet")


def machine(store: Store) -> dict:
    """Device, versions and bare rates: measured once, before an engine takes the memory."""
    known = store.read(STEPS, "machine.json")
    if known is None:
        import torch

        known = {**describe_machine(), **bare_rates()}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        store.write(known, STEPS, "machine.json")
        store.say(f"{known['device']}: {known['matmul_flops'] / 1e12:.1f} TFLOP/s")
    return known


def bring_up(engines: Engines, engine, key: str, graphs: bool) -> None:
    """Note what the engine is."""
    config = engine._engine.vllm_config
    facts: dict = {"block_tokens": engine.settings.block_tokens}
    with contextlib.suppress(AttributeError):
        runner = engine._engine.model_executor.driver_worker.worker.model_runner
        facts["model_runner"] = type(runner).__module__
        layers = config.compilation_config.static_forward_context.values()
        names = {type(getattr(layer, "impl", None)).__name__ for layer in layers}
        facts["attention"] = sorted(names)
        facts["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
    engines.note(key, graphs, facts)
    engines.store.say(f"bring-up: {facts}")


def measure_steps(
    store: Store,
    engines: Engines,
    key: str,
    graphs: bool,
    deadline: Deadline,
    rounds: int = 8,
    seed: int = 0,
    quick: bool = False,
    **extra,
) -> None:
    """Raw steps of the calibration's points in shuffled rounds until the time is over, saved every
    few seconds. The first round begins with the points that no profile can do without. Called again
    it goes on with further rounds. quick: fewer points; extra: vLLM engine arguments. Raises
    StageError if no step was measured, or the earlier ones are of an engine of other sizes."""
    path = raw_path(store, key, graphs)
    facts = machine(store)
    earlier = read_samples(path) if path.exists() else Measurement([], [], {})
    done = int(earlier.provenance.get("rounds", 0))
    if done >= rounds:
        store.say(f"{path.name}: complete, {rounds} rounds")
        return
    if deadline.near:
        store.say(f"{path.name}: skipped, {deadline.left:.0f} s left are too few")
        return
    engine = engines.get(key, graphs, False, extra, deadline)
    bring_up(engines, engine, key, graphs)
    # the deadline ends it, not the effort's own limit
    limits = {"limit_s": 2 * deadline.left, "whole_round": False}
    effort = Effort(rounds - done, decode_repeats=4, prefill_repeats=2, **limits)
    run = _run(engine, key, seed, deadline, replace(effort, quick=quick))
    sizes = {**asdict(run.limits), "quick": run.effort.quick}
    if earlier.steps and earlier.provenance.get("limits") != sizes:
        raise StageError(f"{path.name} is of an engine of other sizes: name another --out")
    first = max((step.round for step in earlier.steps), default=-1) + 1
    run.seed += first  # other orders than those of the earlier rounds; the points stay

    def save(found: Measurement) -> None:
        steps = [replace(step, round=step.round + first) for step in found.steps]
        more = {"rounds": run.rounds + done, "limits": sizes}
        more["elapsed_s"] = run.elapsed_s() + earlier.provenance.get("elapsed_s", 0.0)
        if steps:
            merged = Measurement([*earlier.steps, *steps], [], {**found.provenance, **more})
            write_samples(merged, path)

    kept = Kept(run, facts | engine_facts(engine, run, engines.start_s), save)
    run.between = kept.now_and_then
    try:
        with ignoring_time():
            run.measure()
    finally:  # also when the process is asked to end
        kept.now()
    clear(engine)
    if not earlier.steps + run.steps:
        raise StageError("the engine's start left no time to measure a step; give more")
    store.say(
        f"{path.name}: {len(run.steps):,} more steps, {run.rounds + done} whole rounds, "
        f"{run.elapsed_s():.0f} s"
    )


def _run(engine, key: str, seed: int, deadline: Deadline, effort: Effort) -> _Run:
    """One that looks at the deadline."""
    quick = effort.quick or MODEL_SIZES[key].quick
    return _Run(Bench(engine, seed), replace(effort, quick=quick), seed, deadline.look)


def measure_traffic(
    store: Store,
    engines: Engines,
    key: str,
    graphs: bool,
    deadline: Deadline,
    seed: int = 0,
    quick: bool = False,
    **extra,
) -> None:
    """Steps of whole requests at three loads, and the seconds of our own loop between two steps,
    saved after each load. Called again, it measures all loads anew unless all were. quick: fewer
    requests. Raises StageError if stage `steps` left no steps, or no load came to its end."""
    from twinserve.sim.twin.calibrate_traffic import LOADS, traffic_steps

    path = raw_path(store, key, graphs, "-traffic")
    earlier = read_samples(path).provenance["rounds"] if path.exists() else 0
    if earlier >= len(LOADS) - 1:  # the first one only warms up
        store.say(f"{path.name}: measured already")
        return
    profile = load_profile(make_profile(store, key, graphs))
    engine = engines.get(key, graphs, False, extra, deadline)
    clear(engine)
    engine.warm_up()
    found: list[StepSample] = []
    loops: list[float] = []
    rounds = traffic_steps(
        engine,
        profile,
        seed,
        quick or MODEL_SIZES[key].quick,
        progress=lambda *what: None,
        time_is_up=lambda: deadline.near,
        whole_round=False,
    )
    for steps, loop_s in rounds:
        found += steps
        loops.append(loop_s)
        if len(loops) > earlier:  # else the earlier call measured more
            # others on the machine can only make the loop longer
            facts = {"seed": seed, "loop_s": min(loops), "rounds": len(loops)}
            write_samples(Measurement(found, [], machine(store) | facts), path)
    clear(engine)
    if not loops:
        raise StageError("no load of the traffic came to its end; give the stage more time")
    store.say(
        f"{path.name}: {len(loops)} loads, {len(found):,} steps, our loop takes "
        f"{1e3 * min(loops):.2f} ms a step"
    )


def measure_swaps(
    store: Store,
    engines: Engines,
    key: str,
    graphs: bool,
    deadline: Deadline,
    seed: int = 0,
    **extra,
) -> None:
    """KV of single requests out to the host and back, by size, until the time is over. Raises
    StageError where nothing was measured."""
    path = raw_path(store, key, graphs, "-swap")
    if path.exists():
        store.say(f"{path.name}: measured already")
        return
    facts = machine(store)
    engine = engines.get(key, graphs, True, extra, deadline)
    run = _run(engine, key, seed, deadline, Effort(rounds=3))
    with ignoring_time():
        run._swap()
    clear(engine)
    if not run.swaps:
        raise StageError(f"no transfer was measured: {run.swap_note}")
    facts |= {**engine_facts(engine, run, engines.start_s), "swap": ""}
    write_samples(Measurement([], run.swaps, facts), path)
    store.say(f"{path.name}: {len(run.swaps)} transfers")


def make_profile(store: Store, key: str, graphs: bool):
    """The profile of what has been measured so far. Returns its path. Raises StageError if that is
    too little."""
    path = raw_path(store, key, graphs)
    if not path.exists():
        raise StageError(f"{path.name} is missing; run stage steps first")
    measured = read_samples(path)
    swaps, traffic = (raw_path(store, key, graphs, what) for what in ("-swap", "-traffic"))
    transfers = read_samples(swaps).swaps if swaps.exists() else []
    if traffic.exists():
        more = read_samples(traffic)
        facts = measured.provenance | {"loop_s": more.provenance["loop_s"]}
        measured = Measurement([*measured.steps, *more.steps], [], facts)
    llm = read_config(model_config(key), MODEL_SIZES[key].name)
    target = store.path(PROFILES, f"{mode_name(key, graphs)}.json")
    try:
        profile = measured_profile(Measurement(measured.steps, transfers, measured.provenance), llm)
    except ProfileError as error:
        raise StageError(f"{path.name} makes no profile: {error}") from error
    profile = with_hidden(profile, store.read(*host_path(key, graphs)) or {})
    save_profile(profile, target)
    fit = profile.step_model.fit
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in fit.errors.items())
    store.say(f"{target.name}: {fit.points} points, {fit.steps:,} steps; errors {errors}")
    return target
