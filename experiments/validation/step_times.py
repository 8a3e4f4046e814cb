"""Step times read off a run's events, and a model's for the same batches.

A run records when each request was queued, first scheduled, and got its first and last token. Each
of these times is the end of some step, and what the requests did tells how many steps lie between
two of them. `intervals.json` has the stretches whose steps and batches follow; `made` says
which code read them off.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import curve_fit

from twinserve.experiments.validation.runs import Case, MeasuredRun, profile_of, read_run
from twinserve.profiles.composition import StepComposition, StepTimeModel

DECODES = (0, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 256)
TOKENS = (0, 256, 512, 768, 1024, 1280, 1536, 1792, 2047, 2048)
NEAREST = 9  # stretches of decodes that tell the real time of a decode step beside a prompt
MOST_BESIDE = 3
WARM_S = 1.0  # the first steps of an engine load kernels
SAMPLE_S = 0.25  # the time series is that much off the events: it counts once a step
SCARCE_PCT = 95.0
INTERVALS = Path(__file__).with_name("intervals.json")


@dataclass(frozen=True)
class Interval:
    """Between two neighbouring ends of steps. real_s: seconds; works: its steps, in order."""

    start_s: float
    real_s: float
    works: list[StepComposition]

    @property
    def prompts(self) -> list[StepComposition]:
        return [work for work in self.works if len(work.prefill_new)]


def intervals(case: Case) -> Iterator[Interval]:
    """All stretches of a run whose steps and batches the events tell, in order of time."""
    kept = json.loads(INTERVALS.read_text(encoding="utf-8"))["runs"]
    for start_s, real_s, steps in kept[case.label]:
        works = [
            StepComposition(*decodes, np.array(new, np.int64), np.array(resident, np.int64))
            for *decodes, new, resident in steps
        ]
        yield Interval(start_s, real_s, works)


def shortage(run: MeasuredRun) -> np.ndarray:
    """Seconds of the time series at which requests may have been preempted: more had begun than
    ran, or blocks were scarce."""
    r, series = run.requests, run.series
    t = series.t.to_numpy(float)
    alive = [((r.first_token_s < x - SAMPLE_S) & (r.last_token_s > x + SAMPLE_S)).sum() for x in t]
    return t[(alive > series.running.to_numpy()) | (series.kv_cache_pct.to_numpy() > SCARCE_PCT)]


def step_times(
    run: MeasuredRun, found: Iterable[Interval], model: StepTimeModel, skip_s: float = WARM_S
) -> pd.DataFrame:
    """A row for each interval with no prompt, or one step with prompts and at most MOST_BESIDE
    others.

    start_s, steps, decodes, context (mean); tokens: of the step with prompts, 0 for decodes alone;
    real_ms, ours_ms: a step's; comm_ms: how much of ours is all-reduce. Decode steps in an interval
    with a prompt's are taken off at the model's time, scaled by real over model in the nearest
    batches that decode alone.
    """
    rows, budget = [], run.arguments["max_num_batched_tokens"]
    for one in found:
        prompts = one.prompts
        too_many = len(prompts) > 1 or (prompts and len(one.works) > 1 + MOST_BESIDE)
        # more tokens than a step may have: the prompt cannot have been where it was put
        if one.start_s < skip_s or too_many or any(w.new_tokens > budget for w in one.works):
            continue
        seconds = [model.step_seconds(work) for work in one.works]
        step = (prompts or one.works)[0]
        mine = model.step_seconds(step) if prompts else sum(seconds)
        rows.append(
            {
                "start_s": one.start_s,
                "steps": len(seconds),
                "decodes": step.decode_requests,
                "context": step.decode_context / max(step.decode_requests, 1),
                "tokens": step.new_tokens if prompts else 0,
                "comm_ms": model.allreduce_seconds(step) * 1e3,
                "real_s": one.real_s,
                "ours_s": mine,
                "beside_s": sum(seconds) - mine,
            }
        )
    table = pd.DataFrame(rows)
    alone = table[table.tokens == 0]
    ratio, sizes = (alone.real_s / alone.ours_s).to_numpy(), alone.decodes.to_numpy()

    def pace(n: int) -> float:
        near = np.argsort(np.abs(sizes - n), kind="stable")[:NEAREST]
        return float(np.median(ratio[near])) if len(near) else 1.0

    beside = [s * pace(n) if s else 0.0 for s, n in zip(table.beside_s, table.decodes, strict=True)]
    each = np.where(table.tokens > 0, 1, table.steps)
    real_ms, ours_ms = (table.real_s - beside) / each * 1e3, table.ours_s / each * 1e3
    found_s = ["real_s", "ours_s", "beside_s"]
    return table.assign(real_ms=real_ms, ours_ms=ours_ms).drop(columns=found_s)


def by_range(table: pd.DataFrame, column: str, edges: tuple[int, ...]) -> list[dict]:
    """For each range of `column` (above, to): intervals, steps, ms a step real and ours (means over
    steps); the mean error and the standard deviation of the intervals' errors, relative and in ms;
    the model's all-reduce, and the one that would leave no error."""
    found = []
    for above, to in zip(edges[:-1], edges[1:], strict=True):
        part = table[(table[column] > above) & (table[column] <= to)]
        if part.empty:
            continue
        weight = part.steps if column == "decodes" else np.ones(len(part))
        times = (part[name] for name in ("real_ms", "ours_ms", "comm_ms"))
        real, ours, comm = (float(np.average(time, weights=weight)) for time in times)
        row = {"above": above, "to": to, "intervals": len(part), "steps": int(np.sum(weight))}
        row |= {"real_ms": real, "ours_ms": ours, "error": ours / real - 1, "error_ms": ours - real}
        if len(part) > 1:
            apart = part.ours_ms - part.real_ms
            row |= {"sd": float((apart / part.real_ms).std()), "sd_ms": float(apart.std())}
        if comm:
            row |= {"comm_ms": comm, "comm_implied_ms": comm + real - ours}
        found.append(row)
    return found


