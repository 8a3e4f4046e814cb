"""What an operator does, from end to end, on a live server: measure it with its own benchmark,
calibrate from those files, and hold what is then predicted and planned against the server again.
`python -m twinserve.experiments.from_serving predict`, and `... plan`. The server is `vllm serve`
of the model `small` on the CPU engine; docs/calibrate.md and docs/plan.md have the results."""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cyclopts
import pandas as pd

from twinserve.backends.live.versions import installed_vllm
from twinserve.experiments.benchmark.measure import machine
from twinserve.experiments.benchmark.tables import machine_lines
from twinserve.sim.cli.main import run_app
from twinserve.sim.setup.config import SettingsError

SHARES = (0.8, 1.25)  # of the limit
_SHARES = ("error", "spread")


def predict(*, repeats: int = 3, out: Path | None = None) -> None:
    """Another load, predicted from the benchmark file of one load.

    Parameters
    ----------
    repeats: int
        Times that both loads are measured, by turns.
    out: Path
        New folder for all files; by default they are not kept.
    """
    from twinserve.experiments.from_serving import predict as work  # vLLM comes along

    with _folder(repeats, out) as (folder, say):
        rows = work.predict(folder, repeats, say)
    shares = work.errors(rows)
    shares = shares.assign(**{name: shares[name].map("{:+.1%}".format) for name in _SHARES})
    _show(rows, shares)


def plan(*, repeats: int = 3, requests: int = 600, out: Path | None = None) -> None:
    """What one replica keeps by a plan, and the planned server at 0.8 and 1.25 of that.

    Parameters
    ----------
    repeats: int
        Runs at each of the two rates, by turns.
    requests: int
        Of the trace that is planned for, and sent.
    out: Path
        New folder for all files; by default they are not kept.
    """
    from twinserve.experiments.from_serving import limit as work  # vLLM comes along

    if requests < 20:
        raise SettingsError(f"--requests {requests}: give 20 or more, for a 90th percentile")
    with _folder(repeats, out) as (folder, say):
        found, rows = work.planned(folder, requests, SHARES, repeats, say)
    print(f"one replica keeps {work.SLO} up to {found.rate_rps:.3g} requests/s, by the plan")
    print(f"vllm serve small {' '.join(found.arguments)}")
    _show(rows)


@contextmanager
def _folder(repeats: int, out: Path | None):
    if repeats < 1:
        raise SettingsError(f"--repeats {repeats}: give 1 or more")
    if out is not None and out.exists():
        raise SettingsError(f"--out {out}: is there already; name a new folder")
    installed_vllm()  # before anything is written
    say = partial(print, file=sys.stderr, flush=True)
    if out is not None:
        out.mkdir(parents=True)
        yield out, say
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), say


def _show(*tables: pd.DataFrame) -> None:
    print("\n".join([*machine_lines({**machine(), "core": None}), f"vLLM {installed_vllm()}"]))
    for table in tables:
        print(table.to_string(index=False, float_format="{:.4g}".format))


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="from_serving", help=__doc__, version_flags=[])
    app.command(predict)
    app.command(plan)
    run_app(app, arguments)
