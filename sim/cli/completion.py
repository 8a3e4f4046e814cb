"""`twinserve completion`: what a shell needs to complete commands and options."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a shell script that completes twinserve and simulate: commands, options, choices,
    files.

    For example:

    $ eval "$(twinserve completion bash)"
    $ twinserve completion fish > ~/.config/fish/completions/twinserve.fish

    Args:
        shell: The shell that the script is for. A line `eval "$(twinserve completion bash)"` in
            ~/.bashrc, or the same with zsh in ~/.zshrc below `compinit`, keeps it.
    """
    from twinserve.sim.cli.main import simulate_app, twinserve_app

    for app in (twinserve_app(), simulate_app()):
        name = app.name[0]
        with _names():
            script = app.generate_completion(prog_name=name, shell=shell)
        sys.stdout.write(_or_files(script, shell))
        if shell == "zsh":  # the script is one to be found in $fpath, and a file there has one name
            sys.stdout.write(f"compdef _cyclopts_{name} {name}\n{_NAME_OR_FILE}")


# of zsh: what stands after the options of `compadd` are names
_NAME_OR_FILE = "_twinserve_name() { compadd -- $@; _files }\n"
_OPTIONS = "policy|router|profile|trace"


def _or_files(script: str, shell: str) -> str:
    """A policy, router, profile or trace may be a file: shells complete files and names."""
    if shell == "fish":
        return re.sub(rf"(-l (?:{_OPTIONS})) -x ", r"\1 -r -F ", script)
    if shell == "zsh":
        return re.sub(rf"(:(?:{_OPTIONS}):)\((.*)\)\"", r'\1 _twinserve_name \2"', script)
    return script.replace("complete -F", "complete -o default -F")


@contextmanager
def _names() -> Iterator[None]:
    """Options that take a name have all names as choices."""
    from cyclopts.argument import Argument

    from twinserve.policies.registry import ledger_names, policy_names
    from twinserve.profiles.names import list_profiles
    from twinserve.sim.fleet.routers.registry import router_names
    from twinserve.traces.catalog import BY_NAME

    known = {
        "--policy": policy_names(),
        "--kv": ledger_names(),
        "--router": router_names(),
        "--profile": list_profiles(),
        "--trace": list(BY_NAME),
    }
    of_type = Argument.get_choices

    def choices(argument: Argument, force: bool = False) -> tuple[str, ...] | None:
        return tuple(known.get(argument.names[0], ())) or of_type(argument, force)

    Argument.get_choices = choices  # type: ignore[method-assign]
    try:
        yield
    finally:
        Argument.get_choices = of_type  # type: ignore[method-assign]
