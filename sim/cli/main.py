"""The console commands: `simulate`, and `twinserve VERB`. Each verb has its own module; this one
joins them. Bad input ends as one line and a non-zero exit.

Verbs and their libraries load only when needed: a version or a page of help does not load numpy
(tests/sim/test_startup.py).
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from twinserve.errors import TwinserveError, worded
from twinserve.formats import DEEPEST, shipped_rows
from twinserve.sim.cli.entry import INTERRUPTED

if TYPE_CHECKING:
    import cyclopts
    from cyclopts.help import HelpPanel
    from pydantic import ValidationError
    from rich.console import Console, ConsoleOptions

_LIKE = 0.6  # of two words, for one to be a slip of the other

_ROWS = shipped_rows(__package__, "meant.csv")
_OPTIONS = [(r["name"], r["words"], r["how"]) for r in _ROWS if r["kind"] == "option"]
_COMMANDS = {r["name"]: r["words"] for r in _ROWS if r["kind"] == "command"}


def option_meant(word: str, known: Collection[str]) -> str:
    """Return a suggestion for an unknown option, `--qps=3` or `--qps`, as ` Did you mean --rate?`;
    empty if no option is near.

    known  the options that the command has
    """
    name = word.split("=", 1)[0].lstrip("-").replace("_", "-").lower()
    for option, words, how in _OPTIONS:
        if option in known and name in words.split():
            return f" Did you mean {option}{f' ({how})' if how else ''}?"
    if name == "title":
        how = " --plot title=TEXT names the plot;" if "--plot" in known else ""
        return f"{how} twinserve report has it, for the page."
    return _slip(f"--{name}", known)


def command_meant(word: str, known: Collection[str]) -> str:
    """Return a suggestion for an unknown command, as `option_meant`."""
    for command, words in _COMMANDS.items():
        if command in known and word.lower() in words.split():
            return f" Did you mean {command}?"
    return _slip(word, known)


def _slip(word: str, known: Collection[str]) -> str:
    """The word whose letters are nearest. Dashes before it are no likeness."""
    bare = {name.lstrip("-"): name for name in known if name.startswith("--") == (word[:2] == "--")}
    found = difflib.get_close_matches(word.lstrip("-"), list(bare), n=1, cutoff=_LIKE)
    return f" Did you mean {bare[found[0]]}?" if found else ""


def without_guess(line: str) -> str:
    """Return a parser's complaint without the parser's own suggestion."""
    return re.sub(r" Did you mean \S+\?.*$", "", line)


class Pages:
    """Cyclopts' help, with lines broken at the terminal's width, not the source's."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        from cyclopts.help import DefaultFormatter

        for entry in panel.entries:
            _flow(entry.description)
        DefaultFormatter()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, said: Any) -> None:
        from cyclopts.help import DefaultFormatter

        _flow(said)
        DefaultFormatter().render_description(console, options, said)


def _flow(said: Any) -> None:
    """A docstring's text, in place: one line a paragraph."""
    from rich.text import Text

    text = getattr(said, "primary_renderable", None)
    if isinstance(text, Text):
        paragraphs = re.split(r"\n\s*\n", text.plain)
        text.plain = "\n\n".join(map(_one_line, paragraphs))


def _one_line(paragraph: str) -> str:
    """Commands of an example keep theirs."""
    lines = [line.strip() for line in paragraph.strip().splitlines()]
    if all(line.startswith("$ ") for line in lines):
        return "\n".join(lines)
    return " ".join(paragraph.split())


