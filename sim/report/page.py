"""A page: headings, tables and charts as HTML that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from twinserve.sim.report import interactive, static
from twinserve.sim.report.chart import Chart, Curve, number, plain
from twinserve.sim.report.palette import DARK, LIGHT, colour, dash, marked

STYLE = f"""
:root{{color-scheme:light dark;--paper:{LIGHT};--ink:#1f2933;--quiet:#52606d;--grid:#dfe3e8;
  --soft:#f4f6f8;--note:#fff7e0;--on-note:#5c4a12;--good:#1b7a43;--link:#1d5fa8}}
@media (prefers-color-scheme:dark){{:root{{--paper:{DARK};--ink:#e4e8ec;--quiet:#a9b4bf;
  --grid:#323a44;--soft:#1e242b;--note:#38300f;--on-note:#f3e2a8;--good:#5fce8d;--link:#8ab8ee}}}}
*{{box-sizing:border-box}}
body{{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--ink);
  background:var(--paper);max-width:1080px;margin:24px auto;padding:0 16px}}
h1{{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}}
h2{{font-size:20px;margin:36px 0 6px;border-bottom:2px solid var(--grid);overflow-wrap:anywhere}}
h3{{font-size:16px;margin:22px 0 6px;overflow-wrap:anywhere}}
p{{margin:4px 0 10px;color:var(--quiet);overflow-wrap:anywhere}}
a{{color:var(--link)}}
nav{{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0}}
figure{{margin:0 0 28px}}
figcaption{{font-size:13px}}
figcaption p{{margin:2px 0}}
img,svg{{max-width:100%;width:100%;height:auto}}
.plot{{min-height:60px}}
.key{{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 6px;padding:0;
  font-size:13px}}
.key i{{display:inline-block;width:22px;border-top:3px;margin-right:6px;vertical-align:middle}}
.key em{{font-style:normal;margin-right:6px}}
.key button{{font:inherit;color:inherit;background:none;border:0;padding:5px 0;cursor:pointer;
  text-align:left;overflow-wrap:anywhere}}
.key button[aria-pressed=false]{{opacity:.4;text-decoration:line-through}}
.wide{{overflow-x:auto;margin:6px 0 12px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}}
th,td{{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid var(--grid);
  vertical-align:top}}
th:first-child,td:first-child{{text-align:left}}
tr.section td{{font-weight:600;padding-top:12px}}
td.best{{font-weight:600;color:var(--good)}}
.many{{font-size:13px}}.many th,.many td{{padding-right:9px}}
.settings td,.settings th{{text-align:left;overflow-wrap:anywhere;min-width:90px}}
.note{{background:var(--note);padding:6px 10px;border-radius:4px;color:var(--on-note)}}
pre{{background:var(--soft);padding:10px;font-size:12px;white-space:pre-wrap;
  overflow-wrap:anywhere}}
summary{{cursor:pointer;padding:4px 0}}
h2,h3{{break-after:avoid}}
figure,tr,li{{break-inside:avoid}}
@media (max-width:600px){{body{{margin:12px auto;padding:0 10px}}th,td{{padding-right:10px}}}}
@media screen and (max-width:600px){{.many thead{{display:none}}.many,.many tbody{{display:block}}
  .many tr{{display:block;padding:6px 0;border-bottom:2px solid var(--grid)}}
  .many td{{display:flex;justify-content:space-between;gap:12px;border:0;padding:1px 0}}
  .many td.none{{display:none}}
  .many td::before{{content:attr(data-name);color:var(--quiet)}}}}
@media print{{body{{max-width:none;margin:0;font-size:10pt}}nav,summary,noscript{{display:none}}
  .wide{{overflow:visible}}table{{font-size:7pt}}th,td{{padding-right:5px}}}}
""".strip()

# Each chart is drawn from the JSON beside it; ink and grid are those of the page, now and when the
# reader's system turns dark or light.
SCRIPT = """
(function(){
"use strict";
const roots=new Map();
function colour(name){
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function paint(root){
  const ink=colour("--ink"),grid=colour("--grid");
  for(const part of [...root.below,...root.left,...root.center]){
    if("axis_label_text_color" in part){
      part.setv({axis_label_text_color:ink,major_label_text_color:ink,axis_line_color:grid,
        major_tick_line_color:grid,minor_tick_line_color:null,axis_label_text_font_style:"normal"});
    }else if("grid_line_color" in part){
      part.setv({grid_line_color:grid});
    }
  }
}
async function draw(){
  for(const script of document.querySelectorAll("script[data-chart]")){
    const views=await Bokeh.embed.embed_item(JSON.parse(script.textContent));
    const root=(Array.isArray(views)?views:[...views])[0].model;
    roots.set(script.dataset.chart,root);
    paint(root);
  }
  document.body.dataset.drawn=roots.size;
}
document.addEventListener("click",function(event){
  const button=event.target.closest(".key button");
  if(!button)return;
  const shown=button.getAttribute("aria-pressed")!=="true";
  button.setAttribute("aria-pressed",shown);
  const root=roots.get(button.closest("figure").querySelector(".plot").id);
  for(const part of root.renderers)if(part.name===button.dataset.name)part.visible=shown;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change",function(){
  for(const root of roots.values())paint(root);
});
draw();
})();
""".strip()


_MANY = 5  # columns
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
    """A table that scrolls by itself where it is wider than the screen; cells of any text. One of
    many columns is smaller, and on a phone a list with the heads beside the cells."""
    cells = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    many = len(head) > _MANY
    names = [f' data-name="{text(name)}"' * many for name in head]
    body = "\n".join(
        f"<tr>{''.join(_cell(*pair) for pair in zip(row, names, strict=True))}</tr>" for row in rows
    )
    kind = kind or "many" * many
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
            f"<p>{text(how)}</p>" if drawn.count else "",
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
    return folded("numbers", [table(head, rows)]).text
