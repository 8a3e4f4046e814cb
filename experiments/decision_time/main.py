"""How long a decision takes: `python -m twinserve.experiments.decision_time`.

A decision is one `EngineCore.plan`: what arrived is told to the policy, it plans, and asks the KV
ledger as it does so. Every policy is measured in a steady state with a full batch and a queue of a
given length. docs/benchmark.md says more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
from cyclopts import Parameter
from rich.console import Console

from twinserve.experiments.benchmark.measure import (
    BenchmarkError,
    CpuTimed,
    machine,
    one_core,
    run_command,
)
from twinserve.experiments.benchmark.tables import markdown, show
from twinserve.experiments.decision_time.tables import lines_and_tables
from twinserve.experiments.study.output import check_target
from twinserve.policies.registry import parse_policy, policy_names
from twinserve.sim.cli.main import run_app
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import PAPERS_ENGINE, SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation, run_policy
from twinserve.traces.apps.generate import applications
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.tidal import tidal
from twinserve.traces.transform import merge
from twinserve.traces.write import write_atomically

BATCH = 128
# tokens, uniform; about one request ends a step, and the next one begins
PROMPT, OUTPUT = (128, 384), (1, 256)
# Justitia: applications a minute -> ms
TABLE_III = {15: 0.778, 20: 1.827, 30: 3.076, 50: 5.190, 100: 8.093}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    queued     requests that wait
    warm_up, decisions   not measured, measured; each of a run
    repeats    runs of each case; the one with the median of their medians counts
    rates      applications a minute
    apps       applications of each rate
    hybrid_s   seconds of BROS's hybrid setting
    whole      requests of Mooncake's trace in the whole-trace runs; None: all of them
    day_s      seconds into which the tidal day is pressed; rates stay
    documents  questions of the offline pool beside it
    """

    queued: tuple[int, ...] = (10, 100, 1_000, 10_000)
    warm_up: int = 100
    decisions: int = 400
    repeats: int = 3
    rates: tuple[int, ...] = tuple(TABLE_III)
    apps: int = 300
    hybrid_s: float = 60.0
    whole: int | None = None
    day_s: float = 86_400.0
    documents: int | None = None


QUICK = Sizes((2, 5), 5, 10, 1, (30,), 8, 3.0, 20, 60.0, 20)


class SteadyQueue:
    """An engine with a full batch and `queued` requests behind it; for each one that ends another
    one arrives.

    Half of the requests are real-time, with objectives of 0.4 s and 0.2 s. Every step is planned by
    itself.
    """

    def __init__(self, inputs: Inputs, queued: int, seed: int = 0) -> None:
        self.engine = Simulation(inputs, inputs.policies[0]).engines[0]
        self.engine.on_ended = self._replace
        self.decisions = self.engine.core.plan = CpuTimed(self.engine.core.plan)
        self.batches: list[int] = []
        self.waiting: list[int] = []
        self._rng = np.random.default_rng(seed)
        self._arrived = 0
        complete = self.engine.core.complete

        def watched(plan, outcome):
            self.batches.append(len(plan.rows))
            self.waiting.append(self.engine.core.waiting)
            return complete(plan, outcome)

        self.engine.core.complete = watched
        for _ in range(BATCH + queued):
            self.arrive()

    def _replace(self, rows: list[int]) -> None:
        for _ in rows:
            self.arrive()

    def arrive(self) -> None:
        service_class = self._arrived % 2
        values = {} if service_class else {"slo_ttft_s": 0.4, "slo_tpot_s": 0.2}
        self.engine.submit(
            f"r{self._arrived}",
            int(self._rng.integers(*OUTPUT, endpoint=True)),
            prompt_tokens=int(self._rng.integers(*PROMPT, endpoint=True)),
            arrival_s=self.engine.clock.now,
            service_class=service_class,
            **values,
        )
        self._arrived += 1

    def decide(self, decisions: int) -> np.ndarray:
        """float64[decisions, 2]: CPU and wall seconds of the next ones."""
        cpu, wall = self.decisions.seconds, self.engine.decision_seconds
        first = len(wall)
        while len(wall) < first + decisions:
            self.engine.clock.step()
        return np.column_stack([cpu[first : first + decisions], wall[first : first + decisions]])


