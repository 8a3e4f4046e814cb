"""vLLM's own engine loop in virtual time and the simulation, over a product of workloads:
`python -m twinserve.experiments.validation.emulated --cells 200 --out cells.csv`.

Cells come in a seeded order, so the first N are a fair sample. Cells that the file has are not run
again. docs/emulate.md has the result.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cyclopts
import numpy as np
import pandas as pd

from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.errors import TwinserveError
from twinserve.formats import whole_file
from twinserve.sim.cli.main import run_app
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.twin.validate_emulated import compare_emulated

WORKLOADS = (
    "azure-2023", "mooncake", "sharegpt", "lmsys", "fixed:2000,200", "apps", "tidal",
    "bursts:base=1,peak=8,every=10,length=3,duration=60", "ramp:from=1,to=8,duration=60",
    "stages:2x10/8x10/3x10", "agents:sessions=12,rate=1,turns=4",
    "vllm:request_rate=8,num_prompts=60,random_prefix_len=512,random_output_len=64",
)  # fmt: skip
POLICIES = ("vllm", "bros:chunk=fit,kv=paged", "echo", "justitia", "srjf")  # docs/systems.md
LOADS = (0.7, 1.0, 1.3)
POOLS = (0, 8)
PROFILES = (
    "llama-3.1-8b@h100", "llama-3.1-70b@h100:tp4", "qwen3-8b@l40s",
    "qwen3-30b-a3b@h200/operators", "llama-2-7b@a100-80g",
)  # fmt: skip
SCARCE = 2.5  # longest requests that fit, where memory is scarce
EVERY = 10  # cells between two states of the file


@dataclass(frozen=True)
class Cell:
    """One run. scarce: KV memory for few requests at once."""

    workload: str
    policy: str
    load: float
    pool: int
    profile: str
    asynchronous: bool
    scarce: bool

    def inputs(self, requests: int, release: str | None = None) -> Inputs:
        config = SimulationConfig(
            trace=self.workload,
            policy=(self.policy,),
            load=self.load,
            requests=max(2, requests // 4)
            if self.workload == "apps"
            else requests,  # of applications
            pool=self.pool,
            profile=self.profile,
            async_scheduling=self.asynchronous,
            slo="ttft=1,tpot=0.05",
            cap_length=self._longest(),
            host_blocks=0,
            engine_version=release,
        )
        inputs = resolve(config)
        if not self.scarce:
            return inputs
        lengths = inputs.workload.prompt_tokens + inputs.workload.output_tokens
        blocks = int(SCARCE * lengths.max()) // inputs.hardware.block_tokens + 1
        return resolve(config.model_copy(update={"num_blocks": blocks}))

    def _longest(self) -> int | None:
        return 4000 if "llama-2" in self.profile else None


def product(seed: int) -> list[Cell]:
    """All cells, in an order drawn by `seed`."""
    axes = (WORKLOADS, POLICIES, LOADS, POOLS, PROFILES, (True, False), (False, True))
    cells = [Cell(*values) for values in itertools.product(*axes)]
    return [cells[i] for i in np.random.default_rng(seed).permutation(len(cells))]


def measure(cell: Cell, requests: int) -> dict:
    """A row: steps, preemptions, largest error of a mean (%), and what differs; empty: nothing."""
    row: dict = asdict(cell)
    try:
        inputs = cell.inputs(requests, installed_vllm())
        found = compare_emulated(inputs, inputs.policies[0])
    except TwinserveError as error:
        return row | {"steps": 0, "preemptions": 0, "error_pct": 0.0, "differs": f"error: {error}"}
    worst = max(map(abs, found.errors().values()), default=0.0)
    preempted = int(found.simulated.rows.requests.recomputes.sum())
    return row | {
        "steps": found.steps[0], "preemptions": preempted, "error_pct": worst,
        "differs": found.fault,
    }  # fmt: skip


def _rows(cells: list[Cell], known: pd.DataFrame, requests: int, seconds: float) -> Iterator[dict]:
    done = {tuple(row) for row in known[list(Cell.__dataclass_fields__)].itertuples(index=False)}
    end_s = time.monotonic() + seconds
    for cell in cells:
        if time.monotonic() > end_s:
            return
        if tuple(asdict(cell).values()) not in done:
            yield measure(cell, requests)


def emulated(
    *,
    out: Path,
    cells: int = 100,
    requests: int = 24,
    seed: int = 0,
    limit: float = 36_000.0,
    part: str = "1/1",
) -> None:
    """Run cells of the product, write a row each, and print a table by workload.

    Parameters
    ----------
    out: Path
        CSV file, which grows. Its cells are not run again.
    cells: int
        How many of the product's 7,200, in the order that `seed` draws.
    requests: int
        Requests of a cell.
    seed: int
        Of the order.
    limit: float
        Begin no cell after so many seconds.
    part: str
        I/N: each N-th cell from the I-th on, for processes side by side.
    """
    first, _, step = part.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise SettingsError(f"--part {part}: write 1/2 for the first of two")
    chosen = product(seed)[:cells][int(first) - 1 :: int(step)]
    columns = [*Cell.__dataclass_fields__, "steps", "preemptions", "error_pct", "differs"]
    known = pd.DataFrame([], columns=columns)
    if out.exists():
        known = pd.read_csv(out, keep_default_na=False)
    fresh: list[dict] = []
    for row in _rows(chosen, known, requests, limit):
        fresh.append(row)
        if len(fresh) % EVERY == 0:
            _write(out, known, fresh)
    table = _write(out, known, fresh)
    print(summary(table).to_string(index=False))
    wrong = int((table.differs != "").sum())
    if wrong:
        raise LiveEngineError(f"{wrong} of {len(table)} cells differ; {out} has them")


def _write(out: Path, known: pd.DataFrame, fresh: list[dict]) -> pd.DataFrame:
    table = pd.concat([known, pd.DataFrame(fresh, columns=known.columns)], ignore_index=True)
    with whole_file(out) as partial:
        table.to_csv(partial, index=False)
    return table


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By workload: cells, steps, preemptions, cells that differ, largest error of a mean (%)."""
    named = table.assign(workload=table.workload.str.partition(":")[0], differ=table.differs.ne(""))
    found = named.groupby("workload", sort=False).agg(
        cells=("steps", "size"), steps=("steps", "sum"), preemptions=("preemptions", "sum"),
        differ=("differ", "sum"), error_pct=("error_pct", "max"),
    )  # fmt: skip
    return found.reset_index()


if __name__ == "__main__":
    app = cyclopts.App(name="emulated")
    app.default(emulated)
    run_app(app, None)
