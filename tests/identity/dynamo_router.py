"""Dynamo's KV router in its own replay of a trace (`python -m dynamo.replay`), which logs the cost
of every candidate of every pick, and when requests got their first tokens and ended."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.identity.originals import python_with

BLOCK = 64
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COST = re.compile(
    r"Formula for worker_id=(?P<worker>\d+) dp_rank=0 with (?P<cached>[\d.]+) effective cached "
    r'blocks: (?P<cost>[\d.]+) = .*request_id="(?P<id>[^"]+)"'
)
_PICK = re.compile(r'Selected worker .*request_id="(?P<id>[^"]+)" worker_id=(?P<worker>\d+)')


@dataclass(frozen=True)
class Pick:
    """A request, in the order of picks.

    blocks  ids of its prompt's full blocks; tokens: of its prompt
    costs, cached  by worker: what the real router said, in blocks; worker: which got it
    sent_s, admitted_s, first_s, ended_s  when, in seconds
    """

    blocks: list[int]
    tokens: int
    costs: list[float]
    cached: list[float]
    worker: int
    sent_s: float
    admitted_s: float
    first_s: float
    ended_s: float


def trace(path: Path, requests: int, seed: int, texts: int = 8) -> Path:
    """Prompts that begin with up to 24 blocks of one of `texts` texts, about 50 a second."""
    rng = np.random.default_rng(seed)
    lines, now = [], 0
    for number in range(requests):
        shared = int(rng.integers(25))
        blocks = shared + int(rng.integers(1, 30))
        text, own = int(rng.integers(texts)) * 100, (100 + number) * 100
        now += int(rng.integers(1, 40))
        line = {
            "timestamp": now,
            "input_length": blocks * BLOCK - int(rng.integers(BLOCK)),
            "output_length": int(rng.integers(2, 120)),
            "hash_ids": [*range(text, text + shared), *range(own, own + blocks - shared)],
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


def replayed(file: Path, workers: int, num_blocks: int, **router: float) -> list[Pick]:
    """Dynamo's own replay of a trace. num_blocks: of each worker; router: settings of its own, as
    `overlap_score_credit`."""
    report = file.with_name("requests.jsonl")
    engine = {"block_size": BLOCK, "num_gpu_blocks": num_blocks, "max_num_seqs": 256}
    command = [
        python_with("dynamo.replay"), "-m", "dynamo.replay", str(file), "--replay-mode=offline",
        "--router-mode=kv_router", f"--num-workers={workers}", f"--trace-block-size={BLOCK}",
        f"--router-config={json.dumps(router)}", f"--extra-engine-args={json.dumps(engine)}",
        f"--report-jsonl={report}", f"--report-json={file.with_name('report.json')}",
    ]  # fmt: skip
    said = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "DYN_LOG": "debug"}
    )
    assert said.returncode == 0, said.stderr[-2000:]
    costs: dict[str, dict[int, tuple[float, float]]] = {}
    picks: dict[str, int] = {}
    for line in _COLOUR.sub("", said.stdout + said.stderr).splitlines():
        if found := _COST.search(line):
            of = costs.setdefault(found["id"], {})
            of[int(found["worker"])] = float(found["cost"]), float(found["cached"])
        elif found := _PICK.search(line):
            picks[found["id"]] = int(found["worker"])
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    rows = {row["uuid"]: row for row in rows}
    asked = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(picks) == len(rows) == len(asked)
    return [
        _pick(costs[name], worker, rows[name], line)  # arrivals differ, so picks are in their order
        for (name, worker), line in zip(picks.items(), asked, strict=True)
    ]


def _pick(costs: dict[int, tuple[float, float]], worker: int, row: dict, line: dict) -> Pick:
    assert row["input_length"] == line["input_length"]
    tokens = line["input_length"]
    said = [costs[i] for i in range(len(costs))]
    times = ("arrival_time_ms", "first_admit_ms", "first_token_ms", "terminal_time_ms")
    return Pick(
        line["hash_ids"][: tokens // BLOCK],
        tokens,
        [cost for cost, _ in said],
        [cached for _, cached in said],
        worker,
        *(row[name] / 1e3 for name in times),
    )
