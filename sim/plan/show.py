"""A plan as a table with its notes."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from twinserve.sim.plan.apart import said_of
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.closer import Sized
from twinserve.sim.plan.decision import decide, decision_lines
from twinserve.sim.plan.planner import Closer, Plan, Row
from twinserve.sim.plan.prices import Prices
from twinserve.sim.plan.start import commands, deadlines_told
from twinserve.sim.plan.trial import Memory
from twinserve.sim.plan.verdicts import Attained
from twinserve.sim.results.options import LATENCIES, Objective, spoken
from twinserve.sim.setup.config import GENERATED_RATE
from twinserve.traces.generators.synth import is_synthetic

_SHORT = 0.8  # of the peak asked for
_WIDEST = 194  # of the table where it goes into a file


def print_plan(plan: Plan, prices: Prices, console: Console | None = None) -> None:
    console = console or Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDEST)
    for line in decision_lines(plan):
        console.print(line, markup=False, style="bold")
    for line in head_lines(plan):
        console.print(line, markup=False)
    for line in warnings(plan):
        console.print(f"WARNING: {line}", markup=False, style="bold")
    console.print(_table(plan))
    for line in foot_lines(plan, prices):
        console.print(line, markup=False)


def head_lines(plan: Plan) -> list[str]:
    lines = []
    for peak in plan.peaks:
        begin = peak.window_s[0] + peak.since_s * plan.question.grow
        lines.append(
            f"{peak.trace}: peak of {peak.judged.span_s:,.0f} s from {begin:,.0f} s of "
            f"the recording on, {len(peak.judged):,} requests, {peak.requests_per_s:.2f} a second"
            + (f", grown by {plan.question.grow:g}" if plan.question.grow != 1 else "")
        )
    if plan.question.rate is None and any(map(is_synthetic, plan.question.traces)):
        lines.append(f"rate {GENERATED_RATE:g} requests/s, the default (--rate sets another)")
    said = ", ".join(str(o) for o in plan.objectives)
    return [*lines, f"objectives: {said}", *_survived(plan)]


def _survived(plan: Plan) -> list[str]:
    asked = plan.question
    if not asked.survive:
        return []
    one = asked.survive == 1
    which = "one replica fails" if one else f"{asked.survive} replicas fail"
    known = f", which is noticed after {asked.detection_s:g} s" if asked.detection_s else ""
    return [
        f"kept although {which} as the peak begins and stay{'s' * one} down{known}; on failure: "
        f"{asked.on_failure} (docs/fleet.md)"
    ]


def warnings(plan: Plan) -> list[str]:
    """Return lines that a reader must not miss."""
    return [*_short(plan), *_unsure(plan), *_not_told(plan), *_close_memory(plan)]


def _short(plan: Plan) -> list[str]:
    """Return peaks of much less time than was asked for."""
    asked = plan.question
    return [
        f"{peak.trace}: a peak of {peak.judged.span_s:,.0f} s after {peak.since_s:,.0f} s of lead, "
        f"not {asked.peak_s:g} s after {asked.lead_s:g} s: too short to show a queue that grows "
        "slowly; give a longer recording"
        for peak in plan.peaks
        if peak.judged.span_s < _SHORT * asked.peak_s
    ]


def _close_memory(plan: Plan) -> list[str]:
    """Rows whose longest request fits into a part of their range of KV memory only."""
    longest = plan.longest
    said: dict[str, None] = {}
    for row in plan.rows:
        hardware = row.candidate.hardware
        least = hardware.least_kv_tokens
        if row.status == "enough" and longest > least:
            said[
                f"{row.candidate.gpu} tp{row.candidate.tp}: KV memory is derived, {least:,} to "
                f"{hardware.kv_tokens:,} tokens or more, and the longest request has {longest:,}: "
                "a server may refuse it; look for 'Available KV cache memory' in its log"
            ] = None
    return [*said]


def _unsure(plan: Plan) -> list[str]:
    """A first row that may not keep the objectives."""
    best = plan.best
    if best is None or best.sized is None or best.sized.answer == "meets":
        return []
    first = f"{_counted(best.replicas or 0)} of {named(best.candidate, plan)}"
    said = f"the first row is {best.sized.answer}: {first} kept the objectives as recorded"
    said += ", and may miss them on another day like that."
    if plan.surest is None:
        return [f"{said} No size tried meets them beyond doubt; give more --seeds"]
    row, one = plan.surest
    usd = row.candidate.usd_per_hour
    money = "" if usd is None else f", ${usd * one.replicas:,.2f} an hour"
    sure = f"{_counted(one.replicas)} of {named(row.candidate, plan)}"
    return [f"{said} The cheapest that meets them beyond doubt: {sure}{money}"]


def _not_told(plan: Plan) -> list[str]:
    """Return a note on an objective that a server cannot take as it is."""
    growing = [one for one in plan.objectives if one.prefills]
    told = any(row.status == "enough" and deadlines_told(row.candidate) for row in plan.rows)
    return [
        f"{one}: the command lines give a server {spoken(one.bound_s)} for every prompt. Since "
        "this objective grows with the prompt, let clients send vllm_xargs.slo_ttft_s, or the "
        "server decides differently from the plan (docs/serving.md)"
        for one in growing
        if told
    ]


def foot_lines(plan: Plan, prices: Prices) -> list[str]:
    lines = [f"left out: {o.gpu} tp{o.tp}: {o.reason}" for o in plan.left_out]
    lines += [
        f"never: {named(row.candidate, plan)}: {row.reason}"
        for row in plan.rows
        if row.status == "never"
    ]
    lines += [
        f"note: {named(row.candidate, plan)}: more replicas were not always better; tried "
        f"{', '.join(map(str, row.tried))}"
        for row in plan.rows
        if row.status == "enough" and not row.monotone
    ]
    lines += [f"note: {notice}" for notice in plan.notices]
    if plan.closer is not None and plan.best is not None:
        lines += closer_lines(plan, plan.best, plan.closer)
    else:
        lines += _nothing(plan)
    lines += apart_lines(plan)
    if plan.question.pool and plan.best is not None:
        lines += day_lines(plan)
    return [*lines, *start_lines(plan), *_price_lines(plan, prices), *map(str, plan.savings)]


def closer_lines(plan: Plan, best: Row, closer: Closer) -> list[str]:
    """Return lines on the first row: sizes around it, errors, the rate of one replica, and how to
    start it. The columns have the same of other rows in short."""
    n = best.replicas or 0
    lines = [f"first row, {named(best.candidate, plan)}:"]
    if closer.below is not None:
        gone = ", none of which stays up" if n - 1 <= plan.question.survive else ""
        gone = ", the one that fails" if n == 2 and gone else gone
        lines.append(f"  {_counted(n - 1)}{gone}: {_said(closer.below)}")
    lines += [f"  {_counted(one.replicas)}: {_said(one)}" for one in closer.sizes]
    if closer.draws < plan.question.draws:
        lines.append("  one draw: sessions or texts tie lengths to their requests")
    if closer.sizes[-1].answer != "meets":
        lines.append("  no size tried meets the objectives beyond doubt; give more --seeds")
    fast, slow = (_or_more(number, closer.farthest) for number in (closer.fast, closer.slow))
    lines.append(f"  step times off by what is expected ({closer.errors}): {fast} to {slow}")
    if closer.rate_of_one is None:
        lines.append("  one replica keeps the objectives at no rate that was tried")
    else:
        up = " that does not fail" if plan.question.survive else " alone"
        lines.append(f"  one replica{up} keeps {closer.rate_of_one:.0%} of the peak's rate")
    return lines


def start_lines(plan: Plan) -> list[str]:
    """Return how to start what is to be bought. `--out` writes the script."""
    found = decide(plan)
    if found is None:
        return []
    best, _ = found
    router = f"; the router: twinserve route --router {best.row.candidate.router}"
    servers = commands(plan, best.row, best.replicas)
    return [f"to start {best.named(best.replicas)} (start.sh of --out{router}):"] + [
        f"  {line}" for line in servers
    ]


def apart_lines(plan: Plan) -> list[str]:
    """Return lines on prefill apart from decode, for each row that was tried with it."""
    if not plan.question.prefill_decode:
        return []
    if not plan.apart:
        return ["prefill apart from decode was not tried: no row of policy vllm is enough"]
    said = [
        said_of(one, named(one.candidate, plan), "" if one.sized is None else _said(one.sized))
        for one in plan.apart
    ]
    return ["prefill apart from decode, on the same GPUs:", *said]


def day_lines(plan: Plan) -> list[str]:
    """Return lines on step 2: the cheapest plan with offline work, and what that work gets."""
    day = plan.day
    if day is None:
        return [
            f"a day with a closed loop of {plan.question.pool:,} offline requests: no number of "
            f"replicas with up to {plan.question.most_gpus:,} GPUs keeps the objectives; choose "
            "a policy that prefers online requests (echo, bros), or raise --most-gpus"
        ]
    lines = [
        f"a day with a closed loop of {plan.question.pool:,} offline requests ({day.profile}): "
        f"{_counted(day.replicas or 0)} of {named(day.candidate, plan)}, "
        f"{day.offline_tokens_per_day / 1000000.0:,.0f} M offline tokens"
        + ("" if day.holds else "; the objectives break at a lower load than the peak's")
    ]
    return lines + [
        f"  at {share:.0%} of the peak: {rate:,.0f} offline tokens/s; {_said(one)}"
        for share, rate, one in day.levels
    ]


def named(candidate: Candidate, plan: Plan) -> str:
    """Return GPU and ranks; also policy and router if the plan has several."""
    parts = [candidate.gpu, f"tp{candidate.tp}"]
    several = {"policy": plan.question.policies, "router": plan.question.routers}
    parts += [name for kind, name in candidate.names.items() if len(several[kind]) > 1]
    return " ".join(parts)


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("replicas of")
    for name in ("replicas", "GPUs", "$/hour", "$/M tokens"):
        table.add_column(name, justify="right")
    for objective in plan.objectives:
        table.add_column(f"{LATENCIES[objective.metric]} kept", justify="right", no_wrap=True)
        table.add_column("slack", justify="right")
    for name in ("answer", "beyond doubt", "steps off", "KV predicted, held, over", "binds"):
        table.add_column(name, no_wrap=True)
    for row in plan.rows:
        if row.status != "never":
            table.add_row(*_cells(row, plan))
    return table


def _cells(row: Row, plan: Plan) -> list[str]:
    name = named(row.candidate, plan)
    if row.status == "dearer":
        n = row.at_least
        usd = row.candidate.usd_per_hour
        at_least = [f">= {n:,}", f">= {n * row.candidate.tp:,}"]
        at_least += ["-" if usd is None else f">= {usd * n:,.2f}", "-"]
        none = ["-"] * (2 * len(plan.objectives))
        return [name, *at_least, *none, "dearer, not sized", "-", "-", "-", "-"]
    money = [
        "-" if value is None else f"{value:,.2f}"
        for value in (row.usd_per_hour, row.usd_per_million_tokens)
    ]
    cells = [name, f"{row.at_least:,}", f"{row.at_least * row.candidate.tp:,}", *money]
    worst = _worst(row.sized, plan.objectives)
    for objective in plan.objectives:
        one = worst.get(objective.metric)
        cells += ["-", "-"] if one is None else [_share(one), _slack(one)]
    binds = ", ".join(LATENCIES[o.metric] for o in row.binds) or "-"
    answer = row.sized.answer if row.sized is not None else "fails"
    if row.status != "enough":
        answer = f"too few: {answer}"
    elif answer != "meets" and row is plan.best:
        answer = answer.upper()  # it must not read as the answer to the question
    return [*cells, answer, *_beyond(row), _memory(row.sized), binds]


def _beyond(row: Row) -> list[str]:
    """The size that meets the objectives beyond doubt, and sizes with steps shorter and longer."""
    closer = row.closer
    if closer is None:
        return ["-", "-"]
    sure, most = closer.sure, closer.sizes[-1].replicas
    ends = [
        f"> {closer.farthest:,}" if number is None else f"{number:,}"
        for number in (closer.fast, closer.slow)
    ]
    span = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
    return [f"> {most:,}" if sure is None else f"{sure:,}", span]


def _memory(sized: Sized | None) -> str:
    """Predicted, held, and how often more was held than predicted, of the peak that holds most."""
    found = memory_of(sized)
    if found is None:
        return "-"
    return f"{found.predicted_share:.1%}, {found.held_share:.1%}, {found.exceeded:.0%}"


def memory_of(sized: Sized | None) -> Memory | None:
    """Return the memory of the peak that holds most, or None if no trial can tell."""
    known = [trial.memory for trial in (sized.trials if sized else ()) if trial.memory is not None]
    return max(known, key=lambda memory: memory.held_share, default=None)


def _worst(sized: Sized | None, objectives: Sequence[Objective]) -> dict[str, Attained]:
    """By metric, of the peak that keeps least of it."""
    found: dict[str, Attained] = {}
    for one in (one for peak in (sized.attained if sized else ()) for one in peak):
        known = found.get(one.objective.metric)
        if known is None or one.share < known.share:
            found[one.objective.metric] = one
    return found


def _share(one: Attained) -> str:
    return f"{_percent(one.share)} [{_percent(one.low)}, {_percent(one.high)}]"


def _percent(share: float) -> str:
    """Only a true 100 % may read as one."""
    return f"{min(share * 100, 99.9) if share < 1 else 100:.1f}"


def _slack(one: Attained) -> str:
    return "-" if one.slack is None else f"{one.slack:+.0%}"


def _said(sized: Sized) -> str:
    parts = [
        f"{one.objective.statistic} of {LATENCIES[one.objective.metric]} "
        + ("without end" if one.value_s is None else spoken(float(f"{one.value_s:.3g}")))
        + f", kept by {_share(one)} %"
        for peak in sized.attained
        for one in peak
    ]
    return f"{sized.answer}; {'; '.join(parts)}"


def _counted(n: int) -> str:
    return f"{n:,} replica" + ("s" if n != 1 else "")


def _or_more(number: int | None, farthest: int) -> str:
    return f"more than {_counted(farthest)}" if number is None else _counted(number)


def _nothing(plan: Plan) -> list[str]:
    lines = [f"nothing keeps the objectives within --most-gpus {plan.question.most_gpus}"]
    for row in plan.rows:
        if row.sized is not None:
            lines.append(
                f"  {_counted(row.at_least)} of {named(row.candidate, plan)}: {_said(row.sized)}"
            )
    return lines


def _price_lines(plan: Plan, prices: Prices) -> list[str]:
    gpus = dict.fromkeys(row.candidate.gpu for row in plan.rows)
    known = ["prices of one GPU for an hour:", *(f"  {prices[g]}" for g in gpus if g in prices)]
    unknown = [gpu for gpu in gpus if gpu not in prices]
    if unknown:
        known = known if len(unknown) < len(gpus) else []
        known.append(f"$/hour of {', '.join(unknown)} is not known: ranked by GPUs; give --prices")
    return known