def settings(policy: str, **changes) -> SimulationConfig:
    base = {
        "policy": (policy,),
        "trace": "poisson",
        "requests": 1,
        "rate": 1.0,
        "max_num_seqs": BATCH,
        "exact": True,
        **PAPERS_ENGINE,
    }
    return SimulationConfig(**{**base, **changes})


def steady(policy: str, queued: int, sizes: Sizes, num_blocks: int | None = None) -> dict:
    """One policy and length of the queue: CPU seconds of a decision, in the run with the median of
    the medians."""
    runs = []
    for seed in range(sizes.repeats):
        state = SteadyQueue(resolve(settings(policy, num_blocks=num_blocks)), queued, seed)
        gc.collect()
        first = float(state.decide(1)[0, 0])
        state.decide(sizes.warm_up)
        steps = len(state.batches)
        seconds, wall = state.decide(sizes.decisions).T
        runs.append(
            {
                "policy": policy,
                "queued": queued,
                "num_blocks": num_blocks,
                "median_s": float(np.median(seconds)),
                "p99_s": float(np.percentile(seconds, 99)),
                "mean_s": float(seconds.mean()),
                "wall_median_s": float(np.median(wall)),
                "first_s": first,
                "batch": float(np.mean(state.batches[steps:])),
                "waiting": float(np.mean(state.waiting[steps:])),
                "preemptions": int(
                    state.engine.core.requests.recomputes.sum()
                    + state.engine.core.requests.swaps.sum()
                ),
            }
        )
    medians = sorted(run["median_s"] for run in runs)
    chosen = next(run for run in runs if run["median_s"] == medians[len(medians) // 2])
    return {**chosen, "medians_s": medians}


def short_blocks() -> int:
    """KV blocks for about three quarters of a batch."""
    return int(0.75 * BATCH * (sum(PROMPT) / 2 + sum(OUTPUT) / 4) / 16)


def cpu_timed(inputs: Inputs) -> tuple[Simulation, np.ndarray]:
    """The finished run, and float64[decisions]: CPU seconds of each."""
    run = Simulation(inputs, inputs.policies[0])
    core = run.engines[0].core
    decisions = core.plan = CpuTimed(core.plan)
    run.run()
    return run, np.array(decisions.seconds)


def table_iii(rate: int, sizes: Sizes) -> dict:
    """Justitia with `rate` applications a minute, on the profile of its paper's hardware."""
    config = settings(
        "justitia", profile="llama-7b@a100-pcie-40g", max_num_seqs=None, exact=False, slo="none"
    )
    arrivals = np.cumsum(np.random.default_rng(rate).exponential(60.0 / rate, sizes.apps))
    run, seconds = cpu_timed(replace(resolve(config), workload=applications(arrivals)))
    return {
        "rate": rate,
        "paper_s": TABLE_III.get(rate, float("nan")) / 1000,
        "decisions": len(seconds),
        "mean_s": float(seconds.mean()),
        "p99_s": float(np.percentile(seconds, 99)),
        "most_waiting": int(run.rows().steps["waiting"].max()),
    }


def hybrid(policy: str, sizes: Sizes) -> dict:
    """BROS's hybrid setting, every step planned: decision time as a part of the iteration."""
    config = SimulationConfig(
        policy=(policy,),
        trace="sharegpt",
        rate=10.0,
        duration=sizes.hybrid_s,
        pool=128,
        profile="qwen2.5-14b@a100-40g:tp2",
        slo="ttft=0.4,tpot=0.2",
        exact=True,
        **PAPERS_ENGINE,
    )
    run, seconds = cpu_timed(resolve(config))
    steps = run.rows().steps
    return {
        "policy": policy,
        "decision_s": float(seconds.mean()),
        "p99_s": float(np.percentile(seconds, 99)),
        "iteration_s": float((steps["end_s"] - steps["start_s"]).mean()),
        "batch": float((steps["prefill_requests"] + steps["decode_requests"]).mean()),
    }


def whole_trace(policy: str, sizes: Sizes) -> dict:
    """`simulate` of Mooncake's conversation trace, the whole process."""
    arguments = ["--policy", policy, "--trace", "mooncake", "--quiet"]
    arguments += ["--requests", str(sizes.whole)] if sizes.whole is not None else []
    try:
        return {"policy": policy, **asdict(run_command(arguments)), "refused": ""}
    except BenchmarkError as error:
        return {"policy": policy, "wall_s": float("nan"), "refused": str(error)}


def tidal_day(policy: str, sizes: Sizes) -> dict:
    """A day of online requests, one a second at the peak, and offline questions on long documents
    beside it."""
    config = settings(policy, exact=False, max_num_seqs=None, slo="ttft=1,tpot=0.18")
    inputs = resolve(config)
    online = tidal(duration_s=sizes.day_s)
    offline = longdoc("loogle-short", requests=sizes.documents, block_tokens=config.block_tokens)
    inputs = replace(inputs, workload=merge(online, offline))
    result = run_policy(inputs, inputs.policies[0])
    return {
        "policy": policy,
        "online": len(online),
        "offline": len(offline),
        "steps": len(result.rows.steps),
        "wall_s": result.timing["wall_s"],
        "decisions": result.timing["decisions"],
        "simulated_s": result.summary["duration"],
    }


def measure(
    policies: Sequence[str], sizes: Sizes, whole: bool = False, say: Say = lambda text: None
) -> dict:
    """All measurements as plain values for JSON; seconds. `say`: progress, a line each."""
    with one_core() as core:
        report: dict = {
            "machine": {**machine(), "core": core},
            "sizes": asdict(sizes),
            "batch": BATCH,
        }
        steady(policies[0], sizes.queued[0], QUICK)  # imports, caches
        report["growth"], report["short"] = [], []
        for policy in policies:
            say(f"{policy}: {', '.join(f'{n:,}' for n in sizes.queued)} queued")
            report["growth"] += [steady(policy, queued, sizes) for queued in sizes.queued]
            report["short"].append(
                steady(policy, min(1_000, sizes.queued[-1]), sizes, short_blocks())
            )
        report["hybrid"] = [
            hybrid(policy, sizes) for policy in ("bros", "vllm") if policy in policies
        ]
        if "justitia" in policies:
            say(f"justitia: {', '.join(map(str, sizes.rates))} applications a minute")
            report["table_iii"] = [table_iii(rate, sizes) for rate in sizes.rates]
        if whole:
            report["whole"], report["day"] = [], []
            for policy in policies:
                say(f"{policy}: Mooncake's trace as a whole")
                report["whole"].append(whole_trace(policy, sizes))
            for policy in (name for name in policies if name.startswith("echo")):
                say(f"{policy}: a tidal day")
                report["day"].append(tidal_day(policy, sizes))
        return report


def decision_time(
    *,
    policy: Annotated[list[str] | None, Parameter(name=["--policy", "-p"], negative="")] = None,
    quick: Annotated[bool, Parameter(negative="")] = False,
    whole: Annotated[bool, Parameter(negative="")] = False,
    markdown: Annotated[bool, Parameter(negative="")] = False,
    repeats: int | None = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
) -> None:
    """Measure how long the decisions of the policies take on this machine.

    Parameters
    ----------
    policy: list[str]
        Only these; by default all there are.
    quick: bool
        Tiny sizes: whether it works, not how fast it is.
    whole: bool
        Also the whole of Mooncake's trace under each policy, and a tidal day under Echo's.
    markdown: bool
        Print the tables as Markdown.
    repeats: int
        Runs of each case. [default: 3]
    out: Path
        Write all figures as JSON.
    """
    sizes = QUICK if quick else Sizes()
    if repeats is not None:
        if repeats < 1:
            raise SettingsError(f"--repeats {repeats}: at least one run is needed")
        sizes = replace(sizes, repeats=repeats)
    check_target(out)
    policies = [parse_policy(text).text for text in policy] if policy else policy_names()
    progress = Console(stderr=True, highlight=False)
    report = measure(
        policies, sizes, whole, lambda text: progress.print(text, style="dim", soft_wrap=True)
    )
    if out is not None:
        write_atomically(out, dump_json(report, out.name).encode())
    print_report(report, markdown)


def print_report(report: dict, as_markdown: bool) -> None:
    lines, tables = lines_and_tables(report)
    if as_markdown:
        print(markdown(lines, tables), end="")
    else:
        show(lines, tables, Console(highlight=False))


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="decision_time", help=decision_time.__doc__)
    app.default(decision_time)
    run_app(app, arguments)
