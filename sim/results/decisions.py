"""Decision logs: every plan of a run, for another engine to execute again step by step.

decisions.jsonl.gz holds one JSON object a line: the log's version and the run (as in run.json), the
requests, then the steps. Steps name requests by row; a run of identical decode steps is one line. A
step also has the requests cancelled before it, and the plans made before it that computed nothing.
If an engine looks drafts up in its texts, a step has four lists of equal length. These are rows
with tokens, drafts verified, leading right ones, and drafts found for the next step. If KV moved,
the last line counts the moves by kind (`backends/counts.py`); layers and slots are not logged.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from twinserve.backends.acceptance import RecordedAcceptance
from twinserve.backends.base import Executed
from twinserve.backends.counts import Counts
from twinserve.formats import Format, parse_json
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.runs import growth_of
from twinserve.policies.plan import Preemption, StepOutcome, StepPlan
from twinserve.policies.requests import RequestTable
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.recorder import StepRecorder
from twinserve.sim.results.versions import with_host, with_load

FILE = "decisions.jsonl.gz"
_NUMBER = "decisions"  # under which the first line has the log's version


# Content: the lines. The run in the first one has no number of its own: where what a reader of logs
# takes from run.json changes, the version changes here too.
def _with_settings(lines: list[dict], change: Callable[[dict], dict]) -> list[dict]:
    head, *rest = lines
    settings = head["run"].get("config")
    if settings is None:
        return lines
    return [head | {"run": head["run"] | {"config": change(settings)}}, *rest]


def _from_1(lines: list[dict]) -> list[dict]:
    """Version 2 replays arrivals unchanged by default."""
    return _with_settings(lines, with_load)


def _from_2(lines: list[dict]) -> list[dict]:
    """Version 3 has the default scheduling of result folders of version 4."""
    return _with_settings(lines, with_host)


LOG: Format[list[dict]] = Format(
    "decision logs",
    version=3,
    by="simulate --decisions --out DIR",
    oldest=1,
    # up to version 2 what plans without a step preempted stood with the next step, and what they
    # brought back nowhere
    upgrades=(_from_1, _from_2),
)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """prefix: int64, content ids of the prompt's full KV blocks, or None. arrival_s: seconds.
    output_tokens: emitted. left: the client cancelled before the last token."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: np.ndarray | None
    left: bool = False

    @property
    def most_output_tokens(self) -> int:
        """Return the tokens to ask for: a cancelled request must not end earlier by itself."""
        return self.output_tokens + self.left


@dataclass(frozen=True, slots=True)
class LoggedPlan:
    """What a plan without a step did to memory; fields as in StepPlan."""

    admitted: dict[int, int]
    preempted: tuple[tuple[int, Preemption], ...]
    swapped_in: tuple[int, ...]


