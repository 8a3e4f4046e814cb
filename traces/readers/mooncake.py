"""Mooncake JSONL, with the session fields of aiperf and Dynamo and a few fields of our own.

    {"timestamp": 3000, "input_length": 900, "output_length": 52, "hash_ids": [46, 47]}

timestamp  milliseconds; if no row has one, arrivals are generated, as for other files without times
text_input in place of input_length: its length is estimated
hash_ids   ceil(input_length / 512) ids; equal ids mean equal prompts up to there
session_id rows of one session are turns: each is sent `delay` milliseconds after the turn
           before has ended. A later turn without `delay` but with a timestamp waits for the
           difference to the turn before (Dynamo's rule; if that is a stage of several rows, to
           its latest timestamp); one with neither is sent at once.
priority   smaller is more urgent.
Ours       request_id, class ("rt" or "be"), slo_ttft_s, slo_tpot_s (seconds), group and stage (an
           application: several rows a stage; not the name of a session too), block_size (tokens;
           one row is enough to name it).
"""

import numpy as np

from twinserve.traces.readers import jsonl
from twinserve.traces.readers.columns import MAX_SECONDS, Rows, assemble, default_ids, shown, unused
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.readers.text import ESTIMATED, HAS_ARRIVALS, estimate_tokens, poisson_arrivals
from twinserve.traces.workload import CLASS_NAMES, Workload, WorkloadError

NAME = "mooncake"
BLOCK_TOKENS = 512
FIELDS = tuple(
    (
        "timestamp input_length input_tokens text_input output_length output_tokens hash_ids "
        "session_id delay delay_ms priority request_id class slo_ttft_s slo_tpot_s group app "
        "stage block_size"
    ).split()
)
INT64 = (-(2**63), 2**63 - 1)


class Exact(float):
    """A float that remembers its digits: milliseconds become seconds without rounding twice."""

    __slots__ = ("text",)

    def __new__(cls, text: str):
        self = super().__new__(cls, text)
        self.text = text
        return self


def seconds(value: int | float) -> float:
    """Milliseconds to the nearest float of seconds."""
    if isinstance(value, Exact):
        digits, _, power = value.text.lower().partition("e")
        if len(power) < 6:
            return float(f"{digits}e{int(power or 0) - 3}")
    return value / 1000


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Workload:
    """The workload of a Mooncake(+) file; see the module's docstring. Raises WorkloadError."""
    rows, where = jsonl.parse(data, path, Exact)
    block = _block_size(rows, where, options)
    prompt, notices = _prompts(rows, where)
    output = where.whole(
        "output_length", jsonl.required(rows, where, "output_length", "output_tokens")
    )
    group, stage, names = _groups(rows, where)
    arrival, delay = _times(rows, where, options, group, stage, notices)
    hashes = jsonl.column(rows, "hash_ids")
    ids = jsonl.column(rows, "request_id")
    notices += unused(rows.names, FIELDS)
    if hashes is not None:
        missing = sum(h is None for h in hashes)
        if missing:
            notices.append(f"{missing} rows without hash_ids: they share no prefix")
        hashes = where.hash_lists("hash_ids", hashes, prompt, block, 0)
    n = len(rows)
    return assemble(
        where,
        name=NAME,
        arrival_s=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        hash_ids=hashes,
        block_tokens=block,
        ids=None if ids is None else _fill(where.texts("request_id", ids), default_ids(n)),
        group=group,
        stage=stage,
        delay_s=delay,
        group_names=names,
        service_class=_classes(rows, where),
        priority=_priority(rows, where),
        slo_ttft_s=_slo(rows, where, "slo_ttft_s"),
        slo_tpot_s=_slo(rows, where, "slo_tpot_s"),
        notices=notices,
    )


def _prompts(rows: jsonl.Objects, where: Rows) -> tuple[np.ndarray, list[str]]:
    """Prompt tokens, and a notice if any are estimated."""
    values = jsonl.column(rows, "input_length", "input_tokens") or [None] * len(rows)
    texts = jsonl.column(rows, "text_input")
    notices = []
    for row, text in enumerate(() if texts is None else where.texts("text_input", texts)):
        if values[row] is None and text is not None:
            values[row], notices = estimate_tokens(text), [ESTIMATED]
    return where.whole("input_length", values), notices


def _fill(values: list, default: list) -> list:
    return [d if v is None else v for v, d in zip(values, default, strict=True)]


def _block_size(rows: jsonl.Objects, where: Rows, options: ReadOptions) -> int:
    values = jsonl.column(rows, "block_size")
    if values is None:
        return options.block_tokens or BLOCK_TOKENS
    sizes = where.whole("block_size", [BLOCK_TOKENS if v is None else v for v in values], 1)
    given = [row for row, value in enumerate(values) if value is not None]
    size = int(sizes[given[0]])
    for row in given:
        if sizes[row] != size:
            where.fail(row, "block_size", f"is {sizes[row]}, that of the first row is {size}")
    return options.block_tokens or size


def _classes(rows: jsonl.Objects, where: Rows) -> np.ndarray:
    values = jsonl.column(rows, "class")
    service_class = np.zeros(len(rows), np.int8)
    for row, value in enumerate(values or ()):
        if value is None:
            continue
        if not isinstance(value, str) or value not in CLASS_NAMES:
            where.fail(row, "class", f"is {shown(value)}, not one of {', '.join(CLASS_NAMES)}")
        service_class[row] = CLASS_NAMES.index(value)
    return service_class


