"""Steps of real traffic, for a calibration: requests that arrive, wait and end, in the loop of a
live run.

A step repeated on a test bench is the fastest of its kind: data are cached, kernels chosen, and the
batch is unchanged. A live run never has all of that. So a calibration ends with traffic of its own,
of other requests than any run, and measures what traffic adds to the tables
(`profiles.measured.model.TrafficTimes`).
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from twinserve.backends.live.engine.engine import VllmEngine
from twinserve.profiles.measured.samples import TRAFFIC, StepSample, disturbed_share
from twinserve.profiles.profile import Profile, save_profile
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Progress
from twinserve.sim.twin.limit import TimeUp
from twinserve.sim.twin.live import LiveRun

# Of estimated capacity, which is more than an engine reaches: small batches, middle ones, full
# ones. The first round is not measured: a server that has run for a while has done everything once.
LOADS = (6.0, 0.3, 1.5, 6.0)
# Memory must run short, also where a busy machine has made the step times that the load is reckoned
# with several times too long.
_SWAPPING_LOAD = 10.0
_SEED = 104_729  # apart from the seeds that runs are given
_TOKENS = 400  # prompt and output of the longest request, where the engine has room
_TURNS = 2  # of a round that others disturbed
_POINT = 1_000_000  # apart from the points of the test bench


def traffic_steps(
    engine: VllmEngine,
    profile: Profile,
    seed: int,
    quick: bool,
    progress: Callable[[float, str], None],
    time_is_up: Callable[[], bool] = lambda: False,
    whole_round: bool = True,
) -> Iterator[tuple[list[StepSample], float]]:
    """Run traffic on `engine`, which must be idle. profile: measured so far. One round a load;
    then, if the engine has host memory, one round in which requests are swapped. Yields the steps
    of each round, and the seconds that our loop took between two steps. A round that others
    disturbed most of the time runs once more, if time is left. When the time is up no round begins,
    but for the first measured one if `whole_round`; else the current round ends there."""
    count = 0

    def cut() -> bool:
        return not whole_round and time_is_up()

    with tempfile.TemporaryDirectory(prefix="twinserve-") as scratch:
        path = Path(scratch) / "profile.json"
        save_profile(profile, path)
        runs = list(_runs(engine, path, seed, quick))
        for number, (what, config) in enumerate(runs):
            if cut() or (number > 1 and time_is_up()):
                break
            found: list[StepSample] = []
            for turn in range(_TURNS):
                if turn and (not number or disturbed_share(found) <= 0.5 or time_is_up()):
                    break
                progress(number / len(runs), f"{what}, {count:,} steps measured")
                found, loop_s = _steps_of(engine, config, number, cut)
                count += len(found) if number else 0
                if number:
                    yield found, loop_s
                if cut():
                    return  # with requests on the engine, which is to be closed
    engine.forget_prefixes()


def _steps_of(
    engine: VllmEngine, config: SimulationConfig, number: int, cut: Callable[[], bool]
) -> tuple[list[StepSample], float]:
    """Return steps of one run (if `cut`, of its first part), and seconds between two."""
    engine.forget_prefixes()
    inputs = resolve(config)

    def report(state: Progress) -> None:
        if cut():
            raise TimeUp

    run = LiveRun(inputs, inputs.policies[0], engine, report, wall=False)
    begun = time.perf_counter()
    with suppress(TimeUp):
        run.run()  # its clock jumps over idle time, so that all but the steps is our loop's
    spent = time.perf_counter() - begun
    found = []
    for step in run.backend.steps:
        times = {
            "seconds": step.measured_s,
            "off_core_s": step.off_core_s if engine.on_one_core else 0.0,
        }
        found.append(StepSample(TRAFFIC, _POINT + number, number, step.work, **times))
    between = spent - sum(step.seconds for step in found)
    return found, between / max(len(found), 1)


def _runs(
    engine: VllmEngine, path: Path, seed: int, quick: bool
) -> Iterator[tuple[str, SimulationConfig]]:
    settings = engine.settings
    longest = min(_TOKENS, settings.max_model_len - 1, settings.max_step_tokens)
    common = {
        "trace": "poisson",
        "requests": max(16, settings.max_num_seqs // 2)
        if quick
        else max(48, settings.max_num_seqs),
        "cap_length": longest,
        "slo": "none",
        "profile": str(path),
        "async_scheduling": False,  # as the engine in this process
        "block_tokens": settings.block_tokens,
    }
    for number, load in enumerate(LOADS):
        own = {"seed": _SEED + 100 * seed + number, "load": load, "num_blocks": engine.num_blocks}
        own["prefix_caching"] = settings.prefix_caching  # policy vllm, on vLLM's own pool
        yield f"traffic at load {load:g}", SimulationConfig(policy=("vllm",), **common, **own)
    if settings.swap_blocks:
        # memory for a quarter of the batch; the engine's own pool must not bind
        batch = max(settings.max_num_seqs // 4, 2)
        blocks = max(
            batch * longest // settings.block_tokens // 2, -(-longest // settings.block_tokens) + 1
        )
        own = {
            "seed": _SEED + 100 * seed + len(LOADS),
            "load": _SWAPPING_LOAD,
            "max_num_seqs": batch,
        }
        room = {
            "num_blocks": min(blocks, engine.num_blocks // 2),
            "host_blocks": settings.swap_blocks // 2,
        }
        yield (
            "traffic that swaps",
            SimulationConfig(policy=("vllm-v0:preemption_mode=swap",), **common, **own, **room),
        )
