"""Locked replay on a physical layout. A decision log names requests and tokens, not slots. So its
run is repeated on simulated time with its ledger, and each plan is executed in the ledger's own
slots."""

import pandas as pd

from twinserve.backends.live.engine.engine import StepAnswer, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.sim.results.decisions import DecisionLog
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.presets import check_policy_file
from twinserve.sim.twin.live import LiveRun
from twinserve.sim.twin.replay import LockedReplay, parting, tokens_of


def replay_physical(
    log: DecisionLog,
    engine: VllmEngine,
    texts: PromptTexts,
    report=None,
    inputs: Inputs | None = None,
) -> LockedReplay:
    """As `replay.replay_locked`, on an engine built with `physical`. live_free_blocks are those of
    the repeated ledger.

    inputs  of the run, if they differ from what its settings resolve to

    Raises SettingsError if a step is decided differently from the log.
    """
    if inputs is None:
        check_policy_file(log.run)
        inputs = resolve(SimulationConfig(**log.run["config"]))
    run = LiveRun(inputs, inputs.policies[0], engine, None, wall=False, texts=texts, predicted=True)
    scheduler, backend = engine.scheduler, run.backend
    scheduler.forget_counts()
    names = [request.id for request in log.requests]
    rows: list[dict] = []
    answers: list[StepAnswer] = []
    drifts = [scheduler.drift]

    def note(answer: StepAnswer) -> None:
        number = len(answers)
        answers.append(answer)
        drifts.append(scheduler.drift)
        step = log.steps[number] if number < len(log.steps) else None
        logged = {} if step is None else {names[row]: n for row, n in step.grants.items()}
        if drifts[-1] == drifts[-2] and answer.scheduled.grants != logged:
            raise SettingsError(
                f"step {number + 1} of the log: the policy now decides differently; simulate the "
                "run again with --decisions, and replay that"
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
    tokens = tokens_of(answers)
    parted = parting(scheduler, log.answers, tokens)
    return LockedReplay(pd.DataFrame(rows), tokens, scheduler.first_drift, 0, answers, parted)
