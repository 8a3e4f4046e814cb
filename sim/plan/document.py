"""The content of plan.json."""

from dataclasses import asdict
from typing import Any

from twinserve.sim.plan.apart import told_of
from twinserve.sim.plan.closer import Sized
from twinserve.sim.plan.day import Day
from twinserve.sim.plan.decision import decided
from twinserve.sim.plan.planner import Closer, Plan, Row, least_slack
from twinserve.sim.plan.prices import Prices
from twinserve.sim.plan.show import head_lines, memory_of, warnings
from twinserve.sim.plan.start import commands
from twinserve.sim.results.versions import PLANS


def described(plan: Plan, prices: Prices) -> dict[str, Any]:
    """Return the content of plan.json."""
    document = {
        "question": asdict(plan.question),
        "asked": head_lines(plan),
        "decision": decided(plan),
        "objectives": [asdict(objective) for objective in plan.objectives],
        "peaks": [
            {
                "trace": peak.trace,
                "window_s": list(peak.window_s),
                "judged_since_s": peak.since_s,
                "requests": len(peak.judged),
                "requests_per_s": peak.requests_per_s,
                "mean_tokens_per_s": peak.tokens_per_s,
                "load": peak.load,
            }
            for peak in plan.peaks
        ],
        "ranked_by": "usd" if plan.priced else "gpus",
        "prices": {gpu: asdict(price) for gpu, price in prices.items()},
        "rows": [_row(row, plan) for row in plan.rows],
        "left_out": [asdict(one) for one in plan.left_out],
        "closer": None if plan.closer is None else _closer(plan.closer),
        "warnings": warnings(plan),
        "notices": list(plan.notices),
        "day": None if plan.day is None else _day(plan.day),
        "apart": [
            told_of(one, None if one.sized is None else _sized(one.sized)) for one in plan.apart
        ],
        "savings": [one.told() for one in plan.savings],
        "trials": plan.trials,
    }
    return PLANS.numbered(document)


def _row(row: Row, plan: Plan) -> dict[str, Any]:
    candidate = row.candidate
    return {
        "gpu": candidate.gpu,
        "tp": candidate.tp,
        **candidate.names,
        "status": row.status,
        "reason": row.reason,
        "at_least_replicas": row.at_least,
        "replicas": row.replicas if row.status == "enough" else None,
        "gpus": row.gpus if row.status == "enough" else None,
        "usd_per_hour": row.usd_per_hour,
        "usd_per_million_tokens": row.usd_per_million_tokens,
        "monotone": row.monotone,
        "tried": list(row.tried),
        "binds": [objective.metric for objective in row.binds],
        "slack": least_slack(row.sized.attained) if row.sized else {},
        "closer": None if row.closer is None else _closer(row.closer),
        "sized": None if row.sized is None else _sized(row.sized),
        "commands": commands(plan, row) if row.status == "enough" else [],
        "settings": candidate.config.model_dump(mode="json"),
    }


def _sized(sized: Sized) -> dict[str, Any]:
    return {
        "replicas": sized.replicas,
        "answer": sized.answer,
        "attained": [
            [
                {
                    "metric": one.objective.metric,
                    "share": one.share,
                    "low": one.low,
                    "high": one.high,
                    "value_s": one.value_s,
                    "slack": one.slack,
                    "answer": one.answer,
                }
                for one in peak
            ]
            for peak in sized.attained
        ],
        "memory": None if (memory := memory_of(sized)) is None else asdict(memory),
        "peak_kv_share": max(trial.peak_kv_share for trial in sized.trials),
        "preemptions": sum(trial.preemptions for trial in sized.trials),
    }


def _closer(closer: Closer) -> dict[str, Any]:
    return {
        "sizes": [_sized(one) for one in closer.sizes],
        "below": None if closer.below is None else _sized(closer.below),
        "draws": closer.draws,
        "steps_fast": closer.fast,
        "steps_slow": closer.slow,
        "steps_farthest": closer.farthest,
        "step_time_errors": closer.errors,
        "rate_of_one_replica": closer.rate_of_one,
    }


def _day(day: Day) -> dict[str, Any]:
    return {
        "gpu": day.candidate.gpu,
        "tp": day.candidate.tp,
        **day.candidate.names,
        "replicas": day.replicas,
        "holds": day.holds,
        "profile": day.profile,
        "offline_tokens_per_day": day.offline_tokens_per_day,
        "levels": [
            {"share": share, "offline_tokens_per_s": rate, "sized": _sized(one)}
            for share, rate, one in day.levels
        ],
    }
