"""How the runs of one combination differ: by seed, by window of a recorded trace, or not at all."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import Sources
from twinserve.traces.generators.synth import is_synthetic
from twinserve.traces.load import load_trace

MOST = 1000
_SOURCES = Sources(lru_cache(maxsize=8)(load_trace))


@dataclass(frozen=True)
class Repeat:
    """seeds    runs with --seed, --seed + 1, ...
    windows  equal time windows that a recorded trace is cut into; 0: not cut
    blocks   of one run: intervals by a bootstrap over so many blocks of its time; 0: none"""

    seeds: int = 1
    windows: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        """Return the value of --repeat."""
        return f"windows={self.windows}" if self.windows else f"blocks={self.blocks}"

    @property
    def told_by(self) -> str:
        """The setting that differs between the runs of a combination."""
        return "window" if self.windows else "seed"

    def copies(self, config: SimulationConfig) -> list[SimulationConfig]:
        """Return the runs of one combination. Raises SettingsError, WorkloadError."""
        if not self.windows:
            changes: list[dict[str, Any]] = [
                {"seed": seed} for seed in range(config.seed, config.seed + self.seeds)
            ]
        else:
            edges = _edges(config, self.windows)
            changes = [{"window": pair} for pair in zip(edges[:-1], edges[1:], strict=True)]
        return [config.model_copy(update=change) for change in changes]


def parse_repeat(text: str | None, seeds: int = 1) -> Repeat:
    """Read `windows=5` or `blocks=20`; None: so many seeds. Raises SettingsError."""
    if text is None:
        return Repeat(seeds)
    said = re.fullmatch(r"(windows|blocks)=([0-9]{1,4})", text.strip())
    if said is None or not 2 <= int(said[2]) <= MOST:
        raise SettingsError(
            f"--repeat {text}: write windows=5 (windows of the recorded trace) or blocks=20 "
            f"(bootstrap over blocks of time); 2 to {MOST}"
        )
    if seeds > 1:
        raise SettingsError(f"--repeat {text} and --seeds {seeds} both repeat runs; drop one")
    return Repeat(**{said[1]: int(said[2])})


def _edges(config: SimulationConfig, count: int) -> list[float]:
    """Return window edges, seconds of the recording. Raises SettingsError if there is none."""
    if is_synthetic(config.trace) or config.rate is not None:
        raise SettingsError(
            f"--repeat windows={count}: {config.trace} is generated, so other seeds are other "
            "requests; use --seeds"
        )
    if config.window is None:
        last = _SOURCES.recorded(config).last_arrival_s
        start, end = 0.0, float(np.nextafter(last, np.inf))
    else:
        start, end = config.window
    edges = np.linspace(start, end, count + 1).tolist()
    return [*edges[:-1], end]
