"""The row to buy: the cheapest over the range of step times, and why it is not the first row."""

from dataclasses import dataclass
from typing import Any

from twinserve.sim.plan.planner import Plan, Row
from twinserve.sim.plan.savings import HOURS_A_MONTH


@dataclass(frozen=True)
class Decision:
    """replicas  of `row`: the smallest that meets the objectives beyond doubt; if none that was
                 looked at does, the smallest that keeps them as recorded
    fast, slow   smallest numbers with step times shorter and longer by the expected error; None:
                 more than were tried
    """

    row: Row
    replicas: int
    fast: int | None
    slow: int | None

    @property
    def most(self) -> int | None:
        """Return the replicas that the whole range needs."""
        return None if self.slow is None else max(self.slow, self.replicas)

    def cost(self, replicas: int) -> float | None:
        usd = self.row.candidate.usd_per_hour
        return None if usd is None else usd * replicas

    def named(self, replicas: int, further: str = "") -> str:
        gpu, tp = self.row.candidate.gpu.upper(), self.row.candidate.tp
        return f"{replicas * tp:,} {gpu} ({replicas:,} x TP{tp}{further})"


def decide(plan: Plan) -> tuple[Decision, Decision] | None:
    """Return what to buy and the first row, or None if nothing is enough."""
    found = [_of(row) for row in plan.rows if row.closer is not None]
    if not found:
        return None

    def rank(one: Decision) -> tuple[bool, float]:
        gpus = (one.most or one.replicas) * one.row.candidate.tp
        usd = one.cost(one.most or one.replicas)
        return one.most is None, usd if plan.priced and usd is not None else gpus

    return min(found, key=rank), found[0]


def _of(row: Row) -> Decision:
    closer = row.closer
    assert closer is not None
    return Decision(row, closer.sure or row.at_least, closer.fast, closer.slow)


def decision_lines(plan: Plan) -> list[str]:
    """Return what to buy, in a sentence, and a second sentence if it is not the first row."""
    found = decide(plan)
    if found is None:
        return []
    best, first = found
    usd = best.cost(best.replicas)
    money = ""
    if usd is not None:
        month = float(f"{usd * HOURS_A_MONTH:.3g}")
        money = f": ${usd:,.2f} an hour, about ${month:,.0f} a month"
    failed = plan.question.survive
    further = f", {'one' if failed == 1 else failed} may fail" * bool(failed)
    if len(plan.question.policies) > 1:
        further += f", policy {best.row.candidate.names['policy']}"
    what = best.named(best.replicas, further)
    lines = [f"Buy {what}{money}; {_range(best)} if step times are off"]
    if best.row is not first.row:
        other = f"{first.named(first.replicas)}{_price(first)}"
        lines.append(f"Not the first row: {other} {_why(first)}")
    return lines


def _range(one: Decision) -> str:
    if one.fast is None or one.slow is None:
        return f"more than {one.row.closer.farthest:,} replicas"  # type: ignore[union-attr]
    ends = sorted({one.fast, one.slow})
    return " to ".join(f"{n:,}" for n in ends) + " replica" + "s" * (ends[-1] > 1)


def _price(one: Decision) -> str:
    usd = one.cost(one.replicas)
    return "" if usd is None else f" at ${usd:,.2f}"


def _why(one: Decision) -> str:
    if one.most is None:
        return "may not be enough at any number that was tried, if steps take longer than expected"
    usd = one.cost(one.most)
    money = "" if usd is None else f", ${usd:,.2f}"
    return f"may need {one.most:,} replicas{money}, if steps take longer by the expected error"


def decided(plan: Plan) -> dict[str, Any] | None:
    """Return the content for plan.json: the row's place and its numbers."""
    found = decide(plan)
    if found is None:
        return None
    best, _ = found
    place = next(i for i, row in enumerate(plan.rows) if row is best.row)
    return {
        "row": place,
        "replicas": best.replicas,
        "steps_fast": best.fast,
        "steps_slow": best.slow,
        "usd_per_hour": best.cost(best.replicas),
        "lines": decision_lines(plan),
    }