_NOTHING = LoggedPlan({}, (), ())


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One decision, and the step that the simulator expected. grants: {row: tokens} in order.
    start_s, seconds: begin and duration. free_blocks: in the ledger after the plan. withdrawn: rows
    cancelled before the plan. before: plans without computation since the last step. verified: {row
    with tokens: (drafts, leading right ones, drafts found for its next step)}; None without drafts.
    """

    start_s: float
    seconds: float
    grants: dict[int, int]
    admitted: dict[int, int]
    preempted: tuple[tuple[int, Preemption], ...]
    swapped_in: tuple[int, ...]
    free_blocks: int
    withdrawn: tuple[int, ...] = ()
    before: tuple[LoggedPlan, ...] = ()
    verified: dict[int, tuple[int, int, int]] | None = None


@dataclass(frozen=True)
class DecisionLog:
    """run: as run.json; requests by row; steps in order, runs spread out; moved: KV moves by kind;
    withdrawn: rows cancelled after the last step."""

    run: dict
    requests: list[LoggedRequest]
    steps: list[LoggedStep]
    moved: Counts = field(default_factory=dict)
    withdrawn: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Return prompt and output tokens of the longest request."""
        return max((r.prompt_tokens + r.most_output_tokens for r in self.requests), default=0)

    @property
    def answers(self) -> dict[str, int]:
        """Return request id -> tokens received, for requests with tokens."""
        return {r.id: r.output_tokens for r in self.requests if r.output_tokens}

    @property
    def blocks(self) -> int:
        """Return the KV blocks of all requests' texts."""
        size = self.run["kv"]["block_tokens"]
        return sum(-(-(r.prompt_tokens + r.output_tokens) // size) for r in self.requests)

    def acceptance(self) -> RecordedAcceptance:
        """Return which drafts were found and right. Raises ResultsError for a run without drafts,
        or if a request's tokens and steps disagree."""
        found = RecordedAcceptance()
        given = [0] * len(self.requests)
        for step in self.steps:
            for row, (drafts, right, ahead) in (step.verified or {}).items():
                request, position = self.requests[row], given[row]
                left = request.output_tokens - position
                # right drafts behind the last token count as right, and belong to no request
                given[row] += max(min(right + 1, left), 1)
                found.note(request.id, position, drafts, right)
                found.note_found(request.id, given[row], ahead)
        if not any(given):
            raise ResultsError(
                "the decision log has no drafts that an engine found; record one with replay "
                "--mode free --decisions --out DIR"
            )
        for request, tokens in zip(self.requests, given, strict=True):
            if tokens != request.output_tokens:
                raise ResultsError(
                    f"the decision log's steps give request {request.id} {tokens} tokens, and it "
                    f"has {request.output_tokens} in the log's table; record it again"
                )
        return found

    @property
    def step_tokens(self) -> int:
        """Return the new tokens of the longest step."""
        return max((sum(step.grants.values()) for step in self.steps), default=0)


class DecisionRecorder(StepRecorder):
    """A step recorder that also keeps the plans."""

    def __init__(self, replica: int = 0, timed: bool = False) -> None:
        super().__init__(replica, timed)
        self.lines: list[dict] = []
        # plans without a step since the last one
        self._before: list[StepPlan] = []
        self._withdrawn: list[int] = []  # since the last step
        self.left: set[int] = set()  # rows withdrawn so far; only asked

    def void(self) -> None:
        super().void()
        self.lines.pop()

    def withdrawn(self, row: int) -> None:
        self._withdrawn.append(row)
        self.left.add(row)

    def planned(
        self,
        plan: StepPlan,
        executed: Executed,
        running: int,
        waiting: int,
        requests: RequestTable,
        ledger: KvLedger,
        goes_on: bool = False,
    ) -> None:
        before, self._before = self._before, []  # without_step is called for this plan too
        super().planned(plan, executed, running, waiting, requests, ledger)
        self._before = []
        outcome = executed.outcome
        steps, free = len(outcome.ends_s), int(ledger.free_blocks)
        line = {
            "start_s": outcome.start_s,
            "ends_s": outcome.ends_s.tolist(),
            "grants": [plan.rows.tolist(), plan.tokens.tolist()],
            "free_blocks": [free],
        }
        if steps > 1:
            taken = growth_of(plan, ledger, steps).cumsum()
            line["free_blocks"] = (free - taken).tolist()
        optional = {
            **_memory(plan),
            "withdrawn": self.take_withdrawn(),
            "before": [found for p in before if (found := _memory(p))],
            "verified": _verified(outcome, requests),
        }
        self.lines.append(line | {name: value for name, value in optional.items() if value})

    def went_on(self, ends_s: np.ndarray, running: int, waiting: int) -> bool:
        return False  # a line each: a run, and the step that is planned in

    def take_withdrawn(self) -> list[int]:
        """Return the rows cancelled since the last step or call."""
        rows, self._withdrawn = self._withdrawn, []
        return rows

    def without_step(self, plan: StepPlan, to_host_bytes: int, to_device_bytes: int) -> None:
        super().without_step(plan, to_host_bytes, to_device_bytes)
        self._before.append(plan)


def _memory(plan: StepPlan) -> dict[str, list]:
    """Return the memory changes of `plan`, without empty ones."""
    parts = {
        "admitted": plan.admitted,
        "preempted": [(row, kind.value) for row, kind in plan.preempted],
        "swapped_in": plan.swapped_in,
    }
    return {name: value for name, value in parts.items() if value}


def _verified(outcome: StepOutcome, requests: RequestTable) -> list[list[int]]:
    """Return the four lists on drafts, before the outcome is booked. Padding is no draft."""
    verified, rows = outcome.verified, outcome.emitted
    if verified is None or verified.ahead is None:
        return []
    drafts = np.minimum(verified.drafted, requests.draft_tokens[rows])
    return [part.tolist() for part in (rows, drafts, verified.accepted, verified.ahead)]


def log_bytes(
    run: dict, requests: RequestTable, recorder: DecisionRecorder, moved: Counts | None = None
) -> bytes:
    """Return the log as a file's content, equal for equal runs. moved: the backend's counts."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as file:
        file.write(_line({_NUMBER: LOG.version, "run": run}))
        for request in requests:
            entry = {
                "id": request.id,
                "arrival_s": request.arrival_s,
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": request.output_tokens,
            }
            if request.row in recorder.left:
                entry["left"] = True
            if request.prefix is not None:
                entry["prefix"] = request.prefix.tolist()
            file.write(_line(entry))
        for entry in recorder.lines:
            file.write(_line(entry))
        after = recorder.take_withdrawn()
        if after:
            file.write(_line({"withdrawn": after}))
        if moved:
            file.write(_line({"moved": moved}))
    return packed.getvalue()


def _line(entry: dict) -> bytes:
    return json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_log(path: Path) -> DecisionLog:
    """Read a log from disk. Raises ResultsError: missing, torn, or of a later version."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ResultsError(
            f"{path}: there is no decision log; run simulate again with --decisions --out DIR"
        ) from None
    return parse_log(content, str(path))


def parse_log(content: bytes, name: str = "decision log") -> DecisionLog:
    """Parse a log's content; `name` stands in errors. Raises ResultsError: torn, or later
    version."""
    try:
        lines = gzip.decompress(content).splitlines()
        version = LOG.check(parse_json(lines[0])[_NUMBER], name, ResultsError)
        head, *rest = LOG.upgraded([parse_json(line) for line in lines], version)
        requests = [_request(entry) for entry in rest if "id" in entry]
        steps = [
            step for entry in rest if "grants" in entry for step in _steps(entry, len(requests))
        ]
        moved = {
            kind: dict(counts)
            for entry in rest
            if "moved" in entry
            for kind, counts in entry["moved"].items()
        }
    except ResultsError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        zlib.error,
    ) as error:
        raise ResultsError(f"{name}: torn, or not a decision log ({error}); log again") from error
    after = [row for entry in rest if "grants" not in entry for row in entry.get("withdrawn", ())]
    return DecisionLog(head["run"], requests, steps, moved, tuple(after))


