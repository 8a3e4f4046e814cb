"""Stages of a campaign that measure an engine's steps: raw steps, swapping, and the profile that
they make."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict

import numpy as np

from twinserve.experiments.campaign.setup import (
    MODEL_SIZES,
    STEPS,
    Deadline,
    Engines,
    OutOfTime,
    StageError,
    Store,
    clear,
    ignoring_time,
    mode_name,
    model_config,
)
from twinserve.profiles.measured.profile import measured_profile
from twinserve.profiles.measured.samples import Measurement, read_samples, write_samples
from twinserve.profiles.models.config import read_config
from twinserve.profiles.profile import save_profile
from twinserve.profiles.specs import ProfileError

PROFILES = "profiles"
SAVE_EVERY_S = 20.0
_OTHER_POINTS = 10_000  # added to points of a later session whose points are not the earlier one's
_COARSE = 5_000  # added to the points of the first round, which has fewer
_WORTH = ("decode", "prefill", "chunk", "mixed", "prefills", "skewed", "check", "leaving")


def raw_path(store: Store, key: str, graphs: bool, what: str = ""):
    """The file of raw steps; what "-swap": of raw transfers."""
    return store.path(STEPS, f"{mode_name(key, graphs)}{what}.parquet")


def machine(store: Store) -> dict:
    """Device, versions and bare rates: measured once, before an engine takes the memory."""
    known = store.read(STEPS, "machine.json")
    if known is None:
        import torch

        from twinserve.backends.live.measure.device import bare_rates, describe_machine

        known = {**describe_machine(), **bare_rates()}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        store.write(known, STEPS, "machine.json")
        rates = (
            known["matmul_flops"] / 1e12,
            known["memory_bytes_per_s"] / 1e9,
            known["link_bytes_per_s"] / 1e9,
        )
        store.say(
            "{}: {:.1f} TFLOP/s, {:.0f} GB/s, host link {:.1f} GB/s".format(known["device"], *rates)
        )
    return known


def bring_up(engines: Engines, engine, key: str, graphs: bool) -> dict:
    """What the engine is, and whether it answers the same twice: told before anything is
    measured."""
    facts: dict = {"block_tokens": engine.settings.block_tokens}
    config = engine._engine.vllm_config
    with contextlib.suppress(AttributeError):
        runner = engine._engine.model_executor.driver_worker.worker.model_runner
        facts["model_runner"] = type(runner).__module__
        layers = config.compilation_config.static_forward_context.values()
        facts["attention"] = sorted(
            {type(getattr(layer, "impl", None)).__name__ for layer in layers}
        )
        facts["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
        facts["graph_sizes"] = list(config.compilation_config.cudagraph_capture_sizes or [])
        facts["compile_s"] = float(
            getattr(config.compilation_config, "compilation_time", 0.0) or 0.0
        )
    answers = [_answers(engine) for _ in range(2)]
    facts |= {"first_tokens": answers[0], "repeatable": answers[0] == answers[1]}
    engines.note(key, graphs, facts)
    return facts


def _answers(engine, prompts: int = 3, tokens: int = 6) -> list[list[int]]:
    from twinserve.backends.live.engine.planned import PlannedStep

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
    """Raw steps of the calibration's points until the time is over: a coarse round in order of
    worth, then all points in shuffled rounds; saved every 20 s. Called again it goes on with
    further rounds. quick: the coarse points only; extra: vLLM engine arguments. Raises StageError
    where no step was measured."""
    path = raw_path(store, key, graphs)
    facts = machine(store)
    earlier = read_samples(path) if path.exists() else Measurement([], [], {})
    if earlier.provenance.get("rounds", 0) >= rounds:
        store.say(f"{path.name}: has its {rounds} rounds already")
        return
    if deadline.near:
        store.say(f"{path.name}: {deadline.left:.0f} s are too few")
        return
    engine = engines.get(key, graphs, False, extra, deadline)
    store.say(f"bring-up: {bring_up(engines, engine, key, graphs)}")
    run = _Rounds(
        store, engine, key, graphs, deadline, earlier, facts, engines.start_s, rounds, seed, quick
    )
    try:
        with ignoring_time():
            run.go()
    finally:  # also when the process is asked to end
        run.save()
    clear(engine)
    found = len(run.everything().steps)
    if not found:
        raise StageError("no step was measured in the time that the engine's start left")
    store.say(
        f"{path.name}: {found:,} steps in {run.rounds_done()} whole rounds, {run.elapsed():.0f} s"
    )


class _Rounds:
    """Rounds of backends.live.measure, with a deadline inside them and the samples saved on the
    way."""

    def __init__(
        self, store, engine, key, graphs, deadline, earlier, facts, start_s, rounds, seed, quick
    ) -> None:
        from twinserve.backends.live.measure.bench import Bench
        from twinserve.backends.live.measure.measure import Effort, _Run, numbered
        from twinserve.backends.live.measure.points import choose_points

        quick = quick or MODEL_SIZES[key].quick
        effort = Effort(rounds, decode_repeats=4, prefill_repeats=2, quick=quick)
        self.store, self.key, self.graphs, self.deadline, self.earlier = (
            store,
            key,
            graphs,
            deadline,
            earlier,
        )
        self.run = _Run(Bench(engine, seed), effort, seed, self._progress)
        self.limits = {**asdict(self.run.limits), "quick": quick}
        self.first = max((s.round for s in earlier.steps), default=-1) + 1
        if earlier.steps and earlier.provenance.get("limits") != self.limits:
            self.run.items = [
                (number + _OTHER_POINTS * (1 + self.first), item) for number, item in self.run.items
            ]
        self.coarse = []
        if not (quick or earlier.steps):
            points = choose_points(self.run.limits, seed, quick=True)
            self.coarse = sorted(numbered(points, _COARSE), key=_worth)
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
        from twinserve.backends.live.measure.points import Ladder

        run, first = self.run, self.first
        base = self.coarse or run.items
        if self.deadline.left < 2.0:
            raise OutOfTime
        run.bench.fill_cache(max(item.context for _, item in base if isinstance(item, Ladder)))
        run._warm_up(base)
        self.store.say(
            f"{len(base)} groups of points, filled and warmed up after {self.elapsed():.0f} s"
        )
        if self.coarse:
            run._round(first, self.coarse)
            first += 1
            self._told("coarse round")
        for number in range(first, first + run.effort.rounds - self.rounds_done()):
            run._round(number)
            self._whole += 1
            self._told(f"round {self.rounds_done()}")

    def _told(self, what: str) -> None:
        self.save()
        self.store.say(f"{what}: {len(self.run.steps):,} steps after {self.elapsed():.0f} s")

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


def _worth(numbered) -> int:
    """Place of a group of points in the first round: what the others build on comes first."""
    return _WORTH.index(getattr(numbered[1], "kind", "decode"))


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
    from twinserve.backends.live.measure.bench import Bench
    from twinserve.backends.live.measure.measure import Effort, _Run

    facts = machine(store)
    engine = engines.get(key, graphs, True, extra, deadline)

    def watch(share: float, text: str) -> None:
        if deadline.left < 0:
            raise OutOfTime

    effort = Effort(rounds=3, quick=MODEL_SIZES[key].quick)
    run = _Run(Bench(engine, seed), effort, seed, watch)
    with ignoring_time():
        run._swap()
    clear(engine)
    if not run.swaps:
        raise StageError(f"no transfer was measured: {run.swap_note}")
    found = {**facts, **_engine_facts(engine), "start_s": engines.start_s, "seed": seed, "swap": ""}
    write_samples(Measurement([], run.swaps, found), path)
    store.saved(STEPS)
    store.say(f"{path.name}: {len(run.swaps)} transfers")


def make_profile(store: Store, key: str, graphs: bool):
    """The profile of what has been measured so far. Returns its path. Raises StageError where that
    is too little."""
    path = raw_path(store, key, graphs)
    if not path.exists():
        raise StageError(f"{path.name} is not there: run stage steps first")
    measured = read_samples(path)
    swaps = raw_path(store, key, graphs, "-swap")
    transfers = read_samples(swaps).swaps if swaps.exists() else []
    llm = read_config(model_config(key), MODEL_SIZES[key].name)
    target = store.path(PROFILES, f"{mode_name(key, graphs)}.json")
    try:
        profile = measured_profile(Measurement(measured.steps, transfers, measured.provenance), llm)
    except ProfileError as error:
        raise StageError(f"{path.name} makes no profile: {error}") from error
    save_profile(profile, target)
    store.saved(PROFILES)
    fit = profile.step_model.fit
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in fit.errors.items())
    store.say(
        f"{target.name}: {fit.points} points, {fit.steps:,} steps; errors {errors}; "
        f"check {'-' if fit.check_error is None else format(fit.check_error, '.1%')}"
    )
    return target
