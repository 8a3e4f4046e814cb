"""The same run again gives the same rows, to the last bit: from its export, in another process, on
a slow machine."""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.sim.harness import POLICIES, ROW_TABLES, hybrid, same_rows, simulate
from twinserve.sim.results.export import as_workload, export_requests
from twinserve.sim.results.files import POOL_GROUP, RunResult, RunRows, write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import run_policy
from twinserve.traces.load import load_trace
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.workload import Workload, WorkloadError

ROOT = Path(__file__).parents[2]
SETTINGS = {"blocks": 90, "host_blocks": 60}


def exported(workload: Workload, rows: RunRows, path):
    inputs = Inputs(config=None, workload=workload, hardware=None, policies=(), notices=())
    return export_requests(RunResult(rows), inputs.workload, path)


def run_and_replay(
    workload: Workload, tmp_path, policy="vllm", **settings
) -> tuple[RunRows, RunRows, Workload]:
    settings = {**SETTINGS, **settings}
    rows = simulate(workload, policy, audit=False, **settings).rows
    again = load_trace(exported(workload, rows, tmp_path / "again.jsonl"))
    return rows, simulate(again, policy, audit=False, **settings).rows, again


def without_objectives(workload: Workload) -> Workload:
    none = np.full(len(workload), np.nan)
    return replace(workload, slo_ttft_s=none, slo_tpot_s=none)


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(POLICIES, *SOME_POLICIES))
def test_a_replay_is_the_run(policy, tmp_path):
    """With everything in it: classes, objectives, prefixes, sessions with delays, applications, the
    pool."""
    workload = hybrid(0, 50, pool=6)
    rows, again, _ = run_and_replay(workload, tmp_path, policy)
    pooled = int((rows.requests.group == POOL_GROUP).sum())
    assert pooled > 6 if policy == "vllm" else pooled >= 6  # slow ones get one batch only
    assert rows.requests.slo_ttft_s.notna().any()
    same_rows(rows, again)


@pytest.mark.parametrize(
    "workload",
    [
        hybrid(1, 40, prefix_block=None, pool=5),
        hybrid(2, 40, pool=0),
        hybrid(3, 40, sessions=0, applications=0, pool=3, until_s=0.4),
        hybrid(4, 40, sessions=0, applications=0, prefix_block=None, pool=0, be_share=0.0),
        without_objectives(hybrid(5, 30, pool=4)),
    ],
    ids=["without prefixes", "without pool", "without groups", "plain", "without objectives"],
)
def test_a_replay_is_the_run_whatever_is_in_it(workload, tmp_path):
    rows, again, _ = run_and_replay(workload, tmp_path)
    same_rows(rows, again)


@pytest.mark.parametrize("policy", ["vllm", "bros"])
def test_a_replay_on_several_replicas_routes_the_pool_as_the_run_did(policy, tmp_path):
    rows, again, _ = run_and_replay(hybrid(6, 40, pool=7), tmp_path, policy, replicas=3)
    assert rows.requests[rows.requests.group == POOL_GROUP].replica.nunique() == 3
    same_rows(rows, again)


def test_what_is_exported_is_a_workload_and_exporting_it_again_changes_nothing(tmp_path):
    workload = hybrid(0, 40, pool=6)
    rows, again, loaded = run_and_replay(workload, tmp_path)
    result = RunResult(rows)
    listed = as_workload(result, workload)
    check_workload(listed)
    assert len(listed) == len(rows.requests) and listed.pool is None
    second = exported(loaded, again, tmp_path / "second.jsonl")
    assert second.read_bytes() == (tmp_path / "again.jsonl").read_bytes()


@pytest.mark.slow
def test_one_run_replayed_under_another_policy_keeps_its_requests(tmp_path):
    """The exported pool is a list: another policy gets those batches, no more and no less."""
    _, _, loaded = run_and_replay(hybrid(0, 40, pool=6), tmp_path)
    other = simulate(loaded, "bros", audit=False, **SETTINGS).requests
    assert sorted(other.request_id) == sorted(loaded.ids)
    assert other.finished.all()


def test_a_changed_line_changes_the_replay(tmp_path):
    """The comparison can fail: one token more in one request."""
    workload = hybrid(0, 40, pool=6)
    rows = simulate(workload, audit=False, **SETTINGS).rows
    path = exported(workload, rows, tmp_path / "again.jsonl")
    loaded = load_trace(path)
    output = loaded.output_tokens.copy()
    output[3] += 1
    other = simulate(replace(loaded, output_tokens=output), audit=False, **SETTINGS).rows
    assert not any(getattr(rows, t).equals(getattr(other, t)) for t in ROW_TABLES)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm", "bros"])
