"""Runs a front until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable

from twinserve.backends.live.route.front import Front
from twinserve.backends.live.route.settings import RouteSettings, model_of, router_of
from twinserve.backends.live.serving.clients import read_clients
from twinserve.sim.setup.config import SettingsError


def serve(settings: RouteSettings) -> int:
    """Until SIGTERM or SIGINT; requests that are under way may then end, a second signal ends them.
    Returns how many did not end. Raises SettingsError, RegistryError, and OSError where it cannot
    listen."""
    router_of(
        settings.router, bool(settings.kv_events), settings.profile
    )  # what is wrong is said before anything starts
    model_of(settings.profile)
    read_clients(settings.clients)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    return asyncio.run(until_told(settings, lambda url: print(f"listening on {url}", flush=True)))


async def until_told(settings: RouteSettings, listening: Callable[[str], None]) -> int:
    told, again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hear() -> None:
        (again if told.is_set() else told).set()

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, hear)
    front = Front(settings)
    try:
        try:
            port = await front.start()
        except socket.gaierror as error:
            why = f"--host {settings.host}: {error.strerror}; give an address of this machine"
            raise SettingsError(why) from None
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        listening(f"http://{host}:{port}")
        await told.wait()
        drained = asyncio.create_task(front.drain())
        stopped = asyncio.create_task(again.wait())
        await asyncio.wait((drained, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return drained.result() if drained.done() else front.under_way
    finally:
        await front.stop()
