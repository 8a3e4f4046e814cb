"""What a row of a measured file counts as. All readers of this package go by this one rule.

A row is *served*, *failed* (an error, or an answer without a token) or *impossible* (it lacks its
lengths, or the time of sending that other rows have). Only served rows are used. A value that
cannot be is unknown: no number, or one out of range; a first token after 0 s, or after the last
token; a time of zero between tokens. Every kind of fault is one notice: how many rows have it, and
the place of the first. A file is refused if no served row is left.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twinserve.traces.measurement import CLIENT, Histogram, Measurement
from twinserve.traces.readers.columns import FIX, MAX_SECONDS, Rows, shown
from twinserve.traces.workload import CLASS_NAMES, WorkloadError

SLACK_S = 1e-3  # tools round both ends of a difference
# Of a request's tokens after the first, the least share that has gaps of its own. A few chunks of
# two tokens move no percentile.
SINGLE = 0.9
TORN = "tokens or ends of some requests are unknown, so throughput is unknown: measure again"
NO_TOKENS = "no tokens"


@dataclass(frozen=True)
class Field:
    """A column as the file has it.

    name    of the field, for messages
    values  one a row; None if the file has none
    unit_s  seconds that 1 stands for, of times
    remedy  what to do if the rows lack it
    """

    name: str
    values: Sequence
    unit_s: float = 1.0
    remedy: str = "measure again"


class _Faults:
    """Faults by kind, each with the rows that have it."""

    def __init__(self, where: Rows) -> None:
        self.where = where
        self.kinds: dict[tuple[str, str], list[tuple[int, str]]] = {}

    def add(self, what: str, then: str, row: int, detail: str) -> None:
        self.kinds.setdefault((what, then), []).append((row, detail))

    def mark(self, rows: np.ndarray, what: str, then: str, detail: Callable[[int], str]) -> None:
        """Rows of a mask. Only the detail of the first is shown."""
        for number, row in enumerate(np.flatnonzero(rows).tolist()):
            self.add(what, then, row, "" if number else detail(row))

    def leave_out(self, rows: np.ndarray, said: np.ndarray, field: Field) -> None:
        """Leave out the rows of a mask, which lack the field. The notice counts those of `said`. It
        replaces the notice of impossible values."""
        kind = _impossible(field)
        why = dict(self.kinds.pop(kind, []))
        if kept := [(row, detail) for row, detail in why.items() if not rows[row]]:
            self.kinds[kind] = kept
        what = f"have no usable '{field.name}'"
        self.mark(said, what, "left out", lambda row: why.get(row) or _lack(field, row))

    def said(self) -> list[str]:
        found = []
        for (what, then), rows in self.kinds.items():
            row, detail = min(rows)
            place = f"first {self.where.unit} {self.where.lines[row]}: {detail}"
            found.append(f"{len(rows)} of {len(self.where)} requests {what} ({place}): {then}")
        return found

    # -- values ----------------------------------------------------------------------------------
    def times(self, field: Field | None, wanted: np.ndarray) -> np.ndarray:
        """float64[rows], seconds; NaN if unknown, and of rows that are not wanted."""
        high = MAX_SECONDS / field.unit_s if field is not None else 0.0
        found = self._read(field, wanted, np.nan, lambda at, *given: at.number(*given, high=high))
        return found if field is None else found * field.unit_s

    def whole(self, field: Field | None, wanted: np.ndarray, unknown=-1, low=0) -> np.ndarray:
        """int64[rows]."""
        high = {} if low == 0 else {"high": -low}
        read = self._read(field, wanted, unknown, lambda at, *given: at.whole(*given, low, **high))
        return read.astype(np.int64)

    def texts(self, field: Field | None) -> list[str | None]:
        wanted = np.ones(len(self.where), bool)
        if field is None:
            return []
        return self._read(field, wanted, None, lambda at, *given: at.texts(*given)).tolist()

    def _read(self, field: Field | None, wanted, unknown, read) -> np.ndarray:
        found = np.full(len(self.where), unknown, object if unknown is None else np.float64)
        if field is None:
            return found
        if isinstance(field.values, np.ndarray):
            rows = np.flatnonzero(wanted & ~np.isnan(field.values)).tolist()
            values: Sequence = field.values[rows]
        else:
            rows = [i for i in np.flatnonzero(wanted).tolist() if _given(field.values[i])]
            values = [field.values[i] for i in rows]
        try:
            found[rows] = read(Rows("", rows), field.name, values)
        except WorkloadError:
            for row, value in zip(rows, values, strict=True):
                try:
                    found[row] = read(Rows("", [0]), field.name, [value])[0]
                except WorkloadError as fault:
                    detail = str(fault).removeprefix(": line 0: ").removesuffix(f": {FIX}")
                    self.add(*_impossible(field), row, detail)
        return found


def _impossible(field: Field) -> tuple[str, str]:
    return f"have no possible '{field.name}'", "taken as unknown"


def _given(value: object) -> bool:
    return value is not None and value == value  # not NaN


def measured(
    name: str,
    where: Rows,
    *,
    arrival_s: Field | None = None,
    waited_s: Field | None = None,
    prompt_tokens: Field | None = None,
    output_tokens: Field | None = None,
    ttft_s: Field | None = None,
    e2el_s: Field | None = None,
    tpot_s: Field | None = None,
    queued_s: Field | None = None,
    gaps_s: Field | None = None,
    ids: Field | None = None,
    session: Field | None = None,
    turn: Field | None = None,
    priority: Field | None = None,
    service_class: Field | None = None,
    errors: Sequence[str] | None = None,
    concurrency: int | None = None,
    measured_by: str = CLIENT,
    coarse: bool = False,
    stated: Mapping[str, float] | None = None,
    histograms: Mapping[str, Histogram] | None = None,
    notices: Sequence[str] = (),
) -> Measurement:
    """The Measurement of the columns that a file has.

    waited_s  between when a request was due and when it was sent
    gaps_s    a list a row, of the times between its chunks
    coarse    times have whole seconds, so that 0 is one
    Arrivals are counted from the first one. TPOT follows from the others if it is not given.

    Raises WorkloadError if there are rows and none of them was served.
    """
    faults = _Faults(where)
    errors = [""] * len(where) if errors is None else list(errors)
    served = np.array([not error for error in errors], bool)
    output = faults.whole(output_tokens, served)
    for row in np.flatnonzero(served & (output == 0)).tolist():
        errors[row] = NO_TOKENS
    served &= output != 0
    every = np.ones(len(where), bool)
    prompt, arrival = faults.whole(prompt_tokens, every), faults.times(arrival_s, every)
    some_came = bool((served & ~np.isnan(arrival)).any())
    lacks = np.zeros(len(where), bool)
    for field, unknown in (
        (prompt_tokens, prompt < 1),
        (output_tokens, output < 0),
        (arrival_s if some_came else None, np.isnan(arrival)),
    ):
        if field is not None:
            bare = served & unknown
            faults.leave_out(bare, bare & ~lacks, field)
            lacks |= bare
    served &= ~lacks
    failures = failures_line(errors)
    if len(where) and not served.any():
        why = "; ".join([*([failures] if failures else []), *faults.said()])
        remedy = next((f.remedy for f in (prompt_tokens, output_tokens) if f and lacks.any()), "")
        raise WorkloadError(
            f"{where.path}: none of {len(where)} requests can be used: {why}: "
            f"{remedy or 'measure again'}"
        )
    latencies, gaps = _latencies(
        faults, served, output, (ttft_s, e2el_s, tpot_s, queued_s), gaps_s, coarse
    )
    names = faults.texts(ids)
    classes = _classes(faults, service_class)
    waited = np.nan_to_num(faults.times(waited_s, served))
    if some_came:
        arrival = arrival - np.nanmin(arrival)
    found = Measurement(
        name,
        where.path,
        arrival,
        prompt,
        output,
        *latencies,
        gaps_s=gaps,
        errors=errors,
        impossible=lacks,
        ids=[str(each) for each in names] if all(names) and len({*names}) == len(names) else (),
        session=faults.texts(session),
        turn=None if turn is None else faults.whole(turn, served, unknown=0),
        service_class=classes,
        priority=None
        if priority is None
        else faults.whole(priority, served, unknown=0, low=-(2**53)),
        concurrency=concurrency,
        due_s=None if waited_s is None or concurrency is None else arrival - waited,
        where=measured_by,
        stated=stated or {},
        histograms=histograms or {},
        notices=(*notices, *([failures] if failures else []), *faults.said()),
    )
    return replace(found, notices=(*found.notices, TORN)) if found.torn else found


def _lack(field: Field, row: int) -> str:
    value = field.values[row]
    return f"is {shown(value)}" if _given(value) else "is missing"


def _latencies(faults: _Faults, served, output, fields, gaps_s: Field | None, coarse: bool):
    """TTFT, E2E latency, TPOT and time in the queue, and all gaps between tokens."""
    ttft, e2el, tpot, queued = (faults.times(field, served) for field in fields)
    name = [field.name if field else "" for field in fields]

    def of(row: int, *which: int) -> str:
        return " and ".join(f"'{name[k]}' is {seen[k][row]:.6g} s" for k in which)

    seen = [values.copy() for values in (ttft, e2el, tpot, queued)]
    several = output > 1
    never = ttft <= 0
    faults.mark(
        never,
        "have their first token after 0 s",
        "their TTFT and TPOT are unknown, as of answers without a chunk of text",
        lambda row: of(row, 0),
    )
    late = ttft > e2el + SLACK_S
    faults.mark(
        late,
        "have their first token after their last one",
        "their latencies are unknown",
        lambda row: of(row, 0, 1),
    )
    whole = several & (ttft >= e2el) & ~late & ~never
    faults.mark(
        whole,
        "have their first token together with their last one",
        "their TTFT and TPOT are unknown, as of answers that are not streamed",
        lambda row: of(row, 0, 1),
    )
    none = (e2el <= 0) & ~late & (not coarse)
    faults.mark(none, "end after 0 s", "their E2E latency is unknown", lambda row: of(row, 1))
    still = several & (tpot <= 0) & ~never & ~late & ~whole
    faults.mark(still, "have a TPOT of 0 s", "taken as unknown", lambda row: of(row, 2))
    long = queued > np.fmin(ttft, e2el) + SLACK_S
    faults.mark(long, "wait longer than they last", "their wait is unknown", lambda row: of(row, 3))
    ttft[never | late | whole] = np.nan
    e2el[late | none] = np.nan
    queued[long] = np.nan
    tpot[never | late | whole | still | (output == 1)] = np.nan
    derived = np.where(several, (e2el - ttft) / np.maximum(output - 1, 1), np.nan)
    tpot = np.where(np.isnan(tpot) & ~never & ~late & ~whole, derived, tpot)
    return (ttft, e2el, tpot, queued), _gaps(faults, served & ~late, output, gaps_s)


def _gaps(faults: _Faults, wanted: np.ndarray, output, field: Field | None) -> np.ndarray | None:
    """Gaps between tokens, of all rows. Those between chunks of several tokens are none."""
    if field is None:
        return None
    pooled: list[float] = []
    for row in np.flatnonzero(wanted).tolist():
        gaps = field.values[row]
        if gaps is None or (type(gaps) is list and not gaps):
            continue
        listed = gaps if type(gaps) is list else [gaps]
        bad = [g for g in listed if type(g) not in (int, float) or not 0 <= g < MAX_SECONDS]
        if type(gaps) is not list or bad:
            detail = f"field '{field.name}' holds {shown((bad or listed)[0])}, no list of times"
            faults.add(*_impossible(field), row, detail)
        elif len(gaps) < SINGLE * (output[row] - 1):
            faults.add(
                "came in chunks of several tokens",
                f"'{field.name}' are gaps between chunks, not between tokens, and no ITL",
                row,
                f"{len(gaps)} gaps, {output[row]} tokens",
            )
        else:
            pooled += gaps
    return np.array(pooled) * field.unit_s if pooled else None


def _classes(faults: _Faults, field: Field | None) -> list[str]:
    found = [name or CLASS_NAMES[0] for name in faults.texts(field)]
    for row, name in enumerate(found):
        if name not in CLASS_NAMES and field is not None:
            what, then = f"have no possible '{field.name}'", f"taken as {CLASS_NAMES[0]}"
            faults.add(what, then, row, f"is {shown(name)}, not one of {', '.join(CLASS_NAMES)}")
    return [name if name in CLASS_NAMES else CLASS_NAMES[0] for name in found]


def failures_line(errors: Sequence[str]) -> str:
    """How many requests failed, and of what; nothing where none did."""
    kinds = Counter(shown(error[:60]) for error in errors if error)
    if not kinds:
        return ""
    most = ", ".join(f"{count} x '{kind}'" for kind, count in kinds.most_common(3))
    more = f" and {len(kinds) - 3} other errors" if len(kinds) > 3 else ""
    return f"{sum(kinds.values())} of {len(errors)} requests failed ({most}{more})"