BAD_INPUT, TERMINATED = 2, 143
TRACEBACK = "--traceback"
QUIET = ("-q", "--quiet")
_UNWRITTEN = "interrupted: results of unfinished runs were not written"
# verb -> module and function, and its line in the list of verbs
VERBS = {
    row["verb"]: (f"twinserve.{row['where']}", row["line"])
    for row in shipped_rows(__package__, "verbs.csv")
}


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C ends it in one line also while modules load, before there is an app to run."""

    @functools.wraps(command)
    def guarded(arguments: Sequence[str] | None = None) -> None:
        try:
            if arguments is None:  # a process of our own; a caller in Python keeps its handlers
                signal.signal(signal.SIGTERM, _terminate)
            command(arguments)
        except KeyboardInterrupt:
            _stop(_UNWRITTEN, INTERRUPTED)
        except _Terminated:
            _stop(_UNWRITTEN, TERMINATED)
        except Exception as error:
            # a signal that comes while pydantic's core builds a model ends as an error of its own
            if type(error).__name__ == "SchemaError":
                for cause, code in ((KeyboardInterrupt, INTERRUPTED), (_Terminated, TERMINATED)):
                    if f"{cause.__name__}:" in str(error):
                        _stop(_UNWRITTEN, code)
            raise

    return guarded


@_interruptible
def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `twinserve`."""
    given = _given(arguments)
    if given == ["--version"]:
        print(_version())
        return
    run_app(twinserve_app(given), arguments)


