"""Tables as a notebook shows them: plain HTML, readable on light and dark grounds."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console

from twinserve.sim.report.table import table_rows, text_console
from twinserve.sim.results.files import RunResult

_LEFT, _RIGHT = 'style="text-align:left"', 'style="text-align:right"'


def table_html(results: Mapping[str, RunResult], notices: Iterable[str]) -> str:
    """The table of `simulate`; the best number of a line is bold."""
    heads = "".join(f"<th {_RIGHT}>{escape(label)}</th>" for label in results)
    body = []
    for section, rows in table_rows(results, apart=len(results) > 2):
        body.append(f'<tr><th colspan="{len(results) + 1}" {_LEFT}>{escape(section)}</th></tr>')
        for row in rows:
            cells = []
            for text, best, ends in zip(row.cells, row.best, row.ends, strict=True):
                said = escape(text)
                if ends is not None and any(ends):
                    said += f" [{escape(ends[0])}, {escape(ends[1])}]"
                cells.append(f"<td {_RIGHT}>{f'<b>{said}</b>' if best else said}</td>")
            body.append(f"<tr><td {_LEFT}>{escape(row.title)}</td>{''.join(cells)}</tr>")
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>{notes_html(notices)}"


def notes_html(notices: Iterable[str]) -> str:
    return "".join(f"<div>note: {escape(notice)}</div>" for notice in notices)


def text_html(lines: Sequence[str]) -> str:
    """Lines of a terminal, as they are."""
    return f'<pre style="white-space:pre;overflow-x:auto">{escape(chr(10).join(lines))}</pre>'


class Printed:
    """What a notebook shows as it is printed."""

    def _repr_html_(self) -> str:
        return text_html(str(self).splitlines())


def printed(show: Callable[[Console], None], **given: Any) -> str:
    """What `show` prints on a console without colours."""
    sink = io.StringIO()
    show(text_console(sink, **given))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())
