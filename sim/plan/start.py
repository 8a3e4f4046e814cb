"""A script that starts what a plan says: the servers of each host, and the router before them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from twinserve.sim.plan.commands import FIRST_PORT

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
