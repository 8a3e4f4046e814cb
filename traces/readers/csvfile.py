"""CSV traces by column name: CRLF or LF, with or without a last end of line, quoted or not, between
commas, semicolons or tabs."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from twinserve.traces.readers.columns import FIX, Rows, shown, unused
from twinserve.traces.readers.jsonl import decode_text
from twinserve.traces.workload import WorkloadError


def split_lines(text: str) -> list[str]:
    """Lines as a CSV parser sees them (str.splitlines would also break at form feeds)."""
    return re.split(r"\r\n|\n|\r", text)


def delimiter(header: str) -> str:
    """What stands between the names of a table's first line."""
    return max((",", ";", "\t"), key=header.count)


def header_names(text: str) -> list[str]:
    """Of the columns, in the first line that is not empty."""
    header = next((line for line in split_lines(text) if line.strip()), "")
    return [name.strip().strip('"').strip() for name in header.split(delimiter(header))]


class Lines(Sequence):
    """1-based line numbers of the data rows (blank lines do not count), found on demand."""

    def __init__(self, text: str, rows: int):
        self.text, self.rows = text, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        filled = [n for n, line in enumerate(split_lines(self.text), 1) if line]
        return filled[row + 1] if row + 1 < len(filled) else len(filled)


class Table:
    """The columns of a CSV file as text, found by header name (case and spaces do not matter)."""

    def __init__(self, data: bytes, path: str):
        import pyarrow as pa
        from pyarrow import csv

        text = decode_text(data, path)
        names = header_names(text)
        self.delimiter = delimiter(next((line for line in split_lines(text) if line), ""))
        keys = [name.lower() for name in names]
        if len(set(keys)) != len(keys):
            raise WorkloadError(f"{path}: line 1: a column name is repeated: rename one of the two")
        try:
            table = csv.read_csv(
                pa.py_buffer(text.encode()),
                read_options=csv.ReadOptions(column_names=keys, skip_rows=0, use_threads=False),
                parse_options=csv.ParseOptions(delimiter=self.delimiter),
                convert_options=csv.ConvertOptions(column_types={k: pa.string() for k in keys}),
            )
        except (pa.ArrowException, ValueError) as e:
            raise WorkloadError(self._explain(text, path, str(e), len(names))) from None
        self.names = keys
        self.titles = names
        self.columns = dict(zip(keys, (c.slice(1) for c in table.columns), strict=True))
        self.rows = Rows(path, Lines(text, max(table.num_rows - 1, 0)))
        if not len(self.rows):
            raise WorkloadError(f"{path}: the file has no rows: check the path, or fetch it again")

    def _explain(self, text: str, path: str, problem: str, expected: int) -> str:
        lines = split_lines(text)
        for number, line in enumerate(lines, 1):
            fields = line.count(self.delimiter) + 1
            if line and '"' not in line and fields != expected:
                what = "the last line is torn" if number == len(lines) else f"{fields} fields"
                return f"{path}: line {number}: {what}, but the header has {expected}: {FIX}"
        reason = shown(re.sub(r"^CSV parse error: ", "", problem))
        return f"{path}: not a readable CSV file ({reason}): check the path and the format"

    def require(self, *names: str) -> None:
        """Raises WorkloadError unless the columns are there; ask before reading any of them."""
        for name in names:
            if name.lower() not in self.columns:
                near = get_close_matches(name.lower(), self.names, 1)
                said = "check the format"
                if near:
                    said = f"did you mean '{shown(self.titles[self.names.index(near[0])])}'?"
                have = ", ".join(map(shown, self.titles))
                raise WorkloadError(
                    f"{self.rows.path}: line 1: no column '{name}' (found {have}): {said}"
                )

    def unused(self, known: Sequence[str]) -> list[str]:
        """A notice that names the columns of which no use is made. known: in lower case."""
        return unused([name for name in self.titles if name.lower() not in known], ())

    def text(self, name: str):
        """A column as an arrow array of text, without surrounding blanks."""
        import pyarrow.compute as pc

        return pc.utf8_trim_whitespace(self.columns[name.lower()]).combine_chunks()

    def texts(self, name: str) -> list[str]:
        """The same as Python has it."""
        return self.text(name).to_pylist()

    def numbers(self, name: str) -> np.ndarray:
        """A column as float64."""
        return self.cast(name, "double", "a number")

    def loose_numbers(self, name: str) -> Sequence:
        """Return numbers as float64 with NaN for empty cells, or a list with other cells as
        text."""
        import pyarrow as pa
        import pyarrow.compute as pc

        text = self.text(name)
        if self.delimiter != ",":  # where commas are of numbers
            text = pc.replace_substring_regex(text, r"^(-?\d+),(\d+)$", r"\1.\2")
        try:
            return pc.cast(pc.if_else(pc.equal(text, ""), "nan", text), "double").to_numpy()
        except pa.ArrowException:
            return [number_of(value) for value in text.to_pylist()]

    def cast(self, name: str, to, meaning: str, array=None) -> np.ndarray:
        """A column cast by arrow; names the first row that cannot be."""
        import pyarrow as pa
        import pyarrow.compute as pc

        array = self.text(name) if array is None else array
        try:
            return pc.cast(array, to).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            pass
        for row, value in enumerate(array.to_pylist()):
            try:
                pc.cast(pa.array([value]), to)
            except pa.ArrowException:
                problem = f"is {shown(value)}, not {meaning}" if value else "is missing"
                self.rows.fail(row, name, problem)
        raise AssertionError("no bad value")


def number_of(text: str) -> float | str | None:
    """A cell; what is no number stays text."""
    try:
        return float(text) if text.isascii() and "_" not in text else text
    except ValueError:
        return text or None
