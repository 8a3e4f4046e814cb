"""The terms of a front end, from a server whose engine only waits. Service times come from the
threads' CPU time under several loads, latencies from single requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from twinserve.profiles.front_end import FrontEnd, Serving, Threads, published, service_of

_SHIPPED = published()["vllm"].threads


@dataclass(frozen=True)
class Exchange:
    """One request to a server that does nothing else, on one clock (seconds).

    sent_s    by the client; queued_s: when the engine got it
    engine_s  when the engine had each token; seen_s: when the client saw a message
    """

    prompt_tokens: int
    sent_s: float
    queued_s: float
    engine_s: Sequence[float]
    seen_s: Sequence[float]

    @property
    def beyond_engine_s(self) -> float:
        """The client's time to first token, less the engine's."""
        return (self.seen_s[0] - self.sent_s) - (self.engine_s[0] - self.queued_s)


@dataclass(frozen=True)
class Load:
    """Requests to a server, what became of them, and CPU seconds that threads took for them.

    messages     to clients; 0: answers were not streamed
    server_s     of the event loop's thread; tokeniser_s: of the server's other threads
    client_s     of the client's thread; NaN: not counted
    """

    requests: int
    prompt_tokens: int
    steps: int
    tokens: int
    messages: int
    server_s: float
    tokeniser_s: float
    client_s: float


def fit_front_end(
    loads: Sequence[Load], exchanges: Sequence[Exchange], name: str, source: str = ""
) -> FrontEnd:
    """The terms, of a host whose factor is 1. ValueError if all prompts of `exchanges` are as long.

    Latencies are what single requests usually take on top of their jobs on threads. A chat's
    template and the launch of a step are the published ones. So are the shares of a request's work
    after tokenising, and of a prompt token's after the engine. `fit_error` is of each half of the
    exchanges as the other half predicts it.
    """
    threads = fit_threads(loads)
    service = service_of(threads, Serving())
    once_s = service.client_request_s + service.accept_s + service.submit_s
    back_s = service.step_s + service.token_s + 0.5 * (service.chunk_s + service.client_chunk_s)
    token_s = service.tokenise_s + service.prompt_token_s + service.detokenise_s
    if len({e.prompt_tokens for e in exchanges}) < 2:
        raise ValueError("all prompts have one length; the time of a token needs several")

    def on_top(some: Sequence[Exchange]) -> np.ndarray:
        """Seconds: a request, a token of its prompt, its response."""
        lengths, beyond = _usual(some, [e.beyond_engine_s for e in some])
        more = beyond - once_s - back_s - token_s * lengths
        slope = max(float(np.polyfit(lengths, more, 1)[0]), 0.0)
        both_s = max(float(np.median(more - slope * lengths)), 0.0)
        lengths, back = _usual(some, [e.seen_s[0] - e.engine_s[0] for e in some])
        back -= service.detokenise_s * lengths
        response_s = min(max(float(back[0]) - back_s, 0.0), both_s)
        return np.array([both_s - response_s, slope, response_s])

    def error(terms: np.ndarray, some: Sequence[Exchange]) -> float:
        lengths, beyond = _usual(some, [e.beyond_engine_s for e in some])
        fitted = terms[0] + once_s + terms[2] + back_s + (terms[1] + token_s) * lengths
        return float((np.abs(fitted - beyond) / beyond).mean())

    request_s, prompt_token_s, response_s = on_top(exchanges).tolist()
    first, second = exchanges[: len(exchanges) // 2], exchanges[len(exchanges) // 2 :]
    errors = [error(on_top(a), b) for a, b in ((first, second), (second, first))]
    return FrontEnd(
        name, request_s, prompt_token_s, response_s, source, float(np.mean(errors)), threads
    )


def fit_threads(loads: Sequence[Load]) -> Threads:
    """Service times by regression of CPU times on counts, none below 0, errors relative. A thread's
    first request takes as long as the others: warm the server up before."""
    requests, prompts, tokens, messages = (
        _column(loads, name) for name in ("requests", "prompt_tokens", "tokens", "messages")
    )
    server = [requests, prompts, _column(loads, "steps"), tokens, messages]
    request_s, prompt_token_s, step_s, token_s, chunk_s = _solve(server, _column(loads, "server_s"))
    _, tokenise_s = _solve([requests, prompts], _column(loads, "tokeniser_s"))
    seen = [load for load in loads if load.messages]
    columns = [_column(seen, name) for name in ("requests", "messages")]
    client_request_s, client_chunk_s = _solve(columns, _column(seen, "client_s"))
    before = _SHIPPED.accept_s / (_SHIPPED.accept_s + _SHIPPED.submit_s)
    engine = _SHIPPED.prompt_token_s / (_SHIPPED.prompt_token_s + _SHIPPED.detokenise_s)
    return replace(
        _SHIPPED, accept_s=before * request_s, submit_s=(1 - before) * request_s,
        prompt_token_s=engine * prompt_token_s, detokenise_s=(1 - engine) * prompt_token_s,
        tokenise_s=tokenise_s, step_s=step_s, token_s=token_s,
        chunk_s=chunk_s, client_request_s=client_request_s, client_chunk_s=client_chunk_s,
        host_factor=1.0,
    )  # fmt: skip


def server_seconds(threads: Threads, loads: Sequence[Load]) -> np.ndarray:
    """float64[n]: CPU seconds of the event loop's thread for each load, as the terms have it."""
    return (
        (threads.accept_s + threads.submit_s) * _column(loads, "requests")
        + (threads.prompt_token_s + threads.detokenise_s) * _column(loads, "prompt_tokens")
        + threads.step_s * _column(loads, "steps")
        + threads.token_s * _column(loads, "tokens")
        + threads.chunk_s * _column(loads, "messages")
    )