def _request(entry: dict) -> LoggedRequest:
    prefix = entry.get("prefix")
    return LoggedRequest(
        entry["id"],
        entry["arrival_s"],
        entry["prompt_tokens"],
        entry["output_tokens"],
        None if prefix is None else np.array(prefix, np.int64),
        entry.get("left", False),
    )


def _steps(entry: dict, requests: int) -> Iterator[LoggedStep]:
    grants = dict(zip(*entry["grants"], strict=True))
    if not all(0 <= row < requests for row in grants):
        raise ValueError(f"a step names a row that none of the {requests} requests has")
    start = entry["start_s"]
    own, withdrawn = _plan(entry), tuple(entry.get("withdrawn", ()))
    before = tuple(map(_plan, entry.get("before", ())))
    verified = None
    if "verified" in entry:
        of_rows = zip(*entry["verified"], strict=True)
        verified = {row: (drafts, right, found) for row, drafts, right, found in of_rows}
        if not verified.keys() <= grants.keys():
            raise ValueError("a step verifies drafts of a request that it does not compute")
    for end, free in zip(entry["ends_s"], entry["free_blocks"], strict=True):
        parts = own.admitted, own.preempted, own.swapped_in
        yield LoggedStep(start, end - start, grants, *parts, free, withdrawn, before, verified)
        start, own, withdrawn, before = end, _NOTHING, (), ()


def _plan(entry: dict) -> LoggedPlan:
    return LoggedPlan(
        dict(entry.get("admitted", ())),
        tuple((row, Preemption(kind)) for row, kind in entry.get("preempted", ())),
        tuple(entry.get("swapped_in", ())),
    )