def test_a_run_from_settings_is_replayed_from_its_export(policy, tmp_path):
    """The whole way that the command goes, on a shipped profile, with its default objectives."""
    config = SimulationConfig(
        policy=(policy,), trace="sharegpt", rate=8.0, requests=40, pool=4, num_blocks=1500, seed=3
    )
    inputs = resolve(config)
    result = run_policy(inputs, inputs.policies[0])
    path = export_requests(result, inputs.workload, tmp_path / "again.jsonl")
    settings = {
        **config.model_dump(), "trace": str(path), "rate": None, "requests": None, "pool": 0,
    }  # fmt: skip
    again = resolve(SimulationConfig(**settings))
    assert again.notices == ()
    replayed = run_policy(again, again.policies[0])
    same_rows(result.rows, replayed.rows)
    assert result.summary == replayed.summary


def test_nowhere_to_write_is_one_line(tmp_path):
    workload = hybrid(0, 5, sessions=0, applications=0)
    rows = simulate(workload, audit=False).rows
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkloadError, match="cannot be written") as caught:
        exported(workload, rows, tmp_path / "file" / "again.jsonl")
    assert "\n" not in str(caught.value)


# -- determinism -----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(POLICIES, *SOME_POLICIES))
def test_the_same_seed_gives_the_same_rows(policy):
    one, again = (
        simulate(hybrid(0, 60, pool=6), policy, fast=False, recount=False, **SETTINGS)
        for _ in range(2)
    )
    same_rows(one.rows, again.rows)
    assert one.audits[0].decisions == again.audits[0].decisions


