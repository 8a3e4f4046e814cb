"""Live servers of vLLM on this machine's CPU: `twinserve study serving`.

price    what a policy costs, and gains, when an engine is served with it: real-time requests arrive
         in a flood of best-effort ones, and vLLM's own scheduler gets the same flood at the same
         time. docs/serving.md has the table.
plan     what an operator does, from end to end: measure a server with its own benchmark, calibrate
         from those files, and hold what is then planned against the server again. docs/plan.md has
         the results.

Needs vLLM. Seeds are repeats.
"""

import multiprocessing
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.experiments.benchmark.main import MACHINE
from twinserve.experiments.serving.flood import CASES, STOCK, Case, Engine, Flood
from twinserve.experiments.study.grid import Grid, repeats
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import MEDIANS, Medians

SHARES = (0.8, 1.25)  # of what one replica keeps by the plan
PRICES = ("whole_s", "over_vllm", "ttft_s", "sooner", "steps", "preemptions", "computed_again")
PRICES += ("vllm_s", "vllm_ttft_s", "differing")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- what a policy costs ---------------------------------------------------------------------------
class Processes:
    """A process for each kind of engine, for its own CPU time and memory: vLLM's own scheduler, and
    ours with each size of host memory, of each model."""

    def __init__(self) -> None:
        self._open: dict[tuple, ProcessPoolExecutor] = {}

    def run(self, chosen: Sequence[Case], engine: Engine, flood: Flood, seed: int) -> list[dict]:
        """The same flood with each case, at the same time: whatever else the machine does slows all
        of them. Raises LiveEngineError; the engines are then made anew for the next case."""
        from twinserve.experiments.serving.served import flooded

        spawn = multiprocessing.get_context("spawn")
        waiting = []
        for case in chosen:
            kind = case.policy is None, case.host_blocks, engine
            if kind not in self._open:
                self._open[kind] = ProcessPoolExecutor(1, spawn)
            waiting.append(self._open[kind].submit(flooded, case, engine, flood, seed))
        try:
            return [task.result() for task in waiting]
        except BrokenExecutor:
            self.close()
            raise LiveEngineError("the engine's process ended") from None
        except Exception as error:  # whatever it is, the other cases go on
            self.close()
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise LiveEngineError(said) from error

    def close(self) -> None:
        for process in self._open.values():
            process.shutdown(cancel_futures=True)
        self._open.clear()


ENGINES = Processes()


def price(
    policy: str,
    seed: int,
    options: Mapping[str, Any] | None = None,
    host_blocks: int = 0,
    model: str = Engine.model,
    best_effort: int = Flood.best_effort,
) -> dict[str, float]:
    """The flood served with a policy. Seconds are CPU time: until the last request has ended
    (whole_s), and until the first token of real-time requests, mean (ttft_s); over_vllm and sooner
    compare both with vLLM's own scheduler (vllm_s, vllm_ttft_s). differing: answers that are not
    vLLM's. All nan if the policy cannot be served so; it prints why."""
    installed_vllm()  # before a process is started
    case = Case(policy, dict(options or {}), host_blocks)
    flood = Flood(best_effort=best_effort)
    try:
        one, stock = ENGINES.run((case, STOCK), Engine(model=model), flood, seed)
    except LiveEngineError as error:
        say(f"{policy}: {error}")
        return dict.fromkeys(PRICES, np.nan)
    answers, others = one["answers"], stock["answers"]
    return {
        "whole_s": one["whole_s"],
        "over_vllm": one["whole_s"] / stock["whole_s"],
        "ttft_s": one["ttft_mean_s"],
        "sooner": stock["ttft_mean_s"] / one["ttft_mean_s"],
        **{name: one[name] for name in ("steps", "preemptions", "computed_again")},
        "vllm_s": stock["whole_s"],
        "vllm_ttft_s": stock["ttft_mean_s"],
        "differing": sum(answers[name] != others[name] for name in others),
    }


# -- an operator's whole way -----------------------------------------------------------------------
def plan(repeats: int, requests: int) -> list[dict]:
    """What one replica keeps by a plan of a trace of so many requests, and the planned server at
    `SHARES` of that, by turns."""
    from twinserve.experiments.serving.limit import planned  # vLLM comes along

    installed_vllm()
    with tempfile.TemporaryDirectory() as folder:
        found, rows = planned(Path(folder), requests, SHARES, repeats, say)
    command = f"vllm serve small {' '.join(found.arguments)}"
    return rows.assign(limit_rps=found.rate_rps, command=command).to_dict("records")


STUDY = Study(
    "serving",
    "",
    [
        MACHINE,
        Figure(
            "price",
            "Policies in a flood, compared with vLLM's own scheduler",
            Grid(
                {"served": CASES},
                {"best_effort": Flood.best_effort},
                few={"served": ("bros:chunk=fit",)},
                quick={"best_effort": 8},
            ),
            price,
            Medians(("served",), ("whole_s", "over_vllm", "ttft_s")),
        ),
        Figure(
            "plan",
            "The planned server, below and above its limit",
            # at least 20 requests, for a 90th percentile
            lambda scale: repeats(scale, requests=30 if scale.quick else 600),
            plan,
            lambda points: points,
        ),
    ],
    seeds=3,
    workers=1,
    intro=MEDIANS,
)
