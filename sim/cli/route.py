"""`twinserve route`: a router that was simulated, in front of real servers."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twinserve.sim.cli.options import Flag, Whole

_Endpoints = Annotated[list[str] | None, Parameter(negative="")]
_Workers = Annotated[list[str] | None, Parameter(name=["--worker", "-w"], negative="")]


def route(
    *,
    worker: _Workers = None,
    router: Annotated[str, Parameter(name=["--router", "-r"])] = "least-requests",
    host: str = "127.0.0.1",
    port: Whole = 8080,
    poll: float | None = None,
    health_interval: float = 1.0,
    health_timeout: float = 2.0,
    misses: Whole = 3,
    back_off: float = 60.0,
    retries: Whole = 2,
    no_migration: Flag = False,
    max_in_flight: Whole = 1024,
    queue: Whole = 1024,
    queue_timeout: float = 30.0,
    connections: Whole = 4096,
    body_bytes: Whole = 8 * 2**20,
    header_bytes: Whole = 8190,
    body_timeout: float = 30.0,
    idle_timeout: float = 75.0,
    write_timeout: float = 60.0,
    drain: float = 60.0,
    session_header: str = "X-Session-Id",
    session_expiry: float = 3600.0,
    clients: str | None = None,
    kv_events: _Endpoints = None,
    profile: str | None = None,
    record: Path | None = None,
    overwrite: Flag = False,
) -> None:
    """Send requests of OpenAI's API to vLLM servers as a simulated router would.

    The command runs until SIGTERM or Ctrl-C. Then requests under way end, and new ones are refused.

    Args:
        worker: http://HOST:PORT of a `vllm serve`; may be repeated.
        router: As of simulate, options after a colon: `vllm-dp`, `llm-d:prefix=5`, FILE.py:Class.
        host: Where to listen.
        port: Where to listen; 0: any free one.
        poll: Seconds between polls of a worker's /metrics; by default the router's `interval`, or
            0.5.
        health_interval: Seconds between checks of a worker's /health.
        health_timeout: Seconds that a check, or a poll, may take.
        misses: Failed checks in a row after which a worker is down.
        back_off: Longest time in seconds for which a worker that fails repeatedly gets no requests.
        retries: How often a request is sent again when a worker loses it.
        no_migration: Do not continue a streamed answer on another worker if its worker fails.
        max_in_flight: Requests at workers at once; more of them wait.
        queue: Requests that may wait; more get 429, best-effort ones first.
        queue_timeout: Seconds that a request may wait; then it gets 503.
        connections: Connections of clients at once; more get 503.
        body_bytes: Longest body of a request.
        header_bytes: Longest request line, and longest header.
        body_timeout: Seconds within which a request's body must arrive.
        idle_timeout: Seconds after which a connection without a whole request is closed.
        write_timeout: Seconds after which a client that reads nothing of its answer is
            disconnected.
        drain: Seconds that requests may take to end after SIGTERM.
        session_header: Requests with the same value of this header are one session.
        session_expiry: Seconds for which a session without requests is remembered.
        clients: The servers' file of clients, or trusted: how far claims about requests are
            believed.
        kv_events: tcp://HOST:PORT[,tcp://HOST:PORT] at which a worker publishes KV events, and
            replays them. One for each worker, or one with the host * for all.
        profile: Profile of the workers, for routers that predict step times: a name, or a .json
            file.
        record: Write all signals, requests and picks of the router to this .jsonl.gz file, at the
            end.
        overwrite: Replace an existing record.
    """
    given = locals() | {"migrate": not no_migration, "kv_events": kv_events or []}
    del given["no_migration"], given["overwrite"]
    from twinserve.backends.live.route.settings import RouteSettings, require_libraries
    from twinserve.sim.setup.config import SettingsError

    if not worker:
        raise SettingsError("give the servers: --worker http://HOST:PORT for each")
    if record is not None and record.is_dir():
        raise SettingsError(f"--record {record}: is a folder; name a file")
    if record is not None and record.exists() and not overwrite:
        raise SettingsError(
            f"--record {record}: exists already; name another file, or add --overwrite"
        )
    settings = RouteSettings(**given)
    require_libraries(events=bool(kv_events))
    from twinserve.backends.live.route.front import serve

    left = serve(settings)
    if left:
        print(f"error: route stopped before {left} requests had ended", file=sys.stderr)
        sys.exit(1)
