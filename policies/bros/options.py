"""Options of BROS."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from twinserve.policies.base import Options

_REPLACEMENT = {"true": "once", "false": "none", "none": "none"}


class BrosOptions(Options):
    """Options of BROS, named as in the paper if it names them.

    base_batch      B_base, requests
    adaptive_batch  double B_curr after an iteration without the early return of lines 11-12, reset
                    it after one
    replacement     lines 27-34: once (IEEE version), all: until one fails (ACM version), or none;
                    true is once, false none
    best_effort     the second part (lines 15-36); off for pure real-time loads
    group_size      tokens returned to the user together (ACM version); 1: every token counts
    chunk           prompt tokens an iteration computes at most of one request; None: whole prompts,
                    as in the paper
    order           of real-time requests. savable: residual time, with late requests that have no
                    memory last; residual: residual time alone, as printed
    avg_window      iterations that T_avg averages over
    swap            dropped requests keep their KV on the host; False: they are recomputed
    late_drops      a late request without memory may drop real-time requests too
    reserve         a best-effort newcomer waits for room for its whole prompt and for what earlier
                    ones still lack: with `chunk`, fewer lose their memory
    drafts          with --speculate, which drafts a step verifies. spare: of the requests that it
                    serves anyway, in the time before the nearest deadline; always: of all rows, and
                    a row that does not fit with its drafts waits
    draft_pace      with --speculate, when the next token is due after a step that gave m of them.
                    next: after one TPOT objective; given: after m of them, as a token group
    """

    base_batch: int = Field(128, ge=1)
    adaptive_batch: bool = True
    replacement: Annotated[
        Literal["all", "once", "none"],
        BeforeValidator(lambda name: _REPLACEMENT.get(str(name).lower(), name)),
    ] = "once"
    best_effort: bool = True
    group_size: int = Field(1, ge=1)
    chunk: int | None = Field(None, ge=1)
    order: Literal["residual", "savable"] = "residual"
    avg_window: int = Field(32, ge=1)
    swap: bool = True
    late_drops: bool = False
    reserve: bool = False
    drafts: Literal["spare", "always"] = "spare"
    draft_pace: Literal["next", "given"] = "next"

    @property
    def serves_best_effort(self) -> bool:
        return self.best_effort
