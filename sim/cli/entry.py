"""Where the console commands begin. Nothing but Python itself has loaded here, so that Ctrl-C ends
in one line from the first import on."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # exit code of a shell's command that Ctrl-C ended


def twinserve() -> None:
    """The command `twinserve`."""
    _run("main")


def simulate() -> None:
    """The command `simulate`, short for `twinserve simulate`."""
    _run("simulate_main")


def _run(name: str) -> None:
    try:
        from twinserve.sim.engine.garbage import collected_seldom

        with collected_seldom():  # imports make many objects, and all of them stay
            from twinserve.sim.cli import main

            command = getattr(main, name)
    except KeyboardInterrupt:
        print("error: interrupted before anything was done", file=sys.stderr)
        sys.exit(INTERRUPTED)
    with collected_seldom():  # a command imports more
        command()
