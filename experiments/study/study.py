"""Studies: `twinserve study NAME [FIGURE ...]`.

A figure is a grid of runs, a table and a plot of it, and the claims of the paper that it speaks to.
Each goes into a folder of its own (points.csv, table.csv, plot.png, claims.json, report.md);
`paper_vs_ours.md` joins the claims of all figures that are there.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.study.command import GridOptions
from twinserve.experiments.study.output import (
    code_version,
    commits_of,
    table_lines,
    write_plot,
    write_tables,
)
from twinserve.experiments.study.points import Plan, Point, Rows, planned, runs_digest, shown_grid
from twinserve.experiments.study.verdict import MEANING, Claim, summary
from twinserve.formats import Format, same
from twinserve.sim.report.over import with_digits as shown
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.points import code_digest
from twinserve.traces.write import write_atomically

CLAIMS_FILE, TEXT_FILE = "claims.json", "report.md"
BEFORE = {
    "direction agrees": "direction only",
    "within the spread": "not significant",
    "cannot be told": "not significant",
}


def _judged_before(said: dict) -> dict:
    """Claims of versions 1 and 2 in words of today. They did not separate sizes, nor amounts from
    effects."""
    words = [claim["verdict"] for claim in said["claims"]]
    claims = zip(said["claims"], words, strict=True)
    return said | {"claims": [c | {"verdict": BEFORE.get(word, word)} for c, word in claims]}


# Of the folder of a figure: claims.json has the number, and stands for table.csv beside it.
# Versions 2 and 3 have other words for verdicts, and 2 `directed` of each claim.
FIGURES: Format[dict] = Format(
    "figures of studies",
    version=3,
    by="name the figure again",
    upgrades=(same, _judged_before, _judged_before),
)
SEEDS = 3


@dataclass(frozen=True)
class Scale:
    """How much is run. quick: the smallest grid that still makes every table and plot, for tests;
    seeds: of each point."""

    quick: bool = False
    seeds: tuple[int, ...] = tuple(range(SEEDS))


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper.

    points  of the grid, at a scale
    work    function of one point: keyword arguments to a row or rows (see `points.run_grid`)
    table   what the points say, one row for each thing shown, seeds summed up
    plot    draws the table and the points on an empty canvas; None: a table only
    claims  what the paper says of it, and what the table says
    text    Markdown of the table, for report.md; None: every column, in the study's tables only
    """

    name: str
    title: str
    points: Callable[[Scale], Sequence[Point]]
    work: Callable[..., Rows]
    table: Callable[[pd.DataFrame], pd.DataFrame]
    plot: Callable[[Canvas, pd.DataFrame, pd.DataFrame], None] | None = None
    claims: Callable[[pd.DataFrame], Sequence[Claim]] = lambda table: ()
    text: Callable[[pd.DataFrame], str] | None = None


def titled(titles: Mapping[str, str]) -> Callable[..., Figure]:
    """`Figure`, with its title by its name."""
    return lambda name, *parts, **more: Figure(name, titles[name], *parts, **more)


