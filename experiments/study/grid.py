"""Settings and what varies, as data: a `Grid` gives the points of a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from twinserve.experiments.study.points import Point

if TYPE_CHECKING:
    from twinserve.experiments.study.study import Scale

Settings = Mapping[str, Any]
Values = Sequence[Any] | Mapping[Any, Any]
Axis = str | tuple[str, ...]
REPEATS = ("seed", "window")  # what tells the repeats of a setting apart


def windows(begins_s: Sequence[float], seconds: float) -> dict[str, Any]:
    """Setting `windows`: as many seconds of a recorded trace, for each seed from the next of
    `begins_s` on."""
    return {"begins_s": [*map(float, begins_s)], "seconds": seconds}


@dataclass(frozen=True)
class Grid:
    """A run for each combination and seed.

    common   settings of every run, see `runs.run`; or arguments of the figure's own function
    vary     axis -> values, the first changes slowest. In a sequence they are values of the setting
             that is called as the axis. In a mapping the keys label rows, and a value is a mapping
             of settings, or a value of the setting that is called as the axis. Several axes that
             change together are a tuple, and so are their labels
    columns  of each run's row, see `runs.column`; None: the figure has a function of its own
    where    whether a combination (axis -> label) is run
    few      axis -> how many of its values, or which labels, the smallest grid has
    quick    settings of the smallest grid, if a run has them: a value, or a function of the one
             that it replaces
    least_seeds  of each point, but in the smallest grid
    """

    vary: Mapping[Axis, Values]
    common: Settings = field(default_factory=dict)
    columns: Mapping[str, str] | None = None
    where: Callable[[Mapping[str, Any]], bool] = lambda axes: True
    few: Mapping[Axis, int | Sequence[Any]] = field(default_factory=dict)
    quick: Settings = field(default_factory=dict)
    least_seeds: int = 1

    def __call__(self, scale: Scale) -> list[Point]:
        """The points, the seed changing fastest."""
        more = () if scale.quick else range(len(scale.seeds), self.least_seeds)
        return [
            self._point(axes, settings, seed)
            for axes, settings in self._combinations(scale.quick)
            for seed in (*scale.seeds, *more)
        ]

    def _combinations(self, quick: bool) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        choices = [_labelled(name, values) for name, values in self.vary.items()]
        if quick:
            choices = [
                _kept(labelled, self.few.get(name, len(labelled)))
                for name, labelled in zip(self.vary, choices, strict=True)
            ]
        for chosen in product(*choices):
            axes: dict[str, Any] = {}
            for name, (label, _) in zip(self.vary, chosen, strict=True):
                axes |= zip(name, label, strict=True) if isinstance(name, tuple) else {name: label}
            if not self.where(axes):
                continue
            settings = dict(self.common)
            for _, more in chosen:
                settings |= more
            if quick:
                settings |= {
                    name: new(settings[name]) if callable(new) else new
                    for name, new in self.quick.items()
                    if name in settings
                }
            yield axes, settings

    def _point(self, axes: Mapping[str, Any], settings: Settings, seed: int) -> Point:
        settings, axes = {**settings, "seed": seed}, dict(axes)
        if "windows" in settings:
            found = settings.pop("windows")
            begin_s = found["begins_s"][seed % len(found["begins_s"])]
            settings["window"] = [begin_s, begin_s + found["seconds"]]
            axes["window"] = begin_s
        axes["seed"] = seed
        if self.columns is None:
            return Point(axes, settings)
        return Point(axes, {"settings": settings, "columns": dict(self.columns)})


def repeats(scale: Scale, **settings: Any) -> list[Point]:
    """One point: the repeats, as many as there are seeds, are of one server."""
    return [Point({}, {"repeats": len(scale.seeds), **settings})]


def joined(*grids: Grid) -> Callable[[Scale], list[Point]]:
    """The points of one grid after another."""
    return lambda scale: [point for grid in grids for point in grid(scale)]


def _labelled(axis: Axis, values: Values) -> list[tuple[Any, Settings]]:
    """(label, settings) of each value of an axis."""
    pairs = values.items() if isinstance(values, Mapping) else ((value, value) for value in values)
    return [
        (label, value if isinstance(value, Mapping) else {axis: value}) for label, value in pairs
    ]


def _kept(
    labelled: list[tuple[Any, Settings]], few: int | Sequence[Any]
) -> list[tuple[Any, Settings]]:
    if isinstance(few, int):
        return labelled[:few]
    return [pair for pair in labelled if pair[0] in few]
