"""What a GPU costs an hour: a small dated table that ships, or a file of the user's own.

A table is a CSV with the columns `gpu` and `usd_per_hour`, and any of `provider`, `product`,
`source` and `date`. Lines that begin with # are remarks.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from twinserve.profiles.catalog import find_gpu
from twinserve.profiles.specs import ProfileError
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.readers.columns import shown

SHIPPED = "prices.csv"
_NEEDED = ("gpu", "usd_per_hour")
_FURTHER = ("provider", "product", "source", "date")
_MOST_USD = 1e6


@dataclass(frozen=True)
class Price:
    """The price of one GPU for one hour, in dollars. Other fields are as in the table, or empty."""

    gpu: str
    usd_per_hour: float
    provider: str = ""
    product: str = ""
    source: str = ""
    date: str = ""

    def __str__(self) -> str:
        said = ", ".join(filter(None, (self.provider, self.product, self.source, self.date)))
        return f"{self.gpu} ${self.usd_per_hour:g}" + (f" ({said})" if said else "")


Prices = Mapping[str, Price]


def load_prices(file: Path | None = None) -> Prices:
    """Return prices by the GPU's catalogue name. file: by default the table that ships. Raises
    SettingsError that names the first wrong row and its line."""
    if file is None:
        shipped = resources.files("twinserve.sim.plan.data") / SHIPPED
        return read_prices(shipped.read_text(encoding="utf-8"), SHIPPED)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SettingsError(f"--prices {file}: is not UTF-8 text; write it as CSV") from None
    except ValueError:  # a null character in the name
        raise SettingsError(f"--prices {file}: is no path to a file; name another one") from None
    return read_prices(text, f"--prices {file}")


def read_prices(text: str, where: str) -> Prices:
    """Return the rows of `text`. where: the start of error messages."""
    kept = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not kept:
        raise SettingsError(f"{where}: is empty; write a first line {','.join(_NEEDED)}")
    try:
        rows = [next(csv.reader([line], skipinitialspace=True, strict=True)) for _, line in kept]
    except csv.Error as error:
        raise SettingsError(f"{where}: is no CSV ({error}); close its quotes") from None
    head = [name.strip().lower() for name in rows[0]]
    _check_head(head, where)
    found: dict[str, Price] = {}
    for (number, _), row in zip(kept[1:], rows[1:], strict=True):
        at = f"{where}, line {number}"
        if len(row) != len(head):
            raise SettingsError(
                f"{at}: has {len(row)} fields, the first line {len(head)}; put fields with commas "
                "into quotes"
            )
        price = _price({name: field.strip() for name, field in zip(head, row, strict=True)}, at)
        if price.gpu in found:
            raise SettingsError(f"{at}: {price.gpu} is listed twice; keep one of its rows")
        found[price.gpu] = price
    return found


def _check_head(head: list[str], where: str) -> None:
    for name in _NEEDED:
        if name not in head:
            raise SettingsError(
                f"{where}: the first line has no column {name}; write {','.join(_NEEDED)}"
            )
    for name in head:
        if name not in (*_NEEDED, *_FURTHER):
            known = ", ".join((*_NEEDED, *_FURTHER))
            raise SettingsError(f"{where}: no column {shown(name)!r}; there are {known}")
        if head.count(name) > 1:
            raise SettingsError(f"{where}: column {name} is repeated; keep one of the two")


def _price(row: Mapping[str, str], at: str) -> Price:
    try:
        gpu = find_gpu(row["gpu"][:80]).name
    except ProfileError as error:
        raise SettingsError(f"{at}: {error}") from None
    try:
        usd = float(row["usd_per_hour"])
    except ValueError:
        usd = math.nan
    if not 0 < usd < _MOST_USD:
        raise SettingsError(
            f"{at}: usd_per_hour {shown(row['usd_per_hour'])!r} is no price; write dollars "
            "of one GPU for one hour, as 2.49"
        )
    return Price(gpu, usd, **{name: row[name] for name in _FURTHER if name in row})
