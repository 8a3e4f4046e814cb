"""Scenarios with drafts: those of `scenarios`, with a drafter chosen by seed, and requests that
reach the longest length there is."""

import dataclasses

import numpy as np

from tests.identity import scenarios
from tests.identity.protocol import Scenario

METHODS = {False: ("ngram", "draft_model", "eagle"), True: ("ngram_gpu", "draft_model", "eagle")}


def drafted(name: str, seed: int, asynchronous: bool, **settings) -> Scenario:
    """One of `scenarios` with one to five drafts a row; every fourth seed has them by batch size.
    settings: other fields of its EngineSettings."""
    scenario = getattr(scenarios, name)(seed)
    rng = np.random.default_rng([7, seed])
    methods = METHODS[asynchronous]
    seats = scenario.settings.max_num_seqs
    drafts = int(rng.integers(1, 6))
    by_batch = ((1, max(seats // 3, 1), drafts), (seats // 2 + 1, seats, int(rng.integers(0, 3))))
    fields = {
        "async_scheduling": asynchronous,
        "draft_tokens": drafts,
        "draft_method": methods[seed % len(methods)],
        "drafts_by_batch": by_batch if seed % 4 == 3 and seats > 2 else (),
        "draft_rate": float(rng.uniform(0.3, 0.95)),
    }
    return _at_longest(scenario, fields | settings)


def _at_longest(scenario: Scenario, fields: dict) -> Scenario:
    """A tenth of the requests is cut to the longest length."""
    requests = scenario.requests
    totals = [r.prompt_tokens + r.output_tokens for r in requests]
    longest = max(int(np.quantile(totals, 0.9)), *(r.prompt_tokens + 1 for r in requests))
    cut = [
        dataclasses.replace(r, output_tokens=min(r.output_tokens, longest - r.prompt_tokens))
        for r in requests
    ]
    settings = dataclasses.replace(scenario.settings, max_model_len=longest, **fields)
    return dataclasses.replace(scenario, settings=settings, requests=cut)
