"""Measure a live engine: every point several times, in an order that is shuffled anew for every
round.

A machine drifts (clocks, heat, neighbours). Were the points taken one after another, drift would
look like a trend over batch sizes; taken in shuffled rounds it is spread over all of them, and the
repeats show how large it is.
"""

import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np

from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.measure.bench import Bench, Timing
from twinserve.backends.live.measure.device import bare_rates, describe_machine
from twinserve.backends.live.measure.kept import Kept
from twinserve.backends.live.measure.points import (
    ROOM,
    Ladder,
    Limits,
    Point,
    Points,
    choose_points,
)
from twinserve.backends.live.versions import LiveEngineError
from twinserve.errors import worded
from twinserve.policies.plan import DEVICE
from twinserve.profiles.measured.samples import (
    LEAVING,
    SWAP_IN,
    SWAP_OUT,
    Measurement,
    StepSample,
    SwapSample,
    unsettled,
)

SCHEDULER = "twinserve.backends.live.measure.scheduler.MeasuringScheduler"
Progress = Callable[[float, str], None]  # may raise, and so end the measuring
Items = Sequence[tuple[int, Ladder | Point]]
# steps, and the seconds that our own loop took between two of them
Part = tuple[list[StepSample], float]
Further = Callable[[VllmEngine, Measurement, Callable[[], bool]], Iterable[Part]]


@dataclass(frozen=True)
class Effort:
    """How long is measured.

    rounds        over all points
    again         as many steps as so many rounds have, at most, for points that others disturbed
    ..._repeats   of a point within a round
    limit_s       seconds after which nothing further is begun, `further` of `measure` included
    whole_round   the first round is finished whatever the limit; else only what no table can do
                  without
    quick         fewer points
    """

    rounds: int = 6
    again: int = 12
    decode_repeats: int = 5
    prefill_repeats: int = 2
    limit_s: float = 320.0
    whole_round: bool = True
    quick: bool = False


QUICK = Effort(rounds=3, again=6, decode_repeats=4, prefill_repeats=2, limit_s=40.0, quick=True)
_BENCH = 0.75  # of the limit; the rest is for what comes after


def measure(
    settings: LiveSettings,
    effort: Effort = Effort(),
    seed: int = 0,
    progress: Progress = lambda share, text: None,
    further: Further = lambda engine, so_far, time_is_up: iter(()),
    keep: Callable[[Measurement], None] = lambda so_far: None,
) -> Measurement:
    """Start an engine with `settings`, measure it, stop it. Points that others disturbed are
    measured again while there is time.

    further  more steps on the idle engine, in parts, when what is measured here is known; it is to
             begin no part when the time is up
    keep     called with the steps so far, every few seconds, and after an interruption

    What a time limit left out is in `partial` of the provenance. Raises LiveEngineError (one line)
    if the engine fails.
    """
    check_engine_arguments(settings.extra)
    progress(0.0, "starting the engine")
    begun = time.perf_counter()
    try:
        engine = VllmEngine(settings)
    except LiveEngineError:
        raise
    except Exception as error:  # whatever vLLM raises: the user's model or settings do not work
        raise LiveEngineError(f"vLLM did not start: {_one_line(error)}") from error
    try:
        start_s = time.perf_counter() - begun
        run = _Run(Bench(engine, seed), effort, seed, progress)
        facts = {**describe_machine(), **bare_rates(), **engine_facts(engine, run, start_s)}
        kept = Kept(run, facts, keep)
        run.between = kept.now_and_then
        try:
            run.measure()
            found = kept.so_far()
            for steps, loop_s in further(engine, found, run.traffic_is_cut):
                run.traffic += steps
                run.loop_s.append(loop_s)
                kept.now_and_then()
        except BaseException:
            kept.now()
            raise
        run.over = True
        return kept.so_far()
    finally:
        engine.close()


def numbered(points: Points, number: int = 0) -> list[tuple[int, Ladder | Point]]:
    """Groups of points with the number of their first point, counted from `number`."""
    found: list[tuple[int, Ladder | Point]] = []
    for item in [*points.ladders, *points.points]:
        found.append((number, item))
        number += len(item.batches) if isinstance(item, Ladder) else 1
    return found


