"""The console commands: `simulate`, and `twinserve VERB`. Each verb lives in its own module; here
they are joined, and whatever is wrong with the input ends as one line and a non-zero exit."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence

import cyclopts
from pydantic import ValidationError

from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.errors import PolicyError
from twinserve.policies.registry import RegistryError
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.calibrate import calibrate
from twinserve.sim.cli.live import replay
from twinserve.sim.cli.profiles import profiles_app
from twinserve.sim.cli.report import report
from twinserve.sim.cli.simulate import simulate
from twinserve.sim.cli.sweep import sweep
from twinserve.sim.cli.trace import trace_app
from twinserve.sim.cli.validate import validate
from twinserve.sim.engine.loop import NoProgressError
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.metrics_goodput import GoodputError
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.workload import WorkloadError

BAD_INPUT, INTERRUPTED, TERMINATED = 2, 130, 143
_UNWRITTEN = "interrupted: results of unfinished runs were not written"
_EXPECTED = (
    WorkloadError,
    ProfileError,
    PolicyError,
    RegistryError,
    SettingsError,
    GoodputError,
    ResultsError,
    NoProgressError,
    LiveEngineError,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `twinserve`."""
    app = cyclopts.App(
        name="twinserve", help="Scheduling and KV-cache policies for LLM serving, simulated."
    )
    app.command(simulate, name="simulate")
    app.command(sweep, name="sweep")
    app.command(trace_app)
    app.command(profiles_app)
    app.command(report, name="report")
    app.command(replay, name="replay")
    app.command(calibrate, name="calibrate")
    app.command(validate, name="validate")
    run_app(app, arguments)


def simulate_main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `simulate`, short for `twinserve simulate`."""
    app = cyclopts.App(name="simulate", help=simulate.__doc__)
    app.default(simulate)
    run_app(app, arguments)


class _Terminated(BaseException):
    """SIGTERM, as an exception: what was written in part is then cleared away, as after Ctrl-C."""


def _terminate(*_) -> None:
    raise _Terminated


def run_app(
    app: cyclopts.App,
    arguments: Sequence[str] | None,
    interrupted: str = _UNWRITTEN,
    expected: Sequence[type[Exception]] = (),
) -> None:
    """Run `app` on the arguments (None: those of the process), and end with SystemExit: bad input
    as one line on stderr.

    interrupted  what is said after Ctrl-C and SIGTERM
    expected     further errors that are no defects
    """
    app.suppress_keyboard_interrupt = False  # Ctrl-C is ours to explain, below
    if arguments is None:  # a process of our own; a caller in Python keeps its handlers
        signal.signal(signal.SIGTERM, _terminate)
    try:
        app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except cyclopts.CycloptsError as error:
        _stop(_usage(error), BAD_INPUT)
    except ValidationError as error:
        _stop(settings_line(error), BAD_INPUT)
    except (*_EXPECTED, *expected) as error:
        _stop(str(error), BAD_INPUT)
    except KeyboardInterrupt as end:  # a command may say what is left of its work
        _stop(str(end) or interrupted, INTERRUPTED)
    except _Terminated as end:
        _stop(str(end) or interrupted, TERMINATED)
    except (MemoryError, OverflowError) as error:
        _stop(
            f"a setting is too large for this machine: {error or 'out of memory'}; choose a "
            "smaller one",
            BAD_INPUT,
        )
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _stop(f"{error.filename or 'the system'}: {error.strerror or error}", BAD_INPUT)


def _stop(line: str, code: int) -> None:
    print(f"error: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(code)


def _usage(error: cyclopts.CycloptsError) -> str:
    """A parser's complaint as one line."""
    if isinstance(error.__cause__, ValidationError):
        return settings_line(error.__cause__)
    return re.sub(r"[\u2500-\u257f]+", " ", str(error)).strip() + " (see --help)"


def settings_line(error: ValidationError) -> str:
    """The first thing that a settings model found wrong, with the flag's name."""
    first = error.errors()[0]
    where = "".join(f"--{str(part).replace('_', '-')}" for part in first["loc"][:1])
    said = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = f" (given: {given!r})" if where and isinstance(given, (str, int, float)) else ""
    return f"{where}: {said}{shown}" if where else said


if __name__ == "__main__":
    main()
