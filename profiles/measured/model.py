"""The step-time model that `twinserve calibrate` writes: tables of measured steps, read by linear
interpolation.

A step that only decodes, n requests with mean context c:

    T = D(n, x),   x = c + skew (longest context - c)

D is bilinear between measured batch sizes and contexts and goes on with the slopes of its last
cells. A step with prompt tokens (whole prompts, chunks, with or without decodes):

    T = f(tokens computed) + prefill_request_s x prefilling requests + decode_request_s x n
        + pair_s x (query, key) pairs of the prefills + attended_s x tokens that they attend to
        + decode_share (D(n, x) - D(n, first context)),   and at least D(n, x)

f is piecewise linear. The two kinds are tables of their own because an engine runs them
differently: pure decode steps replay whole CUDA graphs, steps with prompt tokens do not. The sums
of the second kind are physical. All tokens pass through the same matrix products (the weights are
read once), and attention is added per request. The decodes of a mixed step pay for their own
contexts, at a measured share of the cost in a pure decode step. A step with prompts that is larger
than any CUDA graph is launched kernel by kernel, and takes `launch_s` or more.

The tables are of steps that are repeated. What a step of real traffic takes longer is added
(`TrafficTimes`). They are of an engine that schedules synchronously: `HiddenTimes` is subtracted
for one that schedules asynchronously.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import STEADY, Churn, StepComposition, StepTimeModel
from twinserve.profiles.measured.disturbed import NOISY
from twinserve.profiles.specs import STRICT


@dataclass(frozen=True, config=STRICT)
class FitReport:
    """How well the tables represent the measurements. Errors are mean absolute relative errors over
    points.

    points, steps  that were fitted
    disturbed      share of the measured time that went into steps in which other programs had a
                   hand (profiles.measured.disturbed); they were set aside or corrected
    unsettled      points that have fewer than three undisturbed steps all the same
    partial        what a time limit or an interruption left out; empty: nothing
    residual       error on the fitted points themselves
    errors         cross-validated, by kind, and "all": each fifth of the points predicted from the
                   other four
    check_error    over steps of random composition that no fit has seen; None: there were none
    spread         median over points of the repeats' interquartile range, as a share of their
                   median
    traffic_steps  steps of traffic that TrafficTimes is from
    traffic_error  mean absolute error over single steps of traffic, each load predicted from the
                   others; None: there was none
    traffic_total_error  of their sum, signed
    """

    points: int = Field(ge=0)
    steps: int = Field(ge=0)
    disturbed: float = Field(default=0.0, ge=0)
    unsettled: int = Field(default=0, ge=0)
    partial: str = ""
    residual: float = Field(default=0.0, ge=0)
    # no part of the hash: fits to a profile are kept by it, and a dict has none
    errors: dict[str, float] = field(default_factory=dict, hash=False)
    check_error: float | None = None
    spread: float = Field(default=0.0, ge=0)
    traffic_steps: int = Field(default=0, ge=0)
    traffic_error: float | None = None
    traffic_total_error: float | None = None


def noise_lines(fit: FitReport) -> list[str]:
    """What a reader of results must know of the measurements behind them; empty if they are
    whole and were hardly disturbed."""
    lines = []
    if fit.disturbed > NOISY or fit.unsettled:
        rest = (
            f"{fit.unsettled} points had fewer than three undisturbed ones all "
            "the same, so their times are of disturbed ones"
            if fit.unsettled
            else "they were measured again, and set aside"
        )
        lines.append(f"other programs disturbed {fit.disturbed:.0%} of the measured time; {rest}")
    if fit.partial:
        lines.append(f"the measuring was cut short: {fit.partial}")
    return lines


@dataclass(frozen=True, config=STRICT)
class HostTimes:
    """Host time, in seconds, for information. The tables contain `step_s` and `request_s`, not the
    others; `--decision-time profile` adds `loop_s` between steps.

    step_s, request_s  of a step outside the model executor: constant, and per request in the step
    empty_s            a step that computes nothing
    submit_s           handing a request to the engine, between steps
    leave_s            what a request adds to the step that it finishes in
    first_s            what a step with prompt tokens takes longer when its number of tokens was not
                       seen lately; median
    loop_s             between two steps, of the loop of a live run with policy `vllm`: planning,
                       books, handing over what arrived
    """

    step_s: float = Field(ge=0)
    request_s: float = Field(ge=0)
    empty_s: float = Field(ge=0)
    submit_s: float = Field(ge=0)
    leave_s: float = Field(ge=0)
    first_s: float = Field(default=0.0, ge=0)
    loop_s: float = Field(default=0.0, ge=0)


@dataclass(frozen=True, config=STRICT)
class HiddenTimes:
    """Seconds of a synchronous step that asynchronous scheduling hides behind the step before, by
    the number of requests in the step: synchronous decode steps minus asynchronous ones."""

    requests: tuple[int, ...] = Field(min_length=2)
    seconds: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _ordered(self):
        if len(self.seconds) != len(self.requests):
            raise ValueError(f"{len(self.requests)} numbers of requests, {len(self.seconds)} times")
        if any(b <= a for a, b in pairwise(self.requests)):
            raise ValueError("requests must rise strictly")
        if any(b < a for a, b in pairwise(self.seconds)):
            raise ValueError("seconds must not fall with requests")
        return self


@dataclass(frozen=True, config=STRICT)
class TrafficTimes:
    """Seconds by which steps of real traffic are longer than the same steps repeated, measured in
    the live loop.

    step_s      every step: between two of them the loop plans and keeps its books, and the engine's
                data leave the caches
    request_s   per decoding request, for the same reason
    join_s      per request that joins, beyond what a prompt costs that is repeated (kernels for a
                new number of tokens, first use of all that belongs to a request)
    change_s    a step whose batch is not that of the step before: the engine builds its inputs anew
    swap_out_s, swap_in_s  per request whose KV is moved, the engine's own work
    swap_out_token_s, swap_in_token_s  and per token of it: copies that the step does not overlap
                                       with. What goes beside a
                step is the link's (`Profile.pcie_bytes_per_s`)
    """

    step_s: float = Field(ge=0)
    request_s: float = Field(ge=0)
    join_s: float = Field(ge=0)
    change_s: float = Field(ge=0)
    swap_out_s: float = Field(default=0.0, ge=0)
    swap_in_s: float = Field(default=0.0, ge=0)
    swap_out_token_s: float = Field(default=0.0, ge=0)
    swap_in_token_s: float = Field(default=0.0, ge=0)

    def seconds(self, decode_requests: int, churn: Churn) -> float:
        once = self.join_s * churn.joined + self.change_s * churn.changed
        once += self.swap_out_s * churn.swapped_out + self.swap_in_s * churn.swapped_in
        once += (
            self.swap_out_token_s * churn.swapped_out_tokens
            + self.swap_in_token_s * churn.swapped_in_tokens
        )
        return self.step_s + self.request_s * decode_requests + once


@dataclass(frozen=True, config=STRICT)
class MeasuredModel(StepTimeModel):
    """`batches` (requests) x `contexts` (tokens each) -> `decode_s` (seconds, one row a batch
    size); `tokens` -> `token_s` (seconds) is f. Knots rise strictly, times never fall.

    captured  tokens of the largest CUDA graph
    launch_s  least time of a step with prompts and more tokens, for its launches
    hidden    what asynchronous scheduling hides; None: not measured
    overlaps  the engine schedules asynchronously: a run sets this from its own settings"""

    batches: tuple[int, ...] = Field(min_length=2)
    contexts: tuple[int, ...] = Field(min_length=2)
    decode_s: tuple[tuple[float, ...], ...] = Field(min_length=2)
    tokens: tuple[int, ...] = Field(min_length=2)
    token_s: tuple[float, ...] = Field(min_length=2)
    prefill_request_s: float = Field(ge=0)
    decode_request_s: float = Field(ge=0)
    pair_s: float = Field(ge=0)
    attended_s: float = Field(ge=0)
    decode_share: float = Field(ge=0)
    skew: float = Field(default=0.0, ge=0, le=1)
    captured: int = Field(default=0, ge=0)
    launch_s: float = Field(default=0.0, ge=0)
    fit: FitReport | None = None
    host: HostTimes | None = None
    traffic: TrafficTimes | None = None
    hidden: HiddenTimes | None = None
    overlaps: bool = False
    form: Literal["measured"] = "measured"

    @model_validator(mode="after")
    def _ordered(self):
        for name in ("batches", "contexts", "tokens"):
            knots = getattr(self, name)
            if knots[0] < 0 or any(b <= a for a, b in pairwise(knots)):
                raise ValueError(f"{name} must rise strictly")
        table = (
            np.array(self.decode_s)
            if len({len(row) for row in self.decode_s}) == 1
            else np.zeros(0)
        )
        if table.shape != (len(self.batches), len(self.contexts)):
            raise ValueError(
                f"decode_s must have {len(self.batches)} rows of {len(self.contexts)} times"
            )
        if len(self.token_s) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} token counts but {len(self.token_s)} times")
        cross = np.diff(np.diff(table, axis=0), axis=1)
        if (
            (table < 0).any()
            or (np.diff(table, axis=0) < 0).any()
            or (np.diff(table, axis=1) < 0).any()
        ):
            raise ValueError("decode_s must not fall with batch size or context")
        # else more requests would cost less somewhere past the table's end
        if cross[-1, -1] < -1e-9 * table.max():
            raise ValueError(
                "decode_s must not rise more slowly with context for the largest batch than for "
                "the one before"
            )
        if self.token_s[0] < 0 or any(b < a for a, b in pairwise(self.token_s)):
            raise ValueError("token_s must not fall")
        if self.hidden is not None:
            self._hides_less(self.hidden)
        return self

    def _hides_less(self, hidden: HiddenTimes) -> None:
        """Raises ValueError if some decode step would take no time, or less."""
        last = max(self.batches[-1], hidden.requests[-1])
        for n in sorted({1, *self.batches, *hidden.requests, 2 * last}):
            takes_s, hidden_s = self._row(n)[0], _at(hidden.requests, hidden.seconds, n)
            if n and hidden_s >= takes_s:
                raise ValueError(
                    f"hidden: {hidden_s:.6g} s of a decode step of {n} requests, which takes "
                    f"{takes_s:.6g} s"
                )

    @property
    def watches_churn(self) -> bool:
        return self.traffic is not None

    def step_seconds(self, work: StepComposition) -> float:
        seconds = self.repeated_seconds(work)
        if self.traffic is not None:
            seconds += self.traffic.seconds(work.decode_requests, work.churn)
        hidden_s = self.hidden_seconds(work.decode_requests + len(work.prefill_new))
        return max(seconds - hidden_s, 0.0)

    def hidden_seconds(self, requests: int) -> float:
        if self.hidden is None or not self.overlaps or not requests:
            return 0.0
        return _at(self.hidden.requests, self.hidden.seconds, requests)

    def repeated_seconds(self, work: StepComposition) -> float:
        """Of the step when it is repeated: the tables alone."""
        n = work.decode_requests
        decode = first = 0.0
        if n:
            mean = work.decode_context / n
            x = mean + self.skew * (work.decode_context_max - mean)
            row = self._row(n)
            decode, first = _at(self.contexts, row, x), row[0]
        if not len(work.prefill_new):
            return decode
        new, resident = work.prefill_new, work.prefill_resident
        count = int(new.sum())
        pairs = float((new * (2 * resident + new + 1)).sum()) / 2
        attended = count + int(resident.sum())
        total = (
            _at(self.tokens, self.token_s, n + count)
            + self.prefill_request_s * len(new)
            + self.decode_request_s * n
            + self.pair_s * pairs
            + self.attended_s * attended
            + self.decode_share * (decode - first)
        )
        return max(total, decode, self.launch_s if n + count > self.captured else 0.0)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        if not n:
            return np.zeros(steps)
        grown = np.arange(steps, dtype=np.int64)
        mean = (context + n * grown) / n
        x = mean + self.skew * ((context_max + grown) - mean)
        row, knots = np.array(self._row(n)), np.array(self.contexts, float)
        i = np.clip(np.searchsorted(knots, x, side="right"), 1, len(knots) - 1)
        slope = (row[i] - row[i - 1]) / (knots[i] - knots[i - 1])
        seconds = np.where(x <= knots[0], row[0], row[i - 1] + slope * (x - knots[i - 1]))
        if self.traffic is not None:
            seconds = seconds + self.traffic.seconds(n, STEADY)
        return np.maximum(seconds - self.hidden_seconds(n), 0.0)

    def _row(self, n: int) -> tuple[float, ...]:
        """D(n, .) at the contexts; below the first batch size its own row."""
        i = min(max(bisect_right(self.batches, n), 1), len(self.batches) - 1)
        share = max(n - self.batches[i - 1], 0) / (self.batches[i] - self.batches[i - 1])
        return tuple(
            low + share * (high - low)
            for low, high in zip(self.decode_s[i - 1], self.decode_s[i], strict=True)
        )


def _at(knots: Sequence[float], values: Sequence[float], x: float) -> float:
    """Linear between the knots, flat before the first, with the last cell's slope after the
    last."""
    # the same operations in the same order as in decode_run_seconds, which must give the same bits
    if x <= knots[0]:
        return values[0]
    i = min(bisect_right(knots, x), len(knots) - 1)
    slope = (values[i] - values[i - 1]) / (knots[i] - knots[i - 1])
    return values[i - 1] + slope * (x - knots[i - 1])
