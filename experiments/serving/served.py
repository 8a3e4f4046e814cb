"""One engine, served by one policy: what a flood takes, and what its requests wait.

The engine is in this process with the scheduler class of `vllm serve` (docs/serving.md). Its clock
counts the CPU time of the process, and idle time is jumped over. An engine of one thread does
nothing else, so a second is a second of a machine that runs nothing else.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.backends.live.serving.options import read_options
from twinserve.experiments.serving.flood import Case, Engine, Flood, Sent

VLLMS = "vllm.v1.core.sched.scheduler.Scheduler"
OURS = "twinserve.backends.live.serving.scheduler.PolicyScheduler"
_WARM_UP_SEED = 1_000_000
# Real-time requests', seconds.
OBJECTIVES = {"slo_ttft_s": 0.4, "slo_tpot_s": 0.2}


class Clock:
    """Seconds of this process's CPU time, and those that were jumped over."""

    def __init__(self) -> None:
        self._jumped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._jumped

    def jump(self, to_s: float) -> None:
        """Nothing happens before `to_s`."""
        self._jumped += max(0.0, to_s - self())

    def stepped(self) -> None:
        """The engine has made a step: that took its own time."""


class Counted:
    """A method of `owner` with its calls; `seen` is given what each returned."""

    def __init__(self, owner, name: str, seen: Callable = lambda result: None) -> None:
        self.calls = 0
        self._method, self._seen = getattr(owner, name), seen
        setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        result = self._method(*args, **kwargs)
        self.calls += 1
        self._seen(result)
        return result


class Served:
    """An engine under one case after another; `run` floods it. Use it as a context manager."""

    def __init__(
        self, case: Case, engine: Engine, folder: Path, clock: Clock | None = None
    ) -> None:
        self.case, self.clock, self._profile = case, clock or Clock(), engine.profile
        ours = case.policy is not None
        self.engine = VllmEngine(
            LiveSettings(
                tiny_model.write_model(folder / engine.model, engine.model),
                engine.blocks,
                engine.block_tokens,
                engine.seats,
                engine.step_tokens,
                engine.longest,
                prefix_caching=True,  # as a server has it unless it is told
                swap_blocks=case.host_blocks,
                scheduler=OURS if ours else VLLMS,
                extra={"additional_config": self._options(case)} if ours else {},
            )
        )
        self._tokens: list[int] = []  # of each step
        self._requests: list[int] = []
        scheduler = self.engine.scheduler
        Counted(scheduler, "schedule", self._scheduled)
        self._preempted = Counted(scheduler, "_take_memory" if ours else "_preempt_request")
        if ours:
            scheduler.now = self.clock

    def _options(self, case: Case) -> dict:
        given = {"policy": case.policy, "clients": "trusted", "profile": self._profile}
        return {**given, **OBJECTIVES, **case.options}

    def serve(self, case: Case) -> None:
        """Another policy on the same idle engine, whose cache is emptied. Raises LiveEngineError if
        it cannot be served so."""
        if case.host_blocks != self.case.host_blocks:
            raise ValueError("an engine's host memory cannot change; build another engine")
        self.engine.forget_prefixes()
        self.engine.scheduler.serve(read_options(self._options(case)))
        self.case = case

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.engine.close()

    def _scheduled(self, output) -> None:
        if output.total_num_scheduled_tokens:
            self._tokens.append(output.total_num_scheduled_tokens)
            self._requests.append(len(output.num_scheduled_tokens))

    def warm_up(self, flood: Flood) -> None:
        """A small flood: kernels are prepared, tables have grown."""
        few = replace(flood, best_effort=32, output=20, real_time=2, every_s=0.05)
        self.run(few, _WARM_UP_SEED)

    def run(self, flood: Flood, seed: int) -> dict:
        """Seconds, counts and the answers' token ids."""
        before, began = self._counts(), self.clock()
        self._tokens, self._requests, moved = [], [], 0
        to_come = list(flood.requests(self.engine.vocab, seed))[::-1]
        sent: dict[str, Sent] = {}
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        while to_come or len(last) < len(sent):
            if len(last) == len(sent):
                self.clock.jump(began + to_come[-1].at_s)
            while to_come and to_come[-1].at_s <= self.clock() - began:
                one = to_come.pop()
                sent[one.name], answers[one.name] = one, []
                attributes = {"class": one.service_class}
                self.engine.submit(
                    one.name, one.prompt, one.output, math.inf, attributes=attributes
                )
            answer = self.engine.step(PlannedStep())
            self.clock.stepped()
            now = self.clock() - began
            moved += sum(report.tokens for report in answer.transfers)
            for name, tokens in answer.tokens.items():
                first.setdefault(name, now)
                answers[name] += tokens
            last |= dict.fromkeys(answer.finished, now)
        return {
            **self._summary(sent, first, last),
            **{name: value - before[name] for name, value in self._counts().items()},
            "moved_tokens": moved,
            "answers": answers,
        }

    def _counts(self) -> dict:
        """So far, of all runs."""
        scheduler, ours = self.engine.scheduler, self.case.policy is not None
        return {"preemptions": self._preempted.calls, "drift": scheduler.drift if ours else 0}

    def _summary(self, sent, first, last) -> dict:
        waits = np.array([first[n] - s.at_s for n, s in sent.items() if s.service_class == "rt"])
        known = sum(len(s.prompt) + s.output - 1 for s in sent.values())
        return {
            "whole_s": max(last.values()),
            "ttft_mean_s": float(waits.mean()),
            "ttft_max_s": float(waits.max()),
            "steps": len(self._tokens),
            "batch": float(np.mean(self._requests)),
            "computed_again": sum(self._tokens) - known,
        }


_open: list[tuple[Served, tempfile.TemporaryDirectory]] = []  # of this process


def flooded(case: Case, engine: Engine, flood: Flood, seed: int) -> dict:
    """`Served.run` in a process that keeps its engine from case to case."""
    if not _open:
        folder = tempfile.TemporaryDirectory()
        _open.append((Served(case, engine, Path(folder.name)), folder))
        _open[0][0].warm_up(flood)
    served = _open[0][0]
    if case != served.case:
        served.serve(case)
        served.warm_up(flood)
    return served.run(flood, seed)