@dataclass(frozen=True)
class Study:
    """The figures of one system.

    absent       claims that no figure here speaks to, with the reason as `why`
    seeds        of each point, if no other number is asked for
    least_seeds  that make its tables
    workers      processes, if no other number is asked for; None: one for each core
    intro        of its tables, if it is of no paper

    A study of no paper (`paper` empty) has no claims: its report is the tables.
    """

    system: str
    paper: str
    figures: Sequence[Figure]
    absent: Sequence[Claim] = field(default_factory=tuple)
    seeds: int = SEEDS
    least_seeds: int = 1
    workers: int | None = None
    intro: str = "Means over seeds and half widths of their 95 % intervals."

    def run(
        self,
        names: Sequence[str],
        scale: Scale,
        out: Path,
        workers: int | None,
        any_version: bool = False,
        only: Sequence[str] = (),
    ) -> None:
        """Run the named figures (none: all) and write their files, then the table of claims.

        only  `AXIS=VALUE` texts: the points that have one of the values of each axis; a figure of
              which none is left is not run

        Raises SettingsError."""
        grids = [(each, only_points(each.points(scale), only)) for each in self.chosen(names)]
        if only and not any(grid for _, grid in grids):
            raise SettingsError(f"--only {' '.join(only)}: no point has these; check points.csv")
        grids = [(figure, grid) for figure, grid in grids if grid or not only]
        plan = planned([(figure.work, grid) for figure, grid in grids], out, any_version)
        if plan.left:
            print(how_long(plan, workers), file=sys.stderr)
        for figure, grid in grids:
            label = f"{self.system} {figure.name}"
            points = shown_grid(figure.work, grid, out, workers, label, any_version)
            self._write(figure, points, scale, out / figure.name, made_by(figure, grid))
        self._write_report(out)

    def redraw(self, names: Sequence[str], out: Path) -> None:
        """The files of the named figures (none: all that are there) again, from their points.csv.
        Raises SettingsError."""
        for figure in self.chosen(names):
            folder = out / figure.name
            if names or folder.is_dir():
                points, said = read_points(folder), _said(folder)
                seeds = sorted({*points.get("seed", pd.Series(dtype=int)).tolist()})
                said = said or {"scale": {"quick": False, "seeds": seeds}}
                self._write(figure, points, _scale(said), folder, said.get("made"))
        self._write_report(out)

    def chosen(self, names: Sequence[str]) -> list[Figure]:
        """The figures of these names; none: all. Raises SettingsError."""
        known = {figure.name: figure for figure in self.figures}
        for name in names:
            if name not in known:
                raise SettingsError(
                    f"{self.system} has no figure {name!r}; there are {', '.join(known)}"
                )
        return [known[name] for name in names or known]

    def _write_report(self, out: Path) -> None:
        text = self.markdown(out) if self.paper else self.tables(out)
        write_atomically(out / self.report, text.encode())

    @property
    def report(self) -> str:
        """Name of the Markdown file."""
        return "paper_vs_ours.md" if self.paper else "tables.md"

    def tables(self, out: Path) -> str:
        """The tables of all figures that were run, means with their intervals."""
        parts = [f"# {self.system}", "", self.intro, ""]
        for figure in self.figures:
            file = out / figure.name / "table.csv"
            ran = ran_by(_said(out / figure.name) or {}, out, figure.name)
            if not file.is_file():
                parts += [f"`{figure.name}` ({figure.title}): not run.", ""]
                continue
            plot = [f"![{figure.title}]({figure.name}/plot.png)", ""] if figure.plot else []
            said = file.with_name(TEXT_FILE)
            text = [said.read_text()] if figure.text else [*_table(pd.read_csv(file)), ""]
            parts += [f"## {figure.title}", "", f"{ran}.", "", *plot, *text]
        return "\n".join(parts)

    def check(self, names: Sequence[str], out: Path) -> list[str]:
        """A line for each of the named figures (none: all) of which what is kept is not what this
        code makes; with the reason. Raises SettingsError."""
        return [
            f"{figure.name}: {why}"
            for figure in self.chosen(names)
            if (why := self._stale(figure, out / figure.name))
        ]

    def _stale(self, figure: Figure, folder: Path) -> str:
        """Empty: what is kept of the figure is what this code makes."""
        said = _said(folder)
        if said is None:
            return "not run"
        points, kept = read_points(folder), pd.read_csv(folder / "table.csv")
        table = pd.read_csv(StringIO(figure.table(points).to_csv(index=False)))
        if not _alike(table, kept):
            return "its table is not that of its runs; --redraw makes it again"
        if [asdict(claim) for claim in figure.claims(kept)] != said["claims"]:
            return "its claims are not those of its table; --redraw makes them again"
        made, now = said.get("made"), made_by(figure, figure.points(_scale(said)))
        if made is None:
            return "the code that ran it is unknown; run it again"
        if made["sources"] != now["sources"]:
            return "other code ran it; run it again"
        same_runs = made["runs"] == now["runs"]
        return "" if same_runs else "its runs are not those of its grid; run it again"

    def _write(
        self,
        figure: Figure,
        points: pd.DataFrame,
        scale: Scale,
        folder: Path,
        made: Mapping[str, str] | None,
    ) -> None:
        table = figure.table(points)
        write_tables(folder, {"points": points, "table": table})
        if figure.plot is not None:
            canvas = Canvas(figsize=(8, 4.5), layout="constrained")
            figure.plot(canvas, table, points)
            write_plot(folder / "plot.png", canvas)
        if figure.text is not None:
            write_atomically(folder / TEXT_FILE, figure.text(table).encode())
        claims = [asdict(claim) for claim in figure.claims(table)]
        said = {"title": figure.title, "scale": asdict(scale), "claims": claims}
        said |= {} if made is None else {"made": made}
        write_atomically(folder / CLAIMS_FILE, dump_json(FIGURES.numbered(said)).encode())

    def claims(self, out: Path) -> list[Claim]:
        """Those of all figures that were run into `out`, and those that no figure speaks to."""
        said = [_said(out / figure.name) or {"claims": []} for figure in self.figures]
        return [*(Claim(**one) for part in said for one in part["claims"]), *self.absent]

    def markdown(self, out: Path) -> str:
        """All claims as one table, figure by figure; figures that were not run are named."""
        lines = [
            f"# {self.system}: paper and ours",
            "",
            f"Source of the paper's numbers: {self.paper}.",
            "",
        ]
        claims, below = self.claims(out), []
        for figure in self.figures:
            said = _said(out / figure.name)
            if said is None:
                below += [f"- `{figure.name}` ({figure.title}): not run."]
                continue
            seeds = ", ".join(map(str, said["scale"]["seeds"]))
            size = "quick, " if said["scale"]["quick"] else ""
            plot = f", [plot]({figure.name}/plot.png)" if figure.plot else ""
            below += [
                f"- `{figure.name}` ({figure.title}): {size}seeds {seeds}; "
                f"[table]({figure.name}/table.csv){plot}. {ran_by(said, out, figure.name)}."
            ]
        lines += [summary(claims), ""]
        lines += table_lines(
            ["where", "what", "paper", "ours", "", "why"],
            ([c.where, c.what, c.paper, c.ours, c.verdict, c.why] for c in claims),
        )
        return "\n".join(
            [
                *lines,
                "",
                "`ours` is the mean over seeds and the half width of its 95 % interval. The words:",
                "",
                *(f"- {verdict}: {meaning}" for verdict, meaning in MEANING.items()),
                "",
                *below,
                "",
            ]
        )

    def command(self, names: Sequence[str], options: GridOptions) -> str:
        """What `twinserve study` runs; the path of the report, to be printed."""
        given = options.of(self.system, self.seeds, self.least_seeds)
        assert given.seeds is not None and given.out is not None  # `of` filled them in
        if given.redraw:
            self.redraw(names, given.out)
        else:
            scale = Scale(given.quick, tuple(range(given.seeds)))
            workers = self.workers if given.workers is None else given.workers
            self.run(names, scale, given.out, workers, given.any_version, given.only)
        return f"{given.out / self.report}\n"


