"""The plain twin of `columns.pyx`: a step's book-keeping in the columns of a RequestTable.

`requests` is the table, rows are int64[n] and distinct, tokens int64[n] for these rows.
"""

from __future__ import annotations

import numpy as np


def publish(requests, data: dict[str, np.ndarray], size: int) -> None:
    """The first `size` places of each column of `data` are that attribute of the table."""
    places = slice(size)
    for name, column in data.items():
        setattr(requests, name, column[places])


def lacking(requests, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of `rows` those whose text is not computed yet, their computed tokens and those they lack."""
    computed = requests.computed_tokens[rows]
    wanted = requests.known_tokens(rows) - computed
    some = wanted > 0
    if np.count_nonzero(some) < len(rows):
        return rows[some], computed[some], wanted[some]
    return rows, computed, wanted


def decoding(requests, rows: np.ndarray, tokens: np.ndarray, alone: bool = False) -> bool:
    """Whether each row that computes one token computes the one after its last emitted one; alone:
    and no row computes more."""
    if alone and max(tokens.tolist(), default=0) > 1:
        return False
    rows = rows[tokens == 1]
    after = requests.computed_tokens[rows] + 1 == requests.known_tokens(rows)
    return np.count_nonzero(after & (requests.output_tokens[rows] > 0)) == len(rows)


def emitting(requests, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """bool[n]: which rows catch up with their known text when they compute `tokens`."""
    return requests.computed_tokens[rows] + tokens == requests.known_tokens(rows)


def leaving(
    requests, rows: np.ndarray, emitting: np.ndarray, outputs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the rows that emit; how many of their `outputs` (by row, tokens in all) each still
    gets; and the least of these, 0 if no row emits."""
    emitted = rows if np.count_nonzero(emitting) == len(rows) else rows[emitting]
    left = outputs[emitted] - requests.output_tokens[emitted]
    return emitted, left, min(left.tolist(), default=0)


def in_state(requests, rows: np.ndarray, state: int) -> np.ndarray:
    """Of `rows` those in `state`."""
    found = requests.state[rows] == state
    return rows if np.count_nonzero(found) == len(rows) else rows[found]


def best_effort(requests, rows: np.ndarray) -> int:
    """How many of `rows` are best-effort."""
    return int(np.count_nonzero(requests.service_class[rows] == 1))


def advance(requests, rows: np.ndarray, tokens: np.ndarray, steps: int) -> None:
    """Each row has computed its `tokens` in each of `steps` steps."""
    requests.computed_tokens[rows] += tokens * steps


def pooled(
    requests, rows: np.ndarray, tokens: np.ndarray, emitting: np.ndarray, first: list[int]
) -> tuple:
    """Of the rows that decode, how many, the sum and the largest of their resident tokens; behind
    that, if others prefill, the new and the resident tokens of these.

    first  rows that decode though they have emitted nothing
    """
    resident = requests.computed_tokens[rows]
    decode = emitting & (tokens == 1) & (requests.output_tokens[rows] > 0)
    if first:
        decode |= np.isin(rows, first)
    prefill = ~decode
    found = resident[decode].tolist()  # of a batch's length, plain sums are faster than numpy's
    decodes = len(found), sum(found), max(found, default=0)
    return decodes if len(found) == len(rows) else (*decodes, tokens[prefill], resident[prefill])


def begin(
    requests,
    rows: np.ndarray,
    tokens: np.ndarray,
    emitted: np.ndarray,
    finished: list[int],
    start_s: float,
) -> np.ndarray:
    """Show a step as ended that begins; those `finished` with it are promised no token. Returns the
    times of the last tokens of the `emitted` rows, for `unshow`."""
    requests.computed_tokens[rows] += tokens
    last_token_s, going_on = requests.last_token_s[emitted], emitted
    for row in finished:  # one or two
        going_on = going_on[going_on != row]
    requests.output_tokens[going_on] += 1
    requests.in_flight[going_on] = 1
    requests.last_token_s[going_on] = start_s
    return last_token_s


def unshow(requests, rows: np.ndarray, last_token_s: np.ndarray) -> None:
    """Take back from the emitted `rows` what `begin` showed."""
    requests.output_tokens[rows] -= requests.in_flight[rows]
    requests.in_flight[rows] = 0
    requests.last_token_s[rows] = last_token_s


def book(requests, rows: np.ndarray, ends_s: np.ndarray) -> np.ndarray:
    """Each row got a token at each of `ends_s`. Returns float64[n]: the gap before the first of
    them."""
    gaps = ends_s[0] - requests.last_token_s[rows]
    slo = requests.slo_tpot_s[rows]
    late = gaps > slo
    if np.count_nonzero(late):
        requests.late_tokens[rows] += late
    if len(ends_s) > 1:
        later = ends_s[1:] - ends_s[:-1]
        if later.max() > np.fmin.reduce(slo):  # NaN: no objective
            later.sort()
            requests.late_tokens[rows] += len(later) - later.searchsorted(slo, side="right")
    emitted = requests.output_tokens[rows]
    if np.count_nonzero(emitted) < len(rows):
        requests.first_token_s[rows[emitted == 0]] = ends_s[0]
    requests.output_tokens[rows] = emitted + len(ends_s)
    requests.last_token_s[rows] = ends_s[-1]
    return gaps


def split_gaps(
    rows: np.ndarray, gaps: np.ndarray, service_class: np.ndarray
) -> tuple[int, list[tuple[np.ndarray, int, int]]]:
    """How many rows are best-effort; and the known gaps pooled, each with how many real-time and
    best-effort rows have it."""
    best_effort = service_class[rows] == 1
    n_be = int(np.count_nonzero(best_effort))
    known = ~np.isnan(gaps)
    if not known.any():
        return n_be, []
    first = gaps[known][:1]  # most rows have it: all that were in the step before
    same, rest = gaps == first, known & (gaps != first)
    of_be = int(np.count_nonzero(same & best_effort))
    sides = (
        (first, int(np.count_nonzero(same)) - of_be, of_be),
        (gaps[rest & ~best_effort], 1, 0),
        (gaps[rest & best_effort], 0, 1),
    )
    return n_be, [side for side in sides if len(side[0])]
