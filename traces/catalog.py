"""The public traces known by name: sources and checks."""

from dataclasses import dataclass
from difflib import get_close_matches

from twinserve.formats import shipped_rows
from twinserve.traces.apps import generate as apps
from twinserve.traces.generators import in_a_line, longdoc, synth
from twinserve.traces.workload import WorkloadError


@dataclass(frozen=True)
class TraceInfo:
    """A recorded trace with a name.

    files    names it may have in a folder of the search path; the cache uses the first
    sha256   of the published file
    replica  whether a fitted stand-in is embedded (generators/replica.py)
    """

    name: str
    description: str
    format: str
    files: tuple[str, ...]
    url: str
    rows: int
    licence: str
    cite: str
    sha256: str
    replica: bool = False


def _recorded() -> tuple[TraceInfo, ...]:
    """Those of `data/recorded.csv`, a row each."""
    return tuple(
        TraceInfo(
            **row
            | {
                "files": tuple(row["files"].split()),
                "rows": int(row["rows"]),
                "replica": row["replica"] == "yes",
            }
        )
        for row in shipped_rows("twinserve.traces.data", "recorded.csv")
    )


TRACES = _recorded()
ALIASES = {"mooncake": "mooncake:conversation", "azure-2023": "azure-2023:conv"}
BY_NAME = {info.name: info for info in TRACES}
SYNTHETIC = {
    "poisson": "Poisson arrivals with ShareGPT-like lengths",
    "sharegpt": "Poisson arrivals, lengths with ShareGPT's mean and deviation",
    "lmsys": "Poisson arrivals, lengths with LMSYS-Chat-1M's mean and deviation",
    "fixed:IN,OUT": "Poisson arrivals, every prompt IN and every output OUT tokens",
    **apps.DESCRIPTIONS,
    "tidal": (
        "a day of online requests, one a second at the peak (Echo's load; --rate-scale for more)"
    ),
    **in_a_line.DESCRIPTIONS,
    **{name: "offline questions on long shared documents, all at once" for name in longdoc.NAMES},
}


def resolve(name: str) -> TraceInfo | None:
    """The recorded trace of a name or alias; None if there is none."""
    return BY_NAME.get(ALIASES.get(name, name))


def all_names() -> list[str]:
    return [*ALIASES, *BY_NAME, *SYNTHETIC]


def unknown(name: str) -> WorkloadError:
    """Return the error for a name that is neither a trace nor a file."""
    names = all_names()
    near = get_close_matches(name, [*names, *synth.NAMES], 1, 0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return WorkloadError(f"unknown trace '{name}': {hint}names: {', '.join(names)}; or give a path")
