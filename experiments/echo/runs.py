"""Single runs of the Echo study: settings in, rows of metrics out.

The testbed of Sec. 7.1: Llama-3.1-8B on one A100-PCIE-40G, TTFT 1 s and TPOT 0.05 s for online
requests, offline requests all submitted at the beginning. A day is shown by all of its minutes, or
by some: as many from each part of it, one after another. So tide and bursts are those of the day,
and a run is short. The threshold's history is that of an hour of online requests alone, which came
before. Step times are those of a derived profile, not of an engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from twinserve.experiments.study.runs import WhileOnline
from twinserve.policies.echo.offline import ArrivalForecast
from twinserve.policies.echo.policy import EchoPolicy
from twinserve.policies.kv.task_aware.ledger import CountedLedger
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestClass, State
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.plan.trial import predicted_memory
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import run_simulation
from twinserve.traces.generators.longdoc import NAMES, longdoc
from twinserve.traces.generators.synth import synth
from twinserve.traces.generators.tidal import BURST_S, DAY_S, tidal, tide
from twinserve.traces.transform import merge, set_class, set_slo, take_rows
from twinserve.traces.transform import window as cut_window
from twinserve.traces.workload import Workload

PROFILE = "llama-3.1-8b@a100-40g"
BLOCKS = 9971  # KV blocks of the GPU that the study's results are of, by a former derivation
TTFT_S, TPOT_S, AIM = 1.0, 0.05, 0.9  # Sec. 7.2
LADDER = ("echo-bs", "echo-bs-e", "echo-bs-e-s", "echo")
# requests/s; the GPU alone serves them without queueing (figure fig7, `online alone`)
PEAK_RATE = 8.0
TROUGH, PEAK = 0.4, 0.9  # parts of the peak's rate
HISTORY_S = 3600.0  # Sec. 5.3: the threshold is of the last hour
WARM_S = 300.0  # before a history that a run makes itself: it begins with an empty engine
BIN_S = 10.0  # of the series
SAMPLE_S = 1.0
Samples = list[tuple[int, ...]]
ONLINE_USED = 2  # of a sample
REFILLED = 140_000  # questions on LooGLE's short set, more than a day of Echo answers
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
# requests of each pool, so many that some are left when the online ones have ended; documents in
# proportion
POOLS = {
    "loogle-short": 1951,
    "loogle-long": 1951,
    "toolbench": 16_000,
    "next-qa": 8_000,
    "sharegpt": 12_000,
}


# -- loads -----------------------------------------------------------------------------------------
@lru_cache(maxsize=4)
def day(minutes: int, seed: int, peak_rate: float = PEAK_RATE, burstiness: float = 0.3) -> Workload:
    """`minutes` minutes of a tidal day, the middle ones of as many equal parts, with the day's
    rates and objectives."""
    stride = round(DAY_S / BURST_S) // minutes
    return _minutes(stride // 2 + stride * np.arange(minutes), seed, peak_rate, burstiness)


def _minutes(wanted: np.ndarray, seed: int, peak_rate: float, burstiness: float) -> Workload:
    """The arrivals of these minutes of a day (int64[n]), one minute after another, from time 0
    on."""
    whole = tidal(peak_rate=peak_rate, burstiness=burstiness, seed=seed)
    minute = (whole.arrival_s // BURST_S).astype(np.int64)
    place = np.full(round(DAY_S / BURST_S), -1)
    place[wanted] = np.arange(len(wanted))
    chosen = np.flatnonzero(place[minute] >= 0)
    cut = take_rows(whole, chosen)
    at = cut.arrival_s - (minute - place[minute])[chosen] * BURST_S
    order = np.argsort(at, kind="stable")
    said = f"minutes({len(wanted)} of the day, from {int(wanted[0])} on)"
    found = replace(cut, arrival_s=at, provenance=cut.provenance.then(said))
    return set_slo(take_rows(found, order), TTFT_S, TPOT_S)


@lru_cache(maxsize=16)
def history(
    minutes: int, seed: int, peak_rate: float, burstiness: float, history_s: float
) -> tuple[int, ...]:
    """Blocks that online requests alone hold, second by second of the `history_s` seconds before
    the first minute of `day`; before midnight are the same day's last hours."""
    first = round(DAY_S / BURST_S) // minutes // 2
    before = np.arange(first - round(history_s / BURST_S), first) % round(DAY_S / BURST_S)
    samples, _ = _simulate(LADDER[0], _minutes(before, seed, peak_rate, burstiness), seed=seed)
    return tuple(look[ONLINE_USED] for look in samples[: round(history_s / SAMPLE_S)])


