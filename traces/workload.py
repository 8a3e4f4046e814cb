"""What a run is fed with: the columns of a request list, its prefix blocks and its closed loops.

A workload is data and never depends on the policy: every policy of a comparison gets the same
object. Units: seconds, tokens. One row is one request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from twinserve.errors import TwinserveError
from twinserve.traces.ranges import PrefixRanges

REAL_TIME, BEST_EFFORT = 0, 1
CLASS_NAMES = ("rt", "be")


class WorkloadError(TwinserveError, ValueError):
    """Bad input, as one line that says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class PrefixBlocks:
    """Chained ids of the prompts' prefix blocks: equal id means equal text from the start up to
    that block's end.

    ids      int64[total], dense (0 .. distinct - 1), in row order
    offsets  int64[rows + 1]; row i owns ids[offsets[i]:offsets[i + 1]], ceil(prompt / block_tokens)
             of them
    block_tokens  tokens a block covers (512 for Mooncake, 16 for Bailian)
    """

    ids: np.ndarray
    offsets: np.ndarray
    block_tokens: int

    def of(self, row: int) -> np.ndarray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @property
    def distinct(self) -> int:
        return int(self.ids.max()) + 1 if len(self.ids) else 0


Prefix = PrefixBlocks | PrefixRanges


@dataclass(frozen=True)
class BestEffortPool:
    """BROS's best-effort load: a closed loop of batches (Sec. VII-A): batch k + 1 arrives when all
    of batch k ended.

    Prompt and output lengths are uniform integers, bounds included (the paper: 512-1024 and 32-128
    tokens). The batch size is in neither version of the paper: it is a reported parameter. No batch
    is submitted at or after `until_s` (seconds); None means the last arrival of the request list.
    """

    batch: int = 64
    prompt_tokens: tuple[int, int] = (512, 1024)
    output_tokens: tuple[int, int] = (32, 128)
    seed: int = 0
    until_s: float | None = None

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request that it can draw."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def draw(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return prompt and output tokens (int64[batch]) of batch k, by (seed, k) alone."""
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(0xBE, k)))
        return (
            rng.integers(*self.prompt_tokens, size=self.batch, endpoint=True),
            rng.integers(*self.output_tokens, size=self.batch, endpoint=True),
        )


@dataclass(frozen=True)
class Provenance:
    """Where the rows came from; goes into run.json as it is."""

    name: str
    path: str | None = None
    sha256: str | None = None
    replica: bool = False
    transforms: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def then(self, transform: str) -> Provenance:
        return replace(self, transforms=(*self.transforms, transform))


@dataclass(frozen=True)
class ApplicationInfo:
    """What a group of rows is, beyond its name. kind: class of application; text: its input. Of
    files, the sidecar of those that we wrote carries it (traces/readers/sidecar.py)."""

    kind: str
    text: str | None = None


@dataclass(frozen=True)
class Workload:
    """A request list. All arrays have one entry a row; rows are sorted by arrival, closed-loop rows
    last.

    arrival_s      float64; NaN if the row waits for the stage before it (see `group`)
    prompt_tokens, output_tokens   int64, >= 1; output is what the model will really emit
    service_class          int8, REAL_TIME or BEST_EFFORT
    priority       int64, smaller is more urgent (vLLM's sense)
    slo_ttft_s, slo_tpot_s   float64, NaN = no objective
    group, stage   int64; group -1 = none. Rows of (group, stage + 1) are released `delay_s` after
                   the last row of (group, stage) has ended: a session is a group with one row a
                   stage (its turns), an application a group with several.
    ids            request names, unique
    concurrency    most requests of the list that clients have under way at once; the others are
                   sent in order as requests end (a closed loop). None: no limit. The pool is not
                   counted
    stages_s       moments (seconds) that bound stretches of constant stated load, the end included;
                   empty: not given. A run's metrics have a window each
    group_names    one a group; applications: what is known of a group, for those that are task
                   graphs
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    service_class: np.ndarray
    priority: np.ndarray
    slo_ttft_s: np.ndarray
    slo_tpot_s: np.ndarray
    group: np.ndarray
    stage: np.ndarray
    delay_s: np.ndarray
    ids: list[str]
    group_names: list[str] = field(default_factory=list)
    applications: dict[int, ApplicationInfo] = field(default_factory=dict)
    prefix: Prefix | None = None
    pool: BestEffortPool | None = None
    provenance: Provenance = Provenance("unnamed")
    concurrency: int | None = None
    stages_s: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def build(cls, arrival_s, prompt_tokens, output_tokens, **columns) -> Workload:
        """A workload from columns (arrays or sequences of numbers); those not given get their
        neutral value (real-time, no SLO, no group)."""
        n = len(arrival_s)
        neutral = {
            "service_class": np.full(n, REAL_TIME, np.int8),
            "priority": np.zeros(n, np.int64),
            "slo_ttft_s": np.full(n, np.nan),
            "slo_tpot_s": np.full(n, np.nan),
            "group": np.full(n, -1, np.int64),
            "stage": np.zeros(n, np.int64),
            "delay_s": np.zeros(n),
        }
        columns |= {
            name: np.asarray(columns[name], neutral[name].dtype)
            for name in columns.keys() & neutral.keys()
        }
        return cls(
            np.asarray(arrival_s, np.float64),
            np.asarray(prompt_tokens, np.int64),
            np.asarray(output_tokens, np.int64),
            **{**neutral, "ids": [f"r{i}" for i in range(n)], **columns},
        )

    @property
    def known_arrivals_s(self) -> np.ndarray:
        """float64: arrivals of the rows that wait for no other row, ascending, seconds."""
        return self.arrival_s[~np.isnan(self.arrival_s)]

    @property
    def last_arrival_s(self) -> float:
        known = self.known_arrivals_s
        return float(known.max()) if len(known) else 0.0

    @property
    def span_s(self) -> float:
        """Seconds from the first known arrival to the last one."""
        known = self.known_arrivals_s
        return float(known.max() - known.min()) if len(known) else 0.0

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request, of the pool's too."""
        listed = int((self.prompt_tokens + self.output_tokens).max(initial=0))
        return listed if self.pool is None else max(listed, self.pool.longest)
