"""Step times composed from measured operator times: a GPU's time for each kernel of the model, by
shape.

A step of T tokens, n of them decodes with mean context c, and prompts with chunks a on prefixes r,
takes

    tokens     everything that each token passes through by itself: GEMMs, norms, rotary,
               activation, experts; at the padded token count if the step replays a CUDA graph
    comm       all-reduces (or the experts' gathers) over the padded tokens
    head       output projection and sampling of the rows that are sampled, gathering their logits
    decode     attention of n one-token queries over contexts of c
    chunks     attention of each chunk on its prefix, added up; one launch of the kernel for all of
               them, or none if the decodes' kernel takes them along
    beside     attention of the decodes in a kernel that also works on chunks: they lose the packing
               of query heads, and each pays for the tiles of the longest chunk
    skew       what unequal contexts add: the longest request's tail runs alone
    host       a step's share of scheduling and input preparation that the GPU waits for, constant
               and per request

`OperatorForm` is the data, per rank and over all layers, in seconds; `layers.py` and `aic.py` make
it from measured tables. Chunks longer than the table are split at its end, which for causal
attention is exact.
"""

from bisect import bisect_left
from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.speculative import VerifyingComposition
from twinserve.profiles.operators.interpolation import Box, Curve, Plane, weights
from twinserve.profiles.specs import STRICT

Points = tuple[float, ...]
# The longest of many requests stands out from the seven or so longest, which together keep the
# memory busy, by this share of its distance from the mean: the expected value for exponential
# lengths of 32 to 128 requests.
TAIL_SHARE = 0.43