def counted(run: MeasuredRun, model: StepTimeModel) -> dict:
    """Real decode step over ours from the tokens counted each second, after the last prompt and the
    last shortage; this needs no request that was not preempted. {} if the run has no such counts,
    or fewer than 6 seconds.

    scale, scale_error: real = scale x ours; above, to: requests, as of `by_range`; steps: seconds.
    The clock of the counts is off the events' by an unknown time, which the last two seconds of
    tokens tell.
    """
    r, series = run.requests, run.series
    start = max(shortage(run).max(initial=0.0) + 1.0, float(r.first_token_s.max()) + 1.0)
    ticks = series.t.to_numpy(float)[series.t.to_numpy() >= start]
    counts = series.get("gen_throughput", pd.Series(dtype=float)).to_numpy()[-len(ticks) :]
    if len(ticks) < 6 or not counts[1:].any():
        return {}
    counts = np.cumsum(counts) - counts[0]
    first, last = r.first_token_s.to_numpy(), r.last_token_s.to_numpy()
    whole = (r.input_toks + r.output_toks).to_numpy() - 2
    pace = (last - first) / (r.output_toks.to_numpy() - 1)
    at = np.arange(ticks[0] - 1.0, last.max(), 0.005)
    n, ours = np.zeros(len(at)), np.full(len(at), np.inf)
    for i, x in enumerate(at):
        on = (first <= x) & (last > x)
        resident = np.round(whole[on] - (last[on] - x) / np.minimum(pace[on], np.median(pace)))
        n[i], tokens, longest = on.sum(), int(resident.sum()), int(resident.max())
        ours[i] = model.step_seconds(StepComposition(int(n[i]), tokens, longest))

    made_at = np.r_[at, at[-1] + 0.005]

    def left(shift: float, b: float) -> np.ndarray:
        """Tokens still to come at each tick."""
        made = np.r_[0.0, np.cumsum(n / (b * ours))] * 0.005
        return made[-1] - np.interp(ticks + shift, made_at, made)

    real, shift, scale = counts[-1] - counts, 0.0, 1.0
    # two ticks before the end: few steps to be wrong about
    near = np.arange(len(ticks)) >= np.flatnonzero(real)[-1] - 1
    for _ in range(4):
        (shift,), _ = curve_fit(
            lambda _, x, b=scale: left(x, b)[near], ticks[near], real[near], [shift]
        )
        (scale,), spread = curve_fit(lambda _, b, x=shift: left(x, b), ticks, real, [scale])
    return {
        "from_s": float(ticks[0]),
        "steps": len(ticks) - 1,
        "above": int(n[n > 0].min()) - 1,
        "to": int(n.max()),
        "scale": float(scale),
        "scale_error": float(np.sqrt(spread[0, 0])),
    }


def validate_events(truth: Path, case: Case, form: str | None = None) -> dict:
    """What can be read off one run: rows of `by_range` of decodes alone and of steps with prompts,
    and that of `counted`."""
    run = read_run(truth, case)
    model = profile_of(run, form).model(run.arguments["max_num_seqs"])
    table = step_times(run, intervals(case), model)
    return {
        "decode": by_range(table[table.tokens == 0], "decodes", DECODES),
        "prompt": by_range(table[table.tokens > 0], "tokens", TOKENS),
        "counted": [found] if (found := counted(run, model)) else [],
    }
