"""Locked replay on a physical layout: a decision log names requests and tokens, not slots, so its run is made again on
simulated time, ledger and all, and each plan is carried out in the ledger's own slots."""

from __future__ import annotations

import pandas as pd

from ..backends.live.engine import StepAnswer, VllmEngine
from ..backends.live.prompts import PromptTexts
from .config import SettingsError, SimulationConfig
from .decisions import DecisionLog
from .inputs import Inputs, resolve
from .live import LiveRun
from .replay import LockedReplay, tokens_of


def replay_physical(
    log: DecisionLog,
    engine: VllmEngine,
    texts: PromptTexts,
    report=None,
    logprobs: int | None = None,
    inputs: Inputs | None = None,
) -> LockedReplay:
    """As `replay.replay_locked`, on an engine built with `physical`. live_free_blocks are those of the ledger made again.

    inputs  of the run, where they are not what its settings resolve to

    Raises SettingsError where a step is decided otherwise than in the log.
    """
    inputs = inputs or resolve(SimulationConfig(**log.run["config"]))
    run = LiveRun(inputs, inputs.policies[0], engine, None, wall=False, logprobs=logprobs, texts=texts, predicted=True)
    scheduler, backend = engine.scheduler, run.backend
    rows: list[dict] = []
    answers: list[StepAnswer] = []
    drifts = [scheduler.drift]

    def note(answer: StepAnswer) -> None:
        number = len(answers)
        answers.append(answer)
        drifts.append(scheduler.drift)
        step = log.steps[number] if number < len(log.steps) else None
        logged = {} if step is None else {log.requests[row].id: tokens for row, tokens in step.grants.items()}
        if drifts[-1] == drifts[-2] and answer.scheduled.grants != logged:
            raise SettingsError(
                f"step {number + 1} of the log was decided otherwise when it was made again; simulate the run anew with "
                "--decisions, and replay that"
            )
        timed = backend.steps[-1]
        rows.append(
            {
                "start_s": step.start_s,
                "predicted_s": step.seconds,
                "measured_s": timed.measured_s,
                "prefill_tokens": timed.prefill_tokens,
                "decode_requests": timed.work.decode_requests,
                "planned_free_blocks": step.free_blocks,
                "live_free_blocks": answer.scheduled.free_blocks,
                "moved": timed.physical_moves,
                "drift": drifts[-1] > drifts[-2],
            }
        )
        if report is not None and number % 32 == 0:
            report(number + 1, len(log.steps))

    backend.on_answer = note
    run.run()
    return LockedReplay(pd.DataFrame(rows), tokens_of(answers), scheduler.first_drift, 0, answers)
