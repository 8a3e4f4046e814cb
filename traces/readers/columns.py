"""From the fields of a file to the checked columns of a workload. Every reader goes through here.

Errors are one line: file, line, field, what was found, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import numpy as np

from twinserve.traces import prefix as blocks
from twinserve.traces.workload import PrefixBlocks, Provenance, Workload, WorkloadError

MAX_TOKENS = 2**31 - 1
MAX_SECONDS = float(2**31)
FIX = "fix or remove the row"


def shown(value: object) -> str:
    """A value for an error line: one line, not too long."""
    if isinstance(value, np.generic):
        value = value.item()  # numpy's own form says np.float64(4.5)
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) if isinstance(value, str) else text
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(frozen=True)
class Rows:
    """Where the rows of a file are: its path and the 1-based number of every row, which counts
    lines or what `unit` says.
    """

    path: str
    lines: Sequence[int]
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.lines)

    def fail(self, row: int, field: str, problem: str, remedy: str = FIX) -> NoReturn:
        raise WorkloadError(
            f"{self.path}: {self.unit} {self.lines[row]}: field '{field}' {problem}: {remedy}"
        )

    def kept(self, rows: np.ndarray) -> Rows:
        return Rows(self.path, [self.lines[i] for i in rows], self.unit)

    def whole(
        self, field: str, values: Sequence, low: int = 0, high: int = MAX_TOKENS
    ) -> np.ndarray:
        """int64[rows]: whole numbers within [low, high]; integral floats (12.0) pass."""
        if isinstance(values, np.ndarray):
            with np.errstate(invalid="ignore"):
                odd = ~np.isfinite(values) | (values != np.floor(values))
            if odd.any():
                row = int(odd.argmax())
                self.fail(row, field, f"is {shown(float(values[row]))}, not a whole number")
            given = values.tolist()
            values = np.clip(values, -(2.0**62), 2.0**62).astype(np.int64)
        else:
            given = values
            if set(map(type, values)) != {int}:
                for row, value in enumerate(values):
                    self._need_number(row, field, value)
                    if value != value or value in (np.inf, -np.inf) or value != int(value):
                        self.fail(row, field, f"is {shown(value)}, not a whole number")
                values = [int(v) for v in values]
        try:
            column = np.array(values, dtype=np.int64)
        except OverflowError:
            row = next(row for row, v in enumerate(values) if not -(2**63) <= v < 2**63)
            self.fail(row, field, f"is {shown(given[row])}, outside {low} .. {high}")
        bad = (column < low) | (column > high)
        if bad.any():
            row = int(bad.argmax())
            limits = f"outside {low} .. {high}"
            self.fail(row, field, f"is {shown(given[row])}, {limits}")
        return column

    def number(
        self,
        field: str,
        values: Sequence,
        low: float = 0.0,
        high: float = MAX_SECONDS,
        *,
        optional: bool = False,
    ) -> np.ndarray:
        """float64[rows]: finite numbers within [low, high]; None becomes NaN where `optional`."""
        if isinstance(values, np.ndarray):
            bad = ~((values >= low) & (values <= high))
            if bad.any():
                row = int(bad.argmax())
                what = f"is {shown(float(values[row]))}, not within {low:g} .. {high:g}"
                self.fail(row, field, what)
            return values
        kinds = set(map(type, values))
        if kinds == {int}:
            try:
                column = np.array(values, float)
            except OverflowError:
                column = np.full(1, np.inf)
            if ((column >= low) & (column <= high)).all():
                return column
        if optional and kinds == {type(None)}:
            return np.full(len(values), np.nan)
        column = np.empty(len(values))
        for row, value in enumerate(values):
            if value is None and optional:
                column[row] = np.nan
                continue
            self._need_number(row, field, value)
            try:
                column[row] = value
            except OverflowError:
                column[row] = np.inf
            if not low <= column[row] <= high:
                self.fail(row, field, f"is {shown(value)}, not within {low:g} .. {high:g}")
        return column

    def texts(self, field: str, values: Sequence) -> list[str | None]:
        """Names: strings, or whole numbers as their digits; None stays None."""
        out = []
        for row, value in enumerate(values):
            if type(value) is int and abs(value) < 2**64:
                value = str(value)
            if value is not None and not isinstance(value, str):
                self.fail(row, field, f"is {shown(value)}, not text")
            if value is not None and not _is_unicode(value):
                self.fail(row, field, "holds a broken character (a lone surrogate)")
            out.append(value)
        return out

    def hash_lists(
        self, field: str, values: Sequence, prompt: np.ndarray, block_tokens: int, slack: int
    ) -> list[list[int]]:
        """The ids of every row: ceil(prompt / block) 64-bit integers, or up to `slack` fewer.

        None becomes an empty list.
        """
        need = blocks.blocks_needed(prompt, block_tokens).tolist()
        out = []
        for row, value in enumerate(values):
            if value is None:
                out.append([])
                continue
            if type(value) is not list:
                self.fail(row, field, f"is {shown(value)}, not a list of block ids")
            if not need[row] - slack <= len(value) <= need[row]:
                self.fail(
                    row,
                    field,
                    f"has {len(value)} ids, but {prompt[row]} prompt tokens are {need[row]} blocks "
                    f"of {block_tokens}",
                    'name the block size (a "block_size" field in the first row) or fix the row',
                )
            out.append(value)
        ids = list(chain.from_iterable(out))
        if set(map(type, ids)) - {int} or (
            ids and not (blocks.LOW_ID <= min(ids) and max(ids) <= blocks.HIGH_ID)
        ):
            self._find_bad_id(field, out)
        return out

    def _find_bad_id(self, field: str, lists: list[list]) -> NoReturn:
        for row, value in enumerate(lists):
            for block in value:
                if type(block) is not int or not blocks.LOW_ID <= block <= blocks.HIGH_ID:
                    self.fail(row, field, f"holds {shown(block)}, not a 64-bit integer")
        raise AssertionError("no bad id")

    def _need_number(self, row: int, field: str, value: object) -> None:
        if value is None:
            self.fail(row, field, "is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
            text = "the text " if isinstance(value, str) else ""
            self.fail(row, field, f"is {text}{_quoted(value)}, not a number")


def unused(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """A notice that names the fields of a file of which no use is made; none where all are used."""
    rest = [name for name in dict.fromkeys(names) if name not in known]
    return [f"fields not used: {', '.join(map(shown, rest))}"] if rest else []


def _quoted(value: object) -> str:
    return repr(shown(value)) if isinstance(value, str) else shown(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def default_ids(n: int) -> list[str]:
    return [f"r{i}" for i in range(n)]


def assemble(
    rows: Rows,
    *,
    name: str,
    arrival_s: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
    hash_ids: list[list[int]] | None = None,
    block_tokens: int = 0,
    ids: list[str] | None = None,
    group: np.ndarray | None = None,
    notices: Sequence[str] = (),
    **columns,
) -> Workload:
    """Return the workload of checked columns: empty rows dropped, sorted by arrival, ids unique.

    Rows without a prompt or without an output token failed when recorded: they are dropped and
    counted in a notice. Rows out of order are sorted; equal arrivals keep file order.
    """
    notices = list(notices)
    if ids is not None:
        _need_unique(rows, ids)
    empty = (prompt_tokens == 0) | (output_tokens == 0)
    if empty.any():
        row = int(empty.argmax())
        if group is not None and (group[empty] >= 0).any():
            row = int((empty & (group >= 0)).argmax())
            field = "prompt" if prompt_tokens[row] == 0 else "output"
            rows.fail(row, field, "has no tokens, but later turns wait for it")
        notices.append(f"{int(empty.sum())} rows without prompt or output tokens dropped")
    order = np.argsort(arrival_s, kind="stable")  # NaN, the closed-loop rows, last
    order = order[~empty[order]]
    if not len(order):
        raise WorkloadError(f"{rows.path}: no usable rows: check the file and its format")
    known = arrival_s[~np.isnan(arrival_s)]
    if (np.diff(known) < 0).any():
        notices.append("rows were not in order of arrival: sorted (equal arrivals keep file order)")
    shared = None
    if hash_ids is not None:
        prefix, chained = blocks.from_lists(hash_ids, prompt_tokens, block_tokens)
        if chained:
            notices.append("hash ids name single blocks: converted to ids of whole prefixes")
        identity = len(order) == len(rows) and (order == np.arange(len(rows))).all()
        shared = prefix if identity else blocks.take(prefix, order)
    if group is not None:
        columns["group"] = group
    return Workload.build(
        arrival_s[order],
        prompt_tokens[order],
        output_tokens[order],
        ids=[ids[i] for i in order] if ids is not None else default_ids(len(order)),
        prefix=shared,
        provenance=Provenance(name, path=rows.path, notices=tuple(notices)),
        **{
            key: value[order] if isinstance(value, np.ndarray) else value
            for key, value in columns.items()
        },
    )


def _need_unique(rows: Rows, ids: list[str]) -> None:
    if len(set(ids)) == len(ids):
        return
    first: dict[str, int] = {}
    for row, name in enumerate(ids):
        if name in first:
            at = rows.lines[first[name]]
            said = f"is '{shown(name)}', as on {rows.unit} {at}"
            rows.fail(row, "request id", said, "make ids unique")
        first[name] = row


def check_workload(w: Workload) -> None:
    """Raises WorkloadError unless the promises of the Workload and PrefixBlocks docstrings hold."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise WorkloadError(f"workload {w.provenance.name}: {what}")

    n = len(w)
    for column in ("prompt_tokens", "output_tokens", "service_class", "priority", "group", "stage"):
        need(len(getattr(w, column)) == n, f"column {column} has another length")
    need((w.prompt_tokens >= 1).all() and (w.output_tokens >= 1).all(), "rows without tokens")
    need(len(w.ids) == n and len(set(w.ids)) == n, "request ids are not unique")
    waits = np.isnan(w.arrival_s)
    need((np.diff(waits.astype(int)) >= 0).all(), "closed-loop rows must come last")
    known = w.arrival_s[~waits]
    need(np.isfinite(known).all() and (known >= 0).all(), "arrivals must be finite and >= 0")
    need((np.diff(known) >= 0).all(), "rows must be sorted by arrival")
    need(((w.delay_s >= 0) & np.isfinite(w.delay_s)).all(), "delays must be finite and >= 0")
    need((waits == ((w.group >= 0) & (w.stage > 0))).all(), "exactly stages > 0 wait for a stage")
    need((w.group < len(w.group_names)).all(), "a group has no name")
    for slo in (w.slo_ttft_s, w.slo_tpot_s):
        need(not (slo <= 0).any(), "SLOs must be > 0")
    in_group = w.group >= 0
    pairs = np.unique(np.stack([w.group[in_group], w.stage[in_group]]), axis=1)
    first = np.r_[True, pairs[0, 1:] != pairs[0, :-1]][: pairs.shape[1]]
    before = np.r_[-1, pairs[1, :-1]][: pairs.shape[1]]
    need((pairs[1] == np.where(first, 0, before + 1)).all(), "a group misses a stage")
    if w.prefix is not None:
        _check_prefix(w.prefix, w.prompt_tokens, need)


def _check_prefix(prefix: PrefixBlocks, prompt: np.ndarray, need) -> None:
    counts = blocks.blocks_needed(prompt, prefix.block_tokens)
    need(prefix.block_tokens >= 1, "block size must be >= 1")
    need(np.array_equal(np.diff(prefix.offsets), counts), "prefix blocks do not fit the prompts")
    need(len(prefix.ids) == prefix.offsets[-1], "prefix ids do not fit their offsets")
    need(len(np.unique(prefix.ids)) == prefix.distinct, "prefix ids are not dense")
    need(blocks.is_chained(prefix), "an id follows different ids")
