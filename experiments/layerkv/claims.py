"""Tables of the LayerKV study, compared with what the paper says.

`layerkv` is Algorithm 1 as printed; `savable` leaves out requests that will miss their TPOT
objective whatever is done. The first is judged, the second is only shown.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from twinserve.experiments.layerkv.points import LLAMA
from twinserve.experiments.layerkv.runs import HISTORY, KNOWN, NO_SLO, SAVABLE, VLLM
from twinserve.experiments.study.claims import Number, Row, most, rows_of, teller, texts
from twinserve.experiments.study.tables import Table
from twinserve.experiments.study.verdict import Claim, Verdict, worst

TEXTS = texts(__file__)
TIMES = ("ttft_s", "ttft_p99_s", "tpot_s", "queueing_s", "prefill_s", "tokens_per_s")
VALUES = (*TIMES, "violations", "ttft_violations", "tpot_violations", "recomputes", "kv_blocks")
VALUES += ("parked", "parked_most", "late", "late_on_host")
DATA = texts(__file__, "data.yaml")
READINGS, BRIEF, GAINS = DATA.READINGS, DATA.BRIEF, DATA.GAINS
DIRECTED = ("layerkv", SAVABLE)  # the others are variants of ours
LENGTHS = {HISTORY: "lengths from history", KNOWN: "lengths known"}  # and trained, the default
# violations that vLLM's load begins at; a change of throughput that is none
ONSET, NEARLY = 0.1, 0.03


# -- tables ----------------------------------------------------------------------------------------
def beside_vllm(*by: str, **derived: Callable[[pd.DataFrame], pd.Series]) -> Table:
    """What is gained over vLLM in the same setting: TTFT as a factor, throughput as a change,
    violations as a difference of shares. derived: further columns."""
    named = "vLLM" if by[-1] == "variant" else VLLM
    values = (*VALUES, *GAINS, *derived)
    return Table(by, values, GAINS, {by[-1]: named}, by[:-1], derived=derived)


def _along(rows: pd.DataFrame, axis: str):
    """Rows of one setting, policy and seed together, in the order of the axis."""
    same = [name for name in ("model", "context", "setting", "policy", "seed") if name in rows]
    return rows.sort_values(axis).groupby([name for name in same if name != axis], sort=False)


def growth(rows: pd.DataFrame) -> pd.Series:
    """Of TTFT since the shortest context, over that of TPOT."""
    shortest = _along(rows, "context")[["ttft_s", "tpot_s"]].transform("first")
    return (rows.ttft_s / shortest.ttft_s) / (rows.tpot_s / shortest.tpot_s)


def narrowed(rows: pd.DataFrame) -> pd.Series:
    """By how much the gap to vLLM's throughput is smaller than at the degree before; nan at the
    first."""
    return -_along(rows.assign(gap=rows.throughput_change.abs()), "tp").gap.diff()


def onset(rows: pd.DataFrame) -> pd.Series:
    """The lowest rate at which violations pass 10 %, in every row; nan: none."""
    passed = rows.assign(passed=rows.rate.where(rows.violations > ONSET))
    return _along(passed, "rate").passed.transform("min")


BY_CONTEXT = beside_vllm(
    "model",
    "context",
    "policy",
    queued_part=lambda rows: rows.queueing_s / rows.ttft_s,
    growth=growth,
)
BY_DEGREE = beside_vllm("context", "tp", "policy", narrowed=narrowed)
BY_RATE = beside_vllm("model", "rate", "policy", onset=onset)

# -- claims ----------------------------------------------------------------------------------------
tell = teller(TEXTS)


def _there(table: pd.DataFrame, readings: Mapping[str, str]) -> dict[str, str]:
    """Those of the readings that the table has rows of."""
    return {policy: said for policy, said in readings.items() if (table.policy == policy).any()}


def _change(change: Number) -> str:
    return f"{Number(100 * change.mean, round(100 * change.half, 6)):2} %"


def _up_to(
    table: pd.DataFrame,
    name: str,
    column: str,
    judged: Callable[[Number], Verdict],
    readings: Mapping[str, str] = READINGS,
) -> list[Claim]:
    """The largest gain over the settings, if the paper says `up to`; for all readings of Algorithm
    1."""
    found = []
    for policy, reading in _there(table, readings).items():
        best, directed = most(rows_of(table, policy=policy), column), policy in DIRECTED
        verdict = judged(getattr(best, column))
        found.append(tell(name, verdict, best, reading=reading, directed=directed))
    return found


def breakdown_claims(table: pd.DataFrame) -> list[Claim]:
    """Fig. 1, from vLLM's rows of Fig. 4."""
    rows = sorted(rows_of(table, policy=VLLM, model=LLAMA), key=lambda row: row.context)
    told = {row.context: row.queued_part.above(0.5) for row in rows}
    longer = [row.queued_part.below(0.5) for row in rows if row.context < 1024]
    verdict = worst(*longer, *(found for context, found in told.items() if context >= 1024))
    # it is with long prompts, but begins elsewhere
    if verdict == "differs" and told[rows[-1].context] == "agrees":
        verdict = "direction only"
    queued = [context for context, found in told.items() if found == "agrees"]
    texts = [f"surely from {queued[0]:,} tokens" if queued else "never surely"]
    texts += [f"{100 * r.queued_part} % of TTFT at 1,024" for r in rows if r.context == 1024]
    low, high = rows[0], rows[-1]
    ttft, tpot = (getattr(high, n).mean / getattr(low, n).mean for n in ("ttft_s", "tpot_s"))
    ends = {"low": low.context, "high": high.context, "ttft": ttft, "tpot": tpot}
    return [
        tell("queueing", verdict, said="; ".join(texts)),
        tell("growth", high.growth.above(2), **ends),
    ]


