"""N-gram drafts on a live engine: what they ask of its settings, and which drafts no engine here
makes."""

from __future__ import annotations

from dataclasses import replace

from twinserve.backends.live.engine.engine import LiveSettings
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.speculation import parse_speculation


def check_live_drafts(speculate: str | None, asynchronous: bool) -> None:
    """Raises SettingsError for `--speculate` of a run whose drafts a live engine does not make."""
    if speculate is None:
        return
    given = parse_speculation(speculate)
    if given.method != "ngram":
        raise SettingsError(
            f"--speculate: an engine in this process drafts by n-grams alone, not by "
            f"{given.method}; simulate with method=ngram, or drop it"
        )
    if given.batches is not None:
        raise SettingsError(
            "--speculate: an engine in this process has one number of drafts for all batch sizes; "
            "drop batches"
        )
    if asynchronous:
        raise SettingsError(
            "--speculate: vLLM looks n-grams up between two steps, and asynchronous scheduling "
            "leaves no time for that; give --no-async-scheduling"
        )


def with_drafts(settings: LiveSettings, run: dict) -> LiveSettings:
    """Add drafts to `settings` of the run in run.json: most of each request, n-gram lengths, and
    room for drafts in a step and after the longest request. Raises SettingsError as
    `check_live_drafts`."""
    speculate = run["config"].get("speculate")
    if speculate is None:
        return settings
    check_live_drafts(speculate, run["config"]["async_scheduling"])
    given = parse_speculation(speculate)
    return replace(
        settings,
        drafts=given.k,
        lookup=given.lengths,
        # Drafts behind the longest request, and behind them as many again: where one request
        # leaves less, vLLM looks nothing up and gives its whole batch drafts of token 0 (0.32,
        # `v1/worker/gpu_model_runner.py`, `_input_fits_in_drafter`)
        max_model_len=settings.max_model_len + 2 * given.k,
        # vLLM admits a request to a step that has room for it and its padding alone
        max_step_tokens=settings.max_step_tokens + given.k,
    )


def blocks_of_drafts(speculate: str | None, requests: int, block_tokens: int) -> int:
    """Return the KV blocks that drafts of so many requests, padding too, can take besides their
    text."""
    if speculate is None:
        return 0
    return requests * -(-parse_speculation(speculate).k // block_tokens)