def offline(
    pool: str,
    seed: int,
    requests: int | None = None,
    order: str = "shuffled",
    documents: int | None = None,
    submitted_s: float = 0.0,
) -> Workload:
    """An offline pool by its name in POOLS, submitted at time 0, or one by one at random times of
    the first `submitted_s` seconds. documents: that questions on documents are on, instead of in
    proportion."""
    n = requests or POOLS[pool]
    if f"longdoc:{pool}" in NAMES:
        made = longdoc(pool, requests=n, documents=documents, order=order, seed=seed)
    else:
        made = set_class(synth(pool, count=n, seed=seed), "be")
    at = np.sort(np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x5B,))).random(n))
    said = f"over {submitted_s:g} s" if submitted_s else "all at once"
    return replace(made, arrival_s=at * submitted_s, provenance=made.provenance.then(said))


def refilled(pool: str, seed: int, requests: int) -> Workload:
    """A pool of questions on documents that is refilled: questions on as many documents as `pool`
    has come at time 0. When all questions on one have ended, those on another one come. requests:
    questions in all."""
    at_once = longdoc(pool, seed=seed)
    size = len({name.partition("-")[2] for name in at_once.ids})
    made = longdoc(pool, requests=requests, order="by-document", seed=seed)
    document = np.array([int(name.partition("-doc")[2]) for name in made.ids])
    first = document < size
    return replace(
        made,
        arrival_s=np.where(first, 0.0, np.nan),
        group=document % size,
        stage=document // size,
        group_names=[f"documents{i}" for i in range(size)],
        provenance=made.provenance.then(f"{size} documents at a time"),
    )


# -- runs ------------------------------------------------------------------------------------------
def _look(core: EngineCore) -> tuple[int, ...]:
    """Online requests with KV, offline requests with KV, and blocks: online in use, offline in use,
    online cached, offline cached. The last two are -1 if a ledger does not separate them."""
    table, ledger, usage = core.requests, core.ledger, core.ledger.usage()
    running = table.service_class[np.flatnonzero(table.state == int(State.RUNNING))]
    active = np.count_nonzero(running == int(RequestClass.REAL_TIME))
    mine = -1
    if isinstance(ledger, CountedLedger):
        idle = (ledger.pool.refs == 0) & (ledger.pool.content >= 0)
        mine = int((idle & ledger.pool.online).sum())
    rest = usage.cached - mine if mine >= 0 else -1
    return active, len(running) - active, usage.real_time, usage.best_effort, mine, rest


def _run(
    policy: str,
    pool: str | None,
    seed: int,
    minutes: int,
    estimator: str = "paper",
    peak_rate: float = PEAK_RATE,
    burstiness: float = 0.3,
    order: str = "shuffled",
    requests: int | None = None,
    num_blocks: int | None = None,
    budget: int | None = None,
    documents: int | None = None,
    submitted_s: float = 0.0,
    history_s: float = HISTORY_S,
    refill: bool = False,
) -> tuple[Samples, RunResult]:
    """As `_simulate`. pool: None: online requests alone. requests: of the pool, instead of POOLS.
    budget: tokens of a step. documents, submitted_s: see `offline`. refill: the pool is
    `refilled`."""
    load = day(minutes, seed, peak_rate, burstiness)
    if pool is not None and refill:
        load = merge(load, refilled(pool, seed, requests or REFILLED))
    elif pool is not None:
        load = merge(load, offline(pool, seed, requests, order, documents, submitted_s))
    return _simulate(
        policy,
        load,
        lambda: history(minutes, seed, peak_rate, burstiness, history_s),
        seed=seed,
        estimator=estimator,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
    )


def _simulate(
    policy: str, load: Workload, before: Callable[[], Sequence[int]] = tuple, **settings: Any
) -> tuple[Samples, RunResult]:
    """A run that ends with the last online request, and what `_look` finds in every one of its
    seconds. before: what a threshold remembers of the time before, blocks second by second."""
    settings["num_blocks"] = settings.get("num_blocks") or BLOCKS
    config = SimulationConfig(policy=(policy,), profile=PROFILE, **PAPERS_ENGINE, **settings)
    inputs = Inputs(config, load, resolve_hardware(config), (parse_policy(policy),), ())
    samples: Samples = []
    simulation = WhileOnline(
        inputs,
        inputs.policies[0],
        slice_s=SAMPLE_S,
        watch=lambda run: samples.append(_look(run.engines[0].core)),
    )
    engine = simulation.engines[0].core.policy
    if isinstance(engine, EchoPolicy) and engine.offline.forecast is not None:
        engine.offline.forecast.remember(before())
    return samples, run_simulation(simulation)