def capture_sizes(largest: int) -> list[int]:
    """Batch sizes for which vLLM captures CUDA graphs: 1, 2, 4, eights below 256, sixteens up to
    `largest`."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]


def default_capture(max_num_seqs: int) -> int:
    """The largest size that vLLM captures by default: twice the batch limit, at most 512."""
    return min(2 * max_num_seqs, 512)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OperatorForm:
    """Times in seconds of one rank, all layers. Axes rise strictly.

    tokens, token_s, comm_s   by tokens in the step
    rows, row_s               by sampled rows
    requests, context, decode_s     [requests][context]; context: tokens attended to, the mean of
                                    the batch
    chunk, prefix, chunk_s          [chunk][prefix]: one prompt's chunk on its resident tokens
    beside_*, beside_s              [chunk][requests][context]: what decodes add to a step whose
                                    longest chunk is that; empty: as by themselves
    skew_requests, skew_s, skew_beside_s   by decodes: seconds a token of the longest context above
                                           the mean, alone and
                                    beside chunks; empty: none
    capture_tokens            the largest captured CUDA graph; 0: none
    host_s, host_request_s    a step, and each request in it
    """

    tokens: Points = Field(min_length=2)
    token_s: Points = Field(min_length=2)
    comm_s: Points = ()
    rows: Points = Field(min_length=2)
    row_s: Points = Field(min_length=2)
    requests: Points = Field(min_length=2)
    context: Points = Field(min_length=2)
    decode_s: tuple[Points, ...]
    chunk: Points = Field(min_length=2)
    prefix: Points = Field(min_length=2)
    chunk_s: tuple[Points, ...]
    beside_chunk: Points = ()
    beside_requests: Points = ()
    beside_context: Points = ()
    beside_s: tuple[tuple[Points, ...], ...] = ()
    skew_requests: Points = ()
    skew_s: Points = ()
    skew_beside_s: Points = ()
    capture_tokens: int = Field(default=512, ge=0)
    host_s: float = Field(default=0.0, ge=0)
    host_request_s: float = Field(default=0.0, ge=0)
    form: Literal["operators"] = "operators"

    @model_validator(mode="after")
    def _shaped(self):
        axes = ("tokens", "rows", "requests", "context", "chunk", "prefix", "skew_requests")
        axes += ("beside_chunk", "beside_requests", "beside_context")
        for name in axes:
            if np.any(np.diff(getattr(self, name)) <= 0):
                raise ValueError(f"{name} must rise strictly")
        self._check("token_s", len(self.tokens))
        self._check("comm_s", len(self.tokens), optional=True)
        self._check("row_s", len(self.rows))
        self._check("decode_s", len(self.requests), len(self.context))
        self._check("chunk_s", len(self.chunk), len(self.prefix))
        if self.beside_s:
            self._check(
                "beside_s",
                len(self.beside_chunk),
                len(self.beside_requests),
                len(self.beside_context),
            )
        self._check("skew_s", len(self.skew_requests))
        self._check("skew_beside_s", len(self.skew_requests))
        return self

    def _check(self, name: str, *shape: int, optional: bool = False) -> None:
        values = getattr(self, name)
        if optional and not values:
            return
        try:
            found = np.array(values, np.float64).reshape(shape)
        except ValueError:
            raise ValueError(f"{name} must have {' x '.join(map(str, shape))} values") from None
        if np.any(found < 0):
            raise ValueError(f"{name} must not be negative")


def _as_kernels_see(work: StepComposition) -> tuple[int, int, int, list[int], list[int]]:
    """(decodes, their context, the longest, chunks, their resident tokens): to attention, a chunk
    of one token is a decode."""
    new, resident = work.prefill_new.tolist(), work.prefill_resident.tolist()
    n, context, longest = work.decode_requests, work.decode_context, work.decode_context_max
    if 1 in new:
        single = [r for a, r in zip(new, resident, strict=True) if a == 1]
        n, context, longest = n + len(single), context + sum(single), max(longest, *single)
        chunks = [(a, r) for a, r in zip(new, resident, strict=True) if a > 1]
        new, resident = [a for a, _ in chunks], [r for _, r in chunks]
    return n, context, longest, new, resident


class OperatorModel(StepTimeModel):
    """From an OperatorForm. Immutable after construction; queries remember the
    curves of batch sizes."""

    knows_host = True
    knows_drafts = True

    def __init__(self, form: OperatorForm) -> None:
        self.form = form
        self._tokens = Curve(form.tokens, form.token_s)
        self._comm = Curve(form.tokens, form.comm_s) if form.comm_s else None
        self._rows = Curve(form.rows, form.row_s)
        self._decode = Plane(form.requests, form.context, form.decode_s)
        self._chunk = Plane(form.chunk, form.prefix, form.chunk_s)
        axes = (form.beside_chunk, form.beside_requests, form.beside_context)
        self._beside = Box(*axes, form.beside_s) if form.beside_s else None
        self._launch = min(min(row) for row in form.chunk_s)
        self._captured = capture_sizes(form.capture_tokens)
        self.curve = lru_cache(maxsize=4096)(self._curve)
        # a search for a batch asks again and again
        self._chunk_time = lru_cache(maxsize=65536)(self._chunk_seconds)

    # -- the interface -----------------------------------------------------------------------------
    def step_seconds(self, work: StepComposition) -> float:
        """Seconds of one step. A step that computes no token costs the host's constant."""
        n = work.decode_requests
        if isinstance(work, VerifyingComposition) and work.verifies:
            return float(sum(self.verifying_terms(work).values()))
        if len(work.prefill_new):
            return float(sum(self.terms(work).values()))
        if not n:
            return self.form.host_s
        base, attention, skew = self.curve(n)
        mean = (work.decode_context + n) / n
        return base + attention.at(mean) + skew * max(work.decode_context_max + 1 - mean, 0.0)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        """float64[steps], seconds; bit-identical to `step_seconds`: the same operations in the same
        order."""
        if not n:
            return np.full(steps, self.form.host_s)
        base, attention, skew = self.curve(n)
        step = np.arange(steps, dtype=np.int64)
        mean = (context + n + n * step) / n
        return base + attention.of(mean) + skew * np.maximum(context_max + 1 + step - mean, 0.0)

    def _curve(self, n: int) -> tuple[float, Curve, float]:
        """(all but attention, attention by mean context, skew a token) of n decodes alone."""
        base = self._without_attention(n, n)
        return base, Curve(self.form.context, self._decode.row(n)), self._skew(n, self.form.skew_s)

    def terms(self, work: StepComposition) -> dict[str, float]:
        """The terms named in the module's docstring, seconds."""
        n, context, longest, new, resident = _as_kernels_see(work)
        tokens, rows = n + sum(new), n + len(new)
        if not tokens:
            return {"host": self.form.host_s}
        padded = self.padded(tokens)
        found = {
            "tokens": self._tokens.at(padded),
            "comm": self._comm_seconds(padded),
            "head": self._rows.at(rows),
            "host": self.form.host_s + self.form.host_request_s * rows,
            "chunks": 0.0,
            "decode": 0.0,
            "beside": 0.0,
            "skew": 0.0,
        }
        if new:
            shared = len(new) - 1 + (n > 0 and self._beside is None)
            found["chunks"] = sum(map(self._chunk_time, new, resident)) - self._launch * shared
        if n:
            mean = (context + n) / n
            above = max(longest + 1 - mean, 0.0)
            if new and self._beside:
                found["beside"] = self._beside.at(max(new), n, mean)
            else:
                found["decode"] = self.curve(n)[1].at(mean)
            found["skew"] = (
                self._skew(n, self.form.skew_beside_s if new else self.form.skew_s) * above
            )
        return found

    def verifying_terms(self, work: VerifyingComposition) -> dict[str, float]:
        """The terms of a step whose decodes verify drafts, seconds. Tokens, all-reduces and output
        projection are those of all drafts. Attention reads the KV of each request once, as its
        decode does, and takes as long as such chunks if that is longer: `verify` is what these add.
        The tables have no shorter chunks than some sixteen tokens; those below are read off the
        slope, and may come out below decodes of as many requests."""
        drafted, resident = work.verify_new.tolist(), work.verify_resident.tolist()
        found = self.terms(work)
        tokens = sum(drafted) + int(work.prefill_new.sum())
        padded = self.padded(tokens)
        found["tokens"] = self._tokens.at(padded)
        found["comm"] = self._comm_seconds(padded)
        found["head"] = self._rows.at(sum(drafted) + len(work.prefill_new))
        once = found["decode"] + found["beside"] + found["skew"]
        launches = len(drafted) - (not len(work.prefill_new))  # prompts are in the same launch
        chunks = sum(map(self._chunk_time, drafted, resident)) - self._launch * launches
        found["verify"] = max(chunks - once, 0.0)
        return found

    # -- parts -------------------------------------------------------------------------------------
    def padded(self, tokens: int) -> int:
        """Tokens that the kernels work on: the next captured size, or as they are where none is
        large enough."""
        if not self._captured or tokens > self._captured[-1]:
            return tokens
        return self._captured[bisect_left(self._captured, tokens)]

    def token_seconds(self, tokens: int) -> float:
        """Seconds of what only depends on the tokens in the step: `tokens` and `comm`."""
        padded = self.padded(tokens)
        return self._tokens.at(padded) + self._comm_seconds(padded)

    def _comm_seconds(self, padded: int) -> float:
        return self._comm.at(padded) if self._comm else 0.0

    def host_seconds(self, requests: int) -> float:
        """The term `host` of a step with so many requests."""
        return self.form.host_s + self.form.host_request_s * requests

    def allreduce_seconds(self, work: StepComposition) -> float:
        """The term `comm`; 0 on one rank."""
        tokens = work.new_tokens
        return self._comm_seconds(self.padded(tokens)) if tokens else 0.0

    def _without_attention(self, tokens: int, rows: int) -> float:
        return self.token_seconds(tokens) + self._rows.at(rows) + self.host_seconds(rows)

    def _chunk_seconds(self, new: int, resident: int) -> float:
        longest, seconds = int(self.form.chunk[-1]), 0.0
        while new > longest:
            seconds += self._chunk.at(longest, resident) - self._launch
            new, resident = new - longest, resident + longest
        return seconds + self._chunk.at(new, resident)

    def _skew(self, n: int, values: Points) -> float:
        if n < 2 or not values:
            return 0.0
        i, w = weights(self.form.skew_requests, n)
        w = min(w, 1.0)  # more requests hide a tail better; what was measured last is kept
        return TAIL_SHARE * (values[i] if not w else values[i] + w * (values[i + 1] - values[i]))