@_interruptible
def simulate_main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `simulate`, short for `twinserve simulate`."""
    if _given(arguments) == ["--version"]:
        print(_version())
        return
    run_app(simulate_app(), arguments)


def twinserve_app(given: Sequence[str] = ()) -> cyclopts.App:
    """Return `twinserve` with all its verbs; none of them is loaded.

    given  the words after `twinserve`: the verb that they name has its own help
    """
    import cyclopts

    app = cyclopts.App(
        name="twinserve",
        help="Scheduling and KV-cache policies for LLM serving, simulated.",
        version=_version,
        help_format="plaintext",
        help_formatter=Pages(),
    )
    for verb, (where, line) in VERBS.items():
        # a line of ours would replace the whole help of the verb that is called
        app.command(where, name=verb, help=None if verb in given[:1] else line)
    return app


def simulate_app() -> cyclopts.App:
    """`simulate`, short for `twinserve simulate`."""
    import cyclopts

    from twinserve.sim.cli.simulate import simulate

    app = cyclopts.App(
        name="simulate",
        help=simulate.__doc__,
        version=_version,
        help_format="plaintext",
        help_formatter=Pages(),
    )
    app.default(simulate)
    return app


def _given(arguments: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if arguments is None else arguments)


def _version() -> str:
    from importlib.metadata import version

    from twinserve.native import COMPILED

    kernels = "compiled kernels" if COMPILED else "kernels in plain Python"
    return f"{version('twinserve')}, {kernels}"


class _Terminated(BaseException):
    """SIGTERM, as an exception: what was written in part is then cleared away, as after Ctrl-C."""


def _terminate(*_) -> None:
    raise _Terminated


def run_app(
    app: cyclopts.App, arguments: Sequence[str] | None, interrupted: str = _UNWRITTEN
) -> None:
    """Run `app` on the arguments (None: those of the process), and end with SystemExit. Bad input
    is one line on stderr, or follows Python's frames with `--traceback`.

    interrupted  the message after Ctrl-C and SIGTERM
    """
    app.suppress_keyboard_interrupt = False  # Ctrl-C is ours to explain, below
    if arguments is None:  # a process of our own; a caller in Python keeps its handlers
        signal.signal(signal.SIGTERM, _terminate)
    words = _given(arguments)
    frames = TRACEBACK in words
    words = [word for word in words if word != TRACEBACK]
    try:
        _refuse_depth(words)
        _call(app, words)
        sys.stdout.flush()
    except KeyboardInterrupt as end:  # a command may say what is left of its work
        _stop(str(end).strip() or interrupted, INTERRUPTED)
    except _Terminated as end:
        _stop(str(end) or interrupted, TERMINATED)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        line = _what_is_wrong(error)
        if line is None or frames:
            raise
        _stop(line, BAD_INPUT)


def _call(app: cyclopts.App, words: list[str]) -> None:
    """--quiet is an option of every command: of those that have none it hides the progress."""
    try:
        app(words, exit_on_error=False, print_error=False)
    except Exception as error:
        silent = [word for word in words if word not in QUIET]
        if silent == words or not _is(error, "cyclopts:UnknownOptionError"):
            raise
        unknown = cast("cyclopts.UnknownOptionError", error).token
        if (unknown.keyword or unknown.value) not in QUIET:
            raise
        from twinserve.sim.cli import progress

        progress.SILENT = True
        try:
            app(silent, exit_on_error=False, print_error=False)
        finally:
            progress.SILENT = False


def _refuse_depth(arguments: Sequence[str]) -> None:
    """What begins with a bracket is read as JSON, and that comes to the end of the stack where
    brackets within brackets do not end. Raises SettingsError."""
    for word in arguments:
        depth = deepest = 0
        for sign in re.findall(r"[\[{}\]]", word):
            depth += 1 if sign in "[{" else -1
            deepest = max(deepest, depth)
        if deepest > DEEPEST:
            from twinserve.sim.setup.config import SettingsError

            raise SettingsError(f"{word[:40]}...: more than {DEEPEST} nested brackets; write fewer")


def _stop(line: str, code: int) -> None:
    print(f"error: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(code)


def _what_is_wrong(error: Exception) -> str | None:
    """With the input, in a line; None if the error is a defect of ours."""
    if _is(error, "cyclopts:CycloptsError"):
        return _usage(error)
    if not isinstance(error, TwinserveError):
        from twinserve.own_code import fault

        if line := fault(error):
            return f"{line} ({TRACEBACK} shows how it was called)"
    if _is(error, "pydantic:ValidationError"):
        return _settings_line(error)
    if isinstance(error, TwinserveError):
        return worded(error)
    if isinstance(error, (MemoryError, OverflowError)):
        why = str(error).strip() or "out of memory"
        return f"a setting is too large for this machine: {why}; choose a smaller one"
    if isinstance(error, ImportError) and re.search("failed to map|allocate memory", str(error)):
        return f"out of memory while loading modules ({worded(error)[-120:]}); end other programs"
    if isinstance(error, OSError):
        why = (error.strerror or "").strip() or worded(error)
        return f"{error.filename or 'the system'}: {why}"
    return None


def _is(error: object, name: str) -> bool:
    """Whether it is of the class "module:class". Loads nothing."""
    module, _, kind = name.partition(":")
    return module in sys.modules and isinstance(error, getattr(sys.modules[module], kind, ()))


def _usage(error: Exception) -> str:
    """A parser's complaint as one line."""
    if _is(error.__cause__, "pydantic:ValidationError"):
        return _settings_line(error.__cause__)

    line = re.sub(r"[\u2500-\u257f]+", " ", worded(error)).strip()
    if _is(error, "cyclopts:RepeatArgumentError"):
        option = cast("cyclopts.RepeatArgumentError", error).token.keyword
        line = f"{option} is given twice; several values are compared by twinserve sweep --grid"
    elif _is(error, "cyclopts:UnknownOptionError"):
        unknown = cast("cyclopts.UnknownOptionError", error)
        known = {name for one in unknown.argument_collection if one.parse for name in one.names}
        token = unknown.token.keyword or unknown.token.value
        line = without_guess(line) + option_meant(token, known)
    elif _is(error, "cyclopts:UnknownCommandError"):
        wrong = cast("cyclopts.UnknownCommandError", error)
        if not wrong.command_chain and wrong.unused_tokens:
            word = wrong.unused_tokens[0]
            meant = command_meant(word, VERBS)
            line = f"Unknown command {word}.{meant} There are {', '.join(VERBS)}"
    return f"{line} (see --help)"


def _settings_line(error: object) -> str:
    from twinserve.sim.setup.config import settings_line

    return settings_line(cast("ValidationError", error))


if __name__ == "__main__":
    main()