def host_factor(loads: Sequence[Load]) -> float:
    """CPU time of the event loop's thread over that of the published terms, for the same loads."""
    return float(_column(loads, "server_s").sum() / server_seconds(_SHIPPED, loads).sum())


def threads_error(loads: Sequence[Load]) -> float:
    """Mean absolute relative error of the event loop's CPU time, each half of the loads as the
    other half predicts it; they are in rounds of the same loads."""
    first, second = loads[: len(loads) // 2], loads[len(loads) // 2 :]
    errors = [
        np.abs(server_seconds(fit_threads(a), b) / _column(b, "server_s") - 1.0)
        for a, b in ((first, second), (second, first))
    ]
    return float(np.concatenate(errors).mean())


def bunched(exchanges: Sequence[Exchange]) -> float:
    """Return the share of answers that reached their client in less than half the time in which the
    engine made them. Their tokens waited for each other on the way, the first one longest."""
    spans = np.array(
        [(e.seen_s[-1] - e.seen_s[0], e.engine_s[-1] - e.engine_s[0]) for e in exchanges]
    )
    return float((spans[:, 0] < 0.5 * spans[:, 1]).mean())


def _column(loads: Sequence[Load], name: str) -> np.ndarray:
    return np.array([getattr(load, name) for load in loads], float)


def _solve(columns: list[np.ndarray], seconds: np.ndarray) -> list[float]:
    """Non-negative factors of columns (float64[n] each) whose sum is nearest to seconds
    (float64[n]), relative to these."""
    found, _ = nnls(np.stack(columns, axis=1) / seconds[:, None], np.ones(len(seconds)))
    return found.tolist()


def _usual(exchanges: Sequence[Exchange], values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Prompt lengths, and the lower quartile of each one's values: other programs of the host only
    make it take longer."""
    lengths, found = np.array([e.prompt_tokens for e in exchanges]), np.array(values)
    distinct = np.unique(lengths)
    return distinct, np.array([np.percentile(found[lengths == n], 25) for n in distinct])
