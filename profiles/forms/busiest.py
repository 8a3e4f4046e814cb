"""Experts that lie whole on ranks: how many of those that a step chooses lie on the busiest one,
where draws are even. All ranks wait for it in every layer."""

from __future__ import annotations

from functools import cache
from math import comb, erf, sqrt

import numpy as np


@cache
def busiest_experts(experts: int, ranks: int) -> np.ndarray:
    """float64[experts + 1]: of c different ones, drawn evenly of all, the expected number on the
    rank that has most of them.

    Exact: at most x on every rank are prod over ranks (sum over j <= x of C(m, j) z^j), of m
    experts each, of which the term z^c counts the draws; over C(experts, c).
    """
    sizes = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    draws = np.array([float(comb(experts, c)) for c in range(experts + 1)])
    found = np.zeros(experts + 1)
    for most in range(max(sizes)):
        ways = np.ones(1)
        for size in sizes:
            ways = np.convolve(ways, [float(comb(size, j)) for j in range(min(most, size) + 1)])
        within = np.zeros(experts + 1)
        within[: len(ways)] = ways
        found += 1.0 - within / draws  # P(the most is above `most`)
    return found


@cache
def largest_of_normals(count: int) -> float:
    """The expected largest of so many independent standard normal values."""
    x = np.linspace(-9.0, 9.0, 18001)
    below = np.array([0.5 * (1.0 + erf(v / sqrt(2.0))) for v in x.tolist()]) ** count
    return float(((x > 0) - below).sum() * (x[1] - x[0]))


def busiest_tokens(tokens: float, experts: int, chosen: int, ranks: int) -> float:
    """(token, expert) pairs on the rank with most, of `tokens` that choose `chosen` of `experts`
    each: their mean, and the largest of normal deviations that add up to none."""
    mean = tokens * chosen / ranks
    spread = sqrt(mean * (experts - chosen) / max(experts - 1, 1))
    most = tokens * min(chosen, -(-experts // ranks))
    return min(mean + largest_of_normals(ranks) * spread, most)
