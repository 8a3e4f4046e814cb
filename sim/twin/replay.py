"""Locked replay: a live engine executes the decisions of a simulated run, step by step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from twinserve.backends.live.engine.engine import StepAnswer, VllmEngine
from twinserve.backends.live.engine.planned import EngineRequests, PlannedStep
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.profiles.measured.disturbed import disturbed
from twinserve.sim.engine.garbage import collected_seldom
from twinserve.sim.results.decisions import DecisionLog, LoggedStep


def parting(scheduler, expected: Mapping[str, int], tokens: Mapping[str, Sequence[int]]) -> str:
    """One line, or nothing if all is as it should be.

    scheduler  of the engine (engine.scheduler.Steering), which counted this run alone
    expected   request id -> tokens that its answer should have
    tokens     request id -> token ids emitted
    """
    if scheduler.drift:
        of = f"{scheduler.drift:,} of {scheduler.steps:,} steps drifted"
        return f"the engine parted from its plans at {scheduler.first_drift} ({of})"
    short = [name for name, n in expected.items() if len(tokens.get(name, ())) != n]
    if short:
        name = short[0]
        of = f"{len(short):,} of {len(expected):,} answers differ in length"
        return f"{name} got {len(tokens.get(name, ())):,} of {expected[name]:,} tokens ({of})"
    return ""


@dataclass(frozen=True)
class LockedReplay:
    """Result of a locked replay.

    steps    one row a step: start_s and predicted_s (of the logged run: simulated, or measured if
             live), measured_s, off_core_s (of these, without a core; NaN: not known),
             prefill_tokens, decode_requests, draft_tokens (if drafts were found),
             planned_free_blocks, live_free_blocks, moved (KV went over the link), drift (bool: vLLM
             did not schedule the plan, or its drafts had another outcome). Of replays taken
             `together`: measured_s is the median of the undisturbed repeats, spread_s their mean
             distance from it, and calm their number; of a step with none, the median of the
             repeats' time on their core
    tokens   request id -> token ids emitted
    first_drift   how the first such step differed; empty if there was none
    evictions     cached blocks that vLLM gave up on the way
    parted        one line: the first deviation from the log, or an incomplete answer; empty if none
    """

    steps: pd.DataFrame
    tokens: dict[str, list[int]]
    first_drift: str
    evictions: int
    answers: list[StepAnswer]
    parted: str = ""
    repeats: int = 1

    @property
    def drift(self) -> int:
        """Steps in which vLLM did not schedule exactly the plan, hits included."""
        return int(self.steps["drift"].sum())

    @property
    def free_blocks_differ(self) -> int:
        """Steps after which vLLM's pool had another number of free blocks than the ledger."""
        return int((self.steps["planned_free_blocks"] != self.steps["live_free_blocks"]).sum())

    def error(self) -> dict[str, float]:
        """Return measured against predicted step times, without steps that moved KV (their
        transfers are accounted, not always physical). In % of the measured: bias and mean absolute
        error of a step, and the error of the sum. With repeats, also the difference of one repeat
        from the median."""
        steps = self.steps[~self.steps["moved"]]
        measured, predicted = steps["measured_s"], steps["predicted_s"]
        relative = predicted / measured - 1
        repeated = (
            {"repeat_error_pct": float(100 * (steps["spread_s"] / measured).mean())}
            if "spread_s" in steps
            else {}
        )
        return {
            "steps": len(steps),
            **repeated,
            **self.noise(),
            "mean_error_pct": float(100 * relative.mean()),
            "mean_absolute_error_pct": float(100 * relative.abs().mean()),
            "total_error_pct": float(100 * (predicted.sum() / measured.sum() - 1)),
        }

    def without_loop(self, loop_s: float) -> LockedReplay:
        """Return the same without `loop_s` seconds a step of our own loop: a replay has none."""
        if not loop_s:
            return self
        predicted = self.steps["predicted_s"] - loop_s
        return replace(self, steps=self.steps.assign(predicted_s=predicted))

    def noise(self) -> dict[str, float]:
        """Of replays taken together: the share of all measurements that others disturbed, and of
        the steps that have none which they did not, in %."""
        if "calm" not in self.steps:
            return {}
        calm = self.steps["calm"].to_numpy()
        return {
            "disturbed_pct": float(100 * (1 - calm.sum() / max(len(calm) * self.repeats, 1))),
            "never_calm_pct": float(100 * np.mean(calm == 0)) if len(calm) else 0.0,
        }


def replay_locked(
    log: DecisionLog, engine: VllmEngine, texts: PromptTexts | None = None, report=None
) -> LockedReplay:
    """Execute `log` on `engine`, which must have no requests. texts: token ids of the prompts;
    report(done, total) is called now and then. Raises LiveEngineError if the engine stops."""
    with collected_seldom():
        return _replayed(
            log, engine, texts or PromptTexts(engine.vocab, engine.settings.block_tokens), report
        )


