"""Tables of the LayerKV study, and what the paper says beside what they say.

`layerkv` is Algorithm 1 as printed; `savable` leaves out requests that will miss their TPOT
objective whatever is done. The first is judged, the second stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from twinserve.experiments.layerkv.points import LLAMA
from twinserve.experiments.layerkv.runs import HISTORY, KNOWN, NO_SLO, SAVABLE, VLLM
from twinserve.experiments.study.claims import Number, Row, most, rows_of, texts
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


def contended(name: str, change: bool = True) -> Callable[[pd.DataFrame], pd.Series]:
    """What contention changes, against the same run without it."""

    def more(rows: pd.DataFrame) -> pd.Series:
        alone = _along(rows, "contention")[name].transform("first")
        return rows[name] / alone - 1 if change else rows[name] - alone

    return more


BY_CONTEXT = beside_vllm(
    "model",
    "context",
    "policy",
    queued_part=lambda rows: rows.queueing_s / rows.ttft_s,
    growth=growth,
)
BY_DEGREE = beside_vllm("context", "tp", "policy", narrowed=narrowed)
BY_RATE = beside_vllm("model", "rate", "policy", onset=onset)
UNSHARED = beside_vllm(
    "setting",
    "contention",
    "policy",
    ttft_more=contended("ttft_s"),
    tpot_more=contended("tpot_s"),
    tokens_more=contended("tokens_per_s"),
    violations_more=contended("violations", change=False),
)


# -- claims ----------------------------------------------------------------------------------------
def _there(table: pd.DataFrame, readings: Mapping[str, str]) -> dict[str, str]:
    """Those of the readings that the table has rows of."""
    return {policy: said for policy, said in readings.items() if (table.policy == policy).any()}


def _change(change: Number) -> str:
    return f"{Number(100 * change.mean, round(100 * change.half, 6)):2} %"


def _up_to(
    table: pd.DataFrame,
    where: str,
    what: str,
    paper: str,
    column: str,
    at: str,
    reason: str,
    judged: Callable[[Number], Verdict],
    readings: Mapping[str, str] = READINGS,
) -> list[Claim]:
    """The largest gain over the settings, where the paper says `up to`; for all readings of
    Algorithm 1. at: a setting in words."""
    found = []
    for policy, reading in _there(table, readings).items():
        best = most(rows_of(table, policy=policy), column)
        gain, said = getattr(best, column), f"{what}; {reading}"
        ours = f"x {gain} ({at.format(row=best)})"
        directed = policy in DIRECTED
        found.append(Claim.judged(where, said, paper, ours, judged(gain), reason, directed))
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
    grown = [getattr(high, name).mean / getattr(low, name).mean for name in ("ttft_s", "tpot_s")]
    claims = (
        (
            "queueing is the larger part of TTFT, Llama-2-7B on one L20, 1 request/s",
            "from 1,024 tokens",
            "; ".join(texts),
            verdict,
        ),
        (
            f"growth from {low.context:,.0f} to {high.context:,.0f} tokens of prompt: TTFT much "
            "faster than TPOT",
            "quadratic against linear",
            f"TTFT x {grown[0]:,.0f}, TPOT x {grown[1]:.3g}",
            high.growth.above(2),
        ),
    )
    return [Claim.judged("Fig. 1", *claim, TEXTS.BREAKDOWN) for claim in claims]


def _magnitude(gain: Number) -> Verdict:
    """The paper's gain is an order of magnitude, so the nearest power of ten is compared, at both
    ends of the interval."""
    verdict = gain.beside(10, 1.0)
    if verdict not in ("agrees", "near", "direction only"):
        return verdict
    ends = (gain.mean - gain.half, gain.mean + gain.half)
    return "agrees" if all(10**0.5 <= end < 10**1.5 for end in ends) else "direction only"


def context_claims(table: pd.DataFrame) -> list[Claim]:
    what = "mean TTFT, vLLM over LayerKV, contexts of 128 to 16k, 1 request/s"
    paper, at = "up to an order of magnitude", "{row.model}, {row.context:g} tokens"
    readings, gain = READINGS | LENGTHS, "ttft_gain"
    found = _up_to(table, "Fig. 4", what, paper, gain, at, TEXTS.CONTEXT, _magnitude, readings)
    reason = TEXTS.CONTEXT_THROUGHPUT
    return found + _throughput(table, "Fig. 4", "contexts", "nearly identical", reason)


def _throughput(
    table: pd.DataFrame, where: str, over: str, paper: str, reason: str, lower: bool = False
) -> list[Claim]:
    """No change beyond `NEARLY` in any setting; lower: none below it."""
    found = []
    for model, mine in table[table.policy.isin(READINGS)].groupby("model", sort=False):
        texts = []
        for policy in _there(mine, READINGS):
            rows = rows_of(mine, policy=policy)
            sizes = [-1 * r.throughput_change if lower else abs(r.throughput_change) for r in rows]
            largest = max(range(len(rows)), key=lambda i: sizes[i].mean)
            texts.append(f"{BRIEF.get(policy, '')}{_change(rows[largest].throughput_change)}")
            if policy == "layerkv":
                verdict = worst(*(size.below(NEARLY) for size in sizes))
        what = (
            f"throughput, LayerKV over vLLM, {model}: {'lowest' if lower else 'largest'} "
            f"change over {over}"
        )
        found.append(Claim.judged(where, what, paper, "; ".join(texts), verdict, reason, False))
    return found


def degree_claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for context, part in table.sort_values("tp", kind="stable").groupby("context"):
        what = f"mean TTFT, vLLM over LayerKV, Yi-34B-200K, {context:,} tokens, 1 request/s"
        for policy, reading in _there(part, READINGS | LENGTHS).items():
            rows, directed = rows_of(part, policy=policy), policy == "layerkv"
            found.append(_above_one(f"{what}; {reading}", rows, TEXTS.DEGREE, directed))
        ours = rows_of(part, policy="layerkv")
        verdict = worst(*(row.narrowed.above() for row in ours[1:]))
        said = "; ".join(f"tp{row.tp}: {_change(row.throughput_change)}" for row in ours)
        what = (
            f"throughput, LayerKV over vLLM, {context:,} tokens: the gap narrows with each degree"
        )
        found.append(Claim.judged("Fig. 5", what, "narrows", said, verdict, TEXTS.NARROWS))
    return found


def _above_one(what: str, rows: Sequence[Row], reason: str, directed: bool = False) -> Claim:
    """Of Fig. 5: TTFT is lower in each of `rows`. directed: no variant of ours."""
    ours = "; ".join(f"tp{row.tp}: x {row.ttft_gain}" for row in rows)
    verdict = worst(*(row.ttft_gain.more(1) for row in rows))
    said = "above 1 at every degree"
    return Claim.judged("Fig. 5", what, said, ours, verdict, reason, directed)


def link_claims(table: pd.DataFrame) -> list[Claim]:
    """Fig. 5 at four and eight ranks, by the rate of their all-reduces."""
    found = []
    for (context, factor), part in table.groupby(["context", "allreduce"], sort=False):
        for variant in ("LayerKV", "no Algorithm 1"):
            what = (
                f"mean TTFT, vLLM over LayerKV, Yi-34B-200K, {context:,} tokens, all-reduces at "
                f"{factor:g} times the profile's rate; {variant}"
            )
            rows = rows_of(part.sort_values("tp"), variant=variant)
            found.append(_above_one(what, rows, TEXTS.LINK))
    return found


def _at_a_rate(table: pd.DataFrame, where: str, what: str, paper: float, column: str):
    what, at = (
        f"{what}, vLLM over LayerKV, ShareGPT lengths",
        "{row.model}, {row.rate:g} requests/s",
    )
    said = f"up to x {paper:g}"
    return _up_to(
        table, where, what, said, column, at, TEXTS.RATE, lambda gain: gain.beside(paper, 1.0)
    )


def rate_claims(table: pd.DataFrame) -> list[Claim]:
    found = _at_a_rate(table, "Fig. 6", "mean TTFT", 69, "ttft_gain")
    paper = "below 3 % lower"
    return found + _throughput(table, "Fig. 6", "rates", paper, TEXTS.THROUGHPUT, lower=True)


def tail_claims(table: pd.DataFrame) -> list[Claim]:
    return _at_a_rate(table, "Fig. 7", "P99 TTFT", 45, "p99_gain")


def violation_claims(table: pd.DataFrame) -> list[Claim]:
    rows = table[table.model == LLAMA]
    vllm = rows_of(rows.sort_values("rate"), policy=VLLM)
    begins = vllm[0].onset
    said = f"from {begins} requests/s" if begins.known else "not with every seed"
    verdict, what = begins.beside(6.0), "vLLM's violations pass 10 %, Llama-2-7B"
    found = [Claim.judged("Fig. 8", what, "near 6 requests/s", said, verdict, TEXTS.ONSET, False)]
    loaded = rows[rows.rate.isin([row.rate for row in vllm if row.violations.mean > ONSET])]
    loaded = loaded if len(loaded) else rows[rows.rate == rows.rate.max()]
    for policy, reading in _there(loaded, READINGS).items():
        part = rows_of(loaded, policy=policy)
        ends = [most(part, "fewer_violations", sign).fewer_violations for sign in (-1, 1)]
        verdict = worst(
            *(row.fewer_violations.more() for row in part),
            *(end.beside(printed, 0.0) for end, printed in zip(ends, (0.177, 0.287), strict=True)),
        )
        ours = f"{100 * ends[0]} to {100 * ends[1]} points"
        what = f"violations, LayerKV below vLLM where vLLM has some, Llama-2-7B; {reading}"
        reason, directed = TEXTS.VIOLATIONS, policy in DIRECTED
        paper = "17.7 to 28.7 %"
        found.append(Claim.judged("Fig. 8", what, paper, ours, verdict, reason, directed))
    return [*found, _without_slo(rows)]


def _without_slo(rows: pd.DataFrame) -> Claim:
    """At the rate nearest to 5.5 requests/s."""
    rate = min(rows.rate.unique(), key=lambda r: abs(r - 5.5))
    here = {row.policy: row for row in rows_of(rows, rate=rate)}
    policies = (VLLM, NO_SLO, "layerkv", SAVABLE)
    shares = "; ".join(f"{100 * here[policy].violations} %" for policy in policies)
    worse = (-1 * here[NO_SLO].fewer_violations).more()
    tpot = here[NO_SLO].more_tpot_violations.more() == "agrees"
    what = (
        f"violations at {rate:g} requests/s: vLLM; LayerKV without the SLO-aware scheduler; "
        "with it; savable"
    )
    verdict: Verdict = "direction only" if worse == "differs" and tpot else worse
    said = "without it occasionally above vLLM, by TPOT"
    return Claim.judged("Fig. 8", what, said, shares, verdict, TEXTS.NO_SLO)
