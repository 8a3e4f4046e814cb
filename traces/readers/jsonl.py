"""JSON lines: one object a line, with the line numbers kept for error messages."""

import json
from collections.abc import Callable
from functools import cached_property
from itertools import chain

from twinserve.errors import worded
from twinserve.traces.readers.columns import Rows, shown
from twinserve.traces.workload import WorkloadError


def decode_text(data: bytes, path: str) -> str:
    """The text of a UTF-8 file, without byte-order mark. Raises WorkloadError for anything else."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise WorkloadError(
            f"{path}: line {line}: byte {e.start} is not UTF-8 text: "
            "is this a trace file? decompress or re-encode it"
        ) from None


def no_constant(name: str):
    raise ValueError(f"{name} is no JSON number")


class Objects(list[dict]):
    """The objects of a file."""

    @cached_property
    def names(self) -> list[str]:
        """The fields that any of them has, by first appearance."""
        return list(dict.fromkeys(chain.from_iterable(dict.fromkeys(map(tuple, self)))))


def parse(
    data: bytes, path: str, parse_float: Callable[[str], object] | None = None
) -> tuple[Objects, Rows]:
    """Return the objects of a JSONL file, or of one JSON array, with their places. Blank lines are
    skipped.

    Raises WorkloadError at the first line that is no JSON object; a last line without its end of
    line is then reported as torn (a copy or download that stopped half-way).
    """
    decoder = json.JSONDecoder(parse_float=parse_float, parse_constant=no_constant)
    rows = Objects()
    lines: list[int] = []
    content = decode_text(data, path)
    if content.lstrip().startswith("["):
        return _array(content, decoder.decode, path)
    text = content.split("\n")
    for number, line in enumerate(text, 1):
        line = line.strip()
        if not line:
            continue
        try:
            row, end = decoder.raw_decode(line)
            if end != len(line):
                decoder.decode(line)  # says what stands behind the object
        except (ValueError, RecursionError) as e:
            if number == len(text) and number > 1:
                problem, remedy = "the last line is torn", "copy or download the file again"
            else:
                problem, remedy = f"not JSON ({shown(reason(e))})", "fix or remove the line"
            raise WorkloadError(f"{path}: line {number}: {problem}: {remedy}") from None
        if type(row) is not dict:
            raise WorkloadError(
                f"{path}: line {number}: not a JSON object but {shown(row)}: fix or remove the line"
            )
        rows.append(row)
        lines.append(number)
    if not rows:
        raise WorkloadError(f"{path}: the file has no rows: check the path, or fetch it again")
    return rows, Rows(path, lines)


def _array(text: str, decode: Callable[[str], list], path: str) -> tuple[Objects, Rows]:
    try:
        rows = Objects(decode(text.strip()))
    except (ValueError, RecursionError) as e:
        raise WorkloadError(
            f"{path}: not a JSON array ({shown(reason(e))}): copy or download the file again"
        ) from None
    where = Rows(path, range(1, len(rows) + 1), "item")
    for number, row in enumerate(rows, 1):
        if type(row) is not dict:
            raise WorkloadError(
                f"{path}: item {number}: not a JSON object but {shown(row)}: fix or remove it"
            )
    if not rows:
        raise WorkloadError(f"{path}: the file has no rows: check the path, or fetch it again")
    return rows, where


def reason(error: Exception) -> str:
    """Return why a text is no JSON, in Python's words if possible."""
    if isinstance(error, RecursionError):
        return "too many nested brackets"
    return error.msg if isinstance(error, json.JSONDecodeError) else worded(error)


def column(rows: Objects, *names: str) -> list | None:
    """Return a field's values under any of its names; None: not in a row, or in no row."""
    values: list | None = None
    for name in names:
        if name not in rows.names:
            continue
        found = [row.get(name) for row in rows]
        if any(v is not None for v in found):
            if values is None:
                values = found
            else:
                values = [b if a is None else a for a, b in zip(values, found, strict=True)]
    return values


def required(rows: Objects, where: Rows, *names: str) -> list:
    """As `column`, for a field that every row must have."""
    values = column(rows, *names)
    if values is None:
        where.fail(0, names[0], "is missing")
    return values
