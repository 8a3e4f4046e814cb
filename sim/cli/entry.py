"""Start the commands, so that Ctrl-C ends in one line from the first import on."""

import os
import sys

INTERRUPTED = 130  # exit code of a shell's command that Ctrl-C ended


def twinserve() -> None:
    """The command `twinserve`."""
    _run("main")


def simulate() -> None:
    """The command `simulate`, short for `twinserve simulate`."""
    try:
        _run("simulate_main")
    except SystemExit as end:
        if end.code:
            raise
    _leave()


def _run(name: str) -> None:
    # Columns of millions of steps come and go: huge pages would be filled with zeros each time.
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    one_run = name == "simulate_main"
    if one_run:  # nothing of a simulation is worth BLAS's threads
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # else pydantic reads what every installed package registers
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from twinserve.sim.engine.garbage import collect_seldom

        collect_seldom(one_run)  # imports make many objects, and all of them stay
        from twinserve.sim.cli import main

        command = getattr(main, name)
    except KeyboardInterrupt:
        print("error: interrupted before anything was done", file=sys.stderr)
        sys.exit(INTERRUPTED)
    command()


def _leave() -> None:
    """End the process, with code 0, as Python does, but for taking a run's million objects apart.
    Only if nothing is lost: no thread is left, and what was printed has been written."""
    import atexit
    import threading

    if threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader has gone: Python's own exit says so
        return
    os._exit(0)
