"""Compare what Justitia's paper says of its figures with our tables."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from twinserve.experiments.justitia.tables import MEASURES
from twinserve.experiments.study.claims import Said, claims, most, rows_of, teller, texts
from twinserve.experiments.study.verdict import Claim, Verdict, judge, judge_bound, worst

TEXTS = texts(__file__)
# label of a pool of KV blocks -> words in a claim
POOLS = {"profile": "", "459": "459 KV blocks"}
PER_CENT = 100.0  # changes (vs_POLICY) are given so
ROOM = 2.0  # per cent that something bounded may grow by
UP_TO = 42.3  # Fig. 12, per cent
# Table III: applications a minute -> ms
OVERHEAD_MS = {15: 0.778, 20: 1.827, 30: 3.076, 50: 5.190, 100: 8.093}
RATES = tuple(OVERHEAD_MS)
QUEUES = {"heap": RATES, "sorted at each decision": (RATES[0], RATES[-1])}
# with the error that the paper reports of its predictor, DistilBERT (Table II)
SJF = "vllm-sjf:error=4.52"  # its default, told where it is shown
RIVALS = ("srjf", "parrot", "vllm", "vllm-v0", SJF)


def judge_close(change: float, half: float, room: float = 10.0) -> Verdict:
    """ "Very close": the change, per cent, is within `room` to either side."""
    return judge_bound(room - abs(change), half)


def judge_up_to(change: float, half: float, most: float = UP_TO) -> Verdict:
    """ "Up to": as `judge`, but a change that is surely above `most` (and 10 % of it) differs."""
    return "differs" if change - half > 1.1 * most else judge(change, half, most, whole=PER_CENT)


def said(name: str, row: Mapping[str, Any], where: str = "", **how: Any) -> Said:
    """One of SAID, of a row; how: names of its sentence, and what is another than there."""
    of = TEXTS.SAID[name] | how
    column, unit, number = of["column"], of.get("unit", ""), of.get("number")
    change = "vs_" in column
    neutral = of.get("neutral", 0.0 if change else 1.0 if "over_" in column else None)
    return Said(
        where or of["where"],
        of["what"].format_map(how),
        of["paper"] if "paper" in of else f"{number:g}{unit}",
        number,
        row,
        column,
        of["why"],
        neutral,
        of.get("factor", 1.0),
        of.get("text", f"{{}}{unit}"),
        PER_CENT if change else 1.0,
    )


tell = teller(TEXTS)


def _with(*words: str) -> str:
    """Of a setting: the words that there are."""
    return ", ".join(filter(None, words))


# -- Figs. 3 and 4 ---------------------------------------------------------------------------------
def _none(count: float, half: float) -> Verdict:
    return judge_bound(1e-9 - count, half)


def _fig3(size: str, sized: str) -> list[Said]:
    fair, ours = ({"size": size, "policy": policy} for policy in ("kv-share", "justitia"))
    return [
        said("merger_ratio", fair, setting=sized),
        said("sharing", fair, setting=sized),
        said("sequential", ours, setting=sized),
        said("delayed", fair, setting=sized, number=_none),
    ]


FIG3 = claims(
    *_fig3("ours", "mergers of the workload"), *_fig3("as in Fig. 3", "mergers a sixth as large")
)


def fig4(table: pd.DataFrame) -> list[Claim]:
    rows = table[(table.kind == "FV") & (table.what == "prompt")]
    low, high = rows.least.min(), rows.most.max()
    verdict: Verdict = "agrees" if 360 <= low and high <= 380 else "differs"
    return [tell("lengths", verdict, low=low, high=high)]


# -- Figs. 8, 9, 10 and 12 -------------------------------------------------------------------------
def jct(where: str, model: str, reasons: Mapping[str, str]) -> Callable:
    """Average JCT over the densities."""
    found = []
    for pool, words in POOLS.items():
        ours, srjf = (
            {"density": "all", "pool": pool, "policy": policy} for policy in ("justitia", "srjf")
        )
        setting = _with(model, words, "mean over the densities")
        found += [
            said("fair", ours, where, setting=setting, why=reasons["vs_vtc"]),
            said("blocking", ours, where, setting=setting, why=reasons["vs_parrot"]),
            said("close", srjf, where, setting=setting, number=judge_close),
        ]
    return claims(*found)


def fig10(table: pd.DataFrame) -> list[Claim]:
    table = table.assign(late=table.worst - 1, late_ci=table.worst_ci)
    found: list[Claim] = []
    for pool in dict.fromkeys(table.pool):
        setting, ours = _with("3x", POOLS[pool]), {"pool": pool, "policy": "justitia"}
        found += claims(*(said(n, ours, setting=setting) for n in ("no_later", "delay")))(table)
        by = {row.policy: row for row in rows_of(table, pool=pool)}
        for policy in RIVALS:
            why = TEXTS.NOT_SMALLER.get(policy, TEXTS.WORST)
            of = {"setting": setting, "mine": by["justitia"].late, "why": why}
            found.append(tell("much_smaller", by[policy].half_delay.above(), by[policy], **of))
    return found


def fig12(table: pd.DataFrame) -> list[Claim]:
    found: list[Claim] = []
    costly = table[(table.policy == "justitia:cost=compute") & (table.density != "all")]
    for column, what in (("vs_justitia", "average"), ("p90_vs_justitia", "P90")):
        for pool, rows in costly.groupby("pool", sort=False):
            density = rows.density[rows[column].idxmax()]
            setting, row = _with(f"at most, {density}", POOLS[pool]), {"pool": pool}
            of = {"setting": setting, "column": column, "number": judge_up_to, "kind": what}
            found += claims(said("costly", row | {"density": density}, **of))(costly)
    return found


# -- Fig. 11 ---------------------------------------------------------------------------------------
def fig11(table: pd.DataFrame) -> list[Claim]:
    found = []
    for crowd in dict.fromkeys(table.crowd):
        part = table[table.crowd == crowd]
        before, most = sorted(set(part.mice))[-2:]
        less, last = (
            {row.policy: row for row in rows_of(part, mice=mice)} for mice in (before, most)
        )
        srjf, ours = last["srjf"], last["justitia"]
        verdict = worst(srjf.grown.above(ROOM), ours.grown.below(ROOM))
        grown = ", ".join(
            f"{row.policy} {less[row.policy].elephant_s:.0f} to {row.elephant_s:.0f} s "
            f"({row.grown} %)"
            for row in (srjf, ours)
        )
        why = TEXTS.CROWD.get(crowd, TEXTS.OF_ANOTHER_CROWD)
        of = {"before": before, "most": most, "grown_by": grown, "why": why}
        found.append(tell("elephant", verdict, ours, **of))
    return found


# -- Sec. V-B --------------------------------------------------------------------------------------
PRINTED = ("not_delayed", "worst")  # the paper's measures; the others are ours


def fairness(table: pd.DataFrame) -> list[Claim]:
    """The paper says that Justitia is the fairer of the two; no number is given for SRJF."""
    found = []
    for row in rows_of(table, density="all"):
        setting = _with("mean over the densities", POOLS[row.pool])
        for name, (words, unit, _, _) in MEASURES.items():
            gain, wins = getattr(row, f"{name}_gain"), getattr(row, f"{name}_wins")
            of = {"words": words, "setting": setting, "gain": gain, "share": 100 * wins}
            of |= {"unit": f" {unit}" if unit else "", "directed": name in PRINTED}
            found.append(tell("fairer", gain.above(), **of))
    return found


# -- Tables II and III -----------------------------------------------------------------------------
ERRORS = {53: 0.53, 452: 4.52}  # per cent: the paper's MLP and DistilBERT
KINDS = {"error": "noise of each application", "class error": "one factor a class"}


def _with_errors(kind: str, pool: str) -> list[Said]:
    setting = _with(f"{KINDS[kind]}, 2x", POOLS[pool])
    right, wrong = ({"predictor": f"{kind} {error} %", "pool": pool} for error in ERRORS)
    noise = TEXTS.NOISE if kind == "error" else TEXTS.CLASSES
    reason = TEXTS.POOL if pool == "profile" else noise
    more = TEXTS.NOISE if kind == "error" else reason
    return [
        said("right", right, setting=setting, why=reason),
        said("wrong", wrong, setting=setting, why=reason),
        said("wronger", wrong, setting=setting, why=more),
    ]


MLP = {"predictor": "mlp", "pool": "profile"}
TABLE2 = claims(
    *(said(name, MLP) for name in ("mlp_error", "mlp_time", "mlp_training")),
    *(one for kind in KINDS for pool in POOLS for one in _with_errors(kind, pool)),
)


def table3(table: pd.DataFrame) -> list[Claim]:
    rows = [
        said("decision", {"queue": "heap", "a_minute": rate}, rate=rate, number=ms)
        for rate, ms in OVERHEAD_MS.items()
    ]
    heap = rows_of(table, queue="heap")
    always = tell("always", worst(*(row.plan_ms.below(10) for row in heap)), most(heap, "plan_ms"))
    number = OVERHEAD_MS[RATES[-1]] / OVERHEAD_MS[RATES[0]]
    of = {"number": number, "paper": f"x {number:.1f}"}
    grown = [
        said("grown", {"queue": queue, "a_minute": RATES[-1]}, queue=queue, **of)
        for queue in QUEUES
    ]
    return [*claims(*rows)(table), always, *claims(*grown)(table)]


ABSENT = tuple(Claim(verdict="not reproduced", directed=False, **one) for one in TEXTS.ABSENT)
