"""Clients on the server's own machine, and vLLM's own client in this process."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from twinserve.backends.live.serving.process import ServerProcess


def bench(server: ServerProcess, out: Path, load: dict, seed: int, *further: str) -> Path:
    """`vllm bench serve` with the flags of `load` on a server that is up: its result file, with
    details. It runs in this process: its imports take longer than a short load."""
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    words = ["--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"]
    words += ["--model", server.name, "--tokenizer", str(server.model), "--ignore-eos"]
    words += ["--disable-tqdm", "--seed", str(seed), "--save-result", "--save-detailed"]
    words += ["--result-dir", str(out.parent), "--result-filename", out.name, *further]
    for name, value in load.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), ahead_of_others():
        serve.main(parser.parse_args(words))
    return out


@contextmanager
def ahead_of_others() -> Iterator[bool]:
    """Run this thread before the ordinary programs of its host. Returns True if the host allows
    that (Linux, root or CAP_SYS_NICE), else nothing changes.

    Otherwise a client wakes late if a server keeps its processors busy. It then reads in one piece
    tokens that the server sent one by one (docs/calibrate.md). Processes that are started meanwhile
    are ordinary ones. A client that computes all the time would hold up everything else.
    """
    if not hasattr(os, "sched_getscheduler"):  # not Linux
        yield False
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    if not keep_ahead():
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)


def keep_ahead() -> bool:
    """The same for good, as for a thread of a pool; False if the host does not allow it."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):  # not Linux; not allowed
        return False
    return True
