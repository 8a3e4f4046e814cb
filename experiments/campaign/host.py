"""Stage `host` of a campaign: vLLM's own loop with and without asynchronous scheduling. With it,
the default of a server, the loop plans a step while the one before it runs."""

import time
from dataclasses import replace

import numpy as np

from twinserve.experiments.campaign.setup import (
    MODEL_SIZES,
    STEPS,
    Deadline,
    Engines,
    OutOfTime,
    StageError,
    Store,
    mode_name,
)
from twinserve.profiles.composition import decode_work
from twinserve.profiles.measured.model import HiddenTimes
from twinserve.profiles.profile import Profile

SCHEDULERS = {
    "async": {
        "scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        "async_scheduling": True,
    },
    "sync": {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler", "async_scheduling": False},
}
BATCHES = (1, 8, 32, 128, 256)
_CONTEXT = 1024  # tokens
_STEPS = 64  # timed, of each batch
_SETTLE = 8  # steps before that
_LEAST = 2  # batches that tell how host time grows with requests


def host_path(key: str, graphs: bool) -> tuple[str, str]:
    """Names of the stage's file in the campaign's folder."""
    return STEPS, f"{mode_name(key, graphs)}-host.json"


def measure_host(
    store: Store, engines: Engines, key: str, graphs: bool, deadline: Deadline, **extra
) -> None:
    """Seconds from output to output of pure decode steps, in both ways of scheduling; each needs an
    engine of its own. Raises StageError where nothing was measured."""
    names = host_path(key, graphs)
    found: dict = store.read(*names) or {}
    size = MODEL_SIZES[key]
    context = min(_CONTEXT, size.max_model_len // 2)
    batches = [batch for batch in BATCHES if batch <= size.max_num_seqs]
    for way, arguments in SCHEDULERS.items():
        if way in found:
            continue
        try:
            engine = engines.start(key, graphs, False, {**arguments, **extra}, deadline)
            rows = [_decode(engine, batch, context, deadline) for batch in batches]
        except OutOfTime as error:
            store.say(f"host, {way}: {error or 'out of time'}")
            break
        found[way] = {"vllm": engine.version, "context": context, "rows": rows}
        store.write(found, *names)
        said = ", ".join(f"{row['batch']}: {1e3 * row['median_s']:.2f} ms" for row in rows)
        store.say(f"host, {way}: {said}")
    engines.close()  # no other stage can use it
    if not found:
        raise StageError("no step was measured in the time given")


def with_hidden(profile: Profile, found: dict) -> Profile:
    """`profile` with what asynchronous scheduling hides: its decode steps minus those that stage
    `host` found with it. found: that stage's file; without such steps the profile stays."""
    way, model = found.get("async", {"rows": []}), profile.step_model
    rows = way["rows"]
    if len(rows) < _LEAST:
        return profile
    context = way["context"] + _SETTLE + _STEPS // 2  # of the median step
    gaps = [
        model.repeated_seconds(decode_work(row["batch"], context)) - row["median_s"] for row in rows
    ]
    seconds = np.maximum.accumulate(np.maximum(gaps, 0.0)).tolist()
    hidden = HiddenTimes(tuple(row["batch"] for row in rows), tuple(seconds))
    return profile.model_copy(update={"step_model": replace(model, hidden=hidden)})


def _decode(engine, batch: int, context: int, deadline: Deadline) -> dict:
    """Times of steps that decode `batch` requests of about `context` tokens."""
    rng = np.random.default_rng(batch)
    for number in range(batch):
        prompt = rng.integers(1, engine.vocab, context).tolist()
        engine.submit(f"h{batch}-{number}", prompt, 2 * (_STEPS + _SETTLE))
    client = engine._client
    ends: list[float] = []
    while len(ends) <= _STEPS + _SETTLE:
        deadline.look()
        outputs = client.get_output().outputs  # may hold none: the first step is still under way
        if sum(len(output.new_token_ids) for output in outputs) == batch == len(outputs):
            ends.append(time.perf_counter())
    client.engine_core.abort_requests(list(engine.scheduler.requests))
    while engine.scheduler.has_requests():
        client.get_output()
    gaps = np.diff(ends[_SETTLE:])
    low, median, high = np.percentile(gaps, [25, 50, 75]).tolist()
    return {"batch": batch, "steps": len(gaps), "median_s": median, "low_s": low, "high_s": high}