def file_hashes(policies: list[str], folder: Path) -> dict[str, str]:
    """sha256 of the parquet files of small runs, and `hash` of a text; called in another process
    too."""
    found = {"hash": str(hash("a text"))}
    for policy in policies:
        sim = simulate(hybrid(1, 60, pool=6), policy, replicas=2, audit=False, **SETTINGS)
        out = write_run(folder / re.sub(r"\W", "-", policy), RunResult(sim.rows))
        for path in sorted(out.glob("*.parquet")):
            found[f"{policy} {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies",
    [("vllm", "layerkv"), pytest.param(POLICIES, marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_the_same_bytes_in_another_process_with_another_hash_seed(policies, tmp_path):
    code = (
        "import sys, json, pathlib; from tests.sim import test_replay as t;"
        "print(json.dumps(t.file_hashes(sys.argv[2:], pathlib.Path(sys.argv[1]))))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "other"), *policies],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0
    here, there = file_hashes(policies, tmp_path / "here"), json.loads(run.stdout)
    assert here.pop("hash") != there.pop("hash")
    assert here == there and len(here) == 5 * len(policies)


FOLDERS = ("sim", "policies", "backends", "traces", "profiles", "experiments")
CLOCKS = {"time", "datetime"}
# Who may look at a wall clock: to time our own code, to draw a progress bar, or because a live
# engine is what they serve.
MAY_LOOK_AT_THE_CLOCK = {
    "sim/engine/loop.py",
    "sim/twin/live.py",
    "sim/cli/progress.py",
    "sim/twin/replay.py",
    "sim/setup/run.py",
    "experiments/study/points.py",
    "experiments/campaign/host.py",
    "experiments/campaign/runs.py",
    "experiments/campaign/setup.py",
    "experiments/benchmark/measure.py",
    "experiments/justitia/overhead.py",
    "backends/live/measure/replayed.py",
    "experiments/route/main.py",
    "experiments/serving/served.py",
    "backends/live/apart/connector.py",
    "backends/live/emulate/steps.py",
    "backends/live/engine/backend.py",
    "backends/live/route/front.py",
    "backends/live/route/relay.py",
    "backends/live/transfer/copy.py",
    "backends/live/route/tokens.py",
    "backends/live/measure/measure.py",
    "backends/live/measure/kept.py",
    "sim/twin/limit.py",
    "sim/twin/calibrate_traffic.py",  # of our own loop
    "backends/live/measure/bench.py",
    "backends/live/measure/front_end.py",
    "backends/live/measure/stamps.py",
    "backends/live/serving/process.py",
    "backends/live/measure/device.py",
    "backends/live/engine/scheduler.py",
    "backends/live/serving/scheduler.py",
    "backends/live/serving/decider.py",
    "backends/live/serving/stats.py",
}
SEEDED = {
    "default_rng", "Generator", "SeedSequence", "BitGenerator", "PCG64", "Philox", "RandomState",
}  # fmt: skip
GENERATORS = {"default_rng", "RandomState", "Random"}
# What a file may draw on all the same, and why.
UNSEEDED = {
    "backends/live/route/front.py": {"uuid"},  # names of real clients' requests
    "traces/anonymise.py": {"secrets"},  # a salt that nobody knows; a salt that is given seeds all
    "traces/generators/in_a_line.py": {"random"},  # random.Random(seed), as vLLM's client draws
}


def modules(tree: ast.AST) -> set[str]:
    """Modules that a source file imports, those of `from numpy import random` among them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def dotted(node: ast.AST) -> str:
    """`np.random.rand` of an expression; "" where it is not a plain dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def unseeded(tree: ast.AST) -> set[str]:
    """Uses of Python's hash and of randomness that no seed of ours governs."""
    found = {m for m in modules(tree) if m in ("random", "secrets", "uuid", "numpy.random")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name == "os.urandom" or (
                name.startswith(("np.random.", "numpy.random."))
                and name.split(".")[2] not in SEEDED
            ):
                found.add(name)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name == "hash":
                found.add("hash()")
            generator = name.rpartition(".")[2]
            if generator in GENERATORS and not node.args and not node.keywords:
                found.add(f"{generator}() without a seed")
    return found


def sources() -> dict[str, str]:
    paths = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    assert {p.relative_to(ROOT).parts[0] for p in paths} == set(FOLDERS) and len(paths) > 80
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in paths}


@pytest.mark.slow
def test_pythons_hash_and_global_randomness_are_not_used():
    found = {name: unseeded(ast.parse(text)) for name, text in sources().items()}
    assert {name: of_it for name, of_it in found.items() if of_it} == UNSEEDED


# A statement that imports a clock has both words on a line; most files need no parsing.
MAYBE_A_CLOCK = re.compile(
    r"\bimport\b(?:[^\n\\]|\\\n)*\btime\b|\bfrom\s*(?:\\\n\s*)*time\b|\bdatetime\b"
)


def looks_at_a_clock(text: str) -> bool:
    return bool(MAYBE_A_CLOCK.search(text) and modules(ast.parse(text)) & CLOCKS)


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "import os, time as t",
        "import os, \\\n    time",
        "from time import monotonic",
        "from time import (\n    monotonic,\n)",
        "from \\\n    time import sleep",
        "if True:\n    import datetime",
        "from datetime import datetime",
    ],
)
def test_a_clock_is_seen_however_it_is_imported(text):
    assert looks_at_a_clock(text)


@pytest.mark.parametrize("text", ["times = 1", "import timeit", "# import time", "x = 'time'"])
def test_other_words_are_no_clock(text):
    assert not looks_at_a_clock(text)


def test_decisions_and_hardware_know_no_wall_clock():
    looking = {name for name, text in sources().items() if looks_at_a_clock(text)}
    assert not looking - MAY_LOOK_AT_THE_CLOCK
    assert not [name for name in looking if name.startswith(("policies/", "profiles/", "traces/"))]


@pytest.mark.parametrize(
    "line",
    [
        "import random", "from random import choice", "import secrets", "x = np.random.rand(3)",
        "np.random.seed(0)", "from numpy.random import rand", "from numpy import random",
        "rng = np.random.default_rng()", "rng = np.random.RandomState()",
        "random.Random().shuffle(x)", "x = hash('a')", "x = os.urandom(8)",
    ],
)  # fmt: skip
def test_what_must_not_be_used_would_be_seen(line):
    assert unseeded(ast.parse(line))


def test_what_may_be_used_is_not_objected_to():
    fine = (
        "rng = np.random.default_rng(np.random.SeedSequence(1)); import hashlib; x: "
        "np.random.Generator"
    )
    assert not unseeded(ast.parse(fine))
    for line in (
        "import time",
        "from time import sleep",
        "import datetime",
        "from datetime import datetime",
    ):
        assert modules(ast.parse(line)) & CLOCKS
    assert not modules(ast.parse("from . import time\nfrom .clock import Clock")) & CLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("fast", mostly_nightly([True, False], True))
def test_wall_clock_does_not_reach_the_rows(monkeypatch, fast):
    """A machine on which every look at the clock is an hour later gives the same rows."""
    workload, settings = hybrid(0, 60, pool=6), {**SETTINGS, "fast": fast, "recount": False}
    plain = simulate(workload, "bros", **settings)
    hours = iter(range(10**9))
    for clock in ("perf_counter", "time", "monotonic"):
        monkeypatch.setattr(f"time.{clock}", lambda: 3600.0 * next(hours))
    slow = simulate(workload, "bros", **settings)
    assert slow.engines[0].decision_seconds[0] >= 3600
    same_rows(plain.rows, slow.rows)