def _replayed(log: DecisionLog, engine: VllmEngine, texts: PromptTexts, report) -> LockedReplay:
    order = sorted(range(len(log.requests)), key=lambda row: (log.requests[row].arrival_s, row))
    names = [request.id for request in log.requests]
    due = 0
    rows, answers = [], []
    scheduler, on_engine = engine.scheduler, EngineRequests(names)
    scheduler.forget_counts()
    pool = scheduler.kv_cache_manager.block_pool
    evictions = _count_evictions(pool)
    alone = engine.on_one_core
    for number, step in enumerate(log.steps):
        while due < len(order) and log.requests[order[due]].arrival_s <= step.start_s:
            request = log.requests[order[due]]
            prompt = texts.tokens(request.id, request.prompt_tokens, request.prefix)
            engine.submit(request.id, prompt, request.most_output_tokens, request.arrival_s)
            due += 1
        for row in step.withdrawn:
            on_engine.forget(names[row])
            engine.abort(names[row])
        planned = planned_step(step, on_engine)
        drifted = scheduler.drift
        on_core, started = time.thread_time(), time.perf_counter()
        answer = engine.step(planned)
        measured = time.perf_counter() - started
        off_core = max(measured - (time.thread_time() - on_core), 0.0)
        answers.append(answer)
        for name in answer.finished:
            on_engine.forget(name)
        if step.verified is not None and (found := _other_drafts(step.verified, answer, names)):
            scheduler.part(found)
        tokens = np.array(list(step.grants.values()))
        rows.append(
            {
                "start_s": step.start_s,
                "predicted_s": step.seconds,
                "measured_s": measured,
                "off_core_s": off_core if alone else float("nan"),
                **_kinds(step, tokens),
                "planned_free_blocks": step.free_blocks,
                "live_free_blocks": answer.scheduled.free_blocks,
                "moved": planned.moves,
                "drift": scheduler.drift > drifted,
            }
        )
        if report is not None and number % 32 == 0:
            report(number + 1, len(log.steps))
    for row in log.withdrawn:
        engine.abort(names[row])
    tokens = tokens_of(answers)
    return LockedReplay(
        pd.DataFrame(rows),
        tokens,
        scheduler.first_drift,
        evictions(),
        answers,
        parting(scheduler, log.answers, tokens),
    )


def _kinds(step: LoggedStep, tokens: np.ndarray) -> dict[str, int]:
    """Tokens of prompts in a step, requests that decode, and drafts, if there are some; tokens:
    int64[n], its grants. The log does not say which row was padded: that counts as a prompt."""
    drafts = {}
    if step.verified is not None:
        drafted = np.array([step.verified.get(row, (0,))[0] for row in step.grants], np.int64)
        tokens = tokens - drafted
        drafts = {"draft_tokens": int(drafted.sum())}
    prefill, decodes = int(tokens[tokens > 1].sum()), int((tokens == 1).sum())
    return {"prefill_tokens": prefill, "decode_requests": decodes, **drafts}


def together(repeats: list[LockedReplay]) -> LockedReplay:
    """Merge replays of one log: facts that hold in all, and each step's median time over the
    undisturbed ones (`profiles.measured.disturbed`), as in a calibration."""
    first = repeats[0]
    measured = np.array([r.steps["measured_s"] for r in repeats])  # float64[repeats, steps]
    off_core = np.array([_off_core(r.steps) for r in repeats])
    work = np.tile(np.arange(measured.shape[1]), len(repeats))
    noisy = disturbed(work, measured.ravel(), off_core.ravel(), least=2).reshape(measured.shape)
    calm = len(repeats) - noisy.sum(axis=0)
    taken = np.where(noisy & (calm > 0), np.nan, np.where(calm, measured, measured - off_core))
    median = np.nanmedian(taken, axis=0)
    drift = np.any([r.steps["drift"] for r in repeats], axis=0)
    steps = first.steps.assign(measured_s=median, calm=calm, drift=drift)
    if len(repeats) > 1:
        steps["spread_s"] = np.nanmean(np.abs(taken - median), axis=0)
    differed = next((r.first_drift for r in repeats if r.first_drift), "")
    parted = next((r.parted for r in repeats if r.parted), "")
    return LockedReplay(
        steps, first.tokens, differed, first.evictions, first.answers, parted, len(repeats)
    )


def _off_core(steps: pd.DataFrame) -> np.ndarray:
    """Return float64[steps]; 0: not known."""
    if "off_core_s" not in steps:
        return np.zeros(len(steps))
    return np.nan_to_num(steps["off_core_s"].to_numpy(np.float64))


def planned_step(step: LoggedStep, on_engine: EngineRequests) -> PlannedStep:
    """A logged decision, with what was decided since the step before it, for the engine."""
    for plan in step.before:
        on_engine.follow(plan.preempted, plan.admitted.items(), plan.swapped_in)
    return on_engine.planned(
        step.grants.items(), step.preempted, step.admitted.items(), step.swapped_in
    )


def _other_drafts(
    logged: dict[int, tuple[int, int, int]], answer: StepAnswer, names: list[str]
) -> str:
    """Whose drafts came to something else than logged, in one line; empty if there is none."""
    verified = {} if answer.scheduled is None else answer.scheduled.drafts
    for row, (drafts, right, _) in logged.items():
        name = names[row]
        theirs = verified.get(name, 0), answer.accepted.get(name, 0)
        if theirs != (drafts, right):
            return (
                f"{name}: {right} of {drafts} drafts logged as right, {theirs[1]} of {theirs[0]} "
                "were"
            )
    return ""


def tokens_of(answers: list[StepAnswer]) -> dict[str, list[int]]:
    """Request id -> all token ids emitted, over the steps of a run."""
    texts: dict[str, list[int]] = {}
    for answer in answers:
        for name, tokens in answer.tokens.items():
            texts.setdefault(name, []).extend(tokens)
    return texts


def _count_evictions(pool):
    """Watch `pool` from now on; the result tells how many cached blocks it has given up since."""
    count = 0
    evict = pool._maybe_evict_cached_block

    def counted(block):
        nonlocal count
        evicted = evict(block)
        count += bool(evicted)
        return evicted

    pool._maybe_evict_cached_block = counted

    def total() -> int:
        pool._maybe_evict_cached_block = evict
        return count

    return total