def _magnitude(gain: Number) -> Verdict:
    """The paper's gain is an order of magnitude, so the nearest power of ten is compared, at both
    ends of the interval."""
    verdict = gain.beside(10, 1.0)
    if verdict not in ("agrees", "near", "direction only"):
        return verdict
    ends = (gain.mean - gain.half, gain.mean + gain.half)
    return "agrees" if all(10**0.5 <= end < 10**1.5 for end in ends) else "direction only"


def context_claims(table: pd.DataFrame) -> list[Claim]:
    found = _up_to(table, "contexts", "ttft_gain", _magnitude, READINGS | LENGTHS)
    return found + _throughput(table, "same_throughput", abs)


def _throughput(table: pd.DataFrame, name: str, size_of: Callable[[Number], Number]) -> list[Claim]:
    """No change whose size is beyond `NEARLY` in any setting."""
    found = []
    for model, mine in table[table.policy.isin(READINGS)].groupby("model", sort=False):
        texts = []
        for policy in _there(mine, READINGS):
            rows = rows_of(mine, policy=policy)
            sizes = [size_of(row.throughput_change) for row in rows]
            largest = max(range(len(rows)), key=lambda i: sizes[i].mean)
            texts.append(f"{BRIEF.get(policy, '')}{_change(rows[largest].throughput_change)}")
            if policy == "layerkv":
                verdict = worst(*(size.below(NEARLY) for size in sizes))
        found.append(tell(name, verdict, model=model, said="; ".join(texts)))
    return found


def degree_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for context, part in table.sort_values("tp", kind="stable").groupby("context"):
        for policy, reading in _there(part, READINGS | LENGTHS).items():
            of = {"context": context, "setting": f"1 request/s; {reading}"}
            rows = rows_of(part, policy=policy)
            found.append(_above_one("degrees", rows, directed=policy == "layerkv", **of))
        ours = rows_of(part, policy="layerkv")
        verdict = worst(*(row.narrowed.above() for row in ours[1:]))
        said = "; ".join(f"tp{row.tp}: {_change(row.throughput_change)}" for row in ours)
        found.append(tell("narrows", verdict, context=context, said=said))
    return found


def _above_one(name: str, rows: Sequence[Row], directed: bool = False, **of: Any) -> Claim:
    """Of Fig. 5: TTFT is lower in each of `rows`. directed: no variant of ours."""
    said = "; ".join(f"tp{row.tp}: x {row.ttft_gain}" for row in rows)
    verdict = worst(*(row.ttft_gain.more(1) for row in rows))
    return tell(name, verdict, said=said, directed=directed, **of)


def rate_claims(table: pd.DataFrame) -> list[Claim]:
    found = _up_to(table, "rates", "ttft_gain", lambda gain: gain.beside(69, 1.0))
    return found + _throughput(table, "lower_throughput", lambda change: -1 * change)


def tail_claims(table: pd.DataFrame) -> list[Claim]:
    return _up_to(table, "tails", "p99_gain", lambda gain: gain.beside(45, 1.0))


def violation_claims(table: pd.DataFrame) -> list[Claim]:
    rows = table[table.model == LLAMA]
    vllm = rows_of(rows.sort_values("rate"), policy=VLLM)
    begins = vllm[0].onset
    said = f"from {begins} requests/s" if begins.known else "not with every seed"
    found = [tell("onset", begins.beside(6.0), said=said)]
    loaded = rows[rows.rate.isin([row.rate for row in vllm if row.violations.mean > ONSET])]
    loaded = loaded if len(loaded) else rows[rows.rate == rows.rate.max()]
    for policy, reading in _there(loaded, READINGS).items():
        part = rows_of(loaded, policy=policy)
        ends = [most(part, "fewer_violations", sign).fewer_violations for sign in (-1, 1)]
        verdict = worst(
            *(row.fewer_violations.more() for row in part),
            *(end.beside(printed, 0.0) for end, printed in zip(ends, (0.177, 0.287), strict=True)),
        )
        of = {"reading": reading, "least": 100 * ends[0], "greatest": ends[1]}
        found.append(tell("violations", verdict, directed=policy in DIRECTED, **of))
    return [*found, _without_slo(rows)]


def _without_slo(rows: pd.DataFrame) -> Claim:
    """At the rate nearest to 5.5 requests/s."""
    rate = min(rows.rate.unique(), key=lambda r: abs(r - 5.5))
    here = {row.policy: row for row in rows_of(rows, rate=rate)}
    policies = (VLLM, NO_SLO, "layerkv", SAVABLE)
    shares = "; ".join(f"{100 * here[policy].violations} %" for policy in policies)
    worse = (-1 * here[NO_SLO].fewer_violations).more()
    tpot = here[NO_SLO].more_tpot_violations.more() == "agrees"
    verdict: Verdict = "direction only" if worse == "differs" and tpot else worse
    return tell("no_slo", verdict, rate=rate, said=shares)
