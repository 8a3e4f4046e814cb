"""A page: headings, tables and charts as HTML that needs nothing from elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from twinserve.formats import shipped_text
from twinserve.sim.report import interactive, static
from twinserve.sim.report.chart import (
    DARK,
    LIGHT,
    Chart,
    Curve,
    colour,
    dash,
    marked,
    number,
    plain,
)

STYLE = shipped_text(__package__, "page.css").replace("LIGHT", LIGHT).replace("DARK", DARK).strip()


# Each chart is drawn from the JSON beside it; ink and grid are those of the page, now and when the
# reader's system turns dark or light.
SCRIPT = shipped_text(__package__, "page.js").strip()


MANY = 4  # columns of a table: more are a list on a phone
_FULL, _HOLLOW = "\u25cf\u25a0\u25c6\u25b2\u25bc", "\u25cb\u25a1\u25c7\u25b3\u25bd"  # MARKS


@dataclass(frozen=True)
class Html:
    """Text that is HTML already: its maker has escaped all foreign text."""

    text: str


Block = Html | Chart


@dataclass(frozen=True)
class Part:
    """A chapter of a page."""

    title: str
    blocks: tuple[Block, ...]


def text(words: object) -> str:
    """Anything, as HTML shows it."""
    return escape(plain(words))


def heading(words: str) -> Html:
    return Html(f"<h3>{text(words)}</h3>")


def paragraph(words: str) -> Html:
    return Html(f"<p>{text(words)}</p>")


def verdict(lines: Sequence[str]) -> list[Html]:
    """Return the head of a chapter: the answer as a heading, then its further sentences."""
    return [*map(heading, lines[:1]), *map(paragraph, lines[1:])]


def note(words: str) -> Html:
    return Html(f'<p class="note">{text(words)}</p>')


def listing(words: str) -> Html:
    """Lines as they are, blanks and all."""
    lines = "\n".join(text(line) for line in words.splitlines())
    return Html(f"<pre>{lines}</pre>")


def folded(title: str, inside: Iterable[Html]) -> Html:
    inner = "".join(block.text for block in inside)
    return Html(f"<details><summary>{text(title)}</summary>{inner}</details>")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """Return a table that scrolls if it is wider than the screen; cells of any text. A table of
    many columns is smaller, and on a phone a list with the heads next to the cells."""
    cells = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    many = len(head) > MANY
    names = [f' data-name="{text(name)}"' * many for name in head]
    body = "\n".join(
        f"<tr>{''.join(_cell(*pair) for pair in zip(row, names, strict=True))}</tr>" for row in rows
    )
    kind = " ".join(filter(None, (kind, "many" * many)))
    of_kind = f' class="{kind}"' if kind else ""
    return wide(f"<table{of_kind}><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>")


def _cell(content: object, name: str) -> str:
    empty = ' class="none"' if name and content == "-" else ""
    return f"<td{name}{empty}>{text(content)}</td>"


def wide(inside: str) -> Html:
    return Html(f'<div class="wide" tabindex="0">{inside}</div>')


def render(title: str, lines: Sequence[str], parts: Sequence[Part]) -> str:
    """The page. lines: what stands below its title."""
    try:
        library = interactive.script() if any(_charts(part) for part in parts) else ""
    except ImportError:
        library = ""
    drawn = _Drawn(bool(library))
    body = [drawn.part(i, part) for i, part in enumerate(parts)]
    links = "".join(f'<a href="#part-{i}">{text(p.title)}</a>' for i, p in enumerate(parts))
    how = (
        "Point at a curve for its numbers; the tools above a chart zoom and move it, and a name in "
        "its key hides a curve."
        if library
        else "The charts are pictures: pip install 'twinserve[report]' makes pages with charts "
        "that show their numbers and can be zoomed."
    )
    scripts = [f"<script>{library}</script>", f"<script>{SCRIPT}</script>"] if library else []
    policy = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; font-src data:"
    if library:
        policy += "; script-src 'unsafe-inline'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{text(title)}</h1>",
            *(f"<p>{text(line)}</p>" for line in lines),
            f'<p class="how">{text(how)}</p>' if drawn.count else "",
            f"<nav>{links}</nav>" if len(parts) > 1 else "",
            *body,
            *scripts,
            "</body></html>",
            "",
        ]
    )


def _charts(part: Part) -> bool:
    return any(isinstance(block, Chart) for block in part.blocks)


class _Drawn:
    """Numbers the charts of a page."""

    def __init__(self, answering: bool) -> None:
        self.answering = answering
        self.count = 0

    def part(self, place: int, part: Part) -> str:
        inside = "\n".join(
            self.chart(block) if isinstance(block, Chart) else block.text for block in part.blocks
        )
        return f'<section id="part-{place}"><h2>{text(part.title)}</h2>\n{inside}\n</section>'

    def chart(self, chart: Chart) -> str:
        self.count += 1
        name = f"chart-{self.count}"
        alt = text(chart.alt)
        if self.answering:
            data = interactive.item(chart, name).replace("<", "\\u003c")
            drawn = (
                f'<div id="{name}" class="plot" role="group" aria-label="{alt}"></div>'
                f'<script type="application/json" data-chart="{name}">{data}</script>'
                "<noscript><p>This chart needs JavaScript.</p></noscript>"
            )
        else:
            picture = static.svg(chart, name)
            drawn = f'<div class="plot" role="img" aria-label="{alt}">{picture}</div>'
        said = f"<p>{alt}</p>" + (f"<p>{text(chart.note)}</p>" if chart.note else "")
        return (
            f'<figure data-key="{text(chart.key)}"><h3>{text(chart.title)}</h3>'
            f"{self._key(chart)}{drawn}<figcaption>{said}</figcaption>{_numbers(chart)}</figure>"
        )

    def _key(self, chart: Chart) -> str:
        tag = "button" if self.answering else "span"
        more = ' type="button" aria-pressed="true"' if self.answering else ""
        items = "".join(
            f'<li><{tag}{more} data-name="{text(curve.label)}">'
            f"{_swatch(curve)}"
            f"{text(curve.label)}</{tag}></li>"
            for curve in chart.curves
        )
        return f'<ul class="key">{items}</ul>'


def _swatch(curve: Curve) -> str:
    """What stands for a curve in a key: its dash or its mark, in its colour."""
    ink = colour(curve.colour)
    if curve.kind == "points":
        sign = (_FULL if curve.filled else _HOLLOW)[marked(curve.colour)]
        return f'<em style="color:{ink}">{sign}</em>'
    return f'<i style="border-color:{ink};border-style:{dash(curve.colour)}"></i>'


def _numbers(chart: Chart) -> str:
    """The numbers of a chart of points, folded below it."""
    if not chart.listed:
        return ""
    bars = any(curve.low is not None for curve in chart.curves)
    head = ["", "", chart.x, chart.y] + ["95 % from", "to"] * bars
    rows = []
    for curve in chart.curves:
        for i in range(len(curve.x)):
            cells = [curve.label, curve.about[i] if curve.about else ""]
            cells += [number(float(curve.x[i])), number(float(curve.y[i]))]
            if bars and curve.low is not None and curve.high is not None:
                cells += [number(float(curve.low[i])), number(float(curve.high[i]))]
            rows.append(cells)
    return folded("numbers", [table(head, rows, "named")]).text
