"""What a reader may be told beyond the file's own content."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_RATE = 1.0


@dataclass(frozen=True)
class ReadOptions:
    """Overrides of what a format fixes, and how arrivals are made for files that have none. What a
    format has no use for is refused (`formats.read_bytes`).

    block_tokens   tokens a hash id covers; None = the format's. Mooncake and Bailian
    time_unit      "ms" or "s"; None = the format's. Mooncake and `custom`
    rate           requests a second of generated Poisson arrivals; None = 1
    seed           of those arrivals
    columns        which column of a CSV file is what (`readers/measured/table.py`)
    benchmark      which benchmark of a report of guidellm, from 1
    """

    block_tokens: int | None = None
    time_unit: str | None = None
    rate: float | None = None
    seed: int = 0
    columns: str | None = None
    benchmark: int | None = None