def _hit_rate(begun: pd.DataFrame) -> float:
    return float(begun.hit_tokens.sum() / begun.prompt_tokens.sum()) if len(begun) else float("nan")


def serve(**settings: Any) -> dict[str, Any]:
    """One run, as one row. Offline rates and the hit rate count what ended while online requests
    arrived; `left` is the number of offline requests that were not done then. Attainments are
    shares of online requests; `in_time`: its last token came before TTFT + i TPOT had passed, the
    objective as the paper prints it. Hit rates of the trough and of the peak are those of the
    minutes with rates below TROUGH and above PEAK. Arguments: see `_run`."""
    _, run = _run(**settings)
    rt, be, kv = run.summary["classes"]["rt"], run.summary["classes"].get("be"), run.summary["kv"]
    rows = run.rows.requests
    online, pool = rows[rows.service_class == "rt"], rows[rows.service_class == "be"]
    ttft = online.first_token_s - online.arrival_s
    after = np.maximum(online.output_tokens - 1, 1)
    tpot = ((online.last_token_s - online.first_token_s) / after)[online.output_tokens > 1]
    due = TTFT_S + (online.output_tokens - 1) * TPOT_S
    begun = pool[pool.first_scheduled_s.notna()]
    minute = begun.first_scheduled_s // BURST_S
    rate = np.where(
        minute < settings["minutes"], tide((minute + 0.5) * DAY_S / settings["minutes"]), np.nan
    )
    steps = run.rows.steps
    return {
        "offline_rps": be["window_request_throughput"] if be else 0.0,
        "offline_tps": be["window_total_token_throughput"] if be else 0.0,
        "ttft_attainment": rt["ttft_attainment"],
        "tpot_attainment": rt["tpot_attainment"],
        "attainment": rt["slo_attainment"],
        "in_time": float((online.last_token_s - online.arrival_s <= due + 1e-9).mean()),
        "hit_rate": _hit_rate(begun),
        "hit_rate_trough": _hit_rate(begun[rate < TROUGH]),
        "hit_rate_peak": _hit_rate(begun[rate > PEAK]),
        "recomputes": int(kv["preemptions"]["recompute"]),
        "left": int((~pool.finished).sum()),
        "step_ms": run.summary["scheduler"]["mean_step_ms"],
        "occupied": float((steps.kv_used_blocks / run.rows.kv_total_blocks).mean()),
        **{f"ttft_q{round(100 * q)}": float(ttft.quantile(q)) for q in QUANTILES},
        **{f"tpot_q{round(100 * q)}": float(tpot.quantile(q)) for q in QUANTILES},
    }


