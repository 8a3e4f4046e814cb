"""Print a command line that repeats a question, from the question's settings."""

import shlex
from collections.abc import Mapping

import numpy as np

# Settings that are switched off by a flag of their own. Any other one that is off has no flag.
SWITCHES = ("async_scheduling", "prefix_caching", "pcie_contention")
# Settings whose values follow one flag.
TUPLES = ("window",)


def command(verb: str, settings: Mapping[str, object], joined: tuple[str, ...] = ()) -> str:
    """Return `verb` with a flag for each of `settings`, quoted for a shell.

    settings  by the flag's name with `_` for `-`. None, an empty list and False give no flag (of
              SWITCHES: `--no-NAME`); a list repeats its flag, or gives it once if in `joined`
    """
    words = verb.split()
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else [f"--no-{flag[2:]}"] * (name in SWITCHES)
        elif isinstance(value, list | tuple) and name in TUPLES:
            words += [flag, *map(_text, value)]
        elif isinstance(value, list | tuple):
            texts = [",".join(map(_text, value))] if name in joined and value else map(_text, value)
            for text in texts:
                words += _given(flag, text)
        elif value is not None:
            words += _given(flag, _text(value))
    return shlex.join(words)


def _given(flag: str, text: str) -> list[str]:
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _text(value: object) -> str:
    return exact(value) if isinstance(value, float) else str(value)


def exact(value: float) -> str:
    """Return all digits of a number, without an exponent, which some flags refuse."""
    return np.format_float_positional(value, trim="-")
