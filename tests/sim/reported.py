"""What the tests of reports report on: toy runs, and what stands in a page."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

from tests.sim.test_results_rows import toy_rows
from twinserve.sim.results.files import RunResult, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.options import MetricsOptions


def write_toy(folder: Path, label: str = "", config: dict | None = None, **how) -> RunResult:
    """A toy run in that folder, as `simulate` would have left it."""
    every_s, place = how.pop("every_s", None), how.pop("place", None)
    rows = toy_rows(**{"n": 40, "group_size": 4, "rate": 20.0, "blocks": 200, **how})
    options = MetricsOptions(every_s=every_s)
    settings = {"label": label or folder.name, "policy": folder.name, "seed": 0, **(config or {})}
    summary = summarise(rows, options)
    result = RunResult(rows, settings | {"metrics": options.described()}, {"wall_s": 1.0}, summary)
    if place is not None:
        result.timing["place"] = place
    write_run(folder, result)
    return result


class Page(HTMLParser):
    """A page as parsed: tags left open, what it would load, and tables as lists of rows."""

    VOID = ("meta", "img", "!doctype", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.images: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.figures: list[str] = []
        self.alts: list[str] = []
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "xlink:href") and not value.startswith("#"):
                (self.images if value.startswith("data:image/") else self.loads).append(value)
        if tag == "figure":
            self.figures.append(given["data-key"])
        if given.get("class") == "plot":
            self.alts.append(given["aria-label"])
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data):
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append("".join(self._cell))
            self._cell = None

    def numbers(self, text: str, key: str) -> list[list[str]]:
        """The rows of the folded table below the chart of that key."""
        figure = text[text.index(f'<figure data-key="{key}"') :].partition("</figure>")[0]
        rows = re.findall(r"<tr>(.*?)</tr>", figure)
        return [[unescape(c) for c in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", r)] for r in rows]
