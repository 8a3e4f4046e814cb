"""Runs whose every value is kept: requests, steps, gaps and summary of each policy, as digests in
golden.json.

    python -m tests.golden.golden_runs [POLICY ...]  # says which runs differ from the file
    python -m tests.golden.golden_runs --write       # a new file; say in the commit why
    python -m tests.golden.golden_runs --write POLICY ...  # these runs of the file anew

A digest covers the columns that the file lists, under the names they had when it was written
(RENAMED); a column that is added later is no difference. Bits of floats count, so the file holds
for one numpy; the processor makes no difference.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pandas as pd

from twinserve.policies.registry import ledger_names, parse_policy, policy_names
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.versions import RENAMED
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation

GOLDEN = Path(__file__).with_name("golden.json")
TABLES = ("requests", "steps", "gaps")
POLICIES = [
    *policy_names(), "vllm:scheduling=priority", "bros:chunk=64", "bros:chunk=fit", "bros:kv=paged",
    "echo:benefit=offline",
]  # fmt: skip


def crowded(policy: str, seed: int = 0, **changes) -> Inputs:
    """A crowd of short requests: sessions, prefixes, objectives, a closed loop, memory for a fifth
    of them."""
    config = CROWDED.model_copy(update=changes)
    return Inputs(config, crowd(seed), resolve_hardware(config), (parse_policy(policy),), ())


def traced(policy: str, **changes) -> Inputs:
    """A generated trace, or the embedded replica of a recorded one, wherever originals may be.
    `mooncake` at the load that it was given when the file was written."""
    with TemporaryDirectory() as nowhere, patch.dict(os.environ, TWINSERVE_CACHE=nowhere):
        os.environ.pop("TWINSERVE_TRACES", None)
        load = {"load": 0.7} if changes["trace"] == "mooncake" else {}
        return resolve(
            SimulationConfig(policy=(policy,), offline=True, **load, **PAPERS_ENGINE, **changes)
        )


def cases(policy: str) -> Iterator[tuple[str, Inputs]]:
    """The runs of one policy, by name."""
    for seed in (0, 7):
        yield f"crowd-{seed}", crowded(policy, seed)
        yield f"crowd-{seed}-exact", crowded(policy, seed, exact=True)
    spec = parse_policy(policy)
    if spec.policy.asynchronous:
        yield "crowd-async", crowded(policy, 3, async_scheduling=True)
        yield "crowd-async-exact", crowded(policy, 3, async_scheduling=True, exact=True)
    yield "crowd-replicas", crowded(policy, 5, replicas=3)
    yield "crowd-pcie", crowded(policy, 11, profile="qwen2.5-14b@a100-40g:tp2", estimator="paper")
    if spec.kv is None:
        for ledger in ledger_names():
            inputs = crowded(policy, 13)
            yield f"crowd-kv-{ledger}", replace(inputs, policies=(replace(spec, kv=ledger),))
    yield "apps", traced(policy, trace="apps", requests=120, seed=1, num_blocks=1200)
    yield (
        "mooncake",
        traced(
            policy,
            trace="mooncake",
            requests=50,
            seed=2,
            pool=6,
            num_blocks=2500,
            cap_length=12_000,
            max_num_batched_tokens=12_288,
        ),
    )
    yield (
        "mooncake-exact",
        traced(
            policy,
            trace="mooncake",
            requests=12,
            seed=4,
            num_blocks=600,
            cap_length=6_000,
            max_num_batched_tokens=6_144,
            exact=True,
        ),
    )
    yield (
        "longdoc",
        traced(
            policy,
            trace="longdoc:loogle-short",
            requests=40,
            seed=3,
            num_blocks=2000,
            cap_length=16_000,
            max_num_batched_tokens=16_384,
        ),
    )


def run(inputs: Inputs) -> tuple[RunRows, dict]:
    """Rows and summary of the one policy of `inputs`."""
    simulation = Simulation(inputs, inputs.policies[0])
    simulation.run()
    rows = simulation.rows()
    return rows, leaves(summarise(rows))


def leaves(found, path: str = "") -> dict[str, object]:
    """Path -> value of everything in a summary that is no object."""
    if not isinstance(found, dict):
        return {path: found}
    return {
        name: leaf
        for key, value in found.items()
        for name, leaf in leaves(value, f"{path}/{key}").items()
    }


def digest_of_frame(frame: pd.DataFrame, columns: list[str]) -> str:
    """Sixteen hex digits of the columns' values, bit for bit."""
    sha = hashlib.sha256(str(len(frame)).encode())
    for name in columns:
        values = frame[RENAMED.get(name, name)].to_numpy()
        sha.update(name.encode())
        sha.update(
            repr(values.tolist()).encode()
            if values.dtype == object
            else np.ascontiguousarray(values).tobytes()
        )
    return sha.hexdigest()[:16]


def digest_of_summary(summary: dict[str, object], names: list[str]) -> str:
    """Sixteen hex digits of the summary's leaves; `repr` of a float says all its bits."""
    said = [(name, repr(summary[name])) for name in names if name in summary]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def digests(inputs: Inputs, columns: dict[str, list[str]]) -> dict[str, object]:
    """What golden.json keeps of a run. columns: by table, and the leaves of a summary."""
    rows, summary = run(inputs)
    found: dict[str, object] = {
        table: digest_of_frame(getattr(rows, table), columns[table]) for table in TABLES
    }
    found["summary"] = digest_of_summary(summary, columns["summary"])
    return found | {"rows": [len(getattr(rows, table)) for table in TABLES]}


def differing(policy: str, golden: dict) -> list[str]:
    """Names of the policy's runs, with the tables, that are not as in the file; and runs that only
    one of both has."""
    kept, wrong = dict(golden["runs"][policy]), []
    for name, inputs in cases(policy):
        if name not in kept:
            wrong.append(f"{name}: not in the file")
            continue
        found, expected = digests(inputs, golden["columns"]), kept.pop(name)
        tables = [table for table in expected if expected[table] != found[table]]
        if tables:
            wrong.append(f"{name}: {', '.join(tables)}")
    return wrong + [f"{name}: only in the file" for name in kept]


def write() -> None:
    runs: dict = {}
    rows, _ = run(crowded("vllm"))
    columns = {table: list(getattr(rows, table).columns) for table in TABLES}
    every: dict[str, None] = {}
    for policy in POLICIES:  # first what a summary can hold, over all runs
        for _, inputs in cases(policy):
            every |= dict.fromkeys(run(inputs)[1])
    columns["summary"] = sorted(every)
    for policy in POLICIES:
        runs[policy] = {name: digests(inputs, columns) for name, inputs in cases(policy)}
    GOLDEN.write_text(
        dump({"columns": columns, "numpy": np.__version__, "runs": runs}), encoding="utf-8"
    )


def dump(golden: dict) -> str:
    """One line a run, so that a difference in the file names the run."""
    lines = [
        f'  "{policy}": {{\n'
        + ",\n".join(f'    "{n}": {json.dumps(r)}' for n, r in runs.items())
        + "\n  }"
        for policy, runs in golden["runs"].items()
    ]
    head = json.dumps({k: v for k, v in golden.items() if k != "runs"}, indent=1)
    return head[:-2] + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != "--write"]
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if "--write" not in sys.argv[1:]:
        for policy in named or POLICIES:
            print(policy, differing(policy, golden) or "same", flush=True)
    elif named:
        for policy in named:
            found = {name: digests(inputs, golden["columns"]) for name, inputs in cases(policy)}
            golden["runs"][policy] = found
        GOLDEN.write_text(dump(golden), encoding="utf-8")
    else:
        write()