class _Run:
    def __init__(
        self,
        bench: Bench,
        effort: Effort,
        seed: int,
        progress: Progress,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        settings = bench.engine.settings
        self.bench, self.effort, self.seed, self.progress = bench, effort, seed, progress
        self.limits = Limits(
            settings.max_num_seqs,
            settings.max_step_tokens,
            settings.max_model_len,
            bench.pool_blocks * bench.block_tokens,
            bench.block_tokens,
        )
        if wrong := self.limits.too_small():
            raise LiveEngineError(wrong)
        self.items = numbered(choose_points(self.limits, seed, effort.quick))
        self.steps: list[StepSample] = []
        self.swaps: list[SwapSample] = []
        self.empty_s: list[float] = []
        self.swap_note = "the engine was built without host memory"
        self.traffic: list[StepSample] = []
        self.loop_s: list[float] = []  # of each part of the traffic
        self.rounds = 0  # whole ones
        self.again = 0  # rounds over disturbed points
        self.over = False  # nothing is to come
        self.measuring = False  # the warm-up is over
        self.cut = False  # there was no time for all of the traffic
        self.between: Callable[[], None] = lambda: None  # called after each point
        self._now, self._begun = now, now()

    def elapsed_s(self) -> float:
        return self._now() - self._begun

    def time_is_up(self, share: float = 1.0) -> bool:
        """Whether that share of the time limit has passed."""
        return self.elapsed_s() > share * self.effort.limit_s

    def traffic_is_cut(self) -> bool:
        """Whether the time is up; what comes after the bench ends there."""
        self.cut = self.cut or self.time_is_up()
        return self.cut

    def measure(self) -> None:
        bench, effort = self.bench, self.effort
        self._begun = self._now()
        bench.fill_cache(max(item.context for _, item in self.items if isinstance(item, Ladder)))
        self._warm_up()
        self.measuring = True
        for number in range(effort.rounds):
            items = self._first_items() if number == 0 else None
            if not self._round(number, items, self._bench_is_over):
                break
            self.rounds += 1
        self._measure_again()
        if bench.engine.settings.swap_blocks:
            self._swap()

    def _bench_is_over(self) -> bool:
        if not self.time_is_up(_BENCH):
            return False
        if self.effort.whole_round:
            return self.rounds > 0
        return {s.point for s in self.steps if not s.first} >= {
            point for item in self._least() for point in _numbers(*item)
        }

    def _least(self) -> Items:
        """Without these there is no table: the shortest and the longest contexts and prompts."""
        ladders = [item for item in self.items if isinstance(item[1], Ladder)]
        prompts = [item for item in self.items if getattr(item[1], "kind", "") == "prefill"]
        return [*ladders[:: max(len(ladders) - 1, 1)], *prompts[:: max(len(prompts) - 1, 1)]]

    def _first_items(self) -> Items | None:
        """Return the first round's items in random order; with a limit, needed ones first."""
        if self.effort.whole_round:
            return None
        least = self._least()
        rest = [item for item in self.items if item not in least]
        order = np.random.default_rng([self.seed, 0]).permutation(len(rest)).tolist()
        return [*least, *(rest[i] for i in order)]

    def _measure_again(self) -> None:
        """Rounds over the points that have too few undisturbed samples, until there are none."""
        planned = len(self.steps)
        most = planned + self.effort.again * planned // max(self.rounds, 1)
        while len(self.steps) < most:
            points = set(self.unsettled())
            number = self.effort.rounds + self.again
            rng = np.random.default_rng([self.seed, number])
            items = [item for item in self.items if points & set(_numbers(*item))]
            items = [items[i] for i in rng.permutation(len(items)).tolist()]
            if not items or not self._round(number, items, self._bench_is_over):
                break
            self.again += 1

    def unsettled(self) -> list[int]:
        """Points whose tables or checks rest on disturbed samples."""
        return unsettled([s for s in self.steps if not s.first and s.kind != LEAVING])

    def partial(self) -> str:
        """What the time limit left out, or what is missing while it is measured; empty: nothing."""
        left = []
        if self.rounds < self.effort.rounds:
            left.append(f"{self.rounds} of {self.effort.rounds} rounds over all points")
        if not self.over:
            left.append("stopped before the end")
        if self.cut:
            left.append("not all of the traffic")
        return "; ".join(left)

    def _warm_up(self, items: Items | None = None) -> None:
        """The largest steps once or twice: memory is set aside, kernels are chosen and compiled."""
        for number, item in self.items if items is None else items:
            self.progress(0.0, "warming up")
            if isinstance(item, Ladder):
                self._ladder(
                    -1, number, Ladder(item.context, item.batches[-1:]), 1, np.random.default_rng(0)
                )
            elif item.kind in ("prefill", "chunk"):
                self._prefill(-1, number, item, 1, np.random.default_rng(0))
        self.steps.clear()
        self.empty_s.clear()
        self.bench.submit_s.clear()

    def _round(
        self, number: int, items: Items | None = None, ended: Callable[[], bool] = lambda: False
    ) -> bool:
        """Pass over all points in random order, or over `items`. False: it `ended` before."""
        rng = np.random.default_rng([self.seed, number])
        if items is None:
            items = [self.items[i] for i in rng.permutation(len(self.items)).tolist()]
        said = (
            f"round {number + 1} of {self.effort.rounds}"
            if number < self.effort.rounds
            else f"measuring {len(items)} disturbed points again"
        )
        for done, (point, item) in enumerate(items):
            if ended():
                return False
            share = (number + done / len(items)) / self.effort.rounds
            self.progress(share, f"{said}, {len(self.steps):,} steps measured")
            self.between()
            if isinstance(item, Ladder):
                self._ladder(number, point, item, self.effort.decode_repeats, rng)
            elif item.kind == "leaving":
                self._leaving(number, point, item)
            elif item.contexts:
                self._with_decodes(number, point, item, rng)
            else:
                self._prefill(number, point, item, self.effort.prefill_repeats, rng)
        return True

    def _note(self, kind: str, point: int, number: int, t: Timing, first: bool = False) -> None:
        times = t.seconds, t.exec_s, t.device_s, t.off_core_s
        self.steps.append(StepSample(kind, point, number, t.work, *times, first=first))

    # -- kinds of points ---------------------------------------------------------------------------
    def _ladder(
        self, number: int, first: int, ladder: Ladder, repeats: int, rng: np.random.Generator
    ) -> None:
        bench = self.bench
        names = bench.hold([ladder.context] * max(ladder.batches), ROOM)
        turn = 0
        for i in rng.permutation(len(ladder.batches)).tolist():
            batch = ladder.batches[i]
            # another part of the requests each time: all contexts grow alike
            grants = {names[(turn + j) % len(names)]: 1 for j in range(batch)}
            turn += batch
            bench.step(grants)  # the batch changes with this one
            for _ in range(repeats):
                self._note("decode", first + i, number, bench.step(grants))
        self._clear(names)

    def _prefill(
        self, number: int, point: int, item: Point, repeats: int, rng: np.random.Generator
    ) -> None:
        prefills = _drawn(item, rng)
        for i in range(repeats + 1):
            names, timing = self._join({}, prefills)
            self._note(item.kind, point, number, timing, first=i == 0)
            self._clear(names)

    def _with_decodes(self, number: int, point: int, item: Point, rng: np.random.Generator) -> None:
        bench = self.bench
        held = bench.hold(list(item.contexts), ROOM)
        decodes = dict.fromkeys(held, 1)
        prefills = _drawn(item, rng)
        repeats = self.effort.prefill_repeats if prefills else self.effort.decode_repeats
        for i in range(repeats + 1):
            bench.step(decodes)
            names, timing = self._join(decodes, prefills)
            self._note(item.kind, point, number, timing, first=i == 0)
            bench.drop(names)
        self._clear(held)

    def _join(
        self, decodes: dict[str, int], prefills: list[tuple[int, int]]
    ) -> tuple[list[str], Timing]:
        """Prefills (new, resident) join `decodes` for a step. Prefixes are adopted or computed."""
        bench, names, grants, hits = self.bench, [], {}, {}
        for new, resident in prefills:
            name = bench.submit(new + resident)
            names.append(name)
            grants[name] = new
            if bench.adopt:
                hits[name] = resident
                continue
            done = 0
            while done < resident:
                part = min(resident - done, bench.engine.settings.max_step_tokens)
                bench.step({name: part})
                done += part
        return names, bench.step({**decodes, **grants}, hits)

    def _leaving(self, number: int, point: int, item: Point) -> None:
        """All requests of a batch end in one step; the step before is the same but for that."""
        bench = self.bench
        names = bench.hold(list(item.contexts), room=4)
        grants = dict.fromkeys(names, 1)
        bench.step(grants)
        stay, leave = bench.step(grants), bench.step(grants)
        self._note("leaving", point, number, stay)
        self._note("leaving", point, number, leave)
        self._clear(names)

    def _clear(self, names: list[str]) -> None:
        self.bench.drop(names)
        self.empty_s.append(self.bench.step({}).seconds)

    # -- swapping ----------------------------------------------------------------------------------
    def _swap(self) -> None:
        """Move KV of one request out and back, n blocks at a time. An error costs only this
        part."""
        bench = self.bench
        self.swap_note = "no transfer was made in time"
        try:
            sizes, blocks = [], 1
            while blocks <= bench.engine.settings.swap_blocks - 1 and self.limits.fits(
                [blocks * bench.block_tokens]
            ):
                sizes.append(blocks)
                blocks *= 2
            for number in range(min(self.effort.rounds, 3) + 1):
                for blocks in (
                    np.random.default_rng([self.seed, 99, number]).permutation(sizes).tolist()
                ):
                    self.progress(1.0, f"swapping, {len(self.swaps)} transfers measured")
                    self._swap_once(blocks * bench.block_tokens, keep=number > 0)
            self.swap_note = "" if self.swaps else "the engine reported no transfers"
        except (AttributeError, LiveEngineError, RuntimeError, KeyError, AssertionError) as error:
            self.swaps.clear()
            self.swap_note = _one_line(error)

    def _swap_once(self, tokens: int, keep: bool) -> None:
        bench = self.bench
        bench.transfers.clear()
        name, other = bench.hold([tokens - 1, 16], ROOM)
        beside = {other: 1}
        bench.swap_out(name, beside)
        bench.step(beside)
        bench.swap_in(name, beside)
        bench.step(beside)
        bench.step(beside)
        for report in bench.transfers:
            if keep:
                direction = SWAP_IN if report.target == DEVICE else SWAP_OUT
                self.swaps.append(
                    SwapSample(direction, report.tokens, report.nbytes, report.seconds)
                )
        self._clear([name, other])


def _numbers(point: int, item: Ladder | Point) -> range:
    """The points of a group, of which `point` is the first."""
    return range(point, point + (len(item.batches) if isinstance(item, Ladder) else 1))


def _drawn(item: Point, rng: np.random.Generator) -> list[tuple[int, int]]:
    return [
        (new - int(rng.random() * item.vary * new), resident) for new, resident in item.prefills
    ]


def engine_facts(engine: VllmEngine, run: _Run, start_s: float) -> dict:
    """Provenance of what `run` measures, without the machine's. start_s: of the engine."""
    settings = engine.settings
    config = engine._engine.vllm_config
    arguments = {name: value for name, value in asdict(settings).items() if name != "model"}
    return {
        "model": str(settings.model),
        "settings": arguments,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "gpu_memory_utilization": getattr(config.cache_config, "gpu_memory_utilization", 0.9),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "num_blocks": engine.num_blocks,
        "block_tokens": settings.block_tokens,
        "seed": run.seed,
        "effort": asdict(run.effort),
        "contexts": "adopted" if run.bench.adopt else "computed",
        "start_s": start_s,
    }


_OWN = {
    "model": "--model",
    "dtype": "--dtype",
    "block_size": "--block-tokens",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-step-tokens",
    "max_model_len": "--max-model-len",
    "num_gpu_blocks_override": "--num-blocks",
    "enforce_eager": "--graphs",
    "load_format": "--weights",
}


def check_engine_arguments(
    extra: Iterable[str], own: Mapping[str, str] = MappingProxyType(_OWN)
) -> None:
    """Raises LiveEngineError (one line) for an engine argument that vLLM does not know, or that the
    command has an option of its `own` for."""
    from twinserve.backends.live.versions import installed_vllm

    installed_vllm()
    from vllm.engine.arg_utils import EngineArgs

    for name in extra:
        if name in own:
            raise LiveEngineError(f"--engine-arg {name}: say it with {own[name]}")
        if name not in EngineArgs.__dataclass_fields__:
            near = difflib.get_close_matches(name, EngineArgs.__dataclass_fields__, n=1)
            nearest = f"; nearest: {near[0]}" if near else ""
            raise LiveEngineError(f"--engine-arg {name}: vLLM has no such argument{nearest}")


def _one_line(error: BaseException) -> str:
    return worded(error)[:300]
