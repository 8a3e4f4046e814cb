"""What Justitia's paper says of its figures, beside what our tables say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from twinserve.experiments.justitia.tables import MEASURES
from twinserve.experiments.study.claims import Said, claims, most, rows_of, texts
from twinserve.experiments.study.verdict import Claim, Verdict, judge, judge_bound, worst

TEXTS = texts(__file__)
# label of a pool of KV blocks -> words in a claim
POOLS = {"profile": "", "459": "459 KV blocks"}
PER_CENT = 100.0  # changes (vs_POLICY) are given so
ROOM = 2.0  # per cent that something bounded may grow by
UP_TO = 42.3  # Fig. 12, per cent
SLOWER = 142.7  # Table II: 366.7 s over 151.1 s, per cent
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


def said(
    where: str,
    what: str,
    number: Any,
    row: Mapping[str, Any],
    column: str,
    reason: str,
    unit: str = "",
    paper: str | None = None,
    **more: Any,
) -> Said:
    """What would be no effect, of a column: 0 of a change (vs_POLICY), 1 of a ratio (over_POLICY);
    others are amounts. paper: its words, where it prints no number."""
    change = "vs_" in column
    neutral = 0.0 if change else 1.0 if "over_" in column else None
    printed = f"{number:g}{unit}" if paper is None else paper
    more = {"neutral": neutral, "text": f"{{}}{unit}", "whole": PER_CENT if change else 1.0} | more
    return Said(where, what, printed, number, row, column, reason, **more)


def _with(*words: str) -> str:
    """Of a setting: the words that there are."""
    return ", ".join(filter(None, words))


# -- Figs. 3 and 4 ---------------------------------------------------------------------------------
def _fig3(size: str, sized: str) -> list[Said]:
    what = "average JCT of two DM on 459 blocks"
    fair, ours = ({"size": size, "policy": policy} for policy in ("kv-share", "justitia"))
    ratio = f"{what}, instantaneous fair sharing / Justitia; {sized}"
    sharing = f"{what}, instantaneous fair sharing; {sized}"
    sequential = f"{what}, Justitia; {sized}"

    def none(count: float, half: float) -> Verdict:
        return judge_bound(1e-9 - count, half)

    return [
        said("Fig. 3", ratio, 210 / 166, fair, "over_justitia", TEXTS.MERGER_RATIO, paper="1.27"),
        said("Fig. 3a", sharing, 210, fair, "mean_s", TEXTS.MERGERS, " s"),
        said("Fig. 3b", sequential, 166, ours, "mean_s", TEXTS.MERGERS, " s"),
        said(
            "Fig. 3",
            f"applications delayed by Justitia; {sized}",
            none,
            fair,
            "delayed",
            TEXTS.DELAYED,
            paper="none",
            text="{1:.2g} of 2",
        ),
    ]


FIG3 = claims(
    *_fig3("ours", "mergers of the workload"), *_fig3("as in Fig. 3", "mergers a sixth as large")
)


def fig4(table: pd.DataFrame) -> list[Claim]:
    rows = table[(table.kind == "FV") & (table.what == "prompt")]
    low, high = rows.least.min(), rows.most.max()
    what = (
        "prompts of FV's generate-queries, tokens (generated so: nothing but that the "
        "generator does what it says)"
    )
    verdict = "agrees" if 360 <= low and high <= 380 else "differs"
    ours = f"{low:.0f} to {high:.0f}"
    return [Claim.judged("Fig. 4b", what, "360 to 380", ours, verdict, TEXTS.LENGTHS, False)]


# -- Figs. 8, 9, 10 and 12 -------------------------------------------------------------------------
def jct(where: str, model: str, reasons: Mapping[str, str]) -> Callable:
    """Average JCT over the densities."""
    found = []
    for pool, words in POOLS.items():
        ours, srjf = (
            {"density": "all", "pool": pool, "policy": policy} for policy in ("justitia", "srjf")
        )
        setting = _with(model, words, "mean over the densities")
        fair = f"average JCT, Justitia against VTC; {setting}"
        blocking = f"average JCT, Justitia against Parrot; {setting}"
        close = f"average JCT, SRJF against Justitia; {setting}"
        found += [
            said(where, fair, -57.5, ours, "vs_vtc", reasons["vs_vtc"], " %"),
            said(where, blocking, -61.1, ours, "vs_parrot", reasons["vs_parrot"], " %"),
            said(
                where,
                close,
                judge_close,
                srjf,
                "vs_justitia",
                TEXTS.CLOSE,
                " %",
                "very close",
                neutral=None,
            ),
        ]
    return claims(*found)


def fig10(table: pd.DataFrame) -> list[Claim]:
    table = table.assign(late=table.worst - 1, late_ci=table.worst_ci)
    found: list[Claim] = []
    for pool in dict.fromkeys(table.pool):
        setting, ours = _with("3x", POOLS[pool]), {"pool": pool, "policy": "justitia"}
        no_later = f"applications no later than under VTC; {setting}"
        delay = f"worst delay against VTC; {setting}"
        unit = {"unit": " %", "factor": 100.0}
        found += claims(
            said("Fig. 10", no_later, 92.0, ours, "not_delayed", TEXTS.SHARE, **unit),
            said("Fig. 10", delay, 26.0, ours, "late", TEXTS.WORST, **unit),
        )(table)
        by = {row.policy: row for row in rows_of(table, pool=pool)}
        for policy in RIVALS:
            what = (
                f"worst delay against VTC, Justitia's beside that of `{policy}` (much "
                f"smaller: at most half); {setting}"
            )
            text = f"{100 * by['justitia'].late} % against {100 * by[policy].late} %"
            verdict, reason = (
                by[policy].half_delay.above(),
                TEXTS.NOT_SMALLER.get(policy, TEXTS.WORST),
            )
            found.append(Claim.judged("Fig. 10", what, "much smaller", text, verdict, reason))
    return found


def fig12(table: pd.DataFrame) -> list[Claim]:
    found: list[Claim] = []
    costly = table[(table.policy == "justitia:cost=compute") & (table.density != "all")]
    for column, what in (("vs_justitia", "average"), ("p90_vs_justitia", "P90")):
        for pool, rows in costly.groupby("pool", sort=False):
            density = rows.density[rows[column].idxmax()]
            setting = _with(f"at most, {density}", POOLS[pool])
            text = f"{what} JCT, Justitia/C against Justitia; {setting}"
            row = {"pool": pool, "density": density}
            most = f"up to {UP_TO} %"
            one = said("Fig. 12", text, judge_up_to, row, column, TEXTS.FIG12, " %", most)
            found += claims(one)(costly)
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
        text = ", ".join(
            f"{row.policy} {less[row.policy].elephant_s:.0f} to {row.elephant_s:.0f} s "
            f"({row.grown} %)"
            for row in (srjf, ours)
        )
        text += f"; GPS ends it at {ours.gps_s:.0f} s, with bound 2 {ours.bound_s:.0f} s"
        what = f"elephant as small applications go from {before} to {most}; {crowd}"
        reason = TEXTS.CROWD.get(
            crowd, "the summaries of the seeds differ in size; no run here says more"
        )
        paper = "grows under SRJF, bounded under Justitia"
        found.append(Claim.judged("Fig. 11", what, paper, text, verdict, reason))
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
            ours = f"fairer by {gain}{' ' if unit else ''}{unit}, in {100 * wins:.0f} % of runs"
            what = f"Justitia fairer than SRJF: {words}; {setting}"
            verdict, mine = gain.above(), name in PRINTED
            found.append(Claim.judged("Sec. V-B", what, "fairer", ours, verdict, TEXTS.WHO, mine))
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
    what = f"average JCT with an error of {{}} %; {setting}"
    against = f"JCT with 452 % against 53 %; {setting}"
    return [
        said("Table II", what.format(53), 151.1, right, "mean_s", reason, " s"),
        said("Table II", what.format(452), 366.7, wrong, "mean_s", reason, " s"),
        said("Table II", against, SLOWER, wrong, "vs_53", more, " %"),
    ]


MLP = {"predictor": "mlp", "pool": "profile"}
TABLE2 = claims(
    said("Table II", "MLP, mean relative error", 53.0, MLP, "error", TEXTS.MLP, " %", factor=100.0),
    said("Table II", "MLP, one prediction", 2.16, MLP, "predict_ms", TEXTS.TIME, " ms"),
    said(
        "Table II",
        "MLP, training of all classes",
        60.0,
        MLP,
        "train_s",
        TEXTS.TIME,
        " s",
        "about 1 min",
    ),
    *(one for kind in KINDS for pool in POOLS for one in _with_errors(kind, pool)),
)


def table3(table: pd.DataFrame) -> list[Claim]:
    rows = [
        said(
            "Table III",
            f"a decision at {rate} applications a minute",
            ms,
            {"queue": "heap", "a_minute": rate},
            "plan_ms",
            TEXTS.TIME,
            " ms",
        )
        for rate, ms in OVERHEAD_MS.items()
    ]
    heap = rows_of(table, queue="heap")
    verdict = worst(*(row.plan_ms.below(10) for row in heap))
    ours = f"{most(heap, 'plan_ms').plan_ms} ms at most"
    what = "a decision, at every rate"
    always = Claim.judged("Table III", what, "under 10 ms", ours, verdict, TEXTS.TIME, False)
    number = OVERHEAD_MS[RATES[-1]] / OVERHEAD_MS[RATES[0]]
    what = f"a decision at {RATES[-1]} over one at {RATES[0]} applications a minute; queue: "
    grown = [
        said(
            "Table III",
            what + queue,
            number,
            {"queue": queue, "a_minute": RATES[-1]},
            "over_least",
            TEXTS.PLAN,
            paper=f"x {number:.1f}",
        )
        for queue in QUEUES
    ]
    return [*claims(*rows)(table), always, *claims(*grown)(table)]


ABSENT = tuple(Claim(verdict="not reproduced", directed=False, **one) for one in TEXTS.ABSENT)
