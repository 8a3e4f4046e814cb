"""Choose a sweep's plots if the user says little: the x axis and the numbers."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from twinserve.policies.names import hint
from twinserve.sim.report.over import is_number, over
from twinserve.sim.report.static import files, panels
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.write import write_atomically

DEFAULT_Y = (
    "classes.rt.mean_ttft_ms",
    "classes.rt.mean_tpot_ms",
    "classes.rt.slo_attainment",
    "output_throughput",
)


def parse_plot(texts: Sequence[str]) -> tuple[str | None, list[str], str, str]:
    """Read `x=SETTING y=NAME[,NAME...] size=column title=TEXT` as setting, names, panel size, and
    title; None, none, `page` and "" by default. Raises SettingsError."""
    x, y, size, title = None, [], "page", ""
    for text in texts:
        key, _, value = text.partition("=")
        names = [name.strip() for name in value.split(",") if name.strip()]
        if key == "x" and x is None and len(names) == 1:
            x = names[0].replace("-", "_")
        elif key == "y" and names:
            y += names
        elif key == "size" and names in (["page"], ["column"]):
            size = names[0]
        elif key == "title" and not title and value.strip():
            title = value.strip()
        else:
            raise SettingsError(
                f"--plot {text}: write x=SETTING, y=NAME,NAME,..., size=column or title=TEXT"
            )
    return x, y, size, title


def check_x(axes: Sequence[str], wanted: str | None) -> None:
    """Raise SettingsError if no combination names the setting of the x axis."""
    if wanted is not None and wanted not in axes:
        raise SettingsError(
            f"--plot x={wanted}: no combination names it{hint(wanted, list(axes))}; they name "
            f"{', '.join(axes) or 'nothing'}"
        )


def choose_x(table: pd.DataFrame, axes: Sequence[str]) -> str | None:
    """Return the setting for the x axis: the number with most values, else the setting with most
    values; None if nothing varies."""
    counts = {name: table[name].nunique() for name in axes}
    numbers = {name: n for name, n in counts.items() if is_number(table[name]) and n > 1}
    several = {name: n for name, n in counts.items() if n > 1}
    for found in (numbers, several):
        if found:
            return max(found, key=found.__getitem__)
    return None


def choose_y(table: pd.DataFrame, wanted: Sequence[str]) -> list[str]:
    """Return the numbers to draw. Raises SettingsError for a number that no run has."""
    known = [name.removesuffix("_ci") for name in table if name.endswith("_ci")]
    for name in wanted:
        if name not in known:
            raise SettingsError(
                f"--plot y={name}: no run has this number{hint(name, known)}; table.csv has all"
            )
    return list(wanted) or [name for name in DEFAULT_Y if name in known]


def plot(
    table: pd.DataFrame,
    axes: Sequence[str],
    x: str,
    names: Sequence[str],
    size: str = "page",
    title: str = "",
) -> Figure:
    """Draw a panel for each of `names` over the axis `x`, with title and key above. size: `page`,
    or `column` for one column of a paper."""
    columns = 1 if size == "column" else 3 if len(names) == 3 else min(len(names), 2)
    return panels([over(table, axes, x, name) for name in names], columns, size, title)


def write_plots(out: Path, figure: Figure) -> list[Path]:
    """Write plot.png, plot.svg and plot.pdf, reproducible to the byte. Raises WorkloadError."""
    written = []
    for kind, content in files(figure):
        written.append(out / f"plot.{kind}")
        write_atomically(written[-1], content)
    return written
