"""The plain twin of `batch.pyx`: what policies ask of many rows at once.

`requests` is the table, rows are int64[n].
"""

from __future__ import annotations

import numpy as np


def totals(
    is_prefill: np.ndarray, new: np.ndarray, context: np.ndarray, swapped: np.ndarray
) -> tuple[int, int, int, int, int]:
    """Prefills: tokens computed, tokens attended to; decodes: requests, tokens attended to; bytes
    to be swapped in. Plain sums: for the length of a batch they are faster than numpy's."""
    computed, attended = 0, 0
    decodes, of_decodes = len(new), sum(context.tolist())
    prefills = int(np.count_nonzero(is_prefill))
    if prefills:
        computed = sum(new[is_prefill].tolist())
        attended = sum(context[is_prefill].tolist())
        decodes, of_decodes = decodes - prefills, of_decodes - attended
    return computed, attended, decodes, of_decodes, sum(swapped.tolist())


def next_tokens(
    requests, rows: np.ndarray, chunk: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what each row computes next: bool[n], of a prompt or not; how many tokens, at most
    `chunk` if that is above 0; and the resident tokens with them."""
    computed, emitted = requests.computed_tokens[rows], requests.output_tokens[rows]
    left = requests.prompt_tokens[rows] + emitted - computed
    new = np.minimum(left, chunk) if chunk else left
    return (left > 1) | (emitted == 0), new, computed + new


def due(requests, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Since when each row waits for its next token, and for how long it may; seconds, infinite
    without an objective."""
    started = requests.output_tokens[rows] > 0
    since = np.where(started, requests.last_token_s[rows], requests.arrival_s[rows])
    slo = np.where(started, requests.slo_tpot_s[rows], requests.slo_ttft_s[rows])
    return since, np.fmin(slo, np.inf)


def residual(requests, rows: np.ndarray, now: float, lead: float) -> np.ndarray:
    """float64[n]: seconds that each row may still wait for its next token from `now` on, or from
    `lead` seconds later for rows without a token under way."""
    since, slo = due(requests, rows)
    return slo - (now - since) - np.where(requests.in_flight[rows] > 0, 0.0, lead)


def next_due(requests, rows: np.ndarray, by_gap: bool) -> np.ndarray:
    """float64[n]: when each row's next token is due, seconds; inf without an objective. A first
    token counts from arrival; later ones from there too, or from the last one (`by_gap`)."""
    emitted, tpot = requests.output_tokens[rows], _objective(requests.slo_tpot_s[rows])
    first = _objective(requests.arrival_s[rows] + requests.slo_ttft_s[rows])
    if by_gap:
        return np.where(emitted > 0, requests.last_token_s[rows] + tpot, first)
    later = np.zeros(len(rows))
    np.multiply(emitted, tpot, out=later, where=emitted > 0)  # 0 * inf is no number
    return first + later


def tightest(requests, rows: np.ndarray, by_gap: bool, now: float, seconds: float) -> float:
    """Seconds until the first of the rows' next tokens is due. A row that `seconds` is too late for
    already has its pace to keep: its time between tokens, or `seconds` if that is more."""
    slack = next_due(requests, rows, by_gap) - now
    pace = np.maximum(_objective(requests.slo_tpot_s[rows]), seconds)
    return float(np.where(slack >= seconds, slack, pace).min())


def _objective(seconds: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(seconds), np.inf, seconds)


def split(requests, rows: np.ndarray, missing: np.ndarray) -> tuple[tuple, tuple]:
    """Return the rows that compute one token after their last, and the others. Of each kind: rows,
    tokens left to compute, computed tokens, and `missing` (int64[n])."""
    computed, emitted = requests.computed_tokens[rows], requests.output_tokens[rows]
    left = requests.prompt_tokens[rows] + emitted - computed
    columns, decode = (rows, left, computed, missing), (left == 1) & (emitted > 0)
    n = np.count_nonzero(decode)
    if n in (0, len(rows)):
        none = tuple(column[:0] for column in columns)
        return (columns, none) if n else (none, columns)
    return tuple(c[decode] for c in columns), tuple(c[~decode] for c in columns)


def within(new: np.ndarray, limit: int, behind: np.ndarray) -> int:
    """How many of `new` (tokens), from the front, keep to `limit` together with all `behind` if the
    largest of them is left out."""
    before, tokens = behind.tolist(), new.tolist()
    total, longest = sum(before), max(before, default=0)
    if total + sum(tokens) - max(longest, max(tokens, default=0)) <= limit:
        return len(tokens)
    others = total + np.cumsum(new) - np.maximum(np.maximum.accumulate(new), longest)
    return int(np.searchsorted(others, limit, side="right"))


def growth(slack: np.ndarray, steps: int, size: int) -> np.ndarray:
    """int64[steps]: how many rows take a block of `size` tokens at each step, one token a step.
    slack: int64[n], the tokens that each has room for without."""
    first = np.bincount(slack[slack < steps], minlength=steps)
    if steps <= size:
        return first  # too short for a row to take two
    # A row that takes a block at step s takes the next one `size` steps later: sum the first
    # takings over every earlier step of the same phase.
    padded = np.zeros(-(-steps // size) * size, np.int64)
    padded[:steps] = first
    return np.cumsum(padded.reshape(-1, size), axis=0).ravel()[:steps]


def expected_left(
    median: np.ndarray, upper: np.ndarray, rows: np.ndarray, past: np.ndarray
) -> np.ndarray:
    """float64[n]: tokens that each row is expected to generate yet, of which `past` (int64[n]) are
    generated. median, upper: of the range that was predicted, by row; beyond it inf."""
    median, upper = median[rows], upper[rows]
    beyond = np.where(past < upper, upper - past, np.inf)
    return np.where(past < median, median - past, beyond)


def allowed_prefill_seconds(
    slo: np.ndarray, past_s: np.ndarray, past: np.ndarray, lower: np.ndarray, tpot: float
) -> np.ndarray:
    """Eq. 1, float64[n]: T_allow = T_slo (N_past + N_future) - (T_past + T_future); may be
    negative. No objective, no limit.

    slo    seconds a token, NaN for none; past_s: since the first token, waits included
    past   tokens generated; lower: lower bound of the predicted length. N_future = max(1, lower -
           past)
    tpot   current seconds a token; T_future = tpot * N_future
    """
    future = np.maximum(1, lower - past)
    allowed = slo * (past + future) - (past_s + tpot * future)
    return np.where(np.isnan(slo), np.inf, allowed)


def available_cells(
    free: int,
    blocks: np.ndarray,
    resident: np.ndarray,
    left: np.ndarray,
    block_tokens: int,
    horizon: int,
) -> np.ndarray:
    """Eq. 5, int64[horizon + 1]: free cells at the beginning of this and of the next `horizon`
    stages.

    A stage is `block_tokens` steps, so that a sequence takes one more block in it. By the paper's
    conservative assumption this is one in each layer that it has on the device. All that it holds
    is released after the stage in which it is expected to end.

    blocks, resident  of each sequence: blocks in its table, layers on the device
    left  tokens that it is expected to generate yet, at least 1 (inf: not known)
    """
    available = np.empty(horizon + 1, np.int64)
    available[0] = free
    ends = np.ceil(left / block_tokens)  # the stage in which it ends, from 1 on
    for stage in range(1, horizon + 1):
        allocated = int(resident[ends >= stage].sum())
        ended = ends == stage
        released = int(((blocks[ended] + stage) * resident[ended]).sum())
        available[stage] = available[stage - 1] + released - allocated
    return available
