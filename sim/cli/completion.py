"""`twinserve completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that lets a shell complete twinserve and simulate: commands, options, choices,
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
        with _names(files_too=shell == "bash"):
            script = app.generate_completion(prog_name=name, shell=shell)
        # where no name fits, bash takes files: a policy, router or trace may be one
        sys.stdout.write(script.replace("complete -F", "complete -o default -F"))
        if shell == "zsh":  # the script is one to be found in $fpath, and a file there has one name
            sys.stdout.write(f"compdef _cyclopts_{name} {name}\n")


@contextmanager
def _names(files_too: bool) -> Iterator[None]:
    """Options that take a name have all names as choices. files_too: the shell completes files,
    too, so that names of traces do not hide them."""
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
        "--trace": list(BY_NAME) if files_too else [],
    }
    of_type = Argument.get_choices

    def choices(argument: Argument, force: bool = False) -> tuple[str, ...] | None:
        return tuple(known.get(argument.names[0], ())) or of_type(argument, force)

    Argument.get_choices = choices  # type: ignore[method-assign]
    try:
        yield
    finally:
        Argument.get_choices = of_type  # type: ignore[method-assign]
