"""One engine, served by one policy: what a flood takes, and what its requests wait.

The engine is in this process with the scheduler class of `vllm serve` (docs/serving.md). Its clock
counts the CPU time of the process, and idle time is jumped over: an engine of one thread does
nothing else, so a second is a second of a machine that runs nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.experiments.serving.flood import Flood, Sent

STOCK = "vllm.v1.core.sched.scheduler.Scheduler"
OURS = "twinserve.backends.live.serving.scheduler.PolicyScheduler"
# Real-time requests', seconds.
OBJECTIVES = {"slo_ttft_s": 0.4, "slo_tpot_s": 0.2}


@dataclass(frozen=True)
class Case:
    """policy: as `--additional-config` has it, None: vLLM with its own scheduler; options: further
    keys of it; host_blocks: room for swapped KV; prefixes: whether the engine caches any."""

    name: str
    policy: str | None
    options: dict = field(default_factory=dict)
    host_blocks: int = 0
    prefixes: bool = False


@dataclass(frozen=True)
class Engine:
    """Of all cases: blocks of the pool, tokens a block, seats, tokens of a step and of a request at
    most; model of tiny_model.MODELS; profile: what policies believe a step takes."""

    model: str = "tiny"
    blocks: int = 128
    block_tokens: int = 32
    seats: int = 16
    step_tokens: int = 256
    longest: int = 512
    profile: str = "llama-3.1-8b@h100"


class Clock:
    """Seconds of this process's CPU time since `start`, and those that were jumped over."""

    def start(self) -> None:
        self._start = time.process_time()

    def __call__(self) -> float:
        return time.process_time() - self._start

    def jump(self, to_s: float) -> None:
        """Nothing happens before `to_s`."""
        self._start -= max(0.0, to_s - self())


class Counted:
    """A method of the engine's scheduler, with its calls' CPU time."""

    def __init__(self, scheduler, name: str, seen: Callable | None = None) -> None:
        self.seconds, self.calls = 0.0, 0
        self._method, self._seen = getattr(scheduler, name), seen
        setattr(scheduler, name, self)

    def __call__(self, *args, **kwargs):
        start = time.process_time()
        result = self._method(*args, **kwargs)
        self.seconds += time.process_time() - start
        self.calls += 1
        if self._seen is not None:
            self._seen(result)
        return result


class Served:
    """An engine under one case; `run` floods it. Use it as a context manager."""

    def __init__(self, case: Case, engine: Engine, folder: Path) -> None:
        self.case = case
        extra: dict = {}
        if case.policy is not None:
            given = {"policy": case.policy, "clients": "trusted", "profile": engine.profile}
            extra["additional_config"] = {**given, **OBJECTIVES, **case.options}
        self.engine = VllmEngine(
            LiveSettings(
                tiny_model.write_model(folder / engine.model, engine.model),
                engine.blocks,
                engine.block_tokens,
                engine.seats,
                engine.step_tokens,
                engine.longest,
                prefix_caching=case.prefixes,
                swap_blocks=case.host_blocks,
                scheduler=STOCK if case.policy is None else OURS,
                extra=extra,
            )
        )
        self.clock = Clock()
        self.clock.start()
        self._tokens: list[int] = []  # of each step
        self._requests: list[int] = []
        scheduler = self.engine.scheduler
        self._schedule = Counted(scheduler, "schedule", self._scheduled)
        self._update = Counted(scheduler, "update_from_output")
        # the scheduler's own preemptions; a policy's are counted by its statistics
        self._preempt = Counted(scheduler, "_preempt_request")
        if case.policy is not None:
            scheduler.now = self.clock

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.engine.close()

    def _scheduled(self, output) -> None:
        if output.total_num_scheduled_tokens:
            self._tokens.append(output.total_num_scheduled_tokens)
            self._requests.append(len(output.num_scheduled_tokens))

    @property
    def policy_blocks(self) -> int:
        """KV blocks that the policy has."""
        if self.case.policy is None:
            return self.engine.num_blocks
        return self.engine.scheduler.decider.core.ledger.num_blocks

    @property
    def ledger(self) -> str:
        return (
            "" if self.case.policy is None else self.engine.scheduler.decider.core.ledger.name
        )

    def warm_up(self, flood: Flood) -> None:
        """A small flood: kernels are prepared, tables have grown."""
        few = replace(flood, best_effort=2 * 16, output=20, real_time=2, every_s=0.05)
        self.run(few, 99)

    def run(self, flood: Flood, seed: int) -> dict:
        """Seconds, counts and the answers' token ids."""
        before = self._counts()
        self._tokens, self._requests = [], []
        to_come = list(flood.requests(self.engine.vocab, seed))[::-1]
        sent: dict[str, Sent] = {}
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        self.clock.start()
        if self.case.policy is not None:
            self._begin_anew()
        while to_come or len(last) < len(sent):
            if len(last) == len(sent):
                self.clock.jump(to_come[-1].at_s)
            while to_come and to_come[-1].at_s <= self.clock():
                one = to_come.pop()
                sent[one.name] = one
                answers[one.name] = []
                attributes = {"class": one.service_class}
                name = f"{seed}-{one.name}"
                self.engine.submit(name, one.prompt, one.output, np.inf, attributes=attributes)
            answer = self.engine.step(PlannedStep())
            now = self.clock()
            for name, tokens in answer.tokens.items():
                name = name.partition("-")[2]
                first.setdefault(name, now)
                answers[name] += tokens
            last |= {name.partition("-")[2]: now for name in answer.finished}
        return {
            **self._summary(flood, sent, first, last),
            **{name: value - before[name] for name, value in self._counts().items()},
            "answers": answers,
        }

    def _begin_anew(self) -> None:
        """The clock starts again; nothing of an earlier run is left but what the policy learnt."""
        decider = self.engine.scheduler.decider
        if decider.core.active:
            raise RuntimeError("requests of an earlier run are still here")

    def _counts(self) -> dict:
        ours = self.case.policy is not None
        stats = self.engine.scheduler.stats if ours else None
        return {
            "preemptions": stats.preempted if ours else self._preempt.calls,
            "drift": self.engine.scheduler.drift if ours else 0,
            "decision_s": stats._decision_s if ours else 0.0,
            "schedule_s": self._schedule.seconds,
            "update_s": self._update.seconds,
        }

    def _summary(self, flood: Flood, sent, first, last) -> dict:
        waits = np.array([first[n] - s.at_s for n, s in sent.items() if s.service_class == "rt"])
        flood_waits = [first[n] - s.at_s for n, s in sent.items() if s.service_class == "be"]
        known = sum(len(s.prompt) + s.output - 1 for s in sent.values())
        return {
            "whole_s": max(last.values()),
            "ttft_mean_s": float(waits.mean()),
            "ttft_max_s": float(waits.max()),
            "flood_ttft_mean_s": float(np.mean(flood_waits)),
            "steps": len(self._tokens),
            "batch": float(np.mean(self._requests)),
            "computed_again": sum(self._tokens) - known,
        }
