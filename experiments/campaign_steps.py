"""Stages of a campaign that measure an engine's steps: raw steps, swapping, and the profile that they make."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict

import numpy as np

from ..profiles.measured_profile import measured_profile
from ..profiles.measured_samples import Measurement, read_samples, write_samples
from ..profiles.profile import save_profile
from ..profiles.specs import ModelSpec, ProfileError
from .campaign_setup import MODEL_SIZES, Deadline, Engines, OutOfTime, Store, clear, ignoring_time, model_config

STEPS, PROFILES = "steps", "profiles"
SAVE_EVERY_S = 20.0
_OTHER_POINTS = 10_000  # added to points of a later session whose points are not the earlier one's


def mode_name(key: str, graphs: bool) -> str:
    return f"{key}-{'graphs' if graphs else 'eager'}"


def raw_path(store: Store, key: str, graphs: bool, what: str = ""):
    """The file of raw steps; what "-swap": of raw transfers."""
    return store.path(STEPS, f"{mode_name(key, graphs)}{what}.parquet")


def machine(store: Store) -> dict:
    """Device, versions and bare rates: measured once, before an engine takes the memory."""
    known = store.read(STEPS, "machine.json")
    if known is None:
        import torch

        from ..backends.live.measure_device import bare_rates, describe_machine

        known = {**describe_machine(), **bare_rates()}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        store.write(known, STEPS, "machine.json")
        rates = known["matmul_flops"] / 1e12, known["memory_bytes_per_s"] / 1e9, known["link_bytes_per_s"] / 1e9
        store.say("{}: {:.1f} TFLOP/s, {:.0f} GB/s, host link {:.1f} GB/s".format(known["device"], *rates))
    return known


def bring_up(store: Store, engine, key: str, graphs: bool, start_s: float) -> dict:
    """What the engine is, and whether it answers the same twice: told before anything is measured."""
    facts = {"start_s": start_s, "num_blocks": engine.num_blocks, "block_tokens": engine.settings.block_tokens}
    config = engine._engine.vllm_config
    with contextlib.suppress(AttributeError):
        runner = engine._engine.model_executor.driver_worker.worker.model_runner
        facts["model_runner"] = type(runner).__module__
        layers = config.compilation_config.static_forward_context.values()
        facts["attention"] = sorted({type(getattr(layer, "impl", None)).__name__ for layer in layers})
        facts["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
        facts["graph_sizes"] = list(config.compilation_config.cudagraph_capture_sizes or [])
        facts["compile_s"] = float(getattr(config.compilation_config, "compilation_time", 0.0) or 0.0)
    answers = [_answers(engine) for _ in range(2)]
    facts |= {"first_tokens": answers[0], "repeatable": answers[0] == answers[1]}
    name = f"{mode_name(key, graphs)}-starts.json"
    store.write({"starts": [*(store.read(STEPS, name) or {"starts": []})["starts"], facts]}, STEPS, name)
    return facts


def _answers(engine, prompts: int = 3, tokens: int = 6) -> list[list[int]]:
    from ..backends.live.planned import PlannedStep

    names = [f"hello{i}" for i in range(prompts)]
    told: dict[str, list[int]] = {name: [] for name in names}
    for i, name in enumerate(names):
        engine.submit(name, [(7 * i + j) % (engine.vocab - 8) + 4 for j in range(20 + i)], tokens)
    grants, hits = {name: 20 + i for i, name in enumerate(names)}, dict.fromkeys(names, 0)
    for _ in range(tokens):
        for name, emitted in engine.step(PlannedStep(grants, hits)).tokens.items():
            told[name] += emitted
        grants, hits = dict.fromkeys(names, 1), {}
    clear(engine)
    return [told[name] for name in names]


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
    """Raw steps of the calibration's points, in shuffled rounds until the time is over; saved every 20 s. Called again
    it goes on with further rounds. quick: fewer points; extra: vLLM engine arguments."""
    path = raw_path(store, key, graphs)
    facts = machine(store)
    earlier = read_samples(path) if path.exists() else Measurement([], [], {})
    if earlier.provenance.get("rounds", 0) >= rounds:
        store.say(f"{path.name}: has its {rounds} rounds already")
        return
    if deadline.near:
        store.say(f"{path.name}: {deadline.left:.0f} s are too few")
        return
    engine = engines.get(key, graphs, False, extra)
    shown = bring_up(store, engine, key, graphs, engines.start_s)
    store.say(f"bring-up: {shown}")
    run = _Rounds(store, engine, key, graphs, deadline, earlier, facts, engines.start_s, rounds, seed, quick)
    try:
        with ignoring_time():
            run.go()
    finally:  # also when the process is asked to end
        run.save()
    clear(engine)
    store.say(
        f"{path.name}: {len(run.everything().steps):,} steps in {run.rounds_done()} whole rounds, {run.elapsed():.0f} s"
    )


class _Rounds:
    """Rounds of backends.live.measure, with a deadline inside them and the samples saved on the way."""

    def __init__(self, store, engine, key, graphs, deadline, earlier, facts, start_s, rounds, seed, quick) -> None:
        from ..backends.live.measure import Effort, _Run
        from ..backends.live.measure_bench import Bench

        quick = quick or MODEL_SIZES[key].quick
        effort = Effort(rounds, decode_repeats=4, prefill_repeats=2, quick=quick)
        self.store, self.key, self.graphs, self.deadline, self.earlier = store, key, graphs, deadline, earlier
        self.run = _Run(Bench(engine, seed), effort, seed, self._progress)
        self.limits = {**asdict(self.run.limits), "quick": quick}
        self.first = max((s.round for s in earlier.steps), default=-1) + 1
        if earlier.steps and earlier.provenance.get("limits") != self.limits:
            self.run.items = [(number + _OTHER_POINTS * (1 + self.first), item) for number, item in self.run.items]
        self.facts = {
            **facts,
            **_engine_facts(engine),
            "limits": self.limits,
            "start_s": start_s,
            "seed": seed,
            "effort": asdict(effort),
            "contexts": "adopted" if self.run.bench.adopt else "computed",
        }
        self._begun = self._saved = time.monotonic()
        self._whole = 0

    def go(self) -> None:
        from ..backends.live.measure_points import Ladder

        run = self.run
        if self.deadline.left < 2.0:
            raise OutOfTime
        run.bench.fill_cache(max(item.context for _, item in run.items if isinstance(item, Ladder)))
        run._warm_up()
        self.store.say(f"{len(run.items)} groups of points, filled and warmed up after {self.elapsed():.0f} s")
        for number in range(self.first, self.first + run.effort.rounds - self.rounds_done()):
            run._round(number)
            self._whole += 1
            self.store.say(f"round {number + 1}: {len(run.steps):,} steps after {self.elapsed():.0f} s")
            self.save()

    def _progress(self, share: float, text: str) -> None:
        if self.deadline.left < 0:
            raise OutOfTime
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def rounds_done(self) -> int:
        return int(self.earlier.provenance.get("rounds", 0)) + self._whole

    def everything(self) -> Measurement:
        run = self.run
        medians = {
            name: float(np.median(values)) if values else self.earlier.provenance.get(name, 0.0)
            for name, values in (("empty_s", run.empty_s), ("submit_s", run.bench.submit_s))
        }
        elapsed = self.elapsed() + self.earlier.provenance.get("elapsed_s", 0.0)
        facts = {
            **self.facts,
            **medians,
            "rounds": self.rounds_done(),
            "elapsed_s": elapsed,
            "swap": "not in this file",
        }
        return Measurement(self.earlier.steps + run.steps, [], facts)

    def save(self) -> None:
        if self.run.steps:
            write_samples(self.everything(), raw_path(self.store, self.key, self.graphs))
            self.store.saved(STEPS)
        self._saved = time.monotonic()


def _engine_facts(engine) -> dict:
    settings, config = engine.settings, engine._engine.vllm_config
    return {
        "vllm": engine.version,
        "model": settings.model.name,
        "settings": {name: value for name, value in asdict(settings).items() if name != "model"},
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "gpu_memory_utilization": getattr(config.cache_config, "gpu_memory_utilization", 0.9),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "num_blocks": engine.num_blocks,
        "block_tokens": settings.block_tokens,
    }


def measure_swaps(
    store: Store, engines: Engines, key: str, graphs: bool, deadline: Deadline, seed: int = 0, **extra
) -> None:
    """KV of single requests out to the host and back, by size."""
    path = raw_path(store, key, graphs, "-swap")
    if path.exists():
        store.say(f"{path.name}: measured already")
        return
    from ..backends.live.measure import Effort, _Run
    from ..backends.live.measure_bench import Bench

    facts = machine(store)
    if deadline.near:
        store.say(f"{path.name}: {deadline.left:.0f} s are too few")
        return
    engine = engines.get(key, graphs, True, extra)
    if deadline.left < 0:
        return
    run = _Run(Bench(engine, seed), Effort(rounds=3, quick=MODEL_SIZES[key].quick), seed, lambda share, text: None)
    run._swap()
    clear(engine)
    found = {**facts, **_engine_facts(engine), "start_s": engines.start_s, "seed": seed, "swap": run.swap_note}
    write_samples(Measurement([], run.swaps, found), path)
    store.saved(STEPS)
    store.say(f"{path.name}: {len(run.swaps)} transfers {run.swap_note}")


def make_profile(store: Store, key: str, graphs: bool):
    """The profile of what has been measured so far. Returns its path, None where that is too little."""
    path = raw_path(store, key, graphs)
    if not path.exists():
        store.say(f"{path.name} is not there: run stage steps first")
        return None
    measured = read_samples(path)
    swaps = raw_path(store, key, graphs, "-swap")
    transfers = read_samples(swaps).swaps if swaps.exists() else []
    llm = ModelSpec.from_config(model_config(key), MODEL_SIZES[key].name)
    target = store.path(PROFILES, f"{mode_name(key, graphs)}.json")
    try:
        profile = measured_profile(Measurement(measured.steps, transfers, measured.provenance), llm)
    except ProfileError as error:
        store.failed(f"the profile of {path.name}", error)
        return None
    save_profile(profile, target)
    store.saved(PROFILES)
    fit = profile.step_model.fit
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in fit.errors.items())
    store.say(f"{target.name}: {fit.points} points, {fit.steps:,} steps; errors {errors}; "
              f"check {'-' if fit.check_error is None else format(fit.check_error, '.1%')}")  # fmt: skip
    return target
