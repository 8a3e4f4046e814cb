"""What starts a plan: the command lines of its servers, a script with the router before them, and
files of other tools."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from twinserve.sim.plan.commands import FIRST_PORT, serve_arguments
from twinserve.sim.plan.decision import decide
from twinserve.sim.plan.emit import FILES, emitted
from twinserve.sim.plan.planner import Plan, Row
from twinserve.sim.setup.config import SettingsError

GPUS_OF_A_HOST = 8  # as an HGX board has


def placed(commands: Sequence[str], tp: int) -> list[tuple[int, str]]:
    """(host, command with its GPUs named) of each replica's command: as many on a host as its GPUs
    allow."""
    each = max(GPUS_OF_A_HOST // tp, 1)
    found = []
    for i, line in enumerate(commands):
        first = i % each * tp
        gpus = ",".join(str(gpu) for gpu in range(first, first + tp))
        found.append((i // each, f"CUDA_VISIBLE_DEVICES={gpus} {line}"))
    return found


def start_script(commands: Sequence[str], tp: int, router: str) -> str:
    """For `sh start.sh N` on host N, and `sh start.sh router HOST ...` where the router runs."""
    servers = placed(commands, tp)
    hosts = servers[-1][0] + 1
    lines = [
        "#!/bin/sh",
        f"# The servers of a plan: {len(servers)} on {hosts} host(s) of {GPUS_OF_A_HOST} GPUs.",
        "#   sh start.sh 0               the servers of host 0; of host 1, ...",
        "#   sh start.sh router HOST...  the router that the plan assumes, with the hosts in order",
        "set -e",
        'case "${1:-0}" in',
    ]
    for host in range(hosts):
        lines += [f"{host})", *(f"  {line} &" for at, line in servers if at == host), "  wait ;;"]
    words = ["twinserve", "route", "--router", router]
    lines += ["router)", "  shift"]
    for host in range(hosts):
        ports = [FIRST_PORT + i for i, (at, _) in enumerate(servers) if at == host]
        named = f"${{{host + 1}:-127.0.0.1}}"
        lines.append(f"  h{host}={named}")
        words += [f"--worker=http://$h{host}:{port}" for port in ports]
    safe = [word if "$h" in word else shlex.quote(word) for word in words]
    return "\n".join([*lines, f"  {' '.join(safe)} ;;", "esac", ""])


def commands(plan: Plan, row: Row, replicas: int | None = None) -> list[str]:
    """One a replica, with its GPUs. replicas: instead of the row's."""
    return [line for _, line in placed(_served(plan, row, replicas), row.candidate.tp)]


def script(plan: Plan) -> str | None:
    """start.sh; None: nothing is to be bought."""
    found = decide(plan)
    if found is None:
        return None
    row, n = found[0].row, found[0].replicas
    return start_script(_served(plan, row, n), row.candidate.tp, row.candidate.router)


def _served(plan: Plan, row: Row, replicas: int | None = None) -> list[str]:
    count = replicas or row.replicas or 0
    return [shlex.join(started(plan, row, i)) for i in range(count)]


def started(plan: Plan, row: Row, index: int) -> list[str]:
    """The words that start replica `index`."""
    ttft, tpot = (
        next((o.bound_s for o in plan.objectives if o.metric == metric), None)
        for metric in ("ttft", "tpot")
    )
    return serve_arguments(row.candidate, index, (ttft, tpot), plan.longest)


def emitted_file(kind: str, plan: Plan) -> tuple[str, str]:
    """Name and content of the file of `kind` that starts what is to be bought. Raises SettingsError
    where nothing is."""
    found = decide(plan)
    if found is None:
        raise SettingsError(f"--emit {kind}: nothing in this plan keeps the objectives; drop it")
    row, n = found[0].row, found[0].replicas
    return FILES[kind], emitted(kind, row.candidate, n, started(plan, row, 0))
