"""`twinserve completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import sys
from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that lets a shell complete twinserve and simulate: commands, options, choices,
    files.

    For example:

    $ eval "$(twinserve completion bash)"
    $ twinserve completion fish > ~/.config/fish/completions/twinserve.fish

    Parameters
    ----------
    shell: Literal["bash", "zsh", "fish"]
        The shell that the script is for. A line `eval "$(twinserve completion bash)"` in ~/.bashrc,
        or the same with zsh in ~/.zshrc below `compinit`, keeps it.
    """
    from twinserve.sim.cli.main import simulate_app, twinserve_app

    for app in (twinserve_app(), simulate_app()):
        name = app.name[0]
        sys.stdout.write(app.generate_completion(prog_name=name, shell=shell))
        if shell == "zsh":  # the script is one to be found in $fpath, and a file there has one name
            sys.stdout.write(f"compdef _cyclopts_{name} {name}\n")