def made_by(figure: Figure, grid: Sequence[Point]) -> dict[str, str]:
    """Version of the code that runs a figure; digests of that code, and of the runs."""
    digests = {"sources": code_digest(figure.work)[:24], "runs": runs_digest(figure.work, grid)}
    return {"version": code_version()} | digests


def ran_by(said: Mapping[str, Any], out: Path, name: str) -> str:
    """Which version ran a figure: from its claims.json, else the commit that has its numbers."""
    if known := said.get("made", {}).get("version"):
        return f"Run by twinserve {known}"
    kept = commits_of(out).get(f"{name}/{'points' if said else 'table'}.csv")
    since = f", kept since commit {kept}" if kept else ""
    return f"Run by a version that is not known{since}: rules may have changed"


def _scale(said: Mapping[str, Any]) -> Scale:
    return Scale(said["scale"]["quick"], tuple(said["scale"]["seeds"]))


def how_long(plan: Plan, workers: int | None) -> str:
    """How many runs there are, and about how long they take."""
    kept = plan.total - plan.left
    said = f"{plan.total:,} run{'s' if plan.total > 1 else ''}" + (
        f", {kept:,} of them kept" if kept else ""
    )
    if plan.seconds is None:
        return said
    minutes = plan.seconds / min(workers or os.cpu_count() or 1, plan.left) / 60
    return f"{said}, about {max(minutes, 1):,.0f} min"


def _alike(table: pd.DataFrame, kept: pd.DataFrame) -> bool:
    """As far as the digits of points.csv tell."""
    try:
        pd.testing.assert_frame_equal(table, kept, rtol=1e-9)
    except AssertionError:
        return False
    return True


def only_points(points: Sequence[Point], only: Sequence[str]) -> Sequence[Point]:
    """The points that have, of each axis named in `AXIS=VALUE` texts, one of its values."""
    wanted: dict[str, set[str]] = {}
    for text in only:
        axis, _, value = text.partition("=")
        wanted.setdefault(axis, set()).add(value)
    return [
        point
        for point in points
        if all(str(point.axes.get(axis)) in values for axis, values in wanted.items())
    ]


def read_points(folder: Path) -> pd.DataFrame:
    """The runs of a figure as its table takes them. Raises SettingsError."""
    try:
        return pd.read_csv(folder / "points.csv", keep_default_na=False, na_values=["", "nan"])
    except FileNotFoundError:
        raise SettingsError(f"{folder}: holds no points.csv; run the figure first") from None


def _said(folder: Path) -> dict | None:
    """What claims.json of a figure says; None if it was not run. Raises SettingsError if a later
    version of twinserve ran it."""
    file = folder / CLAIMS_FILE
    if not file.is_file():
        return None
    return FIGURES.read(json.loads(file.read_text()), file, SettingsError)


def _table(frame: pd.DataFrame) -> list[str]:
    """Lines of Markdown; a column and its interval (NAME_ci) are one. What no row knows is left
    out."""
    names = [
        name
        for name in frame
        if not name.endswith("_ci") and name != "seeds" and frame[name].notna().any()
    ]

    def cell(row: pd.Series, name: str) -> str:
        value = row[name]
        if not isinstance(value, float):
            return str(value)
        return "" if pd.isna(value) else shown(value, row.get(f"{name}_ci", float("nan")))

    rows = [[cell(row, name) for name in names] for _, row in frame.iterrows()]
    return table_lines(names, rows, [" --- "] * len(names))