def watch(bin_s: float = BIN_S, **settings: Any) -> list[dict[str, Any]]:
    """One run, as a row for every `bin_s` seconds in which online requests arrive: means over the
    samples, and `left`, the offline requests left at the end. Also prompt tokens of offline
    requests begun in them, and how many of these were found in the cache."""
    samples, run = _run(**settings)
    names = ("online", "offline", "online_used", "offline_used", "online_cached", "offline_cached")
    looks = pd.DataFrame(samples, columns=list(names))
    looks["bin"] = (np.arange(len(looks)) * SAMPLE_S // bin_s).astype(int)
    series = looks.groupby("bin").mean()
    series[list(names[2:])] /= run.rows.kv_total_blocks
    rows = run.rows.requests
    arrived = rows[rows.service_class == "rt"].arrival_s // bin_s
    series["arrivals"] = arrived.value_counts().reindex(series.index, fill_value=0) / bin_s
    pool = rows[(rows.service_class == "be") & rows.first_scheduled_s.notna()]
    begun = pool.groupby(pool.first_scheduled_s // bin_s)[["prompt_tokens", "hit_tokens"]].sum()
    for name in begun:
        series[name] = begun[name].reindex(series.index, fill_value=0)
    steps = run.rows.steps
    busy = (
        (steps.kv_used_blocks > run.rows.kv_total_blocks / 2)
        .groupby(steps.start_s // bin_s)
        .agg(["sum", "size"])
    )
    series["steps_half_full"] = busy["sum"].reindex(series.index, fill_value=0)
    series["steps"] = busy["size"].reindex(series.index, fill_value=0)
    series = series[series.index * bin_s < settings["minutes"] * BURST_S]
    series.insert(0, "time_s", series.index * bin_s)
    part = series.time_s // BURST_S
    series.insert(1, "hour", (part + 0.5) * 24 / settings["minutes"])
    series.insert(2, "tide", tide(series.hour * 3600.0))
    rt, be = run.summary["classes"]["rt"], run.summary["classes"]["be"]
    whole = {
        "left": int(((rows.service_class == "be") & ~rows.finished).sum()),
        "attainment": rt["slo_attainment"],
        "offline_tps": be["window_total_token_throughput"],
    }
    return series.assign(**whole).to_dict("records")


# -- the trace and what is foretold of it ----------------------------------------------------------
def hours(seed: int, burstiness: float = 0.3) -> list[dict[str, Any]]:
    """Fig. 2: requests/s in each quarter of an hour of a day, and the day's ratio of peak (12:00 to
    14:00) to trough (4:00 to 6:00)."""
    at = tidal(peak_rate=PEAK_RATE, burstiness=burstiness, seed=seed).arrival_s
    counts = np.bincount((at // 900.0).astype(int), minlength=96) / 900.0
    ratio = counts[48:56].mean() / counts[16:24].mean()
    return [
        {"hour": i / 4, "rate": float(rate), "ratio": float(ratio)} for i, rate in enumerate(counts)
    ]


def foretold_arrivals(
    seed: int, burstiness: float = 0.3, sigmas: float = 2.0
) -> list[dict[str, Any]]:
    """Fig. 11: minute by minute of a day the requests/s that arrive, and what the fifteen minutes
    before let expect: their mean, and the mean and `sigmas` deviations. Without the first fifteen
    minutes."""
    at = tidal(peak_rate=PEAK_RATE, burstiness=burstiness, seed=seed).arrival_s
    mean, high = ArrivalForecast(sigmas=0.0), ArrivalForecast(sigmas=sigmas)
    edges = np.arange(0.0, DAY_S + BURST_S, BURST_S)
    found = []
    for start, first, last in zip(
        edges[:-1], *(np.searchsorted(at, e) for e in (edges[:-1], edges[1:])), strict=True
    ):
        expected = [forecast.rate(float(start)) for forecast in (mean, high)]
        if start >= 900.0:
            actual = float(last - first) / BURST_S
            found.append(
                {
                    "hour": float(start) / 3600.0,
                    "actual": actual,
                    "mean": expected[0],
                    "high": expected[1],
                }
            )
        for time in at[first:last].tolist():
            mean.arrive(time)
            high.arrive(time)
    return found


def foretold_memory(
    seed: int,
    hour: float,
    minutes: int,
    histories_s: Sequence[float],
    burstiness: float = 0.3,
    warm_s: float = WARM_S,
) -> list[dict[str, Any]]:
    """Sec. 5.3 for each of `minutes` minutes from `hour` on, online requests alone. Rows have what
    they hold, and mu + 2 sigma of the seconds that ended a minute before, for each length of that
    history. The engine runs through the longest history, and `warm_s` before it, first.

    predicted, held  means over the minute's seconds, shares of the memory
    exceeded         share of its seconds in which more is held than was foretold
    spare            what was foretold and not held, a mean, share of the memory
    """
    lead = warm_s + max(histories_s) + BURST_S
    end = lead + minutes * BURST_S
    start = hour * 3600.0 - lead
    if start < 0:
        raise ValueError(f"{lead:g} s before hour {hour:g} begin the day before: use a later hour")
    whole = tidal(peak_rate=PEAK_RATE, burstiness=burstiness, seed=seed)
    load = set_slo(cut_window(whole, start, start + end), TTFT_S, TPOT_S)
    _, run = _simulate(LADDER[0], load, seed=seed)  # alone nothing else decides, as in `history`
    steps, total = run.rows.steps, run.rows.kv_total_blocks
    found = []
    for history_s in histories_s:
        predicted, held = predicted_memory(
            steps[steps.start_s < end], 2.0, history_s, SAMPLE_S, BURST_S
        )
        # the first one that is foretold follows a history and a minute after the run began
        first = round((lead - history_s - BURST_S) / SAMPLE_S)
        shown = pd.DataFrame({"predicted": predicted, "held": held}, dtype=float)[first:] / total
        shown["exceeded"] = (shown.held > shown.predicted).astype(float)
        shown["spare"] = np.maximum(shown.predicted - shown.held, 0.0)
        minute = np.arange(len(shown)) * SAMPLE_S // BURST_S
        means = shown.groupby(minute).mean().head(minutes)
        means.insert(0, "minute", np.arange(len(means)))
        found += [{"history_s": history_s, **row} for row in means.to_dict("records")]
    return found