def _priority(rows: jsonl.Objects, where: Rows) -> np.ndarray:
    values = jsonl.column(rows, "priority")
    if values is None:
        return np.zeros(len(rows), np.int64)
    return where.whole("priority", [0 if v is None else v for v in values], *INT64)


def _slo(rows: jsonl.Objects, where: Rows, field: str) -> np.ndarray:
    values = jsonl.column(rows, field)
    if values is None:
        return np.full(len(rows), np.nan)
    return where.number(field, values, low=5e-324, optional=True)


def _groups(rows: jsonl.Objects, where: Rows) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Group (or -1) and stage of every row, and the groups' names by first appearance."""
    n = len(rows)
    group, stage = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    sessions, apps = jsonl.column(rows, "session_id"), jsonl.column(rows, "group", "app")
    if sessions is None and apps is None:
        return group, stage, []
    sessions = where.texts("session_id", sessions or [None] * n)
    apps = where.texts("group", apps or [None] * n)
    stages = jsonl.column(rows, "stage") or [None] * n
    given = where.whole("stage", [0 if v is None else v for v in stages])
    index: dict[str, int] = {}
    kinds: dict[str, str] = {}
    turns: dict[str, int] = {}
    present: dict[int, set[int]] = {}
    for row in range(n):
        name = sessions[row] if apps[row] is None else apps[row]
        if name is None:
            continue
        if sessions[row] is not None and apps[row] is not None:
            where.fail(row, "group", "stands beside session_id", "keep one of the two")
        if stages[row] is None and apps[row] is not None:
            where.fail(row, "stage", "is missing in a row with a group")
        kind = "session_id" if apps[row] is None else "group"
        if kinds.setdefault(name, kind) != kind:
            said = f"is '{shown(name)}', which is a {kinds[name]} in an earlier row"
            where.fail(row, kind, said, "rename one of the two")
        group[row] = index.setdefault(name, len(index))
        turn = turns.get(name, 0)
        stage[row] = turn if stages[row] is None else given[row]
        turns[name] = turn + 1
        present.setdefault(int(group[row]), set()).add(int(stage[row]))
    for row in range(n):
        if stage[row] > 0 and stage[row] - 1 not in present[int(group[row])]:
            where.fail(
                row, "stage", f"is {stage[row]}, but the group has no stage {stage[row] - 1}"
            )
    return group, stage, list(index)


def _times(
    rows: jsonl.Objects,
    where: Rows,
    options: ReadOptions,
    group: np.ndarray,
    stage: np.ndarray,
    notices: list[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Return arrival and delay in seconds; arrival NaN: the row waits for the stage before."""
    to_seconds = float if options.time_unit == "s" else seconds
    limit = MAX_SECONDS if options.time_unit == "s" else MAX_SECONDS * 1000
    n = len(rows)
    stamps = jsonl.column(rows, "timestamp")
    timed = stamps is not None
    if timed and options.rate is not None:
        raise WorkloadError(f"{where.path}: {HAS_ARRIVALS}")
    stamps = stamps or [None] * n
    numbers = where.number("timestamp", stamps, high=limit, optional=True)
    delays = jsonl.column(rows, "delay", "delay_ms") or [None] * n
    where.number("delay", delays, high=limit, optional=True)
    if to_seconds is seconds and set(map(type, stamps)) == {int}:
        arrival = numbers / 1000
    else:
        arrival = np.array([np.nan if s is None else to_seconds(s) for s in stamps])
    delay = np.zeros(n)
    waits = stage > 0
    if not timed:
        # a group's first rows arrive together
        first = np.where(group >= 0, group, np.arange(n) + n)[~waits]
        _, place, of = np.unique(first, return_index=True, return_inverse=True)
        drawn, said = poisson_arrivals(len(place), options)
        arrival[~waits] = drawn[np.argsort(np.argsort(place))[of]]
        notices.append(said)
    for row in np.flatnonzero(np.isnan(arrival) & ~waits):
        where.fail(row, "timestamp", "is missing, and no earlier turn releases the row")
    before = _latest_before(arrival, group, stage)
    for row in np.flatnonzero(group >= 0).tolist():
        own = arrival[row]
        if not waits[row]:
            if delays[row]:
                where.fail(
                    row, "delay", "is set on the first turn of a session", "put it into timestamp"
                )
        elif delays[row] is not None:
            delay[row] = to_seconds(delays[row])
        elif not np.isnan(own) and not np.isnan(before[row]):
            if own < before[row]:
                where.fail(row, "timestamp", "is before that of the turn before it")
            delay[row] = own - before[row]
    arrival[waits] = np.nan
    return arrival, delay


def _latest_before(stamp: np.ndarray, group: np.ndarray, stage: np.ndarray) -> np.ndarray:
    """float64[rows]: the latest timestamp (seconds) of the stage before each row's, or of the
    nearest one before that has any; NaN where none has."""
    out = np.full(len(stamp), np.nan)
    rows = np.flatnonzero(group >= 0)
    rows = rows[np.lexsort((stage[rows], group[rows]))]
    changes = np.flatnonzero(np.diff(group[rows]) | np.diff(stage[rows])) + 1
    latest, of_group = np.nan, -1
    for mine in np.split(rows, changes) if len(rows) else ():
        if group[mine[0]] != of_group:
            latest, of_group = np.nan, group[mine[0]]
        out[mine] = latest
        known = stamp[mine][~np.isnan(stamp[mine])]
        if len(known):
            latest = known.max()
    return out
